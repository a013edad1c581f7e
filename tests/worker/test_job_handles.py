"""Handles of jobs in Python: timeouts, groups, event loops, reattaching and notebooks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import TEST_TIMEOUT, script
from procs import wait_until

import clusterjob
from clusterjob import ClusterJobError, Executor, Job, JobCancelled, JobGroup, JobState
from clusterjob.api import notebook
from clusterjob.core.records import Records
from clusterjob.errors import JobNotFound, UsageError

# No function here needs torch.
pytestmark = pytest.mark.usefixtures("plain_python")


def wait_for_file(path: str) -> str:
    import pathlib
    import time

    print("waits for", path, flush=True)
    while not pathlib.Path(path).exists():
        time.sleep(0.02)
    return pathlib.Path(path).read_text()


def add(one: int, two: int = 10, *, three: int = 0) -> int:
    return one + two + three


@pytest.fixture
def group(tmp_path: Path) -> JobGroup[str]:
    """Two jobs that wait for the files a and b."""
    return clusterjob.map(
        wait_for_file, [str(tmp_path / "a"), str(tmp_path / "b")], cluster="local", name="<i>two"
    )


def test_jobs_of_group_end_one_after_another(group: JobGroup[str], tmp_path: Path) -> None:
    first, second = group
    for wait in (first.wait, first.result, first.exception, group.wait, group.results):
        with pytest.raises(TimeoutError, match=r"not ended after 0.01 s \((PENDING|RUNNING)"):
            wait(timeout=0.01)
    assert not group.done()
    (tmp_path / "b").write_text("B")
    ends = clusterjob.as_completed(group, timeout=TEST_TIMEOUT)
    assert next(ends) is second
    assert second.result() == "B"
    assert group.states()[JobState.SUCCEEDED] == 1
    shown = group._repr_html_()
    assert shown.count("<td>SUCCEEDED</td>") == 1
    with pytest.raises(TimeoutError):
        list(clusterjob.as_completed(group, timeout=0.01))

    async def both() -> list[str]:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first, 0.05)
        assert first.state is JobState.RUNNING, "the end of the wait leaves the job running"
        waiting = asyncio.ensure_future(asyncio.gather(group, first))
        (tmp_path / "a").write_text("A")
        values, one = await waiting
        assert one == "A"
        return values

    assert asyncio.run(both()) == ["A", "B"]
    assert group.results() == ["A", "B"]
    assert [verdict.exit_code for verdict in group.wait()] == [0, 0]
    assert first.logs(tail=1).startswith("waits for ")
    assert list(first.follow()) == [f"waits for {tmp_path}/a"]
    assert group.cancel() == 0
    assert not first.cancel()


def test_cancelled_job_raises_cancelled_error(group: JobGroup[str]) -> None:
    first, second = group
    assert first.cancel()
    for call in (first.result, first.exception):
        with pytest.raises(JobCancelled, match="CANCELLED") as caught:
            call(timeout=TEST_TIMEOUT)
        assert isinstance(caught.value, concurrent.futures.CancelledError)

    async def wait() -> None:
        await first

    with pytest.raises(JobCancelled):
        asyncio.run(wait())
    assert second.cancel()


def test_reattach_by_id_prefix_latest_and_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    old = clusterjob.submit(wait_for_file, str(tmp_path / "a"), cluster="local", name="mine")
    new = clusterjob.submit(wait_for_file, str(tmp_path / "a"), cluster="local", name="mine")
    assert Job.get(old.id) == old
    assert Job.get(old.id[:-1]) == old
    assert Job.get("@") == new
    assert Job.get("mine") == new
    assert Job.get("@").result() == "A"
    assert Job.get(old.id).name == "mine"
    assert JobGroup.get(old.id).results() == ["A"]
    with pytest.raises(JobNotFound, match="there is no job 'nothing'"):
        Job.get("nothing")
    Records().remove(old.id)
    with pytest.raises(JobNotFound):
        old.wait()
    assert "there is no job" in old._repr_html_()


def test_script_job_has_verdict_and_logs_but_no_result(tmp_path: Path) -> None:
    path = script(tmp_path, "print('hello')\nraise SystemExit(3)\n")
    subprocess.run(
        [sys.executable, "-m", "clusterjob", "submit", "--cluster", "local", str(path)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    job = Job.get("@")
    assert job.wait(TEST_TIMEOUT).exit_code == 3
    assert job.logs() == job.logs(rank=0, node=0) == "hello\n"
    with pytest.raises(UsageError, match="has no rank 1"):
        job.logs(rank=1)
    with pytest.raises(UsageError, match="has no node 2"):
        next(job.follow(node=2))
    with pytest.raises(ClusterJobError, match="runs a program, which has no result"):
        job.result()


@pytest.mark.slow
def test_executor_passes_keyword_arguments_and_waits() -> None:
    with Executor(cluster="local") as executor:
        one = executor.submit(add, 1, two=2, three=3)
        many = executor.map(add, [1, 2], [5, 6, 7])
    assert one.done()
    assert one.result() == 6
    assert many.results() == [6, 8]
    with pytest.raises(UsageError, match="no setting 'sweep'"):
        Executor(cluster="local", sweep=["a"]).submit(add, 1)  # type: ignore[call-arg]


def test_ctrl_c_in_result_leaves_job_running(tmp_path: Path) -> None:
    main = script(
        tmp_path,
        f"""
        import clusterjob, pathlib, time

        def wait():
            while not pathlib.Path({str(tmp_path / "leave")!r}).exists():
                time.sleep(0.02)
            return 7

        if __name__ == "__main__":
            job = clusterjob.submit(wait, cluster="local")
            print(job.id, flush=True)
            job.result()
        """,
    )
    process = subprocess.Popen(
        [sys.executable, str(main)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    job = Job.get(process.stdout.readline().strip())
    wait_until(lambda: job.state is JobState.RUNNING, TEST_TIMEOUT, "the worker runs")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=TEST_TIMEOUT)
    assert "KeyboardInterrupt" in err
    assert not job.done()
    (tmp_path / "leave").touch()
    assert job.result(TEST_TIMEOUT) == 7


def test_html_escapes_foreign_text() -> None:
    job = clusterjob.submit(int, "<script>alert(1)</script>\x1b[2J & more", cluster="local")
    job.wait(TEST_TIMEOUT)
    shown = job._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\" in shown
    assert "&amp; more" in shown
    assert ">FAILED<" in shown


def test_html_of_silent_hosts_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job = clusterjob.submit(wait_for_file, str(tmp_path / "a"), cluster="local")
    answer = notebook.waiting._locked
    ready = tmp_path / "answer"

    def slow(records: object) -> object:
        wait_until(ready.exists, TEST_TIMEOUT, "the hosts answer")
        return answer(records)  # type: ignore[arg-type]

    monkeypatch.setattr(notebook.waiting, "_locked", slow)
    monkeypatch.setattr(notebook, "_TIMEOUT", 0.05)
    begin = time.monotonic()
    assert "UNKNOWN" in job._repr_html_()
    with pytest.raises(TimeoutError, match="its hosts do not answer"):
        job.wait(timeout=0.05)
    assert time.monotonic() - begin < TEST_TIMEOUT / 2
    ready.touch()
    monkeypatch.undo()
    assert job.cancel()
