"""Convert a job to the fields of a platform task.

The tests also check that values stay data in YAML and in bash.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import executable, new_folder, write_tree

from clusterjob.backends.mlp import backend, task
from clusterjob.backends.slurm import flags
from clusterjob.core import job_settings, jobs, node_zip, render
from clusterjob.core.options import read_setting
from clusterjob.core.plans import Plan
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, SubmitError, TemplateError
from clusterjob.node.program import Program

GOOD = {"image": "i:1", "queue": "train", "flavor": "ml.a"}
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(autouse=True)
def _no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the node zip: packing takes a second and no test here reads it."""
    monkeypatch.setattr(node_zip, "node_zip", lambda _: b"the node half")


def make(directory: Path, **fields: Any) -> JobSpec:
    (directory / "train.py").write_text("print('trained')\n")
    options = GOOD | fields.pop("options", {})
    return JobSpec(
        Program("script", "train.py", args=fields.pop("args", ())),
        **{"workdir": directory, "python": sys.executable, "options": options, **fields},
    )


def planned(plan: Plan) -> dict[str, Any]:
    (file,) = [file for file in plan.files if file.path.name == "task.yaml"]
    return yaml.safe_load(file.text())


def fields(directory: Path, **given: Any) -> dict[str, Any]:
    return planned(backend.MlpBackend().plan(make(directory, **given)))


data = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@given(value=data)
def test_yaml_of_value_is_one_line_and_is_read_back(value: Any) -> None:
    text = render.yaml(value)
    assert len(text.splitlines()) <= 1
    assert yaml.safe_load(f"a: {text}\nb: 1\n") == {"a": value, "b": 1}


