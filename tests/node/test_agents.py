"""Whole jobs of one to three nodes on this machine: real agents, real workers, and what becomes of
them under faults.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from procs import (
    PATIENCE,
    WITH_TORCH,
    Job,
    alive,
    below,
    command_line,
    heeds,
    nothing_left,
    own_marked,
    wait_until,
)

NewJob = Callable[..., Job]
HOST = socket.gethostname()
QUICK_LEASE = ("--heartbeat", "0.2", "--lease", "1.5")

# Names itself by a file, then waits for ever.
SLEEPER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""
# Leaves a process behind that has escaped its session and its parent.
DAEMON = """
    import os, pathlib, time
    def leave_a_daemon(name):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                pathlib.Path(name + ".new").write_text(str(os.getpid()))
                os.rename(name + ".new", name)
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        os.wait()
        while not os.path.exists(name):
            time.sleep(0.01)
"""


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Give a port at which an agent can listen, and which nobody else is given meanwhile: it is
    bound, and nobody listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# -- a job that goes well --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_two_nodes_succeed_together(new_job: NewJob, start: str) -> None:
    job = new_job(2)
    job.start_all(
        "--start",
        start,
        "--nproc-per-node",
        "2",
        job.script("import os; print('rank', os.environ['RANK'])"),
    )
    assert job.wait() == [0, 0]
    result = job.result
    assert (result["state"], result["exit_code"], result["failure"], result["consequences"]) == (
        "SUCCEEDED",
        0,
        None,
        [],
    )
    assert (result["schema"], result["restarts"], result["attempt"]) == (1, 0, 0)
    assert result["started_at"] <= result["ended_at"]
    for rank in range(4):
        assert job.log(rank // 2, f"rank{rank}.out") == f"rank {rank}\n"
        assert job.log(rank // 2, f"rank{rank}.err") == ""
        assert f"[{rank}] rank {rank}\n" in job.stdout(job.agents[rank // 2])
    assert [job.end_of(node)["state"] for node in (0, 1)] == ["SUCCEEDED", "SUCCEEDED"]
    assert [len(job.events(name)) for name in ("listening", "joined", "started", "ended")] == [
        1,
        2,
        1,
        1,
    ]
    assert "SUCCEEDED" in job.stderr(job.agents[0])
    assert not own_marked()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_nodes_of_different_size_get_consecutive_ranks(
    new_job: NewJob, order: tuple[int, ...]
) -> None:
    job = new_job(3)
    script = job.script("""
        import json, os
        names = [name for name in os.environ if name.startswith(("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "CLUSTERJOB_"))]
        print(json.dumps({name: os.environ[name] for name in [*names, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]}))
    """)
    sizes = [3, 1, 2]
    for node_rank in order:
        job.start(
            node_rank,
            "--nproc-per-node",
            str(sizes[node_rank]),
            "--max-restarts",
            "4",
            script,
            env={"CLUSTERJOB_ATTEMPT": "7"},
        )
    assert job.wait() == [0, 0, 0]
    rank = 0
    ports = set()
    for node_rank, size in enumerate(sizes):
        for local_rank in range(size):
            seen = json.loads(job.log(node_rank, f"rank{rank}.attempt7.out"))
            ports.add(seen.pop("MASTER_PORT"))
            assert seen.pop("CLUSTERJOB_REPORT_FD")
            assert seen.items() >= {
                "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "6",
                "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": str(node_rank),
                "GROUP_WORLD_SIZE": "3", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": "6",
                "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": job.id,
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "4",
                "CLUSTERJOB_JOB_ID": job.id, "CLUSTERJOB_JOB_DIR": str(job.dir),
                "CLUSTERJOB_ATTEMPT": "7",
            }.items()  # fmt: skip
            rank += 1
    assert len(ports) == 1
    assert job.result["attempt"] == 7


def test_one_node_needs_no_variables(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job()
    script = job.script(
        "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-S",
        "-m",
        "clusterjob.node",
        "--nproc-per-node",
        "2",
        script,
        "--nproc-per-node",
        "a b\n'\"",
    ]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=PATIENCE, env=env
    )
    assert ended.returncode == 0
    arguments = ["--nproc-per-node", "a b\n'\""]
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] {rank} 2 {arguments}" for rank in (0, 1)
    ]
    assert ended.stderr == "clusterjob: SUCCEEDED\n"
    assert not list(
        tmp_path.glob("clusterjob-*")
    )  # a directory that nobody named goes with its job


def test_hostile_paths_names_and_arguments(new_job: NewJob, weird_path: Path) -> None:
    job = new_job(2)
    job.dir = weird_path / "job"
    script = weird_path / "-s'c\"r i\np☃t.py"
    script.write_text("import os, sys\nprint(ascii(sys.argv[1:]), ascii(__file__))")
    arguments = ["", "a b", "'", '"', "$(touch x)", "new\nline", "-m", "--", "☃", "\udcff"]
    job.start_all(str(script), *arguments)
    assert job.wait() == [0, 0]
    assert job.log(1, "rank1.out") == f"{arguments!a} {str(script)!a}\n"


def test_the_token_is_in_no_file_and_no_command_line(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(job.script(SLEEPER))
    job.wait_for("up0", "up1")
    assert own_marked()
    assert not [pid for pid in own_marked() if job.token in command_line(pid)]
    job.agents[1].terminate()
    job.wait()
    for path in job.dir.rglob("*"):
        assert path.is_dir() or job.token not in path.read_text(), path
    assert not any(job.token in job.stdout(agent) + job.stderr(agent) for agent in job.agents)


def test_workers_start_with_empty_stdin_and_no_stranger_s_descriptors(new_job: NewJob) -> None:
    job = new_job()
    script = job.script("""
        import os, sys
        print(repr(sys.stdin.read()))
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            try:
                print(name, os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
            except OSError:
                pass  # listdir's own
    """)
    job.start(0, "--nproc-per-node", "2", script)
    assert job.wait() == [0]
    for rank in (0, 1):
        said = job.log(0, f"rank{rank}.out").splitlines()
        assert said[0] == "''"
        descriptors = dict(line.split(" ", 1) for line in said[1:])
        assert [descriptors.pop(number).rpartition("/")[2] for number in "012"] == [
            "null",
            f"rank{rank}.out",
            f"rank{rank}.err",
        ]
        others = sorted(
            descriptors.values()
        )  # the second is the worker's own, where it would show its stack
        assert others == ["/memfd", "pipe"], (
            "beside the report pipe nothing of the starter's may reach a worker"
        )


# -- a failure anywhere ends the job and is named ------------------------------------------------------------------------

ENDS = {
    "raise": ("raise ValueError('boom')", 1, None, "ValueError: boom"),
    "exit": ("sys.exit(3)", 3, None, ""),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", "SIGKILL"),
    "segv": ("ctypes.string_at(0)", 139, "SIGSEGV", "SIGSEGV"),
    "abort": ("os.abort()", 134, "SIGABRT", "SIGABRT"),
}


@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.parametrize("end", ENDS)
def test_a_failure_on_the_other_node_is_everyone_s(new_job: NewJob, end: str, start: str) -> None:
    statement, code, signal_name, message = ENDS[end]
    job = new_job(2)
    script = job.script(f"""
        import ctypes, os, signal, sys, time
        if os.environ["RANK"] == "3":
            print("this rank is about to fail", file=sys.stderr)
            {statement}
        time.sleep(1000)
    """)
    job.start_all("--start", start, "--nproc-per-node", "2", script)
    assert job.wait() == [code, code]
    result, failure = job.result, job.result["failure"]
    assert (result["state"], result["exit_code"]) == ("FAILED", code)
    assert (failure["rank"], failure["local_rank"], failure["node_rank"], failure["host"]) == (
        3,
        1,
        1,
        HOST,
    )
    assert (failure["exit_code"], failure["signal"]) == (code, signal_name)
    assert "this rank is about to fail" in failure["last_lines"]
    assert message in failure["message"]
    assert result["consequences"] == []
    told = job.stderr(job.agents[0])
    assert "FAILED: rank 3 (node 1, local rank 1, host" in told
    assert "| this rank is about to fail" in told
    assert not own_marked()


@pytest.mark.parametrize("code", [1, 2, 120, 255])
def test_the_exit_code_is_the_job_s_own(new_job: NewJob, code: int) -> None:
    job = new_job()
    job.start(0, job.script(f"import sys; sys.exit({code})"))
    assert job.wait() == [code]
    assert job.result["failure"]["exit_code"] == code


def test_an_exception_is_named_however_torch_marks_its_traceback(new_job: NewJob) -> None:
    """Once there is a process group, torch writes ``[rank1]: `` before every line of a traceback."""
    job = new_job()
    script = job.script("""
        import sys, traceback
        def hook(*error):
            sys.stderr.write("".join(f"[rank0]: {line}\\n" for line in "".join(traceback.format_exception(*error)).splitlines()))
        sys.excepthook = hook
        raise ValueError("boom")
    """)
    job.start(0, "--start", "exec", script)
    assert job.wait() == [1]
    assert "ValueError: boom" in job.result["failure"]["message"]


def test_a_failure_counts_from_the_moment_of_the_exception(new_job: NewJob) -> None:
    """Rank 0 fails first and takes long over its exit; rank 1 fails later and is gone at once."""
    job = new_job(2)
    script = job.script("""
        import atexit, os, pathlib, time
        if os.environ["RANK"] == "0":
            def leave_last():
                pathlib.Path("failed0").touch()
                while not os.path.exists("failing1"):
                    time.sleep(0.01)
                time.sleep(1)
            atexit.register(leave_last)
            raise ValueError("the first")
        while not os.path.exists("failed0"):
            time.sleep(0.01)
        time.sleep(0.5)
        pathlib.Path("failing1").touch()
        raise ValueError("the second")
    """)
    job.start_all(script)
    assert job.wait() == [1, 1]
    assert (
        job.result["failure"]["rank"],
        job.result["failure"]["exit_code"],
        job.result["failure"]["signal"],
    ) == (0, 1, None)
    assert "the first" in job.result["failure"]["message"]
    assert [item["rank"] for item in job.result["consequences"]] == [1]


@pytest.mark.slow
def test_a_failed_worker_that_never_ends_is_not_waited_for(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script("""
        import os, threading, time
        if os.environ["RANK"] == "1":
            threading.Thread(target=time.sleep, args=(1000,)).start()
            raise ValueError("boom")
        time.sleep(1000)
    """)
    job.start_all(script)
    assert job.wait() == [1, 1]
    assert (job.result["failure"]["rank"], job.result["failure"]["message"]) == (
        1,
        "ValueError: boom",
    )


def test_a_child_of_a_worker_may_fail_without_failing_the_worker(new_job: NewJob) -> None:
    """The child is a fork of the whole program: its SystemExit is its own."""
    job = new_job(2)
    script = job.script("""
        import os, pathlib, sys, time
        if os.environ["RANK"] == "0":
            if os.fork() == 0:
                sys.exit(7)
            os.wait()
            pathlib.Path("reaped").touch()
            time.sleep(1000)
        while not os.path.exists("reaped"):
            time.sleep(0.01)
        time.sleep(0.3)
        raise ValueError("the only failure")
    """)
    job.start_all("--start", "fork", script)
    assert job.wait() == [1, 1]
    assert (job.result["failure"]["rank"], job.result["failure"]["exit_code"]) == (1, 1)
    assert job.result["consequences"] == []


@pytest.mark.parametrize(
    "junk",
    [
        pytest.param(rb"\n[]\nnull\n{}\n\xff\xfe\n", id="no report"),
        pytest.param(b'"' + b"x" * 200_000 + b'"\n', id="long"),
        pytest.param(b"[" * 5000 + b"\n", id="deep"),
        pytest.param(
            b'{"local_rank": 1e999, "monotonic": 1, "message": "m", "exit_code": 1}\n',
            id="infinite",
        ),
        pytest.param(
            b'{"local_rank": 99, "monotonic": 1, "message": "m", "exit_code": 1}\n',
            id="no rank of this node",
        ),
    ],
)
def test_whatever_a_worker_writes_to_the_report_pipe_harms_nobody(
    new_job: NewJob, junk: bytes
) -> None:
    job = new_job()
    job.path("junk").write_bytes(junk)
    script = job.script("""
        import os
        fd = int(os.environ["CLUSTERJOB_REPORT_FD"].partition(":")[0])
        with open("junk", "rb") as junk:
            os.write(fd, junk.read())
        os._exit(9)
    """)
    job.start(0, "--start", "fork", script)
    assert job.wait() == [9]
    assert job.result["failure"]["rank"] == 0


def test_stderr_of_any_bytes_makes_a_verdict(new_job: NewJob) -> None:
    """Last lines that are long, binary or full of control characters still make a message between
    agents.
    """
    job = new_job(2)
    script = job.script(r"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            os.write(2, b"\x00\x1b[31m\xff" * 4000 + b"\n" + "\u2028☃\x85".encode() * 2000 + b"\nthe end\n")
            sys.exit(4)
        time.sleep(1000)
    """)
    job.start_all(script)
    assert job.wait() == [4, 4]
    assert job.result["failure"]["last_lines"][-1] == "the end"


def test_all_ranks_may_fail_at_once_and_at_length(new_job: NewJob) -> None:
    """What all of them have to say must not be too long for the agents' own messages."""
    for _ in range(3):
        job = new_job(2)
        script = job.script(r"""
            import os, pathlib, time
            os.write(2, (b"\0" * 700 + b"\n") * 40)
            pathlib.Path(f"up{os.environ['RANK']}").touch()
            while not os.path.exists("go"):
                time.sleep(0.001)
            time.sleep(max(0.0, float(pathlib.Path("go").read_text()) - time.time()))
            os._exit(3)
        """)
        job.start_all("--nproc-per-node", "12", script)
        job.wait_for(*(f"up{rank}" for rank in range(24)))
        job.path("new").write_text(str(time.time() + 0.3))
        job.path("new").rename(job.path("go"))
        assert job.wait() == [3, 3]
        assert [job.end_of(node)["state"] for node in (0, 1)] == ["FAILED", "FAILED"]


# -- the root cause among effects, with a real process group -------------------------------------------------------------

ALL_REDUCE = """
    import os, signal, sys, time
    import torch
    import torch.distributed as dist
    how, guilty = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for step in range(10**9):
        if step == 5 and str(rank) == guilty:
            if how == "raise":
                raise ValueError("the root cause")
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                os._exit(11)
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [dist.get_world_size()] * 4
        if how == "none" and step == 5:
            break
    dist.barrier()
    print(f"rank {rank} of {dist.get_world_size()} is done\\n", end="")  # one write: ranks may share a file
    dist.destroy_process_group()
"""


# A process that raises with a process group open may abort while it exits ("terminate called
# without an active exception"): only a forked worker says beforehand that it was the exception.
ABORTS_AT_EXIT = (134, "SIGABRT")


def blame(job: Job, how: str, guilty: int, *arguments: str) -> None:
    job.start_all(
        "--nproc-per-node",
        "2",
        *arguments,
        job.script(ALL_REDUCE),
        how,
        str(guilty),
        python=WITH_TORCH,
    )
    ends = {"raise": [(1, None)], "kill": [(137, "SIGKILL")], "exit": [(11, None)]}[how]
    if "exec" in arguments and how == "raise":
        ends.append(ABORTS_AT_EXIT)
    codes = job.wait()
    failure = job.result["failure"]
    assert failure["rank"] == guilty, job.result
    assert (failure["exit_code"], failure["signal"]) in ends, job.result
    assert codes == [failure["exit_code"]] * 2
    if how == "raise":
        assert any("ValueError: the root cause" in line for line in failure["last_lines"]), (
            job.result
        )
        assert failure["signal"] or failure["message"].startswith("ValueError: the root cause")
    assert all(item["effect"] for item in job.result["consequences"]), job.result


@pytest.mark.parametrize(
    ("how", "guilty"),
    [("raise", 3), ("kill", 0), ("exit", 1), ("kill", 2), ("raise", 0), ("kill", 3)],
)
def test_the_root_cause_is_never_an_effect(new_job: NewJob, how: str, guilty: int) -> None:
    blame(new_job(2), how, guilty)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec"])
@pytest.mark.parametrize("how", ["raise", "kill", "exit"])
def test_the_root_cause_is_never_an_effect_in_ten_runs(
    new_job: NewJob, how: str, start: str
) -> None:
    for run in range(10):
        blame(new_job(2), how, run % 4, "--start", start)


@pytest.mark.parametrize("launcher", ["agent", "torchrun"])
def test_an_all_reduce_over_two_nodes(new_job: NewJob, launcher: str) -> None:
    job = new_job(2)
    job.start_all(
        "--launcher",
        launcher,
        "--nproc-per-node",
        "2",
        job.script(ALL_REDUCE),
        "none",
        "-1",
        python=WITH_TORCH,
    )
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    names = ["torchrun.out"] if launcher == "torchrun" else ["rank0.out", "rank1.out"]
    said = "".join(job.log(0, name) for name in names).splitlines()
    assert sorted(said) == ["rank 0 of 4 is done", "rank 1 of 4 is done"]


@pytest.mark.slow
def test_torchrun_s_failure_is_the_rank_s_that_began_it(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all("--launcher", "torchrun", job.script(ALL_REDUCE), "raise", "1", python=WITH_TORCH)
    codes = job.wait()
    failure = job.result["failure"]
    assert (failure["node_rank"], failure["rank"]) == (1, 1)
    assert (failure["exit_code"], failure["signal"]) in [(1, None), ABORTS_AT_EXIT]
    assert codes == [failure["exit_code"]] * 2
    assert any("the root cause" in line for line in failure["last_lines"]), job.result


# -- agents and starters that are killed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_kill_9_of_another_node_s_agent(new_job: NewJob, start: str) -> None:
    job = new_job(2)
    job.start_all("--start", start, "--nproc-per-node", "2", job.script(SLEEPER))
    job.wait_for("up0", "up1", "up2", "up3")
    job.agents[1].kill()
    nothing_left(10)
    assert job.wait() == [1, -9]
    failure = job.result["failure"]
    assert job.result["state"] == "FAILED"
    assert (failure["rank"], failure["node_rank"], failure["host"]) == (None, 1, HOST)
    assert f"pid {job.agents[1].pid}" in failure["message"]
    assert "lost" in failure["message"]
    assert job.end_of(1)["state"] == "LOST"
    assert str(job.agents[1].pid) in job.end_of(1)["reason"]


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_kill_9_of_node_0_s_agent(new_job: NewJob, start: str) -> None:
    job = new_job(2)
    job.start_all("--start", start, "--nproc-per-node", "2", job.script(SLEEPER))
    job.wait_for("up0", "up1", "up2", "up3")
    job.agents[0].kill()
    nothing_left(10)
    assert job.wait() == [-9, 1]
    assert not (
        job.dir / "result.json"
    ).exists()  # nobody was left to give it; absence is never success
    assert [job.end_of(node)["state"] for node in (0, 1)] == ["LOST", "LOST"]
    assert "lost node 0" in job.end_of(1)["reason"]
    assert "LOST" in job.stderr(job.agents[1])


@pytest.mark.parametrize("node", [0, 1])
def test_kill_9_of_a_starter(new_job: NewJob, node: int) -> None:
    job = new_job(2)
    job.start_all("--nproc-per-node", "2", job.script(SLEEPER))
    job.wait_for("up0", "up1", "up2", "up3")
    os.kill(job.starter_of(job.agents[node]), signal.SIGKILL)
    nothing_left(10)
    assert job.wait() == [1, 1]
    failure = job.result["failure"]
    assert (job.result["state"], failure["rank"], failure["node_rank"]) == ("FAILED", None, node)
    assert "SIGKILL" in failure["message"]


def test_kill_9_of_an_agent_that_is_alone(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--nproc-per-node", "2", job.script(SLEEPER))
    job.wait_for("up0", "up1")
    job.agents[0].kill()
    nothing_left(10)
    assert job.wait() == [-9]
    assert job.end_of(0)["state"] == "LOST"


def test_kill_9_of_all_agents_at_once(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(
        job.script(
            textwrap.dedent(DAEMON)
            + "leave_a_daemon('daemon' + os.environ['RANK'])\ntime.sleep(1000)\n"
        )
    )
    job.wait_for("daemon0", "daemon1")
    for agent in job.agents:
        agent.kill()
    nothing_left(10)
    assert job.wait() == [-9, -9]
    assert [job.end_of(node)["state"] for node in (0, 1)] == ["LOST", "LOST"]


@pytest.mark.parametrize("delay", [0.1, 0.4, 0.8])
def test_kill_9_of_an_agent_whose_starter_imports(new_job: NewJob, delay: float) -> None:
    job = new_job()
    job.start(0, job.script(SLEEPER), python=WITH_TORCH)
    time.sleep(delay)
    job.agents[0].kill()
    nothing_left(10)
    assert job.wait() == [-signal.SIGKILL]


def test_kill_9_of_torch_s_store_fails_the_node(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--start", "exec", job.script(SLEEPER), python=WITH_TORCH)
    job.wait_for("up0")
    starter = job.starter_of(job.agents[0])
    store = next(pid for pid in below(starter) if "clusterjob.node" in command_line(pid))
    os.kill(store, signal.SIGKILL)
    assert job.wait() == [1]
    assert (job.result["failure"]["rank"], job.result["failure"]["node_rank"]) == (None, 0)
    assert "store" in job.result["failure"]["message"]
    assert "SIGKILL" in job.result["failure"]["message"]


def test_a_frozen_member_is_lost_after_the_lease(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(*QUICK_LEASE, job.script(SLEEPER))
    job.wait_for("up0", "up1")
    job.agents[1].send_signal(signal.SIGSTOP)
    assert job.agents[0].wait(PATIENCE) == 1
    assert (job.result["state"], job.result["failure"]["node_rank"]) == ("FAILED", 1)
    assert "nothing was heard of it" in job.result["failure"]["message"]
    job.agents[1].send_signal(signal.SIGCONT)
    nothing_left(10)
    assert job.agents[1].wait(PATIENCE) != 0


def test_a_frozen_lead_loses_its_members(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(*QUICK_LEASE, job.script(SLEEPER))
    job.wait_for("up0", "up1")
    of_node_1 = below(job.agents[1].pid)
    job.agents[0].send_signal(signal.SIGSTOP)
    assert job.agents[1].wait(PATIENCE) == 1
    assert not [pid for pid in of_node_1 if alive(pid)]
    assert job.end_of(1)["state"] == "LOST"
    job.agents[0].send_signal(signal.SIGCONT)
    nothing_left(10)
    assert job.agents[0].wait(PATIENCE) == 1
    assert job.result["state"] == "FAILED"


def test_a_quiet_job_outlives_many_leases(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all("--heartbeat", "0.1", "--lease", "2", job.script("import time; time.sleep(6)"))
    assert job.wait() == [0, 0]


# -- what workers leave behind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["success", "failure", "cancel"])
def test_escaped_grandchildren_end_with_the_job(new_job: NewJob, end: str) -> None:
    job = new_job(2)
    last = {"success": "pass", "failure": "raise SystemExit(5)", "cancel": "time.sleep(1000)"}[end]
    script = job.script(
        textwrap.dedent(DAEMON)
        + textwrap.dedent(f"""
            leave_a_daemon("daemon" + os.environ["RANK"])
            while not (os.path.exists("daemon0") and os.path.exists("daemon1")):
                time.sleep(0.01)
            {last}
        """)
    )
    job.start_all(script)
    job.wait_for("daemon0", "daemon1")
    if end == "cancel":
        job.agents[0].terminate()
    assert set(job.wait()) == {{"success": 0, "failure": 5, "cancel": 143}[end]}
    assert not own_marked()
    assert not alive(int(job.path("daemon0").read_text()))


@pytest.mark.parametrize("victim", ["agent 0", "agent 1", "starter"])
def test_escaped_grandchildren_end_with_a_killed_agent(new_job: NewJob, victim: str) -> None:
    job = new_job(2)
    job.start_all(
        job.script(
            textwrap.dedent(DAEMON)
            + "leave_a_daemon('daemon' + os.environ['RANK'])\ntime.sleep(1000)\n"
        )
    )
    job.wait_for("daemon0", "daemon1")
    if victim == "starter":
        os.kill(job.starter_of(job.agents[1]), signal.SIGKILL)
    else:
        job.agents[int(victim[-1])].kill()
    nothing_left(10)
    assert 0 not in job.wait()


@pytest.mark.parametrize("end", ["failure", "cancel", "kill"])
def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace(new_job: NewJob, end: str) -> None:
    job = new_job(2)
    script = job.script("""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("fail") or os.environ["RANK"] == "1":
            time.sleep(0.01)
        sys.exit(6)
    """)
    job.start_all("--grace", "0.5", script)
    job.wait_for("up0", "up1")
    if end == "cancel":
        job.agents[1].terminate()
    elif end == "failure":
        job.path("fail").touch()
    else:
        job.agents[1].kill()
    nothing_left(10)
    assert job.wait() == {"failure": [6, 6], "cancel": [143, 143], "kill": [1, -9]}[end]


def test_a_stopped_worker_is_killed_too(new_job: NewJob) -> None:
    """SIGTERM does nothing to a process that is stopped; SIGKILL does."""
    job = new_job()
    job.start(
        0,
        "--grace",
        "0.3",
        job.script(
            "import os, pathlib, signal; pathlib.Path('up').touch(); os.kill(os.getpid(), signal.SIGSTOP)"
        ),
    )
    job.wait_for("up")
    job.agents[0].terminate()
    assert job.wait() == [143]
    assert not own_marked()


# -- the roll-call ---------------------------------------------------------------------------------------------------------


def test_the_roll_call_names_who_is_missing(new_job: NewJob) -> None:
    job = new_job(3)
    script = job.script(SLEEPER)
    job.start(2, "--join-timeout", "30", script)
    wait_until(
        lambda: heeds(job.agents[0].pid, signal.SIGTERM), PATIENCE
    )  # it is the first by far to be ready
    job.start(0, "--join-timeout", "6", script)
    assert job.wait() == [1, 1]
    failure = job.result["failure"]
    assert (
        job.result["state"],
        job.result["started_at"],
        failure["node_rank"],
        failure["rank"],
    ) == ("FAILED", None, 1, None)
    assert "node 1 of 3 never joined within 6 s" in failure["message"]
    assert "node 1 of 3 never joined" in job.stderr(job.agents[1])
    assert not job.path("up0").exists()


def test_a_member_says_where_it_looked_for_the_lead(new_job: NewJob) -> None:
    job = new_job(2)
    job.start(1, "--join-timeout", "0.5", job.script(SLEEPER))
    assert job.wait() == [1]
    said = job.end_of(1)["reason"]
    assert "node 1 cannot find node 0 at 127.0.0.1" in said
    assert "connection refused" in said
    assert not (job.dir / "result.json").exists()


@pytest.mark.parametrize("address", ["no-such-host.invalid", "node0..cluster"])
def test_an_address_that_does_not_resolve_is_said_on_both_sides(
    new_job: NewJob, address: str
) -> None:
    job = new_job(2)
    variables = {"CLUSTERJOB_MASTER_ADDR": address, "RES_OPTIONS": "timeout:1 attempts:1"}
    for node_rank in (1, 0):
        job.start(node_rank, "--join-timeout", "0.5", job.script(SLEEPER), env=variables)
    assert job.wait() == [1, 1]
    for agent in job.agents:
        assert "Traceback" not in job.stderr(agent)
    assert address in job.end_of(1)["reason"]
    assert address in job.result["reason"]


def test_two_agents_cannot_be_the_same_node(new_job: NewJob) -> None:
    job = new_job(3)
    script = job.script(SLEEPER)
    job.start(0, script)
    job.start(1, script)
    wait_until(lambda: len(job.events("joined")) == 2, PATIENCE)
    job.start(1, script)
    assert job.wait() == [1, 1, 1]
    message = job.result["failure"]["message"]
    assert "node_rank 1 is claimed twice" in message
    assert all(str(job.agents[index].pid) in message for index in (1, 2))
    assert "claimed twice" in job.stderr(job.agents[2]) + job.end_of(1)["reason"]


def test_a_latecomer_to_a_full_gang_is_refused_and_harms_nobody(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script("""
        import os, pathlib, time
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    job.start_all(script)
    job.wait_for("up0", "up1")
    latecomer = job.start(1, script)
    assert latecomer.wait(PATIENCE) == 1
    job.path("go").touch()
    assert job.wait() == [0, 0, 1]
    assert job.result["state"] == "SUCCEEDED"
    assert job.end_of(1)["state"] == "SUCCEEDED"


def test_nodes_that_count_differently_are_refused(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script(SLEEPER)
    job.start(0, script)
    job.start(1, script, env={"CLUSTERJOB_NNODES": "3"})
    assert job.wait() == [1, 1]
    assert "counts 3 nodes, node 0 counts 2" in job.result["failure"]["message"]


def test_an_agent_with_another_token_is_a_stranger(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script("print('ran')")
    job.start(0, script)
    wait_until(lambda: job.events("listening"), PATIENCE)
    stranger = job.start(1, "--join-timeout", "1", script, env={"CLUSTERJOB_TOKEN": "guessed"})
    assert stranger.wait(PATIENCE) == 1
    assert "does not know the job's token" in job.end_of(1)["reason"]
    assert job.events("stranger")
    assert not job.events("joined")[1:]
    job.start(1, script)
    assert job.wait() == [0, 1, 0]


def test_an_agent_of_an_old_attempt_is_refused(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script("print('ran')")
    with held_port() as number:
        port = {"CLUSTERJOB_MASTER_PORT": str(number)}
        job.start(0, script, env=port | {"CLUSTERJOB_ATTEMPT": "1"})
        wait_until(lambda: job.events("listening"), PATIENCE)
        old = job.start(1, "--join-timeout", "5", script, env=port | {"CLUSTERJOB_ATTEMPT": "0"})
        assert old.wait(PATIENCE) == 1
        assert "this is attempt 1 of the job, not 0" in job.end_of(1)["reason"]
        job.start(1, script, env=port | {"CLUSTERJOB_ATTEMPT": "1"})
        assert job.wait() == [0, 1, 0]
    assert job.result["attempt"] == 1


def test_a_node_that_is_lost_before_the_start_ends_the_roll_call(new_job: NewJob) -> None:
    job = new_job(3)
    script = job.script(SLEEPER)
    job.start(0, script)
    job.start(1, script)
    wait_until(lambda: len(job.events("joined")) == 2, PATIENCE)
    job.agents[1].kill()
    assert job.wait() == [1, -9]
    assert job.result["failure"]["node_rank"] == 1


@pytest.mark.slow
def test_the_lead_takes_the_next_port_where_one_is_taken(new_job: NewJob) -> None:
    from clusterjob.node.rendezvous import ports

    job = new_job(2)
    first, second = ports.candidates(job.id, 0, None)[:2]
    with (
        socket.create_server(("127.0.0.1", first)),
        socket.create_server(("127.0.0.1", second)) as rude,
    ):
        rude.settimeout(PATIENCE)
        job.start_all(job.script("print('ran')"))
        rude.accept()[0].close()
        # The first accepts and says nothing until its silence is noticed.
        assert job.wait() == [0, 0]


def test_a_named_port_that_is_taken_is_said(new_job: NewJob) -> None:
    job = new_job()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job.start(0, job.script("print('ran')"), env={"CLUSTERJOB_MASTER_PORT": str(port)})
        assert job.wait() == [1]
    assert str(port) in job.result["reason"]
    assert "taken" in job.result["reason"]
    assert "Traceback" not in job.stderr(job.agents[0])


def test_a_secret_file_that_is_not_there_is_said_in_one_line(new_job: NewJob) -> None:
    job = new_job()
    job.start(
        0,
        job.script("print('ran')"),
        env={"CLUSTERJOB_TOKEN": "", "CLUSTERJOB_TOKEN_FILE": "/nowhere/token"},
    )
    assert job.wait()[0] in (1, 2)
    assert "/nowhere/token" in job.stderr(job.agents[0])
    assert "Traceback" not in job.stderr(job.agents[0])


def test_the_secret_may_lie_in_a_file(new_job: NewJob) -> None:
    job = new_job(2)
    secret = job.path("token")
    secret.write_text(job.token + "\n")
    script = job.script("print('ran')")
    job.start(0, script)
    job.start(1, script, env={"CLUSTERJOB_TOKEN": "", "CLUSTERJOB_TOKEN_FILE": str(secret)})
    assert job.wait() == [0, 0]


def test_an_attempt_that_is_no_number_is_said_in_one_line(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, job.script("print('ran')"), env={"CLUSTERJOB_ATTEMPT": "second"})
    assert job.wait()[0] in (1, 2)
    assert "CLUSTERJOB_ATTEMPT" in job.stderr(job.agents[0])
    assert "Traceback" not in job.stderr(job.agents[0])


def test_launching_inside_a_worker_is_refused(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--", sys.executable, "-m", "clusterjob.node", job.script("print('ran')"))
    assert job.wait() == [2]
    assert "one process of a job already" in "".join(job.result["failure"]["last_lines"])


# -- restarts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_workers_are_started_again(new_job: NewJob, start: str) -> None:
    job = new_job(2)
    script = job.script("""
        import os, pathlib, sys, time
        restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
        print("restart", restart, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
        pathlib.Path(f"up{rank}.{restart}").touch()
        if restart < 2 and rank == restart:
            while not os.path.exists(f"up{1 - rank}.{restart}"):
                time.sleep(0.01)
            sys.exit(9)
        time.sleep(1000 if restart < 2 else 0)
    """)
    job.start_all("--start", start, "--max-restarts", "2", script)
    assert job.wait() == [0, 0]
    assert (job.result["state"], job.result["restarts"], job.result["failure"]) == (
        "SUCCEEDED",
        2,
        None,
    )
    names = [
        f"node{node}/rank{node}{restart}.{stream}"
        for node in (0, 1)
        for restart in ("", ".restart1", ".restart2")
        for stream in ("out", "err")
    ]
    assert sorted(job.logs()) == sorted(names)
    assert job.log(0, "rank0.restart2.out") == "restart 2 of 2\n"
    assert len(job.events("restart")) == 2
    assert "restart 1 of 2: rank 0" in job.stderr(job.agents[0])
    assert "restart 2 of 2: rank 1" in job.stderr(job.agents[0])


def test_a_node_that_still_imports_torch_when_another_fails_takes_part_in_the_restart(
    new_job: NewJob,
) -> None:
    job = new_job(2)
    slow = job.path("slow") / "torch"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text(
        "import time\ntime.sleep(2)\nraise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    script = job.script(
        "import os; raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '0')"
    )
    job.start(0, "--max-restarts", "1", script)
    job.start(
        1,
        "--max-restarts",
        "1",
        script,
        env={"PYTHONPATH": f"{slow.parent}:{os.environ.get('PYTHONPATH', '')}"},
    )
    assert job.wait() == [0, 0]
    assert job.result["restarts"] == 1


def test_restarts_come_to_an_end(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(
        "--max-restarts",
        "2",
        job.script("import os, sys; sys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))"),
    )
    assert job.wait() == [12, 12]
    assert (job.result["state"], job.result["restarts"], job.result["exit_code"]) == (
        "FAILED",
        2,
        12,
    )
    assert "FAILED after 2 restarts" in job.stderr(job.agents[0])


def test_a_lost_node_is_not_restarted(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all("--max-restarts", "3", job.script(SLEEPER))
    job.wait_for("up0", "up1")
    job.agents[1].kill()
    assert job.wait() == [1, -9]
    assert job.result["restarts"] == 0


def test_a_wish_to_cancel_ends_the_restarts(new_job: NewJob) -> None:
    job = new_job(2)
    script = job.script(
        "import pathlib, time; pathlib.Path('up').touch(); time.sleep(0.1); raise SystemExit(1)"
    )
    job.start_all("--max-restarts", "1000", script)
    job.wait_for("up")
    wait_until(lambda: len(job.events("restart")) > 2, PATIENCE)
    job.agents[1].terminate()
    assert job.wait() == [143, 143]
    assert job.result["state"] == "CANCELLED"


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_restart_has_a_fresh_store(new_job: NewJob, how: str) -> None:
    job = new_job(2)
    script = job.script(
        textwrap.dedent(ALL_REDUCE).replace(
            "how, guilty = sys.argv[1:]",
            "how, guilty = sys.argv[1:] if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else ('none', '-1')",
        )
    )
    job.start_all("--max-restarts", "1", script, how, "1", python=WITH_TORCH)
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    assert job.result["restarts"] == 1
    assert job.log(1, "rank1.restart1.out") == "rank 1 of 2 is done\n"


# -- ends that were wished for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "number"),
    [(0, signal.SIGTERM), (1, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGHUP)],
)
def test_a_signal_to_any_agent_cancels_the_job_everywhere(
    new_job: NewJob, node: int, number: signal.Signals
) -> None:
    job = new_job(2)
    script = job.script(
        """
        import os, pathlib, signal, sys, time
        rank = os.environ["RANK"]
        def save(number, frame):
            pathlib.Path(f"saved{rank}").touch()
            sys.exit(0)
        signal.signal(signal.SIGINT if NUMBER == signal.SIGINT else signal.SIGTERM, save)
        pathlib.Path(f"up{rank}").touch()
        time.sleep(1000)
    """.replace("NUMBER", str(int(number)))
    )
    job.start_all(script)
    job.wait_for("up0", "up1")
    job.agents[node].send_signal(number)
    assert job.wait() == [143, 143]
    assert (job.result["state"], job.result["exit_code"], job.result["failure"]) == (
        "CANCELLED",
        143,
        None,
    )
    assert number.name in job.result["reason"]
    assert HOST in job.result["reason"]
    assert job.path("saved0").exists()
    assert job.path("saved1").exists()
    assert [job.end_of(rank)["state"] for rank in (0, 1)] == ["CANCELLED", "CANCELLED"]
    assert not own_marked()


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_after_an_interrupt_waits_for_no_worker(
    new_job: NewJob, second: signal.Signals
) -> None:
    job = new_job(2)
    script = job.script("""
        import os, pathlib, signal, time
        rank = os.environ["RANK"]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"interrupted{rank}").touch())
        pathlib.Path(f"up{rank}").touch()
        while True:
            time.sleep(0.05)
    """)
    job.start_all("--grace", "1000", script)
    job.wait_for("up0", "up1")
    job.agents[1].send_signal(signal.SIGINT)
    job.agents[1].send_signal(
        signal.SIGINT
    )  # the same keystroke, passed on by a command in between
    job.wait_for("interrupted0", "interrupted1")
    assert [agent.poll() for agent in job.agents] == [None, None]
    time.sleep(0.6)  # or it would be the same keystroke
    job.agents[1].send_signal(second)
    assert job.wait() == [143, 143]
    assert job.result["state"] == "CANCELLED"


@pytest.mark.parametrize("node", [0, 1])
def test_a_wait_for_the_others_can_be_cancelled(new_job: NewJob, node: int) -> None:
    job = new_job(2)
    job.start(node, job.script(SLEEPER))
    wait_until(
        lambda: heeds(job.agents[0].pid, signal.SIGTERM) and (node == 1 or job.events("listening")),
        PATIENCE,
    )
    time.sleep(0.2)  # node 1 leaves no sign of its search
    job.agents[0].terminate()
    assert job.wait() == [143]
    assert job.end_of(node)["state"] == "CANCELLED"


def test_a_signal_at_any_moment_of_the_start_leaves_nothing(new_job: NewJob) -> None:
    for step in range(8):
        job = new_job()
        job.start(
            0,
            "--nproc-per-node",
            "2",
            job.script(SLEEPER),
            python=WITH_TORCH if step % 2 else (sys.executable, "-S"),
        )
        time.sleep(0.03 + 0.07 * step)
        job.agents[0].terminate()
        assert job.wait()[0] in (
            143,
            -signal.SIGTERM,
        )  # before the agent listens, the signal has its own effect
        nothing_left(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_while_the_agent_loads_is_a_wish_and_no_death(
    new_job: NewJob, number: signal.Signals
) -> None:
    """A scheduler signals every process of a job at once; one that has a starter already must not
    seem to have been killed.
    """
    job = new_job()
    (job.path("slow")).mkdir()
    job.script(
        """
        import os, pathlib, sys, time
        pathlib.Path("loading").touch()
        while not os.path.exists("signalled"):
            time.sleep(0.01)
        sys.path.remove(str(pathlib.Path(__file__).parent))
        del sys.modules["asyncio"]
        import asyncio
    """,
        "slow/asyncio.py",
    )
    path = os.pathsep.join(filter(None, (str(job.path("slow")), os.environ.get("PYTHONPATH", ""))))
    agent = job.start(0, job.script(SLEEPER), env={"PYTHONPATH": path})
    job.wait_for("loading")
    for pid in (agent.pid, job.starter_of(agent)):
        os.kill(pid, number)
    job.path("signalled").touch()
    assert job.wait() == [143]
    assert (job.result["state"], job.result["reason"]) == ("CANCELLED", f"{number.name} on {HOST}")
    assert job.end_of(0)["state"] == "CANCELLED"
    assert not job.path("up0").exists(), "no worker was started"
    assert "Traceback" not in job.stderr(agent)
    nothing_left(10)


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_workers_take_signals_as_any_program_does(new_job: NewJob, start: str) -> None:
    job = new_job()
    text = """
        import pathlib, signal
        names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD", "SIGUSR1")
        pathlib.Path("handlers").write_text(repr([signal.getsignal(getattr(signal, name)) for name in names]))
    """
    job.start(0, "--start", start, job.script(text))
    assert job.wait() == [0]
    plain = [signal.SIG_DFL, signal.default_int_handler, *[signal.SIG_DFL] * 3]
    assert job.path("handlers").read_text() == repr(plain)


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_time_limit(new_job: NewJob, nnodes: int) -> None:
    job = new_job(nnodes)
    job.start_all("--time-limit", "1", job.script(SLEEPER))
    assert job.wait() == [124] * nnodes
    assert (job.result["state"], job.result["exit_code"]) == ("FAILED", 124)
    assert "time limit of 1 s" in job.result["reason"]


def test_the_time_limit_counts_over_restarts(new_job: NewJob) -> None:
    job = new_job()
    job.start(
        0,
        "--time-limit",
        "4",
        "--max-restarts",
        "1000",
        job.script("import time; time.sleep(0.4); raise SystemExit(1)"),
    )
    assert job.wait() == [124]
    assert job.result["restarts"] > 0


@pytest.mark.parametrize("node", [0, 1])
def test_the_end_of_the_lifeline_cancels(new_job: NewJob, node: int) -> None:
    job = new_job(2)
    script = job.script(SLEEPER)
    for node_rank in (0, 1):
        job.start(
            node_rank, *(["--lifeline"] if node_rank == node else []), script, stdin=subprocess.PIPE
        )
    job.wait_for("up0", "up1")
    job.agents[node].stdin.close()
    assert job.wait() == [143, 143]
    assert job.result["state"] == "CANCELLED"


def test_a_lifeline_may_be_let_go(new_job: NewJob) -> None:
    job = new_job()
    script = job.script("""
        import os, pathlib, time
        pathlib.Path("up").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    agent = job.start(0, "--lifeline", script, stdin=subprocess.PIPE)
    job.wait_for("up")
    (job.dir / "detached").touch()
    agent.stdin.close()
    time.sleep(1)
    assert agent.poll() is None
    job.path("go").touch()
    assert job.wait() == [0]


def test_a_lifeline_that_never_was_one_cancels(new_job: NewJob) -> None:
    """/dev/null is at its end from the start, and poll(2) of it is unlike a pipe's."""
    job = new_job()
    job.start(0, "--lifeline", job.script(SLEEPER), stdin=subprocess.DEVNULL)
    assert job.wait() == [143]
    assert job.result["state"] == "CANCELLED"
    assert "Traceback" not in job.stderr(job.agents[0])


def test_workers_that_have_just_been_forked_hear_the_order_to_stop(new_job: NewJob) -> None:
    """The grace is for workers that have something to save; one that has not begun must not ignore
    SIGTERM.
    """
    for _ in range(5):
        job = new_job()
        job.start(
            0,
            "--lifeline",
            "--grace",
            "50",
            "--nproc-per-node",
            "4",
            job.script(SLEEPER),
            stdin=subprocess.DEVNULL,
        )
        assert job.wait(30) == [143]


# -- commands --------------------------------------------------------------------------------------------------------------


def test_any_command_may_be_run(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(
        "--nproc-per-node",
        "2",
        "--",
        "sh",
        "-c",
        'printf "%s|" "$RANK" "$WORLD_SIZE" "$@"',
        "sh",
        "a b",
        "",
        "*",
        "new\nline",
        "--nproc-per-node",
    )
    assert job.wait() == [0, 0]
    assert job.log(1, "rank3.out") == "3|4|a b||*|new\nline|--nproc-per-node|"


@pytest.mark.parametrize("command", ["no-such-command-here", "/nowhere/at all"])
def test_a_command_that_is_not_there_is_127(new_job: NewJob, command: str) -> None:
    job = new_job(2)
    job.start_all("--", command, "argument")
    assert job.wait() == [127, 127]
    assert f"cannot start {command}: No such file or directory" in job.result["failure"]["message"]
    assert f"cannot start {command}" in job.stderr(job.agents[0])
    assert "Traceback" not in job.stderr(job.agents[0])


def test_a_command_finds_signals_as_a_shell_would_leave_them(new_job: NewJob) -> None:
    """Python ignores SIGPIPE, and what is ignored stays so over exec: ``yes | head`` would
    complain.
    """
    job = new_job()
    command = ["sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status; yes | head -n 1"]
    as_from_a_shell = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True
    ).stdout  # whatever these tests run under
    assert as_from_a_shell.endswith("y\n")
    job.start(0, "--", *command)
    assert job.wait() == [0]
    assert job.log(0, "rank0.out") == as_from_a_shell
    assert job.log(0, "rank0.err") == ""


def test_fork_of_a_command_is_refused_in_words(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--start", "fork", "--", "true")
    assert job.wait() == [1]
    assert "--start fork is impossible" in job.result["reason"]


def test_a_script_that_is_not_there_is_said(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "nowhere.py")
    assert job.wait() == [2]
    assert "nowhere.py" in job.result["failure"]["message"] + "".join(
        job.result["failure"]["last_lines"]
    )
    assert "No such file" in "".join(job.result["failure"]["last_lines"])


# -- whoever watches, and where it is written ------------------------------------------------------------------------------


def test_nobody_reads_the_agent_s_output_any_more(new_job: NewJob) -> None:
    job = new_job(2)
    out, out_other = os.pipe()
    err, err_other = os.pipe()
    script = job.script(
        "import os; print('x' * 1000); raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    job.start(0, "--max-restarts", "1", script, stdout=out_other, stderr=err_other)
    for descriptor in (out, out_other, err, err_other):
        os.close(descriptor)
    job.start(1, "--max-restarts", "1", script)
    assert job.wait() == [0, 0]
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)


def test_a_reader_that_pauses_does_not_cost_the_lease(new_job: NewJob) -> None:
    """``clusterjob run ... | less``: the pipe is full, and the job goes on."""
    job = new_job(2)
    script = job.script("""
        import os, pathlib, time
        for _ in range(4000):
            print("x" * 99)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    job.start(0, *QUICK_LEASE, script, stdout=subprocess.PIPE)
    job.start(1, *QUICK_LEASE, script)
    job.wait_for("up0", "up1")
    time.sleep(3)
    job.path("go").touch()
    said = job.agents[0].stdout.read()
    assert job.wait() == [0, 0]
    assert said.count(b"x" * 99) == 4000


def test_output_may_be_left_in_the_files(new_job: NewJob) -> None:
    job = new_job()
    job.start(0, "--no-echo", job.script("print('quiet')"))
    assert job.wait() == [0]
    assert job.stdout(job.agents[0]) == ""
    assert job.log(0, "rank0.out") == "quiet\n"


def test_a_job_directory_that_cannot_be_made_is_said_in_one_line(new_job: NewJob) -> None:
    job = new_job()
    job.path("file").touch()
    job.start(
        0, job.script("print('ran')"), env={"CLUSTERJOB_JOB_DIR": str(job.path("file") / "job")}
    )
    assert job.wait() == [1]
    assert job.stderr(job.agents[0]).startswith("clusterjob: the job's directory ")
    assert "Traceback" not in job.stderr(job.agents[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, mounted for the test."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a tmpfs")
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_disk_that_fills_up_is_no_success(new_job: NewJob, small_disk: Path) -> None:
    job = new_job(2)
    job.dir = small_disk / "job"
    script = job.script("""
        import os, time
        if os.environ["RANK"] == "1":
            for _ in range(10000):
                print("a line that fills the disk")
    """)
    job.start_all(script)
    codes = job.wait()
    assert codes[0] == codes[1] != 0
    told = job.stderr(job.agents[0])
    assert "FAILED: rank 1" in told
    assert "Traceback" not in told.replace("| Traceback", "")
    assert not own_marked()


def test_a_disk_that_is_full_from_the_start_ends_the_job(new_job: NewJob, small_disk: Path) -> None:
    job = new_job(2)
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={small_disk}/ballast", "bs=4k"],
        check=False,
        stderr=subprocess.DEVNULL,
    )
    assert os.statvfs(small_disk).f_bavail == 0
    job.dir = small_disk / "job"
    job.start_all(job.script("print('a line for which there is no room', flush=True)"))
    codes = job.wait()
    assert 0 not in codes
    assert "No space left on device" in job.stderr(job.agents[0])
    assert not own_marked()
