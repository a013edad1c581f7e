"""Show progress bars and prompts at the bottom of a terminal and update them in place."""

from __future__ import annotations

import functools
import os
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from clusterjob.node.system.sanitize import sanitize

_MAX_LINES = 16  # maximum lines to show; later lines are left out
_UP, _ERASE = "\x1b[{}A", "\r\x1b[J"  # ECMA-48: cursor up; erase to the end of the screen


class LiveLines:
    """Show lines without a newline below the printed output, if stderr is a terminal.

    Changed lines replace the earlier ones.
    """

    def __init__(self) -> None:
        self._shown: list[str] = []

    @functools.cached_property
    def has_terminal(self) -> bool:
        """Whether stderr is a terminal that can move its cursor; otherwise no lines are shown."""
        return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def show(self, lines: Sequence[str]) -> None:
        """Replace the shown lines with these lines."""
        if not self.has_terminal or not (lines or self._shown):
            return
        try:
            size = os.get_terminal_size(sys.stderr.fileno())
        except OSError:
            self.has_terminal = False  # the terminal was closed
            return
        most = max(1, min(_MAX_LINES, size.lines - 1))
        wanted = [_cut(sanitize(line), (size.columns or 80) - 1) for line in lines[:most]]
        if len(lines) > most:
            wanted[-1] = f"... and {len(lines) - most + 1} more ranks"
        if wanted == self._shown:
            return
        self.clear()
        if wanted:
            self._write("\n".join(wanted))
        self._shown = wanted

    def clear(self) -> None:
        """Erase the lines; call it before other output is printed."""
        if self._shown:
            rows = self._rows()
            self._write((_UP.format(rows - 1) if rows > 1 else "") + _ERASE)
            self._shown = []

    def _rows(self) -> int:
        """Return the rows that the lines take: a terminal that became narrower wraps them."""
        try:
            columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        except OSError:
            columns = 80
        return sum(max(1, -(-_width(line) // columns)) for line in self._shown)

    def _write(self, text: str) -> None:
        try:
            write_text(sys.stderr, text)
        except OSError:
            self.has_terminal = False  # the terminal was closed


def write_text(stream: TextIO, text: str) -> None:
    """Write text; escape characters that the stream's encoding does not have.

    Raises:
        OSError: the stream is closed, or the disk is full.
    """
    stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
    stream.flush()


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _cut(text: str, columns: int) -> str:
    """Return the part of a text that fits into the columns; a wrapped line cannot be replaced."""
    used = 0
    for index, character in enumerate(text):
        used += _width(character)
        if used > columns:
            return text[:index]
    return text
