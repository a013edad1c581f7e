"""Full and read-only disks: a clear error, exit code 1, and no partial record.

The tests mount real file systems as root.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import CLUSTERJOB, command
from launching import new_folder, write_tree
from procs import TEST_TIMEOUT, Job, kill_all, own_processes, wait_for_no_processes, wait_until

from clusterjob.core import job_settings, jobs
from clusterjob.errors import RecordError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import read_job_events
from clusterjob.node.program import Program
from clusterjob.node.verdict import Failure, JobState, Verdict

PAGE = 4096  # bytes; a tmpfs counts in pages
PROMPT = 15.0  # seconds; many times what a job needs to end on two busy cores
Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return a function that mounts a small file system in memory.

    All of them are unmounted at the end, even if the test fails.
    """
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("only root can mount a file system")
    mounted: list[Path] = []

    def make(options: str, at: Path | None = None) -> Path:
        path = new_folder(at or tmp_path / f"disk{len(mounted)}")
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    try:
        yield make
    finally:
        try:
            wait_for_no_processes(PROMPT)
        finally:
            kill_all(own_processes())
            for path in reversed(mounted):
                command = ["umount", str(path)]
                if subprocess.run(command, capture_output=True, check=False).returncode:
                    subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


def fill(directory: Path, leave: int) -> None:
    """Fill a file system except for `leave` bytes.

    With ``leave=0`` it stays full, even if a job frees space.
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
def work(tmp_path: Path, plain_python: str) -> Path:
    """Return a directory with a script; the interpreter of jobs has no torch to import."""
    write_tree(tmp_path / "work", **{"script.py": "print('hello')\n"})
    return tmp_path / "work"


def check_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    """Fail unless the command was refused with one error line that contains the reason."""
    assert done.stdout == ""
    first, *hints = done.stderr.splitlines()
    assert first.startswith("clusterjob: error: ")
    assert reason in first
    assert all(hint.startswith("  hint: ") for hint in hints)


# -- submission ------------------------------------------------------------------------------------


def unexpected(names: list[str]) -> list[str]:
    """Files that a refused submission must not leave.

    Complete files of the code store may stay: a later submission uses them.
    """
    return [
        name
        for name in names
        if name not in ("jobs", "records")
        and (name.partition("/")[0] not in ("store", "stat") or "/." in name)
    ]


@pytest.mark.parametrize("space", [0, PAGE, 16 * PAGE])
def test_submit_on_full_disk_is_refused_and_leaves_no_files(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch, space: int
) -> None:
    """Three sizes: for no file, for the token and spec.json, for all files but the node zip."""
    disk = mount("size=64k")
    fill(disk, space)
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk / "home"))
    check_refused(command(work, "submit", "script.py", code=1), "No space left on device")
    left = [name.removeprefix("home/") for name in files_in(disk) if name not in ("filler", "home")]
    assert unexpected(left) == []
    assert json.loads(command(work, "list", "--json").stdout)["jobs"] == []
    assert own_processes() == []


@pytest.mark.parametrize("option", ["size=4k", "size=64k,nr_inodes=1", "ro"])
def test_submit_without_writable_records_is_refused_and_leaves_no_job(
    mount: Mount, work: Path, option: str
) -> None:
    """At that time the job directory exists already, on another disk."""
    home = Path(os.environ["CLUSTERJOB_HOME"])
    disk = mount("size=64k" if option == "ro" else option, home / "records")
    if option == "ro":
        remount(disk, "ro")
    elif "inodes" not in option:
        fill(disk, 0)
    before = files_in(disk)
    check_refused(
        command(work, "submit", "script.py", code=1),
        "Read-only file system" if option == "ro" else "No space left on device",
    )
    assert files_in(disk) == before
    assert files_in(home / "jobs") == []
    assert own_processes() == []


def test_agents_end_when_handle_cannot_be_saved(mount: Mount, work: Path) -> None:
    """The first record fits on the disk, the handle does not.

    No command could find the job later, so it must not keep running.
    """
    home = Path(os.environ["CLUSTERJOB_HOME"])
    disk = mount(f"size={2 * PAGE}", home / "records")
    fill(disk, PAGE)
    settings = job_settings.resolve({"setup": "sleep 1000"}, "local", directory=work)
    plan = jobs.plan(
        job_settings.make_spec(Program("script", "script.py"), settings, directory=work), settings
    )
    with pytest.raises(RecordError, match="No space left"):
        jobs.submit(plan, "local", detach=True)
    assert files_in(disk) == ["filler"]
    assert not plan.job_dir.exists()
    wait_until(lambda: not own_processes(), PROMPT, "the end of the agents")
    assert not plan.job_dir.exists(), "an agent that still ran created it again"


# -- disks that break while a job runs -------------------------------------------------------------


def test_job_that_fills_disk_goes_on_and_says_what_output_is_lost(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker does not wait for ever, and `logs` shows the output written before."""
    disk = mount("size=4m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(
        textwrap.dedent("""
            import os
            for number in range(9000):
                print("line", number, "x" * 500)
            os.truncate("filler", 0)
            print("after")
        """)
    )
    fill(disk, 1 << 20)
    (work / "filler").symlink_to(disk / "filler")
    done = command(work, "run", "--start", "exec", "script.py")
    assert done.stdout.startswith(f"line 0 {'x' * 500}\nline 1")
    assert done.stdout.endswith("\nafter\n")
    assert "bytes of output were lost: the disk was full" in done.stdout
    wait_until(lambda: not own_processes(), PROMPT, "the end of the agents")


