"""Jobs notify real HTTP servers, and commands, of their events."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from procs import TEST_TIMEOUT, Job, alive, all_pids, command_line, wait_until
from servers import Hook, silent, webhook

from clusterjob.core.notifications import NotifyPlace, packed
from clusterjob.node.logs.events import read_job_events

MakeJob = Callable[..., Job]
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


def run(job: Job, *program: str, code: int = 0, **given: Any) -> float:
    """Run a job to its end; return the seconds."""
    begin = time.monotonic()
    job.start_all(*program, env=settings(*given.pop("urls", ()), **given))
    assert job.wait() == [code] * job.nnodes
    return time.monotonic() - begin


def sent(hook: Hook, count: int) -> list[str]:
    wait_until(lambda: len(hook.received) >= count, TEST_TIMEOUT, f"{count} messages")
    return hook.states


def test_job_notifies_of_start_restart_and_end_in_order(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(2)
    options = ("--nproc-per-node", "1", "--max-restarts", "1", "--start", "exec")
    run(job, *options, job.script(FAILS_ONCE), urls=[hook.url], on="start end failure")
    assert hook.states == ["RUNNING", "RESTARTING, restart 1 of 1", "SUCCEEDED"]
    start, restart, end = (message["message"].splitlines() for message in hook.received)
    assert start[:2] == [f"train ({job.id}) on lab: RUNNING", "2 workers on 2 nodes"]
    assert restart[1].startswith("rank 1 (node 1, local rank 0, host ")
    assert "): ValueError: boom\\x1b[2J<b>" in restart[1]
    assert end[0].startswith(f"train ({job.id}) on lab: SUCCEEDED, after ")
    assert {lines[-1] for lines in (start, restart, end)} == {f"clusterjob logs {job.id}"}
    assert [message["type"] for message in hook.received] == ["info", "failure", "success"]


def test_killed_agent_of_node_0_that_starts_again_notifies_of_a_restart(
    make_job: MakeJob, hook: Hook
) -> None:
    job = make_job(1)
    options = ("--max-restarts", "1", "--start", "exec")
    env = settings(hook.url, on="start end failure requeue")
    job.start_all(*options, job.script(WAITS), env=env | {"CLUSTERJOB_ATTEMPT": "1"})
    assert sent(hook, 2)[1] == "RUNNING"  # after QUEUED AGAIN
    os.kill(job.agent_of(0), signal.SIGKILL)
    assert sent(hook, 3)[2] == "RESTARTING, restart 1 of 1"
    job.path("go").touch()
    assert job.wait() == [0]
    assert hook.states[3:] == ["SUCCEEDED"]


@pytest.mark.parametrize("returns", [False, True])
def test_coordinator_that_has_moved_notifies_instead_of_node_0(
    make_job: MakeJob, hook: Hook, *, returns: bool
) -> None:
    job = make_job(3)
    options = ("--spares", "1", "--max-restarts", "2", "--start", "exec", job.script(WAITS))
    env = settings(hook.url, on="start end failure requeue")
    job.start_all(*options, env=env)
    assert sent(hook, 1) == ["RUNNING"]
    job.agents[0].send_signal(signal.SIGKILL)  # the parent of node 0's agent
    assert sent(hook, 2)[1] == "RESTARTING, restart 1 of 3"  # one is due to the spare node
    if returns:
        job.start(0, *options, env=env)
        wait_until(lambda: _has_returned(job), TEST_TIMEOUT)
    job.path("go").touch()
    assert job.wait() == [-signal.SIGKILL, 0, 0, *[0] * returns]
    assert hook.states[2:] == ["SUCCEEDED"]


def _has_returned(job: Job) -> bool:
    events = read_job_events(job.dir)
    return (
        len([each for each in events if each.get("event") == "joined" and not each["node_rank"]])
        > 1
    )


def test_failure_is_notified_with_rank_host_and_exit_code(make_job: MakeJob, hook: Hook) -> None:
    job = make_job(1)
    run(job, "--", "bash", "-c", "echo no data >&2; exit 7", code=7, urls=[hook.url])
    [message] = hook.received
    assert message["title"] == f"{job.id} FAILED"
    first, reason, _ = message["message"].splitlines()
    assert first.startswith(f"train ({job.id}) on lab: FAILED, exit code 7, after ")
    assert reason == job.result["reason"]


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


def test_notification_is_sent_again_after_server_errors(make_job: MakeJob, hook: Hook) -> None:
    """The event is the start: at its end a job waits only 10 s for a notification."""
    hook.codes = [500, 503]
    job = make_job(1)
    job.start_all(job.script(WAITS), env=settings(hook.url, on="start"))
    assert sent(hook, 1) == ["RUNNING"]
    assert hook.requests == ["POST /pa55word"] * 3
    job.path("go").touch()
    assert job.wait() == [0]


@pytest.mark.slow
def test_failures_of_places_keep_exit_code_and_are_reported_without_url(
    make_job: MakeJob, hook: Hook
) -> None:
    """A POST that follows a redirect becomes a GET without the message: none is followed."""
    hook.codes = [302] * 9
    job = make_job(1)
    retried = "echo x >> tries; [ $(wc -l < tries) = 2 ]"
    failing = "echo 'no \x1b[2Jroute' >&2; exit 4"
    urls = [hook.url, "xml://127.0.0.1:9/pa55word"]
    run(job, "--", "bash", "-c", "exit 9", code=9, urls=urls, commands=(retried, failing))
    assert hook.requests == ["POST /pa55word"] * 4
    assert job.path("tries").read_text() == "x\nx\n"
    [agent] = job.agents
    messages = [line for line in job.stderr(agent).splitlines() if "notify: " in line]
    not_sent = "not sent after 4 attempts"
    assert sorted(message.removeprefix("clusterjob: notify: ") for message in messages) == [
        f"--notify-cmd: {not_sent}: exit code 4: no \\x1b[2Jroute",
        f"json://: {not_sent}: HTTP 302",
        f"xml://: {not_sent}: refused, or no answer",
    ]


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
    job.start(0, "--", "true", env=env | {"CLUSTERJOB_ATTEMPT": "1"})
    assert job.wait() == [0]
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


def test_missing_apprise_is_reported(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "apprise.py").write_text("raise ImportError('no apprise')\n")
    paths = f"{tmp_path / 'without'}:{os.environ['PYTHONPATH']}"
    job = make_job(1)
    env = settings("json://127.0.0.1:9/pa55word", commands=("touch told",))
    agent = job.start(0, "--", "true", env=env | {"PYTHONPATH": paths})
    assert job.wait() == [0]
    assert f"{sys.executable} has no apprise: pip install apprise there" in job.stderr(agent)
    assert job.path("told").exists(), "the command runs without apprise"


# -- commands --------------------------------------------------------------------------------------


def test_command_gets_facts_as_variables_and_as_json(make_job: MakeJob) -> None:
    job = make_job(1)
    command = 'env -0 > variables; cat > facts; echo "$KEY" > key'
    env = settings(commands=(command,)) | {"KEY": "of the job"}
    job.start_all("--", "bash", "-c", "exit 3", env=env)
    assert job.wait() == [3]
    facts = json.loads(job.path("facts").read_text())
    assert (facts["event"], facts["state"], facts["exit_code"]) == ("failure", "FAILED", 3)
    assert (facts["job_id"], facts["name"], facts["rank"]) == (job.id, "train", 0)
    pairs = job.path("variables").read_text().split("\0")
    variables = dict(pair.split("=", 1) for pair in pairs if pair)
    for name in ("EVENT", "STATE", "EXIT_CODE", "JOB_ID", "REASON", "TEXT"):
        assert variables[f"CLUSTERJOB_NOTIFY_{name}"] == str(facts[name.lower()])
    assert job.path("key").read_text() == "of the job\n"


@pytest.mark.slow
def test_command_that_hangs_is_killed_with_its_children(make_job: MakeJob) -> None:
    job = make_job(1)
    run(job, "--", "true", commands=("yes >&2 & echo $! > child; sleep 1000",))
    child = int(job.path("child").read_text())
    wait_until(lambda: not alive(child), TEST_TIMEOUT, "the end of the command's child")
