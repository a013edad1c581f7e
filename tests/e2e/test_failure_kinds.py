"""Every injected fault is classified and blamed correctly on local, SSH and Slurm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_rounds
import pytest
from slurm_user import User
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import jobs
from clusterjob.node.program import Program

TEST_TIMEOUT = 400.0  # seconds; 20 rounds need 40


def flags() -> list[str]:
    words = []
    for key, value in faulty_rounds.OPTIONS.items():
        for item in value if isinstance(value, list) else [value]:
            words += [f"--{key.replace('_', '-')}", str(item)]
    return words


def clusterjob(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "clusterjob", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT,
        stdin=subprocess.DEVNULL,
    )


def status(directory: Path, job: str = "@") -> dict[str, Any]:
    done = clusterjob(directory, "status", "--json", job)
    found: dict[str, Any] = json.loads(done.stdout)["jobs"][0]
    return found


def test_faults_are_classified_on_local(tmp_path: Path) -> None:
    train = (str(faulty_rounds.SCRIPT), faulty_rounds.ARGUMENT)
    done = clusterjob(tmp_path, "run", "--cluster", "local", *flags(), *train)
    assert done.returncode == 1, done.stderr
    faulty_rounds.check(status(tmp_path))


def test_failed_setup_line_is_a_launch_failure_on_local(tmp_path: Path) -> None:
    words = ("--cluster", "local", "--nodes", "2", "--setup", "false", "--", "true")
    assert clusterjob(tmp_path, "run", *words).returncode == 1
    assert status(tmp_path)["failure"]["kind"] == "launch"


@pytest.mark.slow
def test_faults_are_classified_on_ssh_hosts(site: Site) -> None:
    shutil.copy(faulty_rounds.SCRIPT, site.directory)
    program = Program("script", faulty_rounds.SCRIPT.name, args=(faulty_rounds.ARGUMENT,))
    options = {**faulty_rounds.OPTIONS, "nodes": None, "hang_timeout": "6s"}
    record = jobs.submit(site.plan(program, python=sys.executable, **options), "ssh", detach=True)
    wait_for_verdict(record, TEST_TIMEOUT)
    faulty_rounds.check(status(site.directory, record.job_id))


@pytest.mark.slow
def test_failed_setup_line_is_a_launch_failure_on_ssh_hosts(site: Site) -> None:
    refused = site.refused(setup=["false"])
    assert "a setup line failed: false" in refused.message


@pytest.mark.slow
def test_faults_are_classified_on_slurm(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # the faults need torch
    train = (str(faulty_rounds.SCRIPT), faulty_rounds.ARGUMENT)
    job = user("submit", "--cluster", "slurm", *flags(), *train).stdout.strip()
    user("wait", job, code=1, timeout=TEST_TIMEOUT)
    faulty_rounds.check(user.job(job))


@pytest.mark.slow
def test_failed_setup_line_is_a_launch_failure_on_slurm(user: User) -> None:
    job = user("submit", "--cluster", "slurm", "--setup", "false", "--", "true").stdout.strip()
    user("wait", job, code=1)
    assert user.job(job)["failure"]["kind"] == "launch"
