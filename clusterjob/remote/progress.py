"""Show how far a submission to hosts is: the hosts reached, and the code sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType

from clusterjob.core.live import live
from clusterjob.core.units import show_size

_INTERVAL = 0.1  # seconds between two changes of the line


class HostProgress:
    """Context manager for one submission; its methods may be called by any thread.

    Args:
        labels: the hosts, by node.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._reached = 0
        self._sent: dict[int, tuple[int, int]] = {}  # bytes sent and total bytes, by node
        self._begin = self._shown_at = 0.0

    def __enter__(self) -> HostProgress:
        self._show_reached()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        live.clear()
        if error is None and self._sent:
            live.step(f"sent code{self._text()}")

    def reached(self) -> None:
        """Count one host that was reached and can run the job."""
        with self._lock:
            self._reached += 1
            self._show_reached()
            if self._reached == len(self._labels):
                live.step(self._reached_text())

    def __call__(self, node: int, sent: int, total: int) -> None:
        """Show that a node was sent `sent` of `total` bytes."""
        with self._lock:
            moment = time.monotonic()
            self._begin = self._begin or moment
            self._sent[node] = (sent, total)
            if moment >= self._shown_at + _INTERVAL or sent == total:
                self._shown_at = moment
                live.show([f"sending code{self._text()}"])

    def _show_reached(self) -> None:
        live.show([self._reached_text()])

    def _reached_text(self) -> str:
        if len(self._labels) == 1:
            return f"{'connected' if self._reached else 'connecting'} to {self._labels[0]}"
        return f"{self._reached} of {len(self._labels)} hosts reached"

    def _text(self) -> str:
        counts = self._sent.values()
        sent, total = sum(each for each, _ in counts), sum(all_ for _, all_ in counts)
        seconds = time.monotonic() - self._begin
        text = f" to {len(self._sent)} hosts: " if len(self._sent) > 1 else ": "
        text += "" if sent == total else f"{show_size(sent)} of "
        text += show_size(total)
        if seconds > _INTERVAL:
            text += f", {show_size(int(sent / seconds))}/s"
        if sent < total and len(self._sent) > 1:
            slowest = min(
                self._sent, key=lambda key: self._sent[key][0] / max(1, self._sent[key][1])
            )
            text += f", {self._labels[slowest]} last"
        return text