@pytest.mark.parametrize(
    ("value", "message"),
    [({"path": "\udcff"}, "not valid UTF-8"), (object(), "cannot be written as YAML")],
)
def test_value_without_yaml_form_is_refused(value: object, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render.yaml(value)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=TEXTS.filter(lambda text: text and text.isprintable()),
    args=st.lists(TEXTS, max_size=4),
    value=TEXTS,
    storages=st.lists(
        st.dictionaries(st.sampled_from(["Type", "MountPath", "SubPath", "Bucket"]), TEXTS),
        max_size=3,
    ),
    image=TEXTS.filter(bool),
)
def test_hostile_values_stay_data_in_task_and_entry_script(
    tmp_path: Path,
    name: str,
    args: list[str],
    value: str,
    storages: list[dict[str, str]],
    image: str,
) -> None:
    options = {
        "storages": json.dumps(storages, ensure_ascii=False),
        "image": image,
        "code_path": '/root/it\'s "$HOME"\\',
    }
    if load_yaml(options["storages"]) != storages:
        options["storages"] = render.yaml(storages)
    printer = executable(tmp_path / "python", '#!/bin/bash\nprintf \'%s\\0\' "$VALUE" "$@"\n')
    spec = make(
        tmp_path,
        python=str(printer),
        name=name,
        args=tuple(args),
        env={"VALUE": value},
        options=options,
        resources=Resources(nodes=3),
        nproc_is_default=True,
    )
    plan = backend.MlpBackend().plan(spec)
    found = planned(plan)
    assert (found["TaskName"], found["Description"], found["ImageUrl"]) == (
        plan.job_id,
        name,
        image,
    )
    assert found["Storages"] == storages
    assert found["TaskRoleSpecs"] == [{"RoleName": "worker", "RoleReplicas": 3, "Flavor": "ml.a"}]
    entry_arguments = subprocess.run(
        ["bash", "-c", f"set -- {found['Entrypoint']}; printf '%s\\n' \"$@\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert entry_arguments.stdout.splitlines() == [
        "bash",
        '/root/it\'s "$HOME"\\/clusterjob-entry/entry.sh',
    ]
    assert run_entry(tmp_path, plan) == [value, "train.py", *args]


def run_entry(directory: Path, plan: Plan) -> list[str]:
    """Run the entry script as the platform does; return its variable and arguments.

    The interpreter of the job only prints them.
    """
    own = new_folder(directory / "there" / "clusterjob-entry")
    (own / "kept").write_bytes(b"")
    (own / "entry.sh").write_bytes(plan.files[-1].data)
    ran = subprocess.run(
        ["bash", own / "entry.sh"], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    value, zip_file, *arguments = ran.stdout.decode().split("\0")[:-1]
    assert zip_file == str(own / "clusterjob-node.pyz")
    return [value, *arguments]


def load_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


@pytest.mark.parametrize(
    ("options", "gpus", "flavor"),
    [
        ({"flavor": "", "flavors": "{a: 1, b: 8, c: 4}"}, 8, "b"),
        ({"flavor": "b", "flavors": "{a: 1, b: 8}"}, 4, "b"),
        ({"flavor": "x", "flavors": "{a: 1}"}, 4, "x"),
        ({"flavor": "a"}, None, "a"),
    ],
)
def test_flavor_is_found_by_gpu_count_or_checked(
    tmp_path: Path, options: dict[str, str], gpus: int | None, flavor: str
) -> None:
    assert (
        fields(tmp_path, options=options, resources=Resources(gpus_per_node=gpus))["TaskRoleSpecs"][
            0
        ]["Flavor"]
        == flavor
    )


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (
            {"flavor": "", "flavors": "{a: 1, b: 8}"},
            {"resources": Resources(gpus_per_node=4)},
            "no flavor has 4 GPUs",
        ),
        (
            {"flavor": "", "flavors": "{a: 4, b: 4}"},
            {"resources": Resources(gpus_per_node=4)},
            "several flavors have 4 GPUs: a, b",
        ),
        (
            {"flavor": "a", "flavors": "{a: 1}"},
            {"resources": Resources(gpus_per_node=4)},
            "the flavor a has 1 GPUs",
        ),
        ({"flavors": "[a]"}, {}, "not a table of flavors"),
        ({"flavors": "{a: "}, {}, "is not YAML"),
        ({"storages": "text"}, {}, "not a list of tables"),
        ({"priority": "high"}, {}, "not a number"),
        ({"access": "mine"}, {}, "not one of Public"),
        ({"imag": "x"}, {}, "unknown option 'imag'"),
        ({"Task Name": "x"}, {}, "not a field of a task"),
        ({"TaskName": "x"}, {}, "TaskName is set by clusterjob"),
        ({"Framework": "MPI"}, {}, "do not run the entry command on every worker"),
        (
            {"Envs": "[{Name: A, Value: b, IsPrivate: true}]"},
            {},
            "would be kept in the job's record",
        ),
        ({"ImageCredential.RegistryToken": "x"}, {}, "is a secret"),
        ({"ImageCredential": "{RegistryToken: x}"}, {}, "is a secret"),
        ({"secrets": "A-B"}, {}, "is not a variable"),
        ({"secrets": "RANK"}, {}, "set by the launcher"),
        ({"secrets": "KEY"}, {"env": {"KEY": "x"}}, "a value in --env too"),
        ({"code_path": "here"}, {}, "not an absolute path"),
        ({"preemptible": "maybe"}, {}, "neither true nor false"),
    ],
)
def test_invalid_option_is_refused_with_message(
    tmp_path: Path, options: dict[str, str], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        fields(tmp_path, options=options, **more)
    assert message in f"{caught.value.message} {caught.value.hint}"


def test_task_field_is_set_by_its_path(tmp_path: Path) -> None:
    found = fields(
        tmp_path,
        max_restarts=2,
        options={
            "RetryOptions.IntervalSeconds": "7",
            "RetryOptions": "{PolicySets: [Failed, MachineFailure]}",
            "Priority": "4",
            "queue": "q-2026-x",
            "Envs": "[{Name: A, Value: '1'}]",
            "DelayExitTimeSeconds": "60",
            "access": "queue",
            "Storages": "[{Type: Vepfs, MountPath: /d}]",
        },
    )
    assert found["RetryOptions"] == {
        "EnableRetry": True,
        "MaxRetryTimes": 2,
        "IntervalSeconds": 7,
        "PolicySets": ["Failed", "MachineFailure"],
    }
    assert (
        found["Priority"],
        found["ResourceQueueID"],
        found["DelayExitTimeSeconds"],
        found["AccessType"],
    ) == (4, "q-2026-x", 60, "Queue")
    assert found["Envs"] == [
        {"Name": "CLUSTERJOB_TOKEN", "IsPrivate": True},
        {"Name": "A", "Value": "1"},
    ]
    assert found["Storages"] == [{"Type": "Vepfs", "MountPath": "/d"}]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, None),
        ({"max_restarts": 3}, (3, ["Failed"])),
        ({"requeue": True}, (5, ["InstanceReclaimed"])),
        (
            {"requeue": True, "max_restarts": 2, "options": {"retries": "9"}},
            (9, ["Failed", "InstanceReclaimed"]),
        ),
        ({"options": {"preemptible": "true"}}, (5, ["InstanceReclaimed"])),
        ({"max_restarts": 2, "options": {"retries": "0"}}, None),
    ],
)
def test_restarts_become_retries_of_platform(
    tmp_path: Path, spec: dict[str, Any], expected: tuple[int, list[str]] | None
) -> None:
    found = fields(tmp_path, **spec).get("RetryOptions")
    assert (None if found is None else (found["MaxRetryTimes"], found["PolicySets"])) == expected
    script = backend.MlpBackend().plan(make(tmp_path, **spec)).files[-1].text()
    assert "--max-restarts" not in script, "an agent does not restart workers beside the platform"


