"""Metrics, stacks and the flight recorder of jobs on real GPUs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from gpu_jobs import SCRIPTS, clusterjob
from procs import TEST_TIMEOUT, wait_until

from clusterjob.insight import sample_files

_FIELDS = {
    "use": "utilization.gpu",
    "memory": "memory.used",
    "power": "power.draw",
    "temperature": "temperature.gpu",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
}
# Values that are small or change while two programs read them: absolute differences.
_ABSOLUTE = {"use": 5.0, "temperature": 3.0}
_WATCHED = 30.0  # seconds


@contextlib.contextmanager
def submitted(name: str, directory: Path, said: str) -> Iterator[tuple[str, Path]]:
    """Submit a script with one GPU, wait for a line of its output; cancel it at the end."""
    words = ("submit", "--cluster", "local", "--gpus-per-node", "1", str(SCRIPTS / name))
    job_id = clusterjob(*words, cwd=directory).stdout.strip()
    try:
        job_dir = Path(clusterjob("open", job_id, cwd=directory).stdout.strip())
        log = job_dir / "logs/node0/rank0.out"
        wait_until(lambda: log.exists() and said in log.read_text(), 3 * TEST_TIMEOUT, said)
        yield job_id, job_dir
    finally:
        clusterjob("cancel", job_id, cwd=directory)
        wait_until(lambda: _state(job_id, directory) != "RUNNING", TEST_TIMEOUT, "the end")


def _state(job_id: str, directory: Path) -> str:
    shown = clusterjob("status", job_id, "--json", cwd=directory).stdout
    return json.loads(shown)["jobs"][0]["state"]


def _smi(uuid: str) -> dict[str, float]:
    """Return the values of a GPU from nvidia-smi, in the units of a sample."""
    done = subprocess.run(
        [
            "nvidia-smi",
            f"--id={uuid}",
            f"--query-gpu={','.join(_FIELDS.values())}",
            "--format=csv,noheader,nounits",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    values = {}
    for name, text in zip(_FIELDS, done.stdout.strip().split(","), strict=True):
        with contextlib.suppress(ValueError):  # [N/A]
            values[name] = float(text) * (1 << 20 if name == "memory" else 1)
    return values


def test_metrics_agree_with_nvidia_smi(tmp_path: Path) -> None:
    with submitted("busy.py", tmp_path, "busy") as (job_id, job_dir):
        facts, first = wait_until(
            lambda: sample_files.latest(job_dir, 0), TEST_TIMEOUT, "a sample of the node"
        )
        assert len(facts.gpus) == len(first.gpus) == 1
        total = subprocess.run(
            [
                *("nvidia-smi", f"--id={facts.gpus[0].uuid}", "--query-gpu=memory.total,name"),
                "--format=csv,noheader,nounits",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        memory, _, name = total.partition(", ")
        assert facts.gpus[0].name == name
        assert facts.gpus[0].memory == pytest.approx(float(memory) * (1 << 20), rel=0.05)
        theirs: dict[str, list[float]] = {}
        time.sleep(10)  # until the clocks have settled
        begin = time.monotonic()
        while time.monotonic() - begin < _WATCHED:
            for field, value in _smi(facts.gpus[0].uuid).items():
                theirs.setdefault(field, []).append(value)
            time.sleep(0.5)
        shown = json.loads(clusterjob("metrics", job_id, "--json", cwd=tmp_path).stdout)
        assert shown["schema"] == 1
        ours = [
            sample.gpus[0]
            for _, sample in sample_files.read(job_dir, 0)
            if begin <= sample.monotonic <= begin + _WATCHED
        ]
        assert len(ours) >= 4
        report = {}
        for field, values in theirs.items():
            own = fmean(getattr(sample, field) for sample in ours)
            report[field] = (own, fmean(values))
        print(report)
        for field, (own, other) in report.items():
            tolerance = {"abs": _ABSOLUTE[field]} if field in _ABSOLUTE else {"rel": 0.05}
            assert own == pytest.approx(other, **tolerance), (field, report)
        assert report["use"][0] > 90
        assert report["memory"][0] > 2 << 30


def test_stacks_show_a_rank_that_waits_for_a_kernel(tmp_path: Path) -> None:
    with submitted("long_kernel.py", tmp_path, "in the kernel") as (job_id, job_dir):
        begin = time.monotonic()
        shown = json.loads(clusterjob("stacks", job_id, "--json", cwd=tmp_path).stdout)
        assert time.monotonic() - begin < TEST_TIMEOUT
        rank = shown["ranks"][0]
        functions = [frame["function"] for frame in rank["threads"][0]["frames"]]
        assert rank["answered"], rank
        assert functions[0] == "synchronize"
        assert "wait_for_kernel" in functions
        log = job_dir / "logs/node0/rank0.out"
        assert "the kernel has ended" not in log.read_text()  # it was in the kernel
        wait_until(lambda: "the kernel has ended" in log.read_text(), TEST_TIMEOUT, "its end")


def test_flight_recorder_is_saved_with_the_stacks(tmp_path: Path) -> None:
    with submitted("endless.py", tmp_path, "waiting") as (job_id, job_dir):
        clusterjob("cancel", "--stacks", job_id, cwd=tmp_path)
        wait_until(lambda: _state(job_id, tmp_path) == "CANCELLED", TEST_TIMEOUT, "the cancel")
        logs = job_dir / "logs/node0"
        assert "endless.py" in (logs / "stacks.txt").read_text()
        dump = (logs / "flight_recorder.rank0").read_bytes()
        # torch's own format; the name of a collective is in it as text.
        assert b"all_reduce" in dump
