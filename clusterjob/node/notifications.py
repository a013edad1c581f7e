"""Notifications of a job: a process sends each event to URLs of apprise and commands.

The agent of the node with the coordinator, node 0 at first, starts the processes (`Notifier`). A
place, or a shared disk with an array's directory, may hang: so each event has its own process. Its
stdin has one JSON object: the value of CLUSTERJOB_NOTIFICATIONS with ``job_dir`` and ``event``. Its
stdout has one line for each place that the event did not reach; no line contains a URL.

An event is a dict, as a command gets it:

- ``event``: one of `contract.NOTIFY_KINDS`
- ``job_id``, ``name``, ``cluster``: the job
- ``state``: the job's state, or RESTARTING
- ``reason``: one line; the first failure of a failed job
- ``exit_code``: the job's exit code; None before its end
- ``seconds``: seconds since node 0's agent started; None if unknown
- ``rank``: rank of the worker that failed first; None for another cause
- ``host``: host of that worker or node; may be empty
- ``final``: whether the attempt has ended
- ``title``, ``text``: the job, its state, the reason, its logs
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.node import contract
from clusterjob.node.environments import this_node
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import ELEMENTS, NOTIFIED
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import files, private_dirs, processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

if TYPE_CHECKING:
    import asyncio

Event = dict[str, Any]
START, END, FAILURE, REQUEUE = contract.NOTIFY_KINDS
_IN_ORDER = 5.0  # seconds for which an event waits until the one before is sent
_LAST_SEND = 10.0  # seconds that a job's last process waits until all events are sent
_NONE = '{"on": [], "name": "", "cluster": "", "elements": 0}'
_MAX_RESTARTS = 10  # maximum restarts that an attempt notifies about
_KINDS = {JobState.FAILED: FAILURE, JobState.LOST: FAILURE, JobState.PREEMPTED: REQUEUE}
# Not with -m: that would import a file of the working directory with the name of a module. The
# package is a directory, or the node zip.
_SENDER = (
    f"import sys; sys.path = [{str(Path(__file__).parents[2])!r}, *filter(None, sys.path)];"
    " from clusterjob.node.notifications import main; main()"
)
_PAUSES = (0.0, 1.0, 2.0, 4.0)  # seconds before each attempt
_REFUSED_TIMEOUT = 15  # seconds that node 0's script waits, which has no agent that ends this
_COMMAND_TIMEOUT = 30.0  # seconds
_MAX_ERROR = 1 << 12  # bytes that are read from the end of what the command wrote on stderr
_MAX_TEXT = 500  # characters of an error
_TYPES = {START: "info", END: "success", FAILURE: "failure", REQUEUE: "warning"}  # of apprise
# No redirects: a POST that follows one becomes a GET without the message. An older apprise lacks
# some of them.
_ASSET: dict[str, Any] = {"app_id": "clusterjob", "app_desc": "clusterjob", "http_redirects": False,
          "allow_templates": False}  # fmt: skip


def event_of(kind: str, job: Event, state: str, reason: str, **facts: Any) -> Event:
    """Return an event.

    Args:
        kind: its kind.
        job: has ``job_id``, ``name`` and ``cluster``.
        state: the job's state.
        reason: a text, which is shortened to a line.
        facts: the other keys; those that are missing are unknown.
    """
    unknown = {"exit_code": None, "seconds": None, "rank": None, "host": "", "final": False}
    event: Event = {name: job[name] for name in ("job_id", "name", "cluster")} | unknown | facts
    event |= {"event": kind, "state": state, "reason": short(reason)}
    job_id, code, seconds = event["job_id"], event["exit_code"], event["seconds"]
    who = f"{event['name']} ({job_id})" if event["name"] else job_id
    where = f" on {event['cluster']}" if event["cluster"] else ""
    tells_time = seconds is not None and (event["final"] or kind == FAILURE)
    first = (
        f"{who}{where}: {state}",
        f"exit code {code}" if code else "",
        f"after {timedelta(seconds=round(seconds))}" if tells_time else "",
    )
    lines = (", ".join(filter(None, first)), event["reason"], f"clusterjob logs {job_id}")
    return event | {"title": f"{job_id} {state}", "text": "\n".join(filter(None, lines))}


def wanted(event: Event, kinds: Sequence[str]) -> bool:
    """Return whether one of the kinds of --notify-on includes an event; ``end`` has failed ends."""
    failed_end = event["final"] and event["event"] == FAILURE
    return event["event"] in kinds or (failed_end and END in kinds)


def short(text: str) -> str:
    """Return one harmless line of at most 500 characters."""
    line = sanitize(" ".join(text.split()))
    return line if len(line) <= _MAX_TEXT else f"{line[: _MAX_TEXT - 3]}..."


def main() -> None:
    """Send the event of stdin."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the end of a cancelled job is sent too
    settings = json.load(sys.stdin)
    _send(settings, settings["event"])


