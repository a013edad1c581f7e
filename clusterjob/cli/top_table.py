"""A table of the live screen: sorted, filtered, with the columns that fit into its width."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from clusterjob.cli.tables import cut, width_of

_Row = TypeVar("_Row")
_Row_contra = TypeVar("_Row_contra", contravariant=True)  # a column may serve several types of rows
_GAP = 2  # blanks between columns
_BROAD, _SHORT_TREND = 120, 8  # a narrower table has short sparklines, of this width
_BARS = "▁▂▃▄▅▆▇█"
_HEAD = Style(bold=True, underline=True)
_CURSOR, _CURSOR_ELSEWHERE = Style(reverse=True), Style(bold=True)


@dataclass(frozen=True)
class Column(Generic[_Row_contra]):
    """A column.

    Attributes:
        title: its header, which also names it.
        text: returns the text of a cell.
        priority: columns with high numbers are left out first if the width is not enough.
        width: maximum width; the column is narrower if all of its cells are.
        key: returns the sort key; None sorts by the text.
        style: returns the style of a cell, such as ``red``; empty for the usual one.
        right: whether the text is aligned to the right.
        wide: whether the column takes the rest of the width.
        steady: whether the column has its maximum width also while its cells are shorter.
        trend: returns values to draw as a sparkline instead of the text.
        descending: whether it is sorted from the largest value at first.
    """

    title: str
    text: Callable[[_Row_contra], str]
    priority: int = 1
    width: int = 10
    key: Callable[[_Row_contra], Any] | None = None
    style: Callable[[_Row_contra], str] | None = None
    right: bool = False
    wide: bool = False
    steady: bool = False
    trend: Callable[[_Row_contra], Sequence[float]] | None = None
    descending: bool = False


def sparkline(values: Sequence[float], width: int, top: float = 100.0) -> str:
    """Return the last values as bars, right-aligned.

    Args:
        values: the values, the oldest first.
        width: number of characters.
        top: the value of a full bar; a larger value raises it.
    """
    shown = values[-width:]
    top = max([top, *shown])
    bars = (_BARS[max(0, min(7, round(value / top * 7)))] for value in shown)
    return "".join(bars).rjust(width)


class LiveTable(ScrollView, Generic[_Row]):
    """A table whose rows are replaced at each refresh; its cursor stays on the same row.

    Only the visible rows are drawn, so a refresh costs the same with 2 and with 256 rows.

    Args:
        columns: the columns; the table is sorted by the first one until `sort_by`.
        identity: returns the name of a row, which stays the same at each refresh.
    """

    DEFAULT_CSS = "LiveTable { overflow-x: hidden; scrollbar-size-vertical: 1; }"
    can_focus = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "move(-1_000_000_000)", "Top", show=False),
        Binding("end,G", "move(1_000_000_000)", "Bottom", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, table: LiveTable[Any]) -> None:
            super().__init__()
            self.table = table

    class Opened(Moved):
        """A row was clicked twice."""

    def __init__(
        self,
        columns: Sequence[Column[_Row]],
        identity: Callable[[_Row], str],
        *,
        id: str,  # noqa: A002 - Textual's name for it
        sort: bool = True,
    ) -> None:
        super().__init__(id=id)
        self._columns = columns
        self._identity = identity
        self._rows: list[_Row] = []
        self._visible: list[_Row] = []
        self._widths: list[tuple[Column[_Row], int]] = []
        self._cursor = 0
        self._current = ""
        self._sorted: Column[_Row] | None = columns[0] if sort else None
        self._descending = False
        self.filter_text = ""

    # -- rows --------------------------------------------------------------------------------------

    def set_rows(self, rows: Sequence[_Row]) -> None:
        """Replace the rows."""
        self._rows = list(rows)
        self._arrange()

    @property
    def current(self) -> _Row | None:
        """The row of the cursor; None in an empty table."""
        return self._visible[self._cursor] if self._cursor < len(self._visible) else None

    @property
    def shown(self) -> int:
        """The number of rows that match the filter."""
        return len(self._visible)

    def set_filter(self, text: str) -> None:
        """Show only rows with this text in one of their cells, in any case of letters."""
        self.filter_text = text
        self._arrange()

    def sort_by(self, step: int) -> None:
        """Sort by the next visible column, or by the one before."""
        columns = [column for column, _ in self._widths if column.trend is None]
        now = columns.index(self._sorted) if self._sorted in columns else -1
        self._sort(columns[(now + step) % len(columns)])

    def reverse(self) -> None:
        """Reverse the order."""
        if self._sorted is not None:
            self._descending = not self._descending
            self._arrange()

    def _sort(self, column: Column[_Row]) -> None:
        if column is self._sorted:
            self._descending = not self._descending
        else:
            self._sorted, self._descending = column, column.descending
        self._arrange()

    def _arrange(self) -> None:
        """Filter and sort the rows, and keep the cursor on its row."""
        rows = self._rows
        if self.filter_text:
            wanted = self.filter_text.casefold()
            rows = [
                row
                for row in rows
                if any(wanted in column.text(row).casefold() for column in self._columns)
            ]
        if self._sorted is not None:
            rows = _in_order(rows, self._sorted, descending=self._descending)
        before = self._current
        self._visible = list(rows)
        places = {self._identity(row): place for place, row in enumerate(self._visible)}
        self._cursor = places.get(before, min(self._cursor, max(0, len(self._visible) - 1)))
        self._layout()
        self._note_cursor()

    def _note_cursor(self) -> None:
        row = self.current
        now = "" if row is None else self._identity(row)
        if now != self._current:
            self._current = now
            self.post_message(self.Moved(self))

    # -- keys and mouse ----------------------------------------------------------------------------

    def action_move(self, step: int) -> None:
        """Move the cursor by this many rows."""
        self._cursor = max(0, min(len(self._visible) - 1, self._cursor + step))
        self._show_cursor()
        self._note_cursor()
        self.refresh()

    def action_page(self, pages: int) -> None:
        """Move the cursor by this many pages."""
        self.action_move(pages * max(1, self.size.height - 2))

    def on_click(self, event: events.Click) -> None:
        """Sort by the column of the header, or move the cursor; open the row of a double click."""
        if event.y == 0:
            begin = 1
            for column, width in self._widths:
                if event.x < begin + width + _GAP:
                    self._sort(column)
                    return
                begin += width + _GAP
            return
        row = int(self.scroll_offset.y) + event.y - 1
        if row < len(self._visible):
            self.action_move(row - self._cursor)
            if event.chain > 1:
                self.post_message(self.Opened(self))

    def _show_cursor(self) -> None:
        page = max(1, self.size.height - 1)
        top = int(self.scroll_offset.y)
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + page:
            self.scroll_to(y=self._cursor - page + 1, animate=False)

    # -- drawing -----------------------------------------------------------------------------------

    def on_resize(self) -> None:
        """Choose the columns again."""
        self._layout()
        self._show_cursor()

    def _layout(self) -> None:
        """Choose the columns that fit and are not empty, and their widths."""
        room = self.scrollable_content_region.width - 1  # the first column is the cursor's mark
        widths: dict[str, int] = {}
        for column in sorted(self._columns, key=lambda column: column.priority):
            width = self._width_of(column)
            used = sum(widths.values()) + _GAP * len(widths)
            if width and (not widths or used + width <= room):
                widths[column.title] = width
        rest = max(0, room - sum(widths.values()) - _GAP * (len(widths) - 1))
        self._widths = [
            (column, widths[column.title] + rest * column.wide)
            for column in self._columns
            if column.title in widths
        ]
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._visible) + 1)
        self.refresh()

    def _width_of(self, column: Column[_Row]) -> int:
        """Return the width that a column needs; 0 if all of its cells are empty."""
        if column.wide:
            return column.width
        if column.trend is not None:
            if not any(column.trend(row) for row in self._visible):
                return 0
            return _SHORT_TREND if self.size.width < _BROAD else column.width
        longest = max((width_of(column.text(row)) for row in self._visible), default=0)
        if longest == 0 and self._visible:
            return 0
        return max(len(column.title), column.width if column.steady else min(column.width, longest))

    def render_line(self, y: int) -> Strip:
        """Draw one line: the header, or a row."""
        width = self.scrollable_content_region.width
        if y == 0:
            return self._head().adjust_cell_length(width, _HEAD)
        place = int(self.scroll_offset.y) + y - 1
        if place >= len(self._visible):
            return Strip.blank(width)
        row, base = self._visible[place], Style()
        is_cursor = place == self._cursor
        if is_cursor:
            base = _CURSOR if self.has_focus else _CURSOR_ELSEWHERE
        parts = [Segment("▶" if is_cursor else " ", base)]
        for number, (column, size) in enumerate(self._widths):
            style = column.style(row) if column.style is not None else ""
            # A reversed line has one colour, so that it can be read.
            shown = base if is_cursor and self.has_focus else base + Style.parse(style)
            if column.trend is not None:
                text = sparkline(column.trend(row), size)
            else:
                text = _fitted(column.text(row), size, right=column.right)
            gap = _GAP if number < len(self._widths) - 1 else 0
            parts += [Segment(text, shown), Segment(" " * gap, base)]
        return Strip(parts).adjust_cell_length(width, base)

    def _head(self) -> Strip:
        parts = [Segment(" ", _HEAD)]
        for column, width in self._widths:
            mark = ("▼" if self._descending else "▲") if column is self._sorted else ""
            title = (column.title.rjust(width) if column.right else column.title) + mark
            parts.append(Segment(_fitted(title, width + _GAP, right=False), _HEAD))
        return Strip(parts)


def _in_order(rows: Sequence[_Row], column: Column[_Row], *, descending: bool) -> list[_Row]:
    """Return rows in the order of a column; rows without a value are last."""
    key = column.key or column.text
    known = [row for row in rows if key(row) is not None]
    return sorted(known, key=key, reverse=descending) + [row for row in rows if key(row) is None]


def _fitted(text: str, width: int, *, right: bool) -> str:
    text = cut(text.replace("\t", " "), width, mark="…")  # a tab would move the rest of the line
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks
