"""Options of a job and the parsing of its program, shared by the commands that start jobs."""

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
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Profile or backend, such as local (default: the configured one).",
        ),
    ] = None,
    nodes: Annotated[
        Text, typer.Option("--nodes", metavar="N", help="Number of nodes (default: 1).")
    ] = None,
    gpus_per_node: Annotated[
        Text,
        typer.Option(
            "--gpus-per-node", metavar="N", help="GPUs per node (default: none requested)."
        ),
    ] = None,
    nproc_per_node: Annotated[
        Text,
        typer.Option(
            "--nproc-per-node", metavar="N", help="Workers per node (default: its GPUs, else 1)."
        ),
    ] = None,
    cpus_per_task: Annotated[
        Text,
        typer.Option(
            "--cpus-per-task",
            metavar="N",
            help="CPU cores per worker (default: an even share of the node).",
        ),
    ] = None,
    mem: Annotated[
        Text,
        typer.Option(
            "--mem", metavar="SIZE", help="Memory per node, such as 64G (default: the cluster's)."
        ),
    ] = None,
    time: Annotated[
        Text,
        typer.Option(
            "--time",
            metavar="LIMIT",
            help="Time limit: 90s, 30m, 2h, HH:MM:SS, or minutes (default: the cluster's).",
        ),
    ] = None,
    name: Annotated[
        Text, typer.Option("--name", metavar="NAME", help="Job name (default: the script's).")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            metavar="K=V",
            help="Public variable for the workers; K alone copies the current value; repeatable "
            "(default: none).",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="K[=FILE]",
            help="Secret variable: its current value, or FILE's content; never shown; repeatable "
            "(default: none).",
        ),
    ] = None,
    workdir: Annotated[
        Text,
        typer.Option(
            "--workdir",
            metavar="DIR",
            help="Working directory of the workers (default: the current directory).",
        ),
    ] = None,
    python: Annotated[
        Text,
        typer.Option(
            "--python",
            metavar="PATH",
            help="Python interpreter (default: the active environment's).",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            metavar="CMD",
            help="Shell line to run first on each node; repeatable (default: none).",
        ),
    ] = None,
    max_restarts: Annotated[
        Text,
        typer.Option(
            "--max-restarts",
            metavar="N",
            help="Maximum number of restarts of the workers after a failure (default: 0).",
        ),
    ] = None,
    start: Annotated[
        Text,
        typer.Option(
            "--start",
            metavar="MODE",
            help="Start method of the workers: fork (one torch import per node), exec, or auto "
            "(default: auto).",
        ),
    ] = None,
    launcher: Annotated[
        Text,
        typer.Option(
            "--launcher",
            metavar="WHO",
            help="Process that starts the workers: agent, torchrun, or srun on Slurm "
            "(default: agent).",
        ),
    ] = None,
    require_gpus: Annotated[
        bool | None,
        typer.Option(
            "--require-gpus/--no-require-gpus",
            help="Error instead of a rehearsal on the CPU if GPUs are missing (default: no).",
        ),
    ] = None,
    template: Annotated[
        Text,
        typer.Option(
            "--template", metavar="FILE", help="Script template file (default: the backend's)."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Option of the backend; repeatable (default: none)."
        ),
    ] = None,
    hosts: Annotated[
        Text,
        typer.Option(
            "--hosts",
            metavar="LIST",
            help="SSH hosts to run on: a,b[1-4],user@c:2222 (default: none).",
        ),
    ] = None,
    hostfile: Annotated[
        Text,
        typer.Option(
            "--hostfile",
            metavar="FILE",
            help="File with one host per line, and optional slots=8 (default: none).",
        ),
    ] = None,
    login: Annotated[
        Text,
        typer.Option(
            "--login",
            metavar="HOST",
            help="Slurm login host to submit on: user@login1 (default: this machine).",
        ),
    ] = None,
    gpus: Annotated[
        Text,
        typer.Option(
            "--gpus",
            metavar="LIST",
            help="GPUs to use on each host: 0,1,4, or auto for idle ones (default: all).",
        ),
    ] = None,
    sync: Annotated[
        bool | None,
        typer.Option(
            "--sync/--no-sync",
            help="Copy of the working directory to the hosts; --no-sync for a shared disk "
            "(default: yes).",
        ),
    ] = None,
    include_secrets: Annotated[
        bool | None,
        typer.Option(
            "--include-secrets/--no-include-secrets",
            help="Copy of files that look like secrets, such as .env (default: no).",
        ),
    ] = None,
    account: Annotated[
        Text,
        typer.Option(
            "--account", metavar="NAME", help="Account to charge (default: the cluster's)."
        ),
    ] = None,
    partition: Annotated[
        Text,
        typer.Option(
            "--partition", metavar="NAME", help="Slurm partition (default: the cluster's)."
        ),
    ] = None,
    nodelist: Annotated[
        Text,
        typer.Option(
            "--nodelist", metavar="NODES", help="Nodes to use, such as gpu[1-4] (default: any)."
        ),
    ] = None,
    exclude: Annotated[
        Text, typer.Option("--exclude", metavar="NODES", help="Nodes to avoid (default: none).")
    ] = None,
    reservation: Annotated[
        Text,
        typer.Option("--reservation", metavar="NAME", help="Slurm reservation (default: none)."),
    ] = None,
    container: Annotated[
        Text,
        typer.Option(
            "--container",
            metavar="IMAGE",
            help="Container to run in: pyxis:IMAGE, apptainer:IMAGE, or a .sif file "
            "(default: none).",
        ),
    ] = None,
    array: Annotated[
        Text,
        typer.Option(
            "--array",
            metavar="0-99%8",
            help="Indices of a job array; %8 limits how many run at a time; with --sweep, %8 alone "
            "(default: none).",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="K=A,B",
            help="Values of a sweep, one job each: as argument --K=A, or for {K} in the arguments; "
            "repeatable (default: none).",
        ),
    ] = None,
    after: Annotated[
        list[str] | None,
        typer.Option(
            "--after",
            metavar="ID",
            help="Job to wait for: ID, or KIND:ID such as afterany:ID; repeatable (default: none).",
        ),
    ] = None,
    requeue: Annotated[
        bool | None,
        typer.Option(
            "--requeue/--no-requeue",
            help="Requeue after a preemption or the time limit (default: no).",
        ),
    ] = None,
    signal_before: Annotated[
        Text,
        typer.Option(
            "--signal-before",
            metavar="TIME",
            help="Time before the limit to warn the workers, such as 90s (default: none).",
        ),
    ] = None,
    join_timeout: Annotated[
        Text,
        typer.Option(
            "--join-timeout",
            metavar="S",
            help="Seconds that nodes wait for each other (default: 300).",
        ),
    ] = None,
    grace: Annotated[
        Text,
        typer.Option(
            "--grace",
            metavar="S",
            help="Seconds between SIGTERM and SIGKILL on cancel (default: 3).",
        ),
    ] = None,
) -> None:
    """Define the signature of the job options; never called."""


def with_job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``**flags`` of a command ``(ctx, own options, **flags)`` by the job options."""
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
    """Return the given options by their key in `clusterjob.core.options.SETTINGS`."""
    return {
        key.rstrip("_"): value for key, value in flags.items() if value is not None and value != []
    }


class ProgramCommand(TyperCommand):
    """A command whose line ends in a program: SCRIPT, -m MODULE or -- COMMAND.

    All later words belong to the program, even if they begin with a dash.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the program off before the options are parsed."""
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

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the usage line with the forms of a program."""
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
