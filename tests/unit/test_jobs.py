"""Job functions: make a spec, a plan and a record from settings; submit and follow jobs.

The local backend runs the jobs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from launching import write_tree

from clusterjob.backends import base
from clusterjob.backends.base import Status
from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.config import Settings
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Records
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import (
    PlacementError,
    SpecError,
    SubmitInDoubtError,
    UnknownCluster,
)
from clusterjob.node.logs.log_files import LogLine
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState

SCRIPT = Program("script", "script.py")
MakePlan = Callable[..., Plan]


@pytest.fixture
def work(tmp_path: Path, plain_python: str) -> Path:
    """Return a directory with a script; the interpreter of jobs starts fast, without torch."""
    (tmp_path / "script.py").write_text("print('hello')\n")
    return tmp_path


@pytest.fixture
def make_plan(work: Path) -> MakePlan:
    def make(text: str = "print('hello')\n", **flags: Any) -> Plan:
        (work / "script.py").write_text(text)
        settings = job_settings.resolve(flags, "local", directory=work)
        return jobs.plan(job_settings.make_spec(SCRIPT, settings, directory=work), settings)

    return make


def spec_of(directory: Path, **values: Any) -> JobSpec:
    return job_settings.make_spec(
        SCRIPT, Settings("local", "local", values=values), directory=directory
    )


# -- settings and specs ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"},
            ["clusterjob", "CLUSTERJOB_NNODES"],
        ),
        (
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "1",
            },
            ["env", "LOCAL_RANK"],
        ),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, ["torchrun", "RANK"]),
        ({"CLUSTERJOB_NODE_RANK": "0"}, ["clusterjob", "CLUSTERJOB_NODE_RANK"]),
    ],
)
def test_command_inside_job_without_cluster_is_refused(
    work: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], parts: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlacementError) as caught:
        job_settings.resolve({}, None, directory=work)
    assert caught.value.exit_code == 2
    assert all(part in caught.value.message for part in parts)
    assert "clusterjob launch" in caught.value.hint
    assert job_settings.resolve({}, "local", directory=work).backend == "local"


def test_settings_are_converted_to_spec(work: Path) -> None:
    (work / "t.j2").touch()
    spec = spec_of(
        work,
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=3,
        mem=5,
        time=6,
        name="n",
        env={"A": "b"},
        workdir=Path("."),
        python="py",
        setup=("s",),
        max_restarts=7,
        start="exec",
        launcher="ray",
        require_gpus=True,
        template=Path("t.j2"),
        set={"x": "y"},
        join_timeout=8.0,
        lease=9.0,
        grace=10.0,
    )
    assert spec == JobSpec(
        SCRIPT,
        work,
        name="n",
        python="py",
        env={"A": "b"},
        setup=("s",),
        resources=Resources(2, 4, cpus_per_task=3, mem=5, time_limit=6),
        nproc_per_node=4,
        max_restarts=7,
        start="exec",
        launcher="ray",
        require_gpus=True,
        template=work / "t.j2",
        options={"x": "y"},
        join_timeout=8.0,
        lease=9.0,
        grace=10.0,
    )


@pytest.mark.parametrize(
    ("values", "nproc"),
    [
        ({}, 1),
        ({"gpus_per_node": 4}, 4),
        ({"gpus_per_node": 0}, 1),
        ({"nproc_per_node": 2}, 2),
        ({"gpus_per_node": 4, "nproc_per_node": 2}, 2),
    ],
)
def test_worker_count_defaults_to_gpus_per_node(
    work: Path, values: dict[str, int], nproc: int
) -> None:
    assert spec_of(work, **values).nproc_per_node == nproc


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0, "spares": 1}, "--nodes 0: the least value is"),
        ({"nodes": -1, "spares": 2}, "--nodes -1: the least value is"),
        ({"spares": -1}, "--spares -1: the least value is"),
        (
            {"nproc_per_node": 0, "gpus_per_node": 2},
            "--nproc-per-node 0: the least value is",
        ),
    ],
)
def test_wrong_number_is_refused_and_not_replaced_by_a_default(
    work: Path, values: dict[str, int], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        spec_of(work, **values)


def test_workdir_is_relative_to_directory_of_command(work: Path) -> None:
    write_tree(work, **{"sub/script.py": ""})
    assert spec_of(work).workdir == work
    assert spec_of(work, workdir=Path("sub")).workdir == work / "sub"
    assert spec_of(Path("/"), workdir=work / "sub").workdir == work / "sub"


@pytest.mark.parametrize(
    ("environ", "environment"),
    [
        ({"VIRTUAL_ENV": "venv", "CONDA_PREFIX": "conda"}, "venv"),
        ({"CONDA_PREFIX": "conda"}, "conda"),
        ({"VIRTUAL_ENV": "empty", "CONDA_PREFIX": "conda"}, "conda"),
        ({"VIRTUAL_ENV": "empty"}, None),
        ({"VIRTUAL_ENV": ""}, None),
        ({}, None),
    ],
)
def test_default_python_is_interpreter_of_active_environment(
    tmp_path: Path, environ: dict[str, str], environment: str | None
) -> None:
    write_tree(tmp_path, **{"venv/bin/python": "", "conda/bin/python": "", "empty/bin/x": ""})
    set_to = {name: value and str(tmp_path / value) for name, value in environ.items()}
    wanted = f"{tmp_path / environment}/bin/python" if environment else sys.executable
    assert job_settings.default_python(set_to) == wanted


@pytest.mark.parametrize("on_path", [True, False])
def test_default_python_is_not_interpreter_of_pipx_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_path: bool
) -> None:
    write_tree(tmp_path, **{"bin/python3": "#!/bin/sh\n", "pipx_metadata.json": ""})
    (tmp_path / "bin" / "python3").chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "bin") if on_path else "/nonexistent")
    wanted = str(tmp_path / "bin" / "python3") if on_path else sys.executable
    assert job_settings.default_python({}) == wanted


def test_backend_names_include_local_and_unknown_name_is_error() -> None:
    names = base.names()
    assert (names[0], sorted(names)) == ("local", sorted({*names, "slurm", "ssh", "mlp"}))
    with pytest.raises(UnknownCluster, match="nosuch"):
        base.load("nosuch")


# -- jobs ------------------------------------------------------------------------------------------


def test_submitted_job_has_record_with_handle(make_plan: MakePlan) -> None:
    plan = make_plan(nodes="2", name="a name")
    record = jobs.submit(plan, "lab", detach=True)
    saved = Records().find(plan.job_id).to_json()
    assert saved == json.loads(json.dumps(record.to_json()))
    assert saved.items() >= {
        "job_id": plan.job_id, "name": "a name", "cluster": "lab", "backend": "local", "nodes": 2,
        "job_dir": str(plan.job_dir), "end": None,
    }.items()  # fmt: skip
    assert (record.handle.backend, record.handle.id) == ("local", plan.job_id)
    assert [agent["node_rank"] for agent in record.handle.data["agents"]] == [0, 1]
    assert polling.wait(record).state is JobState.SUCCEEDED


def test_follow_returns_lines_and_verdict_of_job(make_plan: MakePlan) -> None:
    record = jobs.submit(
        make_plan("print('one')\nprint('two')\nraise SystemExit(3)\n"), "local", detach=True
    )
    for each in (record, Records().find(record.job_id)):  # and again, on another day
        lines: list[LogLine] = []
        updates: list[Status] = []
        verdict = polling.follow(
            each,
            lambda batches, lines=lines: lines.extend(chain.from_iterable(batches)),
            progress=updates.append,
        )
        assert (verdict.state, verdict.exit_code) == (JobState.FAILED, 3)
        shown = [(line.rank, line.stream, line.text) for line in lines]
        assert shown == [(0, "out", "one"), (0, "out", "two")]
        assert [update.state for update in updates if update.state.final] == []
    assert polling.wait(record) == verdict


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SubmitInDoubtError("nobody knows")])
def test_job_of_an_interrupted_or_doubtful_submission_is_recorded(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Failing(LocalBackend):
        def submit(self, plan: Plan) -> Handle:
            raise error

    plan = make_plan()
    monkeypatch.setitem(base._loaded, "local", Failing())
    with pytest.raises(type(error)) as caught:
        jobs.submit(plan, "local", detach=True)
    record = Records().find(plan.job_id)
    assert record.handle is None
    if isinstance(caught.value, SubmitInDoubtError):
        assert f"`clusterjob status {plan.job_id}`" in caught.value.hint
    else:
        gone = replace(record, submitter=None)
        assert polling.status(gone).state is JobState.CANCELLED
