"""The screens above the live screen: help, a question, the log of a job, stacks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen, Screen
from textual.widgets import Footer, Label, RichLog, Static

from clusterjob.node.logs.log_files import LogLine, LogReader
from clusterjob.node.system.sanitize import sanitize

_POLL = 0.5  # seconds between two readings of a log
_TAIL = 500  # lines of each file that the log view begins with
_MAX_LINES = 5000  # lines that a log view keeps
_MAX_BATCH = 2000  # lines of one reading that are shown; more cannot be read by anyone
_MAX_COLUMNS = 2000  # characters of a line

HELP = """\
Tab, Shift-Tab  next table, table before
arrows, PgUp, PgDn, Home, End: move the cursor
Enter           of a job: its ranks; of a node or a rank: its log
l               log of the row; it follows new lines
t               stacks of the row's processes, equal ones together
c               cancel the job, after a question
s, S            sort by the next column, by the one before
r               reverse the order
/               show only rows with a text; Esc ends it
Space           stop and continue the refresh
q, Ctrl-C       quit; jobs continue

Mouse: click a row, a header or a key; a double click opens a row.

SILENT          time since the last output
CPU%            of a rank: of one core; of a node: of all its cores
GPU%            share of the time in which a kernel ran
no data         the metrics of a node do not arrive any more
"""


class HelpScreen(ModalScreen[None]):
    """The keys of the live screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,question_mark,enter,space", "app.pop_screen", "Back"),
    ]

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        with VerticalScroll(classes="dialog"):
            yield Label("Keys of clusterjob top", classes="heading")
            yield Static(HELP, markup=False)


class Question(ModalScreen[bool]):
    """A question that y answers with yes, and any other answer with no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,q,enter", "dismiss(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        with Vertical(classes="dialog"):
            yield Static(self._text, markup=False)
            yield Static("")
            yield Static("y  yes      n  no", markup=False, classes="heading")


class LogScreen(Screen[None]):
    """The last lines of a log, and each new line; the end of the view follows them.

    Args:
        title: what is shown.
        reader: source of the lines.
        labels: whether each line begins with its rank.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "app.pop_screen", "Back", key_display="q"),
        Binding("f,end,G", "follow", "Follow", key_display="f"),
        Binding("home,g", "begin", "Begin", key_display="g"),
        Binding("w", "wrap", "Wrap"),
    ]

    class Lines(Message):
        """New lines."""

        def __init__(self, lines: Sequence[LogLine]) -> None:
            super().__init__()
            self.lines = lines

    def __init__(self, title: str, reader: LogReader, *, labels: bool) -> None:
        super().__init__()
        self._title = title
        self._reader = reader
        self._labels = labels
        self._left = threading.Event()
        self._empty = True

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield Static(self._title, markup=False, classes="bar")
        yield RichLog(max_lines=_MAX_LINES, min_width=1, wrap=True, auto_scroll=True)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        """Start to read."""
        log = self.query_one(RichLog)
        log.focus()
        log.write(Text("(no output yet)"))
        threading.Thread(target=self._read, name="top-log", daemon=True).start()

    def on_unmount(self) -> None:
        """Stop to read."""
        self._left.set()

    def _read(self) -> None:
        self._reader.skip_to_tail(_TAIL)
        while not self._left.is_set():
            lines: list[LogLine] = []
            for batch in self._reader.batches(end=False):
                lines = [*lines, *batch][-_MAX_BATCH:]
            if lines and not self._left.is_set():
                self.post_message(self.Lines(lines))
            self._left.wait(_POLL)

    def on_log_screen_lines(self, message: Lines) -> None:
        """Append new lines."""
        log = self.query_one(RichLog)
        if self._empty:
            self._empty = False
            log.clear()
        at_end = log.is_vertical_scroll_end
        for line in message.lines:
            text = sanitize(line.text[:_MAX_COLUMNS], colours=True)
            name = f"[{line.rank}] " if self._labels else ""
            shown = Text(name, style="bold" if name else "")
            shown.append_text(Text.from_ansi(text))
            log.write(shown, scroll_end=at_end)

    def action_follow(self) -> None:
        """Go to the end, where the view follows new lines."""
        self.query_one(RichLog).scroll_end(animate=False)

    def action_begin(self) -> None:
        """Go to the first line that was kept."""
        self.query_one(RichLog).scroll_home(animate=False)

    def action_wrap(self) -> None:
        """Wrap long lines that follow, or do not."""
        log = self.query_one(RichLog)
        log.wrap = not log.wrap


class TextScreen(Screen[None]):
    """A text that a background thread computes, such as stacks.

    Args:
        title: what is shown.
        compute: returns the text; an exception is shown instead of it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "app.pop_screen", "Back", key_display="q"),
        Binding("t", "again", "Again"),
    ]

    class Computed(Message):
        """The text is there."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, title: str, compute: Callable[[], str]) -> None:
        super().__init__()
        self._title = title
        self._compute = compute
        self._computing = False

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield Static(self._title, markup=False, classes="bar")
        with VerticalScroll():
            yield Static("", id="text", markup=False)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        """Start to compute."""
        self.action_again()

    def action_again(self) -> None:
        """Compute the text again."""
        if not self._computing:
            self._computing = True
            self.query_one("#text", Static).update("asking the processes …")
            threading.Thread(target=self._run, name="top-text", daemon=True).start()

    def _run(self) -> None:
        from clusterjob.errors import ClusterJobError

        try:
            text = self._compute()
        except ClusterJobError as error:
            text = error.message + (f"\nhint: {error.hint}" if error.hint else "")
        except Exception as error:  # the screen shows it instead of ending
            text = f"{type(error).__name__}: {error}"
        self.post_message(self.Computed(sanitize(text, lines=True)))

    def on_text_screen_computed(self, message: Computed) -> None:
        """Show the text."""
        self._computing = False
        self.query_one("#text", Static).update(Text(message.text))
