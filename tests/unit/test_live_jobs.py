"""What a live screen shows of a job: its files read piece by piece, polls, sorted tables."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from procs import wait_until
from written_job import GIB, WrittenJob

from clusterjob.backends import base
from clusterjob.backends.base import Status
from clusterjob.core.records import Handle, Record, Records, secure_home
from clusterjob.errors import ClusterJobError
from clusterjob.insight import live_jobs, live_node, live_output
from clusterjob.insight.live_jobs import JobPoller, Snapshot
from clusterjob.insight.live_node import NodeReader, gpu_of_ranks
from clusterjob.node.logs import log_files
from clusterjob.node.logs.events import Phase
from clusterjob.node.logs.job_dir import PHASES
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
    assert (now.memory_limit, now.gpu_memory, now.gpu_memory_limit) == (
        512 * GIB,
        122 * GIB,
        160 * GIB,
    )
    assert (first.phase, first.line, len(first.cpu_history), len(first.gpu_history)) == (
        "running",
        "epoch 1",
        3,
        3,
    )
    assert first.memory == GIB
    assert 0 <= (first.quiet or 0) < TIMEOUT
    assert (second.phase, second.detail, second.line) == ("ended", "exit code 1", "Traceback")
    assert second.cpu is second.quiet is None  # its process is gone


def test_reader_reads_only_what_was_added(monkeypatch: pytest.MonkeyPatch) -> None:
    job = WrittenJob("a-222222", ranks=2)
    job.past(3)
    job.print(0, "one")
    reader = NodeReader(job.dir, 0)
    assert [rank.line for rank in reader.read(ended=False).ranks] == ["one", ""]
    opened: list[str] = []
    real = log_files.open_regular

    def counting(path: Path, *, buffering: int = -1) -> BinaryIO:
        opened.append(path.name)
        return real(path, buffering=buffering)

    monkeypatch.setattr(live_node, "open_regular", counting)
    monkeypatch.setattr(live_output, "open_regular", counting)
    monkeypatch.setattr(log_files, "open_regular", counting)
    reader.read(ended=False)
    assert opened == ["timeline"]
    job.print(1, "two")
    job.grow()
    now = reader.read(ended=False)
    assert [rank.line for rank in now.ranks] == [
        "epoch 3 step 4 loss 0.5000",
        "epoch 3 step 4 loss 0.5000",
    ]
    assert len(now.ranks[0].cpu_history) == 4
    assert sorted(opened[1:]) == ["metrics.jsonl", "rank0.out", "rank1.out", "timeline"]


def test_silence_is_measured_by_the_clock_of_the_node() -> None:
    job = WrittenJob("a-222222", ranks=2)
    directory = node_directory(job.dir, 0)
    (directory / "rank0.out").write_text("old\n")
    (directory / "rank1.out").write_text("new\n")
    # The node's clock is wrong by a year; rank 1 wrote 100 s after rank 0, and 40 s have passed.
    (directory / "timeline").write_text("900000000.000 rank0.out 4\n900000100.000 rank1.out 4\n")
    passed = time.time() - 40
    os.utime(directory / "timeline", (passed, passed))
    quiet = [rank.quiet for rank in read(job).ranks]
    assert quiet == pytest.approx([140, 40], abs=TIMEOUT)
    assert [rank.line for rank in read(job).ranks] == ["old", "new"]


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
    ],
    ids=["newest files of a restarted rank", "stderr if both grew at once", "no agent"],
)
def test_last_line_of_a_rank_is_found(files: dict[str, str], line: str) -> None:
    job = WrittenJob("a-222222", ranks=1)
    for name, text in files.items():
        (node_directory(job.dir, 0) / name).write_text(text)
    rank = read(job).ranks[0]
    assert rank.line == line
    assert 0 <= (rank.quiet or 0) < TIMEOUT


def test_gpu_of_a_rank_is_known_only_if_it_is_clear() -> None:
    job = WrittenJob("a-222222", ranks=2, gpus=2)
    job.past(1)
    reader = live_node._Metrics(job.dir, 0)
    reader.read()
    sample = reader.sample
    assert sample is not None
    assert set(gpu_of_ranks(sample)) == {0, 1}
    assert gpu_of_ranks(replace(sample, gpus=sample.gpus[:1])) == {}
    alone = replace(sample, workers={0: sample.workers[0]})
    assert gpu_of_ranks(alone)[0] == pytest.approx(sum(g.use or 0 for g in sample.gpus) / 2)


def test_silent_node_is_shown_with_the_age_of_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    job = WrittenJob("a-222222", nodes=2, ranks=1)
    job.past(2)
    readers = [NodeReader(job.dir, node) for node in range(2)]
    assert [reader.read(ended=False).no_data for reader in readers] == [0, 0]
    real = time.monotonic
    monkeypatch.setattr(live_node.time, "monotonic", lambda: real() + 100)
    job.sample(1)
    first, second = (reader.read(ended=False) for reader in readers)
    assert first.no_data >= 100
    assert second.no_data == 0


@given(
    metrics=st.binary(max_size=300),
    phases=st.binary(max_size=300),
    timeline=st.binary(max_size=300),
    output=st.binary(max_size=300),
)
def test_malformed_files_are_skipped(
    metrics: bytes, phases: bytes, timeline: bytes, output: bytes
) -> None:
    job = WrittenJob("a-222222", ranks=1)
    job.past(1)
    reader = NodeReader(job.dir, 0)
    reader.read(ended=False)
    directory = node_directory(job.dir, 0)
    for name, data in (
        ("metrics.jsonl", metrics),
        (PHASES, phases),
        ("timeline", timeline),
        ("rank0.out", output),
    ):
        with (directory / name).open("ab") as stream:
            stream.write(data + b"\n")
    job.print(0, "\x1b]0;title\x07 fine")
    for each in (reader, NodeReader(job.dir, 0)):
        now = each.read(ended=False)
        rank = next(rank for rank in now.ranks if rank.rank == 0)
        assert rank.phase == "running"
        assert rank.line == r"\x1b]0;title\x07 fine"
    shutil.rmtree(job.dir)


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
        lanes = [*self.live._lanes.values(), self.live._thread]
        for thread in lanes:
            thread.join(TIMEOUT)

    def wait(self, predicate: Callable[[Snapshot], object], timeout: float = TIMEOUT) -> Snapshot:
        wait_until(lambda: predicate(self.live.snapshot), timeout)
        return self.live.snapshot


def states(snapshot: Snapshot) -> dict[str, str]:
    return {row.job_id: row.state for row in snapshot.jobs or ()}


def save_ended(job_id: str, ended_at: str) -> Record:
    secure_home()
    end = Verdict(JobState.SUCCEEDED, 0, started_at=ended_at, ended_at=ended_at)
    record = Record(
        job_id,
        "ended",
        cluster="local",
        backend="local",
        job_dir=Path("/nowhere"),
        nodes=1,
        submitted_at=ended_at,
        spec={},
        end=end.to_json(),
    )
    # Not with `save`, which flushes each file to the disk.
    (Records().directory / f"{job_id}.json").write_text(json.dumps(record.to_json()))
    return record


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


def test_chosen_job_is_read_and_its_end_is_seen() -> None:
    job = WrittenJob("a-222222")
    other = WrittenJob("b-222222", nodes=3)
    job.past(2)
    with Watched([job.record, other.record]) as watched:
        watched.live.choose("b-222222")
        snapshot = watched.wait(lambda now: now.chosen and now.chosen.record.job_id == "b-222222")
        assert len(snapshot.chosen.nodes) == 3
        watched.live.choose("a-222222")
        watched.wait(lambda now: now.chosen and len(now.chosen.ranks) == 2)
        (job.dir / "result.json").write_text(
            json.dumps(Verdict(JobState.FAILED, 3, reason="x").to_json())
        )
        snapshot = watched.wait(lambda now: states(now)["a-222222"] == "FAILED")
        snapshot = watched.wait(lambda now: now.chosen.verdict is not None)
        assert snapshot.chosen.verdict.exit_code == 3
        assert states(snapshot)["b-222222"] == "RUNNING"


class _Stuck:
    """A backend whose hosts do not answer until the test ends."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.polls = 0

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
    poller = JobPoller(None, lambda: None)
    poller.start()
    try:
        wait_until(lambda: poller.snapshot.chosen or poller.snapshot.error, TIMEOUT)
    finally:
        poller.close()
    assert (list(states(poller.snapshot)), poller.snapshot.error) == (["a-222222"], "")


