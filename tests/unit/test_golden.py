"""Rendered scripts, commands and detected environments equal the recorded files.

`python tests/unit/test_golden.py` records them again in tests/golden/, which holds the inputs too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from launching import write_tree

from clusterjob.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
ENVIRONMENTS = GOLDEN / "environments.json"
RENDERED = GOLDEN / "rendered"
SCRIPT = ("train.py", "--lr", "0.1", 'it\'s "$HOME" é')
BACKENDS = {
    "local": ("--cluster", "local"),
    "slurm": ("--cluster", "slurm"),
    "slurm_login": ("--cluster", "slurm", "--login", "me@login1"),
    "ssh": ("--cluster", "ssh", "--hosts", "a,b"),
    "mlp": ("--cluster", "mlp"),
    "mlp_task": (
        "--cluster",
        "mlp",
        "--set",
        "image=torch:2",
        "--set",
        "flavor=ml.8gpu",
        "--set",
        "queue=q-1",
    ),
}
SHAPES: dict[str, tuple[str, ...]] = {
    "one_node": ("--nproc-per-node", "4", *SCRIPT),
    "two_nodes": (
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--cpus-per-task",
        "6",
        "--mem",
        "64G",
        "--time",
        "2h",
        *SCRIPT,
    ),
    "module": ("--nodes", "2", "-m", "pkg.train", "--lr", "0.1"),
    "command": ("--nodes", "2", "--", "bash", "-c", "echo $0; exit 3"),
    "array": ("--array", "0-7%2", *SCRIPT),
    "sweep": ("--sweep", "lr=0.1,0.2", "--sweep", "seed=1,2", "train.py"),
    "environment": (
        "--nodes",
        "2",
        "--env",
        'A=it\'s "$B"',
        "--secret",
        "KEY=secret.txt",
        "--setup",
        "module load cuda/12",
        "--setup",
        "source 'my env/bin/activate'",
        "--workdir",
        "my project",
        "--python",
        "/opt/py thon/bin/python3",
        "--name",
        "it's mine",
        *SCRIPT,
    ),
    "restarts": (
        "--nodes",
        "2",
        "--max-restarts",
        "3",
        "--time",
        "90m",
        "--grace",
        "7",
        "--join-timeout",
        "600",
        "--start",
        "exec",
        *SCRIPT,
    ),
    "until_done": ("--time", "2h", "--until-done", "--checkpoint-dir", "out", *SCRIPT),
    "requeue": ("--nodes", "2", "--requeue", "--time", "90m", "--signal-before", "90s", *SCRIPT),
    "srun": ("--nodes", "2", "--nproc-per-node", "2", "--launcher", "srun", *SCRIPT),
    "container": ("--nodes", "2", "--container", "pyxis:nvcr/pytorch:24.01", *SCRIPT),
    "apptainer": ("--container", "apptainer:image.sif", *SCRIPT),
    "resources": (
        "--nodes",
        "2",
        "--account",
        "lab",
        "--partition",
        "gpu",
        "--nodelist",
        "n[1-4]",
        "--exclude",
        "n3",
        "--reservation",
        "night",
        "--require-gpus",
        *SCRIPT,
    ),
    "own_template": ("--template", "mine.sh.j2", *SCRIPT),
    "qos": ("--set", "qos=high", "--set", "constraint=a100", *SCRIPT),
    "no_sync": ("--no-sync", "--gpus", "0,1", "--gpus-per-node", "2", *SCRIPT),
}
CASES = [(backend, shape) for backend in BACKENDS for shape in SHAPES]


def run(argv: tuple[str, ...]) -> tuple[int, str]:
    """Return exit code and stdout of a `clusterjob` command in this process."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        mock.patch.object(sys, "argv", ["clusterjob", *argv]),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        code = main()
    output.seek(0)
    return code, output.read()


@contextlib.contextmanager
def project(home: Path) -> Iterator[Path]:
    """Enter a project directory with the environment of a minimal shell."""
    workdir = home / "project"
    (workdir / "my project").mkdir(parents=True)
    for folder in (workdir, workdir / "my project"):
        write_tree(
            folder,
            **{
                "train.py": "print(1)\n",
                "secret.txt": "s3cret\n",
                "mine.sh.j2": "#!/bin/bash\necho {{ job_id|sh }} in {{ workdir|sh }}\n",
                "image.sif": "",
            },
        )
    variables = {
        "PATH": os.defpath, "HOME": str(home), "CLUSTERJOB_HOME": str(home / "state"),
        "CUDA_VISIBLE_DEVICES": "", "USER": "me", "XDG_CONFIG_HOME": str(home / "config"),
    }  # fmt: skip
    before = Path.cwd()
    os.chdir(workdir)
    try:
        with mock.patch.dict(os.environ, variables, clear=True):
            yield workdir
    finally:
        os.chdir(before)


def rendered(backend: str, shape: str, home: Path) -> str:
    """Return the output of `clusterjob render --json` with placeholders for varying values."""
    with project(home) as workdir:
        code, output = run(("render", "--json", *BACKENDS[backend], *SHAPES[shape]))
    if code:
        return json.dumps({"exit_code": code}) + "\n"
    plan = json.loads(output)
    job_id = plan["job_id"]
    for file in plan["files"]:
        file["text"] = re.sub(r"\(\d+ bytes, sha256 \w+\)", "(bytes)", file["text"]).split("\n")
    text = json.dumps(plan, indent=1, ensure_ascii=False)
    stem = job_id.rpartition("-")[0]
    for value, name in (
        (job_id, f"{stem}-JOB"),
        (str(workdir), "/WORKDIR"),
        (str(home), "/HOME"),
        (sys.executable, "/PYTHON"),
    ):
        text = text.replace(value, name)
    return text + "\n"


def detected(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return output and exit code of `clusterjob env --json` with these variables."""
    with mock.patch.dict(os.environ, variables, clear=True):
        code, output = run(("env", "--json"))
    return {"exit_code": code, "shown": json.loads(output)}


def record() -> None:
    """Overwrite the recorded files with the current output."""
    cases = json.loads(ENVIRONMENTS.read_text())
    for case in cases.values():
        case.update(detected(case["variables"]))
    ENVIRONMENTS.write_text(json.dumps(cases, indent=1) + "\n")
    shutil.rmtree(RENDERED, ignore_errors=True)
    RENDERED.mkdir()
    for backend, shape in CASES:
        with tempfile.TemporaryDirectory() as home:
            (RENDERED / f"{backend}_{shape}.json").write_text(
                rendered(backend, shape, Path(home).resolve())
            )


@pytest.mark.parametrize(("backend", "shape"), CASES)
def test_rendered_job_equals_recorded_file(backend: str, shape: str, tmp_path: Path) -> None:
    assert rendered(backend, shape, tmp_path) == (RENDERED / f"{backend}_{shape}.json").read_text()


@pytest.mark.parametrize(
    "name", json.loads(ENVIRONMENTS.read_text()) if ENVIRONMENTS.exists() else []
)
def test_detected_environment_equals_recorded_result(name: str) -> None:
    case = json.loads(ENVIRONMENTS.read_text())[name]
    assert detected(case["variables"]) == {"exit_code": case["exit_code"], "shown": case["shown"]}


if __name__ == "__main__":
    record()
