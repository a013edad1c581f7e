"""What a live screen shows of a job: its files read piece by piece, polls, sorted tables."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from launching import write_tree
from procs import wait_until
from written_job import GIB, WrittenJob

from clusterjob.backends import base
from clusterjob.backends.base import Status
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import ClusterJobError
from clusterjob.insight import live_node
from clusterjob.insight.live_jobs import JobPoller, Snapshot
from clusterjob.insight.live_node import NodeReader
from clusterjob.node.logs import log_files
from clusterjob.node.logs.events import Phase
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.verdict import JobState, Verdict

TIMEOUT = 20.0


def read(job: WrittenJob, node: int = 0, *, ended: bool = False) -> live_node.NodeNow:
    return NodeReader(job.dir, node).read(ended=ended)


# -- the files of a node ---------------------------------------------------------------------------


def test_node_has_phase_metrics_and_last_line_of_each_rank() -> None:
    job = WrittenJob("a-222222", ranks=2, gpus=2)
    job.past(3)
    job.print(0, "epoch 1")
    job.print(1, "Traceback", stream="err")
    job.begin(Phase.ENDED, 0, 1, detail="exit code 1")
    now = read(job)
    first, second = now.ranks
    assert (now.phase, now.host) == ("running", job.facts[0].host)
    memory = (now.memory_limit, now.gpu_memory, now.gpu_memory_limit, first.memory)
    assert memory == (512 * GIB, 122 * GIB, 160 * GIB, GIB)
    assert (first.phase, first.line) == ("running", "epoch 1")
    assert (len(first.cpu_history), len(first.gpu_history)) == (3, 3)
    assert 0 <= (first.quiet or 0) < TIMEOUT
    assert (second.phase, second.detail, second.line) == ("ended", "exit code 1", "Traceback")
    assert second.cpu is second.quiet is None  # its process is gone


def test_reader_reads_only_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    job = WrittenJob("a-222222", ranks=2)
    job.past(3)
    job.print(1, "one")
    reader = NodeReader(job.dir, 0)
    reader.read(ended=False)
    opened: list[str] = []
    real = log_files.open_regular

    def counting(path: Path, *, buffering: int = -1) -> BinaryIO:
        opened.append(path.name)
        return real(path, buffering=buffering)

    for module in (live_node, log_files):
        monkeypatch.setattr(module, "open_regular", counting)
    reader.read(ended=False)
    assert opened == ["timeline"]
    job.grow()
    now = reader.read(ended=False)
    assert [rank.line for rank in now.ranks] == ["epoch 3 step 4 loss 0.5000"] * 2
    assert len(now.ranks[0].cpu_history) == 4
    assert sorted(opened[1:]) == ["metrics.jsonl", "rank0.out", "rank1.out", "timeline"]


def test_silence_is_measured_by_the_clock_of_the_node() -> None:
    job = WrittenJob("a-222222", ranks=2)
    # The node's clock is wrong by a year; rank 1 wrote 100 s after rank 0, and 40 s have passed.
    timeline = "900000000.000 rank0.out 4\n900000100.000 rank1.out 4\n"
    directory = node_directory(job.dir, 0)
    write_tree(directory, **{"rank0.out": "old\n", "rank1.out": "new\n", "timeline": timeline})
    passed = time.time() - 40
    os.utime(directory / "timeline", (passed, passed))
    ranks = read(job).ranks
    assert [rank.quiet for rank in ranks] == pytest.approx([140, 40], abs=TIMEOUT)
    assert [rank.line for rank in ranks] == ["old", "new"]


@pytest.mark.parametrize(
    ("files", "line"),
    [
        (
            {
                "rank0.err": "died\n",
                "rank0.restart1.out": "again\r 50% done\r",
                "timeline": "100.000 rank0.restart1.out 9\n101.000 rank0.err 5\n",
            },
            "50% done",
        ),
        (
            {
                "rank0.out": "epoch 1, a long line\n",
                "rank0.err": "warning\n",
                "timeline": "100.000 rank0.err 8\n100.000 rank0.out 21\n",
            },
            "warning",
        ),
        ({"rank0.out": "hello\n\n"}, "hello"),
        ({"rank0.out": "\x1b]0;title\x07 fine\n", "timeline": "x\n"}, r"\x1b]0;title\x07 fine"),
    ],
    ids=["newest files of a restarted rank", "stderr if both grew at once", "no agent", "hostile"],
)
def test_last_line_of_a_rank_is_found(files: dict[str, str], line: str) -> None:
    job = WrittenJob("a-222222", ranks=1)
    write_tree(node_directory(job.dir, 0), **files)
    rank = read(job).ranks[0]
    assert rank.line == line
    assert 0 <= (rank.quiet or 0) < TIMEOUT


@pytest.mark.parametrize(("ranks", "gpus", "known"), [(2, 2, True), (2, 1, False), (1, 2, True)])
def test_gpu_of_a_rank_is_known_if_each_has_one_or_there_is_one_rank(
    ranks: int, gpus: int, known: bool
) -> None:
    job = WrittenJob("a-222222", ranks=ranks, gpus=gpus)
    job.past(1)
    assert [rank.gpu is not None for rank in read(job).ranks] == [known] * ranks


def test_silent_node_is_shown_with_the_age_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    job = WrittenJob("a-222222", nodes=2, ranks=1)
    job.past(2)
    readers = [NodeReader(job.dir, node) for node in range(2)]
    assert [reader.read(ended=False).no_data for reader in readers] == [0, 0]
    later = time.monotonic() + 100
    monkeypatch.setattr(live_node.time, "monotonic", lambda: later)
    job.sample(1)
    first, second = (reader.read(ended=False).no_data for reader in readers)
    assert (first >= 99, second) == (True, 0)


# -- polls -----------------------------------------------------------------------------------------


class Watched:
    """A `JobPoller` and its newest snapshot."""

    def __init__(self, wanted: list[Record] | None = None) -> None:
        self.live = JobPoller(wanted, lambda: None)

    def __enter__(self) -> Watched:
        self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.live.close()
        for thread in [*self.live._lanes.values(), self.live._thread]:
            thread.join(TIMEOUT)

    def wait(self, predicate: Callable[[Snapshot], object]) -> Snapshot:
        wait_until(lambda: predicate(self.live.snapshot), TIMEOUT)
        return self.live.snapshot


def states(snapshot: Snapshot) -> dict[str, str]:
    return {row.job_id: row.state for row in snapshot.jobs or ()}


def save_ended(job_id: str, ended_at: str) -> None:
    end = Verdict(JobState.SUCCEEDED, 0, started_at=ended_at, ended_at=ended_at)
    record = Record(
        job_id, "ended", cluster="local", backend="local", job_dir=Path("/nowhere"), nodes=1,
        submitted_at=ended_at, spec={}, end=end.to_json(),
    )  # fmt: skip
    Records().save(record)


def test_jobs_that_have_not_ended_are_first_and_few_others_follow() -> None:
    for day in range(10, 28):
        save_ended(f"old-{day}2222", f"2026-01-{day}T00:00:00.000Z")
    job = WrittenJob("new-222222")
    with Watched() as watched:
        snapshot = watched.wait(lambda now: states(now).get("new-222222") == "RUNNING")
    assert job.record.job_id == snapshot.jobs[0].job_id
    assert [row.job_id for row in snapshot.jobs[1:]] == [
        f"old-{day}2222" for day in range(27, 17, -1)
    ]


class _Stuck:
    """A backend whose hosts do not answer until the test ends, with one job."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.polls = 0
        patch.setitem(base._loaded, "stuck", self)
        handle = Handle("stuck", "1", data={})
        self.job = replace(WrittenJob("far-222222").record, backend="stuck", handle=handle)
        Records().save(self.job)

    def status(self, records: list[Record]) -> dict[str, Status]:
        self.polls += 1
        self.go_on.wait(TIMEOUT)
        return {record.job_id: Status(JobState.RUNNING) for record in records}

    def collect(self, record: Record) -> None:
        raise ClusterJobError("host \x1b[2Jgpu1 does not answer")


