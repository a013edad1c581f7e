"""Name the first failure of a round: the root cause.

Times of different hosts are never compared. An agent reports how long ago, by its own monotonic
clock, a worker began to fail; the coordinator subtracts that from its own clock at arrival. The
error that remains is the network's latency. Two rules come before the order in time: failures that
only name a lost peer are ranked after all other failures, and failures after the stop order are
ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterjob.node.logs import failure_texts
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import STOPPED, Group, RankStack
from clusterjob.node.system.ranges import ranks_text
from clusterjob.node.verdict import STACK_TITLE, Failure, FailureKind, Verdict

# Seconds for which the coordinator waits for the root cause when a failure only names a lost peer.
EFFECT_TIMEOUT = 0.3
# A worker that reported an exception may still run its atexit handlers. Seconds to wait for its
# exit and its last lines.
EXIT_TIMEOUT = 5.0
# The agent of a busy machine may notice an early exit late. So the exit may seem to happen up to
# this many seconds after the failures that it causes.
_LATE_EXIT_SECONDS = 2.0

_SHOWN_FRAMES = 19  # of the rank that a verdict about a hang names

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


def explain(
    entries: Collection[Entry], exits: Collection[Entry] = ()
) -> tuple[Failure | None, tuple[Failure, ...]]:
    """Return the root cause of a round, None without a failure, and the others in order of time.

    The root cause is the first failure that is not an effect, else an early exit that explains all
    failures, else the first effect.

    Args:
        entries: the failures.
        exits: the ranks that ended with exit code 0, each as a failure without a message.
    """
    others = sorted(entries, key=lambda entry: (entry.failure.effect, entry.at))
    root = _early_exit(entries, exits)
    if root is None and others:
        root = others.pop(0).failure
    others.sort(key=lambda entry: entry.at)
    return root, tuple(entry.failure for entry in others)


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
    return _as_cause(before[0].failure, seconds, effects=in_torch)


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


def _as_cause(first: Failure, seconds: float, effects: Sequence[Failure]) -> Failure:
    """Return the rank that ended first as the root cause of the others' failures.

    Args:
        first: the first rank that ended with exit code 0.
        seconds: from its end to the first failure of another rank.
        effects: the failures of other ranks in torch.distributed.
    """
    before = f"{seconds:.1f} s before" if seconds >= 0.05 else "at that moment"
    calls = {failure_texts.collective(effect.last_lines) or "a collective" for effect in effects}
    named = ranks_text(each.rank for each in effects if each.rank is not None)
    text = f"{named} {'was' if len(effects) == 1 else 'were'} in {', '.join(sorted(calls))}"
    message = f"ended with exit code 0 {before}; {text}"
    return replace(first, kind=FailureKind.EARLY_EXIT, message=message)


def of_hang(
    end: Verdict, stacks: Sequence[RankStack], step: int, first_ranks: Mapping[int, int]
) -> Verdict:
    """Return the end of a round that hangs, with what its ranks do and which is waited for.

    Args:
        end: the end, before the stacks are known.
        stacks: the stacks of all ranks.
        step: the last step of a heartbeat; -1 without one.
        first_ranks: the rank of the first worker of each node.
    """
    groups = grouping.group(stacks)
    if end.failure is None or not groups:
        return end
    last = f"; last step {step}" if step >= 0 else ""
    message = f"{end.failure.message}: {grouping.headline(groups)}{last}"
    failure = replace(end.failure, message=message)
    odd = _odd(groups)
    if odd is None:
        return replace(end, reason=message, failure=failure)
    stack = next(each for each in stacks if each.rank == odd.ranks[0])
    lines = [
        f"{frame.function} ({grouping.place_text(frame)})"
        for frame in grouping.without_imports(odd.frames)[:_SHOWN_FRAMES]
    ]
    return Verdict.of_failure(
        replace(
            failure,
            rank=stack.rank,
            local_rank=stack.rank - first_ranks[stack.node_rank],
            node_rank=stack.node_rank,
            host=stack.host,
            last_lines=(STACK_TITLE, *lines) if lines else (),
        )
    )


def _odd(groups: Sequence[Group]) -> Group | None:
    """Return the group for which the others wait, the last rank that runs, or None.

    It is the one that is stopped or does not answer, else the one that is not in a collective, else
    the smallest one.
    """
    ordered = sorted(groups, key=_order)
    if len(ordered) == 1:
        return ordered[0] if len(ordered[0].ranks) == 1 else None
    if _order(ordered[0]) == _order(ordered[1]):
        return None
    return ordered[0]


def _order(each: Group) -> tuple[bool, bool, int]:
    answers = bool(each.frames) and not each.state.startswith(STOPPED)
    return answers, grouping.waits_for_peers(each.frames), len(each.ranks)
