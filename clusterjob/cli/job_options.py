"""What ``submit``, ``run`` and ``render`` have in common: the options of a job, and a command line
that ends in a program.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from clusterjob.node.program import Program

_PROGRAM = "clusterjob.program"
_JOB = "Job"

Text = str | None


def _job_options(
    cluster: Annotated[
        Text,
        typer.Option("--cluster", metavar="NAME", help="A profile, or a backend such as local."),
    ] = None,
    nodes: Annotated[Text, typer.Option("--nodes", metavar="N", help="Machines.")] = None,
    gpus_per_node: Annotated[
        Text, typer.Option("--gpus-per-node", metavar="N", help="GPUs on each.")
    ] = None,
    nproc_per_node: Annotated[
        Text,
        typer.Option(
            "--nproc-per-node", metavar="N", help="Workers on each; default: its GPUs, else 1."
        ),
    ] = None,
    cpus_per_task: Annotated[
        Text, typer.Option("--cpus-per-task", metavar="N", help="Cores per worker.")
    ] = None,
    mem: Annotated[
        Text, typer.Option("--mem", metavar="SIZE", help="Memory per node, such as 64G.")
    ] = None,
    time: Annotated[
        Text,
        typer.Option(
            "--time",
            metavar="LIMIT",
            help="Time limit: 90s, 30m, 2h, HH:MM:SS; a bare number is minutes.",
        ),
    ] = None,
    name: Annotated[
        Text, typer.Option("--name", metavar="NAME", help="Default: the script's.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="K=V",
            help="A public variable for the workers; K alone copies its value from here; repeatable.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="K[=FILE]",
            help="A secret variable: its value here, or FILE's content; never shown; repeatable.",
        ),
    ] = None,
    workdir: Annotated[
        Text,
        typer.Option("--workdir", metavar="DIR", help="Where the workers start; default: here."),
    ] = None,
    python: Annotated[
        Text,
        typer.Option(
            "--python", metavar="PATH", help="The interpreter; default: the active environment's."
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup", metavar="CMD", help="Shell line run first on each node; repeatable."
        ),
    ] = None,
    max_restarts: Annotated[
        Text,
        typer.Option(
            "--max-restarts", metavar="N", help="Restarts of the workers after a failure."
        ),
    ] = None,
    start: Annotated[
        Text,
        typer.Option(
            "--start", metavar="MODE", help="fork (torch imported once a node), exec, or auto."
        ),
    ] = None,
    launcher: Annotated[
        Text,
        typer.Option(
            "--launcher",
            metavar="WHO",
            help="Who starts the workers: agent (ours), torchrun, or srun (Slurm alone).",
        ),
    ] = None,
    require_gpus: Annotated[
        bool | None,
        typer.Option(
            "--require-gpus/--no-require-gpus", help="Too few GPUs: an error, not a rehearsal."
        ),
    ] = None,
    template: Annotated[
        Text, typer.Option("--template", metavar="FILE", help="Your own script template.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any option of the backend; repeatable."),
    ] = None,
    hosts: Annotated[
        Text,
        typer.Option(
            "--hosts", metavar="LIST", help="Hosts to run on over SSH: a,b[1-4],user@c:2222."
        ),
    ] = None,
    hostfile: Annotated[
        Text,
        typer.Option(
            "--hostfile", metavar="FILE", help="... from a file: a host a line, slots=8 after it."
        ),
    ] = None,
    login: Annotated[
        Text,
        typer.Option(
            "--login", metavar="HOST", help="Submit to Slurm on this login host: user@login1."
        ),
    ] = None,
    gpus: Annotated[
        Text,
        typer.Option(
            "--gpus", metavar="LIST", help="Which cards of each host: 0,1,4, or auto for idle ones."
        ),
    ] = None,
    sync: Annotated[
        bool | None,
        typer.Option(
            "--sync/--no-sync",
            help="Send the working directory to the hosts, or use what a shared disk has.",
        ),
    ] = None,
    include_secrets: Annotated[
        bool | None,
        typer.Option(
            "--include-secrets/--no-include-secrets",
            help="Send files that look like secrets too, such as .env (default: no).",
        ),
    ] = None,
    account: Annotated[
        Text, typer.Option("--account", metavar="NAME", help="Who pays for the job.")
    ] = None,
    partition: Annotated[
        Text, typer.Option("--partition", metavar="NAME", help="Slurm's partition.")
    ] = None,
    nodelist: Annotated[
        Text, typer.Option("--nodelist", metavar="NODES", help="These nodes, such as gpu[1-4].")
    ] = None,
    exclude: Annotated[
        Text, typer.Option("--exclude", metavar="NODES", help="Any nodes but these.")
    ] = None,
    reservation: Annotated[
        Text, typer.Option("--reservation", metavar="NAME", help="Nodes that were set aside.")
    ] = None,
    container: Annotated[
        Text,
        typer.Option(
            "--container",
            metavar="IMAGE",
            help="Run in a container: pyxis:IMAGE, apptainer:IMAGE, or a .sif file.",
        ),
    ] = None,
    array: Annotated[
        Text,
        typer.Option(
            "--array",
            metavar="0-99%8",
            help="One job for each index; %8: as many at a time; for a sweep, %8 alone.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="K=A,B",
            help="One job for each value: an argument --K=A, or {K} in the arguments; repeatable.",
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after", metavar="ID", help="Start after this job; afterany:ID and such; repeatable."
        ),
    ] = None,
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Queue again when preempted or out of time."),
    ] = None,
    signal_before: Annotated[
        Text,
        typer.Option(
            "--signal-before",
            metavar="TIME",
            help="Warn the workers so long before the time limit, such as 90s.",
        ),
    ] = None,
    join_timeout: Annotated[
        Text,
        typer.Option("--join-timeout", metavar="S", help="Seconds that nodes wait for each other."),
    ] = None,
    grace: Annotated[
        Text,
        typer.Option("--grace", metavar="S", help="Seconds between SIGTERM and SIGKILL on cancel."),
    ] = None,
) -> None:
    """Carries the signature alone."""


def with_job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``(ctx, own options, **flags)`` the options of a job in the place of its
    ``**flags``.
    """
    own = inspect.signature(command, eval_str=True)
    mine = [
        parameter
        for parameter in own.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    shared = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(_job_options, eval_str=True).parameters.values()
    ]
    command.__signature__ = own.replace(parameters=[*mine, *shared])  # type: ignore[attr-defined]
    return command


