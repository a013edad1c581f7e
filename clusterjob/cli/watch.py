"""Follow a job on the command line: its output, then its verdict."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable

from clusterjob.cli import output
from clusterjob.cli.output import LogPrinter, Progress, print_end, print_verdict
from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.errors import UsageError
from clusterjob.node.logs.log_reader import LogLine, LogReader
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState


class Watch:
    """Show the output of one job; each call continues where the previous one stopped.

    Args:
        record: the job.
        rank: show only this worker's lines; None for all.
        node: show only this node's lines; None for all.
        raw: show the bytes unchanged.
    """

    def __init__(
        self, record: Record, rank: int | None = None, node: int | None = None, *, raw: bool = False
    ) -> None:
        if record.array is not None:
            first = f"{record.job_id}_{record.array['indices'][0]}"
            raise UsageError(
                f"job {record.job_id} is an array: each element has its own output",
                f"name one, such as {first}",
            )
        self._record = record
        self._reader = LogReader(record.job_dir, rank=rank, node=node, raw=raw)
        # The world size is unknown if each node of a platform sets its own number of workers.
        world_size = (
            None if record.job.nproc_is_default else record.nodes * record.job.nproc_per_node
        )
        for label, index, count in (("rank", rank, world_size), ("node", node, record.nodes)):
            if index is not None and count is not None and index >= count:
                raise UsageError(
                    f"job {record.job_id} has no {label} {index}",
                    f"its {label}s are 0 to {count - 1}",
                )
        self._printer = LogPrinter(world_is_one=world_size == 1, raw=raw)
        self._progress = Progress()

    def so_far(self, tail: int | None, *, follow: bool) -> None:
        """Show the output so far, or its last `tail` lines.

        If `to_the_end` follows, it shows a last line that has no newline yet.
        """
        polling.collect(self._record)
        if tail is None:
            self._printer.show_all(self._reader.batches(end=not follow))
            return
        self._reader.skip_to_tail(tail)
        last: deque[LogLine] = deque(maxlen=tail)
        for lines in self._reader.batches(end=not follow):
            last.extend(lines)
        self._printer.show_all([list(last)])

    def to_the_end(self) -> int:
        """Show the output until the job ends, then print the verdict; return the exit code."""
        try:
            verdict = polling.follow(
                self._record, self._show, progress=self._progress.update, reader=self._reader
            )
        finally:
            self._progress.stop()
            output.live_lines.clear()
        print_verdict(self._record, verdict)
        if verdict.state is not JobState.SUCCEEDED:
            print(sanitize(f"  logs: {self._record.job_dir / 'logs'}"), file=sys.stderr)
        return verdict.exit_code

    def _show(self, batches: Iterable[list[LogLine]]) -> None:
        self._progress.stop()  # the spinner and the output share the terminal
        self._printer.show(batches, self._reader.open_lines)


def until_end(record: Record) -> Callable[[], int]:
    """Return a function that shows a job until its end and returns its exit code.

    The function shows the output of a job, or the verdict of each element of an array. After an
    interrupt, a new call continues the output.
    """
    if record.array is not None:
        return functools.partial(polling.wait_for_all, [record], print_end)
    return Watch(record).to_the_end
