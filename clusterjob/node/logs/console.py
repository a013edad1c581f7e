"""All that an agent writes on its own stdout and stderr, from a thread of its own.

Whoever reads them may pause (``| less``) or go away (``| head``): the agent's heartbeat must not
wait for a full pipe, and a closed one must not end the job.
"""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any, TextIO

from clusterjob.node.logs.folding import Folded, Folder, as_text, label
from clusterjob.node.logs.live_lines import LiveLines
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.logs.log_protocol import Writer
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict


class Voice:
    """Says lines on stderr and, where a reader is given, shows the workers' output, each line with
    its rank.

    Args:
        reader: reads the output of this node's workers; None leaves it in its files.
        numbered: all goes to stdout, each line with a number, for a submitter who sees nothing but
            that; see `numbered`.
    """

    def __init__(self, reader: LogReader | None = None, *, numbered: bool = False) -> None:
        self._reader = reader
        self._writer = Writer() if numbered else None
        if numbered and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # whatever the image's locale is
        self._queue: queue.SimpleQueue[tuple[str, Any]] = (
            queue.SimpleQueue()
        )  # (what to do, with what)
        self._live = LiveLines()
        self._look_waits = (
            False  # whether a wish to look at the output is in the queue: one is enough
        )
        self._thread = threading.Thread(target=self._run, name="clusterjob-voice", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Show one line to whoever watches this node; a submitted job keeps it in agent.log."""
        self._queue.put(("say", text))

    def tell(self, verdict: Verdict) -> None:
        """Show how the job ended to a submitter who reads numbered lines; people were told in
        words.
        """
        if self._writer is not None:
            self._queue.put(("tell", verdict.to_json()))

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
            what, value = self._queue.get()
            if what == "close":
                return
            if what == "say":
                self._say(value)
            elif what == "tell" and self._writer is not None:
                _write(sys.stdout, self._writer.verdict(value))
            elif self._reader is not None:
                self._look_waits = False
                self._show(self._reader, end=what == "finish")

    def _say(self, text: str) -> None:
        self._live.clear()
        if self._writer is None:
            _write(sys.stderr, sanitize(f"clusterjob: {text}\n", lines=True))
        else:
            _write(sys.stdout, self._writer.words(text))

    def _show(self, reader: LogReader, *, end: bool) -> None:
        folder, has_grown = Folder(), False
        for lines in reader.batches(
            end=end
        ):  # each of one file: lines of several ranks fold only within one folder
            has_grown = True
            self._print(folder.add(lines))
        self._print(folder.flush())
        if has_grown and self._live.has_terminal:
            self._live.show([f"[{label(line)}] {line.text}" for line in reader.open_lines()])

    def _print(self, lines: Iterable[Folded]) -> None:
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
        stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
    except OSError:
        # Nobody reads any more, or the disk is full. What comes next goes nowhere, and the exit
        # code stays the job's own.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
