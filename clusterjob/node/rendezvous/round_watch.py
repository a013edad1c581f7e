"""Watch a round of workers until it ends, or until it must be stopped."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any

from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import hang_verdict, outcome
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.round import Round
from clusterjob.node.rendezvous.time_limit import TimeLimit
from clusterjob.node.verdict import JobState


class RoundWatch:
    """The watch over one round of workers.

    Args:
        round_: the round.
        preemption: the job's preemption warning.
        time_limit: the job's time limit.
        options: the time without progress after which the job hangs, in seconds.
        own: the agent of the coordinator's node.
        next_message: returns the next message and its sender; None after a number of seconds.
        handle: handles a message; returns an outcome if it ends the round.
        handle_waiting: handles all messages that wait, in the same way.
    """

    def __init__(
        self,
        round_: Round,
        preemption: Preemption,
        time_limit: TimeLimit,
        options: LaunchOptions,
        own: Peer,
        next_message: Callable[[float], Awaitable[tuple[int, Any] | None]],
        handle: Callable[[int, Any], Outcome | None],
        handle_waiting: Callable[[], Outcome | None],
    ) -> None:
        self._round = round_
        self._preemption = preemption
        self._time_limit = time_limit
        self._options = options
        self._own = own
        self._next_message = next_message
        self._handle = handle
        self._handle_waiting = handle_waiting

    async def wait(self) -> Outcome:
        """Wait until all workers have ended, one has failed, or the job must end."""
        current = self._round
        while current.undone or current.is_unexplained() or self._preemption.suspects_due < inf:
            due = min(
                current.root_cause.stop_due(),
                self._preemption.suspects_due,
                self._preemption.due,
                self._time_limit.due,
                current.unfinished.due,
                current.hang.due,
            )
            end = None
            if due > time.monotonic():
                message = await self._next_message(min(due - time.monotonic(), 3600.0))
                if message is not None:
                    # Handle all waiting messages before the failures are ranked again.
                    end = self._handle(*message) or self._handle_waiting()
            else:
                end = self._handle_due()
            if end is not None:
                return end
        root = current.root()
        if root is not None:
            return outcome.failed(root)
        if self._preemption.left:
            how = "its workers left to be queued again"
            return outcome.preempted(self._preemption.explain(how))
        return Outcome(JobState.SUCCEEDED)

    def _handle_due(self) -> Outcome | None:
        """Handle a deadline that has passed; return an outcome if it ends the round."""
        moment, current = time.monotonic(), self._round
        if current.unfinished.due <= moment:
            current.name_unfinished()
        self._preemption.release(current.root_cause, moment)
        root = current.root()
        if (
            root is not None
            and current.root_cause.stop_due() <= moment
            and (not root.effect or current.poll_is_over(moment))
        ):
            return outcome.failed(root)
        if self._preemption.due <= moment:
            after = f"{self._preemption.seconds:g} s later"
            how = f"its workers still ran {after} and were stopped"
            return outcome.preempted(self._preemption.explain(how))
        if self._time_limit.due <= moment:
            if root is not None:
                return outcome.failed(root)
            return outcome.out_of_time(self._options.time_limit or 0.0)
        if current.hang.due <= moment and current.hang.check(current.living_nodes()):
            return hang_verdict.hang(self._own, self._options.hang_timeout or 0.0)
        return None
