"""The mlp cluster's plan: the entry script, the task and the refused options.

Submission is tested in test_mlp_cluster.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import run

from clusterjob.backends.mlp import backend
from clusterjob.core import capabilities
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, SubmitError
from clusterjob.node.program import Program


def entry(spec: JobSpec) -> str:
    return backend.MlpBackend().plan(spec).files[-1].text()


def make_spec(directory: Path, **fields: object) -> JobSpec:
    (directory / "train.py").write_text("print('trained')\n")
    return JobSpec(
        Program("script", "train.py", args=("--x",)),
        **{"workdir": directory, "python": sys.executable, **fields},
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_default", "nproc", "options"),
    [(True, 1, ""), (False, 1, "--nproc-per-node=1 "), (False, 4, "--nproc-per-node=4 ")],
)
def test_entry_script_sets_nproc_per_node_only_if_user_does(
    tmp_path: Path, is_default: bool, nproc: int, options: str
) -> None:
    spec = make_spec(tmp_path, nproc_is_default=is_default, nproc_per_node=nproc, require_gpus=True)
    last = entry(spec).splitlines()[-1]
    assert last == f'exec "$CLUSTERJOB_PYTHON" -m clusterjob launch {options}train.py --x'


def test_missing_interpreter_is_replaced_by_python3_of_image(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "entry.sh").write_text(entry(make_spec(tmp_path, python="/opt/nowhere/python")))
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ran = run(
        ["bash", "entry.sh"],
        tmp_path,
        {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "PATH": path},
        code=0,
    )
    assert "trained" in ran.out


def test_nodes_use_job_directory_of_submitter_if_visible(tmp_path: Path) -> None:
    plan = backend.MlpBackend().plan(make_spec(tmp_path))
    plan.job_dir.mkdir(parents=True, mode=0o700)
    for file in plan.files:
        file.path.write_bytes(file.data)
    (plan.job_dir / "token").write_text("secret-of-the-job")
    run(
        ["bash", plan.files[-1].path],
        tmp_path,
        {"MLP_WORKER_NUM": "1", "MLP_ROLE_INDEX": "0", "PYTHONPATH": ""},
        code=0,
    )
    assert (plan.job_dir / "result.json").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"account": "x"}}, "unknown option 'account'"),
        ({"array": "0-3%2"}, "does not limit"),
        ({"launcher": "srun"}, "needs Slurm"),
        ({"container": "x"}, "--set image=URL"),
        ({"gpus": "0"}, "a task gets whole machines"),
    ],
)
def test_unsupported_options_are_refused(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    spec, mlp = make_spec(tmp_path, resources=Resources(nodes=2), **fields), backend.MlpBackend()

    def plan() -> None:
        capabilities.check(spec, "mlp", mlp)
        mlp.plan(spec)

    with pytest.raises(SpecError) as refused:
        plan()
    assert message in f"{refused.value.message} {refused.value.hint}"


def test_job_without_image_flavor_or_queue_is_not_submitted(tmp_path: Path) -> None:
    plan = backend.MlpBackend().plan(make_spec(tmp_path))
    assert "set image and flavor and queue" in plan.notes[0]
    with pytest.raises(SubmitError) as caught:
        backend.MlpBackend().submit(plan)
    assert "clusterjob render --cluster mlp" in caught.value.hint
