"""Show the phase of a followed job: a live line on a terminal, else one line per phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterjob.cli.output import print_message
from clusterjob.cli.phase_text import PhaseClock, phase_text
from clusterjob.core.live import live

if TYPE_CHECKING:
    from clusterjob.backends.base import Status


class LiveProgress:
    """The phase of one followed job.

    Args:
        prints_phases: whether each phase is printed as a line if there is no terminal; otherwise
            only reasons are.
    """

    def __init__(self, *, prints_phases: bool) -> None:
        self._prints_phases = prints_phases
        self._clock = PhaseClock()
        self._printed: set[str] = set()

    def hear(self) -> None:
        """Note that output of the job was printed."""
        self._clock.hear()

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
            live.show([text])

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
