"""Parse the command line of `clusterjob launch`, which starts one node of a job.

Rendered scripts, a platform's entry command or a person run it on each node.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from clusterjob.errors import SpecError, UsageError, did_you_mean
from clusterjob.node.program import NO_EFFECT, STDIN, WORKER_WORDS, Program
from clusterjob.node.verdict import FailureKind

START_MODES = ("auto", "fork", "exec")
LAUNCHERS = ("agent", "ray")
PREFLIGHT_MODES = ("off", "warn", "refuse")
GRACE = 3.0  # seconds between SIGTERM and SIGKILL of an ordered stop, without --grace
_RETRY = re.compile(
    r"(?P<kind>[^:]*)(?::(?P<times>\d{1,6}))?(?::mem\*(?P<memory>\d{1,2}(?:\.\d{1,3})?))?", re.ASCII
)


def _at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that reads a whole number with a minimum."""

    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{value}: must be at least {minimum}")
        return value

    return number


_COUNT = _at_least(1)


def _workers(text: str) -> int | str:
    return text if text in WORKER_WORDS else _COUNT(text)


def seconds(text: str) -> float:
    """Read a number of seconds above 0, or one with a unit, such as 10m."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    value = float(text[:-1]) * unit if unit else float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of seconds above 0")
    return value


@dataclass(frozen=True)
class Retry:
    """One --retry: the restarts after failures of one kind.

    Attributes:
        times: maximum number of restarts in the whole job; None for that of --max-restarts, at
            least 1.
        memory: the factor by which the memory grows each time; 0.0 for the same memory.
    """

    kind: FailureKind
    times: int | None = None
    memory: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Retry:
        """Read ``KIND``, ``KIND:N`` or ``oom_host:N:mem*FACTOR``.

        Raises:
            SpecError: the text has another form, or the kind is unknown.
        """
        found = _RETRY.fullmatch(text.strip())
        if found is None:
            raise SpecError(f"{text!r}: write KIND, KIND:N or oom_host:N:mem*1.5")
        kinds = [kind.value for kind in FailureKind]
        if found["kind"] not in kinds:
            hint = did_you_mean(found["kind"], kinds, f"the kinds are {', '.join(kinds)}")
            raise SpecError(f"{text!r}: there is no kind {found['kind']!r}", hint)
        memory = float(found["memory"] or 0)
        if found["memory"] and (found["kind"] != FailureKind.OOM_HOST or memory <= 1):
            raise SpecError(f"{text!r}: only oom_host:N:mem*FACTOR, above 1, grows memory")
        times = found["times"]
        return cls(FailureKind(found["kind"]), int(times) if times else None, memory=memory)


def retries(text: str) -> tuple[str, ...]:
    """Check comma-separated values of --retry, and return each.

    Raises:
        SpecError: one of them is wrong.
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        Retry.parse(word)
    return words


def _signal_name(text: str) -> str:
    from clusterjob.node.system import processes  # large, and only --warn-signal needs it

    try:  # argparse also converts the default, an empty text
        return signal.Signals(processes.signal_number(text)).name if text else ""
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _option(default: Any, help_: str, **keywords: Any) -> Any:
    """Declare an option with its default, its help and other arguments of `add_argument`."""
    return field(default=default, metadata={"help": help_, **keywords})


def _switch(default: bool, help_: str) -> Any:  # noqa: FBT001 - as a default
    """Declare an option that inverts its default."""
    return _option(default, help_, action="store_false" if default else "store_true")


