"""Follow a job on the command line: its output, then its verdict."""

from __future__ import annotations

import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from clusterjob.backends.base import Status
from clusterjob.cli import output
from clusterjob.cli.live_progress import LiveProgress
from clusterjob.cli.output import LogPrinter, print_end, print_verdict
from clusterjob.core import job_parts, polling
from clusterjob.core.live import live
from clusterjob.core.records import Record, Records
from clusterjob.errors import UsageError
from clusterjob.node.logs.log_files import LogLine, LogReader
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

_HOLD, _MAX_HELD = 2.0, 4 << 20  # seconds and bytes for which tracebacks wait for the root cause
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Filters:
    """The lines of a job to show; None selects all.

    Attributes:
        ranks: the workers.
        nodes: the nodes.
        attempt: the attempt of the job, from 0.
        stream: ``out`` or ``err``.
        since, last: see `clusterjob.node.logs.log_files.LogReader`.
        grep: regular expression that matches in each line.
    """

    ranks: Sequence[int] | None = None
    nodes: Sequence[int] | None = None
    attempt: int | None = None
    stream: str | None = None
    since: float | None = None
    last: float | None = None
    grep: str | None = None


class Watch:
    """Show the output of one job; each call continues where the previous one stopped.

    Args:
        record: the job.
        filters: the lines to show.
        raw: show the bytes unchanged.
        prints_phases: without a terminal, print one line for each phase of the job.
        element: the first part of the lines' labels, for an element of an array.
    """

    def __init__(
        self,
        record: Record,
        filters: Filters = Filters(),
        *,
        raw: bool = False,
        prints_phases: bool = False,
        element: str = "",
    ) -> None:
        self._record = record
        self._filters = filters
        self._matching = _matching(filters.grep)
        self._reader = LogReader(
            record.job_dir,
            rank=filters.ranks,
            node=filters.nodes,
            attempt=filters.attempt,
            stream=filters.stream,
            since=filters.since,
            last=filters.last,
            raw=raw,
        )
        world_size = job_parts.world_size(record)
        job_parts.check_ranks(record, filters.ranks, world_size)
        job_parts.check_nodes(record, filters.nodes)
        self._printer = LogPrinter(world_is_one=world_size == 1, raw=raw, element=element)
        self._raw, self._has_shown = raw, False
        self._holds = not raw and (filters.ranks, filters.nodes, filters.grep) == (None,) * 3
        self._held: list[LogLine] = []
        self._held_since = 0.0
        self._progress = LiveProgress(prints_phases=prints_phases)

    def so_far(self, tail: int | None, *, follow: bool) -> None:
        """Show the output so far, or its last `tail` lines; say if the job has not started.

        If `to_the_end` follows, it shows a last line that has no newline yet.

        Raises:
            UsageError: the job has no such attempt.
        """
        polling.collect(self._record)
        self._check_attempt()
        if not follow and not self._reader.attempts():
            self._print_if_pending()
        if tail is None:
            self._printer.show_all(map(self._matching, self._reader.batches(end=not follow)))
            return
        if self._filters.grep is None:
            self._reader.skip_to_tail(tail)
        last: deque[LogLine] = deque(maxlen=tail)
        for lines in self._reader.batches(end=not follow):
            last.extend(self._matching(lines))
        self._printer.show_all([list(last)])

    def _print_if_pending(self) -> None:
        status = polling.status(self._record)
        if status.state is JobState.PENDING:
            reason = f": {status.reason}" if status.reason else ""
            output.print_message(f"job {self._record.job_id} has not started{reason}")

    def _check_attempt(self) -> None:
        wanted, known = self._filters.attempt, self._reader.attempts()
        if wanted is not None and known and wanted not in known:
            raise UsageError(
                f"job {self._record.job_id} has no output of attempt {wanted}",
                f"it has output of attempt {', '.join(map(str, sorted(known)))}",
            )

    def to_the_end(self) -> int:
        """Show the output until the job ends, then print the verdict; return the exit code."""
        live.clear_at_sigterm()
        try:
            verdict = polling.follow(
                self._record, self._show, progress=self._show_phase, reader=self._reader
            )
        finally:
            live.clear()
        folded = self._release(_effects(verdict, {line.rank for line in self._held}))
        print_verdict(self._record, verdict)
        if folded:
            ranks = ",".join(map(str, sorted(folded)))
            text = f"  their tracebacks: clusterjob logs {self._record.job_id} --rank {ranks}"
            print(sanitize(text), file=sys.stderr)
        if verdict.state is not JobState.SUCCEEDED:
            print(sanitize(f"  logs: {self._record.job_dir / 'logs'}"), file=sys.stderr)
        return verdict.exit_code

    def _show(self, batches: Iterable[list[LogLine]]) -> None:
        self._has_shown = True
        self._progress.hear()
        batches = map(self._without_tracebacks if self._holds else self._matching, batches)
        self._printer.show(batches, lambda: self._matching(self._reader.open_lines()))

    def _without_tracebacks(self, lines: list[LogLine]) -> list[LogLine]:
        """Hold the stderr of a rank from a traceback on, until the root cause is known or 2 s."""
        shown = []
        holding = {line.rank for line in self._held}
        for line in lines:
            if line.stream == "err" and (line.rank in holding or line.text.endswith(_TRACEBACK)):
                self._held_since = self._held_since if self._held else time.monotonic()
                self._held.append(line)
                holding.add(line.rank)
            else:
                shown.append(line)
        if sum(100 + len(line.text) for line in self._held) > _MAX_HELD:
            shown, self._held = self._held + shown, []
        return shown

    def _release(self, effects: Collection[int] = ()) -> set[int]:
        """Show the held lines but those of some ranks; return those of these that had lines."""
        held, self._held = self._held, []
        if held:
            self._printer.show_all([[line for line in held if line.rank not in effects]])
        return {line.rank for line in held if line.rank in effects}

    def _show_phase(self, status: Status) -> None:
        if self._held and time.monotonic() - self._held_since >= _HOLD:
            self._release()
        # The last output of --raw may have no newline.
        if not (self._raw and self._has_shown and live.has_terminal):
            self._progress.update(status, has_open_lines=self._printer.has_open_lines)


