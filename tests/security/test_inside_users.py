"""Commands inside a job: other users of the node."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from inside_job import running
from launching import executable, new_folder
from procs import TEST_TIMEOUT, below

from clusterjob.backends.slurm import step
from clusterjob.node import inside, job_processes

# The interpreter may be in a directory of root: modules are imported before the change of user.
AS_NOBODY = """
import ctypes, os, sys
from clusterjob.node import inside
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir("/")
"""
READ = """
for name in ("environ", *(f"fd/{number}" for number in range(64))):
    try:
        print(open(f"/proc/{sys.argv[1]}/{name}", "rb").read()[:10])
    except OSError:
        pass
"""


def as_nobody(code: str, *args: str, **variables: str) -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY + code, *args],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    return done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_user_finds_neither_environment_nor_job(tmp_path: Path, plain_python: str) -> None:
    with running(tmp_path, "--cluster", "local", ranks=1) as job:
        [forkserver] = [pid for pid in below(1) if has_table(pid, job.id)]
        assert as_nobody(READ, str(forkserver)) == b""
        request = {"job": job.id, "node": 0, "rank": None, "argv": ["id"]}
        shown = as_nobody("inside.main()", **{inside.REQUEST: inside.encoded(request)})
        assert shown.decode() == f"clusterjob: error: job {job.id}: no worker runs on node 0\n"


def has_table(pid: int, job_id: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if f"CLUSTERJOB_JOB_ID={job_id}".encode() not in environ.split(b"\0"):
            return False
        return job_processes.table_of(pid) is not None
    except OSError:
        return False


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_program_with_user_id_bit_is_no_worker_of_a_job_of_root() -> None:
    """Another user starts such a program as root, and chooses its environment."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        sleep = Path(directory) / "sleep"
        shutil.copy(shutil.which("sleep") or "", sleep)
        os.chmod(directory, 0o755)
        sleep.chmod(0o4755)
        forged = {"CLUSTERJOB_JOB_ID": "forged-1", "CLUSTERJOB_NODE_RANK": "0", "RANK": "0"}
        process = subprocess.Popen([sleep, "60"], env=forged, user=65534, group=65534)
        try:
            assert not job_processes.on_node("forged-1", 0).started
            sleep.chmod(0o755)
            own = subprocess.Popen([sleep, "60"], env=forged)
            try:
                [found] = job_processes.on_node("forged-1", 0).ranks
                assert found.pid == own.pid
            finally:
                own.kill()
                own.wait()
        finally:
            process.kill()
            process.wait()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_step_runs_no_interpreter_that_another_user_has_started(tmp_path: Path) -> None:
    programs = new_folder(tmp_path / "bin")
    for name in ("grep", "readlink"):
        (programs / name).symlink_to(shutil.which(name) or "")
    executable(programs / "python3", "#!/bin/sh\necho fallback\n")
    # After setuid(2), the files in /proc belong to root until the process is dumpable again.
    code = "import ctypes, os; os.setgid(65534); os.setuid(65534);"
    code += "ctypes.CDLL(None).prctl(4, 1, 0, 0, 0); print(1, flush=True); input()"
    forged = {"CLUSTERJOB_JOB_ID": "forged-2"}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=forged, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"1\n"
        done = subprocess.run(
            ["/bin/bash", "-c", step._SCRIPT, "clusterjob-inside", "/nonexistent.zip", "forged-2"],
            env={"PATH": str(programs)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
        process.communicate(b"\n")
    assert done.stdout.splitlines()[-1:] == ["fallback"], done.stderr