@pytest.mark.parametrize("hosts", [[[]], ["gpu1"], 3])
def test_record_with_odd_hosts_hides_no_job(hosts: object) -> None:
    job = WrittenJob("a-222222")
    Records().save(replace(job.record, spec=job.record.spec | {"hosts": hosts}))
    with Watched() as watched:
        snapshot = watched.wait(lambda now: now.chosen or now.error)
    assert (list(states(snapshot)), snapshot.error) == (["a-222222"], "")


def test_host_without_answer_does_not_delay_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = _Stuck(monkeypatch)
    WrittenJob("a-222222")
    with Watched() as watched:
        snapshot = watched.wait(lambda now: states(now).get("a-222222") == "RUNNING")
        assert states(snapshot)["far-222222"] == "UNKNOWN"
        wait_until(lambda: stuck.polls, TIMEOUT)  # its thread may start late
        watched.live.choose("far-222222")
        watched.wait(lambda now: now.chosen and now.chosen.record.job_id == "far-222222")
        assert stuck.polls == 1  # no second poll while the first runs
        stuck.go_on.set()
        snapshot = watched.wait(lambda now: states(now)["far-222222"] == "RUNNING" and now.error)
        assert snapshot.error == r"host \x1b[2Jgpu1 does not answer"


def test_cancel_waits_its_turn_and_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = _Stuck(monkeypatch)
    stuck.go_on.set()
    heard: list[str] = []
    with Watched() as watched:
        watched.live.cancel(stuck.job, heard.append)
        wait_until(lambda: heard, TIMEOUT)
    assert "cancel" in heard[0]  # `_Stuck` has no such method
