"""Write what an agent prints: numbered lines, or text with live lines on a terminal.

The reader of a pipe may pause (``| less``) or exit (``| head``). The agent's heartbeat must not
wait for a full pipe, and a closed pipe must not end the job: `Console` writes from a thread.

`run` folds the tracebacks that follow from the root cause, and names the command that shows them.
An agent shows all of them: its output is often a platform's log, the only copy.

A submitter who sees only the platform's log of each node gets numbered lines (`LineWriter`; read
by `clusterjob.backends.batch_command.log_stream`):

- ``<n>[@<seconds>] [<label>] <text>``: a worker's stdout. The label lists ranks, such as 0-3,5.
- ``<n>[@<seconds>] [<label>]! <text>``: a worker's stderr.
- ``<n> clusterjob: <text>``: an agent's message.
- ``<n> clusterjob-verdict <json>``: the verdict, once, as the last line of node 0.
- ``clusterjob-refused <code> <host>: <why>``: without a number, from a node that could not start
  its agent.

The numbers count a node's lines from 1. A reader uses them to detect lines that arrive twice, late
or not at all. The seconds since the epoch apply until the next line with seconds. They order the
lines of several nodes. A ``+`` after the bracket, the colon or ``verdict`` means that the text
continues on the next line: a container runtime cuts lines of more than 16 KiB.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import os
import queue
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from clusterjob.node.logs.log_files import Labelled, LogLine, LogReader, as_text, fold
from clusterjob.node.system.processes import SharedNote
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict

MAX_TEXT = 4000  # characters of text on one numbered line, at most 16,000 bytes
_MAX_LINES = 16  # maximum live lines to show; later lines are left out
_UP, _ERASE = "\x1b[{}A", "\r\x1b[J"  # ECMA-48: cursor up; erase to the end of the screen


class LineWriter:
    """Number a node's lines.

    Args:
        first: the number of the first line.

    Attributes:
        next: the number of the next line.
    """

    def __init__(self, first: int = 1) -> None:
        self.next = first

    def output(self, lines: list[Labelled], seconds: float) -> str:
        """Return workers' lines with their numbers.

        Args:
            lines: lines that were read at the same time.
            seconds: that time, since the epoch.
        """
        return "".join(
            self._line(
                f"[{label}]" + "!" * (line.stream == "err"),
                line.text,
                stamp="" if index else f"@{seconds:.1f}",
            )
            for index, (label, line) in enumerate(lines)
        )

    def message(self, text: str) -> str:
        """Return the lines of an agent's message with their numbers."""
        return "".join(self._line("clusterjob:", line) for line in text.split("\n"))

    def verdict(self, verdict: Mapping[str, Any]) -> str:
        """Return the numbered line of the verdict.

        It omits the last lines of workers that failed as a consequence; their logs contain them.
        """
        consequences = [failure | {"last_lines": []} for failure in verdict["consequences"]]
        return self._line(
            "clusterjob-verdict",
            json.dumps({**verdict, "consequences": consequences}, separators=(",", ":")),
        )

    def _line(self, mark: str, text: str, stamp: str = "") -> str:
        text = text.encode(errors="backslashreplace").decode()
        begins, found = range(0, len(text) or 1, MAX_TEXT), ""
        for begin in begins:
            more = "" if begin == begins[-1] else "+"
            found += f"{self.next}{stamp} {mark}{more} {text[begin : begin + MAX_TEXT]}\n"
            self.next, stamp = self.next + 1, ""
        return found


def refusal_line(exit_code: int, host: str, why: str) -> str:
    """Return the line of a node that cannot start its agent; it has no number."""
    return f"clusterjob-refused {exit_code} {host}: {' '.join(why.split())}\n"


