"""Records of jobs: written whole or not at all, found by an id or its beginning."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from procs import TEST_TIMEOUT

from clusterjob.core.records import FORMAT, Handle, Record, Records
from clusterjob.core.state_home import unchecked_home
from clusterjob.errors import JobNotFound, RecordError
from clusterjob.node.verdict import JobState, Verdict

END = Verdict(JobState.LOST, 1, reason="gone").to_json()
HANDLE = Handle("local", "x", data={"agents": [{"pid": 1}], "name": "☃"})


def record(job_id: str, submitted_at: str = "2026-01-01T00:00:00.000Z", **fields: object) -> Record:
    made = Record(
        job_id,
        "a name ☃",
        cluster="lab",
        backend="local",
        job_dir=Path("/jobs") / job_id,
        nodes=2,
        submitted_at=submitted_at,
        spec={"nproc_per_node": 4, "env": {"A": "\udcff"}},
    )
    return replace(made, **fields)


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "records")


def test_saved_record_is_found_unchanged(records: Records) -> None:
    for saved in (
        record("a-222222"),
        record("b-222222", handle=HANDLE),
        record("c-222222", handle=HANDLE, end=END),
    ):
        records.save(saved)
        assert records.find(saved.job_id) == saved
        assert Record.from_json(json.loads(json.dumps(saved.to_json()))) == saved
    assert [found.job_id for found in records.all()] == ["a-222222", "b-222222", "c-222222"]


def test_record_file_is_private_and_has_a_format_number(records: Records, tmp_path: Path) -> None:
    records.save(record("a-222222", handle=HANDLE))
    path = tmp_path / "records" / "a-222222.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    data = json.loads(path.read_bytes())
    assert data.items() >= {"format": 1, "job_dir": "/jobs/a-222222"}.items()
    assert os.listdir(path.parent) == ["a-222222.json"]
    for _ in range(2):
        records.remove("a-222222")
    assert records.all() == []


def test_records_are_sorted_by_time_of_submission(records: Records) -> None:
    for job_id, day in (("b", 2), ("a", 3), ("c", 1), ("d", 2)):
        records.save(record(job_id, f"2026-01-0{day}T00:00:00.000Z"))
    assert [found.job_id for found in records.all()] == ["c", "b", "d", "a"]


def test_missing_directory_has_no_jobs(records: Records, tmp_path: Path) -> None:
    assert records.all() == []
    with pytest.raises(JobNotFound, match="there is no job 'x'") as caught:
        records.find("x")
    assert "clusterjob list" in caught.value.hint
    assert not (tmp_path / "records").exists()


def test_unique_beginning_of_id_finds_job(records: Records) -> None:
    for job_id in ("train-222222", "train-233333"):
        records.save(record(job_id))
    assert records.find("train-22").job_id == "train-222222"
    with pytest.raises(JobNotFound, match="'train' matches the ids of 2 jobs") as caught:
        records.find("train")
    assert caught.value.hint == "it could be train-233333, train-222222"
    for text in ("", "222222", "../records/train-222222", "train-222222.json", "."):
        with pytest.raises(JobNotFound):
            records.find(text)


def test_handle_and_end_are_added_to_record(records: Records) -> None:
    saved = record("a-222222")
    records.save(saved)
    saved = records.with_end(records.with_handle(saved, HANDLE), END)
    assert records.find("a-222222") == saved == record("a-222222", handle=HANDLE, end=END)


def test_record_of_another_format_is_kept_and_found_only_on_request(records: Records) -> None:
    newer = replace(record("new-222222"), format=FORMAT + 1)
    records.save(newer)
    with pytest.raises(RecordError, match="another version of clusterjob has submitted job new-22"):
        records.find("new")
    assert records.find("new", any_format=True) == newer
    assert records.with_end(newer, Verdict(JobState.SUCCEEDED, 0).to_json()).end is not None
    assert records.find("new", any_format=True) == newer


def test_unreadable_record_is_error_with_reason(records: Records, tmp_path: Path) -> None:
    (tmp_path / "records" / "bad-222222.json").mkdir(parents=True)
    with pytest.raises(RecordError, match=r"bad-222222\.json cannot be read: Is a directory"):
        records.find("bad")


def test_records_in_a_file_are_errors_but_an_end_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    blocked = Records(tmp_path / "file")
    with pytest.raises(RecordError, match="cannot be read: Not a directory"):
        blocked.all()
    with pytest.raises(RecordError, match="cannot be written") as caught:
        blocked.save(record("a-222222"))
    assert "CLUSTERJOB_HOME" in caught.value.hint
    assert blocked.with_end(record("x"), END).end == END
    # As on a full disk: the record is there, and cannot be replaced.
    monkeypatch.setattr(blocked, "read", record)
    assert blocked.with_end(record("x"), END).end == END


def test_concurrent_writers_leave_whole_record(records: Records, tmp_path: Path) -> None:
    """Three processes write a long record many times; each read gets a whole record."""
    writer = f"""
import sys
from pathlib import Path
from clusterjob.core.records import Record, Records
records = Records(Path({str(tmp_path / "records")!r}))
for number in range(20):
    spec = {{"text": sys.argv[1] * 50_000}}
    records.save(Record("x-222222", sys.argv[1], "c", "local", Path("/x"), 1, "t", spec))
"""
    writers = [subprocess.Popen([sys.executable, "-c", writer, mark]) for mark in "abc"]
    seen = []
    while any(process.poll() is None for process in writers) or not seen:
        seen += records.all()
    assert [process.wait(TEST_TIMEOUT) for process in writers] == [0, 0, 0]
    assert all(found.spec["text"] == found.name * 50_000 for found in seen)
    assert os.listdir(tmp_path / "records") == ["x-222222.json"]


@pytest.mark.parametrize(
    ("value", "home"),
    [
        ("/somewhere", Path("/somewhere")),
        ("~/jobs", Path.home() / "jobs"),
        ("relative", Path.cwd() / "relative"),
        ("", unchecked_home({})),
    ],
)
def test_home_comes_from_environment_variable_or_default(value: str, home: Path) -> None:
    assert unchecked_home({"CLUSTERJOB_HOME": value}) == home
