"""Submit from macOS: the submitter has no /proc and no call of Linux; the hosts run Linux."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import command
from procs import TEST_TIMEOUT, wait_until
from sshsite import SLEEPER, Site

MACOS = Path(__file__).parent.parent / "support" / "macos"
WRITER = """
    import os, pathlib
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
    pathlib.Path("runs").mkdir(exist_ok=True)
    pathlib.Path("runs/model.bin").write_bytes(b"weights")
"""


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every later Python process of this user find a Mac."""
    monkeypatch.setenv("PYTHONPATH", f"{MACOS}{os.pathsep}{os.environ['PYTHONPATH']}")


def clusterjob(directory: Path, *args: str, code: int | None = 0) -> str:
    done = command(directory, *args, code=code)
    return done.stdout + done.stderr


def check_job(run: Any, job_id: str, workers: int) -> None:
    """Check the commands for an ended job that wrote runs/model.bin."""
    lines = run("logs", "-f", job_id)
    assert all(f"rank {rank} of {workers}" in lines for rank in range(workers))
    run("wait", job_id)
    [job] = json.loads(run("status", "--json", job_id))["jobs"]
    assert (job["state"], job["exit_code"]) == ("SUCCEEDED", 0)


@pytest.mark.slow
def test_commands_against_hosts_work_from_macos(site: Site, macos: None) -> None:
    run = partial(clusterjob, site.directory)
    config = ("--set", f"ssh_config={site.ssh_network.config}")
    assert "logged in as root" in run("login", "gpu1", *config)
    # The commands contact hosts without torch.
    assert "gpu2" in run("hosts", *site.options(), code=None)
    assert "gpu1" in run("doctor", *site.options(), code=None)
    job_id = run("submit", *site.options(), site.script(WRITER)).splitlines()[0]
    check_job(run, job_id, workers=2)
    run("fetch", job_id, "runs", "--to", "results", "--node", "1")
    assert (site.path("results") / "runs" / "model.bin").read_bytes() == b"weights"
    assert (site.path("results") / "runs" / "model.bin").stat().st_mode & 0o777 == 0o644
    assert "rank 0 of 2" in run("run", *site.options(), site.script(WRITER))
    waiting = run("submit", *site.options(), site.script(SLEEPER)).splitlines()[0]
    wait_until(lambda: "up 1" in run("logs", waiting), TEST_TIMEOUT, "the workers")
    assert "inside 1" in run(
        "exec", waiting, "--rank", "1", "--", "sh", "-c", 'echo inside "$RANK"'
    )
    assert "is cancelled" in run("cancel", waiting)
    assert "CANCELLED" in run("status", waiting, code=None)
    again = run("rerun", job_id).splitlines()[-1]
    check_job(run, again, workers=2)
    run("clean", "--yes", "--all")
    assert again not in run("list")
    assert "logged out" in run("logout", "gpu1", *config)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (("submit", "--cluster", "local", "train.py"), "--cluster local"),
        (("run", "train.py"), "--cluster local"),
        (("doctor",), "--cluster local"),
        (("launch", "train.py"), "`clusterjob launch`"),
    ],
)
def test_command_that_runs_workers_here_states_what_it_needs(
    tmp_path: Path, macos: None, args: tuple[str, ...], what: str
) -> None:
    (tmp_path / "train.py").touch()
    assert clusterjob(tmp_path, *args, code=2) == (
        f"clusterjob: error: {what} needs Linux, and this is macOS\n"
        "  hint: submit to Linux machines: --hosts HOST (over SSH), or --login HOST (its Slurm)\n"
    )
    assert not Path(os.environ["CLUSTERJOB_HOME"]).exists()


def test_identity_of_process_without_proc_is_that_of_ps(macos: None) -> None:
    code = (  # its asserts decide about the exit code
        "import dataclasses, os\n"
        "from clusterjob.core.records import ProcessIdentity, _start\n"
        "from clusterjob.remote.destination import _umask\n"
        "own = ProcessIdentity.of_this_process()\n"
        "assert own.alive() and own.ticks > 1_700_000_000, own\n"
        "assert not dataclasses.replace(own, ticks=own.ticks - 60).alive()\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(0)\n"
        "os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)\n"
        "assert _start(child) is None, 'a zombie'\n"
        "os.waitpid(child, 0)\n"
        "assert _start(child) is None\n"
        "os.umask(0o027)\n"
        "assert _umask() == 0o027\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TEST_TIMEOUT)
