"""Detect a rank that ended with exit code 0 while other ranks were in a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clusterjob.node.logs import failure_texts
from clusterjob.node.verdict import Failure, FailureKind

_MAX_NAMED = 8
_UNNAMED = "in a collective"


def failure(exits: Sequence[Failure], seconds: float, effects: Sequence[Failure]) -> Failure:
    """Return the rank that ended first as the root cause of the others' failures.

    Args:
        exits: the ranks that ended with exit code 0, in order of time.
        seconds: from the end of the first of them to the first failure of another rank.
        effects: the failures of the other ranks, at least one of them in torch.distributed.
    """
    before = f"{seconds:.1f} s before" if seconds >= 0.05 else "at that moment"
    also = f", as {_ranks(exits[1:])} did" if exits[1:] else ""
    calls: dict[str, list[Failure]] = {}
    for effect in effects:
        if in_torch(effect):
            name = failure_texts.collective(effect.last_lines)
            calls.setdefault(f"in {name}" if name else _UNNAMED, []).append(effect)
    if len(calls) > 1:  # the traceback of a rank that was stopped may be incomplete
        calls.pop(_UNNAMED, None)
    clauses = [
        f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {call}"
        for call, ranks in calls.items()
    ]
    return replace(
        exits[0],
        kind=FailureKind.EARLY_EXIT,
        message=f"ended with exit code 0 {before}{also}; {', '.join(clauses)}",
    )


def in_torch(effect: Failure) -> bool:
    """Return whether a rank failed inside torch.distributed, where it needed the other ranks."""
    return failure_texts.in_collective((effect.message, *effect.last_lines))


def _ranks(failures: Sequence[Failure]) -> str:
    numbers = sorted(each.rank for each in failures if each.rank is not None)
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{more}"
