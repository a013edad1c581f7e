"""Watching a job from the command line: its output as it is written, then the verdict."""

from __future__ import annotations

import sys

from clusterjob import jobs
from clusterjob.node.logs import LogReader
from clusterjob.node.verdict import JobState
from clusterjob.output import LogPrinter, Progress, say
from clusterjob.records import Record


def follow_to_the_end(record: Record, rank: int | None = None, node: int | None = None) -> int:
    """Show a job's output until it ends, then the verdict on stderr; return the job's exit code."""
    progress = Progress()
    printer = LogPrinter(world_is_one=_world_size(record) == 1)
    try:
        verdict = jobs.follow(record, printer.show, progress.update, LogReader(record.job_dir, rank=rank, node=node))
    finally:
        progress.stop()
    say(f"job {record.job_id} {verdict.text()}")
    if verdict.state is not JobState.SUCCEEDED:
        print(f"  logs: {record.job_dir / 'logs'}", file=sys.stderr)
    return verdict.exit_code


def show_logs(record: Record, *, follow: bool, rank: int | None, node: int | None, tail: int | None) -> int:
    """Show a job's output as far as it goes, or until the job ends; return 0, or the job's exit code when it was followed."""
    printer = LogPrinter(world_is_one=_world_size(record) == 1)
    if follow and tail is None:
        return follow_to_the_end(record, rank, node)
    reader = LogReader(record.job_dir, rank=rank, node=node)
    lines = reader.finish()
    printer.show(lines if tail is None else lines[len(lines) - min(tail, len(lines)) :])
    if not follow:
        return 0
    return jobs.follow(record, printer.show, lambda _: None, reader).exit_code


def _world_size(record: Record) -> int:
    return record.nodes * int(record.spec.get("nproc_per_node", 1))
