"""Turn the stop requests that reach an agent into messages to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.stop_requests import StopRequests


class StopMessages:
    """The messages for the stop requests of one agent, each once for each coordinator.

    Args:
        requests: the stop requests.
        job_dir: the job's directory, as this node sees it.
    """

    def __init__(self, requests: StopRequests, job_dir: Path) -> None:
        self._requests = requests
        self._job_dir = job_dir
        self._sent: set[asyncio.Future[Any]] = set()
        self._makers: dict[asyncio.Future[Any], Callable[[Any], Any]] = {
            requests.warned: messages.PreemptionWarning,
            requests.cancelled: lambda _why: self.cancellation(),
            requests.kill_now: lambda _none: messages.KillNow(),
        }

    def unsent(self) -> set[asyncio.Future[Any]]:
        """Return the requests, arrived or not, whose messages were not sent."""
        return self._makers.keys() - self._sent

    def new(self) -> Iterator[Any]:
        """Yield the message of each request that has arrived since the last call."""
        for request in self.unsent():
            if request.done():
                self._sent.add(request)
                yield self._makers[request](request.result())

    def repeat(self) -> None:
        """Yield all messages again from now on, for another coordinator."""
        self._sent.clear()

    def cancellation(self) -> messages.Cancel | None:
        """Return the message that the job was cancelled, if it was."""
        requests = self._requests
        if not requests.cancelled.done():
            return None
        return messages.Cancel(
            requests.cancelled.result(),
            interrupt=requests.interrupted,
            stacks=ends.stacks_wanted(self._job_dir) or requests.terminated,
            terminated=requests.terminated,
        )
