"""Commands that a visit runs for whoever is elsewhere: their words, their ends, and what they may
not do to the visit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from procs import alive, wait_until

from clusterjob.node.environments.slurm_commands import slurm_environment
from clusterjob.node.host_server import commands
from clusterjob.node.host_server.commands import Commands


def run(
    visit: Commands, *argv: str, wait: float = 20.0, **more: Any
) -> tuple[dict[str, Any], bytes]:
    return visit.answer(
        {"op": "run", "argv": list(argv), "env": {}, "job": "", "wait": wait, **more}
    )


def test_what_a_command_says_comes_apart_and_as_it_was_said(tmp_path: Path) -> None:
    (tmp_path / "jobs" / "x").mkdir(parents=True)
    script = 'printf "%s|" "$@"; pwd; printf "\\377 err" >&2; exit 7'
    answer, data = run(Commands(tmp_path), "bash", "-c", script, "-", "a b", "\udcfe☃", job="x")
    assert answer["code"] == 7
    assert (
        data[: answer["out"]]
        == b"a b|\xfe\xe2\x98\x83|" + os.fsencode(tmp_path / "jobs" / "x") + b"\n"
    )
    assert data[answer["out"] :] == b"\xff err"


def test_one_that_takes_long_is_asked_for_again_and_holds_nobody_up(tmp_path: Path) -> None:
    visit = Commands(tmp_path)
    first, _ = run(
        visit,
        "bash",
        "-c",
        f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo first",
        wait=0.0,
    )
    assert run(visit, "echo", "second")[1] == b"second\n"
    assert visit.answer({"op": "reap", "number": first["number"], "wait": 0.0}) == (
        {"number": first["number"]},
        b"",
    )
    (tmp_path / "go").touch()
    assert visit.answer({"op": "reap", "number": first["number"], "wait": 20.0}) == (
        {"code": 0, "out": 6},
        b"first\n",
    )


def test_one_that_is_dropped_ends(tmp_path: Path) -> None:
    visit = Commands(tmp_path)
    answer, _ = run(visit, "bash", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 1000", wait=0.0)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 10)
    assert visit.answer({"op": "drop", "number": answer["number"]}) == ({}, b"")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_one_that_says_too_much_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "MAX_OUTPUT", 100_000)
    answer, data = run(Commands(tmp_path), "yes")
    assert (answer["code"], answer["out"]) == (-9, 0)
    assert data == b"yes: it printed more than 100000 bytes\n"


def test_one_that_is_not_there_is_said_to_be_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # whose login shell knows no more
    assert run(Commands(tmp_path), "no-such-command") == (
        {"absent": "No such file or directory"},
        b"",
    )


def test_an_environment_without_the_job_around_it() -> None:
    outside = {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "SBATCH_WAIT": "1",
        "CLUSTERJOB_X": "1",
        "RANK": "0",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
    assert slurm_environment(outside, "sbatch") == {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
    assert slurm_environment(outside, "squeue") == {
        "SBATCH_ACCOUNT": "mine",
        "SLURM_CONF": "/c",
        "A": "b",
    }
    inside = outside | {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "CUDA_VISIBLE_DEVICES": "0"}
    assert slurm_environment(inside, "sbatch") == {
        "SLURM_CONF": "/c",
        "SQUEUE_USERS": "x",
        "A": "b",
    }
