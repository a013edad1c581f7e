"""The help of commands: options in groups, and examples at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from clusterjob.cli.suggestions import COMMANDS
from clusterjob.core.option import GROUPS
from clusterjob.errors import UsageError

_SUMMARY = 200  # characters; the first line of a docstring has fewer

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Command lines of each command, shown at the end of its help.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "submit": (
        "clusterjob submit train.py --lr 0.1",
        "clusterjob submit -N 2 --gpus 8 -t 2h -p train train.py",
        "clusterjob submit --after afterok:JOB -J eval -- bash eval.sh",
    ),
    "run": (
        "clusterjob run train.py",
        "clusterjob run --hosts gpu1,gpu2 --gpus 8 train.py",
        "clusterjob run --nproc_per_node 4 -m package.train",
    ),
    "render": ("clusterjob render --cluster slurm -N 2 --gpus 8 train.py",),
    "status": ("clusterjob status", "clusterjob status train-7f3a --json"),
    "list": (
        "clusterjob list --state failed --since 2d",
        "clusterjob list --name 'train-*' --columns id,state,duration",
        "clusterjob list --watch",
        "clusterjob list --efficiency",
    ),
    "wait": ("clusterjob wait train-7f3a && bash eval.sh",),
    "cancel": ("clusterjob cancel train-7f3a", "clusterjob cancel --name 'eval-*' --state pending"),
    "launch": (
        "clusterjob launch train.py",
        "clusterjob launch --nodes 2 --node-rank 0 --master-addr node0 train.py",
    ),
    "logs": (
        "clusterjob logs -f train-7f3a",
        "clusterjob logs --rank 0-3,7 -n 50",
        "clusterjob logs -f --stderr --grep 'error|warning' --since 10m @2",
    ),
    "metrics": (
        "clusterjob metrics train-7f3a",
        "clusterjob metrics train-7f3a --rank 3 --since 10m --csv",
    ),
    "rerun": ("clusterjob rerun train-7f3a", "clusterjob rerun @ --failed --secret HF_TOKEN=token"),
    "clean": (
        "clusterjob clean --older-than 30d --dry-run",
        "clusterjob clean --state failed --larger-than 1G",
    ),
    "open": ('cd "$(clusterjob open @)"',),
    "exec": (
        "clusterjob exec train-7f3a -- nvidia-smi",
        "clusterjob exec train-7f3a --rank 3 -- sh -c 'py-spy dump --pid $CLUSTERJOB_INSIDE'",
        "clusterjob exec train-7f3a --all -- df -h /tmp",
    ),
    "shell": ("clusterjob shell train-7f3a", "clusterjob shell train-7f3a --rank 3"),
    "forward": (
        "clusterjob forward train-7f3a 6006",
        "clusterjob forward train-7f3a 8080:8888 5678 --node 1",
    ),
    "top": ("clusterjob top", "clusterjob top train-7f3a"),
    "report": ("clusterjob report train-7f3a", "clusterjob report @ -o report.html"),
    "stacks": ("clusterjob stacks train-7f3a", "clusterjob stacks train-7f3a --rank 3 --native"),
    "env": ("clusterjob env", "srun -N 2 clusterjob env --json"),
    "config": ("clusterjob config --cluster hpc",),
    "trust": ("clusterjob trust", "clusterjob trust --yes ~/project"),
    "doctor": (
        "clusterjob doctor",
        "clusterjob doctor --cluster slurm -N 2 --gpus 8",
        "clusterjob doctor --run --hosts gpu[1-8]",
    ),
    "completion": ("source <(clusterjob completion bash)", "clusterjob completion fish | source"),
    "fetch": ("clusterjob fetch train-7f3a checkpoints --to results",),
    "login": ("clusterjob login me@login1",),
    "logout": ("clusterjob logout me@login1",),
    "init": ("clusterjob init", "clusterjob init --yes --force"),
    "hosts": ("clusterjob hosts --hosts gpu[1-4]",),
    "hosts bad": ("clusterjob hosts bad", "clusterjob hosts bad --clear gpu7"),
    "hosts trust": ("clusterjob hosts trust gpu1 gpu2",),
}


def dashes(name: str) -> str:
    """Return an option's name with dashes: torchrun's underscores are the same options."""
    return name.replace("_", "-")


def _write_examples(_command: Any, ctx: Any, formatter: Any) -> None:
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name)
        ctx = ctx.parent
    if lines := EXAMPLES.get(" ".join(names)):
        with formatter.section("Examples"):
            for line in lines:
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Command(TyperCommand):
    """A command whose help shows its options in groups, and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then each group of options in the order of `GROUPS`."""
        arguments: list[tuple[str, str]] = []
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is None:
                continue
            if param.param_type_name == "argument":
                arguments.append(row)
            else:
                groups[getattr(param, "rich_help_panel", None) or "output"].append(row)
        used = {group.capitalize(): rows for group, rows in groups.items() if rows}
        if len(used) == 1:
            used = {"Options": next(iter(used.values()))}
        for title, rows in (({"Arguments": arguments} if arguments else {}) | used).items():
            with formatter.section(title):
                formatter.write_dl(rows)

    format_epilog = _write_examples


class Group(TyperGroup):
    """A group of commands whose help shows examples."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of a word; name ours for that of another program."""
        ours = COMMANDS.get(args[0])
        if ctx.parent is None and args[0] not in self.commands and ours:
            raise UsageError(f"there is no command {args[0]}", f"`clusterjob {ours}` does this")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each command with its whole summary: click would cut it to one line."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=_SUMMARY))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    format_epilog = _write_examples


class App(typer.Typer):
    """The application, or a group of its commands."""

    def command(self, *args: Any, **rest: Any) -> Callable[[_Function], _Function]:
        """Add a command whose help shows groups and examples."""
        return super().command(*args, **{"cls": Command, **rest})
