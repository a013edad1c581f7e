"""The live line of this process: how far the command is, on the terminal of stderr.

Threads of a submission share it. Without a terminal nothing is shown, unless `prints_steps` is set:
then each finished step of the submission is one plain line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from clusterjob.node.logs.console import LiveLines
from clusterjob.node.system.sanitize import sanitize


class Live(LiveLines):
    """Live lines that several threads may change.

    Attributes:
        prints_steps: whether `step` prints a line if there is no terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prints_steps = False
        self._lock = threading.RLock()
        self._suspended = 0

    def show(self, lines: Sequence[str]) -> None:
        """Replace the shown lines, unless they are suspended."""
        with self._lock:
            if not self._suspended:
                super().show(lines)

    def clear(self) -> None:
        """Erase the lines; call it before other output is printed."""
        with self._lock:
            super().clear()

    def step(self, text: str) -> None:
        """Print that a step of the submission is done, if there is no terminal."""
        if self.prints_steps and not self.has_terminal:
            print(f"clusterjob: {sanitize(text)}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Show nothing while this context is open, for example during a question."""
        with self._lock:
            self._suspended += 1
            super().clear()
        try:
            yield
        finally:
            with self._lock:
                self._suspended -= 1

    def clear_at_sigterm(self) -> None:
        """Erase the lines when SIGTERM ends this process; call it in the main thread."""
        if self.has_terminal and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        super().clear()  # without the lock: the interrupted thread may hold it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


live = Live()
