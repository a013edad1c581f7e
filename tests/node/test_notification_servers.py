"""Jobs notify real HTTP servers, and commands, of their events."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from procs import TEST_TIMEOUT, Job, MakeJob, all_pids, command_line, wait_until
from servers import Hook, silent, webhook

from clusterjob.core.notifications import NotifyPlace, packed
from clusterjob.node.logs.events import read_job_events

# The first round fails on rank 1.
FAILS_ONCE = """
    import os
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("boom\\x1b[2J<b>")
"""
WAITS = """
    import os, pathlib, time
    pathlib.Path("up").touch()
    while not os.path.exists("go"):
        time.sleep(0.01)
"""


@pytest.fixture
def hook() -> Iterator[Hook]:
    with webhook() as server:
        yield server


def settings(
    *urls: str, commands: tuple[str, ...] = (), on: str = "end failure requeue", **job: Any
) -> dict[str, str]:
    """Return the variables of a node of a job with --notify and --notify-cmd."""
    places = [NotifyPlace.parse(url) for url in urls]
    job = {"name": "train", "cluster": "lab", **job}
    return {"CLUSTERJOB_NOTIFICATIONS": packed(places, commands, on.split(), {}, **job).decode()}


def sent(hook: Hook, count: int) -> list[str]:
    wait_until(lambda: len(hook.received) >= count, TEST_TIMEOUT, f"{count} messages")
    return hook.states


def test_job_notifies_of_start_restart_and_end_in_order(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(2)
    options = ("--nproc-per-node", "1", "--max-restarts", "1", "--start", "exec")
    env = settings(hook.url, commands=("touch told",), on="start end failure")
    job.run(*options, job.script(FAILS_ONCE), env=env)
    assert hook.states == ["RUNNING", "RESTARTING, restart 1 of 1", "SUCCEEDED"]
    assert job.path("told").exists()
    start, restart, end = (message["message"].splitlines() for message in hook.received)
    assert start[:2] == [f"train ({job.id}) on lab: RUNNING", "2 workers on 2 nodes"]
    assert restart[1].startswith("rank 1 (node 1, local rank 0, host ")
    assert "): ValueError: boom\\x1b[2J<b>" in restart[1]
    assert end[0].startswith(f"train ({job.id}) on lab: SUCCEEDED, after ")
    assert {lines[-1] for lines in (start, restart, end)} == {f"clusterjob logs {job.id}"}
    assert [message["type"] for message in hook.received] == ["info", "failure", "success"]


def test_coordinator_that_has_moved_notifies_instead_of_node_0(
    make_job: MakeJob, hook: Hook
) -> None:
    job = make_job(3)
    options = ("--spares", "1", "--max-restarts", "2", "--start", "exec", "--lease", "2")
    options += (job.script(WAITS),)
    env = settings(hook.url, on="start end failure requeue")
    job.start_all(*options, env=env)
    assert sent(hook, 1) == ["RUNNING"]
    job.agents[0].send_signal(signal.SIGKILL)  # the parent of node 0's agent
    assert sent(hook, 2)[1] == "RESTARTING, restart 1 of 3"  # one is due to the spare node
    job.start(0, *options, env=env)
    wait_until(lambda: _has_returned(job), TEST_TIMEOUT)
    job.path("go").touch()
    assert job.wait() == [-signal.SIGKILL, 0, 0, 0]
    assert hook.states[2:] == ["SUCCEEDED"]


def _has_returned(job: Job) -> bool:
    events = read_job_events(job.dir)
    return (
        len([each for each in events if each.get("event") == "joined" and not each["node_rank"]])
        > 1
    )


def test_url_is_in_no_argument_log_or_variable_of_worker(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(1)
    env = settings(hook.url, f"{hook.url}/2", on="start end")
    job.start_all(job.script(WAITS + "    print(sorted(os.environ.items()))\n"), env=env)
    wait_until(job.path("up").exists, TEST_TIMEOUT, "the worker")
    sent(hook, 2)
    assert not [pid for pid in all_pids() if "pa55word" in str(command_line(pid))]
    job.path("go").touch()
    assert job.wait() == [0]
    assert sent(hook, 4) == ["RUNNING"] * 2 + ["SUCCEEDED"] * 2
    written = b"".join(path.read_bytes() for path in job.directory.rglob("*") if path.is_file())
    assert b"CLUSTERJOB_JOB_ID" in written
    assert b"pa55word" not in written
    assert b"CLUSTERJOB_NOTIFICATIONS" not in written


@pytest.mark.slow
def test_server_that_never_answers_delays_last_process_by_at_most_ten_seconds(
    make_job: MakeJob, hook: Hook
) -> None:
    """The verdict is on disk before, and another place gets its message at once."""
    job = make_job(1)
    with silent() as url:
        job.start_all("--", "false", env=settings(url, hook.url))
        assert sent(hook, 1) == ["FAILED"]
        [agent] = job.agents
        wait_until((job.dir / "ends/node0.json").exists, TEST_TIMEOUT, "the end")
        assert agent.poll() is None
        begin = time.monotonic()
        assert job.wait() == [1]
        assert time.monotonic() - begin < 15
    assert job.result["state"] == "FAILED"
    assert "notify: the last notification was not sent in time" in job.stderr(agent)


def test_attempt_after_lost_attempt_is_notified_as_requeue(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(1)
    env = settings(hook.url, on="requeue")
    job.run("--", "true", env=env | {"CLUSTERJOB_ATTEMPT": "1"})
    assert hook.states == ["QUEUED AGAIN, attempt 1 starts"]


def test_preempted_job_is_notified_once_as_requeue(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(1)
    env = settings(hook.url, on="requeue")
    program = job.script(WAITS + "    raise SystemExit(75)\n")
    agent = job.start(0, "--warning", "60", program, env=env)
    wait_until(job.path("up").exists, TEST_TIMEOUT, "the worker")
    agent.send_signal(signal.SIGUSR1)
    wait_until(lambda: job.events("warned"), TEST_TIMEOUT, "the warning")
    job.path("go").touch()
    agent.wait(TEST_TIMEOUT)
    job.start(0, "--", "true", env=env | {"CLUSTERJOB_ATTEMPT": "1"})
    job.wait()
    assert hook.states == ["PREEMPTED"]
