"""Tell that a running job has been silent for long: it may hang."""

from __future__ import annotations

from clusterjob.backends.base import Status
from clusterjob.core.records import Record
from clusterjob.core.times import show_duration
from clusterjob.insight import sample_files
from clusterjob.node.logs import log_files
from clusterjob.node.verdict import JobState

LONG = 600.0  # seconds without output and heartbeat


def hint(record: Record, status: Status) -> str:
    """Return one line about a running job without output for 10 minutes; else an empty text.

    The agents measure the silence: it is in their last samples.
    """
    if status.state is not JobState.RUNNING:
        return ""
    latest = [sample_files.latest(record.job_dir, node) for node in log_files.nodes(record.job_dir)]
    found = [each for each in latest if each is not None]
    attempt = max((facts.attempt for facts, _ in found), default=0)
    quiet = min((sample.quiet for facts, sample in found if facts.attempt == attempt), default=0.0)
    if quiet < LONG:
        return ""
    minutes = show_duration(quiet).partition(" ")[0]
    return f"no output for {minutes}: `clusterjob stacks {record.job_id}` shows what its ranks do"
