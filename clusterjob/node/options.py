"""The command line of a node: what the rendered scripts, a platform's entry command or a person
tell the agent.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from clusterjob.errors import UsageError
from clusterjob.node.program import Program

START_MODES = ("auto", "fork", "exec")
LAUNCHERS = ("agent", "torchrun")


@dataclass(frozen=True)
class LaunchOptions:
    """How one node runs its part of a job. Times are in seconds.

    Attributes:
        program: what each worker runs.
        nproc_per_node: workers on this node; None for the number of `gpus`, else what the
            environment says, else 1.
        cpus_per_task: cores per worker, which become its OMP_NUM_THREADS; None for an even share.
        max_restarts: how often the workers are started again after a failure.
        start: ``fork`` from a process that has imported torch, ``exec`` a fresh one each, or
            ``auto``: fork where it is safe.
        launcher: ``agent`` starts the workers itself, ``torchrun`` leaves that to torch's own agent
            on each node.
        time_limit: how long the job may run, from the roll-call's end; None for no limit.
        join_timeout: how long the agents wait for each other.
        heartbeat: between two signs of life on a connection between agents.
        lease: silence after which the other end counts as lost.
        grace: between SIGTERM and SIGKILL when the job is cancelled or out of time.
        lifeline: whether stdin is a lifeline: its end cancels the job, unless a file ``detached``
            in the job's directory says that the job was let go.
        echo: whether the workers' output is shown on this command's own stdout and stderr.
        warning: the job may be preempted, and is warned this long before the end; None for a job
            that may not.
        insecure_no_token: let nodes join that know no secret: whoever reaches node 0 can end the
            job.
        gpus: the GPUs of this node's workers, as CUDA_VISIBLE_DEVICES names them; None for all that
            are visible.
    """

    program: Program
    nproc_per_node: int | None = None
    cpus_per_task: int | None = None
    max_restarts: int = 0
    start: str = "auto"
    launcher: str = "agent"
    time_limit: float | None = None
    join_timeout: float = 300.0
    heartbeat: float = 2.0
    lease: float = 10.0
    grace: float = 3.0
    lifeline: bool = False
    echo: bool = True
    warning: float | None = None
    gpus: str | None = None
    insecure_no_token: bool = False

    def arguments(self) -> list[str]:
        """Return the command line that `parse` turns into these options: only what differs from the
        defaults.
        """
        words: list[str] = []
        for name, value in vars(self).items():
            if name == "program" or value == getattr(LaunchOptions, name):
                continue
            flag = f"--{name.replace('_', '-')}"
            if isinstance(value, bool):
                words.append(flag if value else f"--no-{flag[2:]}")
            else:
                words += [flag, str(value)]
        return words + self.program.launch_arguments()


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Return the options of a launch command line.

    Raises:
        UsageError: an option is unknown or its value makes no sense, or there is no program.
    """
    options_part, program = _split_program(list(argv))
    known, unknown = _parser().parse_known_args(options_part)
    if unknown:
        raise _no_such_option(unknown[0].partition("=")[0])
    values = vars(known)
    if program is None:
        raise UsageError("nothing to launch", "give a script, -m MODULE, or -- COMMAND")
    return LaunchOptions(program=program, **values)


def _split_program(argv: list[str]) -> tuple[list[str], Program | None]:
    """Cut the command line where the program starts: everything after that point is the program's
    own.
    """
    takes_value = {
        flag
        for action in _parser()._actions
        if action.nargs is None
        for flag in action.option_strings
    }
    index = 0
    while index < len(argv):
        word = argv[index]
        if word == "--":
            command = argv[index + 1 :]
            return argv[:index], Program(
                "command", command[0], args=tuple(command[1:])
            ) if command else None
        if word == "-m":
            module = argv[index + 1 :]
            return argv[:index], Program(
                "module", module[0], args=tuple(module[1:])
            ) if module else None
        if not word.startswith("-"):
            return argv[:index], Program("script", word, args=tuple(argv[index + 1 :]))
        index += 2 if word in takes_value else 1
    return argv, None


# What torchrun has as options, and a node reads from its environment.
_VARIABLES = {
    "--nnodes": "CLUSTERJOB_NNODES", "--nodes": "CLUSTERJOB_NNODES", "-N": "CLUSTERJOB_NNODES",
    "--node-rank": "CLUSTERJOB_NODE_RANK", "--master-addr": "CLUSTERJOB_MASTER_ADDR",
    "--master-port": "CLUSTERJOB_MASTER_PORT", "--rdzv-endpoint": "CLUSTERJOB_MASTER_ADDR",
}  # fmt: skip


def _no_such_option(word: str) -> UsageError:
    spelled = word.replace("_", "-")
    hint = (
        f"did you mean {spelled}?"
        if spelled != word and spelled in _parser()._option_string_actions
        else ""
    )
    if spelled in _VARIABLES:
        hint = f"the environment says so: {_VARIABLES[spelled]}=..., where the platform has no variable of its own"
    return UsageError(
        f"there is no option {word}", hint or "`clusterjob launch --help` lists the options"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "`clusterjob launch --help` lists the options")


def _parser() -> argparse.ArgumentParser:
    default = LaunchOptions
    parser = _Parser(
        prog="clusterjob launch",
        usage="clusterjob launch [options] SCRIPT [ARGS...] | -m MODULE [ARGS...] | -- COMMAND...",
        description="Start this node's part of a job: read the environment, meet the other nodes, run the workers.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=_count, metavar="N", help="workers on this node")
    add("--gpus", metavar="LIST", help="the workers' GPUs, such as 0,1; one worker on each")
    add("--cpus-per-task", type=_count, metavar="N", help="cores per worker (OMP_NUM_THREADS)")
    add(
        "--max-restarts",
        type=_whole,
        default=default.max_restarts,
        metavar="N",
        help="restarts of the workers after a failure",
    )
    add(
        "--start",
        choices=START_MODES,
        default=default.start,
        help="import torch once and fork, or exec each worker",
    )
    add("--launcher", choices=LAUNCHERS, default=default.launcher, help="who starts the workers")
    add("--time-limit", type=_seconds, metavar="SECONDS", help="how long the job may run")
    add(
        "--join-timeout",
        type=_seconds,
        default=default.join_timeout,
        metavar="SECONDS",
        help="how long to wait for the other nodes",
    )
    add(
        "--heartbeat",
        type=_seconds,
        default=default.heartbeat,
        metavar="SECONDS",
        help="between two signs of life",
    )
    add(
        "--lease",
        type=_seconds,
        default=default.lease,
        metavar="SECONDS",
        help="silence after which a node is lost",
    )
    add(
        "--grace",
        type=_seconds,
        default=default.grace,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL",
    )
    add(
        "--warning",
        type=_seconds,
        metavar="SECONDS",
        help="how long before its end a preempted job is warned",
    )
    add(
        "--insecure-no-token",
        action="store_true",
        help="let nodes join without CLUSTERJOB_TOKEN: anybody can end the job",
    )
    add("--lifeline", action="store_true", help="stdin's end cancels the job")
    add(
        "--no-echo",
        dest="echo",
        action="store_false",
        help="leave the workers' output in their files",
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value
