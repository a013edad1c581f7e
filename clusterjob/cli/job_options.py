"""Options that several commands share, and the parsing of a job's program."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from clusterjob.cli.help import Command, dashes
from clusterjob.core.options import OPTIONS
from clusterjob.errors import UsageError
from clusterjob.node.program import NO_EFFECT, STDIN, Program

Json = Annotated[bool, typer.Option("--json", help="JSON output (default: text).")]
Id = Annotated[
    str,
    typer.Argument(
        metavar="ID", help="Job id, unique prefix of it, @ for the latest job, or job name."
    ),
]
# Flags that may stand alone, each with the value that they then have.
BARE = {option.flag: option.bare for option in OPTIONS.values() if option.bare}
_PROGRAM = "clusterjob.program"  # key of the program in a command's context


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield a parameter for each job option, with its typer declaration."""
    yield _parameter(
        "cluster",
        str | None,
        "--cluster",
        metavar="NAME",
        rich_help_panel="cluster",
        help="Profile or backend, such as local (default: the configured one).",
    )
    for option in OPTIONS.values():
        if not option.help:
            continue  # only files and variables can set this option
        names = [name for name in (option.flag, *option.aliases, option.short) if name]
        kind: Any = list[str] | None if option.merge else str | None
        if not option.metavar:
            kind, names[0] = bool | None, f"{option.flag}/--no-{option.flag[2:]}"
        yield _parameter(
            option.key,
            kind,
            *names,
            metavar=option.metavar or None,
            help=option.help,
            rich_help_panel=option.group,
        )


def _parameter(key: str, kind: Any, *names: str, **declaration: Any) -> inspect.Parameter:
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, typer.Option(*names, **declaration)],
    )


def with_job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the ``**flags`` of a command's signature by one parameter per job option."""
    own = inspect.signature(command, eval_str=True)
    *mine, _flags = own.parameters.values()
    command.__signature__ = own.replace(parameters=[*mine, *_parameters()])  # type: ignore[attr-defined]
    return command


def flags_given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the given options by their key in `clusterjob.core.options.OPTIONS`."""
    return {key: value for key, value in flags.items() if value is not None and value != []}


class JobOptionsCommand(Command):
    """A command with the options of a job."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each flag that stands alone its value."""
        return super().parse_args(
            ctx, [f"{word}={BARE[word]}" if word in BARE else word for word in args]
        )


class ProgramCommand(JobOptionsCommand):
    """A command whose line ends in a program: SCRIPT, -m MODULE or -- COMMAND.

    All later words belong to the program, even if they begin with a dash.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the program off before the options are parsed."""
        own, program = self._split(list(args))
        ctx.meta[_PROGRAM] = program
        return super().parse_args(ctx, _without_torchruns(own))

    def _split(self, args: list[str]) -> tuple[list[str], Program | None]:
        takes_value = {word for word, value in own_options(self).items() if value} | {*NO_EFFECT}
        index = 0
        while index < len(args):
            word, rest = args[index], tuple(args[index + 2 :])
            if word in ("--", "-m"):
                kind = "command" if word == "--" else "module"
                return args[:index], Program(kind, args[index + 1], args=rest) if index + 1 < len(
                    args
                ) else None
            if word == STDIN or not word.startswith("-"):
                return args[:index], Program("script", word, args=tuple(args[index + 1 :]))
            name = dashes(word) if word.startswith("--") else word
            if name in BARE and args[index + 1 : index + 2] == [BARE[name]]:  # not the script
                del args[index + 1]
            index += 2 if name in takes_value else 1
        return args, None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the usage line with the forms of a program."""
        return ["[OPTIONS]", "SCRIPT [ARGS]... | -m MODULE [ARGS]... | -- COMMAND..."]


class LaunchCommand(Command):
    """`launch`, whose options are those of the node half."""

    collect_usage_pieces = ProgramCommand.collect_usage_pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the options of the node half as those of other commands."""
        from clusterjob.node.options import parser

        rows = []
        for action in parser()._actions:
            form = action.metavar or ("|".join(action.choices) if action.choices else "")
            rows.append((f"{', '.join(action.option_strings)} {form}".strip(), action.help or ""))
        with formatter.section("Options"):
            formatter.write_dl([*rows[1:], rows[0]])


def _without_torchruns(args: list[str]) -> list[str]:
    """Remove torchrun's options that have no effect here, and say so."""
    kept, words = [], iter(args)
    for word in words:
        name, equals, _ = word.partition("=")
        if dashes(name) not in (*NO_EFFECT, "--standalone"):
            kept.append(word)
            continue
        print(f"clusterjob: {name} has no effect: the nodes find each other", file=sys.stderr)
        if dashes(name) in NO_EFFECT and not equals:
            next(words, None)
    return kept


def own_options(command: Any) -> dict[str, bool]:
    """Return a command's options, each with whether the next word is its value."""
    return {
        word: not getattr(param, "is_flag", False) and word not in BARE
        for param in command.params
        for word in (*param.opts, *param.secondary_opts)
    }


def misplaced(program: Program, source: str, own: Mapping[str, bool]) -> list[str]:
    """Return the options after a script, with their values, that seem meant for clusterjob.

    The script's source does not contain their names. A name that is only that of an imported module
    or a call, as in ``time.time()``, does not count.

    Args:
        program: the program with its arguments.
        source: the source of the script or module; empty if unknown.
        own: clusterjob's options, each with whether the next word is its value.
    """
    if program.kind == "command" or not source:
        return []
    found: list[str] = []
    args = list(program.args)
    while args and (word := args.pop(0)) != "--":
        name, equals, _ = word.partition("=")
        name = dashes(name) if word.startswith("--") else name
        bare = re.escape(name.lstrip("-")).replace("\\-", "[-_]")
        read = (
            rf"(?<![\w.-])(?<!import )(--)?{bare}(?![\w.(-])" if name[:2] == "--" else rf"{name}\b"
        )
        if name in own and not re.search(read, source):
            found += [word, *args[: own[name] and not equals]]
    return found


def program_of(ctx: typer.Context) -> Program:
    """Return the program of the command line.

    Raises:
        UsageError: the command line has no program.
    """
    program: Program | None = ctx.meta[_PROGRAM]
    if program is None:
        raise UsageError("there is nothing to run", "give a SCRIPT, -m MODULE, or -- COMMAND")
    return program
