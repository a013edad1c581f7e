"""Lines that carry a number: how output and verdict come back where the submitter sees nothing but
a platform's log of each node.

    <n>[@<seconds>] [<label>] <text>      a worker's stdout; the label is as people see it: 0-3,5,
    or node0 for a torchrun's <n>[@<seconds>] [<label>]! <text>     a worker's stderr <n>
    clusterjob: <text>                the agent's own words <n> clusterjob-verdict <json>
    once, the last line, of node 0 alone clusterjob-refused <code> <host>: <why>    without a
    number: of a node that could not start its agent

The numbers count a node's lines from 1, so that a reader who gets lines twice, late, or not at all
sees that. The seconds (of the epoch) hold until the next line that has some: by them the lines of
several nodes find their order. A ``+`` after the bracket, the colon or ``verdict`` says that the
text goes on in the next line: a container's runtime cuts lines of more than 16 KiB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterjob.node.logs.folding import Folded

LONGEST = 8000  # bytes of text on one line
_LINE = re.compile(
    r"(?P<number>[1-9]\d{0,11})(?:@(?P<seconds>\d{1,12}\.\d))? "
    r"(?:\[(?P<label>(?:\d{1,9}(?:-\d{1,9})?|node\d{1,9})(?:,\d{1,9}(?:-\d{1,9})?|,node\d{1,9})*)\](?P<err>!?)|clusterjob(?P<own>:|-verdict))"
    r"(?P<more>\+?)(?: (?P<text>.*))?",
    re.ASCII | re.DOTALL,
)
_REFUSED = re.compile(r"clusterjob-refused (?P<code>\d{1,3}) (?P<why>.*)", re.ASCII | re.DOTALL)
_MOST_OF_A_LABEL = 1025  # ranks: no node has so many workers


@dataclass(frozen=True)
class Numbered:
    """One line with a number.

    Attributes:
        number: its place among this node's lines, from 1.
        kind: ``out`` or ``err`` of workers, ``agent`` or ``verdict``.
        label: of workers, whose line it is; see `ranks`.
        text: without the mark before it.
        more: whether the next line goes on with it.
        seconds: of the epoch, when it was shown; None for as the line before.
    """

    number: int
    kind: str
    label: str
    text: str
    more: bool = False
    seconds: float | None = None


class Writer:
    """Gives a node's lines their numbers."""

    def __init__(self) -> None:
        self._count = 0

    def output(self, lines: list[Folded], seconds: float) -> str:
        """Return workers' lines, read at one moment, with their numbers."""
        stamp, parts = f"@{seconds:.1f}", []
        for line in lines:
            parts.append(
                self._line(f"[{line.label}]" + "!" * (line.stream == "err"), line.text, stamp)
            )
            stamp = ""
        return "".join(parts)

    def words(self, text: str) -> str:
        """Return the agent's words, each line of them with a number."""
        return "".join(self._line("clusterjob:", line) for line in text.split("\n"))

    def verdict(self, verdict: Mapping[str, Any]) -> str:
        """Return how the job ended; of workers that failed as a consequence without their last
        lines, which are in their logs.
        """
        consequences = [failure | {"last_lines": []} for failure in verdict["consequences"]]
        return self._line(
            "clusterjob-verdict",
            json.dumps({**verdict, "consequences": consequences}, separators=(",", ":")),
        )

    def _line(self, mark: str, text: str, stamp: str = "") -> str:
        pieces = _pieces(text)
        lines = []
        for index, piece in enumerate(pieces):
            self._count += 1
            lines.append(
                f"{self._count}{stamp if not index else ''} {mark}{'+' * (index < len(pieces) - 1)} {piece}\n"
            )
        return "".join(lines)


def _pieces(text: str) -> list[str]:
    data = text.encode(errors="backslashreplace")
    pieces, begin = [], 0
    while True:
        end = min(len(data), begin + LONGEST)
        while end < len(data) and data[end] & 0xC0 == 0x80:  # not inside of a character
            end -= 1
        pieces.append(data[begin:end].decode())
        if end == len(data):
            return pieces
        begin = end


def parse(line: str) -> Numbered | None:
    """Return a line that bears a number; None for any other, such as one of a setup line's."""
    match = _LINE.fullmatch(line.rstrip("\r\n"))
    if match is None:
        return None
    kind = {":": "agent", "-verdict": "verdict"}.get(
        match["own"] or "", "err" if match["err"] else "out"
    )
    seconds = float(match["seconds"]) if match["seconds"] else None
    return Numbered(
        int(match["number"]),
        kind,
        label=match["label"] or "",
        text=match["text"] or "",
        more=bool(match["more"]),
        seconds=seconds,
    )


def ranks(label: str) -> list[int | None]:
    """Return whose line it is: ranks, and None for a node's torchrun."""
    found: list[int | None] = []
    for part in label.split(","):
        if part.startswith("node"):
            found.append(None)
            continue
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), int(first) + _MOST_OF_A_LABEL) + 1)
        if len(found) > _MOST_OF_A_LABEL:
            return found[:_MOST_OF_A_LABEL]
    return found


def refusal(exit_code: int, host: str, why: str) -> str:
    """Return the line of a node that cannot start its agent."""
    return f"clusterjob-refused {exit_code} {host}: {' '.join(why.split())}\n"


def parse_refusal(line: str) -> tuple[int, str] | None:
    """Return the exit code and ``host: why`` of a line that `refusal` made; None for any other."""
    match = _REFUSED.fullmatch(line.rstrip("\r\n"))
    return None if match is None else (int(match["code"]), match["why"])
