"""Leftovers of killed submits: the next submit removes them and keeps all other files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import CLUSTERJOB, command
from launching import write_tree
from procs import TEST_TIMEOUT, wait_for_no_processes, wait_until

from clusterjob.core import jobs
from clusterjob.core.records import Records, home


@pytest.fixture
def work(tmp_path: Path, plain_python: str) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def age(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (time.time() - 4000,) * 2)


def test_submit_removes_leftovers_of_killed_submits(work: Path) -> None:
    """Each submit gets SIGKILL, each after a different time from its first write of a record."""
    (work / "train.py").write_text("import time; time.sleep(1000)\n")
    jobs_dir, records = home() / "jobs", home() / "records"
    killed = 0
    for delay in (0.0, 0.005, 0.02, 0.05):
        before = len(list(records.glob("*")))
        process = subprocess.Popen([*CLUSTERJOB, "submit", "--nodes", "4", "train.py"], cwd=work)
        wait_until(
            lambda before=before: len(list(records.glob("*"))) > before, TEST_TIMEOUT, "a record"
        )
        time.sleep(delay)
        process.kill()
        killed += process.wait(TEST_TIMEOUT) == -signal.SIGKILL
    assert killed
    for detached in jobs_dir.glob("*/detached"):  # it was submitted before the signal
        command(work, "cancel", detached.parent.name)
    wait_for_no_processes(TEST_TIMEOUT)
    (records / ".x-222222.json.abcdefgh.tmp").touch()
    (jobs_dir / "x-222222" / "logs").mkdir(parents=True)
    age(*records.iterdir(), jobs_dir / "x-222222")
    (work / "train.py").write_text("")
    command(work, "submit", "--follow", "train.py")
    recorded = {path.name for path in records.iterdir()}
    assert [name for name in recorded if name.startswith(".")] == []
    assert {f"{name}.json" for name in os.listdir(jobs_dir)} <= recorded
    jobs_shown = json.loads(command(work, "list", "--json").stdout)["jobs"]
    assert {job["state"] for job in jobs_shown} <= {"CANCELLED", "LOST", "SUCCEEDED"}


def test_files_of_other_processes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory listing on NFS can be older than the record of a queued job."""
    hidden = [".a.json.abcdefgh.tmp", ".ended.json", ".notes"]
    write_tree(home() / "records", **dict.fromkeys([*hidden, "queued-222222.json"], ""))
    kept = ["queued-222222/logs", "old-222222/logs/node0", "fresh-222222/logs"]
    for name in (*kept, "gone-222222/logs"):
        (home() / "jobs" / name).mkdir(parents=True)
    age(*(home() / "jobs" / f"{name}-222222" for name in ("queued", "old", "gone")))
    monkeypatch.setattr(Records, "entries", lambda _: [])
    jobs._remove_leftovers(Records())
    assert {*hidden} <= {*os.listdir(home() / "records")}
    names = {name.partition("/")[0] for name in kept}
    assert {*os.listdir(home() / "jobs")} == names
