"""The outcome of one round of workers, and the verdict that follows from the last one."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import STOPPED, Group, RankStack, program_frame
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    STACK_TITLE,
    TIMEOUT_EXIT_CODE,
    Failure,
    FailureKind,
    JobState,
    RoundEnd,
)

_SHOWN_FRAMES = 19  # of the rank that a verdict about a hang names
_TIME_LIMIT = "time_limit"  # the kind of a round that the time limit has ended


@dataclass(frozen=True)
class Outcome:
    """The outcome of a round: success, a failure, or a reason to stop.

    Attributes:
        signal: the signal that stops the remaining workers.
        stacks: whether to save the stacks of the remaining workers first.
        terminated: whether a scheduler has sent SIGTERM, which SIGKILL follows.
    """

    state: JobState
    exit_code: int = 0
    reason: str = ""
    failure: Failure | None = None
    signal: int = signal.SIGTERM
    stacks: bool = False
    terminated: bool = False


def failed(failure: Failure) -> Outcome:
    """Return the outcome of a round with this root cause."""
    return Outcome(
        JobState.FAILED,
        failure.exit_code or 1,
        reason=f"{failure.who}: {failure.message}",
        failure=failure,
        stacks=True,
    )


def preempted(reason: str) -> Outcome:
    """Return the outcome of a round that a preemption ended."""
    return Outcome(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, reason=reason)


def out_of_time(seconds: float) -> Outcome:
    """Return the outcome of a round that reached the job's time limit."""
    reason = f"the time limit of {seconds:g} s was reached"
    return Outcome(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=reason, stacks=True)


def cancelled(reason: str, *, interrupt: bool, stacks: bool = False) -> Outcome:
    """Return the outcome of a round that the user cancelled, or interrupted with Ctrl-C."""
    return Outcome(
        JobState.CANCELLED,
        CANCELLED_EXIT_CODE,
        reason=reason,
        signal=signal.SIGINT if interrupt else signal.SIGTERM,
        stacks=stacks,
    )


def round_end(
    end: Outcome,
    attempt: int,
    restart: int,
    started_at: str | None,
    ended_at: str | None = None,
) -> RoundEnd:
    """Return the entry of a round in the job's ``attempts``.

    Args:
        end: the outcome of the round.
        attempt: the number of the job's attempt, from 0.
        restart: the number of the round, from 0.
        started_at: when its workers were started, RFC 3339; None if they were not.
        ended_at: when it ended, RFC 3339.
    """
    failure = end.failure
    if failure is not None:
        kind = failure.kind.value
    elif end.exit_code == TIMEOUT_EXIT_CODE:
        kind = _TIME_LIMIT
    else:  # "cancelled" and "preempted" are states
        kind = "" if end.state is JobState.SUCCEEDED else end.state.value.lower()
    return RoundEnd(
        attempt,
        restart,
        kind=kind,
        host=failure.host if failure else None,
        node=failure.node_rank if failure else None,
        rank=failure.rank if failure else None,
        started_at=started_at,
        ended_at=ended_at,
        message=(failure.message if failure else end.reason)[: RoundEnd.MAX_MESSAGE],
        where=failure.where[: RoundEnd.MAX_MESSAGE] if failure else "",
    )


def of_round(ended: RoundEnd) -> Outcome:
    """Return the outcome of a round that was recorded; the failure names the node alone."""
    if ended.kind == "preempted" and ended.node is None:  # else a worker left without a warning
        return preempted(ended.message)
    if ended.kind in set(FailureKind):
        kind = FailureKind(ended.kind)
        node, host = ended.node or 0, ended.host or "unknown"
        failure = Failure.of_node(node, host, message=ended.message, kind=kind)
        return failed(replace(failure, where=ended.where))
    if ended.kind == "cancelled":
        return cancelled(ended.message, interrupt=False)
    if ended.kind == _TIME_LIMIT:
        return Outcome(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=ended.message)
    return Outcome(JobState.SUCCEEDED)


def hang(node_rank: int, host: str, seconds: float) -> Outcome:
    """Return the outcome of a round that hangs, before the ranks are known.

    Args:
        node_rank: the coordinator's node.
        host: its host.
        seconds: the timeout.
    """
    message = f"no progress for {seconds:g}s"
    failure = Failure.of_node(node_rank, host, message=message, kind=FailureKind.HANG)
    return Outcome(JobState.FAILED, 1, reason=message, failure=failure, stacks=True)


def with_ranks(
    end: Outcome, stacks: Sequence[RankStack], step: int, first_ranks: Mapping[int, int]
) -> Outcome:
    """Return the outcome of `hang` with what the ranks do, and the rank for which others wait.

    Args:
        end: the outcome.
        stacks: the stacks of all ranks.
        step: the last step of a heartbeat; -1 without one.
        first_ranks: the rank of the first worker of each node.
    """
    groups = grouping.group(stacks)
    if end.failure is None or not groups:
        return end
    message = f"{end.failure.message}: {grouping.headline(groups)}"
    odd = _odd(groups)
    if odd is not None and odd.frames:
        frame = program_frame(odd.frames) or odd.frames[0]
        place = grouping.place_text(frame)
        if place not in message:
            message += f" ({grouping.members_text(odd.ranks)}: {frame.function}, {place})"
    if step >= 0:
        message += f"; last step {step}"
    failure = replace(end.failure, message=message)
    if odd is None:
        return replace(end, reason=message, failure=failure)
    stack = next(each for each in stacks if each.rank == odd.ranks[0])
    lines = [
        f"{frame.function} ({grouping.place_text(frame)})"
        for frame in grouping.without_imports(odd.frames)[:_SHOWN_FRAMES]
    ]
    return failed(
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
