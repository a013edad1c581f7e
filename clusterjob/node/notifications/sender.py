"""Send one event of a job to all its places: URLs of apprise, and commands of the user.

A process of its own, because a place, or a shared disk with an array's directory, may hang. Its
stdin has one JSON object: the value of CLUSTERJOB_NOTIFICATIONS with ``job_dir`` and ``event``. Its
stdout has one line for each place that the event did not reach; no line contains a URL.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.environments import this_node
from clusterjob.node.logs.job_dir import ELEMENTS, NOTIFIED
from clusterjob.node.notifications import ARRAY_TASKS, END, FAILURE, REQUEUE, START
from clusterjob.node.system import private_dirs
from clusterjob.node.system.processes import StderrTail
from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

_PAUSES = (1.0, 2.0, 4.0)  # seconds between two attempts
_LAST_ATTEMPT = 15.0  # seconds after which no attempt begins
_REFUSED_TIMEOUT = 15  # seconds that node 0's script waits, which has no agent that ends this
_COMMAND_TIMEOUT = 30.0  # seconds
_MAX_TEXT = 500  # characters of an error
_TYPES = {START: "info", END: "success", FAILURE: "failure", REQUEUE: "warning"}  # of apprise
# No redirects: a POST that follows one becomes a GET without the message.
_ASSET: dict[str, Any] = {
    "http_redirects": False,
    "allow_templates": False,
    "storage_mode": "memory",
    "service_timeout": 10.0,
}
_HTTP_ERROR = re.compile(r"error=([1-5][0-9]{2})\b")
_MARK = re.compile(r"([0-9]{1,10})\.([A-Z]{1,20})", re.ASCII)


@dataclass(frozen=True)
class Event:
    """One event of a job.

    Attributes:
        event: one of `clusterjob.node.notifications.KINDS`.
        job_id, name, cluster: the job.
        state: the job's state, or RESTARTING.
        reason: one line; the first failure of a failed job.
        exit_code: the job's exit code; None before its end.
        seconds: seconds since node 0's agent started; None if unknown.
        rank: rank of the worker that failed first; None for another cause.
        host: host of that worker or node; may be empty.
        final: whether the attempt has ended.
    """

    event: str
    job_id: str
    name: str = ""
    cluster: str = ""
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    seconds: float | None = None
    rank: int | None = None
    host: str = ""
    final: bool = False

    def wanted(self, kinds: Sequence[str]) -> bool:
        """Return whether one of the kinds of --notify-on includes the event.

        ``end`` includes a failed end.
        """
        return self.event in kinds or (self.final and self.event == FAILURE and END in kinds)

    def facts(self) -> dict[str, Any]:
        """Return the facts, ``title`` and ``text``: the job, its state, the reason, its logs."""
        job = f"{self.name} ({self.job_id})" if self.name else self.job_id
        first = f"{job}{f' on {self.cluster}' if self.cluster else ''}: {self.state}"
        if self.exit_code:
            first += f", exit code {self.exit_code}"
        if self.seconds is not None and (self.final or self.event == FAILURE):
            first += f", after {timedelta(seconds=round(self.seconds))}"
        lines = [first, *([self.reason] if self.reason else []), f"clusterjob logs {self.job_id}"]
        title = f"{self.job_id} {self.state}"
        return asdict(self) | {"title": title, "text": "\n".join(lines)}


def short(text: str) -> str:
    """Return one harmless line of at most 500 characters."""
    line = sanitize(" ".join(text.split()))
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 3]}..."


def main() -> None:
    """Send the event of stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the end of a cancelled job is sent too
    settings = json.load(sys.stdin)
    _send(settings, Event(**settings["event"]))


def refused(exit_code: str, why: str) -> None:
    """Send the failure of node 0's script before its agent, such as that of a setup line."""
    text = os.environ.get(contract.NOTIFICATIONS) or contract.read_secrets(os.environ).get(
        contract.NOTIFICATIONS
    )
    if not text:
        return
    settings = json.loads(text)
    event = Event(
        FAILURE,
        os.environ[contract.JOB_ID],
        name=settings["name"],
        cluster=settings["cluster"],
        state=str(JobState.FAILED),
        exit_code=int(exit_code) or 1,
        reason=short(f"node 0 (host {this_node.node_name()}): {why}"),
        host=this_node.node_name(),
        final=True,
    )
    settings |= {"job_dir": os.environ.get(contract.JOB_DIR, "")}
    _send(settings, event, timeout=_REFUSED_TIMEOUT)


def _send(settings: dict[str, Any], event: Event, timeout: int = 0) -> None:
    """Send an event, or the events of the array that it causes, to the places that want them.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS with ``job_dir``.
        event: the event.
        timeout: seconds for each place; 0 for no limit.
    """
    events, job_dir = [event], Path(settings["job_dir"])
    is_element = job_dir.parent.name == ELEMENTS and job_dir.name.isdecimal()
    if settings["elements"] and ARRAY_TASKS not in settings["on"] and is_element:
        try:
            events = events_of_array(event, job_dir, settings["elements"])
        except OSError as error:
            _say(f"the array's directory cannot be written: {error.strerror}")
    wanted = [each for each in events if each.wanted(settings["on"])]
    places = [(f"{url.partition(':')[0]}://", partial(_notify, url)) for url in settings["urls"]]
    places += [("--notify-cmd", partial(_run, command)) for command in settings["commands"]]
    for name, send in places if wanted else ():
        if os.fork() == 0:  # a slow place does not delay another one
            signal.alarm(timeout)
            _deliver(name, send, wanted)
            return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _deliver(name: str, send: Callable[[Event], str], events: Sequence[Event]) -> None:
    """Send events to one place, again after an error, which `send` returns."""
    begin = time.monotonic()
    for event in events:
        for attempts, pause in enumerate((*_PAUSES, None), 1):
            try:
                error = send(event)
            except Exception as problem:  # a bug in a plug-in; its text may contain the URL
                error = type(problem).__name__
            if not error:
                break
            if pause is None or time.monotonic() - begin > _LAST_ATTEMPT:
                _say(f"{name}: not sent after {attempts} attempts: {error}")
                break
            time.sleep(pause)


