"""`--preflight` on the command line, and `clusterjob doctor --run`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from procs import TEST_TIMEOUT
from ssh_network import python_without_torch

from clusterjob.core.records import Records

LOCAL = ("--cluster", "local")


def run(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLUSTERJOB, *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * TEST_TIMEOUT,
    )


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a script; jobs use an interpreter without torch."""
    monkeypatch.setenv("CLUSTERJOB_PYTHON", str(python_without_torch(tmp_path)))
    (tmp_path / "train.py").write_text("print('up')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--preflight"], "--preflight=refuse"),
        (["--preflight=warn"], "--preflight=warn"),
        (["--preflight=off"], ""),
    ],
)
def test_flag_stands_alone_or_has_value(directory: Path, words: list[str], option: str) -> None:
    done = run("render", *LOCAL, *words, "train.py", "--preflight", directory=directory)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("exec ")]
    assert line.endswith("train.py --preflight"), "the program keeps its own argument"
    assert [word for word in line.split()[:-1] if "preflight" in word] == (
        [option] if option else []
    )


def test_unknown_mode_and_srun_are_refused(directory: Path) -> None:
    wrong = run("render", *LOCAL, "--preflight=maybe", "train.py", directory=directory)
    assert wrong.returncode == 2
    assert "maybe" in wrong.stderr
    srun = ("--cluster", "slurm", "--launcher", "srun", "--preflight")
    refused = run("render", *srun, "train.py", directory=directory)
    assert refused.returncode == 2
    assert "--preflight needs clusterjob's agent" in refused.stderr


def test_doctor_run_measures_hosts_and_exits_with_0(tmp_path: Path) -> None:
    done = run("doctor", "--run", *LOCAL, "--nodes", "2", "--preflight=warn", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "matrix multiply" in lines[0]
    assert lines[1].startswith("median")
    assert sum("(node " in line and "host " not in line for line in lines) == 2
    [record] = Records().all()
    assert record.name == "preflight"


def test_doctor_run_names_broken_host_and_exits_with_1(tmp_path: Path) -> None:
    # The job's directory of node 1 becomes a file system without space: its measure fails.
    setup = 'if [ "$CLUSTERJOB_NODE_RANK" = 1 ]; then ulimit -f 1; fi'  # files of at most 1 block
    done = run(
        "doctor", "--run", *LOCAL, "--nodes", "3", "--setup", setup, "--json", directory=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["state"] == "FAILED"
    assert len(found["slow"]) == 1, found
    assert "(node 1): disk write 0.00 of the median" in found["slow"][0]
    assert "File too large" in found["slow"][0]
    assert found["table"]["hosts"] == 3
