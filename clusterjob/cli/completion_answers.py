"""Answer one TAB: the candidates for the word at the cursor of a command line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import typer

from clusterjob.cli import completion_values as values
from clusterjob.cli.completion import FILES, SCRIPTS
from clusterjob.cli.job_options import ProgramCommand
from clusterjob.errors import ClusterJobError
from clusterjob.node.program import WORKER_WORDS

_FILE = re.compile("FILE|DIR|PATH")  # in the metavar of an option or argument for a file
_RUNNING = ("cancel", "exec", "shell", "forward")  # they take jobs that have not ended
_MARK = "\1"  # stands for the cursor while a line of bash is divided


class Candidate(NamedTuple):
    """One completion of the word at the cursor; the description may be empty."""

    value: str
    description: str = ""


def answer(app: typer.Typer, words: Sequence[str]) -> int:
    """Print the candidates for one TAB; nothing if the line is wrong or a source is missing.

    Args:
        app: the command line.
        words: the shell, then for bash COMP_WORDBREAKS and the line up to the cursor; for zsh and
            fish the words of the line, the last of which is the one at the cursor.
    """
    shell, *rest = words or [""]
    breaks = ""
    if shell == "bash" and len(rest) == 2:
        breaks, rest = rest[0], _divided(rest[1])
    if len(rest) < 2:
        return 0
    try:
        found = _candidates(typer.main.get_command(app), rest[1:-1], current=rest[-1])
    except (ClusterJobError, OSError):
        return 0
    if found is None:
        print(FILES)
        return 0
    # bash replaces only the text after the last of these characters.
    cut = max((rest[-1].rfind(char) for char in breaks), default=-1) + 1
    lines = []
    for value, description in found:
        if value.startswith(rest[-1]):
            more = f"\t{description}" if description and shell != "bash" else ""
            lines.append(f"{value[cut:]}{more}\n")
    sys.stdout.write("".join(lines))
    return 0


def _divided(line: str) -> list[str]:
    """Return the words of a line up to the cursor; a quote may be open."""
    for closing in ("", "'", '"'):
        try:
            *words, last = shlex.split(f"{line}{_MARK}{closing}")
        except ValueError:
            continue
        return [*words, last.replace(_MARK, "")]
    return []


def _candidates(root: Any, before: list[str], current: str) -> list[Candidate] | None:
    """Return the candidates for the current word; None for names of files."""
    command, option, place = _parsed(root, before)
    if place is None:
        return None
    if place and hasattr(command, "commands"):
        return []  # an unknown command
    if option is not None:
        return _of_option(option, current, start="")
    name, equals, value = current.partition("=")
    if equals and name.startswith("--"):
        given = _options(command).get(name)
        return _of_option(given, value, start=f"{name}=") if given is not None else []
    if current.startswith("-"):
        return [
            Candidate(
                flag,
                f"The opposite of {param.opts[0]}"
                if flag in getattr(param, "secondary_opts", ())
                else _first_sentence(param),
            )
            for flag, param in _options(command).items()
        ]
    if commands := getattr(command, "commands", None):
        return [
            Candidate(name, _first_line(each.help))
            for name, each in commands.items()
            if not each.hidden
        ]
    if isinstance(command, ProgramCommand) or command.name == "launch":
        return None
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    if not arguments:
        return []
    param = arguments[min(place, len(arguments) - 1)]
    return _of_argument(param, before, current=current, ended=command.name not in _RUNNING)


def _parsed(root: Any, before: list[str]) -> tuple[Any, Any, int | None]:
    """Read the words before the current one.

    Returns:
        The command; the option whose value the current word is, or None; and the number of its
        arguments so far, or None if the current word belongs to a program.
    """
    command, option, place = root, None, 0
    for word in before:
        if option is not None:
            option = None
        elif word in ("--", "-m"):
            return command, None, None
        elif word.startswith("-"):
            found = _options(command).get(word.replace("_", "-") if word[:2] == "--" else word)
            option = None if found is None or getattr(found, "is_flag", False) else found
        elif word in getattr(command, "commands", {}):
            command = command.commands[word]
        elif isinstance(command, ProgramCommand) or command.name == "launch":
            return command, None, None
        else:
            place += 1
    return command, option, place


class _NodeOption(NamedTuple):
    """An option of `clusterjob launch`, which is no command of typer."""

    opts: tuple[str, ...]
    help: str
    metavar: str
    is_flag: bool


def _options(command: Any) -> dict[str, Any]:
    """Return the options of a command by flag."""
    params = [param for param in command.params if param.param_type_name == "option"]
    found = {flag: param for param in params for flag in (*param.opts, *param.secondary_opts)}
    if command.name == "launch":
        from clusterjob.node import options

        for action in options.parser()._actions:
            flags, metavar = tuple(action.option_strings), str(action.metavar or "")
            one = _NodeOption(flags, action.help or "", metavar, is_flag=action.nargs == 0)
            found |= dict.fromkeys(flags, one)
    return found | {"--help": _NodeOption(("--help",), "Show this message and exit.", "", True)}


def _job_reference(text: str) -> list[str]:
    """Return completions of --after: sbatch's words, and ids with or without one."""
    head = text[: text.rfind(",") + 1]
    kind, colon, job = text[len(head) :].rpartition(":")
    kinds = ("afterok", "afterany", "afternotok", "after")
    words = [] if colon else [f"{head}{each}:" for each in kinds]
    return words + [f"{head}{kind}{colon}{each}" for each in values.job_ids(job)]