def _effects(verdict: Verdict, held: set[int]) -> set[int]:
    """Return the ranks whose tracebacks follow from another rank's, or from the same Ctrl-C."""
    root = verdict.failure.rank if verdict.failure is not None else None
    if verdict.state is JobState.CANCELLED:
        root = min(held, default=None)
    return held - {root} if root in held else set()


def _matching(expression: str | None) -> Callable[[list[LogLine]], list[LogLine]]:
    """Return a function that selects the lines with a match; all without an expression."""
    if expression is None:
        return lambda lines: lines
    from clusterjob.cli.line_search import LineSearch

    return LineSearch(expression).matching


def elements(record: Record, filters: Filters, *, raw: bool, tail: int | None, follow: bool) -> int:
    """Show the output of all elements of an array, labelled; return the exit code if followed."""
    watches = {
        one.job_id: Watch(one, filters, raw=raw, element=f"{one.index} {one.values_text}".strip())
        for one in Records().elements(record)
    }
    if tail is not None or not follow:
        for watch in watches.values():
            watch.so_far(tail, follow=follow)
    if not follow:
        return 0
    return polling.wait_for_all(
        [record],
        print_end,
        show=lambda one, ended: watches[one.job_id].so_far(None, follow=not ended),
    )


def until_end(record: Record) -> Callable[[], int]:
    """Return a function that shows a job until its end and returns its exit code.

    The function shows the output of a job, or the verdict of each element of an array. After an
    interrupt, a new call continues the output.
    """
    if record.array is not None:
        return functools.partial(polling.wait_for_all, [record], print_end)
    return Watch(record, prints_phases=True).to_the_end
