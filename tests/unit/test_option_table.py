"""Option table: one row gives flag, configuration key, variable, help and node option."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import typer
from launching import write_tree
from typer.testing import CliRunner

from clusterjob.backends import shared
from clusterjob.backends.slurm import submit as slurm_submit
from clusterjob.cli import app, job_options
from clusterjob.core import job_settings, jobs
from clusterjob.core.option import Option, Target
from clusterjob.core.options import OPTIONS
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import ClusterJobError
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import Program

COLOUR = Option(
    "colour",
    str,
    help="Colour of the job (default: none).",
    metavar="NAME",
    short="-K",
    target=Target.BACKEND,
)


@pytest.fixture
def colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, "colour", COLOUR)


def spec_of(directory: Path, **flags: str) -> JobSpec:
    settings = job_settings.resolve(flags, "local", directory)
    return job_settings.make_spec(Program("command", "true"), settings, directory=directory)


@pytest.mark.usefixtures("colour")
@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_one_row_adds_an_option_to_flags_files_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    flags = {}
    if source == "flag":
        flags["colour"] = "red"
    elif source == "file":
        (tmp_path / "clusterjob.toml").write_text('[defaults]\ncolour = "red"\n')
    else:
        monkeypatch.setenv("CLUSTERJOB_COLOUR", "red")
    assert spec_of(tmp_path, **flags).options == {"colour": "red"}


@pytest.mark.usefixtures("colour")
def test_one_row_adds_an_option_to_the_command_line_and_its_help() -> None:
    given: dict[str, object] = {}

    def start(ctx: typer.Context, **flags: object) -> None:
        given.update(job_options.flags_given(flags))

    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=job_options.ProgramCommand)(job_options.with_job_options(start))
    done = CliRunner().invoke(app, ["-K", "red", "train.py"])
    assert (done.exit_code, given) == (0, {"colour": "red"}), done.output
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "--colour" in shown
    assert "Colour of the job" in shown


@pytest.mark.parametrize("option", [o for o in OPTIONS.values() if o.node], ids=lambda o: o.key)
def test_option_of_the_node_is_a_launch_option_with_the_same_default(option: Option) -> None:
    known = {field.name: field for field in dataclasses.fields(LaunchOptions)}
    assert option.node in known
    holder = Resources if option.target is Target.RESOURCES else JobSpec
    spec_fields = {field.name: field for field in dataclasses.fields(holder)}
    assert option.key in spec_fields
    if option.key != "nproc_per_node":  # a node counts its GPUs; a job has one worker by default
        assert known[option.node].default == spec_fields[option.key].default


def test_flags_and_variables_of_the_table_are_unique() -> None:
    flags = [flag for o in OPTIONS.values() for flag in (o.flag, o.short) if flag]
    assert len(set(flags)) == len(flags) > 0
    variables = [o.variable for o in OPTIONS.values() if o.variable]
    assert len(set(variables)) == len(variables) > 0


def test_every_launch_option_is_parsed_from_its_own_arguments(tmp_path: Path) -> None:
    changed = LaunchOptions(
        Program("script", "train.py", args=("a",)),
        nproc_per_node="gpu",
        gpus="0,1",
        cpus_per_task=2,
        max_restarts=4,
        retry=("device:5", "code:0"),
        preflight="warn",
        start="fork",
        launcher="ray",
        time_limit=1209601.0,  # not rounded to 1.2096e+06
        join_timeout=7.0,
        lease=9.0,
        grace=4.0,
        warning=30.0,
        require_gpus=8,
        require_token=True,
        lifeline=True,
        echo=False,
        hang_timeout=60.0,
        metrics=False,
        metrics_port=9400,
        spares=1,
        min_nodes=2,
        warn_signal="SIGUSR1",
        until_done=True,
        checkpoint_dir="out",
    )
    assert all(
        getattr(changed, field.name) != field.default
        for field in dataclasses.fields(LaunchOptions)
        if field.name != "program"
    )
    assert parse(launch_arguments(changed)) == changed


ARGPARSE = 'parser.add_argument("--nodes", type=int)\n'


@pytest.mark.parametrize(
    ("args", "source", "expected"),
    [
        (["-p", "gpu", "--nodes", "2"], "import torch\n", ["-p", "gpu", "--nodes", "2"]),
        (["--nodes=2", "-N", "3", "--lr", "1"], "pass\n", ["--nodes=2", "-N", "3"]),
        (["--cpus_per_task", "2", "--uv", "x"], "pass\n", ["--cpus_per_task", "2", "--uv"]),
        (["--nodes", "2", "--name", "a"], ARGPARSE, ["--name", "a"]),
        (["--gpus-per-node", "2"], "class Arguments:\n    gpus_per_node: int\n", []),
        (["--nodes", "2"], "num_nodes = len(args.nodes_list)\n", ["--nodes", "2"]),
        (["--time", "2h"], "import time\nbegin = time.time()\n", ["--time", "2h"]),
        (["-N", "2"], "@click.option('-N')\n", []),
        (["--", "--nodes", "2"], "pass\n", []),
        (["--nodes", "2"], "", []),  # the source is unknown
    ],
)
def test_options_of_clusterjob_after_a_script_that_lacks_them_are_misplaced(
    args: list[str], source: str, expected: list[str]
) -> None:
    own = job_options.own_options(typer.main.get_command(app).commands["submit"])
    program = Program("script", "train.py", args=tuple(args))
    assert job_options.misplaced(program, source, own) == expected


def test_option_after_the_script_is_named_in_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["render", "-t", "5m", "train.py", "--nodes", "2", "--lr", "1"])
    assert shown.exit_code == 0
    assert "stand before it: clusterjob render --nodes 2 train.py\n" in shown.stderr


# A value of each option that is not its default.
VALUES: dict[str, object] = {
    "nodes": "3", "spares": "1", "gpus": "2", "gpus_per_node": "2", "nproc_per_node": "2",
    "cpus_per_task": "2", "mem": "1G", "time": "5m", "env": ["A=b"], "workdir": "/tmp",
    "python": "/usr/bin/python3", "uv": True, "env_archive": "env.tar.gz", "env_cache": "/scratch",
    "setup": ["date"], "max_restarts": "1", "retry": ["device:1"], "start": "fork",
    "launcher": "ray", "require_gpus": True, "template": "t.j2", "set": ["foo=bar"],
    "hosts": "h3,h4,h5", "hostfile": "hosts", "login": "u@login", "transport": "openssh",
    "sync": False, "snapshot": False, "account": "a", "partition": "p", "qos": "q",
    "nodelist": "n1", "exclude": "n2", "reservation": "r", "container": "apptainer:/x.sif",
    "array": "0-3", "sweep": ["lr=1,2"], "after": ["12"], "requeue": True, "signal_before": "90s",
    "warn_signal": "SIGUSR1", "until_done": True, "checkpoint_dir": "/tmp", "notify_cmd": ["date"],
    "notify_on": "start", "preflight": "warn", "hang_timeout": "10m", "metrics": False,
    "metrics_port": "9100", "join_timeout": "10", "lease": "20", "grace": "5",
}  # fmt: skip
# Options whose effect is not in a plan, but in the record, the secrets, the code or the connection.
AT_SUBMISSION = {"name", "secret", "notify", "include_secrets"}
CLUSTERS: dict[str, dict[str, object]] = {
    "local": {},
    "ssh": {"hosts": "h1,h2"},
    "slurm": {},
    "slurm with srun": {"launcher": "srun"},
    "slurm on a login host": {"login": "u@l1"},
    "mlp": {"set": ["image=i", "queue=q", "flavor=f"]},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_option_is_without_effect_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    """Each changes the plan, is noted, or is refused."""
    write_tree(tmp_path, **{"train.py": "pass", "hosts": "h6\n"})
    monkeypatch.setattr(shared, "new_directory", lambda _: ("train-000000", tmp_path / "job"))
    monkeypatch.setattr(slurm_submit, "largest_array", lambda _: 1001)
    fixed = CLUSTERS[cluster]

    def plan(flags: dict[str, object], *, foreground: bool = False) -> object:
        settings = job_settings.resolve(fixed | flags, cluster.split(maxsplit=1)[0], tmp_path)
        spec = job_settings.make_spec(Program("script", "train.py"), settings, directory=tmp_path)
        made = jobs.plan(spec, settings, foreground=foreground)
        of_all = (".json", ".pyz")  # the record and the program
        files = [each for each in made.files if each.path.suffix not in of_all]
        return (made.notes, made.commands, files, made.array, made.code is None, made.sends_code)

    plain, silent = plan({}), []
    skipped = AT_SUBMISSION | ({"transport"} if {"login", "hosts"} & {*fixed} else set())
    skipped |= {"metrics"} if "launcher" in fixed else set()  # srun takes none
    for key in {*OPTIONS} - skipped:
        try:
            same = plan({key: VALUES[key]}) == plain
        except ClusterJobError:
            same = False
        silent += [key] if same else []
    assert silent == []
    if cluster == "local":
        run = (plan({"snapshot": True}, foreground=True), plan({}, foreground=True))
        assert run[0] != run[1]
