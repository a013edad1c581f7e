"""Plan an earlier job again: its recorded code, arguments and environment, under a new id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterjob.core import config, jobs, polling, snapshot
from clusterjob.core.earlier_code import EarlierCode
from clusterjob.core.job_secrets import Secret
from clusterjob.core.plans import Plan, PlannedFile
from clusterjob.core.records import Record, Records
from clusterjob.errors import RecordError, UsageError
from clusterjob.node.logs.job_dir import CALLS, STDIN_SCRIPT
from clusterjob.node.verdict import JobState

_FAILED = (JobState.FAILED, JobState.LOST, JobState.PREEMPTED)


def plan(record: Record, secrets: Sequence[Secret], *, failed: bool) -> Plan:
    """Return the plan of a job that repeats a recorded one; contact no host of it.

    The jobs that the recorded one waited for are not waited for again.

    Args:
        record: the recorded job, or an element of an array.
        secrets: where the values of secrets are; other secrets are read from this environment.
        failed: whether to repeat only the elements that are FAILED, LOST or PREEMPTED.

    Raises:
        UsageError: nothing has failed, or the job has no such secret.
        SpecError: a secret has no value, or the working directory does not exist any more.
        RecordError: the record, or a file of the job that the new one needs, is missing.
    """
    whole = record if record.index is None else Records().find(record.whole_id)
    only = _elements(record, whole, failed=failed)
    spec = replace(
        whole.job,
        secret=_secrets(whole, secrets),
        after=(),
        only=only,
        earlier_code=_earlier_code(whole),
    )
    planned = jobs.plan(spec, config.Settings(whole.cluster, whole.backend, values={}))
    return _with_calls(planned, whole)


def _elements(record: Record, whole: Record, *, failed: bool) -> tuple[int, ...]:
    """Return the indices to repeat; empty for a whole job."""
    if failed:
        pairs = polling.statuses([record])
        repeated = [each for each, status in pairs if status.state in _FAILED]
        if not repeated:
            states = ", ".join(dict.fromkeys(str(status.state) for _, status in pairs))
            raise UsageError(
                f"nothing of job {record.job_id} has failed: it is {states}",
                f"`clusterjob rerun {record.job_id}` repeats it",
            )
        return tuple(each.index for each in repeated if each.index is not None)
    if record.index is not None:
        return (record.index,)
    # An array that was itself a part of another one.
    return whole.job.only


def _secrets(record: Record, given: Sequence[Secret]) -> tuple[Secret, ...]:
    """Return the job's secrets with the places of their values; a record has only their names."""
    places = {secret.name: secret for secret in given}
    names = [secret.name for secret in record.job.secret]
    for name in places:
        if name not in names:
            raise UsageError(
                f"--secret {name}: job {record.job_id} has no such secret",
                f"its secrets are {', '.join(names)}" if names else "it has no secrets",
            )
    return tuple(places.get(name, Secret(name)) for name in names)


def _with_calls(plan: Plan, record: Record) -> Plan:
    """Add the pickled calls of Python functions, or the script that was on standard input.

    Raises:
        RecordError: a file cannot be read.
    """
    try:
        files = [
            PlannedFile(plan.job_dir / path.name, path.read_bytes())
            for pattern in (CALLS, STDIN_SCRIPT)
            for path in sorted(record.whole_dir.glob(pattern))
        ]
    except OSError as error:
        raise RecordError(
            f"{error.filename} cannot be read: {error.strerror}", "submit the function again"
        ) from error
    return replace(plan, files=(*plan.files, *files)) if files else plan


def _earlier_code(record: Record) -> EarlierCode | None:
    """Return the code that a job has run; None if it ran files that nobody kept.

    Raises:
        RecordError: the code is not kept any more.
    """
    if record.code is None:
        return None
    facts = [record.code.get(name, "") for name in ("root", "top")]
    if not all(isinstance(fact, str) for fact in facts) or (
        facts[0] and snapshot.sent(record.whole_dir, Path(facts[1])) is None
    ):
        raise RecordError(
            f"the code of job {record.job_id} is not kept any more",
            "submit the program again to run its current code",
        )
    return EarlierCode(record.whole_dir, record.code)
