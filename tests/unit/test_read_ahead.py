"""The forkserver reads the script and its directory once for the workers that it forks."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clusterjob.node import program
from clusterjob.node.program import Program


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(program, "_sources", {})


def value_of(script: Program) -> object:
    code, module = program._load_script(script)
    exec(code, module.__dict__)
    return module.__dict__["VALUE"]


def test_each_round_reads_the_script_once_and_finds_new_modules(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("VALUE = 1\n")
    script = Program("script", str(path))
    program.read_ahead(script)
    assert os.fspath(tmp_path) in sys.path_importer_cache
    path.write_text("import new_of_this_round as new\nVALUE = new.VALUE\n")
    assert value_of(script) == 1
    (tmp_path / "new_of_this_round.py").write_text("VALUE = 3\n")
    program.read_ahead(script)
    assert value_of(script) == 3


@pytest.mark.parametrize("name", ["pipe", "missing.py", "/dev/stdin"])
def test_pipe_and_missing_script_are_left_to_the_worker(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    program.read_ahead(Program("script", str(tmp_path / name)))
    assert program._sources == {}
