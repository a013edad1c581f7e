"""Leftovers of killed submits: the next submit removes them and keeps all other files."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from procs import TEST_TIMEOUT, wait_until

from clusterjob.core import jobs
from clusterjob.core.records import Records


def submit(work: Path) -> str:
    done = subprocess.run(
        [*CLUSTERJOB, "submit", "train.py"],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for_success(work: Path, job_id: str) -> None:
    assert (
        subprocess.run(
            [*CLUSTERJOB, "wait", job_id],
            cwd=work,
            capture_output=True,
            timeout=TEST_TIMEOUT,
            check=False,
        ).returncode
        == 0
    )


@pytest.fixture
def work(tmp_path: Path, plain_python: str) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def test_submit_removes_leftovers_of_killed_submits(work: Path) -> None:
    """Each submit gets SIGKILL, each after a different time from its first write of a record."""
    home = Path(os.environ["CLUSTERJOB_HOME"])
    killed = 0
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        process = subprocess.Popen(
            [*CLUSTERJOB, "submit", "train.py"],
            cwd=work,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        before = set(os.listdir(home / "records")) if (home / "records").exists() else set()
        wait_until(
            lambda process=process, before=before: (
                process.poll() is not None
                or ((home / "records").exists() and set(os.listdir(home / "records")) - before)
            ),
            TEST_TIMEOUT,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        killed += process.wait(TEST_TIMEOUT) == -signal.SIGKILL
    assert killed
    (home / "records" / ".x-222222.json.abcdefgh.tmp").touch()
    for name in os.listdir(home / "records"):
        os.utime(home / "records" / name, (time.time() - 4000,) * 2)
    (home / "jobs" / "x-222222" / "logs").mkdir(parents=True)
    os.utime(home / "jobs" / "x-222222", (time.time() - 4000,) * 2)
    wait_for_success(work, submit(work))
    records = os.listdir(home / "records")
    assert [name for name in records if name.startswith(".")] == []
    assert sorted(os.listdir(home / "jobs")) == sorted(
        name.removesuffix(".json")
        for name in records
        if (home / "jobs" / name.removesuffix(".json")).exists()
    )
    listed = subprocess.run(
        [*CLUSTERJOB, "list"], capture_output=True, text=True, timeout=TEST_TIMEOUT, check=False
    )
    assert "PENDING" not in listed.stdout


def test_submit_keeps_files_of_other_processes(work: Path) -> None:
    home = Path(os.environ["CLUSTERJOB_HOME"])
    (home / "records").mkdir(parents=True)
    kept = [".a.json.abcdefgh.tmp", ".ended.json", ".notes"]
    for name in kept:
        (home / "records" / name).touch()
    (home / "jobs" / "old-222222" / "logs" / "node0").mkdir(parents=True)
    os.utime(home / "jobs" / "old-222222", (time.time() - 4000,) * 2)
    (home / "jobs" / "fresh-222222" / "logs").mkdir(parents=True)
    wait_for_success(work, submit(work))
    assert sorted(name for name in os.listdir(home / "records") if name.startswith(".")) == sorted(
        kept
    )
    assert (home / "jobs" / "old-222222").is_dir()
    assert (home / "jobs" / "fresh-222222").is_dir()


def test_job_directory_with_unlisted_record_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory listing on NFS can be older than the record of a queued job."""
    home = Path(os.environ["CLUSTERJOB_HOME"])
    records = Records()
    records.directory.mkdir(parents=True)
    (records.directory / "queued-222222.json").touch()
    for name in ("queued-222222", "gone-222222"):
        (home / "jobs" / name / "logs").mkdir(parents=True)
        os.utime(home / "jobs" / name, (time.time() - 4000,) * 2)
    monkeypatch.setattr(Records, "entries", lambda _: [])
    jobs._remove_leftovers(records)
    assert os.listdir(home / "jobs") == ["queued-222222"]


def test_temporary_files_are_removed_after_one_hour(tmp_path: Path) -> None:
    path = tmp_path / ".a.json.abcdefgh.tmp"
    path.touch()
    jobs._remove_temporary_files(tmp_path)
    assert path.exists()
    os.utime(path, (time.time() - 4000,) * 2)
    jobs._remove_temporary_files(tmp_path)
    assert not path.exists()
