"""`clean`: which jobs are removed, and that nothing else ever is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import new_folder, write_tree

from clusterjob.backends import base
from clusterjob.backends.base import Leftover, Status
from clusterjob.backends.local.backend import LocalBackend
from clusterjob.core import cleaning
from clusterjob.core.cleaning import Wanted
from clusterjob.core.records import Handle, ProcessIdentity, Record, Records, home
from clusterjob.errors import UsageError
from clusterjob.node.logs import events
from clusterjob.node.system import files, processes
from clusterjob.node.verdict import JobState, Verdict

DAY = 86400
Save = Callable[..., Record]


def verdict(state: JobState = JobState.SUCCEEDED, seconds: int = 10) -> dict[str, Any]:
    return Verdict(
        state,
        0 if state is JobState.SUCCEEDED else 1,
        started_at="2026-01-01T00:00:00Z",
        ended_at=f"2026-01-01T00:00:{seconds:02}Z",
    ).to_json()


@pytest.fixture
def save() -> Save:
    def save(job_id: str, size: int = 0, age: float = 0, **fields: Any) -> Record:
        """Save a record, with a job directory that has a log file of this size."""
        fields = {"end": verdict(), "job_dir": home() / "jobs" / job_id, **fields}
        record = Record(
            job_id,
            "x",
            cluster="local",
            backend="local",
            nodes=1,
            submitted_at="2026-01-01T00:00:00.000Z",
            spec={},
            handle=fields.pop(
                "handle",
                Handle(
                    "local",
                    job_id,
                    data={"agents": [], "boot_id": "b", "host": os.uname().nodename},
                ),
            ),
            **fields,
        )
        logs = new_folder(home() / "jobs" / job_id / "logs" / "node0")
        (logs / "rank0.out").write_bytes(b"x" * size)
        records = Records()
        records.save(record)
        at = time.time() - age
        os.utime(records.directory / f"{job_id}.json", (at, at))
        return record

    return save


def names(jobs: list[cleaning.EndedJob]) -> list[str]:
    return [job.record.job_id for job in jobs]


def remaining() -> set[str]:
    return {path.name for path in (home() / "jobs").iterdir()}


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted(), {"old-a", "new-b", "big-c"}),
        (Wanted(older_than=30 * DAY), {"old-a"}),
        (Wanted(states=frozenset([JobState.FAILED])), {"new-b"}),
        (Wanted(larger_than=1_000_000), {"big-c"}),
        (Wanted(older_than=DAY, larger_than=1_000_000), set()),
    ],
)
def test_filters_select_ended_jobs(save: Save, wanted: Wanted, expected: set[str]) -> None:
    save("old-a", age=31 * DAY)
    save("new-b", end=verdict(JobState.FAILED))
    save("big-c", size=2_000_000)
    save("run-d", end=None, handle=None, submitter=ProcessIdentity.of_this_process())
    found, code = cleaning.find(wanted)
    assert (set(names(found)), code) == (expected, 0)
    assert all((job.size > 2_000_000) is (job.record.job_id == "big-c") for job in found)
    assert {"old-a", "new-b", "big-c", "run-d"} == remaining(), "finding removes nothing"
    done, _ = cleaning.remove(found)
    assert not [job.kept for job in done if job.kept]
    assert {"old-a", "new-b", "big-c", "run-d"} - expected == remaining()
    assert {record.job_id for record in Records().all()} == remaining()


def test_job_that_is_not_certain_to_have_ended_is_never_removed(save: Save) -> None:
    save("elsewhere-b", end=None, handle=Handle("local", "x", {"host": "other", "agents": []}))
    save("preempted-c", end=verdict(JobState.PREEMPTED))
    assert cleaning.find(Wanted()) == ([], 0)
    save("run-d", end=None, handle=None, submitter=ProcessIdentity.of_this_process())
    for job_id, state in (
        ("elsewhere-b", "UNKNOWN"),
        ("preempted-c", "PREEMPTED"),
        ("run-d", "PENDING"),
    ):
        with pytest.raises(UsageError, match=f"is {state}"):
            cleaning.named([Records().find(job_id)])


def test_end_that_unreachable_hosts_may_correct_is_not_final(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Verdict(JobState.LOST, 1, reason="gpu1: no answer", ended_at=events.now())
    save("job-a", end=lost.to_json(), provisional=True)
    monkeypatch.setattr(
        LocalBackend,
        "status",
        lambda _, records: {
            record.job_id: Status(JobState.LOST, verdict=lost, provisional=True)
            for record in records
        },
    )
    assert cleaning.find(Wanted()) == ([], 0)
    with pytest.raises(UsageError, match="is UNKNOWN"):
        cleaning.named([Records().find("job-a")])


def test_job_whose_agent_still_runs_is_kept(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = {"node_rank": 0, "pid": os.getpid(), "ticks": processes.start_ticks(os.getpid())}
    data = {"agents": [agent], "boot_id": processes.boot_id(), "host": os.uname().nodename}
    monkeypatch.setattr(processes, "reap", lambda _: None)
    save("run-a", handle=Handle("local", "run-a", data=data))
    [job] = cleaning.find(Wanted())[0]
    assert "still run" in job.kept
    cleaning.remove([job])
    assert remaining() == {"run-a"}


def test_record_that_names_another_directory_removes_nothing(save: Save, tmp_path: Path) -> None:
    precious = new_folder(tmp_path / "precious-a")
    (precious / "thesis.tex").touch()
    save("precious-a", job_dir=precious)
    save("home-b", job_dir=tmp_path)
    save("dots-c", job_dir=home() / "jobs" / "dots-c" / ".." / ".." / "jobs" / "precious-a")
    found, _ = cleaning.find(Wanted())
    assert all("remove it manually" in job.kept for job in found)
    assert len(found) == 3
    cleaning.remove(found)
    assert (precious / "thesis.tex").exists()
    assert len(Records().all()) == 3
    assert remaining() == {"precious-a", "home-b", "dots-c"}


def test_links_in_and_to_job_directories_are_not_followed(save: Save, tmp_path: Path) -> None:
    precious = new_folder(tmp_path / "precious")
    (precious / "data").write_bytes(b"x" * 3_000_000)
    record = save("links-a")
    os.symlink(precious, record.job_dir / "logs" / "node0" / "link")
    os.symlink(precious / "data", record.job_dir / "file")
    linked = save("linked-b")
    files.remove_tree(linked.job_dir)
    os.symlink(precious, linked.job_dir)
    found = {job.record.job_id: job for job in cleaning.find(Wanted())[0]}
    assert found["links-a"].size < 1_000_000
    assert "is a link" in found["linked-b"].kept
    cleaning.remove(list(found.values()))
    assert remaining() == {"linked-b"}
    assert (precious / "data").stat().st_size == 3_000_000
    assert [record.job_id for record in Records().all()] == ["linked-b"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_job_with_mounted_file_system_is_kept(save: Save) -> None:
    record = save("mount-a")
    mounted = new_folder(record.job_dir / "data")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], check=True)
    try:
        (mounted / "precious").touch()
        done, _ = cleaning.remove(cleaning.find(Wanted())[0])
        assert "another file system is mounted" in done[0].kept
        assert (mounted / "precious").exists()
        assert remaining() == {"mount-a"}
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_directory_that_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tools, such as Go's module cache, make directories read-only; root ignores modes."""
    only = tmp_path / "job" / "read" / "only"
    write_tree(only, file="")
    only.chmod(0o500)
    only.parent.chmod(0o500)
    monkeypatch.chdir(tmp_path)
    if os.geteuid() == 0:
        for folder in (tmp_path, *tmp_path.rglob("*")):
            os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        files.remove_tree(Path("job"))
    finally:
        os.seteuid(os.getuid())
    assert list(tmp_path.iterdir()) == []


