"""A bar for all hosts while code is sent: on a terminal only, and only when it takes a moment."""

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

_MOMENT = 0.5  # seconds: most code is sent before a bar is worth its import


class Sending:
    """Shows how far the code has come on all hosts together; a context manager, and what a
    submission calls.

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
        """Take in that a host was sent so many of so many bytes."""
        if not sys.stderr.isatty():
            return
        with self._lock:
            self._done[node] = (sent, total)
            if self._bar is None and time.monotonic() - self._begin > _MOMENT:
                self._open()
            if self._bar is not None:
                behind = min(
                    self._done, key=lambda key: self._done[key][0] / max(1, self._done[key][1])
                )
                text = (
                    f"sending code to {len(self._done)} hosts, {sanitize(self._labels[behind])} last"
                    if len(self._labels) > 1
                    else "sending code"
                )
                both = self._done.values()
                self._bar.update(
                    self._task,
                    description=text,
                    completed=sum(sent for sent, _ in both),
                    total=sum(all_ for _, all_ in both),
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
