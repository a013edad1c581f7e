"""`clusterjob init` and completion on a login node of a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from commands import CLUSTERJOB
from doctoring import doctor
from slurm_user import User

from clusterjob.core import config_files


def test_init_writes_the_partition_and_passes_doctor(user: User) -> None:
    done = user("init", "--yes")
    assert "found Slurm on this machine: partitions main (default), small" in done.stderr
    file = config_files.project_file(user.path("clusterjob.toml"))
    assert file.data["cluster"] == "slurm"
    profile = file.data["clusters"]["slurm"]
    assert (profile["backend"], profile["partition"]) == ("slurm", "main")
    text = user.path("clusterjob.toml").read_text()
    assert "main: no time limit; small: time limit 1:00:00" in text
    assert "# gpus = 8  # a node of main has 8" in text
    found = doctor(cwd=user.directory)
    assert found.fit, found
    assert found.message("partitions") == (
        "main (default): up, no time limit, nodes: 4 idle, 8 GPUs a node"
    )


def test_partitions_are_completed(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    argv = [*CLUSTERJOB, "__complete", "fish", "clusterjob", "submit", "-p", ""]
    for _ in range(50):  # on a busy machine, sinfo answers after the first TAB
        done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=user.directory)
        if done.stdout:
            break
    assert done.stdout.split() == ["main", "small"]
    assert json.dumps(sorted(os.listdir(tmp_path / "cache/clusterjob"))) == '["partitions"]'
