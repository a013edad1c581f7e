"""Python functions as jobs: the process group is ready, results and exceptions come back, the jobs
are jobs like all others.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import PATIENCE, script
from slurm_cluster import SlurmCluster

import clusterjob
from clusterjob import ClusterJobError, JobFailed
from clusterjob.errors import UsageError


def share(value: float, *, factor: float = 1.0) -> tuple[int, int, float]:
    from clusterjob import bootstrap

    context = bootstrap.init()
    print(f"rank {context.rank} was here")
    return context.rank, context.world_size, context.reduce(value * factor + context.rank, "sum")


def raise_on_rank_1() -> int:
    from clusterjob import bootstrap

    context = bootstrap.init()
    if context.rank == 1:
        raise KeyError("no such layer")
    context.barrier()
    return 0


def die() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def unreadable() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    raise Odd(1, 2)


def check_group(cluster: str) -> None:
    job = clusterjob.submit(
        share,
        2.0,
        kwargs={"factor": 3.0},
        nodes=2,
        nproc_per_node=2,
        cluster=cluster,
        name="shared",
    )
    assert job.id.startswith("shared-")
    assert job.results() == [(rank, 4, 30.0) for rank in range(4)]
    assert job.result() == (0, 4, 30.0)
    assert job.done()
    assert job.state() is clusterjob.JobState.SUCCEEDED
    done = subprocess.run(
        [sys.executable, "-m", "clusterjob", "logs", job.id],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] rank {rank} was here" for rank in range(4)
    ]
    listed = subprocess.run(
        [sys.executable, "-m", "clusterjob", "list"], capture_output=True, text=True, check=True
    ).stdout
    assert job.id in listed


def check_error(cluster: str) -> None:
    job = clusterjob.submit(raise_on_rank_1, nproc_per_node=2, cluster=cluster)
    with pytest.raises(KeyError, match="no such layer") as caught:
        job.result()
    assert "in raise_on_rank_1" in str(caught.value.__cause__)
    assert job.state() is clusterjob.JobState.FAILED


def test_the_group_is_ready_and_results_come_back_from_this_machine() -> None:
    check_group("local")


def test_the_group_is_ready_and_results_come_back_from_slurm(slurm: SlurmCluster) -> None:
    check_group("slurm")


def test_an_exception_comes_back_from_this_machine() -> None:
    check_error("local")


def test_an_exception_comes_back_from_slurm(slurm: SlurmCluster) -> None:
    check_error("slurm")


def test_values_are_one_array_of_slurm(slurm: SlurmCluster) -> None:
    found = clusterjob.map(abs, [-1, 2, -3], cluster="slurm", array="%2")
    whole = found[0].id.rpartition("_")[0]
    assert [job.id for job in found] == [f"{whole}_{index}" for index in range(3)]
    assert [job.result() for job in found] == [1, 2, 3]
    assert clusterjob.map(abs, [], cluster="slurm") == []


def test_values_are_jobs_of_their_own_on_this_machine() -> None:
    assert [job.result() for job in clusterjob.map(abs, [-1, 2], cluster="local")] == [1, 2]


def test_a_worker_that_is_killed_and_a_job_that_is_cancelled_have_no_result() -> None:
    job = clusterjob.submit(die, cluster="local")
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        job.result()
    job = clusterjob.submit(time.sleep, 600, cluster="local")
    job.cancel()
    with pytest.raises(JobFailed, match="CANCELLED"):
        job.result()


def test_an_exception_that_cannot_be_read_back_leaves_its_text() -> None:
    with pytest.raises(JobFailed, match="Odd: 1 and 2") as caught:
        clusterjob.submit(unreadable, cluster="local").result()
    assert "in unreadable" in str(caught.value.__cause__)


def test_functions_of_main_travel_and_find_the_modules_beside_them(tmp_path: Path) -> None:
    script(tmp_path, "OFFSET = 40\n", "beside.py")
    main = script(
        tmp_path,
        """
        import clusterjob
        import beside

        class Point:
            def __init__(self, x): self.x = x

        def move(point):
            import beside as found
            return Point(point.x + found.OFFSET + beside.OFFSET)

        if __name__ == "__main__":
            print(clusterjob.submit(move, Point(2), cluster="local").result().x)
        """,
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = subprocess.run(
        [sys.executable, str(main)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "82\n"), done.stderr


def test_what_cannot_be_is_said_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="no setting 'gpus_pr_node'"):
        clusterjob.submit(abs, 1, gpus_pr_node=2)
    for start in (clusterjob.submit, clusterjob.spawn, lambda text: clusterjob.map(text, [1])):
        with pytest.raises(UsageError, match=r"'train.py' is not a function") as caught:
            start("train.py")
        assert "SCRIPT" in caught.value.hint
    with pytest.raises(UsageError, match="nodes"):
        clusterjob.submit(abs, 1, nodes="many")
    with pytest.raises(UsageError, match="do not come back from the cluster 'ssh'"):
        clusterjob.submit(abs, 1, cluster="ssh", hosts="a,b")
    with pytest.raises(ClusterJobError, match="cannot be pickled"):
        clusterjob.submit(threading.Lock().acquire, cluster="local")
    done = subprocess.run(
        [sys.executable, "-m", "clusterjob", "list", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"jobs": []' in done.stdout
