"""Parse and write the command line of a node."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from clusterjob.core.spec import launch_arguments
from clusterjob.errors import UsageError
from clusterjob.node import launch
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import Program

PROGRAM = Program("script", "train.py")


def test_command_line_without_options_has_defaults() -> None:
    assert parse(["train.py"]) == LaunchOptions(PROGRAM)
    assert launch_arguments(LaunchOptions(PROGRAM)) == ["train.py"]


# -- begin of the program --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["train.py"], Program("script", "train.py")),
        (
            ["train.py", "--start", "exec", "-m", "--", "x"],
            Program("script", "train.py", args=("--start", "exec", "-m", "--", "x")),
        ),
        (["--start", "exec", "a b.py"], Program("script", "a b.py")),
        (
            ["--lifeline", "train.py", "--lifeline"],
            Program("script", "train.py", args=("--lifeline",)),
        ),
        (["-m", "pkg.mod", "-m", "--help"], Program("module", "pkg.mod", args=("-m", "--help"))),
        (["-m", "-odd"], Program("module", "-odd")),
        (["--", "train.py"], Program("command", "train.py")),
        (["--", "--", "-m"], Program("command", "--", args=("-m",))),
        (["--", "-m", "x"], Program("command", "-m", args=("x",))),
        (["./-train.py"], Program("script", "./-train.py")),
        (
            ["--start", "fork", "--", "sh", "-c", "echo $RANK"],
            Program("command", "sh", args=("-c", "echo $RANK")),
        ),
        ([""], Program("script", "")),
    ],
)
def test_everything_after_program_is_its_argument(argv: list[str], program: Program) -> None:
    assert parse(argv).program == program


@pytest.mark.parametrize(
    "argv",
    [[], ["--"], ["-m"], ["--start", "exec"], ["--lifeline"], ["--nproc-per-node", "2", "--"]],
)
def test_missing_program_is_usage_error_with_hint(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert "nothing to launch" in caught.value.message
    assert caught.value.hint


# -- invalid options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-such-option"],
        ["--no-such-option=3"],
        ["-x"],
        ["--nproc", "2"],  # no abbreviations: a later option might make them ambiguous
        ["--nproc-per-node"],
        ["--lifeline=yes"],
        *[
            [name, value]
            for name in ("--nproc-per-node", "--cpus-per-task")
            for value in ("0", "-1", "x", "", "1.5", "1e3", "9" * 5000)
        ],
        *[["--max-restarts", value] for value in ("-1", "x", "", "0.5")],
        ["--retry", "devise"],
        *[
            [name, value]
            for name in (
                "--time-limit",
                "--join-timeout",
                "--lease",
                "--grace",
                "--warning",
            )
            for value in ("0", "-1", "x", "", "nan", "inf", "-inf", "1e999")
        ],
        ["--start", "spawn"],
        ["--launcher", "slurm"],
        ["--start", ""],
    ],
)
def test_invalid_option_is_usage_error_with_hint(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*argv, "train.py"])
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    assert caught.value.hint


@given(
    st.lists(
        st.text(max_size=8)
        | st.sampled_from(
            [
                "--",
                "-m",
                "--start",
                "--nproc-per-node",
                "--lifeline",
                "exec",
                "2",
                "gpu",
                "auto",
                "a.py",
                "-",
                "--=",
                "-h-",
            ]
        ),
        max_size=6,
    )
)
def test_any_arguments_are_parsed_or_usage_error(argv: list[str]) -> None:
    assume("-h" not in argv and "--help" not in argv)
    try:
        options = parse(argv)
    except UsageError:
        return
    assert parse(launch_arguments(options)) == options


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--nodez=2", "did you mean --nodes?"),
        ("--no-python", "-- bash train.sh"),
        ("--nproc-per-nod", "did you mean --nproc-per-node?"),
        ("--xyzzy=3", "clusterjob launch --help"),
    ],
)
def test_unknown_option_of_launch_names_alternative(option: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([option, "1", "train.py"])
    assert caught.value.message == f"there is no option {option.partition('=')[0]}"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("argv", "placement"),
    [
        ("--nnodes 2 --node_rank=1 --master_addr h --master_port 1234", ("2", "1", "h", "1234")),
        ("-N 2 --node-rank 0 --rdzv_endpoint=h:29500", ("2", "0", "h", "29500")),
        ("--nodes 2 --node-rank 0 --rdzv-endpoint [::1]:29500", ("2", "0", "::1", "29500")),
        ("--nnodes 2:4 --node_rank=1 --rdzv-endpoint h:1", ("4", "1", "h", "1")),
        ("--nnodes 1 --rdzv-endpoint localhost:0", ("1", "0", "localhost", None)),
        ("--rdzv-endpoint h:1 --master-port 2", (None, None, "h", "2")),
        ("--standalone --nnodes 1 --rdzv_backend=c10d --rdzv_id 7", ("1", "0", "127.0.0.1", None)),
        ("--max_restarts=3", (None, None, None, None)),
    ],
)
def test_options_of_torchrun_place_a_node(argv: str, placement: tuple[str | None, ...]) -> None:
    options = parse([*argv.split(), "train.py", "--node_rank", "9"])
    assert options.program.args == ("--node_rank", "9")
    names = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert tuple(options.placement.get(f"CLUSTERJOB_{name}") for name in names) == placement


def test_nodes_of_torchrun_give_the_minimum_of_an_elastic_job() -> None:
    assert parse(["--nnodes", "2:4", "train.py"]).min_nodes == 2
    assert parse(["--nnodes=4:4", "train.py"]).min_nodes is None
    assert parse(["--nodes", "4", "--min-nodes", "3", "train.py"]).min_nodes == 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nodes 4:2", "--nodes 4:2: MIN must be at least 1, and at most MAX"),
        ("--nodes 0:2", "MIN must be at least 1"),
        ("--nodes :2", "MIN must be at least 1"),
        ("--nodes 2:x", "MIN must be at least 1"),
    ],
)
def test_impossible_elastic_job_is_refused(argv: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*argv.split(), "train.py"])
    assert message in caught.value.message


@pytest.mark.parametrize("argv", ["--nodes 1:2 --launcher ray", "--spares 1 --launcher ray"])
def test_other_launchers_refuse_spare_and_elastic_nodes(argv: str) -> None:
    with pytest.raises(UsageError, match="cannot replace a lost node"):
        launch._for_launcher(parse([*argv.split(), "train.py"]))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--standalone --spares 1", "--spares: nodes left for the workers: 0 of 1"),
        ("--nodes 4 --spares 2 --min-nodes 3", "--spares: nodes left for the workers: 2 of 4"),
        ("--nodes 2 --min-nodes 3", "--min-nodes: nodes left for the workers: 2 of 2"),
    ],
)
def test_too_few_nodes_for_the_workers_are_refused(argv: str, message: str) -> None:
    options = parse([*argv.split(), "--node-rank", "0", "--master-addr", "127.0.0.1", "train.py"])
    with pytest.raises(UsageError, match=message):
        launch.launch(options, options.placement)


def test_underscores_are_dashes_in_options_but_not_in_values() -> None:
    options = parse(["--nproc_per_node=2", "--launcher", "agent", "--gpus=a_b", "my_train.py"])
    assert options.program.target == "my_train.py"
    assert (options.nproc_per_node, options.gpus) == (2, "a_b")


def test_preflight_stands_alone_or_has_value_after_equals_sign() -> None:
    alone = parse(["--preflight", "train.py", "--preflight"])
    assert (alone.preflight, alone.program.target) == ("refuse", "train.py")
    assert alone.program.args == ("--preflight",)
    assert parse(["--preflight", "--nodes", "2", "x.py"]).preflight == "refuse"
    named = parse(["--preflight", "refuse", "train.py"])
    assert (named.preflight, named.program.target) == ("refuse", "train.py")
    warned = parse(["--preflight=warn", "train.py"])
    assert warned.preflight == "warn"
    assert launch_arguments(warned) == ["--preflight=warn", "train.py"]
    with pytest.raises(UsageError):
        parse(["--preflight=maybe", "train.py"])
