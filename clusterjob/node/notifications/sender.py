"""The child process of an agent that sends notifications, with retries and limits.

Its stdin has one line with the settings, then one line per event, or ``null`` at the end if another
node reports the verdict. Its stdout has one line per message for the job's log; no line contains a
URL.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.node.logs import ends
from clusterjob.node.notifications import ARRAY_TASKS, END, FAILURE, START, targets
from clusterjob.node.notifications.array import WholeArray
from clusterjob.node.notifications.events import Event, short
from clusterjob.node.system import processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

_PAUSES = (1.0, 2.0, 4.0)  # seconds between two attempts
_LAST_SEND = 15.0  # seconds for the last notification if no agent waits for this process
_AGAIN = threading.Event()  # another agent has started another sender


class _Target:
    """One place to send to, with its own thread: a slow place does not delay another."""

    def __init__(self, name: str, send: targets.Send) -> None:
        self._name = name
        self._send = send
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None ends the thread
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (event := self.events.get()) is not None:
            for pause in (*_PAUSES, None):
                try:
                    error = self._send(event)
                except Exception as problem:  # a bug in a plug-in; its text may contain the URL
                    error = type(problem).__name__
                if not error:
                    break
                if pause is not None:
                    time.sleep(pause)
            else:
                attempts = len(_PAUSES) + 1
                _say(f"{self._name}: not sent after {attempts} attempts: {error}")


class _Sender:
    """Sends the events of a job to all places.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS, and the job's directory as ``job_dir``.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._kinds = settings["on"]
        self._targets = [_Target(name, send) for name, send in _places(settings)]
        self._array: WholeArray | None = None
        job_dir, elements = Path(settings["job_dir"]), settings["elements"]
        if elements and ARRAY_TASKS not in self._kinds and WholeArray.has(job_dir):
            self._array = WholeArray(job_dir, elements)

    def send(self, event: Event) -> None:
        """Send an event, or the events of the array that it causes, to those who want them."""
        found = [event]
        if self._array is not None:
            try:
                found = self._array.merge(event)
            except OSError as error:
                _say(f"the array's directory cannot be written: {error.strerror}")
        for each in found:
            if each.wanted(self._kinds):
                for target in self._targets:
                    target.events.put(each)

    def finish(self) -> NoReturn:
        """Wait a limited time until everything is sent, and exit."""
        deadline = time.monotonic() + _LAST_SEND
        for target in self._targets:
            target.events.put(None)
        for target in self._targets:
            target.thread.join(max(0.0, deadline - time.monotonic()))
        os._exit(0)  # a thread may still wait for an answer


def main() -> None:
    """Send the events of stdin until it ends, then exit."""
    os.setpgid(0, 0)  # the forkserver kills the process group of an agent that was killed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the end of a cancelled job is sent too
    line = sys.stdin.buffer.readline()
    if not line:  # the agent has ended
        return
    settings = json.loads(line)
    signal.signal(signal.SIGUSR2, lambda *_: _AGAIN.set())
    first = sys.stdin.buffer.readline()  # apprise is imported only now, when the workers start
    sender = _Sender(settings)
    ended, started = False, settings["started"]
    for line in filter(None, itertools.chain([first], sys.stdin.buffer)):
        fields = json.loads(line)
        if fields is None:
            ended = True
            break
        event = Event(**fields)
        ended = ended or event.final
        started = started or event.event == START
        sender.send(event)
    if not ended and not _goes_on(settings["agent_parent"]):
        killed = _killed(settings)
        if killed.event == END or not (started and settings["moves"]):
            sender.send(killed)
    sender.finish()


def refused(exit_code: str, why: str) -> None:
    """Send the failure of node 0's script before its agent, such as that of a setup line."""
    text = os.environ.get(contract.NOTIFICATIONS) or contract.read_secrets(os.environ).get(
        contract.NOTIFICATIONS
    )
    if not text:
        return
    settings = json.loads(text)
    sender = _Sender(settings | {"job_dir": os.environ.get(contract.JOB_DIR, "")})
    sender.send(
        Event(
            FAILURE,
            os.environ[contract.JOB_ID],
            name=settings["name"],
            cluster=settings["cluster"],
            state=str(JobState.FAILED),
            exit_code=int(exit_code) or 1,
            reason=short(f"node 0 (host {scheduler.node_name()}): {why}"),
            host=scheduler.node_name(),
            final=True,
        )
    )
    sender.finish()


def _goes_on(agent_parent: int | None) -> bool:
    """Return whether the killed agent is started again: its parent then sends SIGUSR2."""
    deadline = time.monotonic() + _LAST_SEND
    while agent_parent is not None and time.monotonic() < deadline and not _AGAIN.is_set():
        if processes.start_ticks(agent_parent) is None:
            break
        time.sleep(0.05)
    return _AGAIN.is_set()


def _killed(settings: dict[str, Any]) -> Event:
    """Return the end of a job whose agent was killed."""
    event = Event(**settings["killed"])
    if ends.cancelled(Path(settings["job_dir"])):
        return replace(event, event=END, state=str(JobState.CANCELLED))
    return event


def _places(settings: dict[str, Any]) -> list[tuple[str, targets.Send]]:
    """Return the name of each place and the function that sends to it."""
    found: list[tuple[str, targets.Send]] = []
    try:
        found += [targets.of_url(url) for url in settings["urls"]]
    except ImportError:
        _say(
            f"--notify sends nothing: {sys.executable} has no apprise:"
            " pip install apprise there, or use --notify-cmd"
        )
    except ValueError as error:
        _say(f"--notify sends nothing: {error}")
    return found + [targets.of_command(command) for command in settings["commands"]]


def _say(text: str) -> None:
    line = f"{sanitize(' '.join(text.split()))}\n".encode()
    with contextlib.suppress(OSError):  # the agent is gone
        os.write(1, line)  # one write: several threads call this
