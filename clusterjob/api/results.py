"""Read the results of a function's job, from this machine or from the job's hosts."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from clusterjob.api import outcomes
from clusterjob.api.waiting import BACKENDS
from clusterjob.backends import base
from clusterjob.core import job_parts
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, JobFailed
from clusterjob.node.logs.job_dir import OUTCOMES
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import call
from clusterjob.worker.call import CallOutcome

PROGRAM = Program("module", call.__name__)
MAX_PLAIN = 64_000_000  # bytes of JSON that the hosts of a job may send
MAX_PICKLED = 1_000_000_000  # bytes of pickles that the hosts of a job may send


class JobCancelled(JobFailed, CancelledError):
    """The job was cancelled; also a `concurrent.futures.CancelledError`."""


def value(record: Record, verdict: Verdict, *, trust: bool) -> Any:
    """Return the value of rank 0 of an ended job.

    Args:
        record: the job.
        verdict: its verdict.
        trust: whether to unpickle results that other machines have written.

    Raises:
        Exception: the function's exception.
        JobFailed: the job failed in another way, or the value is only in a pickle.
        ClusterJobError: the host that has the value does not answer.
    """
    return _values(record, verdict, [0], trust=trust)[0]


def values(record: Record, verdict: Verdict, *, trust: bool) -> list[Any]:
    """Return the values of all ranks of an ended job, in rank order; see `value`."""
    world_size = _world_size(record, verdict.attempt)
    return _values(record, verdict, range(world_size), trust=trust)


def _values(record: Record, verdict: Verdict, ranks: Sequence[int], *, trust: bool) -> list[Any]:
    if (error := exception(record, verdict, trust=trust)) is not None:
        raise error
    found = _read(record, ranks, attempt=verdict.attempt, trust=trust)
    _check_plain(record, found)
    return outcomes.complete(found, f"job {record.job_id}")


def returned(record: Record, verdict: Verdict) -> Any:
    """Return the value that a program's job wrote for rank 0; None if it wrote none.

    Raises:
        JobFailed: the job did not succeed, or the value is no plain data and another machine has
            written it.
    """
    if verdict.state is not JobState.SUCCEEDED:
        raise _error_of(record, verdict, None)
    found = _read(record, [0], attempt=verdict.attempt, trust=False)
    _check_plain(record, found)
    return None if found[0] is None else found[0].value


def _check_plain(record: Record, found: Mapping[int, CallOutcome | None]) -> None:
    """Raise JobFailed for a value that is only in a pickle."""
    for rank, outcome in found.items():
        if outcome is not None and outcome.pickled:
            raise JobFailed(
                f"the result of rank {rank} of job {record.job_id} is not plain data:"
                f" {sanitize(outcome.pickled)}",
                "return numbers, texts, lists, tuples and dicts; trust_results=True unpickles what"
                " the host sends",
            )


def _error_of(record: Record, verdict: Verdict, outcome: CallOutcome | None) -> BaseException:
    return outcomes.error_of(
        verdict, outcome, name=f"job {record.job_id}", hint=_show_output(record)
    )


def _show_output(record: Record) -> str:
    return f"clusterjob logs {record.job_id} shows its output"


def exception(record: Record, verdict: Verdict, *, trust: bool) -> BaseException | None:
    """Return the exception that `value` raises for a job that did not succeed, else None.

    Raises:
        ClusterJobError: the record is of a script's job, or the host does not answer.
    """
    if record.job.program != PROGRAM:
        raise ClusterJobError(
            f"job {record.job_id} runs a program, which has no result",
            "wait() returns its verdict, and logs() its output",
        )
    if verdict.state is JobState.SUCCEEDED:
        return None
    if verdict.state is JobState.CANCELLED:
        reason = sanitize(verdict.reason, lines=True)
        return JobCancelled(f"job {record.job_id} CANCELLED: {reason}", _show_output(record))
    rank = verdict.failure.rank if verdict.failure is not None else None
    counts = _counts(record)
    world_size = outcomes.MAX_WORLD_SIZE if counts is None else sum(counts.values())
    outcome = None
    if rank is not None and 0 <= rank < world_size:
        outcome = _read(record, [rank], attempt=verdict.attempt, trust=trust)[rank]
    return _error_of(record, verdict, outcome)


def _world_size(record: Record, attempt: int) -> int:
    """Return the number of workers; where the nodes have counted them, rank 0 has written it."""
    if (counts := _counts(record)) is not None:
        return sum(counts.values())
    first = _read(record, [0], attempt=attempt, trust=False)[0]
    return record.nodes if first is None or first.world_size is None else first.world_size


def _counts(record: Record) -> dict[int, int] | None:
    """Return the number of workers of each node, in rank order; None if each counts its own."""
    job = record.job
    if job.nproc_word:
        return None
    if len({host.slots for host in job.hosts}) > 1:  # a host file with different slots
        return {node: job.hosts[node].slots or 1 for node in job_parts.nodes_with_workers(record)}
    return dict.fromkeys(job_parts.nodes_with_workers(record), job.nproc_per_node)


def _read(
    record: Record, ranks: Sequence[int], attempt: int, *, trust: bool
) -> dict[int, CallOutcome | None]:
    """Return the outcome of each rank; None for a rank that wrote none."""
    plain = _files(record, ranks, attempt=attempt, suffix="json", most=MAX_PLAIN)
    if plain is None:
        return {
            rank: outcomes.read_outcome(record.job_dir, rank, attempt=attempt) for rank in ranks
        }
    found: dict[int, CallOutcome | None] = {
        rank: outcomes.from_json(plain[rank], rank) if rank in plain else None for rank in ranks
    }
    pickled = [
        rank
        for rank, one in found.items()
        if one is not None and (one.failure is not None or one.pickled)
    ]
    if trust and pickled:
        pickles = _files(record, pickled, attempt=attempt, suffix="pkl", most=MAX_PICKLED)
        found |= {rank: outcomes.from_pickle(data, rank) for rank, data in (pickles or {}).items()}
    return found


def _files(
    record: Record, ranks: Sequence[int], attempt: int, suffix: str, most: int
) -> dict[int, bytes] | None:
    """Return the ranks' files from the hosts, and keep a copy; None if they are on this machine."""
    backend = base.instance(record.backend)
    if not isinstance(backend, base.OutcomeReader):
        return None
    folder = record.job_dir / OUTCOMES
    names = {rank: call.outcome_name(rank, attempt, suffix) for rank in ranks}
    kept = {rank: data for rank, name in names.items() if (data := _kept(folder / name, most))}
    asked = {
        node: wanted
        for node, of_node in _ranks_of_nodes(record, ranks).items()
        if (wanted := [names[rank] for rank in of_node if rank not in kept])
    }
    with BACKENDS:
        sent = backend.outcomes(record, asked, most // max(1, len(asked)))
    if sent is None:
        return None
    with contextlib.suppress(OSError):  # on a full disk, the next call asks the hosts again
        private_dirs.make(folder)
        for name, data in sent.items():
            files.write_atomic(folder / name, data)
    return kept | {rank: sent[name] for rank, name in names.items() if name in sent}


def _ranks_of_nodes(record: Record, ranks: Sequence[int]) -> dict[int, list[int]]:
    """Return those of the ranks that each node may have."""
    if (counts := _counts(record)) is None:  # rank 0 is on the first node
        first_node, *others = job_parts.nodes_with_workers(record)
        return {first_node: list(ranks)} | {node: [r for r in ranks if r > 0] for node in others}
    starts = itertools.pairwise([0, *itertools.accumulate(counts.values())])
    return {
        node: [rank for rank in ranks if first <= rank < end]
        for node, (first, end) in zip(counts, starts, strict=True)
    }


def _kept(path: Path, most: int) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size <= most else b""
    except OSError:
        return b""
