"""Disks that are full or read-only: an error that says so, exit code 1, and nothing half-recorded.
Real file systems, as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from procs import PATIENCE, kill_one_by_one, own_marked, wait_until

import clusterjob
from clusterjob.core import jobs
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import RecordError
from clusterjob.node.logs import ends
from clusterjob.node.program import Program
from clusterjob.node.system import files
from clusterjob.node.verdict import Failure, JobState, Verdict

PAGE = 4096  # bytes; a tmpfs counts in pages
PROMPT = 15.0  # seconds; many times what a job needs to end, for two cores that others keep busy
PACKAGE = str(Path(clusterjob.__file__).parent)
Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a small file system in memory; all are unmounted at the end,
    come what may.
    """
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a file system takes root")
    mounted: list[Path] = []

    def make(options: str, at: Path | None = None) -> Path:
        path = at or tmp_path / f"disk{len(mounted)}"
        path.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    try:
        yield make
    finally:
        with contextlib.suppress(AssertionError):
            wait_until(lambda: not own_marked(), PROMPT)
        kill_one_by_one(own_marked())
        for path in reversed(mounted):
            if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode:
                subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def fill(directory: Path, leave: int) -> None:
    """Fill a file system but for so many bytes; one that is to be full is so, whatever a job writes
    there meanwhile.
    """
    status = os.statvfs(directory)
    with (directory / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
        stream.write(b"x" * (status.f_bavail * status.f_frsize - leave))
        while leave == 0:
            stream.write(b"x" * PAGE)


def remount(directory: Path, option: str) -> None:
    subprocess.run(
        ["mount", "-o", f"remount,{option}", str(directory)], check=True, capture_output=True
    )


def files_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a script, and an interpreter for jobs that starts at once: it finds
    no torch to import.
    """
    directory = tmp_path / "work"
    directory.mkdir()
    python = directory / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("CLUSTERJOB_PYTHON", str(python))
    (directory / "script.py").write_text("print('hello')\n")
    return directory


def run(work: Path, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end; whatever happens, no traceback of ours is shown."""
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "cwd": work,
        **options,
    }
    command = [sys.executable, "-m", "clusterjob", *args]
    done = subprocess.run(command, text=True, timeout=PATIENCE, check=False, **options)
    assert PACKAGE not in (done.stderr or ""), done.stderr
    return done


def refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    """Fail the test unless a command was refused by one line that gives the reason."""
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    first, *hints = done.stderr.splitlines()
    assert first.startswith("clusterjob: error: ")
    assert reason in first
    assert all(hint.startswith("  hint: ") for hint in hints)


# -- submitting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["submit", "run"])
@pytest.mark.parametrize("space", [0, PAGE, 16 * PAGE])
def test_a_full_disk_is_said_and_nothing_is_left(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch, verb: str, space: int
) -> None:
    """Not even the first file fits, or the token and spec.json do, or not the node zip."""
    disk = mount("size=64k")
    fill(disk, space)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk / "home"))
    refused(run(work, verb, "script.py"), "No space left on device")
    assert [
        name
        for name in files_in(disk)
        if name not in ("filler", "home", "home/jobs", "home/records")
    ] == []
    assert json.loads(run(work, "list", "--json").stdout)["jobs"] == []
    assert own_marked() == []


def test_a_disk_without_inodes_is_said_and_nothing_is_left(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=1m,nr_inodes=8")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    refused(run(work, "submit", "script.py"), "No space left on device")
    assert [name for name in files_in(disk) if name not in ("jobs", "records")] == []


def test_a_read_only_disk_is_said_and_nothing_is_left(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=1m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk / "home"))
    remount(disk, "ro")
    refused(run(work, "submit", "script.py"), "Read-only file system")
    assert files_in(disk) == []
    assert run(work, "list").returncode == 0