class LiveLines:
    """Show lines without a newline, such as progress bars, below the printed output.

    Nothing is shown if stderr is no terminal. Changed lines replace the earlier ones.
    """

    def __init__(self) -> None:
        self._shown: list[str] = []

    @functools.cached_property
    def has_terminal(self) -> bool:
        """Whether stderr is a terminal that can move its cursor; otherwise no lines are shown."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, lines: Sequence[str]) -> None:
        """Replace the shown lines with these lines."""
        if self.has_terminal and (lines or self._shown):
            try:
                self._draw(lines)
            except OSError:  # the terminal was closed
                self.has_terminal = False

    def clear(self) -> None:
        """Erase the lines; call it before other output is printed."""
        self.show(())

    def _draw(self, lines: Sequence[str]) -> None:
        size = os.get_terminal_size(sys.stderr.fileno())
        columns, most = size.columns or 80, max(1, min(_MAX_LINES, size.lines - 1))
        wanted = [_cut(sanitize(line), columns - 1) for line in lines[:most]]
        if len(lines) > most:
            wanted[-1] = f"... and {len(lines) - most + 1} more ranks"
        if wanted != self._shown:
            # A terminal that became narrower wraps the lines.
            rows = sum(max(1, -(-_width(line) // columns)) for line in self._shown)
            erase = (_UP.format(rows - 1) if rows > 1 else "") + (_ERASE if rows else "")
            self._shown = wanted
            _write_text(sys.stderr, erase + "\n".join(wanted))


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _cut(text: str, columns: int) -> str:
    """Return the part of a text that fits into the columns; a wrapped line cannot be replaced."""
    used = itertools.accumulate(map(_width, text))
    return "".join(letter for letter, width in zip(text, used, strict=True) if width <= columns)


class Console:
    """Write messages to stderr and the workers' output, each line with its rank.

    Args:
        reader: reads the output of this node's workers; None leaves the output in its files.
        numbered: write everything to stdout in numbered lines, for a submitter who sees only this
            log; see the module.
        note: keeps what was written, so that the next agent continues there; None for no next one.
    """

    def __init__(
        self,
        reader: LogReader | None = None,
        *,
        numbered: bool = False,
        note: SharedNote | None = None,
    ) -> None:
        self._reader, self._numbered, self._note = reader, numbered, note
        kept = {} if note is None else note.read()
        if reader is not None:
            reader.continue_at(kept.get("positions", {}))
        self._lines = LineWriter(kept.get("next", 1))
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
        if self._numbered:
            json_ = verdict.to_json()
            self._actions.put(lambda: _write(sys.stdout, self._lines.verdict(json_)))

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
            if self._note is not None:
                positions = {} if self._reader is None else self._reader.positions()
                self._note.write({"next": self._lines.next, "positions": positions})

    def _print_message(self, text: str) -> None:
        if self._numbered:
            _write(sys.stdout, self._lines.message(text))
            return
        self._live.clear()
        _write(sys.stderr, sanitize(f"clusterjob: {text}\n", lines=True))

    def _show(self, *, end: bool) -> None:
        if self._reader is None:
            return
        self._show_queued = False
        batches = self._reader.batches(end=end)
        if (first := next(batches, None)) is None:
            return  # no file has grown
        for lines in fold(itertools.chain([first], batches)):
            self._print_lines(lines)
        if self._live.has_terminal:
            self._live.show([f"[{line.rank}] {line.text}" for line in self._reader.open_lines()])

    def _print_lines(self, lines: list[Labelled]) -> None:
        if self._numbered:
            _write(sys.stdout, self._lines.output(lines, time.time()))
            return
        for name, text in as_text(lines, _shown):
            self._live.clear()
            _write(sys.stdout if name == "out" else sys.stderr, text)


def _shown(label: str, line: LogLine) -> str:
    return f"[{label}] {sanitize(line.text, colours=True)}\n"


def _write_text(stream: TextIO, text: str) -> None:
    """Write text; escape characters that the stream's encoding does not have."""
    stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _write(stream: TextIO, text: str) -> None:
    try:
        _write_text(stream, text)
    except OSError:
        # The pipe is closed or the disk is full. Discard later output, so that the exit code
        # stays that of the job.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)
