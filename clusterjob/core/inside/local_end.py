"""This side of a command or a relay: the signals of this process, and its terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from types import FrameType
from typing import Any

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MAX_ASKED = 3  # signals after which this process ends without waiting for the command


class Signals:
    """Collects the signals of this process, as a descriptor to wait for; a context manager.

    Attributes:
        descriptor: readable when a signal has arrived.
        last: the last signal that ends a process; 0 if there was none.
        abort: whether to end without waiting for the command: after a third signal, or SIGHUP.
    """

    def __init__(self) -> None:
        self.last = 0
        self.abort = False
        self._asked = 0
        self._old: dict[int, Any] = {}
        self.descriptor, self._writer = os.pipe()
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)

    def __enter__(self) -> Signals:
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*_FORWARDED, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                self._old[number] = signal.signal(number, _note)
        return self

    def __exit__(self, *_exception: object) -> None:
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        os.close(self.descriptor)
        os.close(self._writer)

    def read(self) -> list[int]:
        """Return the signals that have arrived."""
        try:
            found = list(os.read(self.descriptor, 256))
        except BlockingIOError:
            return []
        for number in found:
            if number in _FORWARDED:
                self.last, self._asked = number, self._asked + 1
                self.abort = self._asked >= _MAX_ASKED or number == signal.SIGHUP
        return found


def _note(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: Python has written the signal's number to the descriptor."""


class Terminal:
    """The terminal of this process: raw while a command uses it, restored in any case."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Terminal:
        self._saved = termios.tcgetattr(self._descriptor)
        tty.setraw(self._descriptor)
        return self

    def __exit__(self, *_exception: object) -> None:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._saved)

    def size(self) -> tuple[int, int]:
        """Return rows and columns; 24 and 80 if the terminal does not know them."""
        try:
            found = os.get_terminal_size(self._descriptor)
        except OSError:
            return 24, 80
        return found.lines or 24, found.columns or 80


def has_terminal() -> bool:
    """Return whether stdin and stdout are a terminal."""
    return all(os.isatty(descriptor) for descriptor in (0, 1))