def test_array_is_removed_as_a_whole_after_all_elements_ended(save: Save) -> None:
    array = save("arr-a", end=None, array={"indices": [0, 7], "pieces": [0]})
    records = Records()
    ended = {"end": verdict(), "handle": array.handle}
    records.save(Record(**{**vars(array.element(0)), **ended}))
    with pytest.raises(UsageError, match="element of an array"):
        cleaning.named([records.find("arr-a_0")])
    records.save(Record(**{**vars(array.element(7)), **ended}))
    found, _ = cleaning.named([records.find("arr-a")])
    cleaning.remove(found)
    assert remaining() == set()
    assert records.names() == []


def test_record_of_element_without_array_is_removed(save: Save) -> None:
    array = save("arr-a", end=None, array={"indices": [0], "pieces": [0]})
    records = Records()
    records.save(Record(**{**vars(array.element(0)), "end": verdict()}))
    records.delete("arr-a")
    cleaning.remove([])
    assert records.names() == []


class Distant(LocalBackend):
    """A backend whose host answers for some jobs only."""

    def __init__(self, unreachable: set[str]) -> None:
        super().__init__()
        self.unreachable = unreachable
        self.removed: list[str] = []

    def clean(self, records: Any, *, remove: bool) -> tuple[dict[str, Leftover], int]:
        found = {
            record.job_id: Leftover(500, "gpu1: no answer" * (record.job_id in self.unreachable))
            for record in records
        }
        self.removed += [job_id for job_id, left in found.items() if remove and not left.kept]
        return found, 7


def test_job_with_unreachable_host_keeps_record_and_directory(
    save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Distant({"far-a"})
    monkeypatch.setitem(base._loaded, "local", backend)
    save("far-a")
    save("near-b")
    save("late-c")
    found, code = cleaning.find(Wanted())
    assert {job.record.job_id: job.kept for job in found} == {
        "far-a": "gpu1: no answer",
        "near-b": "",
        "late-c": "",
    }
    assert code == 7
    assert all(job.size >= 500 for job in found)
    backend.unreachable.add("late-c")  # the host is lost between the question and the removal
    done, _ = cleaning.remove(found)
    assert sorted(names([job for job in done if job.kept])) == ["far-a", "late-c"]
    assert backend.removed == ["near-b"]
    assert remaining() == {"far-a", "late-c"}


def test_concurrent_cleans_and_submits_lose_no_other_job(save: Save) -> None:
    for number in range(40):
        save(f"job-{number}")
    found, _ = cleaning.find(Wanted())
    errors: list[str] = []

    def clean() -> None:
        errors.extend(job.kept for job in cleaning.remove(found)[0] if job.kept)

    threads = [threading.Thread(target=clean) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(10):
        save(f"new-{number}")
    for thread in threads:
        thread.join()
    assert errors == []
    assert remaining() == {f"new-{number}" for number in range(10)}
    assert len(Records().all()) == 10


def test_killed_removal_is_finished_by_the_next_clean(save: Save) -> None:
    record = save("job-a")
    shutil.rmtree(record.job_dir / "logs")
    [job] = cleaning.find(Wanted())[0]
    cleaning.remove([job])
    assert remaining() == set()
    assert Records().all() == []


def test_age_of_job_whose_end_is_first_seen_now_counts_from_submit_and_duration(
    save: Save,
) -> None:
    record = save("job-a", end=None)
    (record.job_dir / "result.json").write_text(json.dumps(verdict()))
    found, _ = cleaning.find(Wanted(older_than=DAY))
    assert names(found) == ["job-a"], "it was submitted in January and ran for 10 s"
