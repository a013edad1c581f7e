"""What others want of an agent: that the job end, or that its workers know of an end which is near.

Signals, the lifeline and files in the job's directory all come down to these two. SIGTERM is the
one with two meanings: a scheduler that takes a job's nodes away sends it too. In a job that may be
preempted it is a warning, unless somebody has noted that the job is cancelled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.system import network, processes, signals

# Seconds in which a second signal is the same Ctrl-C, from a command between the terminal and this
# agent.
_ONE_KEYSTROKE = 0.5
_PAUSE = 2.0  # seconds between two looks at the job's directory


class Wishes:
    """The wishes that reach one agent. Made, and listened to, in a running event loop.

    Args:
        options: whether there is a lifeline, and whether the job may be preempted.
        job_dir: the job's directory as this node sees it.
        attempt: which start of the job this is.

    Attributes:
        cancelled: done once the job is to end; its result says why.
        interrupted: whether it is to end by Ctrl-C: the workers get SIGINT in the place of SIGTERM.
        at_once: done once somebody who has interrupted the job does not wait for the workers any
            longer.
        warned: done once the end is near; its result says who warned.
    """

    def __init__(self, options: LaunchOptions, job_dir: Path, attempt: int) -> None:
        loop = asyncio.get_running_loop()
        self.cancelled: asyncio.Future[str] = loop.create_future()
        self.warned: asyncio.Future[str] = loop.create_future()
        self.at_once: asyncio.Future[None] = loop.create_future()
        self.interrupted = False
        self._interrupted_at = 0.0
        self._options = options
        self._job_dir = job_dir
        self._attempt = attempt

    def listen(self, early: Iterable[int]) -> None:
        """Take wishes from now on.

        Args:
            early: signals that came before there was an event loop.
        """
        loop = asyncio.get_running_loop()
        for number in signals.heeded(preemptible=self._options.warning is not None):
            loop.add_signal_handler(number, self._interrupted, number)
        for early_number in early:
            self._interrupted(early_number)
        if self._options.lifeline:
            self._hold_lifeline()
        if self._options.warning is not None and ends.warned(self._job_dir, self._attempt):
            self._warn(f"a warning on {network.own_name()}, while the job was starting")

    def watch(self) -> None:
        """Look every 2 s for the file that asks to cancel the job: its directory may be reached
        where no signal is.
        """
        if ends.cancelled(self._job_dir):
            if not self.cancelled.done() and ends.interrupted(self._job_dir):
                self.interrupted, self._interrupted_at = True, time.monotonic()
            self._cancel("cancelled")
        else:
            asyncio.get_running_loop().call_later(_PAUSE, self.watch)

    def _interrupted(self, number: int) -> None:
        if (
            number == signal.SIGINT
            and not self.interrupted
            and (reader := processes.terminal_reader(os.getpid())) is not None
        ):
            processes.send_signal(
                reader, signal.SIGINT
            )  # rank 0 is at a prompt, which the terminal's Ctrl-C is for
            return
        why = f"{processes.signal_name(number)} on {network.own_name()}"
        wished = ends.cancelled(self._job_dir)
        if self._options.warning is not None and (
            number == signal.SIGUSR1 or (number == signal.SIGTERM and not wished)
        ):
            self._warn(why)
            return
        if (
            self.interrupted
            and not self.at_once.done()
            and time.monotonic() > self._interrupted_at + _ONE_KEYSTROKE
        ):
            self.at_once.set_result(None)
        if number == signal.SIGINT and not self.cancelled.done():
            self.interrupted, self._interrupted_at = True, time.monotonic()
        self._cancel("cancelled" if wished else why)

    def _warn(self, why: str) -> None:
        if not self.warned.done():
            self.warned.set_result(why)

    def _cancel(self, why: str) -> None:
        if not self.cancelled.done():
            self.cancelled.set_result(why)

    def _hold_lifeline(self) -> None:
        try:
            asyncio.get_running_loop().add_reader(0, self._hear_lifeline)
        except (
            PermissionError
        ):  # epoll takes no plain file and no /dev/null: what such a stdin says is there already
            self._hear_lifeline()

    def _hear_lifeline(self) -> None:
        asyncio.get_running_loop().remove_reader(0)
        if not ends.detached(self._job_dir):
            self._cancel(
                "cancelled"
                if ends.cancelled(self._job_dir)
                else "the command that ran the job is gone"
            )
