"""The file of a node's metrics: what is written is read; damage costs only its own lines."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterjob.insight import sample_files
from clusterjob.node.logs import log_files
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics.samples import (
    INTERVAL,
    Gpu,
    GpuSample,
    NodeFacts,
    Sample,
    SampleWriter,
    WorkerSample,
)
from clusterjob.node.system import files

FACTS = NodeFacts(
    0,
    "host",
    attempt=0,
    cores=64,
    memory=1 << 40,
    gpus=tuple(Gpu(k, f"GPU-{k}", "NVIDIA H100", memory=80 << 30) for k in range(8)),
)


def sample(monotonic: float, workers: int = 8, gpus: int = 8) -> Sample:
    worker = WorkerSample(
        0, 103.7, rss=123_456_789_012, read=1_234_567.2, written=2_345_678.3, threads=123
    )
    gpu = GpuSample(
        98, 81_559_000_000, power=698.7, temperature=71, sm_clock=1980, memory_clock=2619, ecc=0,
        xid=0,
    )  # fmt: skip
    return Sample(
        1_795_000_000.0 + monotonic,
        monotonic,
        restart=0,
        quiet=3.2,
        cpu=812.3,
        memory=1 << 39,
        load=17.3,
        received=123_456_789.1,
        sent=123_456_789.1,
        read=23_456_789.2,
        written=23_456_789.4,
        workers=tuple(replace(worker, rank=rank) for rank in range(workers)),
        gpus=(gpu,) * gpus,
    )


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    node_directory(tmp_path, 0).mkdir(parents=True)
    return tmp_path


def write(
    job_dir: Path, hours: float, facts: NodeFacts = FACTS, begin: float = 0.0, **kind: int
) -> int:
    """Write samples of some hours, and return the size of the file."""
    writer = SampleWriter(job_dir, 0)
    at = 0.0
    while at < hours * 3600:
        at += writer.add(facts, sample(begin + at, **kind))
    return files.size_of(sample_files.path_of(job_dir, 0))


def times(job_dir: Path, since: float | None = None) -> list[float]:
    return [each.monotonic for _, each in sample_files.read(job_dir, 0, since)]


def plain(row: Any) -> Any:
    """Return a sample as plain data, as it was written or was read."""
    known = vars(row) if hasattr(row, "__dict__") else sample_files.values(row)
    return known | {
        name: [plain(one) for one in known[name]] for name in ("workers", "gpus") if name in known
    }


def test_samples_are_read_as_they_were_written(job_dir: Path) -> None:
    writer = SampleWriter(job_dir, 0)
    written = [replace(sample(0.0), gpus=(GpuSample(),) * 8), sample(5.0)]
    for one in written:
        assert writer.add(FACTS, one) == INTERVAL
    read = list(sample_files.read(job_dir, 0))
    assert [facts for facts, _ in read] == [FACTS, FACTS]
    assert [plain(one) for _, one in read] == [plain(one) for one in written]
    assert sample_files.latest(job_dir, 0) == read[-1]
    assert log_files.nodes(job_dir) == [0]


@pytest.mark.parametrize(("workers", "largest"), [(8, 5.1), (256, 120.0)])
def test_an_hour_is_at_most_1_mb_with_longer_pauses(
    job_dir: Path, workers: int, largest: float
) -> None:
    assert write(job_dir, 1, workers=workers) < 1_000_000
    assert max(b - a for a, b in itertools.pairwise(times(job_dir))) < largest


def test_samples_of_a_day_are_5_s_apart_in_the_first_hour_and_20_s_in_the_end(
    job_dir: Path,
) -> None:
    assert write(job_dir, 24, workers=1, gpus=0) < 1_000_000
    gaps = [b - a for a, b in itertools.pairwise(times(job_dir))]
    assert set(gaps[:720]) == {5.0}
    assert all(after > before - 0.2 for before, after in itertools.pairwise(gaps))
    assert gaps[-1] == pytest.approx(20.0)
    assert max(gaps) < 20.2


def test_since_counts_from_the_newest_sample_of_the_newest_attempt(job_dir: Path) -> None:
    write(job_dir, 2, begin=50_000.0)
    write(job_dir, 1, replace(FACTS, attempt=1), begin=100.0)  # another machine: its clock is young
    newest = times(job_dir)[-1]
    assert times(job_dir, 20.0) == [at for at in times(job_dir) if newest - 20 <= at <= newest]
    read = [(facts.attempt, each.monotonic) for facts, each in sample_files.read(job_dir, 0)]
    assert read == sorted(read)
    assert {attempt for attempt, _ in read} == {0, 1}


def test_jump_of_the_wall_clock_changes_nothing_but_the_shown_time(job_dir: Path) -> None:
    writer = SampleWriter(job_dir, 0)
    for number in range(100):
        jump = -86_400.0 if number >= 50 else 0.0
        writer.add(FACTS, replace(sample(5.0 * number), time=1_795_000_000.0 + jump))
    assert times(job_dir) == [5.0 * number for number in range(100)]
    assert len(times(job_dir, 60.0)) == 13


def test_newest_sample_is_found_at_the_end_of_a_large_file(job_dir: Path) -> None:
    write(job_dir, 2)
    write(job_dir, 2, replace(FACTS, attempt=1), begin=50_000.0)
    facts, newest = sample_files.latest(job_dir, 0)
    assert (facts.attempt, newest.monotonic) == (1, times(job_dir)[-1])


def test_samples_between_those_of_a_gap_are_left_out(job_dir: Path) -> None:
    write(job_dir, 0.2)
    write(job_dir, 0.01, replace(FACTS, attempt=1), begin=20.0)
    read = sample_files.read(job_dir, 0, gap=60.0)
    found = [(facts.attempt, one.monotonic) for facts, one in read]
    assert found == [(0, 60.0 * number) for number in range(12)] + [(1, 20.0)]


def test_full_disk_loses_samples_without_an_error(job_dir: Path) -> None:
    node_directory(job_dir, 0).rmdir()
    write(job_dir, 0.1)
    assert times(job_dir) == []


@given(data=st.data())
@settings(max_examples=60)
def test_damaged_file_loses_only_the_damaged_lines(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    job_dir = tmp_path_factory.mktemp("job")
    node_directory(job_dir, 0).mkdir(parents=True)
    write(job_dir, 0.02, workers=2, gpus=1)
    path = sample_files.path_of(job_dir, 0)
    good = path.read_bytes().splitlines(keepends=True)
    hostile = st.one_of(
        st.binary(max_size=200).filter(lambda text: b"\n" not in text),
        st.sampled_from(
            [
                b"[" * 5000,
                b"[1,1,0,1" + b",1" * 7 + b",[],[]," + b"[" * 5000,
                b'{"x":' + b"[" * 5000,
                b"[1,2,3]",
                b"{}",
                b'{"node_rank":1e999,"host":3}',
                b"[" + b"9" * 5000 + b"]",
                b"[NaN" + b",1" * 10 + b",[],[]]",
                b"[1" + b",1" * 10 + b",[[-1,1,1,1,1,1]],[]]",
                b"[1" + b",1" * 10 + b",[[true,1,1,1,1,1]],[]]",
                b"[1" + b",1" * 10 + b",7,[]]",
                b"x" * (1 << 19),
                good[4][:40],
            ]
        ),
    )
    place = data.draw(st.integers(2, len(good)))
    path.write_bytes(b"".join(good[:place]) + data.draw(hostile) + b"\n" + b"".join(good[place:]))
    whole = [5.0 * number for number in range(len(good) - 2)]
    assert [m for m in times(job_dir) if m in whole] == whole


def test_truncated_file_gives_what_is_whole(job_dir: Path) -> None:
    write(job_dir, 0.02)
    path = sample_files.path_of(job_dir, 0)
    os.truncate(path, path.stat().st_size - 30)
    assert len(times(job_dir)) == 14
    os.truncate(path, 30)
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_directory_in_place_of_the_file_is_skipped(job_dir: Path, make) -> None:
    make(sample_files.path_of(job_dir, 0))
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None
    assert list(sample_files.read(job_dir, 5)) == []
