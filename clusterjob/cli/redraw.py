"""Redraw lines on the terminal in place until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from clusterjob.cli import tables

_INTERVAL = 2.0  # seconds between two redraws
# xterm: 1049 switches to the alternate screen and back, 25 is the cursor, 7 the line wrap.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def show(
    lines: Callable[[os.terminal_size | None], list[str]],
    is_over: Callable[[], bool] = lambda: False,
    interval: float = _INTERVAL,
) -> bool:
    """Show lines and refresh them regularly and after each change of the terminal's size.

    Ctrl-C ends it and restores the terminal. Without a terminal, the lines are printed whenever
    they have changed.

    Args:
        lines: returns the current lines for a size of the terminal.
        is_over: returns whether the lines just shown are the last ones.
        interval: seconds between two refreshes.

    Returns:
        Whether it ended because `is_over` returned True.
    """
    resizes: queue.SimpleQueue[None] = queue.SimpleQueue()  # a handler may call `put` at any time
    with contextlib.suppress(KeyboardInterrupt), _signals(resizes):
        if tables.terminal_size() is None:
            _print_changes(lines, is_over, interval)
            return True
        sys.stdout.write(_ENTER)
        try:
            while (size := tables.terminal_size()) is not None:
                text = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in lines(size))
                sys.stdout.write(_HOME + text.removesuffix("\r\n") + _CLEAR_BELOW)
                sys.stdout.flush()
                if is_over():
                    return True
                _wait(resizes, interval)
        finally:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
    return False


def _print_changes(
    lines: Callable[[os.terminal_size | None], list[str]],
    is_over: Callable[[], bool],
    interval: float,
) -> None:
    shown: list[str] | None = None
    while True:
        if (now := lines(None)) != shown:
            print("\n".join(now if shown is None else ["", *now]), flush=True)
            shown = now
        if is_over():
            return
        time.sleep(interval)


def _wait(resizes: queue.SimpleQueue[None], seconds: float) -> None:
    """Wait until the terminal has another size, but not longer."""
    with contextlib.suppress(queue.Empty):
        resizes.get(timeout=seconds)
        while True:  # several changes need one redraw
            resizes.get_nowait()


@contextlib.contextmanager
def _signals(resizes: queue.SimpleQueue[None]) -> Iterator[None]:
    """Wake the view after a change of the terminal's size; end it on SIGTERM and SIGHUP."""

    def resized(_number: int, _frame: FrameType | None) -> None:
        resizes.put(None)

    def ended(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGWINCH: resized, signal.SIGTERM: ended, signal.SIGHUP: ended}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
