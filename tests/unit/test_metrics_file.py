"""The file of a node's metrics: what is written is read; damage costs only its own lines."""

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
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics import samples
from clusterjob.node.metrics.sampler import SampleWriter
from clusterjob.node.metrics.samples import Gpu, GpuSample, NodeFacts, Sample, WorkerSample, joined
from clusterjob.node.system import files

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
    """Write samples of some hours, and return the size of the file."""
    writer = SampleWriter(job_dir, facts)
    for number in range(int(hours * 720)):
        writer.add(sample(begin + 5.0 * number, **kind))
    writer.flush()
    return files.size_of(sample_files.path_of(job_dir, 0))


def times(job_dir: Path, since: float | None = None) -> list[float]:
    return [each.monotonic for _, each in sample_files.read(job_dir, 0, since)]


def test_samples_are_read_as_they_were_written(job_dir: Path) -> None:
    writer = SampleWriter(job_dir, FACTS)
    plain = replace(sample(0.0), gpus=(GpuSample(),) * 8)
    writer.add(plain)
    writer.add(sample(5.0))
    writer.flush()
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


def test_samples_of_a_day_are_5_s_apart_in_the_first_hour_and_20_s_in_the_end(
    job_dir: Path,
) -> None:
    assert write(job_dir, 24, workers=1, gpus=0) < 1_000_000
    gaps = [b - a for a, b in itertools.pairwise(times(job_dir)[:-1])]
    assert set(gaps[:720]) == {5.0}
    assert gaps == sorted(gaps)
    assert set(gaps[-3000:]) == {20.0}


def test_since_counts_from_the_newest_sample_of_the_newest_attempt(job_dir: Path) -> None:
    write(job_dir, 2, begin=50_000.0)
    write(job_dir, 1, replace(FACTS, attempt=1), begin=100.0)  # another machine: its clock is young
    assert times(job_dir, 20.0) == [3675.0, 3680.0, 3685.0, 3690.0, 3695.0]
    read = [(facts.attempt, each.monotonic) for facts, each in sample_files.read(job_dir, 0)]
    assert read == sorted(read)
    assert {attempt for attempt, _ in read} == {0, 1}


def test_jump_of_the_wall_clock_changes_nothing_but_the_shown_time(job_dir: Path) -> None:
    writer = SampleWriter(job_dir, FACTS)
    for number in range(100):
        jump = -86_400.0 if number >= 50 else 0.0
        writer.add(replace(sample(5.0 * number), time=1_795_000_000.0 + jump))
    writer.flush()
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
    found = [(facts.attempt, one.monotonic) for facts, one in sample_files.lines(job_dir, 0, 60.0)]
    assert found == [(0, 60.0 * number) for number in range(12)] + [(1, 20.0)]


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
                b"[1" + b",1" * 10 + b",[[-1,1,1,1,1,1,1]],[]]",
                b"[1" + b",1" * 10 + b",[[true,1,1,1,1,1,1]],[]]",
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
    assert len(times(job_dir)) == 13
    os.truncate(path, 30)
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None


def test_file_of_short_lines_is_not_read_whole(job_dir: Path) -> None:
    path = sample_files.path_of(job_dir, 0)
    lines = [samples.sample_line(sample(at)) for at in (1.0, 2.0)]
    path.write_bytes(samples.facts_line(FACTS) + lines[0] + b"\n" * 600_000 + lines[1])
    assert times(job_dir) == [1.0]
    assert sample_files.latest(job_dir, 0)[1].monotonic == 1.0


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_directory_in_place_of_the_file_is_skipped(job_dir: Path, make) -> None:
    make(sample_files.path_of(job_dir, 0))
    assert times(job_dir) == []
    assert sample_files.latest(job_dir, 0) is None
    assert list(sample_files.read(job_dir, 5)) == []
