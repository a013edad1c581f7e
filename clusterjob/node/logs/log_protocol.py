"""Number a node's log lines, for a submitter who sees only the platform's log of each node.

The lines carry the workers' output, the agent's messages and the verdict:

- ``<n>[@<seconds>] [<label>] <text>``: a worker's stdout. The label lists ranks, such as 0-3,5, or
  is node0 for a torchrun.
- ``<n>[@<seconds>] [<label>]! <text>``: a worker's stderr.
- ``<n> clusterjob: <text>``: an agent's message.
- ``<n> clusterjob-verdict <json>``: the verdict, once, as the last line of node 0.
- ``clusterjob-refused <code> <host>: <why>``: without a number, from a node that could not start
  its agent.

The numbers count a node's lines from 1. A reader uses them to detect lines that arrive twice, late
or not at all. The seconds since the epoch apply until the next line with seconds. They order the
lines of several nodes. A ``+`` after the bracket, the colon or ``verdict`` means that the text
continues on the next line: a container runtime cuts lines of more than 16 KiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterjob.node.logs.log_files import Folded

LONGEST = 8000  # bytes of text on one line
_LINE = re.compile(
    r"(?P<number>[1-9]\d{0,11})(?:@(?P<seconds>\d{1,12}\.\d))? "
    r"(?:\[(?P<label>(?:\d{1,9}(?:-\d{1,9})?|node\d{1,9})"
    r"(?:,\d{1,9}(?:-\d{1,9})?|,node\d{1,9})*)\](?P<err>!?)|clusterjob(?P<own>:|-verdict))"
    r"(?P<more>\+?)(?: (?P<text>.*))?",
    re.ASCII | re.DOTALL,
)
_REFUSED = re.compile(r"clusterjob-refused (?P<code>\d{1,3}) (?P<why>.*)", re.ASCII | re.DOTALL)
_MAX_RANKS_OF_LABEL = 1025  # ranks; no node has more workers


@dataclass(frozen=True)
class NumberedLine:
    """A numbered line.

    Attributes:
        number: the position among this node's lines, from 1.
        kind: ``out`` or ``err`` of workers, ``agent`` or ``verdict``.
        label: the ranks that wrote a worker's line; see `ranks`.
        text: the text after the label.
        more: whether the text continues on the next line.
        seconds: time since the epoch at which it was shown; None for the previous line's time.
    """

    number: int
    kind: str
    label: str
    text: str
    more: bool = False
    seconds: float | None = None


class Writer:
    """Number a node's lines.

    Args:
        first: the number of the first line.

    Attributes:
        next: the number of the next line.
    """

    def __init__(self, first: int = 1) -> None:
        self.next = first

    def output(self, lines: list[Folded], seconds: float) -> str:
        """Return workers' lines with their numbers.

        Args:
            lines: lines that were read at the same time.
            seconds: that time, since the epoch.
        """
        return "".join(
            self._line(
                f"[{line.label}]" + "!" * (line.stream == "err"),
                line.text,
                stamp="" if index else f"@{seconds:.1f}",
            )
            for index, line in enumerate(lines)
        )

    def message(self, text: str) -> str:
        """Return the lines of an agent's message with their numbers."""
        return "".join(self._line("clusterjob:", line) for line in text.split("\n"))

    def verdict(self, verdict: Mapping[str, Any]) -> str:
        """Return the numbered line of the verdict.

        It omits the last lines of workers that failed as a consequence; their logs contain them.
        """
        consequences = [failure | {"last_lines": []} for failure in verdict["consequences"]]
        return self._line(
            "clusterjob-verdict",
            json.dumps({**verdict, "consequences": consequences}, separators=(",", ":")),
        )

    def _line(self, mark: str, text: str, stamp: str = "") -> str:
        *pieces, last = _pieces(text)
        marked = [*((f"{mark}+", piece) for piece in pieces), (mark, last)]
        first, self.next = self.next, self.next + len(marked)
        return "".join(
            f"{number}{'' if number > first else stamp} {mark} {piece}\n"
            for number, (mark, piece) in enumerate(marked, first)
        )


def _pieces(text: str) -> list[str]:
    data = text.encode(errors="backslashreplace")
    pieces, begin = [], 0
    while True:
        end = min(len(data), begin + LONGEST)
        while end < len(data) and data[end] & 0xC0 == 0x80:  # do not split a character
            end -= 1
        pieces.append(data[begin:end].decode())
        if end == len(data):
            return pieces
        begin = end


def parse(line: str) -> NumberedLine | None:
    """Parse a numbered line; return None for any other line, such as the output of a setup line."""
    match = _LINE.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return None
    kind = {":": "agent", "-verdict": "verdict"}.get(
        match["own"] or "", "err" if match["err"] else "out"
    )
    seconds = float(match["seconds"]) if match["seconds"] else None
    return NumberedLine(
        int(match["number"]),
        kind,
        label=match["label"] or "",
        text=match["text"] or "",
        more=bool(match["more"]),
        seconds=seconds,
    )


def ranks(label: str) -> list[int | None]:
    """Return the ranks of a label; None stands for a node's torchrun."""
    found: list[int | None] = []
    for part in label.split(","):
        if part.startswith("node"):
            found.append(None)
            continue
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), int(first) + _MAX_RANKS_OF_LABEL) + 1)
        if len(found) > _MAX_RANKS_OF_LABEL:
            return found[:_MAX_RANKS_OF_LABEL]
    return found


def refusal(exit_code: int, host: str, why: str) -> str:
    """Return the line of a node that cannot start its agent; it has no number."""
    return f"clusterjob-refused {exit_code} {host}: {' '.join(why.split())}\n"


def parse_refusal(line: str) -> tuple[int, str] | None:
    """Return the exit code and ``host: why`` of a line of `refusal`; None for any other line."""
    match = _REFUSED.fullmatch(line.rstrip("\r\n"))
    return None if match is None else (int(match["code"]), match["why"])
