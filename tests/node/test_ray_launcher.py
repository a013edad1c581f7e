"""`--launcher ray`: a Ray cluster over the job's nodes, its driver on node 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from launching import TEST_TIMEOUT, script
from procs import wait_until
from ray_driver import DRIVER, needs_ray, ray_processes, wait_for_end_of_ray
from slurm_user import User

from clusterjob import Job, JobState
from clusterjob.node.options import parse
from clusterjob.node.workers import ray_node


def submit(
    directory: Path, *args: str, code: str = DRIVER, options: tuple[str, ...] = ()
) -> Job[object]:
    script(directory, code, "driver.py")
    given = options or ("--cluster", "local", "--nodes", "2")
    done = subprocess.run(
        [
            sys.executable, "-m", "clusterjob", "submit", *given, "--launcher", "ray", "driver.py",
            *args,
        ],
        cwd=directory, capture_output=True, text=True, timeout=TEST_TIMEOUT, check=True,
    )  # fmt: skip
    return Job.get(done.stdout.strip())


def test_node_runs_one_worker_that_knows_the_program() -> None:
    words = ["--launcher", "ray", "--nproc-per-node", "4", "--cpus-per-task", "2", "a.py", "-x"]
    options = ray_node.node_options(parse([*words, "--start", "y"]))
    assert (options.nproc_per_node, options.start, options.program.kind) == (1, "exec", "module")
    assert options.program.args[1:] == ("300", "8", "0", "script", "a.py", "-x", "--start", "y")


def test_missing_ray_is_one_line(tmp_path: Path) -> None:
    script(tmp_path, "", "driver.py")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "clusterjob", "run", "--cluster", "local", "--launcher", "ray",
         "--python", str(python), "driver.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=TEST_TIMEOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ray is not installed for" in done.stderr
    assert "Traceback" not in done.stderr


@needs_ray
@pytest.mark.slow
def test_exit_code_of_driver_is_the_job_s(tmp_path: Path) -> None:
    job = submit(tmp_path, "7")
    assert job.wait(timeout=120).exit_code == 7, job.logs()
    assert "[0] rank None nodes 2" in job.logs().splitlines()
    wait_for_end_of_ray(job)


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("event", ["cancel", "driver killed", "node lost"])
def test_no_ray_process_outlives_the_job(tmp_path: Path, event: str) -> None:
    job = submit(tmp_path, "wait")
    wait_until((tmp_path / "ready").exists, 120, "the driver runs")
    driver = int((tmp_path / "ready").read_text())
    assert len(ray_processes(job)) >= 2
    if event == "cancel":
        job.cancel()
    elif event == "driver killed":
        os.kill(driver, signal.SIGKILL)
    else:
        raylets = [pid for pid in ray_processes(job) if b"clusterjob_node1" in _words(pid)]
        for pid in raylets:
            os.kill(pid, signal.SIGKILL)
    verdict = job.wait(timeout=60)
    expected = JobState.CANCELLED if event == "cancel" else JobState.FAILED
    assert verdict.state is expected, verdict
    if event == "driver killed":
        assert verdict.exit_code == 137
    wait_for_end_of_ray(job)


def _words(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


@needs_ray
@pytest.mark.slow
def test_missing_node_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1's Ray does not start: `start` finds another command first."""
    fake = tmp_path / "fake" / "ray"
    (fake / "scripts").mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "scripts" / "__init__.py").touch()
    (fake / "scripts" / "scripts.py").write_text("import time\ntime.sleep(1000)\n")
    begin = time.monotonic()
    setup = f'[ "$CLUSTERJOB_NODE_RANK" = 0 ] || export PYTHONPATH={fake.parent}:$PYTHONPATH'
    options = ("--cluster", "local", "--nodes", "2", "--join-timeout", "12", "--setup", setup)
    job = submit(tmp_path, "0", options=options)
    verdict = job.wait(timeout=120)
    assert verdict.exit_code == 1
    assert "node 1 has not joined the Ray cluster after 12 s" in job.logs(), job.logs()
    assert time.monotonic() - begin < 110
    wait_for_end_of_ray(job)


@needs_ray
@pytest.mark.slow
def test_ray_over_two_nodes_of_slurm(user: User) -> None:
    options = ("--cluster", "slurm", "--nodes", "2", "--python", sys.executable)
    job = submit(user.directory, "0", options=options)
    assert job.wait(timeout=180).exit_code == 0, job.logs()
    assert "[0] rank None nodes 2" in job.logs().splitlines()
    wait_for_end_of_ray(job)
