"""On this machine, `submit` runs the code that was submitted, and `run` the current files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import code_writer
import pytest
from commands import command
from launching import write_tree

from clusterjob.core.records import Records

# Edits itself and its module, and fails once: the restart must find neither edit.
EDITS = """
import os, sys, helper
print("ran", helper.V, __file__, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open("helper.py", "w").write("V = 2")
    open("train.py", "w").write("print('edited')")
    sys.exit(1)
"""


OPTIONS = ("--cluster", "local", "--max-restarts", "1")


@pytest.fixture
def project(tmp_path: Path, plain_python: str) -> Path:
    root = tmp_path / "project"
    write_tree(root, **{"train.py": EDITS, "helper.py": "V = 1"})
    return root


def test_restart_of_submitted_job_runs_submitted_code(project: Path) -> None:
    done = command(project, "submit", "--follow", *OPTIONS, "train.py")
    [record] = Records().all()
    main = record.job_dir / "code" / "train.py"
    assert done.stdout.splitlines()[1:] == [f"ran 1 {main}"] * 2
    [shown] = json.loads(command(project, "status", "--json", record.job_id).stdout)["jobs"]
    assert shown["code"] == record.code
    assert shown["code"]["files"] == 2


def test_run_runs_current_files(project: Path) -> None:
    done = command(project, "run", *OPTIONS, "train.py")
    assert f"ran 1 {project / 'train.py'}" in done.stdout
    assert "edited" in done.stdout
    [record] = Records().all()
    assert record.code is None


@pytest.mark.usefixtures("plain_python")
def test_code_is_of_one_submission_and_written_files_and_git_are_told(tmp_path: Path) -> None:
    root = tmp_path / "project"
    said = code_writer.make(root)
    for _ in range(2):
        done = command(root, "submit", "--follow", *OPTIONS, "train.py")
        job_id, *lines = done.stdout.splitlines()
        assert lines == said
        code = Records().find(job_id).job_dir / "code"
        told = f"written beside the code, in {code} on {os.uname().nodename}: last.pt"
        assert f"  {told}" in done.stderr.splitlines()
        assert f"{job_id}: {told}" in command(root, "status", job_id).stdout.splitlines()
    assert not (root / "last.pt").exists()
