"""Commands that the host server runs for a remote client: output, exit code, and limits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from procs import alive, wait_until

from clusterjob.node.environments.slurm_env import slurm_environment
from clusterjob.node.host_server import server


def run(home: Path, *argv: str, wait: float = 20.0, job: str = "") -> tuple[dict[str, Any], bytes]:
    return server.run_command(home, list(argv), env={}, job=job, wait=wait)


def test_command_stdout_and_stderr_are_returned_separately_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "x").mkdir(parents=True)
    script = 'printf "%s|" "$@"; pwd; printf "\\377 err" >&2; exit 7'
    answer, data = run(tmp_path, "bash", "-c", script, "-", "a b", "\udcfe☃", job="x")
    assert answer["code"] == 7
    assert (
        data[: answer["out"]]
        == b"a b|\xfe\xe2\x98\x83|" + os.fsencode(tmp_path / "jobs" / "x") + b"\n"
    )
    assert data[answer["out"] :] == b"\xff err"


def test_long_command_is_reaped_later_and_does_not_block_others(tmp_path: Path) -> None:
    first, _ = run(
        tmp_path,
        "bash",
        "-c",
        f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo first",
        wait=0.0,
    )
    assert run(tmp_path, "echo", "second")[1] == b"second\n"
    assert server.reap_command(tmp_path, first["number"], wait=0.0) == (
        {"number": first["number"]},
        b"",
    )
    (tmp_path / "go").touch()
    assert server.reap_command(tmp_path, first["number"], wait=20.0) == (
        {"code": 0, "out": 6},
        b"first\n",
    )


def test_dropped_command_is_killed(tmp_path: Path) -> None:
    answer, _ = run(tmp_path, "bash", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 1000", wait=0.0)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 10)
    killed, _ = server.reap_command(tmp_path, answer["number"], wait=0.0, kill=True)
    assert killed["code"] == -9
    assert not alive(int((tmp_path / "pid").read_text()))


def test_command_with_too_much_output_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_OUTPUT", 100_000)
    answer, data = run(tmp_path, "yes")
    assert (answer["code"], answer["out"]) == (-9, 0)
    assert data == b"it printed more than 100000 bytes\n"


def test_command_runs_under_python_that_was_built_without_memfd_create(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert run(tmp_path, "echo", "out") == ({"code": 0, "out": 4}, b"out\n")


def test_missing_command_is_reported_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # a login shell finds no profile in this HOME
    assert run(tmp_path, "no-such-command") == (
        {"absent": "No such file or directory"},
        b"",
    )


def test_slurm_environment_removes_variables_of_surrounding_job() -> None:
    login_environment = {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "SBATCH_WAIT": "1",
        "CLUSTERJOB_X": "1",
        "RANK": "0",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
    assert slurm_environment(login_environment, "sbatch") == {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
    assert slurm_environment(login_environment, "squeue") == {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "A": "b",
    }
    job_environment = login_environment | {
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    assert slurm_environment(job_environment, "sbatch") == {
        "SLURM_CONF": "/c",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
