"""Run one of Slurm's commands on a login host.

A module of its own: Slurm on this machine needs none of the imports.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterjob.backends.slurm.client import UNREACHED
from clusterjob.errors import HostError, SubmitError

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost
    from clusterjob.remote.session import Session

# Seconds in which the start request waits for the command's end, to save a second request.
_AT_ONCE = 0.3


class RemoteCommand:
    """A command on a login host, with the interface of `subprocess.Popen`.

    If the connection breaks, its return code is UNREACHED.

    Args:
        host: the host.
        argv: the command line.
        more: variables added to its environment.
        job_id: the job whose directory it runs in; empty for none.

    Raises:
        SubmitError: the command is not installed on the host.
    """

    def __init__(
        self, host: LoginHost, argv: Sequence[str], more: Mapping[str, str], job_id: str
    ) -> None:
        self._host = host
        self._session: Session | None = None
        self._number = 0
        self._output = ("", "")
        self._ended = False
        self.args = list(argv)
        self.returncode: int = 0
        answer = self._ask(
            "run_command", wait=_AT_ONCE, argv=list(argv), env=dict(more), job=job_id
        )
        if "absent" in answer:
            raise SubmitError(
                f"{host.label}: {argv[0]} cannot be run: {answer['absent']}",
                "add Slurm's commands to PATH on the login host",
            )

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Return stdout and stderr once the command has ended.

        Raises:
            subprocess.TimeoutExpired: it did not end within timeout (seconds).
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            begin = time.monotonic()
            left = 60.0 if end is None else max(0.0, end - begin)
            self._ask("reap_command", wait=left, number=self._number)
            if not self._ended and left > 1.0 and time.monotonic() - begin < left / 2:
                # The host answers before the wait is over: the loop would repeat the request
                # without a pause.
                self._end(
                    UNREACHED,
                    "",
                    f"ssh: {self._host.label}: it answered before the end of {self.args[0]}",
                )
            if not self._ended and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._output

    def kill(self) -> None:
        """Kill the command if the host is reachable."""
        if not self._ended:
            self._ask("reap_command", wait=0.0, number=self._number, kill=True)
            self._end(-9, "", "")

    def _ask(self, call: str, wait: float, **arguments: Any) -> dict[str, Any]:
        try:
            session = self._host.session()
            if self._session not in (None, session):
                self._end(UNREACHED, "", f"ssh: {self._host.label}: the connection broke")
                return {}
            self._session = session
            answer, data = session.ask(
                call, wait=wait, timeout=self._host.timeout + wait, **arguments
            )
        except HostError as error:
            self._end(UNREACHED, "", f"ssh: {error.message}")
            return {}
        if "number" in answer:
            self._number = answer["number"]
        elif "code" in answer and "out" in answer:
            out, err = data[: answer["out"]], data[answer["out"] :]
            self._end(
                answer["code"], *(text.decode("utf-8", "surrogateescape") for text in (out, err))
            )
        elif "absent" not in answer:
            self._end(
                UNREACHED,
                "",
                f"ssh: {self._host.label}: it sends a malformed answer about {self.args[0]}",
            )
        return answer

    def _end(self, code: int, out: str, err: str) -> None:
        self._ended, self.returncode, self._output = True, code, (out, err)