@dataclass(frozen=True)
class LaunchOptions:
    """Options of one node of a job; times are in seconds.

    Attributes:
        program: the program of each worker.
        nproc_per_node: number of workers on this node, or one of `WORKER_WORDS`. None for the
            number of `gpus`; without `gpus`, for the number in the environment, or for 1.
        cpus_per_task: cores per worker, the value of its OMP_NUM_THREADS; None for an even share.
        max_restarts: maximum number of restarts of the workers after a failure.
        retry: --retry KIND[:N] for kinds of failures, each as `Retry.parse` reads it.
        start: ``fork`` the workers from a process that has imported torch, ``exec`` a new process
            for each, or ``auto``: fork if it is safe.
        launcher: ``agent``: clusterjob's agent starts the workers; ``ray``: a Ray cluster, whose
            driver is the program on node 0.
        time_limit: how long the job may run, from when all workers have started, or from the end
            of `join_timeout` if they start later; None for no limit.
        join_timeout: how long the agents wait for each other.
        spares: nodes without workers that take the place of lost ones.
        min_nodes: the smallest number of nodes with which the job runs; None for all of them,
            without the spares.
        lease: time without a message after which the peer counts as lost.
        preflight: whether to measure the nodes before the workers start: ``off``, ``warn`` about a
            slow host, or ``refuse`` to start on it.
        hang_timeout: time without output, heartbeat or change of a stack after which the job
            hangs; None for no detection.
        grace: time between SIGTERM and SIGKILL when the workers are stopped; None for `GRACE`, or
            30 s after a failure.
        lifeline: whether the end of stdin cancels the job; a file ``detached`` in the job's
            directory prevents that.
        echo: whether to show the workers' output on this command's stdout and stderr.
        warning: time between a preemption warning and the end of the job; None if the job cannot
            be preempted.
        warn_signal: signal that the workers get with the warning, such as SIGUSR1; each end of a
            worker is then an answer to it. Empty for none.
        until_done: whether the job runs again until it is done: it then ends with exit code 75
            after an attempt that another one may complete; see `rendezvous.until_done`.
        checkpoint_dir: directory in which an attempt leaves newer files; empty if it is unknown.
        require_gpus: number of GPUs that this node's workers must see; else the job ends before the
            script starts. 0 for any; None for one per worker, as far as the platform's variables
            promise them.
        require_token: whether to refuse a job of several nodes without the job's secret.
        gpus: GPUs of this node's workers: their number, or their indices or UUIDs as 0,1 or
            device=5; None for all visible ones.
        metrics: whether to sample CPU, memory and GPUs.
        metrics_port: port on 127.0.0.1 that serves the samples to Prometheus; 0 for none.
        placement: CLUSTERJOB_* variables from torchrun's options, such as --node-rank.
    """

    program: Program
    nproc_per_node: int | str | None = _option(
        None,
        "Workers on this node: a number, or gpu, cpu or auto to count them.",
        metavar="N",
        type=_workers,
    )
    cpus_per_task: int | None = _option(
        None, "Cores per worker (OMP_NUM_THREADS).", metavar="N", type=_COUNT
    )
    max_restarts: int = _option(
        0,
        "Maximum number of restarts of the workers after a failure (default: 0).",
        metavar="N",
        type=_at_least(0),
    )
    retry: tuple[str, ...] = _option(
        (),
        "Restarts after one kind of failure, such as device:5 or code:0; repeatable.",
        metavar="KIND[:N]",
        type=retries,
        action="append",
    )
    start: str = _option(
        "auto",
        "How workers start: fork after one import of torch, or exec each (default: auto).",
        choices=START_MODES,
    )
    launcher: str = _option("agent", "Launcher of the workers (default: agent).", choices=LAUNCHERS)
    time_limit: float | None = _option(
        None, "Seconds that the job may run (default: no limit).", metavar="SECONDS", type=seconds
    )
    join_timeout: float = _option(
        300.0,
        "Seconds to wait for the other nodes (default: 300).",
        metavar="SECONDS",
        type=seconds,
    )
    spares: int = _option(
        0,
        "Nodes that only take the place of lost ones (default: 0).",
        metavar="N",
        type=_at_least(0),
    )
    min_nodes: int | None = _option(
        None,
        "Smallest number of nodes that may run (default: all but the spares).",
        metavar="N",
        type=_COUNT,
    )
    lease: float = _option(
        10.0,
        "Seconds without a message after which a node is lost (default: 10).",
        metavar="SECONDS",
        type=seconds,
    )
    preflight: str = _option(
        "off",
        "Measure all hosts before the workers start, and refuse a slow one; =warn only warns.",
        choices=PREFLIGHT_MODES,
        nargs="?",
        const="refuse",
    )
    hang_timeout: float | None = _option(
        None,
        "Time without progress after which the job hangs, such as 10m (default: no detection).",
        metavar="TIME",
        type=seconds,
    )
    grace: float | None = _option(
        None,
        "Seconds between SIGTERM and SIGKILL (default: 3; after a failure 30).",
        metavar="SECONDS",
        type=seconds,
    )
    lifeline: bool = _switch(False, "Cancel the job when stdin ends.")
    echo: bool = _switch(True, "Write the workers' output only to their log files.")
    warning: float | None = _option(
        None,
        "Seconds between a preemption warning and the end of the job (default: no warning).",
        metavar="SECONDS",
        type=seconds,
    )
    warn_signal: str = _option(
        "",
        "Signal for the workers at a preemption warning (default: none).",
        metavar="NAME",
        type=_signal_name,
    )
    until_done: bool = _switch(
        False, "Exit with 75 after an attempt that another one may complete."
    )
    checkpoint_dir: str = _option(
        "", "Directory whose newest file shows the progress of --until-done.", metavar="DIR"
    )
    gpus: str | None = _option(
        None, "GPUs of the workers, one worker each: a number, or 0,1 or device=5.", metavar="N"
    )
    require_gpus: int | None = _option(
        None,
        "GPUs that the workers must see, else the job ends; 0 for any"
        " (default: those of the platform's variables, at most one per worker).",
        metavar="N",
        type=_at_least(0),
    )
    require_token: bool = _switch(False, "Refuse several nodes without CLUSTERJOB_TOKEN.")
    metrics: bool = _switch(True, "Take no samples of CPU, memory and GPUs.")
    metrics_port: int = _option(
        0, "Port on 127.0.0.1 for Prometheus (default: none).", metavar="PORT", type=_at_least(0)
    )
    placement: Mapping[str, str] = field(default_factory=dict)

    @property
    def restarts(self) -> bool:
        """Whether the workers may be started again after a failure."""
        return bool(self.max_restarts or self.spares or self.min_nodes)

    def machine_restarts(self, nnodes: int) -> int:
        """Return how many failures of machines restart the job without --max-restarts.

        Args:
            nnodes: the number of all nodes of the job, spare ones included.
        """
        return nnodes - (self.min_nodes or nnodes - self.spares)

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats on a connection between agents."""
        return self.lease / 5

    @property
    def return_timeout(self) -> float:
        """Seconds to wait for an agent that was killed or cut off; then its node counts as lost."""
        return self.lease + 5.0


def parse(argv: Sequence[str]) -> LaunchOptions:
    """Return the options of a launch command line.

    Raises:
        UsageError: an option is unknown, its value is invalid, or there is no program.
    """
    options_part, program = _split_program(list(argv))
    known, unknown = parser().parse_known_args(options_part)
    if unknown:
        raise _no_such_option(unknown[0].partition("=")[0])
    if program is None:
        raise UsageError("nothing to launch", "give a script, -m MODULE, or -- COMMAND")
    values = vars(known)
    placement = {
        variable: value for variable in _PLACEMENT if (value := values.pop(variable)) is not None
    }
    values.pop("no_effect")
    least, colon, most = placement.get(_NNODES, "").partition(":")
    if colon:  # MIN:MAX, as for torchrun
        placement[_NNODES] = most
        values["min_nodes"] = values["min_nodes"] or _minimum(least, most)
    if values.pop("standalone"):
        placement = _STANDALONE
    elif placement.get(_NNODES) == "1":
        placement = {_NODE_RANK: "0"} | placement
    values["retry"] = tuple(word for words in values["retry"] or () for word in words)
    # HOST:PORT of --rdzv-endpoint; port 0 means any, as in torchrun.
    host, colon, port = placement.get(_MASTER_ADDR, "").rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.startswith("[")):
        chosen = {_MASTER_PORT: port} if int(port) else {}
        placement = chosen | placement | {_MASTER_ADDR: host.strip("[]")}
    return LaunchOptions(program=program, placement=placement, **values)


def _minimum(least: str, most: str) -> int | None:
    """Return the smallest number of nodes of an elastic job; None if MIN:MAX is one number."""
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise UsageError(
            f"--nodes {least[:20]}:{most[:20]}: MIN must be at least 1, and at most MAX",
            "write it as 2:4",
        )
    return int(least) if int(least) < int(most) else None


def _split_program(argv: list[str]) -> tuple[list[str], Program | None]:
    """Split the command line into options and the program; all later words are its arguments.

    The options are returned with dashes: torchrun's underscores are the same options.
    """
    takes_value = {
        flag
        for action in parser()._actions
        if action.nargs is None
        for flag in action.option_strings
    }
    index = 0
    while index < len(argv):
        word = argv[index]
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            word = argv[index] = name.replace("_", "-") + equals + value
        kind = {"--": "command", "-m": "module"}.get(word, "script")
        if kind != "script" or word == STDIN or not word.startswith("-"):
            words = argv[index:] if kind == "script" else argv[index + 1 :]
            return argv[:index], Program(kind, words[0], args=tuple(words[1:])) if words else None
        if word == "--preflight" and argv[index + 1 : index + 2] == ["refuse"]:  # not the script
            del argv[index + 1]
        index += 2 if word in takes_value else 1
    return argv, None


_NNODES, _NODE_RANK = "CLUSTERJOB_NNODES", "CLUSTERJOB_NODE_RANK"
_MASTER_ADDR, _MASTER_PORT = "CLUSTERJOB_MASTER_ADDR", "CLUSTERJOB_MASTER_PORT"
# torchrun's options that place a node: the variable that each sets, its flags, form and help.
_PLACEMENT = {
    _NNODES: (
        ("-N", "--nodes", "--nnodes"),
        "N",
        "Number of nodes, or MIN:MAX for a job that may shrink and grow",
    ),
    _NODE_RANK: (("--node-rank",), "RANK", "Rank of this node"),
    _MASTER_ADDR: (("--master-addr", "--rdzv-endpoint"), "HOST", "Address of node 0"),
    _MASTER_PORT: (("--master-port",), "PORT", "Port on node 0"),
}
_STANDALONE = {_NNODES: "1", _NODE_RANK: "0", _MASTER_ADDR: "127.0.0.1"}


def _no_such_option(word: str) -> UsageError:
    known, general = parser()._option_string_actions, "`clusterjob launch --help` lists the options"
    hint = (
        "write the command after --, such as -- bash train.sh"
        if word == "--no-python"
        else did_you_mean(word, sorted(known), general, cutoff=0.7)
    )
    return UsageError(f"there is no option {word}", hint)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, "`clusterjob launch --help` lists the options")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options; it does not know the program."""
    found = _Parser(
        prog="clusterjob launch",
        usage="clusterjob launch [options] SCRIPT [ARGS...] | -m MODULE [ARGS...] | -- COMMAND...",
        description="Run this node's part of a job: read the environment, connect to the other "
        "nodes, run the workers.",
        allow_abbrev=False,
    )
    for each in fields(LaunchOptions):
        if each.metadata:
            flag = f"--{'no-' if each.default is True else ''}{each.name.replace('_', '-')}"
            default = None if each.default == () else each.default
            found.add_argument(flag, dest=each.name, default=default, **each.metadata)
    for variable, (flags, form, help_) in _PLACEMENT.items():
        found.add_argument(
            *flags, dest=variable, metavar=form, help=f"{help_} (default: the environment's)."
        )
    found.add_argument(
        "--standalone", action="store_true", help="One node, whatever the environment says."
    )
    found.add_argument(
        *NO_EFFECT, dest="no_effect", metavar="X", help="No effect: torchrun's rendezvous."
    )
    return found
