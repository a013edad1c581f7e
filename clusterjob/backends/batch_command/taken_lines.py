"""Record which lines of a node's log were taken, so that each line is stored once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from msgspec import Meta

from clusterjob.node.verdict import Verdict

_MAX_KNOWN = 2000  # maximum number of lines without a number to remember
_MAX_VERDICT = 32 << 20  # maximum characters of a verdict's text
Count = Annotated[int, Meta(ge=0, le=2**53)]
_Range = Annotated[list[Count], Meta(min_length=2, max_length=2)]
_Names = Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=10_000)]


@dataclass
class TakenLines:
    """The log lines of a node taken so far, in one attempt.

    Attributes:
        next: the number of the next line.
        known: digests of the last `_MAX_KNOWN` lines without a number.
        bare: the number of lines without a number since the last line with a number.
        missing: ranges [first, last] of skipped line numbers.
        open: files whose last line continues in a later line of the log.
        seconds: the time of the last line with a time.
        verdict: the job's verdict, as plain data.
        verdict_part: the text of the verdict so far.
    """

    next: Count = 1
    known: _Names = field(default_factory=list)
    bare: Count = 0
    missing: Annotated[list[_Range], Meta(max_length=10_000)] = field(default_factory=list)
    open: _Names = field(default_factory=list)
    seconds: Annotated[float, Meta(gt=-1e300, lt=1e300)] = 0.0
    verdict: dict[str, Any] | None = None
    verdict_part: Annotated[str, Meta(max_length=_MAX_VERDICT)] = ""

    def __post_init__(self) -> None:
        """Refuse stored data with an invalid verdict.

        Raises:
            ValueError: the verdict is not valid.
        """
        if self.verdict is not None:
            Verdict.from_json(self.verdict)

    def remember(self, line: str) -> None:
        """Record a line without a number."""
        self.known.append(_digest(line))
        del self.known[:-_MAX_KNOWN]
        self.bare += 1

    def mark(self, name: str, *, is_open: bool) -> None:
        """Record whether a later line of the log continues the last line of a file."""
        self.open = [other for other in self.open if other != name] + [name] * is_open

    def add_verdict(self, text: str, *, complete: bool) -> None:
        """Add a part of the verdict's text; parse the text if it is complete."""
        self.verdict_part = (self.verdict_part + text)[:_MAX_VERDICT]
        if not complete:
            return
        try:
            found = json.loads(self.verdict_part)
            Verdict.from_json(found)
        except (ValueError, RecursionError):
            self.verdict_part = ""  # a part of the text is missing
            return
        self.verdict, self.verdict_part = found, ""

    def was_missing(self, number: int) -> bool:
        """Return whether this line was missing; if so, remove it from the missing lines."""
        for index, (first, last) in enumerate(self.missing):
            if first <= number <= last:
                halves = [[first, number - 1], [number + 1, last]]
                self.missing[index : index + 1] = [half for half in halves if half[0] <= half[1]]
                return True
        return False

    def known_of(self, lines: Sequence[str]) -> int:
        """Return how many lines at the start of `lines` were taken before.

        No line of `lines` has a number. They follow the same numbered line as the last `bare` known
        lines; `known` may lack the first of those. If `lines` contains all of these known lines,
        the result is certain. Otherwise the result is the longest overlap between the end of the
        known lines and the start of `lines`.
        """
        digests = [_digest(line) for line in lines]
        known = self.known[-self.bare :] if self.bare else []
        if not known or not digests:
            return 0
        if digests[: self.bare][-len(known) :] == known and len(digests) >= self.bare:
            return self.bare
        if _contains(known, digests):
            return len(digests)
        return next(
            (
                count
                for count in range(min(len(known), len(digests)), 0, -1)
                if known[-count:] == digests[:count]
            ),
            0,
        )

    def is_older(self, lines: Sequence[str]) -> bool:
        """Return whether lines without a number precede the last numbered line."""
        return _contains(
            self.known[: len(self.known) - self.bare], [_digest(line) for line in lines]
        )


def _contains(whole: list[str], part: list[str]) -> bool:
    return any(
        whole[begin : begin + len(part)] == part for begin in range(len(whole) - len(part) + 1)
    )


def _digest(line: str) -> str:
    return hashlib.blake2b(
        line.rstrip("\r\n").encode(errors="surrogatepass"), digest_size=6
    ).hexdigest()