def _say(text: str) -> None:
    line = f"{sanitize(' '.join(text.split()))}\n".encode()
    with contextlib.suppress(OSError):  # the agent is gone
        os.write(1, line)  # one write: several processes call this


# -- an array --------------------------------------------------------------------------------------


def events_of_array(event: Event, job_dir: Path, elements: int) -> list[Event]:
    """Return the events of a whole array to send after an event of one element.

    The first element that starts, fails or is queued again sends that event. The last element that
    ends sends the end of the array. The elements share marks in the array's directory; an element
    that never starts leaves none.

    Args:
        event: the event of the element.
        job_dir: the element's directory, next to those of the other elements.
        elements: number of elements.

    Raises:
        OSError: the marks cannot be written.
    """
    if event.event == FAILURE and not event.final:
        return []  # a restart of one element
    index, marks = job_dir.name, job_dir.parent.parent / NOTIFIED
    private_dirs.make(marks)
    found = []
    if event.event != END and _is_first(marks, event.event):
        # The reason and the hint name the element; the array has not ended.
        found.append(replace(event, final=False))
    if not event.final:
        return found
    for older in marks.glob(f"{index}.*"):  # of an earlier attempt
        older.unlink(missing_ok=True)
    if event.state != JobState.PREEMPTED:
        (marks / f"{index}.{event.state}").touch(0o600)
    ended = [mark for name in os.listdir(marks) if (mark := _MARK.fullmatch(name))]
    if len(ended) >= elements and _is_first(marks, END):
        states = {int(mark[1]): mark[2] for mark in ended}
        found.append(_end_of_array(event, event.job_id.removesuffix(f"_{index}"), states))
    return found


def _is_first(marks: Path, kind: str) -> bool:
    """Return whether this is the first element with this kind of event."""
    try:
        (marks / f"first.{kind}").touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def _end_of_array(event: Event, array_id: str, states: dict[int, str]) -> Event:
    texts = []
    for state in sorted(set(states.values())):
        indices = sorted(index for index, each in states.items() if each == state)
        named = "" if state == JobState.SUCCEEDED else f" ({', '.join(ranges(indices))})"
        texts.append(f"{len(indices)} {state}{named}")
    failed = sorted(set(states.values()) - {JobState.SUCCEEDED})
    return Event(
        FAILURE if failed else END,
        array_id,
        name=event.name,
        cluster=event.cluster,
        state=failed[0] if failed else str(JobState.SUCCEEDED),
        reason=short(f"{len(states)} elements: {'; '.join(texts)}"),
        final=True,
    )


# -- the places ------------------------------------------------------------------------------------


def _notify(url: str, event: Event) -> str:
    """Send an event to a URL of apprise; return the error."""
    try:
        import apprise
    except ImportError:
        _say(f"{sys.executable} has no apprise: pip install apprise there, or use --notify-cmd")
        return ""  # another attempt would fail too
    names: dict[str, Any] = {"app_id": "clusterjob", "app_desc": "clusterjob"}
    try:
        asset = apprise.AppriseAsset(**names, **_ASSET)
    except (AttributeError, TypeError):  # an older apprise lacks some of them
        asset = apprise.AppriseAsset(**names)
    plugin = apprise.Apprise.instantiate(url, asset=asset)
    if plugin is None:
        return "apprise cannot read the URL"
    # apprise tells the HTTP code in its log only, whose texts may contain the URL.
    log = io.StringIO()
    logging.getLogger("apprise").propagate = False
    logging.getLogger("apprise").addHandler(logging.StreamHandler(log))
    facts = event.facts()
    service = apprise.Apprise(asset=asset)
    service.add(plugin)
    kind = "warning" if event.state == JobState.CANCELLED else _TYPES[event.event]
    sent = service.notify(
        title=facts["title"],
        body=facts["text"],
        notify_type=apprise.NotifyType(kind),
        body_format=apprise.NotifyFormat.TEXT,  # apprise escapes it for the service
    )
    codes = _HTTP_ERROR.findall(log.getvalue())
    error = f"HTTP {codes[-1]}" if codes else "refused, or no answer"
    return "" if sent else error


def _run(command: str, event: Event) -> str:
    """Run a command with the facts as JSON on stdin and as variables; return the error."""
    facts = event.facts()
    variables = {
        f"CLUSTERJOB_NOTIFY_{name.upper()}": "" if value is None else str(value)
        for name, value in facts.items()
    }
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | variables,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    errors = StderrTail(process.stderr)
    with contextlib.suppress(OSError), process.stdin:  # it need not read the facts
        process.stdin.write(json.dumps(facts).encode())
    try:
        code = process.wait(_COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it did not end within {_COMMAND_TIMEOUT:g} s"
    last = errors.last_line(0.5)
    return short(f"exit code {code}{f': {last}' if last else ''}") if code else ""
