"""The agent's side of notifications: start the sender, report events to it, wait for it.

The node with the coordinator notifies: node 0 at first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.notifications import FAILURE, REQUEUE, START, events
from clusterjob.node.notifications.events import Event
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

# Seconds that a job's last process waits for the last notifications. Nobody waits long for the
# notification of a job that was just cancelled.
_LAST_SENDS = {JobState.CANCELLED: 3.0}
_LAST_SEND = 10.0
_MAX_RESTARTS = 10  # maximum restarts that an attempt notifies about
# Not with -m: that would import a file of the working directory with the name of a module.
_SENDER = (
    "import sys; sys.path = list(filter(None, sys.path));"
    " from clusterjob.node.notifications.sender import main; main()"
)


class Notifier:
    """Send notifications through a child process; no call blocks.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS, as `core.notifications` writes it.
        job_id: the job's id.
        job_dir: the job's directory, as this node sees it.
        attempt: the number of the job's attempt, from 0.
        node: this node's number.
        print_line: prints one line for the user.
        agent_parent: the pid of the process that starts the agent again; None without one.
        moves: whether another node goes on with a job that runs if this one is lost.
    """

    def __init__(
        self,
        settings: str,
        job_id: str,
        job_dir: Path,
        attempt: int,
        node: int,
        print_line: Callable[[str], None],
        agent_parent: int | None = None,
        *,
        moves: bool = False,
    ) -> None:
        self._settings: dict[str, Any] = json.loads(settings) | {
            "job_dir": str(job_dir),
            "agent_parent": agent_parent,
            "moves": moves,
        }
        self._job = {
            "job_id": job_id,
            "name": self._settings["name"],
            "cluster": self._settings["cluster"],
        }
        self._job_dir = job_dir
        self._attempt = attempt
        self._node = node
        self._print_line = print_line
        self._begun = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._early: list[dict[str, Any] | None] = []  # messages before the sender runs
        self._state = JobState.UNKNOWN
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, again: bool) -> int | None:
        """Start the sender, which imports apprise with the first event: when the workers start.

        Return its pid; None if it cannot be started.

        Args:
            again: whether the agent replaces one that was killed, or the coordinator of another
                node.
        """
        package = str(Path(__file__).parents[3])  # a directory, or the node zip
        paths = (package, os.environ.get("PYTHONPATH", ""))
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _SENDER,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        except OSError as error:
            self._print_line(f"notify: the sender cannot be started: {error.strerror}")
            return None
        reason = f"the agent of node {self._node} was killed"
        killed = Event(FAILURE, state=str(JobState.LOST), reason=reason, final=True, **self._job)
        self._write(self._settings | {"killed": asdict(killed), "started": again})
        self._tasks.append(asyncio.create_task(self._print_notices()))
        if self._attempt and not again and not ends.preempted_before(self._job_dir, self._attempt):
            state = f"QUEUED AGAIN, attempt {self._attempt} starts"
            self._send(Event(REQUEUE, state=state, **self._job))
        early, self._early = self._early, []
        for message in early:
            self._write(message)
        return self._process.pid

    def started(self, nnodes: int, world_size: int) -> None:
        """Report that the workers start."""
        text = f"{world_size} worker{'s' * (world_size > 1)} on {nnodes} node{'s' * (nnodes > 1)}"
        self._send(Event(START, state=str(JobState.RUNNING), reason=text, **self._job))

    def restarts(self, number: int, maximum: int, why: str, failure: Failure | None) -> None:
        """Report that the workers are started again after a failure."""
        if number > _MAX_RESTARTS:  # a job may restart a thousand times
            return
        self._send(
            Event(
                FAILURE,
                state=f"RESTARTING, restart {number} of {maximum}",
                reason=events.short(why),
                seconds=self._seconds(),
                **events.place_of(failure),
                **self._job,
            )
        )

    def ended(self, verdict: Verdict) -> None:
        """Report the verdict."""
        self._state = verdict.state
        self._send(events.of_verdict(verdict, seconds=self._seconds(), **self._job))
        self._close_stdin()

    def leave(self) -> None:
        """End without the verdict: another node reports it."""
        self._write(None)
        self._close_stdin()

    def _close_stdin(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    async def close(self, hurry: asyncio.Future[None]) -> None:
        """Wait until everything is sent, at most 10 s, or until `hurry` is done; end the sender."""
        if self._process is None:
            return
        ending = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {ending, hurry}
        timeout = _LAST_SENDS.get(self._state, _LAST_SEND)
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            self._print_line("notify: the last notification was not sent in time")
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        await asyncio.wait([ending, *self._tasks])

    def _seconds(self) -> float:
        return round(time.monotonic() - self._begun, 1)

    def _send(self, event: Event) -> None:
        self._write(asdict(event))

    def _write(self, message: dict[str, Any] | None) -> None:
        if self._process is None or self._process.stdin is None:
            self._early.append(message)
            return
        with contextlib.suppress(OSError, RuntimeError):  # the sender has ended
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _print_notices(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # a line that is too long
            while line := await self._process.stdout.readline():
                self._print_line(f"notify: {sanitize(line.decode(errors='replace').rstrip())}")
