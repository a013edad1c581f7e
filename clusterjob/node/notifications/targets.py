"""The places that notifications go to: URLs of apprise, and commands of the user."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable
from typing import Any

from clusterjob.node.notifications import END, FAILURE, REQUEUE, START
from clusterjob.node.notifications.events import Event, short
from clusterjob.node.system.processes import StderrTail
from clusterjob.node.verdict import JobState

_COMMAND_TIMEOUT = 30.0  # seconds
_TYPES = {START: "info", END: "success", FAILURE: "failure", REQUEUE: "warning"}
_HTTP_ERROR = re.compile(r"error=([1-5][0-9]{2})\b")
Send = Callable[[Event], str]  # returns the error; empty if the event was sent


def of_url(url: str) -> tuple[str, Send]:
    """Return the name of a URL's service and the function that sends to it.

    Raises:
        ImportError: apprise is not installed.
        ValueError: apprise cannot read the URL.
    """
    import apprise

    logger = logging.getLogger("apprise")
    logger.propagate = False
    plugin = apprise.Apprise.instantiate(url, asset=_asset(apprise))
    name = f"{url.partition(':')[0]}://"
    if plugin is None:
        raise ValueError(f"apprise cannot read the URL {name}***")
    last = _LastError(type(plugin).__module__.rpartition(".")[2])
    logger.addHandler(last)
    # apprise waits 5.5 s between two messages to most services: too long at a job's end.
    plugin.request_rate_per_sec = min(plugin.request_rate_per_sec, 1.0)
    service = apprise.Apprise(asset=plugin.asset)
    service.add(plugin)

    def send(event: Event) -> str:
        last.code = ""
        kind = "warning" if event.state == JobState.CANCELLED else _TYPES[event.event]
        sent = service.notify(
            title=event.title(),
            body=event.text(),
            notify_type=apprise.NotifyType(kind),
            body_format=apprise.NotifyFormat.TEXT,  # apprise escapes it for the service
        )
        return "" if sent else last.code or "refused, or no answer"

    return name, send


def _asset(apprise: Any) -> Any:
    """Return apprise's settings: no redirects, no templates, and nothing stored on disk."""
    try:
        # A POST that follows a redirect becomes a GET without the message.
        return apprise.AppriseAsset(
            app_id="clusterjob",
            app_desc="clusterjob",
            http_redirects=False,
            allow_templates=False,
            storage_mode="memory",
            service_timeout=10.0,
        )
    except Exception:  # an older apprise lacks some of them
        return apprise.AppriseAsset(app_id="clusterjob")


class _LastError(logging.Handler):
    """Keep the HTTP code of the last error in apprise's log; its texts may contain the URL.

    Args:
        module: the name of the service's module, because all places share the log.
    """

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module
        self.code = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.module != self._module:
            return
        if found := _HTTP_ERROR.search(record.getMessage()):
            self.code = f"HTTP {found[1]}"


def of_command(command: str) -> tuple[str, Send]:
    """Return a name for a command and the function that runs it."""

    def send(event: Event) -> str:
        facts = event.to_json()
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | _variables(facts),
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stderr is not None
        errors = StderrTail(process.stderr)
        with contextlib.suppress(OSError), process.stdin:  # it need not read the facts
            process.stdin.write(json.dumps(facts).encode())
        try:
            process.wait(_COMMAND_TIMEOUT)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"it did not end within {_COMMAND_TIMEOUT:g} s"
        if process.returncode == 0:
            return ""
        last = errors.last_line(0.5)
        return short(f"exit code {process.returncode}{f': {last}' if last else ''}")

    return "--notify-cmd", send


def _variables(facts: dict[str, Any]) -> dict[str, str]:
    """Return the facts as variables, such as CLUSTERJOB_NOTIFY_STATE."""
    return {
        f"CLUSTERJOB_NOTIFY_{name.upper()}": "" if value is None else str(value)
        for name, value in facts.items()
        if name != "final"
    }
