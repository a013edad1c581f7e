"""Wait for the nodes of a round, and measure them before the first one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.nodes import MinorityError, Nodes
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.preflight_run import Preflight
from clusterjob.node.verdict import Failure

_INTERVAL = 0.25  # seconds between two checks of the nodes for which a round waits
_NOT_STARTED = "before its workers had started"


class RoundStart:
    """The time before each round.

    Args:
        options: --preflight.
        job_dir: the job's directory, in which nodes write why they cannot start.
        attempt: the number of the job's attempt, from 0.
        membership: the agents.
        nodes: chooses the nodes of each round.
        preemption: the job's preemption warning.
        preflight: measures the nodes.
        handle: handles a message; returns an outcome if it ends the job.
        handle_waiting: handles all messages that wait, in the same way.

    Attributes:
        waits: whether no round runs.
    """

    def __init__(
        self,
        options: LaunchOptions,
        job_dir: Path,
        attempt: int,
        membership: Membership,
        nodes: Nodes,
        preemption: Preemption,
        preflight: Preflight,
        handle: Callable[[int, Any], Outcome | None],
        handle_waiting: Callable[[], Outcome | None],
    ) -> None:
        self._options = options
        self._job_dir = job_dir
        self._attempt = attempt
        self._membership = membership
        self._nodes = nodes
        self._preemption = preemption
        self._preflight = preflight
        self._handle = handle
        self._handle_waiting = handle_waiting
        self.waits = True

    async def first(self) -> Outcome | None:
        """Wait for the nodes of the first round, and measure them; return an outcome if it fails.

        Spare nodes take the place of slow ones.
        """
        end = await self.next(after=None)
        if end is not None or self._options.preflight == "off":
            return end
        end = await self._preflight.run(self._membership.usable())
        if end is None and not self._nodes.replace(self._preflight.result.slow):
            end = self._preflight.refusal()
        if end is None and any(peer.lost for peer in self._membership.peers.values()):
            return await self.next(after=None)
        return end

    async def next(self, after: Outcome | None, pause: float = 0.0) -> Outcome | None:
        """Wait for the nodes of the next round; return an outcome if it cannot begin.

        Args:
            after: the outcome of the last round; None before the first.
            pause: the least number of seconds to wait.

        Raises:
            MinorityError: more than half of the nodes may run without this coordinator.
        """
        self.waits = True
        wait = self._nodes.wait(first=after is None)
        # Later, who may not join is nobody that the job waits for.
        refusals = self._membership.refusals if after is None else []
        checked = time.monotonic()
        earliest = checked + pause
        while not (over := wait.over()) or time.monotonic() < earliest or self._may_train(after):
            left = checked + _INTERVAL - time.monotonic()
            message = await self._membership.next_message(left)
            end = self._handle(*message) if message is not None else None
            end = end or self._handle_waiting()  # look at all nodes once, not for each message
            if end is not None or refusals:
                return self._refused(refusals) or end
            if time.monotonic() - checked < _INTERVAL:
                continue
            checked = time.monotonic()
            if wait.is_alone():
                raise MinorityError("the other nodes may still run without this one")
            if checked > self._preemption.due:
                return outcome.preempted(self._preemption.explain(_NOT_STARTED))
            missing = wait.failure()  # prints it, too
            end = self._refused(refusals) or (None if over else outcome.too_few(missing, after))
            if end is not None:
                return end
        if not await self._nodes.may_start():
            raise MinorityError("Slurm does not confirm that this node is up")
        # Start no worker if the job was cancelled when the last agent joined.
        end = self._handle_waiting()
        if end is None and after is None and self._preemption.reason:
            return outcome.preempted(self._preemption.explain(_NOT_STARTED))
        return end

    def _may_train(self, after: Outcome | None) -> bool:
        """Return whether workers of the last round may still run on a lost node."""
        moment, until = time.monotonic(), self._membership.may_train
        lost = {node for node in self._nodes.selection.nodes if until.get(node, 0.0) > moment}
        if after is None or not lost:
            return False
        ended = {end["node_rank"] for end in ends.written(self._job_dir, self._attempt)}
        return not lost <= ended

    def _refused(self, refusals: list[Failure]) -> Outcome | None:
        """Return the failure of a node that was refused or could not start its agent, else None."""
        refused = refusals or ends.refusals(self._job_dir, self._attempt)
        return outcome.failed(refused[0]) if refused else None
