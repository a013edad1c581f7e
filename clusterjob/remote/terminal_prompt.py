"""Ask the user a question of a host, such as for a password, on the terminal."""

from __future__ import annotations

import atexit
import os
import select
import sys
import termios
import threading
import time

from clusterjob.core.live import live

HUMAN_TIMEOUT = 300.0  # seconds that a person may take for an answer
_MAX_ANSWER = 4096  # bytes: what a terminal keeps of one line

_one_at_a_time = threading.Lock()


class DeclinedError(Exception):
    """The user closed the input or took too long."""


def available() -> bool:
    """Return whether stdin is a terminal from which this process may read."""
    try:
        handle = sys.stdin.fileno()
        if not os.isatty(handle):
            return False
    except (AttributeError, OSError, ValueError):  # no stdin, or not a file (notebooks)
        return False
    try:
        return os.tcgetpgrp(handle) == os.getpgrp()  # a background job would be stopped
    except OSError:
        return True  # not the controlling terminal, which stops nobody


def ask(question: str, *, echo: bool) -> str:
    """Return the user's answer to a question. Questions of other threads wait.

    Args:
        question: harmless text; see `clusterjob.node.system.sanitize`.
        echo: whether the terminal shows the answer.

    Raises:
        DeclinedError: the user closed the input (Ctrl-D) or took longer than `HUMAN_TIMEOUT`.
    """
    with _one_at_a_time, live.suspended():
        handle = sys.stdin.fileno()
        before = termios.tcgetattr(handle)
        changed = termios.tcgetattr(handle)
        changed[3] |= termios.ICANON | termios.ISIG
        if not echo:
            changed[3] &= ~termios.ECHO

        def restore() -> None:
            termios.tcsetattr(handle, termios.TCSADRAIN, before)

        atexit.register(restore)  # Ctrl-C may end the program while this thread waits
        try:
            # Discard what was typed before: it is no answer to this question.
            termios.tcsetattr(handle, termios.TCSAFLUSH, changed)
            _write(handle, question)
            answer = _line(handle)
        finally:
            restore()
            atexit.unregister(restore)
            if not echo:
                _write(handle, "\n")
        return answer


def _line(handle: int) -> str:
    end, heard = time.monotonic() + HUMAN_TIMEOUT, b""
    while not heard.endswith(b"\n"):
        left = end - time.monotonic()
        # Not poll: macOS does not support it for terminals.
        if left <= 0 or not select.select([handle], [], [], left)[0]:
            raise DeclinedError(f"no answer was typed within {HUMAN_TIMEOUT:g} s")
        data = os.read(handle, _MAX_ANSWER)
        heard += data
        if not data or len(heard) > _MAX_ANSWER:
            raise DeclinedError("no answer was typed")
    return heard.decode(errors="surrogateescape").rstrip("\r\n")


def _write(handle: int, text: str) -> None:
    data = text.encode(errors="replace")
    try:
        os.write(handle, data)
    except OSError:  # stdin is open for reading only
        os.write(2, data)
