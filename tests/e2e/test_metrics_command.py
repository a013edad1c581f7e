"""`clusterjob metrics`, and the efficiency in `status` and `list`, of real local jobs."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from commands import command
from procs import wait_until

from clusterjob.core.records import Records

SCRIPT = """
import os, pathlib, time
if os.environ["RANK"] == "1":
    data = bytearray(200 << 20); data[::4096] = b"x" * len(data[::4096])
end = time.monotonic() + 200
while time.monotonic() < end and not pathlib.Path("end").exists():
    if os.environ["RANK"] == "0": sum(range(100_000))
    else: time.sleep(0.1)
"""


def in_json(*words: str, directory: Path) -> dict[str, Any]:
    return json.loads(command(directory, *words, "--json").stdout)


def test_metrics_and_efficiency_of_a_job_that_runs_and_has_ended(
    tmp_path: Path, plain_python: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--nodes", "2", "--nproc-per-node", "2", "--mem", "64G", "train.py")
    job_id = command(tmp_path, "submit", "--cluster", "local", *words).stdout.strip()
    directory = Records().find(job_id).job_dir

    def sampled() -> bool:
        files = list(directory.glob("logs/node*/metrics.jsonl"))
        return len(files) == 2 and all(file.read_text().count("\n") > 3 for file in files)

    wait_until(sampled, 60.0)
    # While it runs.
    rows = [line.split() for line in command(tmp_path, "metrics", job_id).stdout.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [str(node), os.uname().nodename, what]
        for node in (0, 1)
        for what in ("node", "rank", "rank")
    ]
    assert [row[3] for row in rows if row[2] == "rank"] == ["0", "1", "2", "3"]
    found = in_json("metrics", job_id, directory=tmp_path)
    assert [node["node_rank"] for node in found["nodes"]] == [0, 1]
    busy, idle = found["nodes"][0]["samples"][-1]["workers"]
    assert busy["cpu"] > idle["cpu"]
    assert idle["rss"] > 200 << 20
    chosen = in_json("metrics", job_id, "--node", "1", "--rank", "3", directory=tmp_path)
    samples = [one for node in chosen["nodes"] for one in node["samples"]]
    assert {worker["rank"] for one in samples for worker in one["workers"]} == {3}
    recent = in_json("metrics", job_id, "--since", "1s", directory=tmp_path)
    assert [len(node["samples"]) for node in recent["nodes"]] == [1, 1]
    text = command(tmp_path, "metrics", job_id, "--csv").stdout
    assert {row["kind"] for row in csv.DictReader(io.StringIO(text))} == {"node", "rank"}
    assert "efficiency: wall" in command(tmp_path, "status", job_id).stdout  # so far
    # Errors that a user can make.
    for words, error in {
        ("--node", "2"): f"job {job_id} has no node 2",
        ("--rank", "9"): f"job {job_id} has no rank 9",
        ("--since", "soon"): "--since 'soon' is not a duration",
        ("--json", "--csv"): "--csv and --json are both given",
    }.items():
        assert error in command(tmp_path, "metrics", job_id, *words, code=2).stderr
    (tmp_path / "end").touch()
    command(tmp_path, "wait", job_id)
    # When it has ended.
    assert "slowest: rank 0" in command(tmp_path, "status", job_id).stdout
    (job,) = in_json("status", job_id, directory=tmp_path)["jobs"]
    used = job["efficiency"]
    assert used["nodes"][0]["memory_peak"] > 200 << 20
    assert used["wall_seconds"] > used["startup_seconds"]
    listed = command(tmp_path, "list", "--efficiency").stdout.splitlines()
    assert listed[0].split()[-7:] == ["CPU", "CORES", "MEMORY", "GPU", "GPU-HOURS", "IDLE", "LOST"]
    assert in_json("list", "--efficiency", directory=tmp_path)["jobs"][0]["efficiency"] == used
    # A node without samples.
    (directory / "logs/node1/metrics.jsonl").unlink()
    done = command(tmp_path, "metrics", job_id)
    assert done.stderr == "clusterjob: node 1 has no metrics: no samples of it have arrived\n"
    # The last sample of node 0 may have come after its ranks had ended.
    assert {line.split()[0] for line in done.stdout.splitlines()[1:]} == {"0"}


@pytest.mark.usefixtures("plain_python")
def test_job_without_metrics_gives_one_line_with_the_reason(tmp_path: Path) -> None:
    words = ("--cluster", "local", "--name", "plain", "--no-metrics", "--", "true")
    command(tmp_path, "run", *words)
    job_id = Records().find("plain").job_id
    assert command(tmp_path, "metrics", code=1).stderr.splitlines() == [
        f"clusterjob: job {job_id}",
        f"clusterjob: error: job {job_id} has no metrics: it was submitted with --no-metrics",
    ]
    path = Records().directory / f"{job_id}.json"
    record = json.loads(path.read_text())
    spec = record["spec"]
    older = {name: value for name, value in spec.items() if name != "metrics"}
    for changed, why in (
        (spec | {"metrics": True, "launcher": "srun"}, "srun starts its workers without an agent"),
        (older, "a version of clusterjob without metrics submitted it"),
    ):
        path.write_text(json.dumps(record | {"spec": changed}))
        assert why in command(tmp_path, "metrics", job_id, code=1).stderr
