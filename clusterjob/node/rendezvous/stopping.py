"""Collect the stacks of a round's workers, and stop them on all nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from clusterjob.node.options import GRACE, LaunchOptions
from clusterjob.node.rendezvous import hang_verdict, messages, outcome
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.round import Round
from clusterjob.node.system import files
from clusterjob.node.verdict import FailureKind, JobState

# Seconds between SIGTERM and SIGKILL after a failure, as torchrun: for workers whose handler saves.
_FAILURE_GRACE = 30.0
# The longest grace after a scheduler's SIGTERM: Slurm's default KillWait of 30 s, without 5 s.
_KILL_WAIT = 25.0
_LEAST_GRACE = 0.5  # seconds, if a warning has left less
_STOP_TIMEOUT = 5.0  # seconds for an agent to answer the stop order, after the grace


def grace_after(end: Outcome, options: LaunchOptions, left: float) -> float:
    """Return the seconds between SIGTERM and SIGKILL at the end of a round.

    Args:
        end: the outcome of the round.
        options: the grace; None for 30 s after a failure, else 3 s.
        left: the seconds until the end of the job that a warning has announced.
    """
    if end.state is JobState.SUCCEEDED:
        return 0.0
    if end.failure is None:
        grace = options.grace or GRACE
        return min(grace, _KILL_WAIT) if end.terminated else grace
    grace = options.grace or _FAILURE_GRACE
    if end.failure.kind is FailureKind.NODE_LOST:  # another part of the job may go on
        grace = min(grace, options.lease)
    return min(grace, max(_LEAST_GRACE, left))


class RoundStop:
    """The stop of one round of workers.

    Args:
        round_: the round.
        membership: the agents.
        preemption: the job's preemption warning.
        options: the grace, in seconds.
        next_message: returns the next message and its sender; None after a number of seconds.
        handle: handles a message; returns an outcome if it ends a round.
        print_line: prints one line for the user.

    Attributes:
        cancelled: a cancellation that has arrived meanwhile, or None.
    """

    def __init__(
        self,
        round_: Round,
        membership: Membership,
        preemption: Preemption,
        options: LaunchOptions,
        next_message: Callable[[float], Awaitable[tuple[int, Any] | None]],
        handle: Callable[[int, Any], Outcome | None],
        print_line: Callable[[str], None],
    ) -> None:
        self._round = round_
        self._membership = membership
        self._preemption = preemption
        self._options = options
        self._next_message = next_message
        self._handle = handle
        self._print_line = print_line
        self._kill_now = False
        self.cancelled: Outcome | None = None

    async def collect_evidence(self, end: Outcome) -> Outcome:
        """Wait for the stacks of the living ranks; return the outcome, with the hanging ranks."""
        evidence = self._round.evidence
        if end.stacks:
            failed = None
            if end.failure is not None and end.failure.kind is not FailureKind.HANG:
                failed = end.failure.node_rank
            deadline = evidence.ask(self._round.living_nodes(), end.reason, failed)
            while not (evidence.complete or self._kill_now):
                if not await self._receive(deadline):
                    break
        if end.failure is None or end.failure.kind is not FailureKind.HANG:
            return end
        return hang_verdict.with_ranks(
            end,
            evidence.stacks,
            step=self._round.hang.step,
            local_rank=self._round.ranks.local_rank,
        )

    async def stop(self, end: Outcome) -> None:
        """Stop the workers of all nodes; write the evidence while they end."""
        unstopped, root_cause = self._round.unstopped, self._round.root_cause
        self._preemption.end_round(root_cause)
        root_cause.note_stop(time.monotonic())
        left = self._preemption.ends_at - time.monotonic()
        grace = 0.0 if self._kill_now else grace_after(end, self._options, left=left)
        order = messages.Stop(grace, int(end.signal), early=end.failure is not None)
        self._membership.broadcast(order)
        # The stacks of thousands of ranks take a second.
        saving = self._round.evidence.save
        await asyncio.get_running_loop().run_in_executor(files.disk, saving)
        stalls = self._membership.stalls
        deadline, stalled = time.monotonic() + grace + _STOP_TIMEOUT, stalls.total
        while unstopped:
            known = self._kill_now, self.cancelled
            if await self._receive(deadline):
                if known != (self._kill_now, self.cancelled):
                    end = self.cancelled or end
                    shorter = 0.0 if self._kill_now else grace_after(end, self._options, left=left)
                    self._membership.broadcast(replace(order, grace=shorter))
                continue
            stalls.tick()
            if stalls.total > stalled:  # this process itself did not run
                deadline, stalled = time.monotonic() + grace + _STOP_TIMEOUT, stalls.total
                continue
            for node_rank in sorted(unstopped):
                peer = self._membership.peers[node_rank]
                failure = outcome.no_answer(peer)
                self._membership.lose(peer, failure)
                self._print_line(f"{failure.who} {failure.message}")
            unstopped.clear()

    async def _receive(self, deadline: float) -> bool:
        """Handle the next message; return False if none arrives before the deadline."""
        message = await self._next_message(deadline - time.monotonic())
        if message is None:
            return False
        self._kill_now |= isinstance(message[1], messages.KillNow)
        other = self._handle(*message)
        if other is not None and other.state is JobState.CANCELLED:
            self.cancelled = other
        return True
