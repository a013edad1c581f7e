"""`--preflight` on the command line, and `clusterjob doctor --run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import command

from clusterjob.core.records import Records

LOCAL = ("--cluster", "local")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--preflight"], "--preflight=refuse"),
        (["--preflight=warn"], "--preflight=warn"),
        (["--preflight=off"], ""),
    ],
)
@pytest.mark.usefixtures("plain_python")
def test_flag_stands_alone_or_has_value(tmp_path: Path, words: list[str], option: str) -> None:
    (tmp_path / "train.py").write_text("print('up')\n")
    done = command(tmp_path, "render", *LOCAL, *words, "train.py", "--preflight")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("exec ")]
    assert line.endswith("train.py --preflight"), "the program keeps its own argument"
    assert "".join(word for word in line.split()[:-1] if "preflight" in word) == option


@pytest.mark.slow
def test_doctor_run_measures_hosts_and_exits_with_0(tmp_path: Path) -> None:
    done = command(tmp_path, "doctor", "--run", *LOCAL, "--nodes", "2", "--preflight=warn")
    lines = done.stdout.splitlines()
    assert "matrix multiply" in lines[0]
    assert lines[1].startswith("median")
    assert sum("(node " in line and "host " not in line for line in lines) == 2
    [record] = Records().all()
    assert record.name == "preflight"


def test_doctor_run_names_broken_host_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so is missing')\n")
    export = f"export PYTHONPATH='{tmp_path}'"
    setup = f'if [ "$CLUSTERJOB_NODE_RANK" = 1 ]; then {export}; fi'
    words = ("--nodes", "3", "--setup", setup, "--json")
    found = json.loads(command(tmp_path, "doctor", "--run", *LOCAL, *words, code=1).stdout)
    assert found["state"] == "FAILED"
    [slow] = found["slow"]
    assert "(node 1): " in slow
    assert "torch cannot be imported: libcudart.so is missing" in slow
