"""Find the job that a user's text names: an id, the prefix of an id, @, or a job name.

The rules, in this order:

1. the exact id of a job;
2. ``@`` is the latest job, ``@2`` the one before;
3. ``REFERENCE_7`` is element 7 of an array;
4. the prefix of exactly one id;
5. the exact name of a job; of several, the latest.
"""

from __future__ import annotations

import re

from clusterjob.core.record_index import RecordIndex
from clusterjob.core.records import SEPARATOR, Record, Records
from clusterjob.errors import AmbiguousId, JobNotFound, did_you_mean

_RECENT = re.compile(r"@(\d{0,9})", re.ASCII)


def find(records: Records, text: str) -> Record:
    """Return the job that a text names.

    Raises:
        JobNotFound: no job matches, or several ids begin with the text (`AmbiguousId`).
        RecordError: the record cannot be read.
    """
    names = [name for name in records.names() if SEPARATOR not in name]
    if text in names:
        return records.load(text)
    if match := _RECENT.fullmatch(text):
        return records.load(_recent(records, int(match[1] or 1)))
    whole, separator, index = text.rpartition(SEPARATOR)
    if whole and separator and index.isascii() and index.isdigit():
        try:
            return _element(records, whole, int(index))
        except JobNotFound:
            if (named := _named(records, text)) is not None:  # a name may end like an element
                return records.load(named)
            raise
    matches = [name for name in names if text and name.startswith(text)]
    if len(matches) == 1:
        return records.load(matches[0])
    if (named := _named(records, text)) is not None:
        return records.load(named)
    if len(matches) > 1:
        found = [record for name in matches if (record := records.read(name)) is not None]
        found.sort(key=lambda record: (record.submitted_at, record.job_id), reverse=True)
        raise AmbiguousId(text, [record.job_id for record in found] or sorted(matches))
    raise JobNotFound(
        f"there is no job {text!r}",
        did_you_mean(text, names, "`clusterjob list` shows all jobs"),
    )


def _element(records: Records, whole: str, index: int) -> Record:
    array = find(records, whole)
    if array.array is None or index not in array.array["indices"]:
        raise JobNotFound(
            f"job {array.job_id} has no element {index}",
            f"`clusterjob status {array.job_id}` shows its elements",
        )
    return records.read(f"{array.job_id}{SEPARATOR}{index}") or array.element(index)


def _recent(records: Records, place: int) -> str:
    """Return the id of the latest job (place 1), or of an earlier one."""
    jobs = RecordIndex(records).jobs()
    if not jobs:
        raise JobNotFound("no job is recorded", "`clusterjob submit train.py` starts one")
    if not 0 < place <= len(jobs):
        raise JobNotFound(
            f"there is no job @{place}: {len(jobs)} jobs are recorded",
            "@ is the latest job, @2 the one before; `clusterjob list --all` shows all",
        )
    return jobs[place - 1].job_id


def _named(records: Records, text: str) -> str | None:
    """Return the id of the latest job with this name; None if there is none."""
    return next((job.job_id for job in RecordIndex(records).jobs() if job.name == text), None)
