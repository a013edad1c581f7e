"""Progress bar for sending code to hosts: only on a terminal, and only if it takes a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from clusterjob.node.system.sanitize import sanitize

if TYPE_CHECKING:
    from rich.progress import Progress

_DELAY = 0.5  # seconds before the bar appears: the import of rich takes a while too


class Sending:
    """Context manager that shows a progress bar; the submission calls it after each piece.

    Args:
        labels: the hosts, by node.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._done: dict[int, tuple[int, int]] = {}
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> Sending:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, node: int, sent: int, total: int) -> None:
        """Update the bar: a node was sent `sent` of `total` bytes."""
        if not sys.stderr.isatty():
            return
        with self._lock:
            self._done[node] = (sent, total)
            if self._bar is None and time.monotonic() - self._begin > _DELAY:
                self._open()
            if self._bar is not None:
                slowest = min(
                    self._done, key=lambda key: self._done[key][0] / max(1, self._done[key][1])
                )
                text = "sending code"
                if len(self._labels) > 1:
                    label = sanitize(self._labels[slowest])
                    text = f"sending code to {len(self._done)} hosts, {label} last"
                counts = self._done.values()
                self._bar.update(
                    self._task,
                    description=text,
                    completed=sum(sent for sent, _ in counts),
                    total=sum(all_ for _, all_ in counts),
                )

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("sending code", total=None)
        self._bar.start()
