"""Name the first failure of a round: the root cause.

Times of different hosts are never compared. An agent reports how long ago, by its own monotonic
clock, a worker began to fail; the coordinator subtracts that from its own clock at arrival. The
error that remains is the network's latency. Two rules come before the order in time: failures that
only name a lost peer are ranked after all other failures, and failures after the stop order are
ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from clusterjob.node.logs import failure_texts
from clusterjob.node.system.ranges import ranks_text
from clusterjob.node.verdict import Failure, FailureKind

# Seconds for which the coordinator waits for the root cause when a failure only names a lost peer.
EFFECT_TIMEOUT = 0.3
# A worker that reported an exception may still run its atexit handlers. Seconds to wait for its
# exit and its last lines.
EXIT_TIMEOUT = 5.0
# The agent of a busy machine may notice an early exit late. So the exit may seem to happen up to
# this many seconds after the failures that it causes.
_LATE_EXIT_SECONDS = 2.0

_UNNAMED = "in a collective"

Key = tuple[int, "int | None"]  # node_rank, local_rank


@dataclass(frozen=True)
class Entry:
    """A reported failure.

    Attributes:
        failure: the failure.
        at: when it began, by the coordinator's monotonic clock.
        exited: whether the worker has ended.
    """

    failure: Failure
    at: float
    exited: bool


def key_of(failure: Failure) -> Key:
    """Return the key of a failed worker, or of a failed node."""
    return failure.node_rank, failure.local_rank


def stop_due(entries: Collection[Entry]) -> float:
    """Return the time at which to stop all workers of a round; infinity without a failure."""
    causes = [entry for entry in entries if not entry.failure.effect]
    if any(entry.exited for entry in causes):
        return 0.0
    if causes:
        return min(entry.at for entry in causes) + EXIT_TIMEOUT
    exited = [entry.at + EFFECT_TIMEOUT for entry in entries if entry.exited]
    return min(exited or [entry.at + EXIT_TIMEOUT for entry in entries], default=float("inf"))


def root(entries: Collection[Entry], exits: Collection[Entry] = ()) -> Failure | None:
    """Return the root cause of a round; None without a failure.

    It is the first failure that is not an effect, else an early exit that explains all failures,
    else the first effect.

    Args:
        entries: the failures.
        exits: the ranks that ended with exit code 0, each as a failure without a message.
    """
    if not entries:
        return None
    return _early_exit(entries, exits) or min(entries, key=_rank).failure


def consequences(entries: Collection[Entry], exits: Collection[Entry] = ()) -> tuple[Failure, ...]:
    """Return the failures of a round that are not its root cause, in order of time."""
    ranked = sorted(entries, key=_rank)
    others = ranked if _early_exit(entries, exits) else ranked[1:]
    return tuple(entry.failure for entry in sorted(others, key=lambda entry: entry.at))


def _rank(entry: Entry) -> tuple[bool, float]:
    return entry.failure.effect, entry.at


def _early_exit(entries: Collection[Entry], exits: Collection[Entry]) -> Failure | None:
    """Return the early exit that explains all failures, or None."""
    failures = sorted(entries, key=lambda entry: entry.at)
    if not exits or not failures or not all(entry.failure.effect for entry in failures):
        return None
    before = sorted(
        (entry for entry in exits if entry.at <= failures[0].at + _LATE_EXIT_SECONDS),
        key=lambda entry: entry.at,
    )
    # At least one rank must have failed in torch.distributed, where it needed the others.
    in_torch = [
        entry.failure
        for entry in failures
        if failure_texts.in_collective((entry.failure.message, *entry.failure.last_lines))
    ]
    if not before or not in_torch:
        return None
    seconds = failures[0].at - before[0].at
    return _as_cause([entry.failure for entry in before], seconds, effects=in_torch)


def completed(announced: Failure, end: Failure, *, by_stop: bool) -> Failure:
    """Return the failure that a worker reported, completed with the way it ended.

    A signal after the report is not the cause. It is the agent's stop signal, or the interpreter
    aborts while it exits (gloo's threads: "terminate called without an active exception").
    """
    if end.signal is None:
        # The output of an exception that was reported may not show it, but may show its kind.
        general = announced.kind is FailureKind.EXIT_CODE or (
            announced.kind is FailureKind.CODE and end.kind is not FailureKind.EXIT_CODE
        )
        return replace(
            end,
            message=announced.message,
            effect=announced.effect or end.effect,
            kind=end.kind if general else announced.kind,
            where=announced.where or end.where,
        )
    after = "" if by_stop else f" (then {end.message})"
    return replace(announced, message=f"{announced.message}{after}", last_lines=end.last_lines)


def _as_cause(exits: Sequence[Failure], seconds: float, effects: Sequence[Failure]) -> Failure:
    """Return the rank that ended first as the root cause of the others' failures.

    Args:
        exits: the ranks that ended with exit code 0, in order of time.
        seconds: from the end of the first of them to the first failure of another rank.
        effects: the failures of other ranks in torch.distributed.
    """
    before = f"{seconds:.1f} s before" if seconds >= 0.05 else "at that moment"
    also = f", as {_named(exits[1:])} did" if exits[1:] else ""
    calls: dict[str, list[Failure]] = {}
    for effect in effects:
        name = failure_texts.collective(effect.last_lines)
        calls.setdefault(f"in {name}" if name else _UNNAMED, []).append(effect)
    if len(calls) > 1:  # the traceback of a rank that was stopped may be incomplete
        calls.pop(_UNNAMED, None)
    clauses = [
        f"{_named(ranks)} {'was' if len(ranks) == 1 else 'were'} {call}"
        for call, ranks in calls.items()
    ]
    return replace(
        exits[0],
        kind=FailureKind.EARLY_EXIT,
        message=f"ended with exit code 0 {before}{also}; {', '.join(clauses)}",
    )


def _named(failures: Sequence[Failure]) -> str:
    return ranks_text(each.rank for each in failures if each.rank is not None)