def test_secrets_are_filled_in_by_name_and_by_field() -> None:
    options = {"secrets": '["KEY", "ALIAS=OTHER", "ImageCredential.RegistryToken=TOKEN_OF_MINE"]'}
    names = ("CLUSTERJOB_TOKEN", "KEY", "ALIAS")
    text = render.yaml({"Envs": [{"Name": name, "IsPrivate": True} for name in names]})
    environ = {"KEY": "k\n'", "OTHER": "o", "TOKEN_OF_MINE": "t"}
    full = task.with_secrets(text, options, token="tok", environ=environ)
    assert [entry["Value"] for entry in full["Envs"]] == ["tok", "k\n'", "o"]
    assert full["ImageCredential"] == {"RegistryToken": "t"}
    with pytest.raises(SubmitError, match="OTHER is not set"):
        task.with_secrets(text, options, token="tok", environ={"KEY": "k"})
    environ["TOKEN_OF_MINE"] = "hush\udcff"
    with pytest.raises(SubmitError, match=r"RegistryToken is not valid UTF-8") as refused:
        task.with_secrets(text, options, token="tok", environ=environ)
    assert "hush" not in f"{refused.value.message} {refused.value.hint} {refused.value.__cause__}"


def test_lists_and_tables_of_cluster_configuration_are_options(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        **{
            "clusterjob.toml": '[clusters.vemlp]\nbackend = "mlp"\n[clusters.vemlp.set]\n'
            'image = "i"\nqueue = "train"\n'
            'flavors = {"ml.b" = 8}\n'
            "preemptible = true\n"
            'storages = [{Type = "Tos", MountPath = "/it\'s", Bucket = "b"}]\n'
            "RetryOptions.IntervalSeconds = 9\n",
            "train.py": "",
        },
    )
    found = job_settings.resolve({"gpus_per_node": "8"}, "vemlp", directory=tmp_path)
    spec = job_settings.make_spec(Program("script", "train.py"), found, directory=tmp_path)
    fields = planned(jobs.plan(spec, found))
    assert fields["Preemptible"] is True
    assert fields["TaskRoleSpecs"][0]["Flavor"] == "ml.b"
    assert fields["RetryOptions"]["IntervalSeconds"] == 9
    assert fields["Storages"] == [{"Type": "Tos", "MountPath": "/it's", "Bucket": "b"}]


def test_list_option_is_refused_by_slurm_backend() -> None:
    options: Mapping[str, str] = read_setting("set", {"exclude": ["n1", "n2"]}, origin="here")
    with pytest.raises(SpecError, match=r"exclude: .* is not a text or a number"):
        flags.options(options)
