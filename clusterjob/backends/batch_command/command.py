"""Run a platform's command with a timeout and parse the JSON in its output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIMEOUT = 60.0  # seconds; the default timeout of a command
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MAX_SHOWN = 400  # maximum characters of an error message to show


@dataclass(frozen=True)
class CommandOutput:
    """The result of a command.

    Attributes:
        code: the exit code; negative for a signal.
        out, err: stdout and stderr, without terminal colours.
        timed_out: whether the command was killed at the timeout; its effects are then unknown.
    """

    code: int
    out: str
    err: str
    timed_out: bool = False

    @property
    def message(self) -> str:
        """The error message as one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines()]
        text = "; ".join(dict.fromkeys(line for line in lines if line)) or f"exit code {self.code}"
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."

    @property
    def data(self) -> Any:
        """The first JSON value in stdout; None if there is no JSON value.

        Text may precede the value, such as a notice of a newer version.
        """
        for match in re.finditer(r"[\[{]", self.out):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode(self.out, match.start())[0]
        return None


def run(
    argv: Sequence[str], more: Mapping[str, str | None], timeout: float = TIMEOUT
) -> CommandOutput:
    """Run a command in its own session, so that Ctrl-C on the terminal does not reach it.

    Args:
        argv: the command line.
        more: variables to add to this process's own; None removes a variable.
        timeout: seconds after which the command and its child processes are killed.

    Raises:
        OSError: the command cannot be run.
    """
    environ = {name: value for name, value in {**os.environ, **more}.items() if value is not None}
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=environ,
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            return CommandOutput(
                process.returncode,
                _ESCAPES.sub("", out),
                err=f"{os.path.basename(argv[0])} did not answer within {timeout:g} s",
                timed_out=True,
            )
        except BaseException:
            _kill(process)  # the caller does not wait for the command any more
            raise
    return CommandOutput(process.returncode, _ESCAPES.sub("", out), err=_ESCAPES.sub("", err))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and its child processes, which share a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
