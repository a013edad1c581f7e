"""Every injected fault is classified and blamed correctly on local, SSH and Slurm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_user import User
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import jobs
from clusterjob.node.program import Program
from clusterjob.node.verdict import FailureKind

TEST_TIMEOUT = 400.0  # seconds; 20 rounds need 40
# It runs on two nodes with one worker each. --retry starts the next round after each fault, so one
# job shows all faults in its ``attempts``.
SCRIPT = Path(__file__).parent.parent / "support" / "faulty_train.py"
# The faults in the order of the rounds: name, kind, and the rank to blame; None for either rank.
FAULTS: tuple[tuple[str, str, int | None], ...] = (
    ("exception", "code", 1),
    ("handled_errors", "code", 1),
    ("own_excepthook", "code", 1),
    ("syntax", "code", 1),
    ("missing_module", "import", 1),
    ("arguments", "exit_code", 1),
    ("host_memory", "oom_host", 1),
    ("tensor_memory", "oom_host", 1),
    ("device_memory", "oom_device", 1),
    ("device", "device", 1),
    ("device_abort", "device", 1),
    ("full_disk", "disk", 1),
    ("network", "network", None),
    ("missing_rank", "rendezvous", 1),
    ("missing_rank_of_torch", "rendezvous", None),
    ("early_exit", "early_exit", 1),
    ("terminated", "terminated", 1),
    ("segmentation", "signal", 1),
    ("killed", "signal", 1),
    ("exit_code", "exit_code", 1),
    ("hang", "hang", 1),
    ("lost_agent", "node_lost", None),  # of node 1; it ends the job, for no other node is left
)
ARGUMENT = ",".join(name for name, _, _ in FAULTS)
OPTIONS = {
    "nodes": 2,
    "nproc_per_node": 1,
    "hang_timeout": "6s",
    "retry": [f"{kind}:9" for kind in FailureKind],
}


def check(job: dict[str, Any]) -> None:
    """Check the kinds and the blame in ``status --json`` of a job of the script."""
    wrong = []
    for number, (name, kind, rank) in enumerate(FAULTS):
        each = job["attempts"][number] if number < len(job["attempts"]) else {}
        blamed = rank is None or (each.get("rank"), each.get("node")) == (rank, rank)
        if each.get("kind") != kind or not blamed:
            wrong.append(f"{name}: {each}")
    assert not wrong, "\n".join(wrong)
    assert len(job["attempts"]) == len(FAULTS)
    assert [each["restart"] for each in job["attempts"]] == list(range(len(FAULTS)))
    assert (job["failure"]["kind"], job["failure"]["node_rank"]) == ("node_lost", 1)


def flags() -> list[str]:
    words = []
    for key, value in OPTIONS.items():
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
    train = (str(SCRIPT), ARGUMENT)
    done = clusterjob(tmp_path, "run", "--cluster", "local", *flags(), *train)
    assert done.returncode == 1, done.stderr
    check(status(tmp_path))


def test_failed_setup_line_is_a_launch_failure_on_local(tmp_path: Path) -> None:
    words = ("--cluster", "local", "--nodes", "2", "--setup", "false", "--", "true")
    assert clusterjob(tmp_path, "run", *words).returncode == 1
    assert status(tmp_path)["failure"]["kind"] == "launch"


@pytest.mark.slow
def test_faults_are_classified_on_ssh_hosts(site: Site) -> None:
    shutil.copy(SCRIPT, site.directory)
    program = Program("script", SCRIPT.name, args=(ARGUMENT,))
    options = {**OPTIONS, "nodes": None, "hang_timeout": "6s"}
    record = jobs.submit(site.plan(program, python=sys.executable, **options), "ssh", detach=True)
    wait_for_verdict(record, TEST_TIMEOUT)
    check(status(site.directory, record.job_id))


@pytest.mark.slow
def test_failed_setup_line_is_a_launch_failure_on_ssh_hosts(site: Site) -> None:
    refused = site.refused(setup=["false"])
    assert "a setup line failed: false" in refused.message


@pytest.mark.slow
def test_faults_are_classified_on_slurm(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERJOB_PYTHON")  # the faults need torch
    train = (str(SCRIPT), ARGUMENT)
    job = user("submit", "--cluster", "slurm", *flags(), *train).stdout.strip()
    user("wait", job, code=1, timeout=TEST_TIMEOUT)
    check(user.job(job))


@pytest.mark.slow
def test_failed_setup_line_is_a_launch_failure_on_slurm(user: User) -> None:
    job = user("submit", "--cluster", "slurm", "--setup", "false", "--", "true").stdout.strip()
    user("wait", job, code=1)
    assert user.job(job)["failure"]["kind"] == "launch"
