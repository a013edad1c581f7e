"""Cancel jobs with scancel; repeat the cancels that Slurm has not answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from clusterjob.backends import job_progress, shared
from clusterjob.backends.slurm import status
from clusterjob.backends.slurm.client import Client, SlurmOutput
from clusterjob.backends.slurm.squeue import QueueSnapshot
from clusterjob.core import arrays
from clusterjob.core.records import Record
from clusterjob.errors import SubmitError
from clusterjob.node.logs import ends

_SLACK = 1.0  # seconds for a busy machine
_AT_ONCE = 1000  # maximum number of ids on one command line


def cancel(client: Client, jobs: Mapping[str, Record]) -> None:
    """Cancel the jobs of one cluster.

    If Slurm does not answer, the jobs' agents stop them, and `repeat_pending` repeats the cancel.

    Args:
        client: runs scancel.
        jobs: the jobs by their ids in Slurm.

    Raises:
        SubmitError: Slurm refuses; or Slurm does not answer, and a job has no agents.
    """
    if (answer := _run(client, list(jobs))) is None:
        return
    if not answer.silent:
        raise SubmitError(f"Slurm does not cancel the job: {answer.message}")
    for record in jobs.values():
        status.note_pending_cancel(record)
    without = [record.job_id for record in jobs.values() if not status.has_agents(record)]
    message = f"Slurm does not answer: {answer.message}"
    if without:
        raise SubmitError(
            f"{message}; job {without[0]} has no agents that could stop it",
            "the next `clusterjob status` repeats the cancel",
        )
    shared.warn(
        f"{message}; the job's agents stop it, and the next `clusterjob status` repeats the cancel"
    )


def wait_for_stacks(
    records: Sequence[Record], refresh: Callable[[Sequence[Record]], object]
) -> None:
    """Wait until the agents have saved the stacks of the workers: scancel signals those too.

    Without a request for stacks, return at once.

    Args:
        records: the jobs.
        refresh: fetches new data of jobs whose directories are on a login host.
    """
    until = time.monotonic() + ends.REQUEST_SECONDS + ends.STACKS_SECONDS + _SLACK
    wanted = [record for record in records if ends.stacks_wanted(record.job_dir)]
    refresh(wanted)
    wanted = [
        record for record in wanted if job_progress.progress(record.job_dir).started_at is not None
    ]
    while wanted and time.monotonic() < until:
        time.sleep(0.1)
        refresh(wanted)
        wanted = [record for record in wanted if ends.read_result(record.job_dir) is None]


def repeat_pending(client: Client, records: Sequence[Record], snapshot: QueueSnapshot) -> None:
    """Repeat the cancels that Slurm has not answered; keep them if it does not answer again."""
    pending = [record for record in records if status.has_pending_cancel(record)]
    ids = [
        record.handle.id
        for record in pending
        if record.handle is not None and status.is_active(snapshot, record, handle=record.handle)
    ]
    if ids and (answer := _run(client, ids)) is not None and answer.silent:
        return
    for record in pending:
        status.clear_pending_cancel(record)


def _run(client: Client, keys: Sequence[str]) -> SlurmOutput | None:
    """Cancel jobs with scancel; return its answer if it failed, else None.

    A job that has already ended does not count as a failure.
    """
    words = _ids(keys)
    for begin in range(0, len(words), _AT_ONCE):
        answer = client.run(["scancel", *words[begin : begin + _AT_ONCE]])
        if (
            answer.code != 0
            and "Invalid job id" not in answer.err
            and "already completing" not in answer.err
        ):
            return answer
    return None


def _ids(keys: Sequence[str]) -> list[str]:
    """Return job ids in scancel's format: the elements of one array as ``12_[0-3,7]``."""
    words = [key for key in keys if "_" not in key]
    elements: dict[str, list[int]] = {}
    for key in keys:
        base, separator, index = key.partition("_")
        if separator:
            elements.setdefault(base, []).append(int(index))
    for base, indices in elements.items():
        words += [f"{base}_[{part}]" for part in arrays.ranges_text(sorted(indices)).split(",")]
    return words
