"""Fail on retired words and on long first docstring lines; part of ``make lint``.

A retired word is a private word for a standard thing. The table gives the standard word. Names are
checked too: `_lead_task` and `GangError` contain retired words.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

RETIRED = {
    "gang": "rendezvous",
    "roll[-_ ]?call": "rendezvous",
    "gathering": "membership",
    "the[ _]lead": "coordinator",
    "judges?": "root cause",
    "starter": "forkserver",
    "warm[-_ ]?up": "preload",
    "visits?": "session",
    "errands?": "remote process",
    "consignments?": "job bundle",
    "standing": "status",
    "examinations?": "check",
    "surveys?": "check, probe",
    "voice": "console",
    "speaker": "the process that prints",
    "wish(?:es)?": "request",
    "sightings?": "status",
    "patience": "timeout",
    "trouble(?!shoot)": "error",
    "strangers?": "unauthenticated peer",
    "cards": "GPUs",
    "by[ _]hand": "manually",
    "whoever|whomever": "the process that, the user who",
    "such a one|as it stands|what is there": "say what you mean",
}
# A word is a run of letters; `_NAME_PARTS` splits CamelCase before.
_WORDS = re.compile(
    "|".join(
        f"(?P<w{number}>(?<![a-z])(?:{word})(?![a-z]))" for number, word in enumerate(RETIRED)
    ),
)
_NAME_PARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
CHECKED = (
    "clusterjob", "docs", "tests", "examples", "benchmarks", "tools", "README.md",
    "CONTRIBUTING.md", "Makefile",
)  # fmt: skip
# This table, and scripts as other people wrote them.
EXCLUDED = ("tools/check_words.py", "tests/compat/scripts/")
_SUFFIXES = {".py", ".md", ".j2", ".sh", ""}
MAX_FIRST_LINE = 90


def retired_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the retired word and its replacement for each retired word."""
    replacements = list(RETIRED.values())
    for number, line in enumerate(text.splitlines(), 1):
        for match in _WORDS.finditer(_NAME_PARTS.sub("_", line).lower()):
            assert match.lastgroup is not None
            yield number, match[0], replacements[int(match.lastgroup[1:])]


def long_first_lines(source: str) -> Iterator[tuple[int, int]]:
    """Yield the line number and length of each first docstring line that is too long."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = (ast.get_docstring(node) or "").partition("\n")[0]
        if len(first) > MAX_FIRST_LINE:
            yield node.body[0].lineno, len(first)


def main() -> int:
    """Print each finding as ``file:line: text``; return 1 if there is one."""
    listed = subprocess.run(
        ["git", "ls-files", *CHECKED], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    found = 0
    for name in listed:
        path = Path(name)
        if not name or name.startswith(EXCLUDED) or path.suffix not in _SUFFIXES:
            continue
        try:
            text = path.read_text()
        except (FileNotFoundError, UnicodeDecodeError):
            continue  # deleted in the working tree, or data
        lines = [f"{n}: {word!r}: use {other}" for n, word, other in retired_words(text)]
        if path.suffix == ".py":
            lines += [
                f"{n}: first docstring line of {length} characters, at most {MAX_FIRST_LINE}"
                for n, length in long_first_lines(text)
            ]
        for line in lines:
            print(f"{name}:{line}")
        found += len(lines)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