def refused(exit_code: str, why: str) -> None:
    """Send the failure of node 0's script before its agent, such as that of a setup line."""
    text = (contract.read_secrets(os.environ) | os.environ).get(contract.NOTIFICATIONS)
    if not text:
        return
    host = this_node.node_name()
    job = {"job_id": os.environ[contract.JOB_ID], "job_dir": os.environ.get(contract.JOB_DIR, "")}
    settings = json.loads(text) | job
    event = event_of(
        FAILURE,
        settings,
        state=str(JobState.FAILED),
        reason=f"node 0 (host {host}): {why}",
        exit_code=int(exit_code) or 1,
        host=host,
        final=True,
    )
    _send(settings, event, timeout=_REFUSED_TIMEOUT)


def _send(settings: dict[str, Any], event: Event, timeout: int = 0) -> None:
    """Send an event, or the events of the array that it causes, to the places that want them.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS with ``job_dir``.
        event: the event.
        timeout: seconds for each place; 0 for no limit.
    """
    events, job_dir = [event], Path(settings["job_dir"])
    if settings["elements"] and job_dir.parent.name == ELEMENTS:
        try:
            events = events_of_array(event, job_dir, settings["elements"])
        except OSError as error:
            print(f"the array's directory cannot be written: {error.strerror}", flush=True)
    events = [each for each in events if wanted(each, settings["on"])]
    places = [(f"{url.partition(':')[0]}://", partial(_notify, url)) for url in settings["urls"]]
    places += [("--notify-cmd", partial(_run, command)) for command in settings["commands"]]
    # A slow place does not delay another one.
    pids = [
        processes.fork(partial(_deliver, *place, events, timeout)) for place in places if events
    ]
    for pid in pids:
        os.waitpid(pid, 0)


def _deliver(
    name: str, send: Callable[[Event], str], events: Sequence[Event], timeout: int
) -> None:
    """Send events to one place, again after an error, which `send` returns."""
    signal.alarm(timeout)
    for event in events:
        for pause in _PAUSES:
            time.sleep(pause)
            try:
                error = send(event)
            except Exception as problem:  # a bug in a plug-in; its text may contain the URL
                error = type(problem).__name__
            if not error:
                break
        else:
            print(short(f"{name}: not sent after {len(_PAUSES)} attempts: {error}"), flush=True)


def events_of_array(event: Event, job_dir: Path, elements: int) -> list[Event]:
    """Return the events of a whole array to send after an event of one element.

    The first element that starts, fails or is queued again sends that event. The last element that
    ends sends the end of the array. The elements share marks in the array's directory: files with
    the state of each element that has ended. An element that never starts leaves none.

    Args:
        event: the event of the element.
        job_dir: the element's directory, next to those of the other elements.
        elements: number of elements.

    Raises:
        OSError: the marks cannot be written.
    """
    marks = job_dir.parent.parent / NOTIFIED
    found: list[Event] = []
    private_dirs.make(marks)
    is_restart = event["event"] == FAILURE and not event["final"]  # of one element
    if event["event"] != END and not is_restart and _is_first(marks, event["event"]):
        # The reason and the hint name the element; the array has not ended.
        found.append(event | {"final": False})
    if not event["final"] or event["state"] == JobState.PREEMPTED:
        return found
    files.write_atomic(marks / job_dir.name, event["state"].encode())
    ended = list(marks.glob("[0-9]*"))
    if len(ended) >= elements and _is_first(marks, END):
        states = Counter(path.read_text() for path in ended)
        failed = sorted(states.keys() - {JobState.SUCCEEDED})
        counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        found.append(
            event_of(
                FAILURE if failed else END,
                event | {"job_id": event["job_id"].rpartition("_")[0]},
                state=failed[0] if failed else str(JobState.SUCCEEDED),
                reason=f"{len(ended)} elements: {counts}",
                final=True,
            )
        )
    return found


