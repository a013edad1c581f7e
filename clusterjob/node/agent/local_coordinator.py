"""The coordinator of the job, if it runs in this agent's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterjob.node.coordinator import Coordinator, MinorityError
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.coordinator_link import LocalLink
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.verdict import Verdict

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier


class LocalCoordinator:
    """Start the coordinator in this process: at the start of a job, or after a loss.

    Args:
        node: the job, as this node sees it.
        watch: reports the error of a background task.
        notifier: sends notifications; None without --notify.
    """

    def __init__(
        self,
        node: NodeJob,
        watch: Callable[[asyncio.Task[None]], None],
        notifier: Notifier | None,
    ) -> None:
        self._node = node
        self._watch = watch
        self._notifier = notifier
        self._coordinator: Coordinator | None = None
        self.task: asyncio.Task[Verdict] | None = None

    def start(self, hello: messages.Hello, earlier: Earlier | None) -> LocalLink:
        """Start the coordinator; return this agent's link to it. `run` must follow.

        Args:
            hello: the first message of this agent.
            earlier: the coordinator whose place this one takes; None at the start of a job.
        """
        topology = replace(self._node.topology, master_addr=hello.address)
        self._coordinator = Coordinator(
            replace(self._node, topology=topology), self._watch, self._notifier, earlier
        )
        return LocalLink(self._coordinator.membership, hello)

    def run(self) -> None:
        """Let the coordinator handle messages."""
        assert self._coordinator is not None
        self.task = asyncio.create_task(self._coordinator.run())

    def lost(self) -> messages.ConnectionLost | None:
        """Return the loss of the coordinator if the job may go on without it; else None.

        Raises:
            Exception: the coordinator's error.
        """
        if self.task is not None and self.task.done() and self.task.exception() is not None:
            task, self.task = self.task, None
            try:
                task.result()
            except MinorityError as error:
                self._coordinator = None
                return messages.ConnectionLost(error.message)
        return None

    @property
    def is_here(self) -> bool:
        """Whether the coordinator is or was in this process, and gives the verdict of the job."""
        return self._coordinator is not None

    def end(self, verdict: Verdict) -> None:
        """Send the agents the verdict of a job that ends because of this agent."""
        if self._coordinator is not None:
            self._coordinator.membership.broadcast(messages.End(verdict))

    async def close(self) -> None:
        """Stop the coordinator."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
