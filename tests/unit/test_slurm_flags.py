"""Convert a job to options of sbatch; refuse unknown, reserved and contradictory options."""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slurm_cluster import SlurmCluster

from clusterjob.backends.slurm import flags, planning
from clusterjob.core.render import sh_line
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.program import Program


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "train.py").touch()

    def make(**fields: Any) -> JobSpec:
        names = ("nodes", "gpus_per_node", "gpu_type", "cpus_per_task", "mem", "time_limit")
        resources = Resources(**{name: fields.pop(name) for name in names if name in fields})
        return JobSpec(Program("script", "train.py"), tmp_path, resources=resources, **fields)

    return make


def test_every_option_of_installed_sbatch_is_known(slurm: SlurmCluster) -> None:
    """A release with new options fails here: add each to the known or to the reserved options."""
    shown = set(re.findall(r"(?<=[\s,])--([a-z][a-z0-9-]+)", slurm.run("sbatch", "--help").stdout))
    assert len(shown) > 60
    assert shown - flags.KNOWN - set(flags._OURS) - {"help", "usage", "version"} == set()


def test_options_of_sbatch_are_passed_through() -> None:
    values = {
        "qos": "high",
        "--constraint": "a100&ib",
        "mail_type": "END,FAIL",
        "exclusive": "true",
        "hold": "false",
        "nice": "-5",
        "oversubscribe": "yes",
        "no-kill": "off",
        "exclude": "n[1-2]",
        "begin": "now+1hour",
    }
    words, unknown = flags.options(values)
    assert words == [
        "--qos=high",
        "--constraint=a100&ib",
        "--mail-type=END,FAIL",
        "--exclusive",
        "--nice=-5",
        "--oversubscribe",
        "--exclude=n[1-2]",
        "--begin=now+1hour",
    ]
    assert unknown == []


@pytest.mark.parametrize(
    "name",
    [
        "container-image",
        "container-mounts",
        "container-writable",
        "container-name",
        "bb-of-the-site",
        "x",
    ],
)
def test_undocumented_option_is_passed_as_option_of_plug_in(name: str) -> None:
    assert flags.options({name: "value"}) == ([f"--{name}=value"], [name])


@pytest.mark.parametrize(
    ("name", "value", "message", "hint"),
    [
        ("partion", "gpu", "sbatch has no option --partion", "did you mean partition?"),
        ("acount", "x", "sbatch has no option --acount", "did you mean account?"),
        ("nodes", "3", "--set nodes is not allowed", "clusterjob uses --nodes instead"),
        ("job_name", "x", "--set job-name is not allowed", "clusterjob uses --name instead"),
        ("output", "/x", "--set output is not allowed", "the job's own logs"),
        ("signal", "TERM@60", "--set signal is not allowed", "--signal-before"),
        ("array", "0-3", "--set array is not allowed", "--array"),
        ("requeue", "true", "--set requeue is not allowed", "--requeue"),
        ("qos", "", "--set qos needs a value", "--set qos=VALUE"),
        ("qos", "a\nb", "contains a line break", "describes each option"),
        ("hold", "maybe", "it is a switch", "true or false"),
        ("", "x", "is not an option of sbatch", "long name"),
        ("qos high", "x", "is not an option of sbatch", "long name"),
        ("qos=high", "x", "is not an option of sbatch", "long name"),
        ("ünicode", "x", "is not an option of sbatch", "long name"),
    ],
)
def test_invalid_or_reserved_option_is_refused(
    name: str, value: str, message: str, hint: str
) -> None:
    with pytest.raises(SpecError) as caught:
        flags.options({name: value})
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1"),
        (
            {"nodes": 3, "nproc_per_node": 4},
            "--nodes=3 --ntasks=3 --ntasks-per-node=1 --cpus-per-task=4",
        ),
        (
            {"nodes": 2, "nproc_per_node": 8, "cpus_per_task": 3},
            "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=24",
        ),
        (
            {"nodes": 2, "nproc_per_node": 8, "launcher": "srun"},
            "--nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=1",
        ),
        (
            {"options": {"exclusive": "true"}, "nproc_per_node": 8},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1",
        ),
        (
            {"options": {"exclusive": "no"}, "nproc_per_node": 8},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=8",
        ),
        (
            {"options": {"exclusive": "user"}, "nproc_per_node": 4},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=4",
        ),
        (
            {"options": {"--exclusive": ""}, "nproc_per_node": 4},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1",
        ),
        (
            {"options": {"cpus_per_gpu": "4"}, "gpus_per_node": 2},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --gpus-per-node=2",
        ),
        (
            {"options": {"tres-per-task": "cpu=8,gres/gpu=1"}, "nproc_per_node": 4},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1",
        ),
        (
            {"options": {"tres_per_task": "cpu:8"}, "launcher": "srun"},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1",
        ),
        (
            {"options": {"tres-per-task": "gres/gpu:2"}},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1",
        ),
        (
            {"gpus_per_node": 2, "gpu_type": "a100", "mem": 0},
            (
                "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 "
                "--gpus-per-node=a100:2 --mem=0"
            ),
        ),
        (
            {"gpus_per_node": 2, "options": {"gres": "gpu:2"}},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1",
        ),
        (
            {"gpus_per_node": 3, "options": {"gres": "shard:1,gpu:a100:2(S:0),gpu"}},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1",
        ),
        (
            {"gpus_per_node": 2, "options": {"gres": "shard:2"}},
            "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 --gpus-per-node=2",
        ),
        ({"gpus_per_node": 0}, "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1"),
        (
            {"gpus_per_node": 8, "mem": 1024**3 + 1, "time_limit": 90061},
            (
                "--nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=1 "
                "--gpus-per-node=8 --mem=1025M --time=1-01:01:01"
            ),
        ),
    ],
)
def test_resources_of_job_become_sbatch_options(
    spec: Any, fields: dict[str, Any], expected: str
) -> None:
    assert flags.shape(spec(**fields)) == expected.split()