def test_a_directory_that_may_not_be_changed_is_said(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root minds no mode bits; the immutable flag stops even root."""
    home = tmp_path / "immutable"
    home.mkdir()
    if (
        not shutil.which("chattr")
        or subprocess.run(["chattr", "+i", str(home)], capture_output=True, check=False).returncode
    ):
        pytest.skip("no chattr +i here")
    try:
        monkeypatch.setenv("CLUSTERJOB_HOME", str(home))
        refused(run(work, "submit", "script.py"), "Operation not permitted")
        assert files_in(home) == []
    finally:
        subprocess.run(["chattr", "-i", str(home)], check=True)


def test_a_home_that_is_a_file_is_said(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path / "file"))
    for verb in ("submit", "run"):
        done = run(work, verb, "script.py")
        refused(done, "Not a directory")
        assert "CLUSTERJOB_HOME" in done.stderr
    assert run(work, "list").returncode in (0, 1)


@pytest.mark.parametrize("option", ["size=4k", "size=64k,nr_inodes=1", "ro"])
def test_records_that_cannot_be_written_are_said_and_the_job_is_not_there(
    mount: Mount, work: Path, option: str
) -> None:
    """The job's directory was written by then, on another disk."""
    home = Path(os.environ["CLUSTERJOB_HOME"])
    disk = mount("size=64k" if option == "ro" else option, home / "records")
    if option == "ro":
        remount(disk, "ro")
    elif "inodes" not in option:
        fill(disk, 0)
    before = files_in(disk)
    refused(
        run(work, "submit", "script.py"),
        "Read-only file system" if option == "ro" else "No space left on device",
    )
    assert files_in(disk) == before
    assert files_in(home / "jobs") == []
    assert own_marked() == []


def test_a_disk_that_is_full_once_the_agents_run_ends_them(mount: Mount, work: Path) -> None:
    """The intent fits on it, the handle does not: nobody could ask for the job, so it must not be
    left running.
    """
    home = Path(os.environ["CLUSTERJOB_HOME"])
    disk = mount(f"size={2 * PAGE}", home / "records")
    fill(disk, PAGE)
    settings = jobs.settle({"setup": "sleep 1000"}, "local", directory=work)
    plan = jobs.plan(
        jobs.make_spec(Program("script", "script.py"), settings, directory=work), settings
    )
    with pytest.raises(RecordError, match="No space left"):
        jobs.submit(plan, "local", detach=True)
    assert files_in(disk) == ["filler"]
    assert not plan.job_dir.exists()
    wait_until(lambda: not own_marked(), PROMPT, "the end of the agents")
    assert not plan.job_dir.exists(), "an agent that was still there made it again"


# -- a job whose disk becomes full -------------------------------------------------------------------------------------


def test_output_that_fills_the_disk_costs_its_end_and_no_more(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker learns of it as of any full disk; what was written can be shown; no verdict is no
    success.
    """
    disk = mount("size=512k")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(
        textwrap.dedent("""
            import sys
            try:
                for number in range(10**6):
                    print("line", number)
            except OSError as error:
                sys.exit(error.errno)
        """)
    )
    done = run(work, "run", "--start", "exec", "script.py")
    assert done.returncode != 0
    assert done.stdout.startswith("line 0\nline 1\n")
    wait_until(lambda: not own_marked(), PROMPT, "the end of the agents")
    [job] = json.loads(run(work, "list", "--json").stdout)["jobs"]
    assert job["state"] in ("FAILED", "LOST")
    assert run(work, "logs", job["id"]).stdout.startswith("line 0\nline 1\n")
    assert run(work, "wait", job["id"]).returncode != 0


def test_a_disk_that_others_fill_and_empty_again_costs_a_job_nothing(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Notes on how far the output had grown are lost meanwhile, the output's order perhaps, no line
    and not the verdict.
    """
    disk = mount("size=1m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(
        textwrap.dedent("""
            import os, time
            print("before")
            for name in ("full", "empty"):
                open(f"up-{name}{os.environ['RANK']}", "w").close()
                while not os.path.exists(name):
                    time.sleep(0.01)
            print("after")
        """)
    )
    job_id = run(work, "submit", "--nodes", "2", "script.py").stdout.strip()
    wait_until(lambda: (work / "up-full0").exists() and (work / "up-full1").exists(), PATIENCE)
    fill(disk, 0)
    (work / "full").touch()
    wait_until(lambda: (work / "up-empty0").exists() and (work / "up-empty1").exists(), PATIENCE)
    assert json.loads(run(work, "status", "--json", job_id).stdout)["jobs"][0]["state"] == "RUNNING"
    assert "before" in run(work, "logs", job_id).stdout
    (disk / "filler").unlink()
    (work / "empty").touch()
    done = run(work, "wait", job_id)
    assert done.returncode == 0, done.stderr
    assert sorted(run(work, "logs", "--rank", "1", job_id).stdout.splitlines()) == [
        "[1] after",
        "[1] before",
    ]


LEAVING = """
import os, sys, time
open("up" + os.environ["RANK"], "w").close()
while not os.path.exists("leave"):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(1000)
"""
FAULTS = {"full": "size=2m", "no inodes": "size=2m,nr_inodes=100", "read-only": "size=2m"}


@pytest.mark.parametrize("verb", ["submit", "run"])
@pytest.mark.parametrize("fault", FAULTS)
def test_verdict_survives_a_broken_disk(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch, fault: str, verb: str
) -> None:
    """Rank 1 ends with 3 once nothing can be written any more."""
    disk = mount(FAULTS[fault])
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(LEAVING)
    options = ("--nodes", "2", "script.py")
    if verb == "submit":
        job_id = run(work, "submit", *options).stdout.strip()
        follow = [sys.executable, "-m", "clusterjob", "wait", job_id]
    else:
        follow = [sys.executable, "-m", "clusterjob", "run", *options]
    with (work / "out").open("wb") as out:
        following = subprocess.Popen(
            follow, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    wait_until(lambda: (work / "up0").exists() and (work / "up1").exists(), PATIENCE)
    break_disk(disk, fault)
    (work / "leave").touch()
    try:
        assert following.wait(PATIENCE) == 3, (work / "out").read_text()
        said = (work / "out").read_text()
        assert "FAILED: rank 1 " in said
        assert ("Read-only file system" in said) == (fault == "read-only")
        wait_until(lambda: not own_marked(), PROMPT, "the end of the agents")
    finally:
        if fault == "read-only":
            subprocess.run(["umount", "-l", str(disk)], check=True)
    [job] = json.loads(run(work, "list", "--json").stdout)["jobs"]
    assert (job["state"], job["exit_code"]) == ("FAILED", 3)
    ends._aside(Path(job["job_dir"])).unlink(missing_ok=True)
    assert list(disk.rglob(".*.reserve")) == [] or fault == "read-only"


def break_disk(disk: Path, fault: str) -> None:
    """Leave no byte, no inode, or no right to write."""
    if fault == "full":
        fill(disk, 0)
    elif fault == "no inodes":
        with contextlib.suppress(OSError):
            for number in range(1000):
                (disk / f"filler{number}").touch()
    else:
        # Files of the workers are open for writing, so it cannot be remounted: it is mounted once
        # more, read-only, on itself.
        for words in (["--bind", str(disk), str(disk)], ["-o", "remount,bind,ro", str(disk)]):
            subprocess.run(["mount", *words], check=True, capture_output=True)


def test_lost_job_on_a_full_disk_says_so(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=2m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(LEAVING)
    job_id = run(work, "submit", "script.py").stdout.strip()
    wait_until((work / "up0").exists, PATIENCE)
    for path in disk.rglob(".*.reserve"):
        path.unlink()
    fill(disk, 0)
    kill_one_by_one(own_marked())
    done = run(work, "wait", job_id)
    assert done.returncode == 1
    assert "LOST" in done.stderr
    assert f"the disk of {disk / 'jobs' / job_id} is full" in done.stderr


def test_large_verdict_fits_into_what_is_reserved(mount: Mount) -> None:
    disk = mount("size=256k")
    (disk / "ends").mkdir()
    ends.reserve(disk, 0)
    fill(disk, 0)
    many = tuple(
        Failure(rank, rank, node_rank=0, host="h", exit_code=1, signal=None, message="x" * 200)
        for rank in range(1, 500)
    )
    failure = Failure(
        0,
        0,
        node_rank=0,
        host="h",
        exit_code=7,
        signal=None,
        message="m" * 9000,
        last_lines=("l" * 3000,) * 30,
    )
    ends.write_result(
        disk, Verdict(JobState.FAILED, 7, reason="r" * 9000, failure=failure, consequences=many)
    )
    ends.write(disk, 0, end={"state": "FAILED", "reason": "x"})
    found = ends.read_result(disk)
    assert found is not None
    assert found.failure is not None
    assert (found.exit_code, found.failure.rank, len(found.failure.last_lines)) == (7, 0, 20)
    assert [end["reason"] for end in ends.written(disk)] == ["x"]


def test_cancel_works_on_a_full_disk(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=1m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(
        "import os, time\nopen('up' + os.environ['RANK'], 'w').close()\ntime.sleep(1000)\n"
    )
    job_id = run(work, "submit", "--nodes", "2", "script.py").stdout.strip()
    wait_until(lambda: (work / "up0").exists() and (work / "up1").exists(), PATIENCE)
    fill(disk, 0)
    done = run(work, "cancel", job_id)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not own_marked(), PROMPT, "the end of the agents")
    assert json.loads(run(work, "status", "--json", job_id).stdout)["jobs"][0]["state"] in (
        "CANCELLED",
        "LOST",
    )


def test_ctrl_c_ends_a_run_on_a_full_disk(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=1m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text("import time\nopen('up', 'w').close()\ntime.sleep(1000)\n")
    command = [sys.executable, "-m", "clusterjob", "run", "script.py"]
    with (work / "out").open("wb") as out:
        running = subprocess.Popen(
            command, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    wait_until((work / "up").exists, PATIENCE)
    fill(disk, 0)
    running.send_signal(signal.SIGINT)
    assert running.wait(PATIENCE) == 130
    assert PACKAGE not in (work / "out").read_text()
    wait_until(lambda: not own_marked(), PROMPT, "the end of the agents")


# -- files that are whole or absent ------------------------------------------------------------------------------------


def test_what_was_there_stays_when_the_new_does_not_fit(mount: Mount) -> None:
    disk = mount("size=64k")
    path = disk / "file.json"
    files.write_json(path, {"old": True})
    fill(disk, 0)
    with pytest.raises(OSError, match="No space left"):
        files.write_json(path, {"new": "x" * PAGE})
    assert files.read_json(path) == {"old": True}
    assert files_in(disk) == ["file.json", "filler"]


def test_the_end_of_a_job_that_cannot_be_noted_is_told_all_the_same(
    mount: Mount, work: Path
) -> None:
    home = Path(os.environ["CLUSTERJOB_HOME"])
    disk = mount("size=64k", home / "records")
    job_dir = work / "job"
    job_dir.mkdir()
    handle = Handle(
        "local", "x-222222", data={"agents": [], "boot_id": "b", "host": os.uname().nodename}
    )
    record = Record(
        "x-222222",
        "x",
        cluster="local",
        backend="local",
        job_dir=job_dir,
        nodes=1,
        submitted_at="2026-01-01T00:00:00.000Z",
        spec={},
        handle=handle,
    )
    Records().save(record)
    fill(disk, 0)
    assert jobs.status(record).state is JobState.LOST
    assert Records().find(record.job_id).end is None


@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["list", "--json"],
        ["status", "--json"],
        ["render", "script.py"],
        ["--help"],
        ["submit", "script.py"],
    ],
)
def test_results_that_cannot_be_written_are_an_error(work: Path, args: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = run(work, *args, stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("clusterjob: error: No space left on device")
    wait_until(lambda: not own_marked(), PATIENCE, "the end of what was started")
