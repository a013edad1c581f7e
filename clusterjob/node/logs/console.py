"""Write the agent's stdout and stderr from a separate thread.

The reader of a pipe may pause (``| less``) or exit (``| head``). The agent's heartbeat must not
wait for a full pipe, and a closed pipe must not end the job.

`run` folds the tracebacks that follow from the root cause, and names the command that shows them.
An agent shows all of them: its output is often a platform's log, the only copy.
"""

from __future__ import annotations

import functools
import io
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TextIO

from clusterjob.node.logs.live_lines import LiveLines, write_text
from clusterjob.node.logs.log_files import Folded, Folder, LogReader, as_text, label
from clusterjob.node.logs.log_protocol import Writer
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.system.shared_note import SharedNote
from clusterjob.node.verdict import Verdict


class Console:
    """Write messages to stderr and the workers' output, each line with its rank.

    Args:
        reader: reads the output of this node's workers; None leaves the output in its files.
        numbered: write everything to stdout in numbered lines, for a submitter who sees only this
            log; see `clusterjob.node.logs.log_protocol`.
        note: keeps what was written, so that the next agent continues there; None for no next one.
    """

    def __init__(
        self,
        reader: LogReader | None = None,
        *,
        numbered: bool = False,
        note: SharedNote | None = None,
    ) -> None:
        self._reader = reader
        self._note = note
        kept = {} if note is None else note.read()
        if reader is not None:
            reader.continue_at(kept.get("positions", {}))
        self._writer = Writer(kept.get("next", 1)) if numbered else None
        if numbered and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # the image's locale may be different
        self._actions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live = LiveLines()
        self._show_queued = False  # one call of `_show` in the queue is enough
        self._thread = threading.Thread(target=self._run, name="clusterjob-console", daemon=True)
        self._thread.start()

    def print(self, text: str) -> None:
        """Write a message for the user; the messages of a submitted job are in agent.log."""
        self._actions.put(functools.partial(self._print_message, text))

    def print_verdict(self, verdict: Verdict) -> None:
        """Write the verdict as JSON if lines are numbered; otherwise do nothing."""
        if self._writer is not None:
            text = self._writer.verdict
            self._actions.put(lambda: _write(sys.stdout, text(verdict.to_json())))

    def show(self) -> None:
        """Show the workers' output since the last call."""
        if not self._show_queued:
            self._show_queued = True
            self._actions.put(functools.partial(self._show, end=False))

    def finish(self) -> None:
        """Show the rest of the workers' output, including last lines without a newline."""
        self._actions.put(functools.partial(self._show, end=True))

    def close(self) -> None:
        """Wait until everything is written or the pipes are closed."""
        self._actions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._actions.get()) is not None:
            action()
            self._keep()

    def _keep(self) -> None:
        if self._note is not None and (self._writer is not None or self._reader is not None):
            self._note.write(
                {
                    "next": self._writer.next if self._writer is not None else 1,
                    "positions": self._reader.positions() if self._reader is not None else {},
                }
            )

    def _print_message(self, text: str) -> None:
        if self._writer is not None:
            _write(sys.stdout, self._writer.message(text))
            return
        self._live.clear()
        _write(sys.stderr, sanitize(f"clusterjob: {text}\n", lines=True))

    def _show(self, *, end: bool) -> None:
        if self._reader is None:
            return
        self._show_queued = False
        folder, has_grown = Folder(), False
        # Each batch is from one file, so one `Folder` must get all batches to fold their lines.
        for lines in self._reader.batches(end=end):
            has_grown = True
            self._print_lines(folder.add(lines))
        self._print_lines(folder.flush())
        if has_grown and self._live.has_terminal:
            self._live.show([f"[{label(line)}] {line.text}" for line in self._reader.open_lines()])

    def _print_lines(self, lines: Iterable[Folded]) -> None:
        if self._writer is not None:
            _write(sys.stdout, self._writer.output(list(lines), time.time()))
            return
        for name, text in as_text(lines, _shown):
            self._live.clear()
            _write(sys.stdout if name == "out" else sys.stderr, text)


def _shown(line: Folded) -> str:
    return f"[{line.label}] {sanitize(line.text, colours=True)}\n"


def _write(stream: TextIO, text: str) -> None:
    try:
        write_text(stream, text)
    except OSError:
        # The pipe is closed or the disk is full. Discard later output, so that the exit code
        # stays that of the job.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
