"""A job submits another job.

The node zip on its PYTHONPATH shadows the installed package and contains all needed modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT
from slurm_user import User
from sshsite import Site

# Jobs start workers by exec, so that nothing imports torch.
OUTER = """
    import os, subprocess, sys
    if os.environ["RANK"] == "0":
        command = [sys.executable, "-m", "clusterjob", "run", "--cluster", sys.argv[1]]
        options = ["--start", "exec", "--nodes", "2"]
        sys.exit(subprocess.run([*command, *options, "inner.py"]).returncode)
"""
INNER = """
    import os, clusterjob
    print("inner", os.environ["RANK"], os.environ["WORLD_SIZE"], clusterjob.__file__.split("/")[-3])
"""
SUBMITS_FUNCTION = """
    import os, clusterjob
    def add(a, b):
        return a + b
    if __name__ == "__main__" and os.environ["RANK"] == "0":
        job = clusterjob.submit(add, 2, 3, cluster="local")
        print("result", job.result())
"""


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set a directory for the records of inner jobs.

    Only local jobs inherit CLUSTERJOB_HOME.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def expected(out: str) -> list[str]:
    return sorted(line[line.index("inner") :] for line in out.splitlines() if "inner" in line)


def write(directory: Path) -> None:
    (directory / "outer.py").write_text(textwrap.dedent(OUTER))
    (directory / "inner.py").write_text(textwrap.dedent(INNER))


def test_local_job_runs_local_job(tmp_path: Path) -> None:
    write(tmp_path)
    command = [
        sys.executable,
        "-m",
        "clusterjob",
        "run",
        "--cluster",
        "local",
        "--start",
        "exec",
        "--nodes",
        "2",
        "outer.py",
        "local",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT * 2
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert expected(done.stdout) == [
        "inner 0 2 clusterjob-node.pyz",
        "inner 1 2 clusterjob-node.pyz",
    ]
    records = [
        json.loads(path.read_text())
        for path in Path(os.environ["CLUSTERJOB_HOME"]).glob("records/*.json")
    ]
    assert sorted(record["name"] for record in records) == ["inner", "outer"]
    zips = {Path(record["job_dir"], "clusterjob-node.pyz").read_bytes() for record in records}
    assert len(zips) == 1


def test_job_submits_function(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(textwrap.dedent(SUBMITS_FUNCTION))
    options = ["--cluster", "local", "--start", "exec"]
    command = [sys.executable, "-m", "clusterjob", "run", *options, "outer.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TEST_TIMEOUT * 2
    )
    assert "result 5" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["slurm", "local"])
def test_slurm_job_runs_job(user: User, inner: str) -> None:
    user.patch.setenv("CLUSTERJOB_PYTHON", sys.executable)
    write(user.directory)
    options = ("--gpus-per-node", "0", "--nodes", "1", "--nproc-per-node", "2", "--start", "exec")
    done = user("run", "--cluster", "slurm", *options, "outer.py", inner, timeout=TEST_TIMEOUT * 3)
    assert expected(done.stdout) == [
        "inner 0 2 clusterjob-node.pyz",
        "inner 1 2 clusterjob-node.pyz",
    ]


def test_ssh_job_runs_local_job(site: Site) -> None:
    write(site.directory)
    process = site.command(
        "run",
        *site.options(hosts="gpu1", python=sys.executable, nproc_per_node="2"),
        "--start",
        "exec",
        "outer.py",
        "local",
    )
    out, err = process.communicate(timeout=TEST_TIMEOUT * 2)
    assert process.returncode == 0, out + err
    assert expected(out) == ["inner 0 2 clusterjob-node.pyz", "inner 1 2 clusterjob-node.pyz"]
