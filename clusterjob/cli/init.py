"""The command `init`: inspect this machine, ask a few questions, write clusterjob.toml."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterjob.errors import ClusterJobError, ConfigError, UsageError

if TYPE_CHECKING:
    from clusterjob.core.interpreters import Interpreter
    from clusterjob.core.proposals import Proposal, Question

_FILE = "clusterjob.toml"
_HEAD = """\
# Settings of clusterjob for this project. `clusterjob config` shows the settings of a job and where
# each is set; `clusterjob doctor` checks them. Every option of `clusterjob submit --help` is a key
# here, with underscores: --max-restarts 3 is max_restarts = 3. Options and CLUSTERJOB_* variables
# override this file.
"""


def init(
    yes: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--yes", "-y", help="What is found, without a question (default: ask)."),
    ] = False,
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Replace an existing clusterjob.toml (default: no).")
    ] = False,
) -> int:
    """Write a clusterjob.toml for this directory and this machine.

    The command looks for Slurm, the hosts of the SSH configuration, a platform's variables, GPUs,
    and environments of uv, venv and conda; it runs none of them. It asks at most six questions.
    Existing files are only replaced with --force.
    """
    from clusterjob.cli import output
    from clusterjob.core import config_files, interpreters, trust

    path = Path.cwd() / _FILE
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists", "--force replaces it")
    if not yes and not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask", "--yes takes what is found")
    proposals = _proposals()
    for proposal in proposals:
        if proposal.found:
            output.print_message(f"found {proposal.found}")
    chosen = proposals[0] if yes else _asked(proposals)
    found = interpreters.find(Path.cwd(), os.environ) if chosen.here else []
    if found:
        chosen = _with_interpreter(chosen, found, ask=not yes)
    # The user writes the file, but a program in this directory may be that of a cloned repository.
    python = str(chosen.values.get("python", ""))
    trusted = not _is_of_project(python) or (
        not yes and typer.confirm(f"python = {python} is in this directory. Trust it?", err=True)
    )
    others = [proposal for proposal in proposals if proposal.name != chosen.name]
    _write(path, _text(chosen, others, directory=Path.cwd()))
    try:
        file = config_files.project_file(path)
        if trusted:
            trust.record(file.path, file.data)
    except ConfigError as error:
        raise ConfigError(f"{path} is written, but: {error.message}", error.hint) from error
    output.print_message(f"{_FILE} is written: jobs run on {chosen.name}")
    if not trusted:
        output.print_message(f"{python} is not trusted: `clusterjob trust` trusts the file")
    output.print_message(f"check it with `clusterjob doctor{_doctor_options(chosen)}`")
    return 0


def _is_of_project(python: str) -> bool:
    """Return whether an interpreter is in this directory, and the user has not activated it."""
    used = [sys.prefix, os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    place = Path(python)
    return place.is_relative_to(Path.cwd()) and not any(
        one and place.is_relative_to(one) for one in used
    )


def _proposals() -> list[Proposal]:
    """Return the proposals of all backends: the default first, then those that work as they are."""
    from clusterjob.backends import base

    names = list(dict.fromkeys([base.preferred(), *base.names()]))
    found: list[Proposal] = []
    for name in names:
        backend = base.instance(name)
        if isinstance(backend, base.Proposer):
            found += backend.propose()
    # This machine works always, so whatever else works here is meant.
    return sorted(found, key=lambda each: (not each.ready, each.name == base.names()[0]))


def _asked(proposals: list[Proposal]) -> Proposal:
    """Ask for the cluster and its settings."""
    from clusterjob.core.proposals import Question

    names = tuple(proposal.name for proposal in proposals)
    name = _ask(Question("cluster", "Where do jobs run?", default=names[0], choices=names))
    chosen = next(proposal for proposal in proposals if proposal.name == name)
    values = dict(chosen.values)
    for question in chosen.questions:
        values.pop(question.key, None)
        if (answer := _ask(question)) != "":
            values[question.key] = answer
    return replace(chosen, values=values)


def _ask(question: Question) -> Any:
    """Ask until the answer is valid; return it as a file contains it."""
    from clusterjob.cli import output
    from clusterjob.node.system.sanitize import sanitize

    listed = f" ({', '.join(map(sanitize, question.choices))})" if question.choices else ""
    while True:
        answer = str(
            typer.prompt(
                f"{question.text}{listed}",
                default=question.default,
                show_default=bool(question.default),
                err=True,
            )
        ).strip()
        if question.choices and answer not in ("", *question.choices):
            output.print_message(f"{answer!r} is none of {', '.join(question.choices)}")
        elif not answer and question.required:
            output.print_message("this needs an answer; Ctrl-C stops without a file")
        elif wrong := _wrong(question.key, answer):
            output.print_message(wrong)
        else:
            return int(answer) if question.key == "gpus" and answer.isdigit() else answer


def _wrong(key: str, answer: str) -> str:
    """Return why an answer is no valid setting; empty if it is valid."""
    from clusterjob.core.hosts import parse_hosts
    from clusterjob.core.options import OPTIONS, read_setting
    from clusterjob.core.proposals import toml_value

    try:
        toml_value(answer)
        if answer and key in OPTIONS:
            read_setting(key, answer, origin=key)
        if answer and key in ("hosts", "login"):
            parse_hosts(answer)
    except ClusterJobError as error:
        return f"{error.message}{f' ({error.hint})' if error.hint else ''}"
    return ""


def _with_interpreter(chosen: Proposal, found: list[Interpreter], *, ask: bool) -> Proposal:
    """Return the profile with the interpreter of its jobs."""
    from clusterjob.core.proposals import Question

    path = found[0].path
    if ask and len(found) > 1:
        paths = tuple(one.path for one in found)
        path = _ask(Question("python", "Python of the jobs", default=path, choices=paths)) or path
    comment = next(one.describe() for one in found if one.path == path)
    for one in found:
        if one.path != path:
            comment += f"; {one.path}: {one.describe()}"
    return replace(
        chosen,
        values={**chosen.values, "python": path},
        comments={**chosen.comments, "python": comment},
    )


def _text(chosen: Proposal, others: list[Proposal], directory: Path) -> str:
    """Return the content of the file."""
    from clusterjob.core.proposals import profile_lines, toml_value

    lines = [
        _HEAD,
        f"cluster = {toml_value(chosen.name)}  # of a job without --cluster",
        "",
        "[defaults]  # settings of every job",
        "# max_restarts = 3  # restarts of the workers after a failure",
        '# env = { NCCL_DEBUG = "WARN" }  # variables of the workers',
        '# setup = ["module load cuda"]  # shell lines that each node runs first',
    ]
    if (directory / "uv.lock").is_file():
        lines.append("# uv = true  # make the environment of uv.lock on each node")
    lines += ["", *profile_lines(chosen, active=True)]
    for proposal in others:
        # A profile that works is written as one; the others need values first.
        lines += ["", *profile_lines(proposal, active=proposal.ready)]
    return "\n".join(lines) + "\n"


def _write(path: Path, text: str) -> None:
    from clusterjob.node.system import files

    try:
        files.write_atomic(path, text.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}",
            f"`df {path.parent}` and `ls -ld {path.parent}` show the disk and its permissions",
        ) from error


def _doctor_options(chosen: Proposal) -> str:
    """Return the option that doctor needs inside a job, where no cluster is the default."""
    from clusterjob.node.environments import this_node

    return "" if this_node.detect(os.environ).source == "none" else f" --cluster {chosen.name}"