def _in_list(source: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last item of a comma-separated list."""

    def complete(text: str) -> list[str]:
        head = text[: text.rfind(",") + 1]
        return [f"{head}{each}" for each in source() if each not in head.split(",")]

    return complete


def _states() -> list[str]:
    from clusterjob.node.verdict import JobState

    return [str(state) for state in JobState]


def _launchers() -> tuple[str, ...]:
    from clusterjob.node.options import LAUNCHERS

    return (*LAUNCHERS, "srun")


def _start_modes() -> tuple[str, ...]:
    from clusterjob.node.options import START_MODES

    return START_MODES


# Each function gets the value so far and returns completions of it.
_VALUES: dict[str, Callable[[str], Sequence[str]]] = {
    "--cluster": lambda _: values.clusters(),
    "--partition": _in_list(values.partitions),
    "--hosts": _in_list(values.hosts),
    "--login": lambda _: values.hosts(),
    "--after": _job_reference,
    "--state": _in_list(_states),
    "--start": lambda _: _start_modes(),
    "--launcher": lambda _: _launchers(),
    "--gpus": lambda _: ("auto", "auto:", "device="),
    "--nproc-per-node": lambda _: WORKER_WORDS,
}


def _of_option(param: Any, text: str, start: str) -> list[Candidate] | None:
    """Return the completions of an option's value; None for names of files."""
    complete = next((_VALUES[flag] for flag in param.opts if flag in _VALUES), None)
    if complete is not None:
        return [Candidate(start + value) for value in complete(text)]
    return None if _FILE.search(param.metavar or "") and not start else []


def _of_argument(
    param: Any, before: list[str], current: str, *, ended: bool
) -> list[Candidate] | None:
    metavar = param.metavar or ""
    if _FILE.search(metavar):
        return None
    found: Sequence[str] = ()
    if "ID" in metavar:
        found = values.job_ids(current, ended=ended)
    elif "HOST" in metavar:
        found = values.hosts()
    elif metavar == "SHELL":
        found = tuple(SCRIPTS)
    return [Candidate(value) for value in found if value not in before]


def _first_line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


def _first_sentence(param: Any) -> str:
    """Return an option's help without its default."""
    return re.sub(r" \(default: .*", "", _first_line(param.help)).rstrip(".")
