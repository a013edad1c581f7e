"""Colour verdicts on a terminal, unless NO_COLOR is set (https://no-color.org)."""

from __future__ import annotations

import os
from typing import TextIO

from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

_BOLD, _RED, _GREEN, _YELLOW, _END = (f"\x1b[{code}m" for code in ("1", "31", "32", "33", "0"))
_OF_STATE = {JobState.SUCCEEDED: _GREEN, JobState.FAILED: _RED, JobState.LOST: _RED}


def wanted(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colours."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def verdict_text(verdict: Verdict, *, coloured: bool) -> str:
    """Return the text of a verdict; coloured, its state and the failing rank's lines stand out."""
    text = sanitize(verdict.text(), lines=True)
    if not coloured:
        return text
    first, *lines = text.split("\n")
    state = str(verdict.state)
    colour = _OF_STATE.get(verdict.state, _YELLOW)
    shown = [f"{_BOLD}{colour}{state}{_END}{first.removeprefix(state)}"]
    shown += [f"{_RED}{line}{_END}" if line.startswith("  | ") else line for line in lines]
    return "\n".join(shown)