@pytest.mark.parametrize(
    ("fields", "words", "of_srun"),
    [
        (
            {"nodes": 3, "spares": 1},
            ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--no-kill"],
            ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--no-kill"],
        ),
        (  # a number of tasks would reduce the nodes to those that the tasks need
            {"nodes": 5, "spares": 1, "min_nodes": 2},
            ["--nodes=3-5", "--no-kill"],
            ["--ntasks-per-node=1", "--no-kill"],
        ),
        (
            {"nodes": 2, "min_nodes": 1, "options": {"no-kill": "off"}},
            ["--nodes=1-2"],
            ["--ntasks-per-node=1", "--no-kill"],
        ),
    ],
)
def test_job_that_survives_a_node_gets_options_for_it(
    spec: Any, fields: dict[str, Any], words: list[str], of_srun: list[str]
) -> None:
    job = spec(**fields)
    assert flags.shape(job)[: len(words)] == words
    assert planning._srun_options(job)[: len(of_srun)] == of_srun
    assert "--wait=0" in planning._srun_options(job)
    assert flags.least_nodes(job) == {3: 3, 5: 3, 2: 1}[job.resources.nodes]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"gpus_per_node": 2, "options": {"gres": "gpu:4"}},
            "--gpus-per-node 2 and --set gres=gpu:4 ask for different GPUs",
        ),
        (
            {"gpus_per_node": 2, "gpu_type": "a100", "options": {"gres": "gpu:h100:2"}},
            "--gpus-per-node a100:2 and --set gres=gpu:h100:2",
        ),
        (
            {"cpus_per_task": 2, "options": {"tres-per-task": "cpu=4"}},
            "--cpus-per-task 2 and --set tres-per-task=cpu=4 both give cores",
        ),
    ],
)
def test_two_options_for_same_resource_are_refused(
    spec: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        flags.shape(spec(**fields))
    assert message in caught.value.message
    assert caught.value.hint == "leave one of them out"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["--no-requeue"]),
        ({"requeue": True}, ["--requeue"]),
        ({"options": {"requeue": "expedite"}}, ["--requeue=expedite"]),
        ({"requeue": True, "options": {"requeue": "expedite"}}, ["--requeue=expedite"]),
    ],
)
def test_requeue_option_is_given_once(
    spec: Any, fields: dict[str, Any], expected: list[str]
) -> None:
    """Slurm 26.05 has a value for --requeue, which only --set can give.

    The Slurm of the tests has no such value, so the test submits nothing.
    """
    job = spec(**fields)
    assert [*flags.requeue(job), *flags.options(job.options)[0]] == expected


