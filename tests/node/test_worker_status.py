"""Workers that do not come to the roll-call: their agents say what they do, and blame them once the
others give up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import MARGIN, so_far
from procs import PATIENCE, WITH_TORCH, Job, wait_until

from clusterjob.node.rendezvous.missing_ranks import Search
from clusterjob.node.rendezvous.root_cause import EXIT_PATIENCE, Judge
from clusterjob.node.verdict import Failure, is_roll_call_end
from clusterjob.node.workers import sightings, stacks

NewJob = Callable[..., Job]
HOST = socket.gethostname()

LATE = """
    import os, pathlib, signal, sys, threading, time
    from clusterjob import bootstrap

    def load_data():
        STUCK

    pathlib.Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if os.environ["RANK"] == "LATE":
        load_data()
    with bootstrap.init(timeout=6) as ctx:
        print("met", ctx.rank, flush=True)
"""


def late(job: Job, rank: int, stuck: str) -> str:
    return job.script(LATE.replace("LATE", str(rank)).replace("STUCK", stuck))


def line_of(job: Job, rank: int) -> str:
    """Return which line of the script hangs."""
    return next(
        str(number)
        for number, line in enumerate(job.path("script.py").read_text().splitlines(), 1)
        if "def load_data" in line
    )


@pytest.mark.parametrize(
    "stuck", ["time.sleep(1000)", "threading.Lock().acquire() and threading.Event().wait()"]
)
def test_a_forked_worker_that_is_stuck_is_named_shown_and_blamed(
    new_job: NewJob, stuck: str
) -> None:
    job = new_job(2)
    begin = time.monotonic()
    job.start_all(
        "--start", "fork", "--nproc-per-node", "2", late(job, 3, stuck), python=WITH_TORCH
    )
    log = job.dir / "logs" / "node0" / "rank0.err"
    wait_until(lambda: log.exists() and "load_data" in log.read_text(), PATIENCE)
    assert job.wait() == [1, 1]
    assert time.monotonic() - begin < 40
    pid, number = job.path("pid3").read_text(), int(line_of(job, 3)) + 1
    said = log.read_text()
    who = f"rank 3 (node 1, local rank 1, host {HOST}"
    assert f"clusterjob: {who}, pid {pid}): has run for " in said
    shown = f"script.py line {number}, load_data"
    assert "s and has not come to bootstrap.init(); it is in " in said
    assert shown in said
    result = job.result
    assert result["reason"].startswith(
        f"{who}): the others gave up waiting for it (pid {pid}): it has run for "
    )
    assert result["failure"]["rank"] == 3
    assert any("in load_data" in line for line in result["failure"]["last_lines"])
    assert (
        set() < {each["rank"] for each in result["consequences"]} <= {0, 1, 2}
    )  # whoever had the time to say so
    own = job.log(1, "rank3.err")
    assert "clusterjob: the others gave up waiting for this process, which has run for " in own
    assert f'script.py", line {number} in load_data' in own
    assert not any("met" in job.log(rank // 2, f"rank{rank}.out") for rank in range(4))


@pytest.mark.slow
def test_a_worker_that_was_executed_is_looked_at_and_not_signalled(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all("--start", "exec", late(job, 1, "time.sleep(1000)"), python=WITH_TORCH)
    assert job.wait() == [1, 1]
    pid = job.path("pid1").read_text()
    said = job.log(0, "rank0.err")
    assert f"rank 1 (node 1, local rank 0, host {HOST}, pid {pid}): has run for " in said
    assert "s and has not come to bootstrap.init(); it sleeps" in said
    failure = job.result["failure"]
    assert (failure["rank"], failure["signal"]) == (1, None)
    assert "it has run for" in failure["message"]


def test_rank_0_is_looked_for_by_the_others(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(late(job, 0, "time.sleep(1000)"), python=WITH_TORCH)
    assert job.wait() == [1, 1]
    said = job.log(1, "rank1.err")
    waiting = "clusterjob: waiting for rank 0 (node 0): started, and not yet at init(); "
    told = next(line for line in said.splitlines() if line.startswith(waiting))
    assert 4 <= so_far(told) <= 4 + MARGIN
    assert (
        f"clusterjob: rank 0 (node 0, local rank 0, host {HOST}, pid {job.path('pid0').read_text()}): has run for "
        in said
    )
    assert job.result["failure"]["rank"] == 0
    assert any("in load_data" in line for line in job.result["failure"]["last_lines"])


@pytest.mark.slow
def test_one_that_left_without_a_word_is_blamed(new_job: NewJob) -> None:
    job = new_job(1)
    job.start_all("--nproc-per-node", "2", late(job, 1, "sys.exit(0)"), python=WITH_TORCH)
    assert job.wait() == [1]
    assert "): exited with code 0 and never came to the roll-call" in job.log(0, "rank0.err")
    assert job.result["failure"]["rank"] == 1
    assert "it exited with code 0 and never came to the roll-call" in job.result["reason"]


def test_a_failure_ends_the_job_at_once_as_ever(new_job: NewJob) -> None:
    job = new_job(1)
    begin = time.monotonic()
    job.start_all("--nproc-per-node", "2", late(job, 1, "os._exit(7)"), python=WITH_TORCH)
    assert job.wait() == [7]
    assert time.monotonic() - begin < 30
    assert job.result["reason"].endswith("exited with code 7")


@pytest.mark.slow
def test_a_script_that_waits_in_vain_and_goes_on_is_no_failure(new_job: NewJob) -> None:
    job = new_job(1)
    script = job.script("""
        import os, time
        from clusterjob import bootstrap
        from clusterjob.errors import GangError
        if os.environ["RANK"] == "1":
            while not os.path.exists("alone"):
                time.sleep(0.05)
            time.sleep(3)
        else:
            try:
                bootstrap.init(timeout=2)
            except GangError:
                print("alone", flush=True)
                open("alone", "w").close()
    """)
    job.start_all("--nproc-per-node", "2", script, python=WITH_TORCH)
    assert job.wait() == [0]
    assert job.log(0, "rank0.out") == "alone\n"
    assert "gave up waiting for this process" in job.log(0, "rank1.err")


@pytest.mark.slow
def test_a_handler_of_the_scripts_own_is_left_alone(new_job: NewJob) -> None:
    job = new_job(1)
    own = (
        f"signal.signal({stacks.SIGNAL}, lambda *_: pathlib.Path('hit').touch()); time.sleep(1000)"
    )
    job.start_all("--start", "fork", "--nproc-per-node", "2", late(job, 1, own), python=WITH_TORCH)
    assert job.wait() == [1]
    assert not job.path("hit").exists()
    assert "does not answer the roll-call; it sleeps" in job.log(0, "rank0.err")
    assert job.result["failure"]["rank"] == 1


# -- the lead's part -------------------------------------------------------------------------------------------------------

GAVE_UP = Failure(
    0,
    0,
    node_rank=0,
    host="h",
    exit_code=1,
    signal=None,
    message="GangError: waiting for rank 3 (node 1): started, and not yet at init(); gave up after 7 s",
    last_lines=(),
    effect=True,
)
STUCK = Failure(
    3,
    0,
    node_rank=1,
    host="h",
    exit_code=1,
    signal=None,
    message="the others gave up waiting for it: it sleeps",
)
QUESTION = {"t": "missing", "local_rank": 1, "ranks": [0, 2, 3, 5, 6, 99], "final": False}
ANSWER = {"t": "where", "final": True, "lines": [], "failures": [STUCK.to_json()]}


def test_the_agents_of_the_missing_ranks_are_asked_where_nodes_differ_in_size() -> None:
    search = Search([0, 3, 4], 7)
    assert search.ask(0, QUESTION) == {
        0: [0, 2],
        1: [3],
        2: [5, 6],
    }  # and nobody of a rank that is not in the job
    answer = {"t": "where", "final": False, "lines": ["rank 3: it sleeps"], "failures": []}
    assert search.answer(1, answer) == (
        0,
        {"t": "found", "local_rank": 1, "lines": ["rank 3: it sleeps"]},
    )
    assert search.answered


def test_the_missing_are_blamed_once_somebody_has_failed_of_it() -> None:
    search = Search([0, 3, 4], 7)
    search.ask(0, QUESTION | {"final": True, "ranks": [3]})
    assert not search.answered
    assert search.answer(1, ANSWER) is None
    assert search.answered
    search.note(
        Failure(
            0,
            0,
            node_rank=0,
            host="h",
            exit_code=1,
            signal=None,
            message="ValueError: Connection closed by peer",
            last_lines=(),
            effect=True,
        )
    )
    assert search.causes() == []  # nobody has failed of the roll-call so far
    search.note(GAVE_UP)
    assert search.causes() == [STUCK]
    assert search.causes() == []


def test_what_was_asked_before_does_not_count_for_a_later_roll_call() -> None:
    search = Search([0, 3], 6)
    search.ask(0, QUESTION | {"final": True, "ranks": [3]})
    search.answer(1, ANSWER)
    search.ask(0, QUESTION | {"final": True, "ranks": [4]})
    search.note(GAVE_UP)
    assert search.causes() == []


def test_effects_wait_for_the_answer_and_causes_do_not() -> None:
    judge = Judge()
    judge.await_cause(100.0, "missing")
    judge.hear(GAVE_UP, 10.0, exited=True)
    assert judge.stop_due() == 100.0
    judge.await_cause(0.0, "missing")
    assert 10.0 < judge.stop_due() < 10.0 + EXIT_PATIENCE
    judge.await_cause(100.0, "missing")
    judge.hear(STUCK, 11.0, exited=True)
    assert judge.stop_due() == 0.0
    assert judge.root() == STUCK


@pytest.mark.parametrize(
    "message",
    [
        "GangError: waiting for ranks 1 (node 0), 2 (node 0): started, and not yet at init(); gave up after 600 s",
        "GangError: rank 1 on h (pid 4) was at the roll-call, and rank 0 does not end it: wait timeout",
    ],
)
def test_the_words_of_those_who_gave_up_are_known(message: str) -> None:
    assert is_roll_call_end(
        Failure(0, 0, node_rank=0, host="h", exit_code=1, signal=None, message=message)
    )
    assert not is_roll_call_end(
        Failure(
            0,
            0,
            node_rank=0,
            host="h",
            exit_code=1,
            signal=None,
            message=message.replace("GangError", "ValueError"),
        )
    )


@pytest.mark.parametrize("ranks", ["1", 1, None, [True], [-1], ["1"], [[1]], {"1": 1}])
def test_a_question_that_is_none_is_refused(ranks: object) -> None:
    with pytest.raises(ValueError, match="not a list of ranks"):
        sightings.wanted({"local_rank": 0, "missing": ranks})
    assert sightings.wanted({"local_rank": 0, "message": "boom"}) is None
    asked = sightings.wanted({"local_rank": 0, "missing": list(range(20)), "final": 1})
    assert asked == {"t": "missing", "local_rank": 0, "ranks": list(range(8)), "final": False}


# -- one process -----------------------------------------------------------------------------------------------------------


def child(directory: Path, text: str) -> subprocess.Popen[bytes]:
    path = directory / "child.py"
    path.write_text(
        "import pathlib, os, signal, sys, time\nfrom clusterjob.node.workers import stacks\n"
        + textwrap.dedent(text)
    )
    process = subprocess.Popen([sys.executable, "-S", str(path)], cwd=directory)
    wait_until(lambda: (directory / "up").exists() or process.poll() is not None, 20)
    return process


def ask(process: subprocess.Popen[bytes]) -> tuple[bool, tuple[str, ...]]:
    question = stacks.Question(process.pid)
    with contextlib.suppress(AssertionError):  # where nothing is written all the time is over
        wait_until(question.written, stacks.ANSWER_SECONDS)
    time.sleep(0.3)  # for the rest of the lines
    return question.asked, question.answer()


@pytest.mark.parametrize(
    "text",
    [
        "pathlib.Path('up').touch(); time.sleep(1000)",  # never offered
        "stacks.offer(); signal.signal(stacks.SIGNAL, signal.SIG_DFL); pathlib.Path('up').touch(); time.sleep(1000)",
        "signal.signal(stacks.SIGNAL, print); stacks.offer(); pathlib.Path('up').touch(); time.sleep(1000)",
        "stacks.offer(); os.execvp('sh', ['sh', '-c', 'touch up; exec sleep 1000'])",
        "stacks.offer(); os.closerange(3, 100); open('own', 'w'); pathlib.Path('up').touch(); time.sleep(1000)",
    ],
)
def test_a_process_that_offers_nothing_is_not_asked_and_lives(tmp_path: Path, text: str) -> None:
    process = child(tmp_path, text)
    try:
        assert ask(process) == (False, ())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_is_asked_again_and_again_and_its_sleep_goes_on(tmp_path: Path) -> None:
    process = child(tmp_path, """
        def inner():
            pathlib.Path('up').touch()
            begin = time.monotonic()
            time.sleep(4)
            sys.exit(0 if time.monotonic() - begin >= 4 else 3)
        stacks.offer()
        inner()
    """)  # fmt: skip
    try:
        wait_until(lambda: stacks.kernel_words(process.pid).startswith("it sleeps"), 10)
        for _ in range(2):
            asked, lines = ask(process)
            assert asked
            frames = stacks.main_thread(lines)
            assert len(frames) == 2
            assert stacks.in_words(frames) == "it is in child.py line 7, inner"
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_stack_in_words() -> None:
    library = os.__file__
    frames = (
        f'  File "{library}", line 1 in wait',
        '  File "/x/my data.py", line 7 in load',
        '  File "/x/train.py", line 9 in <module>',
    )
    assert stacks.in_words(frames) == "it is in os.py line 1, wait, from my data.py line 7, load"
    assert stacks.in_words(frames[1:]) == "it is in my data.py line 7, load"
    importing = (
        frames[1],
        '  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed',
        frames[2],
    )
    assert stacks.in_words(importing) == "it imports, in my data.py line 7, load"
    assert stacks.in_words(()) == "it does not say where it is"
    lines = (
        "Thread 0x1 (most recent call first):",
        frames[0],
        "",
        "Current thread 0x2 (most recent call first):",
        *frames[1:],
    )
    assert stacks.main_thread(lines) == frames[1:]
    assert (
        stacks.main_thread(
            (*lines, '  File "clusterjob/node/program.py", line 3 in run_as_main', frames[0])
        )
        == frames[1:]
    )


def test_the_kernel_says_what_it_knows(tmp_path: Path) -> None:
    process = child(tmp_path, "pathlib.Path('up').touch(); time.sleep(1000)")
    try:
        wait_until(lambda: stacks.kernel_words(process.pid).startswith("it sleeps"), 10)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: stacks.kernel_words(process.pid).startswith("it is stopped"), 10)
    finally:
        process.kill()
        process.wait()
    assert stacks.kernel_words(process.pid) == "it is about to end"
