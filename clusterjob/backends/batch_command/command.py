"""A platform's command: run to its end or until patience ends, with all that it started; its JSON
found behind whatever it says first.
"""

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

PATIENCE = 60.0  # seconds for one question
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST = 400  # characters of a complaint that are shown


@dataclass(frozen=True)
class Answer:
    """What a command said.

    Attributes:
        code: its exit code; negative for a signal.
        out, err: its stdout and stderr, without the colours of a terminal.
        timed_out: whether it was ended because it took too long: nobody knows what it has done.
    """

    code: int
    out: str
    err: str
    timed_out: bool = False

    @property
    def words(self) -> str:
        """Its complaint as one line."""
        lines = [line.strip() for line in (self.err or self.out).splitlines()]
        text = "; ".join(dict.fromkeys(line for line in lines if line)) or f"exit code {self.code}"
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

    @property
    def data(self) -> Any:
        """The JSON in its stdout; None where there is none. A notice of a newer version may stand
        before it.
        """
        for match in re.finditer(r"[\[{]", self.out):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode(self.out, match.start())[0]
        return None


def run(argv: Sequence[str], more: Mapping[str, str | None], patience: float = PATIENCE) -> Answer:
    """Run a command, away from the terminal and its Ctrl-C.

    Args:
        argv: the command line.
        more: variables added to this process's own; None for one that is left out.
        patience: seconds after which it is ended, with whatever it has started.

    Raises:
        OSError: it cannot be run.
    """
    environ = {name: value for name, value in {**os.environ, **more}.items() if value is not None}
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        encoding="utf-8", errors="replace", env=environ, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            out, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            _kill(process)
            out, err = process.communicate()
            why = f"{os.path.basename(argv[0])} did not answer within {patience:g} s"
            return Answer(process.returncode, _ESCAPES.sub("", out), err=why, timed_out=True)
        except BaseException:
            _kill(process)  # it might go on with what nobody wants any more
            raise
    return Answer(process.returncode, _ESCAPES.sub("", out), err=_ESCAPES.sub("", err))


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command and what it has started, which are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
