"""Which jobs a command is about: references such as @, states, names and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from clusterjob.backends.base import Status
from clusterjob.core.listing import Listing
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.selection import Selection, parse_states
from clusterjob.errors import AmbiguousId, JobNotFound, UsageError
from clusterjob.node.verdict import JobState, Verdict

ENDED = Verdict(
    JobState.FAILED,
    3,
    started_at="2026-01-01T00:00:10Z",
    ended_at="2026-01-01T00:01:15.500Z",
).to_json()
Save = Callable[..., Record]


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
def save(records: Records, tmp_path: Path) -> Save:
    def save(job_id: str, name: str, minute: int, **fields: object) -> Record:
        record = Record(
            job_id, name, backend="local", job_dir=tmp_path / job_id, nodes=1, spec={},
            submitted_at=f"2026-01-01T00:{minute:02}:00.000Z",
            handle=Handle("local", job_id, data={"agents": [], "boot_id": "b"}),
            **{"cluster": "local", "end": ENDED, **fields},
        )  # fmt: skip
        records.save(record)
        return record

    return save


def running(records: Sequence[Record]) -> list[tuple[Record, Status]]:
    return [(record, Status(JobState.RUNNING, elapsed=5.0)) for record in records]


# -- references ------------------------------------------------------------------------------------


def test_at_sign_counts_from_latest_job_and_arrays_count_once(records: Records, save: Save) -> None:
    with pytest.raises(JobNotFound, match="no job is recorded"):
        records.find("@")
    save("zzz-old", "old", 1)
    array = save("mmm-arr", "arr", 2, end=None, array={"indices": [0, 1, 7], "pieces": [0]})
    save("aaa-new", "new", 3)
    found = [records.find(text).job_id for text in ("@", "@1", "@2", "@3", "@2_7")]
    assert found == ["aaa-new", "aaa-new", "mmm-arr", "zzz-old", array.element(7).job_id]
    for wrong in ("@0", "@4", "@999999999", "@x"):
        with pytest.raises(JobNotFound, match=wrong):
            records.find(wrong)


def test_name_means_its_latest_job_and_ids_and_unique_prefixes_win(
    records: Records, save: Save
) -> None:
    save("train-aaa", "train", 2)
    save("train-bbb", "train", 1)
    save("trainer-x", "trainer", 3)
    save("other-q", "Träning 2", 4)
    save("a-1", "x", 5)
    save("a-12", "a-1", 6)
    expected = {
        "train": "train-aaa", "Träning 2": "other-q", "train-b": "train-bbb",
        "trainer": "trainer-x", "a-1": "a-1",
    }  # fmt: skip
    assert {text: records.find(text).job_id for text in expected} == expected
    with pytest.raises(AmbiguousId) as caught:
        records.find("tra")
    assert caught.value.ids == ("trainer-x", "train-aaa", "train-bbb")


def test_name_that_ends_like_an_element_is_found(records: Records, save: Save) -> None:
    save("lr-3-abc", "lr_3", 1)
    save("lr-xyz", "lr", 2)
    assert records.find("lr_3").job_id == "lr-3-abc"
    with pytest.raises(JobNotFound, match="has no element 4"):
        records.find("lr_4")


# -- states ----------------------------------------------------------------------------------------


def test_states_are_words_or_prefixes_in_any_case() -> None:
    assert parse_states(["run,FAILED", "susp"[:2] + "cceeded"]) == {
        *(JobState.RUNNING, JobState.FAILED, JobState.SUCCEEDED)
    }
    assert parse_states([]) == frozenset()


@pytest.mark.parametrize(
    ("word", "part"),
    [("p", "PENDING or PREEMPTED"), ("done", "is not a state"), ("", "is not a state")],
)
def test_wrong_or_ambiguous_state_is_refused(word: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_states([word])


# -- selecting from the list -----------------------------------------------------------------------


def test_newest_selected_jobs_are_returned_and_only_those_are_polled(
    records: Records, save: Save
) -> None:
    for number in range(6):
        save(f"job-{number}", f"n{number % 2}", number, end=ENDED if number % 3 else None)
    polled: list[str] = []

    def ask(asked: Sequence[Record]) -> list[tuple[Record, Status]]:
        polled.extend(record.job_id for record in asked)
        return running(asked)

    jobs, more = Listing(records).select(Selection(), 4, ask=ask)
    assert [(job.job_id, job.rows[0].state) for job in jobs] == [
        ("job-5", "FAILED"),
        ("job-4", "FAILED"),
        ("job-3", "RUNNING"),
        ("job-2", "FAILED"),
    ]
    assert (more, polled) == (2, ["job-3"])
    assert [job.rows[0].seconds for job in jobs] == [65.5, 65.5, 5.0, 65.5]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(name="n*"), "543210"),
        (Selection(name="n1"), "531"),
        (Selection(name="N1"), ""),
        (Selection(cluster="other"), "4"),
        (Selection(since=datetime(2026, 1, 1, 0, 3, tzinfo=timezone.utc)), "543"),
        (Selection(frozenset([JobState.RUNNING])), "30"),
        (Selection(frozenset([JobState.RUNNING, JobState.FAILED]), name="n0"), "420"),
    ],
)
def test_filters_combine(records: Records, save: Save, selection: Selection, expected: str) -> None:
    for number in range(6):
        save(
            f"job-{number}",
            f"n{number % 2}",
            number,
            end=ENDED if number % 3 else None,
            cluster="other" if number == 4 else "local",
        )
    jobs, more = Listing(records).select(selection, None, ask=running)
    assert "".join(job.job_id[-1] for job in jobs) == expected
    assert more == 0


def test_array_is_selected_if_one_element_has_the_state(records: Records, save: Save) -> None:
    array = save("arr-x", "arr", 1, end=None, array={"indices": [0, 1], "pieces": [0]})
    records.save(Record(**{**vars(array.element(1)), "end": ENDED}))
    jobs, _ = Listing(records).select(Selection(frozenset([JobState.FAILED])), 20, ask=running)
    assert [[row.state for row in job.rows] for job in jobs] == [["RUNNING", "FAILED"]]


def test_lost_job_has_no_duration(records: Records, save: Save) -> None:
    """The end of a LOST job is the time at which this machine noticed it."""
    save("job-x", "x", 1, end={**ENDED, "state": "LOST", "exit_code": 1})
    [job] = Listing(records).jobs()
    assert job.rows[0].seconds is None
