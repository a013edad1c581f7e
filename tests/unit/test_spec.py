"""Spec of a job: validated once before anything runs, with errors that name the field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.core.hosts import Host
from clusterjob.core.job_secrets import Secret
from clusterjob.core.resources import Resources
from clusterjob.core.spec import MAX_NAME, JobSpec, default_name, launch_arguments
from clusterjob.errors import SpecError
from clusterjob.node.environments.worker_variables import LAUNCH_VARIABLES
from clusterjob.node.options import parse
from clusterjob.node.program import Program

SCRIPT = Program("script", "train.py")


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('hello')\n")
    return tmp_path


def refused(workdir: Path, program: Program = SCRIPT, **fields: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        JobSpec(program, workdir, **fields)
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"nodes": 0}, "--nodes 0: the least value is"),
        ({"nodes": -1}, "--nodes -1: the least value is"),
        ({"gpus_per_node": -1}, "--gpus -1: the least value is"),
        ({"cpus_per_task": 0}, "--cpus-per-task 0: the least value is"),
        ({"mem": -1}, "--mem -1: the least value is"),
        ({"time_limit": 0}, "--time 0: the least value is"),
    ],
)
def test_resources_below_minimum_are_refused(fields: dict[str, int], label: str) -> None:
    with pytest.raises(SpecError, match=label):
        Resources(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"spares": -1}, "--spares -1: the least value is 0"),
        ({"spares": 2}, "--spares 2: the job has 2 nodes, and none is left for its workers"),
        ({"min_nodes": 3}, "--nodes 3:2: MIN must be at least 1, and at most MAX"),
        ({"min_nodes": 2, "spares": 1}, "--nodes 2:1: MIN must be at least 1, and at most MAX"),
        ({"spares": 1, "launcher": "ray"}, "--spares 1 needs clusterjob's agent"),
        ({"min_nodes": 1, "launcher": "srun"}, "--nodes MIN:MAX needs clusterjob's agent"),
        ({"min_nodes": 1, "launcher": "ray"}, "--launcher ray starts the workers"),
    ],
)
def test_impossible_spare_and_elastic_nodes_are_refused(
    workdir: Path, fields: dict[str, Any], message: str
) -> None:
    assert message in refused(workdir, resources=Resources(nodes=2), **fields).message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nproc_per_node": 0}, "--nproc-per-node 0: the least value is"),
        ({"max_restarts": -1}, "--max-restarts -1: the least value is"),
        ({"start": "x"}, "start is 'x'"),
        ({"launcher": "mpirun"}, "launcher is 'mpirun'"),
        ({"grace": 0.0}, "grace is 0"),
        ({"grace": float("nan")}, "grace is nan"),
        ({"join_timeout": float("inf")}, "join timeout is inf"),
        ({"lease": 0.0}, "lease is 0"),
        ({"name": "a\nb"}, "is not a valid job name"),
        ({"name": "a\x1b[31m"}, "is not a valid job name"),
        ({"name": "x" * (MAX_NAME + 1)}, "is not a valid job name"),
        ({"env": {"A-B": "1"}}, "'A-B' is not a valid variable name"),
        ({"env": {"": "1"}}, "'' is not a valid variable name"),
        ({"env": {"1A": "1"}}, "'1A' is not a valid variable name"),
        ({"env": {"Ä": "1"}}, "'Ä' is not a valid variable name"),
        ({"env": {"A\n": "1"}}, "is not a valid variable name"),
        ({"env": {"A": "x\0y"}}, "the value of A holds a NUL byte"),
        ({"env": {"CLUSTERJOB_JOB_ID": "1"}}, "CLUSTERJOB_JOB_ID is set by the launcher"),
        ({"setup": ("x\0",)}, "NUL byte"),
        ({"python": "py\0"}, "NUL byte"),
        ({"template": Path("/nonexistent.j2")}, "the template '/nonexistent.j2' does not exist"),
        *(
            ({"program": Program("module", target)}, "is not a module name")
            for target in ("", "a b", "a/b", "a..b", ".a", "a.", "1a", "a-b", "a\n")
        ),
        ({"program": Program("command", "")}, "empty"),
        ({"program": Program("command", "x\0")}, "NUL"),
        ({"program": Program("command", "x", args=("\0",))}, "NUL"),
        (
            {"program": Program("script", "-"), "launcher": "ray"},
            "on standard input needs --launcher agent",
        ),
    ],
)
def test_invalid_field_is_refused_by_name(
    workdir: Path, fields: dict[str, Any], message: str
) -> None:
    assert message in refused(workdir, **fields).message


@pytest.mark.parametrize("name", LAUNCH_VARIABLES)
def test_variable_of_launcher_in_env_is_refused(workdir: Path, name: str) -> None:
    assert name in refused(workdir, env={name: "1"}).message


def test_missing_workdir_and_template_are_refused(workdir: Path) -> None:
    assert (
        f"the working directory '{workdir / 'nowhere'}' does not exist"
        in refused(workdir / "nowhere").message
    )
    assert "does not exist" in refused(workdir / "train.py").message
    assert "template" in refused(workdir, template=workdir).message


def test_missing_script_is_refused_with_nearest_name(workdir: Path) -> None:
    error = refused(workdir, Program("script", "trian.py"))
    assert error.message == f"the script 'trian.py' does not exist (in {workdir})"
    assert error.hint == "did you mean train.py?"
    assert "a command goes after --" in refused(workdir, Program("script", "bash")).hint
    assert refused(workdir, Program("script", "nowhere/train.py")).hint
    assert "is not a file" in refused(workdir.parent, Program("script", workdir.name)).message


def test_script_of_other_language_is_refused_with_command_to_run_it(workdir: Path) -> None:
    (workdir / "train.sh").write_text("#!/bin/bash\n")
    error = refused(workdir, Program("script", "train.sh"))
    assert error.message == "'train.sh' is not a Python script"
    assert error.hint == "a command goes after --: clusterjob submit -- ./train.sh"


@pytest.mark.parametrize("first", [b"#!/usr/bin/env python3\n", b"print('x')\n", b"\x80" * 300])
def test_script_that_may_be_python_is_accepted(workdir: Path, first: bytes) -> None:
    (workdir / "train").write_bytes(first)
    assert JobSpec(Program("script", "train"), workdir).name == "train"


def test_script_with_absolute_path_or_leading_dash_is_accepted(workdir: Path) -> None:
    (workdir / "-x.py").touch()
    JobSpec(Program("script", str(workdir / "train.py")), Path("/"))
    spec = JobSpec(Program("script", "-x.py"), workdir)
    assert parse(launch_arguments(spec.launch_options())).program.target == "./-x.py"


@pytest.mark.parametrize("target", ["a", "a.b", "_a.b1", "größe.x"])
def test_valid_module_name_is_accepted(workdir: Path, target: str) -> None:
    assert JobSpec(Program("module", target), workdir).program.target == target


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (Program("script", "some/train.py"), "train"),
        (Program("script", "a b'c☃.py"), "a-b-c"),
        (Program("module", "a.train"), "a.train"),
        (Program("command", "/bin/bash"), "bash"),
        (Program("command", "'"), "job"),
        (Program("script", "größe.py"), "größe"),
        (Program("script", "x" * 200 + ".py"), "x" * MAX_NAME),
    ],
)
def test_default_name_comes_from_program(program: Program, name: str) -> None:
    assert default_name(program) == name


@given(st.sampled_from(["script", "module", "command"]), st.text())
def test_default_name_of_any_program_is_valid(kind: str, target: str) -> None:
    name = default_name(Program(kind, target))
    assert 0 < len(name) <= MAX_NAME
    assert name.isprintable()


def test_launch_options_carry_values_of_spec(workdir: Path) -> None:
    spec = JobSpec(
        Program("script", "train.py", args=("--lr", "0.1")),
        workdir,
        resources=Resources(nodes=4, cpus_per_task=3, time_limit=90),
        spares=1,
        min_nodes=2,
        nproc_per_node=4,
        max_restarts=2,
        start="exec",
        join_timeout=9.0,
        lease=1.5,
        grace=0.25,
    )
    options = spec.launch_options(lifeline=True, echo=False)
    assert parse(launch_arguments(options)) == options
    names = ("program", "nproc_per_node", "max_restarts", "start", "spares", "min_nodes")
    names += ("join_timeout", "lease", "grace")
    assert {name: getattr(options, name) for name in names} == {
        name: getattr(spec, name) for name in names
    }
    assert (options.cpus_per_task, options.time_limit) == (3, 90.0)
    assert (options.lifeline, options.echo) == (True, False)


def test_spec_survives_its_json_form(workdir: Path) -> None:
    spec = JobSpec(
        Program("script", "train.py", args=("--lr", "0.1")),
        workdir,
        env={"A": "b"},
        setup=("module load x",),
        resources=Resources(nodes=4, gpus_per_node=8, gpu_type="a100"),
        spares=1,
        min_nodes=2,
        hosts=(Host("gpu1", user="me", port=22), Host("gpu2")),
        options={"qos": "high"},
        after=("x-1",),
        signal_before=90,
        sync=False,
        grace=5,
        env_archive=workdir / "env.tar.gz",
        env_cache="/scratch",
    )
    assert JobSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_spec_of_removed_directory_is_still_read(workdir: Path) -> None:
    data = JobSpec(SCRIPT, workdir).to_json()
    shutil.rmtree(workdir)
    assert JobSpec.from_json(data).program.target == "train.py"


def test_secret_of_a_recorded_spec_has_only_its_name(tmp_path: Path) -> None:
    spec = JobSpec(Program("command", "true"), tmp_path, secret=(Secret("KEY", tmp_path / "k"),))
    assert JobSpec.from_json(spec.to_json()).secret == (Secret("KEY"),)


def test_script_on_stdin_is_named_job(workdir: Path) -> None:
    assert JobSpec(Program("script", "-", args=("--lr", "1")), workdir).name == "job"


def test_unknown_and_missing_keys_of_a_recorded_spec_are_accepted() -> None:
    spec = JobSpec.from_json({"name": "x", "added later": 1})
    assert (spec.name, spec.launcher, spec.grace) == ("x", "agent", JobSpec.grace)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", 7),
        ("nproc_per_node", "8"),
        ("sync", 1),
        ("grace", "3"),
        ("program", "train.py"),
        ("program", {"kind": "script"}),
        ("resources", {"nodes": 0}),
        ("resources", {"cores": 1}),
        ("hosts", [{"host": "x"}]),
        ("options", ["a"]),
        ("setup", 7),
        ("workdir", None),
    ],
)
def test_wrong_value_of_a_recorded_spec_is_refused_by_its_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{key}: "):
        JobSpec.from_json({key: value})
