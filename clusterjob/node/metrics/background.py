"""Call a function again and again in its own thread, because it may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """Call a function at intervals in a daemon thread; nobody waits for the thread.

    A hanging driver, or a process whose memory lock is held, keeps only this thread.

    Args:
        name: the thread's name.
        function: returns a value; an exception ends the calls.
        pause: returns the seconds until the next call, from the seconds that the last one took.
        delay: seconds until the first call.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[], T],
        pause: Callable[[float], float],
        delay: float = 0.0,
    ) -> None:
        self._function = function
        self._pause = pause
        self._delay = delay
        self._value: T | None = None
        self._at = float("-inf")
        self._stop = threading.Event()
        self.done = threading.Event()  # set after the first call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def value(self, within: float) -> T | None:
        """Return the newest value; None if it is older than `within` seconds."""
        return self._value if time.monotonic() - self._at <= within else None

    def take(self) -> T | None:
        """Return the newest value once."""
        value, self._value = self._value, None
        return value

    def stop(self) -> None:
        """End the thread when it is not in a call."""
        self._stop.set()

    def _run(self) -> None:
        self._stop.wait(self._delay)
        while not self._stop.is_set():
            begin = time.monotonic()
            try:
                self._value = self._function()
                self._at = time.monotonic()
            except Exception:  # such as a driver that was unloaded: there are no more values
                return
            finally:
                self.done.set()
            self._stop.wait(self._pause(time.monotonic() - begin))
