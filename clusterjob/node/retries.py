"""Define `Retry`, one value of --retry: the restarts after failures of one kind."""

from __future__ import annotations

import re
from dataclasses import dataclass

from clusterjob.errors import SpecError, did_you_mean
from clusterjob.node.verdict import FailureKind

_RETRY = re.compile(
    r"(?P<kind>[^:]*)(?::(?P<times>\d{1,6}))?(?::mem\*(?P<memory>\d{1,2}(?:\.\d{1,3})?))?", re.ASCII
)


@dataclass(frozen=True)
class Retry:
    """One --retry: the restarts after failures of one kind.

    Attributes:
        times: maximum number of restarts in the whole job; None for that of --max-restarts, at
            least 1.
        memory: the factor by which the memory grows each time; 0.0 for the same memory.
    """

    kind: FailureKind
    times: int | None = None
    memory: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Retry:
        """Read ``KIND``, ``KIND:N`` or ``oom_host:N:mem*FACTOR``.

        Raises:
            SpecError: the text has another form, or the kind is unknown.
        """
        found = _RETRY.fullmatch(text.strip())
        if found is None:
            raise SpecError(f"{text!r}: write KIND, KIND:N or oom_host:N:mem*1.5")
        kinds = [kind.value for kind in FailureKind]
        if found["kind"] not in kinds:
            hint = did_you_mean(found["kind"], kinds, f"the kinds are {', '.join(kinds)}")
            raise SpecError(f"{text!r}: there is no kind {found['kind']!r}", hint)
        memory = float(found["memory"] or 0)
        if found["memory"] and (found["kind"] != FailureKind.OOM_HOST or memory <= 1):
            raise SpecError(f"{text!r}: only oom_host:N:mem*FACTOR, above 1, grows memory")
        times = found["times"]
        return cls(FailureKind(found["kind"]), int(times) if times else None, memory=memory)


def retries(text: str) -> tuple[str, ...]:
    """Check comma-separated values of --retry, and return each.

    Raises:
        SpecError: one of them is wrong.
    """
    words = tuple(word.strip() for word in text.split(","))
    for word in words:
        Retry.parse(word)
    return words
