"""Python functions as jobs.

The process group is ready, and results and exceptions return to the caller. The command line
shows these jobs, too.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import TEST_TIMEOUT, new_folder, script
from slurm_cluster import SlurmCluster

import clusterjob
from clusterjob import ClusterJobError, JobFailed
from clusterjob.core.records import Records
from clusterjob.errors import UsageError

without_torch = pytest.mark.usefixtures("plain_python")


def reduce_ranks(value: float, *, factor: float = 1.0) -> tuple[int, int, float]:
    from clusterjob import bootstrap

    context = bootstrap.init()
    print(f"rank {context.rank} was here")
    return context.rank, context.world_size, context.reduce(value * factor + context.rank, "sum")


def form_group_itself() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 1:
        raise KeyError(f"after {total.item():g}")
    dist.destroy_process_group()
    return total.item()


def kill_itself() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def unreadable() -> None:
    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    raise Odd(1, 2)


def test_local_function_has_process_group_and_returns_results() -> None:
    job = clusterjob.submit(
        reduce_ranks,
        2.0,
        kwargs={"factor": 3.0},
        nodes=2,
        nproc_per_node=2,
        cluster="local",
        name="shared",
    )
    assert job.id.startswith("shared-")
    assert job.results() == [(rank, 4, 30.0) for rank in range(4)]
    assert job.result() == (0, 4, 30.0)
    assert job.done()
    assert job.state is clusterjob.JobState.SUCCEEDED
    done = subprocess.run(
        [sys.executable, "-m", "clusterjob", "logs", job.id],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] rank {rank} was here" for rank in range(4)
    ]


def test_function_may_form_the_group_itself_and_its_traceback_begins_in_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = clusterjob.submit(form_group_itself, cluster="local", nproc_per_node=2)
    with pytest.raises(KeyError, match="after 2") as caught:
        job.result(timeout=TEST_TIMEOUT)
    told = str(caught.value.__cause__)
    failure = job.wait().failure
    assert job.state is clusterjob.JobState.FAILED
    for text in (told, "\n".join(failure.last_lines)):
        frames = [line for line in text.splitlines() if 'File "' in line]
        assert len(frames) == 1
        assert frames[0].endswith("in form_group_itself")


@without_torch
def test_map_on_slurm_submits_one_array(slurm: SlurmCluster) -> None:
    found = clusterjob.map(abs, [-1, 2, -3], cluster="slurm", array="%2")
    array_id = found[0].id.rpartition("_")[0]
    assert [job.id for job in found] == [f"{array_id}_{index}" for index in range(3)]
    assert [job.result() for job in found] == [1, 2, 3]
    assert len(clusterjob.map(abs, [], cluster="slurm")) == 0


@without_torch
def test_map_on_local_cluster_submits_one_job_per_value() -> None:
    assert [job.result() for job in clusterjob.map(abs, [-1, 2], cluster="local")] == [1, 2]
    with pytest.raises(UsageError, match="'%1': the local cluster does not limit how many"):
        clusterjob.map(abs, [-1, 2], cluster="local", array="%1")


@without_torch
def test_result_of_killed_or_cancelled_function_raises_job_failed() -> None:
    job = clusterjob.submit(kill_itself, cluster="local")
    with pytest.raises(JobFailed, match="killed by SIGKILL"):
        job.result()
    job = clusterjob.submit(time.sleep, 600, cluster="local")
    job.cancel()
    with pytest.raises(JobFailed, match="CANCELLED"):
        job.result()


@without_torch
def test_unpicklable_exception_raises_job_failed_with_its_text() -> None:
    with pytest.raises(JobFailed, match="Odd: 1 and 2") as caught:
        clusterjob.submit(unreadable, cluster="local").result()
    assert "in unreadable" in str(caught.value.__cause__)


def test_function_of_main_script_imports_modules_next_to_script(tmp_path: Path) -> None:
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
    elsewhere = new_folder(tmp_path / "elsewhere")
    done = subprocess.run(
        [sys.executable, str(main)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT,
    )
    assert (done.returncode, done.stdout) == (0, "82\n"), done.stderr


def test_invalid_arguments_are_refused_before_submit() -> None:
    with pytest.raises(UsageError, match="no setting 'gpus_pr_node'"):
        clusterjob.submit(abs, 1, gpus_pr_node=2)
    for start in (clusterjob.submit, clusterjob.spawn, lambda text: clusterjob.map(text, [1])):
        with pytest.raises(UsageError, match=r"'train.py' is not a function") as caught:
            start("train.py")
        assert "SCRIPT" in caught.value.hint
    with pytest.raises(UsageError, match="nodes"):
        clusterjob.submit(abs, 1, nodes="many")
    with pytest.raises(UsageError, match="the cluster 'mlp' cannot return a function's results"):
        clusterjob.submit(abs, 1, cluster="mlp")
    with pytest.raises(ClusterJobError, match="cannot be pickled"):
        clusterjob.submit(threading.Lock().acquire, cluster="local")
    assert Records().all() == []
