"""Show the phase of a followed job: a live line on a terminal, else one line per phase."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from clusterjob.cli.output import print_message
from clusterjob.cli.phase_text import PhaseClock, phase_text
from clusterjob.core.live import live

if TYPE_CHECKING:
    from clusterjob.backends.base import Status

_ASK_INTERVAL = 1.0  # seconds between two checks whether a rank reads from the terminal


class LiveProgress:
    """The phase of one followed job.

    Args:
        prints_phases: whether each phase is printed as a line if there is no terminal; otherwise
            only reasons are.
        reads_terminal: returns whether a rank reads from this terminal; it then gets the line.
    """

    def __init__(self, *, prints_phases: bool, reads_terminal: Callable[[], bool]) -> None:
        self._prints_phases = prints_phases
        self._reads_terminal = reads_terminal
        self._clock = PhaseClock()
        self._printed: set[str] = set()
        self._waits_for_keys = False
        self._asked_at = 0.0

    def hear(self) -> None:
        """Note that output of the job was printed."""
        self._clock.hear()
        self._waits_for_keys = False

    def update(self, status: Status, *, has_open_lines: bool) -> None:
        """Show the phase of the job.

        Args:
            status: its status.
            has_open_lines: whether the terminal shows unfinished lines of ranks, such as a prompt.
        """
        text = self._clock.text(status)
        if not live.has_terminal:
            self._print(status)
        elif status.restarts and status.restart_reason:
            why = f"restart {status.restarts}: {status.restart_reason}"
            self._print_once(f"restart {status.restarts}", why)
        if status.reason not in text:  # such as why the workers are not forked
            self._print_once(status.reason, status.reason)
        if not has_open_lines:
            live.show([] if self._is_read() else [text])

    def _is_read(self) -> bool:
        """Return whether a rank reads from the terminal: what is typed must stay visible."""
        if not sys.stdin or not sys.stdin.isatty():
            return False
        if not self._waits_for_keys and time.monotonic() >= self._asked_at + _ASK_INTERVAL:
            self._asked_at = time.monotonic()
            self._waits_for_keys = self._reads_terminal()
        return self._waits_for_keys

    def _print(self, status: Status) -> None:
        """Print the phase, or why the job waits, unless it was printed before."""
        key = text = phase_text(status, has_output=self._clock.has_output)
        if not self._prints_phases:
            key = text = status.reason
        elif status.progress is not None:
            # Counts change, and each phase gets one line.
            reason = status.reason if status.reason in text else ""
            key = f"{status.progress.phase} {status.restarts} {text == 'running'} {reason}"
            text += f", restart {status.restarts}" if status.restarts else ""
        self._print_once(key, text)

    def _print_once(self, key: str, text: str) -> None:
        if key and key not in self._printed:
            self._printed.add(key)
            print_message(text)
