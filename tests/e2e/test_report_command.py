"""`clusterjob report` of real local jobs."""

from __future__ import annotations

import os
import re
import shlex
import time
from pathlib import Path

import pytest
from commands import command
from docs_commands import SESSIONS
from procs import wait_until

from clusterjob.core.records import Records
from clusterjob.insight.job_clock import JobClock, read_phases_of
from clusterjob.insight.report import page

SCRIPT = """
import os, pathlib, time

def wait_for_end():
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not pathlib.Path("end").exists():
        time.sleep(0.05)

print("<b>step</b>", os.environ["SECRET_KEY"][:0], flush=True)
wait_for_end()
if os.environ["RANK"] == "3":
    raise ValueError("<i>boom</i>")
time.sleep(100)
"""


def test_report_of_a_job_that_runs_and_has_failed(
    tmp_path: Path, plain_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "topsecretvalue")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "2")
    words += ("--secret", "SECRET_KEY")
    job_id = command(tmp_path, "submit", *words, "train.py").stdout.split()[-1]
    logs = Records().find(job_id).job_dir / "logs"
    wait_until(lambda: all((logs / f"node{node}/metrics.jsonl").exists() for node in (0, 1)), 60.0)
    wait_until(lambda: (logs / "node1/rank3.out").stat().st_size > 0, 60.0)

    # While it runs: a snapshot with the stacks of this moment.
    text = command(tmp_path, "report", job_id, "-o", "-").stdout
    assert "The job has not ended" in text
    assert "wait_for_end (" in text
    assert "&lt;b&gt;step&lt;/b&gt;" in text

    (tmp_path / "end").touch()
    command(tmp_path, "wait", job_id, code=1)
    [session] = [each for each in SESSIONS if "test_report_command" in each.runner]
    [shown] = session.commands
    words = shlex.split(shown.replace("train-e7trvw", job_id))[1:]
    assert command(tmp_path, *words).stdout == f"{job_id}.html\n"
    path = tmp_path / f"{job_id}.html"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert text.index("✕ FAILED") < text.index('id="timeline"')
    assert "rank 3 (node 1, local rank 1, host" in text
    assert "ValueError: &lt;i&gt;boom&lt;/i&gt;" in text
    assert text.count('class="hit"') == 4
    assert "CLUSTERJOB_NODE_RANK" in text  # the evidence of the environment
    assert "as it was rendered" in text
    assert "SECRET_KEY" in text
    assert "topsecretvalue" not in text
    # All ranks of both nodes form one picture: no row begins or ends far from the others.
    rows = re.findall(
        r"M[\d.]+ ([\d.]+)h", text[text.index('class="p-running" stroke-width="18"') :]
    )
    assert len({*rows[:4]}) == 4

    # The same command replaces its file, and no other file.
    assert command(tmp_path, "report", job_id).stdout == f"{job_id}.html\n"
    (tmp_path / "mine.html").write_text("mine")
    refused = command(tmp_path, "report", job_id, "-o", "mine.html", code=2)
    assert "this command did not write it" in refused.stderr
    refused = command(tmp_path, "report", job_id, "-o", "absent/x.html", code=2)
    assert f"x.html: there is no directory {tmp_path / 'absent'}" in refused.stderr
    command(tmp_path, "report", job_id, "-o", os.devnull, code=2)
    assert not Path(os.devnull).is_file()
    assert (tmp_path / "mine.html").read_text() == "mine"
    assert page.MARK in path.read_text()
    (tmp_path / "reports").mkdir()
    command(tmp_path, "report", job_id, "-o", "reports")
    assert page.MARK in (tmp_path / f"reports/{job_id}.html").read_text()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(f".{job_id}")]


@pytest.mark.slow
def test_clocks_of_nodes_are_aligned_where_ranks_form_their_group(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "import torch.distributed\n"
        "time.sleep(3 * (os.environ['RANK'] == '1'))\n"
        "torch.distributed.init_process_group('gloo')\n"
        "time.sleep(1)\n"
    )
    words = ("--cluster", "local", "--nodes", "2", "--nproc-per-node", "1", "train.py")
    job_id = command(tmp_path, "submit", *words).stdout.split()[-1]
    command(tmp_path, "wait", job_id)
    job_dir = Records().find(job_id).job_dir
    clock = JobClock(read_phases_of(job_dir, [0, 1]), [])
    # Both nodes are this machine: their clocks are equal.
    begin = time.monotonic()
    assert abs(clock.place(0, 0, begin) - clock.place(1, 0, begin)) < 0.5  # measured: 3 ms
    assert not clock.unaligned