def flags_given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return what the user wrote, by key of `clusterjob.core.options.SETTINGS`."""
    return {
        key.rstrip("_"): value for key, value in flags.items() if value is not None and value != []
    }


class ProgramCommand(TyperCommand):
    """A command whose line ends in a program: all after SCRIPT, -m MODULE or -- is the program's
    own, dashes and all.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Cut the program off before the options are parsed."""
        own, program = self._split(list(args))
        ctx.meta[_PROGRAM] = program
        return super().parse_args(ctx, own)

    def _split(self, args: list[str]) -> tuple[list[str], Program | None]:
        takes_value = {
            word
            for param in self.params
            if not getattr(param, "is_flag", False)
            for word in (*param.opts, *param.secondary_opts)
        }
        index = 0
        while index < len(args):
            word, rest = args[index], tuple(args[index + 2 :])
            if word in ("--", "-m"):
                kind = "command" if word == "--" else "module"
                return args[:index], Program(kind, args[index + 1], args=rest) if index + 1 < len(
                    args
                ) else None
            if not word.startswith("-"):
                return args[:index], Program("script", word, args=tuple(args[index + 1 :]))
            index += 2 if word in takes_value else 1
        return args, None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the parser's own signature
        """Say in the usage line what can stand at the end."""
        return ["[OPTIONS]", "SCRIPT [ARGS]... | -m MODULE [ARGS]... | -- COMMAND..."]


def program_of(ctx: typer.Context) -> Program:
    """Return the program of the command line.

    Raises:
        UsageError: there is none.
    """
    from clusterjob.errors import UsageError

    program: Program | None = ctx.meta[_PROGRAM]
    if program is None:
        raise UsageError("there is nothing to run", "give a SCRIPT, -m MODULE, or -- COMMAND")
    return program
