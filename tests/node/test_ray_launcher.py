"""`--launcher ray`: a Ray cluster over the job's nodes, its driver on node 0."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import venv
from pathlib import Path

import pytest
from commands import command
from launching import TEST_TIMEOUT, script, write_tree
from procs import wait_until
from ray_driver import DRIVER, needs_ray, ray_processes, wait_for_end_of_ray
from slurm_user import User

from clusterjob import Job, JobState
from clusterjob.core.records import Records
from clusterjob.node.options import parse
from clusterjob.node.workers import ray_node


def submit(
    directory: Path, *args: str, code: str = DRIVER, options: tuple[str, ...] = ()
) -> Job[object]:
    script(directory, code, "driver.py")
    given = options or ("--cluster", "local", "--nodes", "2")
    words = (*given, "--cpus-per-task", "1", "--launcher", "ray", "driver.py", *args)
    return Job.get(command(directory, "submit", *words).stdout.strip())


def test_node_runs_one_worker_that_knows_the_program() -> None:
    words = ["--launcher", "ray", "--nproc-per-node", "4", "--cpus-per-task", "2", "a.py", "-x"]
    options = ray_node.node_options(parse([*words, "--start", "y"]))
    assert (options.nproc_per_node, options.start, options.program.kind) == (1, "exec", "module")
    assert options.program.args[1:] == ("300", "8", sys.executable, "a.py", "-x", "--start", "y")


def test_missing_ray_is_one_line(tmp_path: Path) -> None:
    script(tmp_path, "", "driver.py")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    words = ("--cluster", "local", "--launcher", "ray", "--python", str(python), "driver.py")
    assert "ray is not installed for" in command(tmp_path, "run", *words, code=1).stderr


def install_ray(directory: Path, version: str) -> None:
    """Install an empty Ray of a version into a directory of sys.path."""
    write_tree(directory, **{"ray/__init__.py": ""})
    metadata = directory / f"ray-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "nodes", "mode", "refused"),
    [
        ("2.51.2", 2, "", True),
        ("2.51.2", 2, "token", True),  # this Ray ignores the variable
        ("2.9.3", 2, "", True),
        ("2.51.2", 2, "disabled", False),
        ("2.51.2", 1, "", False),
        ("2.52.0", 2, "", False),
        ("3.0.0.dev0", 2, "", False),
    ],
)
def test_ray_without_tokens_is_refused_over_several_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    version: str, nodes: int, mode: str, refused: bool,
) -> None:  # fmt: skip
    install_ray(tmp_path, version)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(SystemExit, match=version) if refused else contextlib.nullcontext():
        ray_node._check_version(nodes)


def test_job_with_ray_without_tokens_ends_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_ray(tmp_path / "old", "2.51.2")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'old'}:{os.environ.get('PYTHONPATH', '')}")
    job = submit(tmp_path, "0")
    assert job.wait(TEST_TIMEOUT).exit_code == 1
    assert "Ray 2.51.2 has no authentication: everyone who can connect" in job.logs()
    assert "Traceback" not in job.logs()
    assert not list(Records().find(job.id).job_dir.rglob("ray.log"))


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("event", ["cancel", "node lost"])
def test_no_ray_process_outlives_the_job(tmp_path: Path, event: str) -> None:
    job = submit(tmp_path, "wait")
    wait_until((tmp_path / "ready").exists, 120, "the driver runs")
    assert len(ray_processes(job)) >= 2
    if event == "cancel":
        job.cancel()
    else:
        raylets = [pid for pid in ray_processes(job) if b"clusterjob_node1" in _words(pid)]
        for pid in raylets:
            os.kill(pid, signal.SIGKILL)
    verdict = job.wait(timeout=60)
    expected = JobState.CANCELLED if event == "cancel" else JobState.FAILED
    assert verdict.state is expected, verdict
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
    options = ("--cluster", "local", "--nodes", "2", "--join-timeout", "60", "--setup", setup)
    job = submit(tmp_path, "0", options=options)
    verdict = job.wait(timeout=240)
    assert verdict.exit_code == 1
    assert "node 1 has not joined the Ray cluster in time" in job.logs(), job.logs()
    assert time.monotonic() - begin < 150
    wait_for_end_of_ray(job)


@needs_ray
@pytest.mark.slow
def test_ray_over_two_nodes_of_slurm_keeps_exit_code(user: User) -> None:
    options = ("--cluster", "slurm", "--nodes", "2", "--python", sys.executable)
    job = submit(user.directory, "7", options=options)
    assert job.wait(timeout=180).exit_code == 7, job.logs()
    assert "[0] rank None nodes 2" in job.logs().splitlines()
    wait_for_end_of_ray(job)