def test_disk_full_at_start_is_told_with_the_verdict(
    make_job: Callable[..., Job], mount: Mount
) -> None:
    disk = mount("size=256k")
    fill(disk, 0)
    job = make_job(2)
    job.dir = disk / "job"
    job.run(job.script("print('a line for which there is no room', flush=True)"))
    told = job.stderr(job.agents[0])
    why = f"{job.dir} cannot be written: No space left on device, so output may be missing"
    assert f"SUCCEEDED: {why} (not recorded: No space left on device)\n" in told
    assert "output of rank0.out is lost: No space left on device" in told


def test_job_survives_temporarily_full_disk(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeline of the output may lose entries, and the output its order.

    No line of output is lost, and the verdict is written.
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
    job_id = command(work, "submit", "--nodes", "2", "script.py").stdout.strip()
    wait_until(lambda: (work / "up-full0").exists() and (work / "up-full1").exists(), TEST_TIMEOUT)
    # The process that writes the output may be behind its workers.
    logs = disk / "jobs" / job_id / "logs"
    wait_until(
        lambda: [each.read_text() for each in logs.rglob("rank*.out")] == ["before\n"] * 2,
        TEST_TIMEOUT,
    )
    fill(disk, 0)
    (work / "full").touch()
    wait_until(
        lambda: (work / "up-empty0").exists() and (work / "up-empty1").exists(), TEST_TIMEOUT
    )
    assert (
        json.loads(command(work, "status", "--json", job_id).stdout)["jobs"][0]["state"]
        == "RUNNING"
    )
    assert "before" in command(work, "logs", job_id).stdout
    (disk / "filler").unlink()
    (work / "empty").touch()
    command(work, "wait", job_id)
    assert sorted(command(work, "logs", "--rank", "1", job_id).stdout.splitlines()) == [
        "[1] after",
        "[1] before",
    ]


RANK_1_EXITS = """
import os, sys, time
open("up" + os.environ["RANK"], "w").close()
while not os.path.exists("leave"):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    sys.exit(3)
time.sleep(1000)
"""


def test_verdict_is_written_on_full_disk(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 exits with code 3 after the disk is full."""
    disk = mount("size=2m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(RANK_1_EXITS)
    follow = [sys.executable, "-m", "clusterjob", "run", "--nodes", "2", "script.py"]
    with (work / "out").open("wb") as out:
        following = subprocess.Popen(
            follow, cwd=work, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    wait_until(lambda: (work / "up0").exists() and (work / "up1").exists(), TEST_TIMEOUT)
    fill(disk, 0)
    (work / "leave").touch()
    assert following.wait(TEST_TIMEOUT) == 3, (work / "out").read_text()
    assert "FAILED: rank 1 " in (work / "out").read_text()
    wait_until(lambda: not own_processes(), PROMPT, "the end of the agents")
    [job] = json.loads(command(work, "list", "--json").stdout)["jobs"]
    assert (job["state"], job["exit_code"]) == ("FAILED", 3)
    assert list(disk.rglob(".*.reserve")) == []


@pytest.fixture
def freezable(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk whose writes hang after ``fsfreeze -f``, like those of an NFS server."""
    disk, image = tmp_path / "freezable", tmp_path / "image"
    disk.mkdir()
    with image.open("wb") as stream:
        stream.truncate(16 << 20)
    try:
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", image, disk]):
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip("cannot mount a loop device here")
        yield disk
    finally:
        subprocess.run(["fsfreeze", "-u", str(disk)], capture_output=True, check=False)
        wait_for_no_processes(PROMPT)
        subprocess.run(["umount", str(disk)], capture_output=True, check=False)


def test_disk_that_hangs_longer_than_the_lease_ends_no_job(
    make_job: Callable[..., Job], freezable: Path
) -> None:
    job = make_job(2)
    script = job.script("""
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not pathlib.Path("go").exists():
            print("a line", flush=True)
            time.sleep(0.005)
    """)
    options = ("--lease", "2", script)
    job.start_all(*options, env={"CLUSTERJOB_JOB_DIR": str(freezable)}, until=("up0", "up1"))
    subprocess.run(["fsfreeze", "-f", str(freezable)], check=True)
    time.sleep(3)
    subprocess.run(["fsfreeze", "-u", str(freezable)], check=True)
    job.path("go").touch()
    assert job.wait() == [0, 0]
    names = {event["event"] for event in read_job_events(freezable)}
    assert "ended" in names
    assert not names & {"lost", "stalled", "stop"}


def test_lost_job_on_full_disk_is_reported_with_reason(
    mount: Mount, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=2m")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(disk))
    (work / "script.py").write_text(RANK_1_EXITS)
    job_id = command(work, "submit", "script.py").stdout.strip()
    wait_until((work / "up0").exists, TEST_TIMEOUT)
    for path in disk.rglob(".*.reserve"):
        path.unlink()
    fill(disk, 0)
    kill_all(own_processes())
    done = command(work, "wait", job_id, code=1)
    assert "LOST" in done.stderr
    why = f"{disk / 'jobs' / job_id} cannot be written: No space left on device"
    assert why in done.stderr


def test_large_verdict_fits_into_reserved_space(mount: Mount) -> None:
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
    assert (found.exit_code, found.failure.rank, len(found.failure.last_lines)) == (7, 0, 20)
    assert [end["reason"] for end in ends.written(disk)] == ["x"]


# -- atomic files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["status", "--json"],
        ["--help"],
        ["submit", "script.py"],
    ],
)
def test_unwritable_stdout_is_an_error(work: Path, args: list[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*CLUSTERJOB, *args], cwd=work, stdin=subprocess.DEVNULL, stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("clusterjob: error: No space left on device")
    wait_until(lambda: not own_processes(), TEST_TIMEOUT, "the end of what was started")
