"""Collect requests to cancel or preempt the job.

They arrive as signals, as the end of the lifeline, and as files in the job directory.

A scheduler that takes a job's nodes away sends SIGTERM too. In a job that may be preempted, SIGTERM
is therefore a warning, unless the job directory records that the job is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.environments import this_node
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.system import files, processes

# Seconds in which a second SIGINT belongs to the same Ctrl-C: a command between the terminal and
# this agent may forward it.
_ONE_KEYSTROKE = 0.5


class StopRequests:
    """The stop requests that reach one agent; it needs a running event loop.

    Args:
        options: whether there is a lifeline, and whether the job may be preempted.
        job_dir: the job's directory, as this node sees it.
        attempt: the number of the job's attempt, from 0.
        report: the state of this node, which tells the coordinator.

    Attributes:
        cancelled: done when the job must end; its result is the reason.
        interrupted: whether the reason is Ctrl-C; workers then get SIGINT instead of SIGTERM.
        kill_now: done at the second Ctrl-C: stop the workers without grace.
    """

    def __init__(
        self, options: LaunchOptions, job_dir: Path, attempt: int, report: StateReport
    ) -> None:
        loop = asyncio.get_running_loop()
        self.cancelled: asyncio.Future[str] = loop.create_future()
        self.kill_now: asyncio.Future[None] = loop.create_future()
        self.interrupted = self._terminated = False
        self._report = report
        self._interrupted_at = 0.0
        self._options = options
        self._job_dir = job_dir
        self._attempt = attempt

    def listen(self, early: Iterable[int]) -> None:
        """Accept requests from now on.

        Args:
            early: signals that arrived before the event loop ran.
        """
        loop = asyncio.get_running_loop()
        for number in processes.handled_signals(preemptible=self._options.warning is not None):
            loop.add_signal_handler(number, self._on_signal, number)
        for number in early:
            self._on_signal(number)
        if self._options.lifeline:
            try:
                loop.add_reader(0, self._on_lifeline)
            except PermissionError:  # epoll refuses a file or /dev/null, which counts as ended
                self._on_lifeline()
        if self._options.warning is not None and ends.warned(self._job_dir, self._attempt):
            self._warn(f"a warning on {this_node.node_name()}, while the job was starting")

    def poll_job_dir(self) -> None:
        """Check every 2 s for the file that cancels the job: a signal may not reach this node."""
        self._on_poll(cancelled=ends.cancelled(self._job_dir))

    def _on_poll(self, *, cancelled: bool) -> None:
        if cancelled:
            if not self.cancelled.done() and ends.interrupted(self._job_dir):
                self.interrupted, self._interrupted_at = True, time.monotonic()
            self._cancel("cancelled")
        else:
            asyncio.get_running_loop().call_later(ends.REQUEST_SECONDS, self._poll_again)

    def _poll_again(self) -> None:
        loop = asyncio.get_running_loop()
        found = loop.run_in_executor(files.disk, ends.cancelled, self._job_dir)
        found.add_done_callback(
            lambda done: None if done.cancelled() else self._on_poll(cancelled=done.result())
        )

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and not self.interrupted:
            reader = processes.terminal_reader(os.getpid())
            if reader is not None:  # rank 0 reads from the terminal, so Ctrl-C is for its prompt
                processes.send_signal(reader, signal.SIGINT)
                return
        why = f"{processes.signal_name(number)} on {this_node.node_name()}"
        if self._options.warning is not None and (
            number == signal.SIGUSR1
            or (number == signal.SIGTERM and not ends.cancelled(self._job_dir))
        ):
            self._warn(why)
            return
        second = self.interrupted and time.monotonic() > self._interrupted_at + _ONE_KEYSTROKE
        if second:
            if not self.kill_now.done():
                self.kill_now.set_result(None)
            self._report.ask(kill=True)
        if number == signal.SIGINT and not self.cancelled.done():
            self.interrupted, self._interrupted_at = True, time.monotonic()
        self._terminated |= number == signal.SIGTERM and not ends.cancelled(self._job_dir)
        self._cancel(why)

    def _warn(self, why: str) -> None:
        if not self._report.state.request.warning:
            self._report.ask(warning=why[:300])

    def _cancel(self, why: str) -> None:
        if not self.cancelled.done():
            why = "cancelled" if ends.cancelled(self._job_dir) else why
            self.cancelled.set_result(why)
            self._report.ask(
                cancel=why[:300],
                interrupt=self.interrupted,
                terminated=self._terminated,
                stacks=ends.stacks_wanted(self._job_dir) or self._terminated,
            )

    def _on_lifeline(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        if not ends.detached(self._job_dir):
            self._cancel("the command that ran the job is gone")
