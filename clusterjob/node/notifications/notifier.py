"""Notifications in the agent: start a process for each event, and wait for the last ones.

The node with the coordinator notifies: node 0 at first.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.notifications import END, FAILURE, REQUEUE, START
from clusterjob.node.notifications.sender import Event, event_of, short, wanted
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

_IN_ORDER = 5.0  # seconds for which an event waits until the one before is sent
_LAST_SEND = 10.0  # seconds that a job's last process waits until all events are sent
_MAX_RESTARTS = 10  # maximum restarts that an attempt notifies about
_KINDS = {JobState.FAILED: FAILURE, JobState.LOST: FAILURE, JobState.PREEMPTED: REQUEUE}
# Not with -m: that would import a file of the working directory with the name of a module. The
# package is a directory, or the node zip.
_SENDER = (
    f"import sys; sys.path = [{str(Path(__file__).parents[3])!r}, *filter(None, sys.path)];"
    " from clusterjob.node.notifications.sender import main; main()"
)


class Notifier:
    """Send notifications through child processes; no call blocks.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS, as `core.notifications` writes it.
        job_id: the job's id.
        job_dir: the job's directory, as this node sees it.
        print_line: prints one line for the user.

    Attributes:
        pids: the processes that send now; they outlive the workers.
    """

    def __init__(
        self, settings: str, job_id: str, job_dir: Path, print_line: Callable[[str], None]
    ) -> None:
        self.pids: set[int] = set()
        self._settings: dict[str, Any] = json.loads(settings)
        self._settings |= {"job_id": job_id, "job_dir": str(job_dir)}
        self._job_dir = job_dir
        self._print_line = print_line
        self._begun = time.monotonic()
        self._sending: list[asyncio.Task[None]] = []

    def attempt_begins(self, attempt: int) -> None:
        """Report that the job runs again, unless the attempt before told that it was preempted."""
        before = ends.read_result(self._job_dir, attempt - 1) if attempt else None
        if attempt and not (before is not None and before.state is JobState.PREEMPTED):
            self._send(REQUEUE, state=f"QUEUED AGAIN, attempt {attempt} starts")

    def started(self, nnodes: int, world_size: int) -> None:
        """Report that the workers start."""
        text = f"{world_size} worker{'s' * (world_size > 1)} on {nnodes} node{'s' * (nnodes > 1)}"
        self._send(START, state=str(JobState.RUNNING), reason=text)

    def restarts(self, number: int, maximum: int, why: str, failure: Failure | None) -> None:
        """Report that the workers are started again after a failure."""
        if number <= _MAX_RESTARTS:  # a job may restart a thousand times
            state = f"RESTARTING, restart {number} of {maximum}"
            self._send(FAILURE, state=state, reason=why, failure=failure)

    def ended(self, verdict: Verdict) -> None:
        """Report the verdict."""
        self._send(
            _KINDS.get(verdict.state, END),
            state=str(verdict.state),
            reason=verdict.reason,
            failure=verdict.failure,
            exit_code=verdict.exit_code,
            final=True,
        )

    async def close(self) -> None:
        """Wait until everything is sent, at most 10 s."""
        sending = self._sending
        _, unsent = await asyncio.wait(sending, timeout=_LAST_SEND) if sending else ((), ())
        if unsent:
            self._print_line("notify: the last notification was not sent in time")

    def _send(
        self, kind: str, state: str, reason: str = "", failure: Failure | None = None, **facts: Any
    ) -> None:
        if failure is not None:
            facts |= {"rank": failure.rank, "host": short(failure.host)}
        seconds = round(time.monotonic() - self._begun, 1)
        event = event_of(kind, self._settings, state, reason, seconds=seconds, **facts)
        # The end of an element may be a failure of its array.
        if self._settings["elements"] or wanted(event, self._settings["on"]):
            self._sending.append(asyncio.create_task(self._run(event, self._sending[-1:])))

    async def _run(self, event: Event, before: list[asyncio.Task[None]]) -> None:
        """Run the process that sends an event; print its messages."""
        if before:
            await asyncio.wait(before, timeout=_IN_ORDER)
        # Not asyncio's: the pid must be known before this agent kills all other processes.
        process = subprocess.Popen(
            [sys.executable, "-c", _SENDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # the forkserver kills the group of a killed agent
        )
        self.pids.add(process.pid)
        data = json.dumps(self._settings | {"event": event}).encode()
        output, _ = await asyncio.to_thread(process.communicate, data)
        self.pids.remove(process.pid)
        for line in output.decode(errors="replace").splitlines():
            self._print_line(f"notify: {sanitize(line)}")
