"""Write the generated parts of docs/reference.md: commands, job options, `launch` options.

Run it in the root of the source tree: `.venv/bin/python tools/reference.py`. A test fails if the
page differs from this program's output.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer

from clusterjob.cli import app
from clusterjob.core.options import OPTIONS
from clusterjob.node import options as node_options
from clusterjob.node.rendezvous.policy import RULES
from clusterjob.node.verdict import FailureKind

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
# The options of a job are the options that `submit` and `render` share.
_OF_A_JOB = {
    param.name for param in COMMANDS["submit"].params if param.name in {
        param.name for param in COMMANDS["render"].params
    }
} - {"as_json"}  # fmt: skip


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _value_of(metavar: str) -> str:
    """Return the form of a value after its flag, such as ``[=warn]`` for an optional one."""
    return metavar if metavar.startswith("[") else f" {metavar}".rstrip()


def _flags(param: Any) -> str:
    value = "" if getattr(param, "is_flag", False) else _value_of(param.metavar or "")
    return ", ".join(f"`{flag}{value}`" for flag in (*param.opts, *param.secondary_opts))


def _own(command: Any) -> list[Any]:
    return [
        param
        for param in command.params
        if param.param_type_name == "option"
        and param.name not in _OF_A_JOB
        and param.name != "help"
    ]


def commands() -> str:
    """Return one section per command: description and options that are not job options."""
    parts = []
    for name, command in COMMANDS.items():
        if name == "launch":
            continue
        described = re.sub(r"[ \t]*\n[ \t]*", "\n", (command.help or "").strip())
        takes_job = sum(param.name in _OF_A_JOB for param in command.params) > 10
        lines = [f"### `clusterjob {name}`", "", described]
        if takes_job:
            lines += ["", "It takes the [options of a job](#options-of-a-job)."]
        for sub in (command, *getattr(command, "commands", {}).values()):
            if own := _own(sub):
                title = "option" if sub is command else f"option of `{name} {sub.name}`"
                lines += ["", f"| {title} | meaning |", "| --- | --- |"]
                lines += [f"| {_flags(param)} | {_cell(param.help)} |" for param in own]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def job_options() -> str:
    """Return the table of job options: flag, configuration key, variable, meaning."""
    lines = ["| option | key | variable | meaning |", "| --- | --- | --- | --- |"]
    by_flag = {flag: param for param in COMMANDS["submit"].params for flag in param.opts}
    cluster = by_flag["--cluster"]
    lines.append(f"| {_flags(cluster)} | `cluster` | CLUSTERJOB_CLUSTER | {_cell(cluster.help)} |")
    for key, option in OPTIONS.items():
        param = by_flag.get(option.flag)
        described = _cell(param.help) if param else f"See `{option.flag[2:]}` of `launch`."
        flags = _flags(param) if param else ""
        lines.append(f"| {flags} | `{key}` | {option.variable} | {described} |")
    return "\n".join(lines)


def launch() -> str:
    """Return the table of the options of `clusterjob launch`."""
    lines = ["| option | meaning |", "| --- | --- |"]
    for action in node_options.parser()._actions:
        if action.option_strings and action.dest != "help":
            value = f" {action.metavar}" if action.metavar else ""
            if action.choices:
                value = f" {{{','.join(action.choices)}}}"
            flags = ", ".join(f"`{flag}{value}`" for flag in action.option_strings)
            lines.append(f"| {flags} | {_cell(action.help)} |")
    return "\n".join(lines)


_KINDS = {
    FailureKind.CODE: "an exception of the script",
    FailureKind.IMPORT: "a module cannot be imported",
    FailureKind.OOM_HOST: "the memory of the host is used up",
    FailureKind.OOM_DEVICE: "the memory of a GPU is used up",
    FailureKind.DEVICE: "a CUDA, ECC or XID error",
    FailureKind.DISK: "a disk of the host is full or broken",
    FailureKind.NETWORK: "the connection to another rank is lost",
    FailureKind.NODE_LOST: "the agent of a node has ended or sends no message",
    FailureKind.PROCESS_LOST: "the forkserver of a node, or torch's store, was killed",
    FailureKind.LAUNCH: "a node cannot start or run its workers",
    FailureKind.RENDEZVOUS: "other ranks did not join",
    FailureKind.EARLY_EXIT: "the rank ended with exit code 0 while others were in a collective",
    FailureKind.TERMINATED: "SIGTERM ended the rank",
    FailureKind.SIGNAL: "another signal ended the rank",
    FailureKind.EXIT_CODE: "the rank chose a non-zero exit code",
    FailureKind.HANG: "no rank made progress for the time of `--hang-timeout`",
    FailureKind.PREEMPTED: "the rank left after a warning",
}


def kinds() -> str:
    """Return the table of the kinds of failures, and what follows each."""
    head = (
        "| kind | meaning | restarted | on the same node | counts for `--max-restarts` "
        "| queued again by `--until-done` |"
    )
    lines = [head, "| --- " * 6 + "|"]
    for kind, rule in RULES.items():
        cells = ["no", "", ""]
        if not rule.why:
            cells = ["until the same error comes twice" if rule.once else "yes"]
            cells += ["no" if rule.avoid else "yes"]
            if rule.pause:
                cells = ["yes, in a row after 1, 2, 4, ... 60 s", "no, unless on two nodes"]
            cells.append("yes" if rule.charged else "no")
        cells.append("yes" if rule.requeue else "no")
        lines.append(f"| `{kind}` | {_KINDS[kind]} | {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = {
    "commands": commands,
    "job options": job_options,
    "launch": launch,
    "kinds of failures": kinds,
}


def filled(text: str) -> str:
    """Return the page with new generated parts."""
    for name, make in PARTS.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found, rest = text.partition(begin)
        _old, found_end, after = rest.partition(end)
        assert found, f"docs/reference.md has no line {begin}"
        assert found_end, f"docs/reference.md has no line {end}"
        text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
