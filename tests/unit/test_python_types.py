"""Type checkers know the Python API: a user's script passes, and wrong lines are errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import job_options
import pytest
from launching import ROOT
from procs import TEST_TIMEOUT

from clusterjob.api.job_options import JobOptions
from clusterjob.core.options import OPTIONS, read_setting

SCRIPT = Path(__file__).parent.parent / "support" / "typed_script.py"
WRONG = {
    number
    for number, line in enumerate(SCRIPT.read_text().splitlines(), 1)
    if line.endswith("# error")
}


def test_typed_options_equal_the_table() -> None:
    hint = "run tools/job_options.py"
    assert job_options.FILE.read_text() == job_options.text(), hint
    assert set(JobOptions.__annotations__) == {"cluster", *OPTIONS} - {"sweep"}, hint


def test_typed_options_accept_values_of_their_types() -> None:
    samples = {
        "int": 1,
        "str": "1",
        "bool": True,
        "float": 1.5,
        "Sequence[str]": ["A=/b"],
        "Mapping[str, str | int | float]": {"a": "b", "c": 1},
        "Mapping[str, Any]": {"a": True},
    }
    of_key = {
        "notify": "json://127.0.0.1",
        "retry": "device:5",
        "warn_signal": "SIGUSR1",
    }
    for key, option in OPTIONS.items():
        if key in JobOptions.__annotations__:
            union = job_options.TYPES[option.read.__name__].replace("str | os.PathLike[str]", "str")
            kinds = [union] if union.startswith("Mapping") else union.split(" | ")
            for kind in kinds:
                value = of_key.get(key, samples[kind])
                assert read_setting(key, value, origin=key) is not None


def test_pyright_accepts_script_and_finds_wrong_lines(tmp_path: Path) -> None:
    if importlib.util.find_spec("basedpyright") is None:
        pytest.skip("basedpyright is missing: pip install basedpyright")
    shutil.copy(SCRIPT, tmp_path / "script.py")
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == WRONG, done.stdout


@pytest.mark.slow  # it analyses the package for 7 s
def test_mypy_accepts_script_and_finds_wrong_lines(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path / "script.py")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir=cache", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=4 * TEST_TIMEOUT,
        check=False,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    lines = re.findall(r"^script\.py:(\d+): error", done.stdout, re.MULTILINE)
    assert {int(line) for line in lines} == WRONG, done.stdout
    assert "installed, but missing" not in done.stdout
