"""All that an agent writes on its own stdout and stderr, from a thread of its own.

Whoever reads them may pause (``| less``) or go away (``| head``): the agent's heartbeat must not wait for a full pipe, and a
closed one must not end the job.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import TextIO

from clusterjob.node.logs import Line, LogReader, fold


class Voice:
    """Says lines on stderr and, where a reader is given, shows the workers' output, each line with its rank.

    Args:
        reader: reads the output of this node's workers; None leaves it in its files.
    """

    def __init__(self, reader: LogReader | None = None) -> None:
        self._reader = reader
        self._queue: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()  # (what to do, text)
        self._look_waits = False  # whether a wish to look at the output is in the queue: one is enough
        self._thread = threading.Thread(target=self._run, name="clusterjob-voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Show one line to whoever watches this node; a submitted job keeps it in agent.log."""
        self._queue.put(("say", f"clusterjob: {text}\n"))

    def show(self) -> None:
        """Show what the workers wrote since the last look."""
        if not self._look_waits:
            self._look_waits = True
            self._queue.put(("show", ""))

    def finish(self) -> None:
        """Show what is left of the workers' output, their last line without an end included."""
        self._queue.put(("finish", ""))

    def close(self) -> None:
        """Return once all was written, or nobody reads any more."""
        self._queue.put(("close", ""))
        self._thread.join()

    def _run(self) -> None:
        while True:
            what, text = self._queue.get()
            if what == "say":
                _write(sys.stderr, text)
            elif what == "close":
                return
            elif self._reader is not None:
                self._look_waits = False
                self._show(self._reader.read() if what == "show" else self._reader.finish())

    @staticmethod
    def _show(lines: list[Line]) -> None:
        for line in fold(lines):
            _write(sys.stdout if line.stream == "out" else sys.stderr, f"[{line.label}] {line.text}\n")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
    except OSError:
        # Nobody reads any more, or the disk is full. What comes next goes nowhere, and the exit code stays the job's own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
