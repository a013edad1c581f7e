"""Print aligned tables, cut to the width of a terminal."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Sequence

from clusterjob.node.system.sanitize import sanitize


def width_of(text: str) -> int:
    """Return the number of terminal columns of a text: East Asian wide letters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def cut(text: str, width: int, *, mark: str = "") -> str:
    """Return the beginning of a text that fits into this many columns, with an ellipsis if cut.

    Args:
        text: the text.
        width: number of columns.
        mark: the ellipsis; by default one that stdout can show.
    """
    if width_of(text) <= width:
        return text
    kept, used = "", 0
    for letter in text:
        used += width_of(letter)
        if used > width - 1:
            break
        kept += letter
    return kept + (mark or ("…" if _can_show("…") else "~")) if width > 0 else ""


def _can_show(letter: str) -> bool:
    try:
        letter.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def terminal_size() -> os.terminal_size | None:
    """Return the size of the terminal on stdout; None if stdout is no terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    return size if size.columns > 0 else os.terminal_size((80, 24))


def table_lines(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return rows as lines with aligned columns and without trailing blanks.

    Args:
        rows: the cells, the header first; unsafe characters are escaped.
        width: maximum width of a line; None for no limit.
    """
    shown = [[sanitize(cell) for cell in row] for row in rows]
    widths = [max(map(width_of, column)) for column in zip(*shown, strict=True)]
    lines = [
        "  ".join(
            cell + " " * (size - width_of(cell)) for cell, size in zip(row, widths, strict=True)
        ).rstrip()
        for row in shown
    ]
    return lines if width is None else [cut(line, width) for line in lines]


def print_table(rows: Sequence[Sequence[str]], *, fit: bool = False) -> None:
    """Print rows as aligned columns on stdout.

    Args:
        rows: the cells, the header first.
        fit: whether to cut the lines to the width of the terminal, if stdout is one.
    """
    size = terminal_size() if fit else None
    print("\n".join(table_lines(rows, None if size is None else size.columns)))
