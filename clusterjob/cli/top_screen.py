"""The live screen of `top`: jobs, and the nodes and ranks of the chosen job."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import Footer, Input, Static

from clusterjob.cli.top_columns import (
    JOB_COLUMNS,
    NODE_COLUMNS,
    job_lines,
    rank_columns,
    title_line,
)
from clusterjob.cli.top_dialogs import HelpScreen, LogScreen, Question, TextScreen
from clusterjob.cli.top_table import LiveTable
from clusterjob.core.record_index import ListRow
from clusterjob.core.records import Record
from clusterjob.insight.live_jobs import JobNow, JobPoller, Snapshot
from clusterjob.insight.live_node import NodeNow, RankNow
from clusterjob.node.logs.log_files import LogReader

_OF_MAIN_SCREEN = {
    "keys", "filter", "sort", "reverse", "log", "stacks", "cancel", "pause", "open", "end_filter",
    "leave",
}  # fmt: skip
_SHARE = 4  # the tables of jobs and of nodes each have at most this part of the screen


class Top(App[None]):
    """The live screen.

    Args:
        wanted: the jobs to show; see `JobPoller`.
    """

    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    .bar, #title { height: 1; text-style: bold; }
    #title { text-style: none; }
    #summary, #matter { height: 1; }
    #summary { margin-top: 1; }
    #ranks { height: 1fr; min-height: 2; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    RichLog { background: ansi_default; overflow-y: auto; }
    VerticalScroll { background: ansi_default; }
    ModalScreen { align: center middle; background: transparent; }
    .dialog { border: round ansi_blue; background: ansi_default; padding: 0 1;
              width: 76; max-width: 100%; height: auto; max-height: 100%; }
    .heading { text-style: bold; }
    """
    ENABLE_COMMAND_PALETTE = False
    # With priority, a key acts before the next one: "/abc" may be typed at once.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit", priority=True),
        Binding("ctrl+c", "exit", "Quit", show=False, priority=True),
        Binding("question_mark", "keys", "Help", key_display="?", priority=True),
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("s", "sort(1)", "Sort", priority=True),
        Binding("S", "sort(-1)", "Sort back", show=False, priority=True),
        Binding("r", "reverse", "Reverse", priority=True),
        Binding("l", "log", "Log", priority=True),
        Binding("t", "stacks", "Stacks", priority=True),
        Binding("c", "cancel", "Cancel", priority=True),
        Binding("space", "pause", "Pause", show=False, priority=True),
        Binding("enter", "open", "Open", show=False, priority=True),
        Binding("escape", "end_filter", "End the filter", show=False, priority=True),
    ]

    class Changed(Message):
        """A new snapshot is there."""

    def __init__(self, wanted: Sequence[Record] | None) -> None:
        super().__init__(ansi_color=True)
        self.crash: Exception | None = None
        self._failed: set[int] = set()
        self._stragglers: set[int] = set()
        self._paused = False
        self._live = JobPoller(wanted, self._tell)
        self._job_table: LiveTable[ListRow] = LiveTable(
            JOB_COLUMNS, lambda row: row.job_id, id="jobs", sort=False
        )
        self._node_table: LiveTable[NodeNow] = LiveTable(
            NODE_COLUMNS, lambda node: str(node.node_rank), id="nodes"
        )
        self._rank_table: LiveTable[RankNow] = LiveTable(
            rank_columns(self._failed, self._stragglers),
            lambda rank: str(rank.rank),
            id="ranks",
        )
        self._filtered: LiveTable[Any] = self._rank_table  # the table of the filter's text

    # -- life --------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Build the widgets."""
        yield Static("", id="title", markup=False)
        yield self._job_table
        yield Static("", id="summary", markup=False)
        yield Static("", id="matter", markup=False)
        yield self._node_table
        yield self._rank_table
        yield Input(id="filter", placeholder="text; Enter keeps the filter, Esc ends it")
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        """Begin to poll; leave the terminal clean at a signal."""
        self.theme = "ansi-dark"  # the terminal's own colours
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, self.exit, None, 128 + number)
            loop.add_signal_handler(signal.SIGINT, self.exit)
        self._draw(self._live.snapshot)
        self._job_table.focus()
        self._live.start()

    def on_unmount(self) -> None:
        """Stop to poll."""
        self._live.close()

    def _handle_exception(self, error: Exception) -> None:
        """End the screen; the command then reports the error as any other."""
        self.crash = self.crash or error
        self.panic()  # without a text

    def _tell(self) -> None:
        """Wake the screen; a background thread calls it."""
        self.post_message(self.Changed())

    # -- data --------------------------------------------------------------------------------------

    def on_top_changed(self) -> None:
        """Show the new snapshot."""
        if not self._paused:
            self._draw(self._live.snapshot)

    def _draw(self, snapshot: Snapshot) -> None:
        self._job_table.set_rows(snapshot.jobs or ())
        job = snapshot.chosen
        row = self._job_table.current
        if job is not None and row is not None and job.record.job_id != row.job_id:
            job = None  # of the row before; the chosen one is being read
        verdict = None if job is None else job.verdict
        self._failed.clear()
        if verdict is not None and verdict.failure is not None and verdict.failure.rank is not None:
            self._failed.add(verdict.failure.rank)
        self._stragglers.clear()
        if job is not None and job.status is not None:
            self._stragglers.update(each.rank for each in job.status.stragglers)
        self._node_table.set_rows(() if job is None else job.nodes)
        self._rank_table.set_rows(() if job is None else job.ranks)
        head, matter = job_lines(job)
        self.query_one("#title", Static).update(title_line(snapshot, paused=self._paused))
        self.query_one("#summary", Static).update(head)
        self.query_one("#matter", Static).update(matter)
        self._share_height()

    def _share_height(self) -> None:
        """Give the tables of jobs and nodes the lines that they need, up to their share."""
        most = max(3, self.size.height // _SHARE)
        for table in (self._job_table, self._node_table):
            table.styles.height = max(2, min(most, table.shown + 1))

    def on_resize(self, _event: events.Resize) -> None:
        """Divide the lines again."""
        self._share_height()

    def on_live_table_moved(self, message: LiveTable.Moved) -> None:
        """Choose the job of the cursor."""
        row = self._job_table.current
        if message.table is self._job_table and row is not None:
            self._live.choose(row.job_id)
            self._draw(self._live.snapshot)

    def on_live_table_opened(self) -> None:
        """Open a row that was clicked twice."""
        self.action_open()

    # -- keys --------------------------------------------------------------------------------------

    @property
    def _table(self) -> LiveTable[Any]:
        """The table with the focus."""
        return self.focused if isinstance(self.focused, LiveTable) else self._rank_table

    @property
    def _job(self) -> JobNow | None:
        """The chosen job."""
        job, row = self._live.snapshot.chosen, self._job_table.current
        return job if job is not None and row and job.record.job_id == row.job_id else None

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Take the keys of the main screen away from the screens above it, and from a text."""
        if action in _OF_MAIN_SCREEN:
            typing = isinstance(self.focused, Input) and action != "end_filter"
            return len(self.screen_stack) == 1 and not typing
        return super().check_action(action, parameters)

    def action_exit(self) -> None:
        """End all screens."""
        self.exit()

    def action_leave(self) -> None:
        """End the screen; jobs continue."""
        self.exit()

    def action_keys(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())

    def action_open(self) -> None:
        """Go from a job to its ranks; open the log of a node or a rank."""
        if self._table is self._job_table:
            self.screen.set_focus(self._rank_table)
        else:
            self.action_log()

    def action_sort(self, step: int) -> None:
        """Sort the table by another column."""
        self._table.sort_by(step)

    def action_reverse(self) -> None:
        """Reverse the order of the table."""
        self._table.reverse()

    def action_pause(self) -> None:
        """Stop or continue to refresh the screen."""
        self._paused = not self._paused
        self._draw(self._live.snapshot)

    def action_filter(self) -> None:
        """Ask for the text that rows must have."""
        field = self.query_one("#filter", Input)
        self._filtered = self._table
        field.display = True
        field.value = self._filtered.filter_text
        self.screen.set_focus(field)  # at once: the next keys are for it

    def action_end_filter(self) -> None:
        """Show all rows again."""
        field = self.query_one("#filter", Input)
        if field.has_focus:
            self._filtered.set_filter("")
            self._close_filter()
        else:
            self._table.set_filter("")
        self._share_height()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        if event.input.display:
            self._filtered.set_filter(event.value)

    def on_input_submitted(self) -> None:
        """Keep the filter."""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.screen.set_focus(self._filtered)

    def action_log(self) -> None:
        """Show the log of the selected rank, node or job."""
        job = self._job
        if job is None:
            return
        rank, node, what = self._selected()
        reader = LogReader(job.record.job_dir, rank=rank, node=node)
        labels = rank is None and len(job.ranks) > 1
        self.push_screen(LogScreen(f"log of {what}", reader, labels=labels))

    def action_stacks(self) -> None:
        """Show the stacks of the selected rank, node or job."""
        job = self._job
        if job is None:
            return
        rank, node, what = self._selected()

        def compute() -> str:
            from clusterjob.insight.stacks import of_job
            from clusterjob.node.stacks import grouping

            wanted = None if rank is not None else node
            found = of_job(job.record, node=wanted, rank=rank, native=False)
            lines = grouping.text(found.stacks, all_threads=rank is not None)
            notes = (found.saved, *found.warnings, *found.errors)
            return "\n".join([*lines, "", *filter(None, notes)])

        self.push_screen(TextScreen(f"stacks of {what}", compute))

    def _selected(self) -> tuple[int | None, int | None, str]:
        """Return the rank and the node of the selected row, and their names."""
        job, table = self._job, self._table
        name = "" if job is None else job.record.job_id
        if table is self._rank_table and (rank := self._rank_table.current) is not None:
            return rank.rank, rank.node_rank, f"rank {rank.rank} of {name}"
        if table is self._node_table and (node := self._node_table.current) is not None:
            return None, node.node_rank, f"node {node.node_rank} of {name}"
        return None, None, name

    def action_cancel(self) -> None:
        """Ask, then cancel the chosen job."""
        job = self._job
        if job is None:
            return
        if job.verdict is not None:
            self.notify(f"job {job.record.job_id} has ended already", markup=False)
            return
        record = job.record

        def answered(yes: bool | None) -> None:  # noqa: FBT001 - Textual calls it
            if yes:
                self.notify(f"cancelling {record.job_id}", markup=False)
                self._live.cancel(record, lambda error: self._cancelled(record, error))

        self.push_screen(Question(f"Cancel job {record.job_id} on all of its nodes?"), answered)

    def _cancelled(self, record: Record, error: str) -> None:
        if error:
            text = f"{record.job_id} is not cancelled: {error}"
            self.call_from_thread(self.notify, text, severity="error", markup=False)
