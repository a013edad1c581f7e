"""The efficiency of a job, from the usage in its end records and from samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_metrics_file import FACTS, sample
from written_job import GIB

from clusterjob.cli import efficiency as shown
from clusterjob.core.records import Record
from clusterjob.insight.efficiency import averages, efficiency, of_samples, total
from clusterjob.node.logs import ends
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics.samples import GpuSample, NodeFacts, SampleWriter, Usage
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict

BUSY = {"seconds": 3500.0, "idle": 350.0, "mean": 80.0, "peak": 99.0, "memory": 40 * GIB}
LAZY = BUSY | {"idle": 3000.0}
UNUSED = BUSY | {"idle": 3500.0, "mean": 0.0, "peak": 0.0}


def job(directory: Path, nodes: int = 1, attempt: int = 0, **resources: Any) -> Record:
    """Return the record of a job that has succeeded, with its directory."""
    ends.directory(directory).mkdir(parents=True)
    for node in range(nodes):
        node_directory(directory, node).mkdir(parents=True)
    return Record(
        "job-1",
        "job",
        cluster="local",
        backend="local",
        job_dir=directory,
        nodes=nodes,
        submitted_at="2026-11-24T10:00:00Z",
        spec={"resources": resources, "metrics": True},
        end=Verdict(JobState.SUCCEEDED, 0, attempt=attempt).to_json(),
    )


def end(record: Record, node: int, usage: Any, attempt: int = 0) -> None:
    path = ends.directory(record.job_dir) / f"node{node}.json"
    files.write_json(path, {"node_rank": node, "attempt": attempt, "usage": usage})


def usage(**changed: Any) -> dict[str, Any]:
    return {
        "wall": 3600.0, "waited": 10.0, "startup": 12.5, "restarts": 0, "restart_seconds": 0.0,
        "ran": {}, "host": "gpu1", "cores": 64, "memory": 512 * GIB, "seconds": 3500.0,
        "cpu_seconds": 7000.0, "cpu_peak": 5.5, "memory_mean": 5 * GIB, "memory_peak": 9 * GIB,
        "machine_peak": 100 * GIB, "ranks": {"0": [3500.0, 0, 0], "1": [3500.0, 0, 0]},
        "gpus": [BUSY, BUSY], **changed,
    }  # fmt: skip


def shown_of(found: Any, *names: str) -> tuple[Any, ...]:
    return tuple(found[name] for name in names)


def test_efficiency_sums_the_nodes(tmp_path: Path) -> None:
    record = job(tmp_path / "job", nodes=2)
    end(record, 0, usage())
    end(record, 1, usage(host="gpu2", startup=20.0, restarts=2, restart_seconds=14.0))
    found = efficiency(record)
    nodes = found.pop("nodes")
    assert found == {
        "attempts": 1, "wall_seconds": 3600, "startup_seconds": 20, "gpu_hours_held": 4,
        "gpu_hours_idle": 0.4,  # 350 s and the 10 s before the workers, of 4 GPUs
        "restarts": 2, "restart_seconds": 14, "slowest_rank": None, "advice": [],
    }  # fmt: skip
    assert nodes[1] == {
        "node_rank": 1, "host": "gpu2", "cores": 64, "cpu_mean": 2.0, "cpu_peak": 5.5,
        "memory": 512 * GIB, "memory_mean": 5 * GIB, "memory_peak": 9 * GIB, "gpus": 2,
        "gpu_mean": 80.0, "gpu_peak": 99.0, "gpu_memory_peak": 40 * GIB,
    }  # fmt: skip
    use = (
        "CPU 2.0 of 64 cores, peak 5.5; memory 9.7 GB peak, 5.4 GB mean; GPU 80%, peak 99%;"
        " GPU memory 42.9 GB peak"
    )
    wall = "wall 1h 00m, start-up 20 s, 2 restarts cost 14 s, 4.00 GPU-hours, 0.40 of them idle"
    assert shown.lines({**found, "nodes": nodes}) == [
        f"efficiency: {wall}",
        f"  node 0 (gpu1): {use}",
        f"  node 1 (gpu2): {use}",
    ]


def test_attempts_of_requeued_job_are_summed(tmp_path: Path) -> None:
    record = job(tmp_path / "job", attempt=2)
    idle = UNUSED | {"seconds": 1000.0, "idle": 1000.0, "memory": 80 * GIB}
    attempts: list[Any] = [
        usage(wall=1000.0, seconds=1000.0, startup=7.5, memory_peak=20 * GIB, gpus=[idle, idle]),
        None,  # its agent was killed
        usage(restarts=1, restart_seconds=4.0, host="gpu9"),
    ]
    for attempt, used in enumerate(attempts):
        ends.write(record.job_dir, 0, {"attempt": attempt, "usage": used})
    ends.write(record.job_dir, 0, {"attempt": 1, "usage": usage()})  # too late
    found = efficiency(record)
    assert shown_of(found, "attempts", "wall_seconds", "startup_seconds") == (2, 4600, 20)
    assert shown_of(found, "gpu_hours_held", "gpu_hours_idle") == (2.556, 0.761)
    assert shown_of(found, "restarts", "restart_seconds") == (1, 4)
    (node,) = found["nodes"]
    assert shown_of(node, "host", "memory_peak", "gpu_memory_peak") == ("gpu9", 20 * GIB, 80 * GIB)
    assert shown_of(node, "cpu_mean", "gpu_mean") == (3.11, 62.2)
    assert shown.lines(found)[0].startswith("efficiency of 2 attempts: wall 1h 16m, start-up 20 s,")


@pytest.mark.parametrize(
    ("resources", "changed", "advice"),
    [
        ({"mem": 64 * GIB}, {}, "asked 64G, peak 9G: try --mem 12G"),
        ({"mem": 12 * GIB}, {}, None),
        ({"mem": 9 * GIB}, {}, "asked 9G, peak 9G: little room is left"),
        ({"mem": 0}, {}, None),  # all memory of the node
        (  # a control group's memory counts the page cache that is in use
            {"mem": 64 * GIB},
            {"memory": 64 * GIB, "machine_peak": 30 * GIB},
            "asked 64G, peak 30G: try --mem 38G",
        ),
        ({"mem": 64 * GIB}, {"seconds": 5.0}, None),  # too short to tell
        (
            {"cpus_per_task": 16},
            {},
            "asked 16 cores per worker, peak 2.8: try --cpus-per-task 4",
        ),
        ({"cpus_per_task": 4}, {}, None),
        ({}, {"gpus": [LAZY, LAZY]}, "the GPUs were idle 86% of the time"),
        (
            {},
            {"gpus": [BUSY, BUSY, BUSY, UNUSED]},
            "1 of 4 GPUs of each node were never used: try --gpus 3",
        ),
    ],
)
def test_advice_about_memory_and_cores(
    tmp_path: Path, resources: dict[str, int], changed: dict[str, Any], advice: str | None
) -> None:
    record = job(tmp_path / "job", **resources)
    end(record, 0, usage(**changed))
    assert efficiency(record)["advice"] == ([] if advice is None else [advice])


def test_slowest_rank_is_the_one_that_ran_longer_else_used_more_cpu(tmp_path: Path) -> None:
    record = job(tmp_path / "job", nodes=2)
    cpu = {"0": [100.0, 1, 0, 0], "1": [100.0, 1, 0, 0]}
    end(record, 0, usage(ranks=cpu, ran={"0": 500.0, "1": 500.5}))
    slow = {"2": [100.0, 1, 0, 0], "3": [141.0, 1, 0, 0]}
    end(record, 1, usage(ranks=slow, ran={"2": 500.0, "3": 501.0}))
    expected = {"rank": 3, "node_rank": 1, "host": "gpu1", "measure": "CPU time",
                "seconds": 41.0, "percent": 41.0}  # fmt: skip
    assert efficiency(record)["slowest_rank"] == expected
    end(record, 0, usage(ranks=cpu, ran={"0": 560.0, "1": 500.5}))
    assert (
        "  slowest: rank 0 (node 0, host gpu1), 59.2 s (12%) more run time than the median rank"
        in shown.lines(efficiency(record))
    )
    failed = replace(record, end=Verdict(JobState.FAILED, 1).to_json())  # its ranks were stopped
    assert efficiency(failed)["slowest_rank"] == expected


def write(record: Record, node: int, seconds: int, attempt: int = 0) -> None:
    facts = replace(FACTS, node_rank=node, attempt=attempt)
    writer = SampleWriter(record.job_dir, node)
    for number in range(seconds // 5 + 1):
        idle = number % 2
        gpus = (GpuSample(use=0.0 if idle else 60.0, memory=GIB),) * 8
        writer.add(facts, replace(sample(100.0 + 5 * number), gpus=gpus))


def test_killed_node_without_end_is_known_from_its_samples(tmp_path: Path) -> None:
    record = job(tmp_path / "job", nodes=3)
    end(record, 0, usage(gpus=[]))
    write(record, 1, seconds=600)
    found = efficiency(record)
    assert [node["node_rank"] for node in found["nodes"]] == [0, 1]
    assert shown_of(found["nodes"][1], "cpu_mean", "gpu_mean") == pytest.approx((8.3, 30), abs=1)
    hours = pytest.approx((8 * 600 / 3600, 4 * 600 / 3600), abs=0.02)
    assert shown_of(found, "gpu_hours_held", "gpu_hours_idle") == hours


def test_running_job_is_known_so_far_if_its_samples_are_read(tmp_path: Path) -> None:
    record = replace(job(tmp_path / "job"), end=None)
    assert efficiency(record, live=True) is None
    write(record, 0, seconds=100)
    assert efficiency(record) is None
    assert efficiency(record, live=True)["wall_seconds"] == 100
    write(record, 0, seconds=50, attempt=1)
    end(record, 0, usage(), attempt=0)  # of the attempt before
    found = efficiency(record, live=True)
    assert (found["attempts"], found["wall_seconds"]) == (2, 3650)
    found = efficiency(record, live=True, elapsed=62.0)  # the samples end before now
    assert found["wall_seconds"] == 3662


def test_usage_of_the_agent_and_of_its_samples_agree() -> None:
    facts = NodeFacts(0, "h", attempt=0, cores=4, memory=GIB)
    samples = [sample(5.0 * number, gpus=0, workers=2) for number in range(20)]
    agent = Usage(0.0)
    for one in samples:
        agent.add(facts, one)
    assert of_samples((facts, one) for one in samples) == {**agent.to_json(), "wall": 95.0}


def test_clock_jump_counts_as_no_time() -> None:
    summed = Usage(0.0)
    facts = NodeFacts(0, "h", attempt=0, cores=4, memory=GIB)
    for monotonic, jump in ((5.0, 0.0), (10.0, -86_400.0), (15.0, 1e6), (20.0, 0.0)):
        one = sample(monotonic, gpus=0, workers=1)
        summed.add(facts, replace(one, time=one.time + jump))
    assert summed.to_json()["seconds"] == 20


def test_array_is_summed(tmp_path: Path) -> None:
    jobs = [job(tmp_path / str(number), mem=64 * GIB) for number in range(4)]
    for number, record in enumerate(jobs[:3]):
        end(record, 0, usage(memory_peak=(number + 1) * GIB, restarts=1, restart_seconds=2.0))
    found = total(jobs)
    assert found.items() >= {
        "jobs": 3, "wall_seconds": 10_800, "gpu_hours_held": 6.0, "restarts": 3,
        "restart_seconds": 6.0, "cpu_mean": 2.0, "memory_peak": 3 * GIB,
    }.items()  # fmt: skip
    assert found["advice"] == ["asked 64G, peak 3G: try --mem 4G"]
    assert total(jobs[3:]) is None
    first, nodes, *_ = shown.lines(found)
    start = "efficiency of 3 jobs: wall 3h 00m, start-up 37 s, 3 restarts cost 6.0 s,"
    assert first.startswith(start)
    assert "all nodes: CPU 2.0 of 64 cores, peak 5.5; memory 3.2 GB peak; GPU 80%" in nodes
    assert averages(efficiency(jobs[0]))["cores"] == 64


def test_job_without_samples_has_durations_only(tmp_path: Path) -> None:
    record = job(tmp_path / "job")
    assert efficiency(record) is None
    end(record, 0, {"wall": 1.5, "waited": 0.5, "startup": 0.5, "ran": {}})
    found = efficiency(record)
    assert shown_of(found, "wall_seconds", "nodes", "gpu_hours_held") == (1.5, [], 0)
    assert shown.lines(found) == []
    end(record, 0, {"wall": 3600.0, "visible_gpus": 8})  # the driver's library is missing
    assert shown_of(efficiency(record), "gpu_hours_held", "gpu_hours_idle") == (8, None)
    end(record, 0, None)  # an older version
    assert efficiency(record) is None


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(changes=st.builds(lambda key, value: {key: value}, st.sampled_from(sorted(usage())), _JSON))
@example(changes={"ran": {"9" * 5000: 100.0, "1": 1.0, "2": 1.0}})
@example(changes={"ranks": {"9" * 5000: [100.0], "1": [1.0], "2": [5e-324]}, "seconds": 5e-324})
@example(changes={"host": "\ud800"})
@example(changes={"\ud800": 1.0})
def test_hostile_usage_never_raises(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    record = job(tmp_path_factory.mktemp("jobs") / "job", mem=64 * GIB, cpus_per_task=8)
    end(record, 0, usage(**changes))
    found = efficiency(record)
    assert all(isinstance(line, str) for line in shown.lines(found))
    assert json.dumps(found, allow_nan=False)
