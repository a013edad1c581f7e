"""Rows of `clusterjob list`: rows of ended jobs come from a cache.

The rows are correct after any change of the records.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from clusterjob.backends.base import Status
from clusterjob.core import polling
from clusterjob.core.listing import Listing, row_of
from clusterjob.core.record_index import ListRow
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.selection import Selection
from clusterjob.node.logs import events
from clusterjob.node.verdict import JobState, Verdict

ENDED = Verdict(JobState.FAILED, 3, reason="rank 1: boom\nmore").to_json()
CACHE = ".ended.json"


@pytest.fixture
def records(tmp_path: Path) -> Records:
    records = Records()
    for number in range(60):
        save(records, tmp_path, f"job-{number:06}", end=ENDED)
    return records


def listed() -> tuple[list[ListRow], list[str]]:
    found = Listing(Records())
    jobs, _ = found.select(Selection(), None, ask=polling.statuses)
    return [row for job in reversed(jobs) for row in job.rows], found.broken


def save(records: Records, job_dir: Path, job_id: str, **fields: object) -> Record:
    data = {"agents": [], "boot_id": "b", "host": os.uname().nodename}
    record = Record(
        job_id, "x", cluster="local", backend="local", job_dir=job_dir, nodes=1, spec={},
        submitted_at=f"2026-01-01T00:00:00.{job_id[-3:]}Z",
        handle=Handle("local", job_id, data=data), **fields,
    )  # fmt: skip
    records.save(record)
    return record


def test_rows_of_ended_jobs_come_from_cache(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, broken = listed()
    assert (len(rows), broken) == (60, [])
    assert rows[7][:5] == ("job-000007", "FAILED", "3", "1", "local")
    assert rows[7].reason == "rank 1: boom"
    monkeypatch.setattr(Records, "read", lambda *_: pytest.fail("a record was read"))
    assert listed() == (rows, [])


def test_replaced_record_is_read_again(records: Records, tmp_path: Path) -> None:
    listed()
    save(records, tmp_path, "job-000007", end=Verdict(JobState.SUCCEEDED, 0).to_json())
    records.remove("job-000008")
    save(records, tmp_path, "new-000500")
    states = {row.job_id: row.state for row in listed()[0]}
    assert len(states) == 60
    assert states.items() >= {("job-000007", "SUCCEEDED"), ("new-000500", "LOST")}
    assert "job-000008" not in states


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"schema": 1}',
        '{"schema": 1, "rows": {"job-000001": [1]}}',
        '{"schema": 1, "rows": 7}',
    ],
)
def test_broken_cache_is_rebuilt(records: Records, content: str) -> None:
    rows, _ = listed()
    (records.directory / CACHE).write_text(content)
    assert listed()[0] == rows
    assert len(json.loads((records.directory / CACHE).read_bytes())["rows"]) == 60


def test_array_elements_are_listed_as_ended_or_open(records: Records, tmp_path: Path) -> None:
    array = save(records, tmp_path, "arr-000900", array={"indices": [0, 1, 10], "pieces": [0]})
    records.save(replace(array.element(1), end=ENDED, handle=array.handle))
    for _ in range(2):
        found = Listing(records)
        assert [row.job_id for row in found.rows if row.array_id] == ["arr-000900_1"]
        assert [record.job_id for record in found.open] == ["arr-000900_0", "arr-000900_10"]


@pytest.mark.parametrize(
    ("ended_at", "provisional"), [(None, True), ("2026-01-01T00:00:00Z", False)]
)
def test_recent_provisional_end_is_checked_again(
    tmp_path: Path, ended_at: str | None, provisional: bool
) -> None:
    end = Verdict(
        JobState.LOST, 1, reason="gpu1 is not reached", ended_at=ended_at or events.now()
    ).to_json()
    save(Records(), tmp_path, "job-000007", end=end, provisional=True)
    assert bool(Listing(Records()).open) == provisional
    (tmp_path / "result.json").write_text(json.dumps(Verdict(JobState.SUCCEEDED, 0).to_json()))
    assert listed()[0][0].state == ("SUCCEEDED" if provisional else "LOST")
    assert Listing(Records()).open == []


def test_open_job_shows_scheduler_id_nodes_and_restarts(tmp_path: Path) -> None:
    job = replace(save(Records(), tmp_path, "job-a"), handle=Handle("slurm", "12", data={}))
    now = Status(
        JobState.RUNNING, "slow", hosts="n[1-2]", restarts=2, restart_reason="node 1 was lost\nx"
    )
    assert row_of(job, now).reason == "slow; job 12 on n[1-2]; restart 2: node 1 was lost"
    assert row_of(job, Status(JobState.PENDING)).reason == "job 12"
    assert row_of(replace(job, handle=None), Status(JobState.RUNNING)).reason == ""