def test_host_without_answer_does_not_delay_other_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = _Stuck()
    monkeypatch.setitem(base._loaded, "stuck", stuck)
    job = WrittenJob("a-222222")
    far = replace(
        job.record, job_id="far-222222", backend="stuck", handle=Handle("stuck", "1", data={})
    )
    Records().save(far)
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
    stuck = _Stuck()
    stuck.go_on.set()
    monkeypatch.setitem(base._loaded, "stuck", stuck)
    job = WrittenJob("a-222222")
    far = replace(
        job.record, job_id="far-222222", backend="stuck", handle=Handle("stuck", "1", data={})
    )
    Records().save(far)
    heard: list[str] = []
    with Watched() as watched:
        watched.live.cancel(far, heard.append)
        wait_until(lambda: heard, TIMEOUT)
    assert "cancel" in heard[0]  # `_Stuck` has no such method


def test_thousand_records_are_listed_soon() -> None:
    for number in range(1000):
        save_ended(
            f"old-{number:06}",
            f"2026-01-{number % 27 + 1:02}T{number % 24:02}:00:00.000Z",
        )
    WrittenJob("new-222222")
    begin = time.process_time()
    with Watched() as watched:
        snapshot = watched.wait(lambda now: now.jobs)
    assert time.process_time() - begin < 5
    assert len(snapshot.jobs) == 1 + live_jobs._RECENT