def _is_first(marks: Path, kind: str) -> bool:
    """Return whether this is the first element with this kind of event."""
    try:
        (marks / f"first.{kind}").touch(0o600, exist_ok=False)
    except FileExistsError:
        return False
    return True


def _notify(url: str, event: Event) -> str:
    """Send an event to a URL of apprise; return the error."""
    try:
        import apprise
    except ImportError:
        hint = "pip install apprise there, or use --notify-cmd"
        print(f"{sys.executable} has no apprise: {hint}", flush=True)
        return ""  # another attempt would fail too
    known = {name: value for name, value in _ASSET.items() if hasattr(apprise.AppriseAsset, name)}
    service = apprise.Apprise(asset=apprise.AppriseAsset(**known))
    if not service.add(url):
        return "apprise cannot read the URL"
    kind = "warning" if event["state"] == JobState.CANCELLED else _TYPES[event["event"]]
    sent = service.notify(
        title=event["title"],
        body=event["text"],
        notify_type=apprise.NotifyType(kind),
        body_format=apprise.NotifyFormat.TEXT,  # apprise escapes it for the service
    )
    return "" if sent else "refused, or no answer"  # apprise's own texts may contain the URL


def _run(command: str, event: Event) -> str:
    """Run a command with the facts as JSON on stdin and as variables; return the error."""
    variables = {
        f"CLUSTERJOB_NOTIFY_{name.upper()}": "" if value is None else str(value)
        for name, value in event.items()
    }
    # A process that it leaves behind may keep it open.
    with open(anonymous_file("notify-errors"), "r+b") as errors:
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | variables,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(event).encode(), _COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it did not end within {_COMMAND_TIMEOUT:g} s"
        errors.seek(max(0, errors.tell() - _MAX_ERROR))
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    error = f"exit code {process.returncode}{f': {last}' if last else ''}"
    return short(error) if process.returncode else ""


# -- in the agent ----------------------------------------------------------------------------------


class Notifier:
    """Send notifications through child processes; no call blocks.

    Args:
        settings: the value of CLUSTERJOB_NOTIFICATIONS, as `core.notifications` writes it; empty
            without --notify, and nothing is sent.
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
        self._settings: dict[str, Any] = json.loads(settings or _NONE)
        self._settings |= {"job_id": job_id, "job_dir": str(job_dir)}
        self._print_line = print_line
        self._begun = time.monotonic()
        self._sending: list[asyncio.Task[None]] = []

    def attempt_begins(self, attempt: int) -> None:
        """Report that the job runs again, unless the attempt before told that it was preempted."""
        before = ends.read_result(Path(self._settings["job_dir"]), attempt - 1) if attempt else None
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
        import asyncio  # not in the process that sends

        if self._sending:
            _, unsent = await asyncio.wait(self._sending, timeout=_LAST_SEND)
            if unsent:
                self._print_line("notify: the last notification was not sent in time")

    def _send(
        self, kind: str, state: str, reason: str = "", failure: Failure | None = None, **facts: Any
    ) -> None:
        import asyncio

        if failure is not None:
            facts |= {"rank": failure.rank, "host": short(failure.host)}
        seconds = round(time.monotonic() - self._begun, 1)
        event = event_of(kind, self._settings, state, reason, seconds=seconds, **facts)
        # The end of an element may be a failure of its array.
        if self._settings["elements"] or wanted(event, self._settings["on"]):
            self._sending.append(asyncio.create_task(self._run(event, self._sending[-1:])))

    async def _run(self, event: Event, before: list[asyncio.Task[None]]) -> None:
        """Run the process that sends an event; print its messages."""
        import asyncio

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
