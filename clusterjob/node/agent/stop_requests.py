"""Collect requests to cancel or preempt the job.

They arrive as signals, as the end of the lifeline, and as files in the job directory.

A scheduler that takes a job's nodes away sends SIGTERM too. In a job that may be preempted, SIGTERM
is therefore a warning, unless the job directory records that the job is cancelled.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterable

from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.environments import this_node
from clusterjob.node.logs import ends
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.system import files, processes

# Seconds in which a second SIGINT belongs to the same Ctrl-C: a command between the terminal and
# this agent may forward it.
_ONE_KEYSTROKE = 0.5


class StopRequests:
    """The stop requests that reach one agent; it needs a running event loop.

    Args:
        node: the job, as this node sees it.
        report: the state of this node, which tells the coordinator.

    Attributes:
        cancelled: done when the job must end; its result is the reason.
    """

    def __init__(self, node: NodeJob, report: StateReport) -> None:
        self.cancelled: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._report = report
        self._interrupted_at = math.inf  # by Ctrl-C; workers then get SIGINT instead of SIGTERM
        self._node = node
        self._job_dir = node.directory

    def listen(self, early: Iterable[int]) -> None:
        """Accept requests from now on.

        Args:
            early: signals that arrived before the event loop ran.
        """
        loop = asyncio.get_running_loop()
        for number in processes.handled_signals(preemptible=self._node.options.warning is not None):
            loop.add_signal_handler(number, self._on_signal, number)
        for number in early:
            self._on_signal(number)
        if self._node.options.lifeline:
            try:
                loop.add_reader(0, self._on_lifeline)
            except PermissionError:  # epoll refuses a file or /dev/null, which counts as ended
                self._on_lifeline()
        options, attempt = self._node.options, self._node.identity.attempt
        if options.warning is not None and ends.warning_file(self._job_dir, attempt).exists():
            why = f"a warning on {this_node.node_name()}, while the job was starting"
            self._report.ask(warning=why[:300])

    async def poll_job_dir(self) -> None:
        """Check every 2 s for the file that cancels the job: a signal may not reach this node."""
        loop, found = asyncio.get_running_loop(), ends.cancelled(self._job_dir)
        while not found:
            await asyncio.sleep(ends.REQUEST_SECONDS)
            found = await loop.run_in_executor(files.disk, ends.cancelled, self._job_dir)
        if not self.cancelled.done() and ends.interrupted(self._job_dir):
            self._interrupted_at = time.monotonic()
        self._cancel("cancelled")

    def _on_signal(self, number: int) -> None:
        moment = time.monotonic()
        if number == signal.SIGINT and math.isinf(self._interrupted_at):
            reader = processes.terminal_reader(os.getpid())
            if reader is not None:  # rank 0 reads from the terminal, so Ctrl-C is for its prompt
                processes.send_signal(reader, signal.SIGINT)
                return
        why = f"{processes.signal_name(number)} on {this_node.node_name()}"
        terminated = number == signal.SIGTERM and not ends.cancelled(self._job_dir)
        if self._node.options.warning is not None and (terminated or number == signal.SIGUSR1):
            self._report.ask(warning=why[:300])
            return
        if moment > self._interrupted_at + _ONE_KEYSTROKE:
            self._report.ask(kill=True)
        if number == signal.SIGINT and not self.cancelled.done():
            self._interrupted_at = moment
        self._cancel(why, terminated=terminated)

    def _cancel(self, why: str, *, terminated: bool = False) -> None:
        if not self.cancelled.done():
            why = "cancelled" if ends.cancelled(self._job_dir) else why
            self.cancelled.set_result(why)
            self._report.ask(
                cancel=why[:300],
                interrupt=math.isfinite(self._interrupted_at),
                terminated=terminated,
                stacks=ends.stacks_wanted(self._job_dir) or terminated,
            )

    def _on_lifeline(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        if not ends.detached(self._job_dir):
            self._cancel("the command that ran the job is gone")
