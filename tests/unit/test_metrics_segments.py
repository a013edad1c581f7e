"""The files of a node's metrics: what is written is read; damage costs only its own lines."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterjob.insight import sample_files
from clusterjob.node.logs import log_files
from clusterjob.node.logs.job_dir import THINNED
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics import lines, segments
from clusterjob.node.metrics.samples import Gpu, GpuSample, NodeFacts, Sample, WorkerSample
from clusterjob.node.metrics.writer import SegmentWriter, joined

FACTS = NodeFacts(
    0,
    "host",
    attempt=0,
    cores=64,
    memory=1 << 40,
    gpus=tuple(Gpu(k, f"GPU-{k}", "NVIDIA H100", memory=80 << 30) for k in range(8)),
)


def sample(monotonic: float, workers: int = 8, gpus: int = 8, **changed: float) -> Sample:
    worker = WorkerSample(
        103.7, 123_456_789_012, pss=98_765_432_101, read=1_234_567, written=2_345_678, threads=123
    )
    gpu = GpuSample(
        98, 81_559_000_000, power=698.7, temperature=71, sm_clock=1980, memory_clock=2619, ecc=0,
        xid=0,
    )  # fmt: skip
    return replace(
        Sample(
            1_795_000_000.0 + monotonic,
            monotonic,
            restart=0,
            quiet=3.2,
            cpu=812.3,
            memory=1 << 39,
            load=17.3,
            received=123_456_789,
            sent=123_456_789,
            read=23_456_789,
            written=23_456_789,
            workers=dict.fromkeys(range(workers), worker),
            gpus=(gpu,) * gpus,
        ),
        **changed,
    )


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    node_directory(tmp_path, 0).mkdir(parents=True)
    return tmp_path


def write(job_dir: Path, hours: float, facts: NodeFacts = FACTS, begin: float = 0.0, **kind) -> int:
    """Write samples of some hours, and return the bytes that were written."""
    writer = SegmentWriter(job_dir, facts, 5.0)
    for number in range(int(hours * 720)):
        writer.add(sample(begin + 5.0 * number, **kind))
    writer.close()
    return size(job_dir)


def size(job_dir: Path) -> int:
    return sum(path.stat().st_size for path in node_directory(job_dir, 0).glob("metrics.*"))


def times(job_dir: Path, since: float | None = None) -> list[float]:
    return [each.monotonic for _, each in sample_files.read(job_dir, 0, since)]


def test_samples_are_read_as_they_were_written(job_dir: Path) -> None:
    writer = SegmentWriter(job_dir, FACTS, 5.0)
    plain = replace(sample(0.0), gpus=(GpuSample(),) * 8)
    writer.add(plain)
    writer.add(sample(5.0))
    writer.close()
    read = list(sample_files.read(job_dir, 0))
    assert [facts for facts, _ in read] == [FACTS, FACTS]
    assert read[0][1] == plain
    assert read[1][1].workers[7] == sample(5.0).workers[7]
    assert sample_files.latest(job_dir, 0) == read[-1]
    assert log_files.nodes(job_dir) == [0]


def test_an_hour_of_8_workers_and_8_gpus_is_at_most_1_mb(job_dir: Path) -> None:
    assert write(job_dir, 1) < 1_000_000


def test_an_hour_of_256_workers_is_at_most_1_mb_with_longer_means(job_dir: Path) -> None:
    assert write(job_dir, 1, workers=256) < 1_000_000
    read = times(job_dir)
    assert max(b - a for a, b in itertools.pairwise(read)) < 120


def test_a_day_keeps_the_last_hour_and_one_sample_per_minute_before(job_dir: Path) -> None:
    assert write(job_dir, 24, workers=1, gpus=0) < 1_000_000
    read = times(job_dir)
    assert read == sorted(read)
    old, new = (
        [m for m in read if m < 22.4 * 3600],
        [m for m in read if m > 23 * 3600],
    )
    assert len(old) == pytest.approx(22.4 * 60, rel=0.1)
    assert len(new) == pytest.approx(720, abs=2)
    assert len(segments.segment_numbers(node_directory(job_dir, 0))) == 3


def test_since_counts_from_the_newest_sample_of_the_newest_attempt(job_dir: Path) -> None:
    write(job_dir, 2, begin=50_000.0)
    write(job_dir, 1, replace(FACTS, attempt=1), begin=100.0)  # another machine: its clock is young
    assert times(job_dir, 20.0) == [3675.0, 3680.0, 3685.0, 3690.0, 3695.0]
    read = [(facts.attempt, each.monotonic) for facts, each in sample_files.read(job_dir, 0)]
    assert read == sorted(read)
    assert {attempt for attempt, _ in read} == {0, 1}


def test_since_reaches_into_the_thinned_samples(job_dir: Path) -> None:
    write(job_dir, 5, workers=1, gpus=0)
    read = times(job_dir, 4 * 3600.0)
    assert read[0] == pytest.approx(3600, abs=70)
    assert read == sorted(read)


def test_jump_of_the_wall_clock_changes_nothing_but_the_shown_time(job_dir: Path) -> None:
    writer = SegmentWriter(job_dir, FACTS, 5.0)
    for number in range(100):
        jump = -86_400.0 if number >= 50 else 0.0
        writer.add(replace(sample(5.0 * number), time=1_795_000_000.0 + jump))
    writer.close()
    assert times(job_dir) == [5.0 * number for number in range(100)]
    assert len(times(job_dir, 60.0)) == 13


def test_gap_between_mirrored_segments_is_filled_by_thinned_samples(job_dir: Path) -> None:
    write(job_dir, 1.4)
    (node_directory(job_dir, 0) / "metrics.1").unlink()
    read = times(job_dir)
    assert read == sorted(set(read))
    assert max(b - a for a, b in itertools.pairwise(read)) < 70


def test_joined_keeps_means_of_rates_and_peaks_of_levels() -> None:
    low = sample(0.0, workers=1, cpu=100.0, memory=10, quiet=1.0)
    high = sample(5.0, workers=2, cpu=300.0, memory=30, quiet=6.0)
    both = joined([low, high])
    assert (both.cpu, both.memory, both.quiet, both.monotonic) == (200.0, 30, 6.0, 5.0)
    assert sorted(both.workers) == [0, 1]
    assert joined(
        [replace(low, gpus=(GpuSample(),)), replace(low, gpus=(GpuSample(use=4.0),))]
    ).gpus[0] == GpuSample(use=4.0)
    slow, fast = (replace(low, gpus=(GpuSample(sm_clock=clock),)) for clock in (1980, 1985))
    assert repr(joined([slow, fast]).gpus[0].sm_clock) == "1982"


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
    path = node_directory(job_dir, 0) / "metrics.0"
    (node_directory(job_dir, 0) / THINNED).unlink()
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
                b"[1" + b",1" * 10 + b",[[-1,1,1,1,1,1,1]],[]]",
                b"[1" + b",1" * 10 + b",[[true,1,1,1,1,1,1]],[]]",
                b"[1" + b",1" * 10 + b",7,[]]",
                b"x" * (1 << 19),
                good[3][:40],
            ]
        ),
    )
    place = data.draw(st.integers(1, len(good)))
    path.write_bytes(b"".join(good[:place]) + data.draw(hostile) + b"\n" + b"".join(good[place:]))
    whole = [5.0 * number for number in range(len(good) - 1)]
    assert [m for m in times(job_dir) if m in whole] == whole


def test_truncated_file_gives_what_is_whole(job_dir: Path) -> None:
    write(job_dir, 0.02)
    path = node_directory(job_dir, 0) / "metrics.0"
    (node_directory(job_dir, 0) / THINNED).unlink()
    os.truncate(path, path.stat().st_size - 30)
    assert len(times(job_dir)) == 13
    os.truncate(path, 30)
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None


def test_large_file_of_short_lines_is_not_read_whole(job_dir: Path) -> None:
    path = node_directory(job_dir, 0) / "metrics.0"
    path.write_bytes(lines.facts_line(FACTS) + b"\n" * (7 << 20) + lines.sample_line(sample(1.0)))
    assert times(job_dir) == []


def test_pipe_and_directory_in_place_of_a_segment_are_skipped(job_dir: Path) -> None:
    os.mkfifo(node_directory(job_dir, 0) / "metrics.0")
    (node_directory(job_dir, 0) / "metrics.1").mkdir()
    (node_directory(job_dir, 0) / THINNED).mkdir()
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None
    assert list(sample_files.read(job_dir, 5)) == []
