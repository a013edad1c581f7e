"""Name the ranks that a job which hangs waits for, by the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.outcome import Agent, Outcome
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import STOPPED, Group, RankStack, program_frame
from clusterjob.node.verdict import STACK_TITLE, Failure, FailureKind, JobState

_SHOWN_FRAMES = 19  # of the rank that the verdict names
_COLLECTIVES = "torch/distributed/"


def hang(own: Agent, seconds: float) -> Outcome:
    """Return the outcome of a round that hangs, before the ranks are known.

    Args:
        own: node 0's agent.
        seconds: the timeout.
    """
    message = f"no progress for {_duration(seconds)}"
    failure = Failure.of_node(own.node_rank, own.host, message=message, kind=FailureKind.HANG)
    return Outcome(JobState.FAILED, 1, reason=message, failure=failure, stacks=True)


def with_ranks(
    end: Outcome, stacks: Sequence[RankStack], step: int, local_rank: Callable[[int, int], int]
) -> Outcome:
    """Return the outcome of `hang` with what the ranks do, and the rank for which others wait.

    Args:
        end: the outcome.
        stacks: the stacks of all ranks.
        step: the last step of a heartbeat; -1 without one.
        local_rank: returns the index on its node of a rank, given its node_rank and the rank.
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
            message += f" ({grouping.ranks_text(odd.ranks)}: {frame.function}, {place})"
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
    return outcome.failed(
        replace(
            failure,
            rank=stack.rank,
            local_rank=local_rank(stack.node_rank, stack.rank),
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
    wait = grouping.find_wait(each.frames)
    collective = wait is not None and _COLLECTIVES in each.frames[wait.depth].file
    answers = bool(each.frames) and not each.state.startswith(STOPPED)
    return answers, collective, len(each.ranks)


def _duration(seconds: float) -> str:
    """Return a duration as ``10m``, ``1h30m`` or ``8s``."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes or rest:
        return f"{seconds:g}s"
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