def test_gpus_that_may_be_divided_unevenly_give_note(spec: Any) -> None:
    [note] = flags.notes(spec(nodes=2, options={"gpus": "a100:4"}))
    assert (
        "--set gpus=a100:4: Slurm may divide them unevenly among 2 nodes; --gpus-per-node 2" in note
    )
    assert "--gpus-per-node N" in flags.notes(spec(nodes=2, options={"gpus": "3"}))[0]
    assert (
        flags.notes(spec(options={"gpus": "4"}))
        == flags.notes(spec(nodes=2, gpus_per_node=2, options={"gpus": "4"}))
        == []
    )


@given(st.integers(1, 10**8))
def test_time_limit_is_written_in_slurm_format(seconds: int) -> None:
    days, hours, minutes, rest = map(int, re.split("[-:]", flags.clock(seconds)))
    assert ((days * 24 + hours) * 60 + minutes) * 60 + rest == seconds
    assert max(hours, 23) == 23
    assert max(minutes, rest, 59) == 59


def test_percent_sign_in_directory_of_log_is_escaped() -> None:
    assert flags.file_name("/a %j/b", "slurm-%A_%a.out") == "/a %%j/b/slurm-%A_%a.out"


@pytest.mark.parametrize("directory", ["/a\\b", "/a\nb"])
def test_directory_of_log_that_slurm_would_change_is_refused(directory: str) -> None:
    with pytest.raises(SpecError, match="backslash or a line break"):
        flags.file_name(directory, "x")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [("abc-222222", ("afterok", "abc-222222")), ("afterany: abc ", ("afterany", "abc"))],
)
def test_dependency_is_parsed(text: str, parsed: tuple[str, str]) -> None:
    assert flags.split_after(text) == parsed


def test_dependencies_are_written_by_kind() -> None:
    parts = [("afterok", ["1", "2"]), ("afterany", ["3_4"])]
    assert flags.dependency(parts) == "afterok:1:2,afterany:3_4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("afterwards:1", "is not a kind of dependency"),
        ("afterok:", "names no job"),
        ("", "names no job"),
    ],
)
def test_wrong_dependency_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        flags.split_after(text)


@pytest.mark.parametrize(
    ("limit", "warning", "refusal"),
    [
        *((limit, 90, contextlib.nullcontext()) for limit in (None, 151)),
        (150, 90, pytest.raises(SpecError, match="leaves no room")),
        (60, 30, pytest.raises(SpecError, match="leaves no room")),
    ],
)
def test_warning_too_long_for_time_limit_is_refused(
    limit: int | None, warning: int, refusal: Any
) -> None:
    with refusal:
        flags.check_warning(Resources(time_limit=limit), warning)


@pytest.mark.parametrize(
    ("image", "engine", "found"),
    [
        ("pyxis:a/b:c", "pyxis", "--container-image=a/b:c"),
        ("nvcr.io#n/t:1", "pyxis", "--container-image=nvcr.io#n/t:1"),
        ("/images/x.sqsh", "pyxis", "--container-image=/images/x.sqsh"),
        ("apptainer:/x.sqsh", "apptainer", "/x.sqsh"),
        ("x.sif", "apptainer", "x.sif"),
        ("docker://ubuntu", "apptainer", "docker://ubuntu"),
        ("pyxis:x.sif", "pyxis", "--container-image=x.sif"),
    ],
)
def test_container_engine_is_chosen_by_image(
    spec: Any, image: str, engine: str, found: str
) -> None:
    container = planning.container_options(spec(container=image), Path("/jobs/x"))
    assert found in (container.prefix if engine == "apptainer" else container.srun_options)
    assert bool(container.prefix) == (engine == "apptainer")
    assert bool(container.srun_options) == (engine == "pyxis")


@pytest.mark.parametrize(
    ("container", "job_dir", "message"),
    [
        *((image, "/jobs/x", "names no image") for image in ("pyxis:", "apptainer:", "a\nb")),
        ("pyxis:x", "/jobs/a,b", "cannot be mounted"),
    ],
)
def test_container_without_image_or_mountable_directory_is_refused(
    spec: Any, container: str, job_dir: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        planning.container_options(spec(container=container), Path(job_dir))


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12), max_size=4
    )
)
def test_line_of_sweep_is_read_unchanged_by_bash(words: list[str]) -> None:
    """Each element has one line: a line break in a word would move words to the next element."""
    line = sh_line(words)
    assert "\n" not in line
    program = f"set -- {line}\n[ $# = 0 ] || printf '%s\\0' \"$@\""
    shown = subprocess.check_output(["bash", "-c", program])
    assert shown.decode().split("\0")[:-1] == words
