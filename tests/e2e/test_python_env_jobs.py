"""Local jobs with --uv: they use the environment, and a cancel ends its preparation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import CLUSTERJOB, command
from launching import executable, new_folder
from packed_env import MODULE, uv_project
from procs import wait_until

WAIT = 60.0  # seconds; each step needs much less


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTERJOB_HOME", str(tmp_path / "home"))
    root = new_folder(tmp_path / "project")
    (root / "train.py").write_text(f"import own, {MODULE}; print(own.VALUE, {MODULE}.VALUE)\n")
    return uv_project(root)


def words(project: Path) -> tuple[str, ...]:
    (project / "disk").mkdir()
    options = ("--cluster", "local", "--uv", "--env-cache", str(project / "disk"))
    return ("run", *options, "train.py")


@pytest.mark.slow
def test_job_runs_in_the_environment_with_the_projects_own_package(project: Path) -> None:
    assert "own 1" in command(project, *words(project)).stdout


def test_run_shows_the_preparation_and_an_interrupt_ends_uv(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a uv that stops before its sync, as on a slow network."""
    first = new_folder(tmp_path / "first")
    os.mkfifo(tmp_path / "never")
    executable(
        first / "uv",
        f'#!/bin/bash\nif [ "$1" = sync ]; then echo $$ > {tmp_path}/uv.pid; '
        f'read < {tmp_path}/never; fi\nexec {Path(sys.executable).parent}/uv "$@"\n',
    )
    monkeypatch.setenv("PATH", f"{first}:{os.environ['PATH']}")
    file, shown = tmp_path / "uv.pid", tmp_path / "shown"
    with shown.open("w") as stderr:
        argv = [*CLUSTERJOB, *words(project)]
        job = subprocess.Popen(argv, cwd=project, stderr=stderr)
    wait_until(lambda: file.exists() and file.read_text().strip(), WAIT, "the sync")
    notice = "clusterjob: preparing the Python environment\n"
    wait_until(lambda: notice in shown.read_text(), WAIT, "the notice")
    job.send_signal(signal.SIGINT)
    job.wait(timeout=WAIT)
    assert job.returncode in (130, 143), shown.read_text()
    wait_until(lambda: not Path(f"/proc/{int(file.read_text())}").exists(), WAIT, "uv ends")
