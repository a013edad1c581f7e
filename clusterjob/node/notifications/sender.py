"""The child process of node 0's agent that sends notifications, with retries and limits.

Its stdin has one line with the settings, then one line per event. Its stdout has one line per
message for the job's log; no line contains a URL.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.node.logs import ends
from clusterjob.node.notifications import ARRAY_TASKS, END, FAILURE, targets
from clusterjob.node.notifications.array import WholeArray
from clusterjob.node.notifications.events import Event, short
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

_PAUSES = (1.0, 2.0, 4.0)  # seconds between two attempts
_LAST_SEND = 15.0  # seconds for the last notification if no agent waits for this process
_Send = Callable[[Event], str]


class _Target:
    """One place to send to, with its own thread: a slow place does not delay another."""

    def __init__(self, name: str, send: _Send) -> None:
        self._name = name
        self._send = send
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, event: Event | None) -> None:
        """Send an event; None ends the thread."""
        self._events.put(event)

    def join(self, timeout: float) -> None:
        """Wait until everything is sent."""
        self._thread.join(max(0.0, timeout))

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
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


def main() -> None:
    """Send the events of stdin until it ends, then exit."""
    os.setpgid(0, 0)  # the forkserver kills the process group of an agent that was killed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the end of a cancelled job is sent too
    settings = json.loads(sys.stdin.buffer.readline() or b"null")
    if settings is None:
        return
    everywhere = [_Target(name, send) for name, send in _places(settings)]
    merge = _merger(settings)
    ended = False
    for line in sys.stdin.buffer:
        event = Event(**json.loads(line))
        ended = ended or event.final
        _put(everywhere, merge(event), settings["on"])
    if not ended:
        _put(everywhere, merge(_killed(settings)), settings["on"])
    _finish(everywhere)


def refused(exit_code: str, why: str) -> None:
    """Send the failure of node 0's script before its agent, such as that of a setup line."""
    text = os.environ.get(contract.NOTIFICATIONS) or contract.read_secrets(os.environ).get(
        contract.NOTIFICATIONS
    )
    if not text:
        return
    settings = json.loads(text) | {"job_dir": os.environ.get(contract.JOB_DIR, "")}
    event = Event(
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
    everywhere = [_Target(name, send) for name, send in _places(settings)]
    _put(everywhere, _merger(settings)(event), settings["on"])
    _finish(everywhere)


def _finish(everywhere: list[_Target]) -> None:
    """Wait a limited time until everything is sent, and exit."""
    deadline = time.monotonic() + _LAST_SEND
    for target in everywhere:
        target.put(None)
    for target in everywhere:
        target.join(deadline - time.monotonic())
    os._exit(0)  # a thread may still wait for an answer


def _killed(settings: dict[str, Any]) -> Event:
    """Return the end of a job whose agent was killed."""
    event = Event(**settings["killed"])
    if ends.cancelled(Path(settings["job_dir"])):
        return replace(event, event=END, state=str(JobState.CANCELLED))
    return event


def _places(settings: dict[str, Any]) -> list[tuple[str, _Send]]:
    """Return the name of each place and the function that sends to it."""
    found: list[tuple[str, _Send]] = []
    urls = settings.get("urls", [])
    if urls:
        try:
            found += [targets.of_url(url) for url in urls]
        except ImportError:
            _say(
                f"--notify sends nothing: {sys.executable} has no apprise:"
                " pip install apprise there, or use --notify-cmd"
            )
        except ValueError as error:
            _say(f"--notify sends nothing: {error}")
    return found + [targets.of_command(command) for command in settings.get("commands", [])]


def _merger(settings: dict[str, Any]) -> Callable[[Event], list[Event]]:
    """Return the function that turns an event of this job into the events to send."""
    job_dir, elements = Path(settings["job_dir"]), settings.get("elements", 0)
    if not elements or ARRAY_TASKS in settings["on"] or not WholeArray.has(job_dir):
        return lambda event: [event]
    array = WholeArray(job_dir, elements)

    def merge(event: Event) -> list[Event]:
        try:
            return array.merge(event)
        except OSError as error:
            _say(f"the array's directory cannot be written: {error.strerror}")
            return [event]

    return merge


def _put(everywhere: list[_Target], found: list[Event], kinds: list[str]) -> None:
    for event in found:
        if event.wanted(kinds):
            for target in everywhere:
                target.put(event)


def _say(text: str) -> None:
    try:
        os.write(
            1, f"{sanitize(' '.join(text.split()))}\n".encode()
        )  # one write: several threads call it
    except OSError:
        pass  # the agent is gone
