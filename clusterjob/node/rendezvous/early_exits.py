"""A rank that ends with exit code 0 while the others are in a collective: the cause of their
failures, and no failure itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from clusterjob.node.verdict import Failure

KIND = "early_exit"
_MOST_NAMED = 8
_UNNAMED = "in a collective"
# The first line of a traceback that is in torch says what the script has called. Its wrapper for
# logs is none.
_CALL = re.compile(
    r'File ".*/torch/(?:distributed/distributed_c10d|_tensor|autograd/__init__)\.py", line \d+, in (\w+)'
)
# What shows that a rank has failed in torch.distributed, not at a connection of its own. `@record`
# of torchrun wraps a whole script.
_IN_TORCH = re.compile(
    r'File ".*/torch/(?:nn/parallel/)?distributed(?:\.py|/(?!elastic/))|torch\.distributed\.Dist|c10::Dist|\bProcessGroup|\[c10d\]|'
    r"gloo/transport/|\bNCCL\b|\bGangError: "
)


def failure(exits: Sequence[Failure], seconds: float, effects: Sequence[Failure]) -> Failure:
    """Return the failure of the rank that ended first.

    Args:
        exits: ranks that ended with exit code 0, by time.
        seconds: between the end of the first one and the first failure of another.
        effects: the failures of the others, at least one of them in torch.distributed.
    """
    before = f"{seconds:.1f} s before" if seconds >= 0.05 else "at that moment"
    also = f", as {_ranks(exits[1:])} did" if exits[1:] else ""
    calls: dict[str, list[Failure]] = {}
    for effect in effects:
        if in_torch(effect):
            calls.setdefault(collective(effect.last_lines), []).append(effect)
    if (
        len(calls) > 1
    ):  # a rank that was stopped while it wrote its traceback tells less than the others
        calls.pop(_UNNAMED, None)
    clauses = [
        f"{_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} {call}"
        for call, ranks in calls.items()
    ]
    return replace(
        exits[0], kind=KIND, message=f"ended with exit code 0 {before}{also}; {', '.join(clauses)}"
    )


def in_torch(effect: Failure) -> bool:
    """Return whether a rank has failed in torch.distributed, as far as its last words tell: there
    it needed the others.
    """
    return any(map(_IN_TORCH.search, (effect.message, *effect.last_lines))) or any(
        map(_CALL.search, effect.last_lines)
    )


def collective(lines: Iterable[str]) -> str:
    """Return where in torch a traceback says that a rank was: ``in all_reduce``; ``in a
    collective`` where it does not say.
    """
    return next(
        (f"in {match[1]}" for match in map(_CALL.search, lines) if match is not None), _UNNAMED
    )


def _ranks(failures: Sequence[Failure]) -> str:
    numbers = sorted(each.rank for each in failures if each.rank is not None)
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return (
        f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_MOST_NAMED]))}{more}"
    )
