"""`clusterjob report` of real local jobs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from commands import command
from docs_commands import SESSIONS
from procs import wait_until

from clusterjob.core.records import Records
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
    words = ("--nodes", "2", "--nproc-per-node", "2", "--secret", "SECRET_KEY", "train.py")
    job_id = command(tmp_path, "submit", "--cluster", "local", *words).stdout.strip()
    logs = Records().find(job_id).job_dir / "logs"
    wait_until(lambda: len(list(logs.glob("node*/metrics.jsonl"))) == 2, 60.0)
    wait_until(lambda: (logs / "node1/rank3.out").stat().st_size > 0, 60.0)

    # While it runs: a snapshot with the stacks of this moment.
    text = command(tmp_path, "report", job_id, "-o", "-").stdout
    for part in ("The job has not ended", "wait_for_end (", "&lt;b&gt;step&lt;/b&gt;"):
        assert part in text

    (tmp_path / "end").touch()
    command(tmp_path, "wait", job_id, code=1)
    [session] = [each for each in SESSIONS if "test_report_command" in each.runner]
    [shown] = session.commands
    words = shlex.split(shown.replace("train-e7trvw", job_id))[1:]
    assert command(tmp_path, *words).stdout == f"{job_id}.html\n"
    path = tmp_path / f"{job_id}.html"
    assert path.stat().st_mode & 0o777 == 0o600
    text = path.read_text()
    assert "ValueError: &lt;i&gt;boom&lt;/i&gt;" in text
    assert "topsecretvalue" not in text

    # The same command replaces its file, and no other file.
    assert command(tmp_path, "report", job_id).stdout == f"{job_id}.html\n"
    (tmp_path / "mine.html").write_text("mine")
    for place, error in (
        ("mine.html", "this command did not write it"),
        ("absent/x.html", f"x.html: there is no directory {tmp_path / 'absent'}"),
        (os.devnull, ""),
    ):
        assert error in command(tmp_path, "report", job_id, "-o", place, code=2).stderr
    assert (tmp_path / "mine.html").read_text() == "mine"
    (tmp_path / "reports").mkdir()
    command(tmp_path, "report", job_id, "-o", "reports")
    assert page.MARK in (tmp_path / f"reports/{job_id}.html").read_text()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(f".{job_id}")]
