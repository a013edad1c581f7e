"""Run whole jobs of one to three nodes on this machine, with and without faults.

Agents and workers are real processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from launching import HOST, new_folder
from procs import (
    TEST_TIMEOUT,
    WITH_TORCH,
    MakeJob,
    alive,
    command_line,
    handles_signal,
    own_processes,
    wait_for_no_processes,
    wait_until,
)

# Creates a file with its rank in the name, then waits for ever.
SLEEPER = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""
# Leaves a daemon behind: a process outside the worker's session and without a parent.
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


# -- jobs that succeed -----------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_job_on_nodes_of_different_size_succeeds(make_job: MakeJob, start: str) -> None:
    job = make_job(2)
    script = job.script("""
        import json, os
        prefixes = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "CLUSTERJOB_")
        names = [name for name in os.environ if name.startswith(prefixes)]
        names += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
        print(json.dumps({name: os.environ[name] for name in names}))
    """)
    options = ("--start", start, "--max-restarts", "4", "--nproc-per-node")
    for node_rank, size in ((1, "1"), (0, "3")):
        job.start(node_rank, *options, size, script, env={"CLUSTERJOB_ATTEMPT": "7"})
    assert job.wait() == [0, 0]
    ports = set()
    for rank, (node, local_rank, size) in enumerate([(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1)]):
        text = job.log(node, f"rank{rank}.attempt7.out")
        assert f"[{rank}] {text}" in job.stdout(job.agents[1 - node])
        assert job.log(node, f"rank{rank}.attempt7.err") == ""
        seen = json.loads(text)
        ports.add(seen.pop("MASTER_PORT"))
        assert seen.pop("CLUSTERJOB_REPORT_FD")
        assert (
            seen.items()
            >= {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": str(size),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": "2",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": "4",
                "ROLE_NAME": "default",
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RUN_ID": job.id,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "4",
                "CLUSTERJOB_JOB_ID": job.id,
                "CLUSTERJOB_JOB_DIR": str(job.dir),
                "CLUSTERJOB_ATTEMPT": "7",
            }.items()
        )
    assert len(ports) == 1
    names = ("schema", "state", "exit_code", "failure", "consequences", "restarts", "attempt")
    assert [job.result[name] for name in names] == [1, "SUCCEEDED", 0, None, [], 0, 7]
    assert job.result["started_at"] <= job.result["ended_at"]
    assert [job.node_end(node)["state"] for node in (0, 1)] == ["SUCCEEDED", "SUCCEEDED"]
    names = ("listening", "joined", "started", "ended")
    assert [len(job.events(name)) for name in names] == [1, 2, 1, 1]
    assert "SUCCEEDED" in job.stderr(job.agents[1])
    assert not own_processes()


def test_single_node_job_runs_without_environment_variables(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job()
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
        command, check=False, capture_output=True, text=True, timeout=TEST_TIMEOUT, env=env
    )
    assert ended.returncode == 0
    arguments = ["--nproc-per-node", "a b\n'\""]
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] {rank} 2 {arguments}" for rank in (0, 1)
    ]
    assert ended.stderr == "clusterjob: SUCCEEDED\n"
    # The job removes the directory that it created itself.
    assert not list(tmp_path.glob("clusterjob-*"))


def test_special_characters_in_paths_and_arguments_are_preserved(
    make_job: MakeJob, special_path: Path
) -> None:
    job = make_job(2)
    job.dir = special_path / "job"
    script = special_path / "-s'c\"r i\np☃t.py"
    script.write_text("import os, sys\nprint(ascii(sys.argv[1:]), ascii(__file__))")
    arguments = ["", "a b", "'", '"', "$(touch x)", "new\nline", "-m", "--", "☃", "\udcff"]
    job.run(str(script), *arguments)
    assert job.log(1, "rank1.out") == f"{arguments!a} {str(script)!a}\n"


def test_token_appears_in_no_file_and_no_command_line(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all(job.script(SLEEPER), until=("up0", "up1"))
    assert own_processes()
    assert not [pid for pid in own_processes() if job.token in command_line(pid)]
    job.agents[1].terminate()
    job.wait()
    for path in job.dir.rglob("*"):
        assert path.is_dir() or job.token not in path.read_text(), path
    assert not any(job.token in job.stdout(agent) + job.stderr(agent) for agent in job.agents)


def test_workers_start_with_empty_stdin_and_no_inherited_descriptors(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import os, sys
        print(repr(sys.stdin.read()))
        for name in sorted(os.listdir("/proc/self/fd"), key=int):
            try:
                print(name, os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
            except OSError:
                pass  # the descriptor of listdir itself
    """)
    job.run("--no-echo", "--nproc-per-node", "2", script)
    assert job.stdout(job.agents[0]) == ""
    for rank in (0, 1):
        lines = job.log(0, f"rank{rank}.out").splitlines()
        assert lines[0] == "''"
        descriptors = dict(line.split(" ", 1) for line in lines[1:])
        assert [descriptors.pop(number) for number in "012"] == ["/dev/null", "pipe", "pipe"]
        # The report pipe, and the two memfds in which the worker would write its stacks.
        others = sorted(descriptors.values())
        assert others == ["/memfd", "/memfd", "pipe"], (
            "a worker inherited a descriptor of the forkserver"
        )


# -- failures of workers ---------------------------------------------------------------------------

ENDS = {
    "raise": ("raise ValueError('boom')", 1, None, "ValueError: boom"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL", "SIGKILL"),
    "segv": ("ctypes.string_at(0)", 139, "SIGSEGV", "SIGSEGV"),
}


@pytest.mark.parametrize(
    ("end", "start"),
    [("raise", "fork"), ("kill", "fork"), ("segv", "exec")],
)
def test_worker_failure_on_node_1_ends_job_on_both_nodes(
    make_job: MakeJob, end: str, start: str
) -> None:
    statement, code, signal_name, message = ENDS[end]
    job = make_job(2)
    script = job.script(f"""
        import ctypes, os, signal, sys, time
        if os.environ["RANK"] == "3":
            print("this rank is about to fail", file=sys.stderr)
            {statement}
        time.sleep(1000)
    """)
    job.run("--start", start, "--nproc-per-node", "2", script, code=code)
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
    output = job.stderr(job.agents[0])
    assert "FAILED: rank 3 (node 1, local rank 1, host" in output
    assert "| this rank is about to fail" in output
    assert not own_processes()


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_signal_to_process_group_of_a_rank_ends_that_rank_alone(
    make_job: MakeJob, start: str
) -> None:
    job = make_job()
    text = """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            os.killpg(0, signal.SIGTERM)
        time.sleep(1000)
    """
    job.run("--nproc-per-node", "2", "--start", start, job.script(text), code=143)
    assert job.result["failure"]["rank"] == 1
    assert "SIGTERM" in job.result["failure"]["message"]


def test_failure_time_is_time_of_exception_not_of_exit(make_job: MakeJob) -> None:
    """Rank 0 fails first and exits slowly; rank 1 fails later and exits at once."""
    job = make_job(2)
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
    job.run(script, code=1)
    assert (
        job.result["failure"]["rank"],
        job.result["failure"]["exit_code"],
        job.result["failure"]["signal"],
    ) == (0, 1, None)
    assert "the first" in job.result["failure"]["message"]
    assert [item["rank"] for item in job.result["consequences"]] == [1]


JUNK = (
    rb"\n[]\nnull\n{}\n\xff\xfe\n",
    b'"' + b"x" * 200_000 + b'"\n',
    b"[" * 5000 + b"\n",
    b'{"local_rank": 1e999, "monotonic": 1, "message": "m", "exit_code": 1}\n',
    b'{"local_rank": 99, "monotonic": 1, "message": "m", "exit_code": 1}\n',
)


def test_invalid_data_in_report_pipe_is_ignored(make_job: MakeJob) -> None:
    job = make_job()
    job.path("junk").write_bytes(b"".join(JUNK))
    script = job.script("""
        import os
        fd = int(os.environ["CLUSTERJOB_REPORT_FD"].partition(":")[0])
        os.set_blocking(fd, True)
        with open("junk", "rb") as junk:
            left = junk.read()
            while left:
                left = left[os.write(fd, left):]
        os._exit(9)
    """)
    job.run("--start", "fork", script, code=9)
    assert job.result["failure"]["rank"] == 0


def test_verdict_is_written_when_all_ranks_fail_at_once_with_long_stderr(make_job: MakeJob) -> None:
    """The binary stderr of all ranks together must fit into the messages between agents."""
    job = make_job(2)
    script = job.script(r"""
        import os, pathlib, time
        line = b"\0\x1b[31m\xff" * 100 + "\u2028☃\x85".encode() * 20 + b"\n"
        os.write(2, line * 40 + b"the end\n")
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("go"):
            time.sleep(0.001)
        time.sleep(max(0.0, float(pathlib.Path("go").read_text()) - time.time()))
        os._exit(3)
    """)
    job.start_all("--nproc-per-node", "12", script, until=[f"up{rank}" for rank in range(24)])
    job.path("new").write_text(str(time.time() + 0.3))
    job.path("new").rename(job.path("go"))
    assert job.wait() == [3, 3]
    assert [job.node_end(node)["state"] for node in (0, 1)] == ["FAILED", "FAILED"]
    assert job.result["failure"]["last_lines"][-1] == "the end"


# -- root cause and consequences, with a real process group ----------------------------------------

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
        total = torch.ones(4)
        dist.all_reduce(total)
        assert total.tolist() == [dist.get_world_size()] * 4
        if how == "none" and step == 5:
            break
    dist.barrier()
    # One write: ranks may share a file.
    print(f"rank {rank} of {dist.get_world_size()} is done\\n", end="")
    dist.destroy_process_group()
"""


def test_root_cause_is_rank_that_failed_first(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script(ALL_REDUCE)
    # Under --start exec, a process that raises with a process group open may abort at exit.
    flags = ("--nproc-per-node", "2", "--start", "fork")
    job.start_all(*flags, script, "raise", "3", python=WITH_TORCH)
    codes = job.wait()
    failure = job.result["failure"]
    assert (failure["rank"], failure["node_rank"]) == (3, 1), job.result
    assert (failure["exit_code"], failure["signal"]) == (1, None), job.result
    assert codes == [failure["exit_code"]] * 2
    assert any("ValueError: the root cause" in line for line in failure["last_lines"]), job.result
    assert "ValueError: the root cause" in failure["message"]
    assert all(item["effect"] for item in job.result["consequences"]), job.result


# -- killed agents and forkservers -----------------------------------------------------------------


def test_killed_coordinator_leaves_no_result_and_both_nodes_lost(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all(
        "--start",
        "exec",
        "--nproc-per-node",
        "2",
        job.script(SLEEPER),
        until=("up0", "up1", "up2", "up3"),
    )
    job.agents[0].kill()
    wait_for_no_processes(10)
    assert job.wait() == [-9, 1]
    # Only the coordinator writes it; a missing result never counts as success.
    assert not (job.dir / "result.json").exists()
    assert [job.node_end(node)["state"] for node in (0, 1)] == ["LOST", "LOST"]
    assert "lost the coordinator" in job.node_end(1)["reason"]
    assert "LOST" in job.stderr(job.agents[1])


# -- processes that workers leave behind -----------------------------------------------------------


@pytest.mark.parametrize("end", ["success", "cancel"])
def test_daemonized_grandchildren_end_with_job(make_job: MakeJob, end: str) -> None:
    job = make_job(2)
    last = {"success": "pass", "cancel": "time.sleep(1000)"}[end]
    script = job.script(
        textwrap.dedent(DAEMON)
        + textwrap.dedent(f"""
            leave_a_daemon("daemon" + os.environ["RANK"])
            while not (os.path.exists("daemon0") and os.path.exists("daemon1")):
                time.sleep(0.01)
            {last}
        """)
    )
    job.start_all(script, until=("daemon0", "daemon1"))
    if end == "cancel":
        job.agents[0].terminate()
    assert set(job.wait()) == {{"success": 0, "cancel": 143}[end]}
    assert not own_processes()
    assert not alive(int(job.path("daemon0").read_text()))


@pytest.mark.parametrize("victim", ["agent", "both agents", "forkserver"])
def test_daemonized_grandchildren_end_with_killed_agent_or_forkserver(
    make_job: MakeJob, victim: str
) -> None:
    job = make_job(2)
    job.start_all(
        job.script(
            textwrap.dedent(DAEMON)
            + "leave_a_daemon('daemon' + os.environ['RANK'])\ntime.sleep(1000)\n"
        ),
        until=("daemon0", "daemon1"),
    )
    agent = job.agents[1].pid
    victims = {
        "agent": [agent],
        "both agents": [agent, job.agents[0].pid],
        "forkserver": [job.forkserver_of(job.agents[1])],
    }
    for pid in victims[victim]:
        os.kill(pid, signal.SIGKILL)
    wait_for_no_processes(10)
    assert 0 not in job.wait()
    if victim != "forkserver":
        assert job.node_end(1)["state"] == "LOST"
        assert str(agent) in job.node_end(1)["reason"]
    if victim != "both agents":
        failure = job.result["failure"]
        assert (failure["rank"], failure["node_rank"], failure["host"]) == (None, 1, HOST)
        assert {"agent": f"pid {agent}", "forkserver": "SIGKILL"}[victim] in failure["message"]


@pytest.mark.parametrize("end", ["failure", "kill"])
def test_worker_that_ignores_sigterm_is_killed_after_grace_period(
    make_job: MakeJob, end: str
) -> None:
    job = make_job(2)
    script = job.script("""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"up{os.environ['RANK']}").touch()
        while not os.path.exists("fail") or os.environ["RANK"] == "1":
            time.sleep(0.01)
        sys.exit(6)
    """)
    job.start_all("--grace", "0.5", script, until=("up0", "up1"))
    if end == "failure":
        job.path("fail").touch()
    else:
        job.agents[1].kill()
    wait_for_no_processes(10)
    assert job.wait() == {"failure": [6, 6], "kill": [1, -9]}[end]


# -- rendezvous of agents --------------------------------------------------------------------------


def test_agent_without_coordinator_reports_address_that_it_tried(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start(1, "--join-timeout", "0.5", job.script(SLEEPER))
    assert job.wait() == [1]
    reason = job.node_end(1)["reason"]
    assert "node 1 cannot reach node 0 at 127.0.0.1" in reason
    assert "connection refused" in reason
    assert not (job.dir / "result.json").exists()


@pytest.mark.parametrize("address", ["no-such-host.invalid", "node0..cluster"])
def test_unresolvable_coordinator_address_is_reported_on_both_nodes(
    make_job: MakeJob, address: str
) -> None:
    job = make_job(2)
    variables = {"CLUSTERJOB_MASTER_ADDR": address, "RES_OPTIONS": "timeout:1 attempts:1"}
    for node_rank in (1, 0):
        job.start(node_rank, "--join-timeout", "0.5", job.script(SLEEPER), env=variables)
    assert job.wait() == [1, 1]
    for agent in job.agents:
        assert "Traceback" not in job.stderr(agent)
    assert address in job.node_end(1)["reason"]
    assert address in job.result["reason"]


def test_agent_with_wrong_token_is_refused(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script("print('ran')")
    job.start(0, script)
    wait_until(lambda: job.events("listening"), TEST_TIMEOUT)
    refused = job.start(
        1, "--join-timeout", "1", script, env={"CLUSTERJOB_TOKEN": "guessed-by-others"}
    )
    assert refused.wait(TEST_TIMEOUT) == 1
    assert "does not know the job's token" in job.node_end(1)["reason"]
    assert job.events("unauthenticated")
    assert not job.events("joined")[1:]
    job.start(1, script)
    assert job.wait() == [0, 1, 0]


@pytest.mark.slow
def test_coordinator_takes_next_port_when_port_is_in_use(make_job: MakeJob) -> None:
    from clusterjob.node.environments.topology import candidate_ports

    job = make_job(2)
    first, second = candidate_ports(job.id, 0)[:2]
    with (
        socket.create_server(("127.0.0.1", first)),
        socket.create_server(("127.0.0.1", second)) as second_listener,
    ):
        second_listener.settimeout(TEST_TIMEOUT)
        job.start_all(job.script("print('ran')"))
        second_listener.accept()[0].close()
        # The first listener accepts and never answers; agents must notice that.
        assert job.wait() == [0, 0]


@pytest.mark.parametrize(
    ("variables", "words", "named"),
    [
        ({"CLUSTERJOB_ATTEMPT": "second"}, ["SCRIPT"], "CLUSTERJOB_ATTEMPT"),
        (
            {"CLUSTERJOB_TOKEN": "", "CLUSTERJOB_TOKEN_FILE": "/nowhere/token"},
            ["SCRIPT"],
            "/nowhere/token",
        ),
        ({"CLUSTERJOB_JOB_DIR": "SCRIPT/job"}, ["SCRIPT"], "clusterjob: the job directory "),
        ({}, ["--start", "fork", "--", "true"], "--start fork is impossible"),
        (
            {},
            ["--", sys.executable, "-m", "clusterjob.node", "SCRIPT"],
            "already one process of a job",
        ),
    ],
)
def test_impossible_start_is_reported_without_traceback(
    make_job: MakeJob, variables: dict[str, str], words: list[str], named: str
) -> None:
    job = make_job()
    script = job.script("print('ran')")
    env = {name: value.replace("SCRIPT", script) for name, value in variables.items()}
    job.start(0, *(word.replace("SCRIPT", script) for word in words), env=env)
    assert job.wait()[0] in (1, 2)
    told = job.stderr(job.agents[0])
    assert named in told
    assert "Traceback" not in told


# -- restarts --------------------------------------------------------------------------------------


def test_node_that_still_imports_torch_takes_part_in_restart(
    make_job: MakeJob,
) -> None:
    job = make_job(2)
    slow = new_folder(job.path("slow") / "torch")
    (slow / "__init__.py").write_text(
        "import time\ntime.sleep(2)\n"
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    script = job.script(
        "import os; raise SystemExit("
        "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '0')"
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


def test_restart_has_fresh_store(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script(
        textwrap.dedent(ALL_REDUCE).replace(
            "how, guilty = sys.argv[1:]",
            "how, guilty = sys.argv[1:] "
            "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else ('none', '-1')",
        )
    )
    job.run("--max-restarts", "1", script, "kill", "1", python=WITH_TORCH)
    assert job.result["restarts"] == 1
    assert job.log(1, "rank1.restart1.out") == "rank 1 of 2 is done\n"


# -- cancel requests, time limit and lifeline ------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "number"),
    [(1, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGHUP)],
)
def test_signal_to_any_agent_cancels_job_on_all_nodes(
    make_job: MakeJob, node: int, number: signal.Signals
) -> None:
    job = make_job(2)
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
    job.start_all(script, until=("up0", "up1"))
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
    assert [job.node_end(rank)["state"] for rank in (0, 1)] == ["CANCELLED", "CANCELLED"]
    assert not own_processes()


def test_second_signal_after_sigint_ends_job_within_grace_period(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script("""
        import os, pathlib, signal, time
        rank = os.environ["RANK"]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"interrupted{rank}").touch())
        pathlib.Path(f"up{rank}").touch()
        while True:
            time.sleep(0.05)
    """)
    job.start_all("--grace", "1000", script, until=("up0", "up1"))
    job.agents[1].send_signal(signal.SIGINT)
    # The same key press a second time, passed on by a command between terminal and agent.
    job.agents[1].send_signal(signal.SIGINT)
    job.wait_for("interrupted0", "interrupted1")
    assert [agent.poll() for agent in job.agents] == [None, None]
    time.sleep(0.6)  # an earlier signal would count as the same key press
    job.agents[1].send_signal(signal.SIGINT)
    assert job.wait() == [143, 143]
    assert job.result["state"] == "CANCELLED"


@pytest.mark.parametrize("node", [0, 1])
def test_agent_that_waits_in_rendezvous_can_be_cancelled(make_job: MakeJob, node: int) -> None:
    job = make_job(2)
    job.start(node, job.script(SLEEPER))
    wait_until(
        lambda: (
            handles_signal(job.agents[0].pid, signal.SIGTERM)
            and (node == 1 or job.events("listening"))
        ),
        TEST_TIMEOUT,
    )
    time.sleep(0.2)  # node 1 reports no event while it connects
    job.agents[0].terminate()
    assert job.wait() == [143]
    assert job.node_end(node)["state"] == "CANCELLED"


def test_sigterm_after_another_node_has_ended_keeps_the_verdict(make_job: MakeJob) -> None:
    """A platform ends the other nodes of a task when one has ended."""
    job = make_job(2)
    job.start_all(
        job.script("""
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("boom")
        time.sleep(600)
    """)
    )
    job.agents[1].wait(TEST_TIMEOUT)
    while job.agents[0].poll() is None:
        job.agents[0].terminate()
        time.sleep(0.001)
    assert (job.result["state"], job.result["failure"]["message"]) == ("FAILED", "ValueError: boom")


@pytest.mark.parametrize(
    ("number", "delays"),
    [(signal.SIGTERM, (0.03, 0.17, 0.31, 0.45)), (signal.SIGKILL, (0.5, 0.1))],
)
def test_signal_during_start_leaves_no_process(
    make_job: MakeJob, number: signal.Signals, delays: tuple[float, ...]
) -> None:
    for index, delay in enumerate(delays):
        job = make_job()
        python = WITH_TORCH if index % 2 else (sys.executable, "-S")
        job.start(0, "--nproc-per-node", "2", job.script(SLEEPER), python=python)
        time.sleep(delay)
        job.agents[0].send_signal(number)
        # Before the agent installs its handler, SIGTERM kills it.
        assert job.wait()[0] in (143, -number)
        wait_for_no_processes(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_all_processes_while_agent_loads_cancels_job(
    make_job: MakeJob, number: signal.Signals
) -> None:
    """A scheduler signals all processes of a job at once.

    An agent whose forkserver already runs must end as cancelled, not as killed.
    """
    job = make_job()
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
    agent = job.start(0, job.script(SLEEPER), env={"PYTHONPATH": path}, until=("loading",))
    for pid in (agent.pid, job.forkserver_of(agent)):
        os.kill(pid, number)
    job.path("signalled").touch()
    assert job.wait() == [143]
    assert (job.result["state"], job.result["reason"]) == ("CANCELLED", f"{number.name} on {HOST}")
    assert job.node_end(0)["state"] == "CANCELLED"
    assert not job.path("up0").exists(), "no worker was started"
    assert "Traceback" not in job.stderr(agent)
    wait_for_no_processes(10)


def test_closed_lifeline_of_detached_job_does_not_cancel(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import os, pathlib, time
        pathlib.Path("up").touch()
        while not os.path.exists("go"):
            time.sleep(0.01)
    """)
    agent = job.start(0, "--lifeline", script, stdin=subprocess.PIPE, until=("up",))
    (job.dir / "detached").touch()
    agent.stdin.close()
    time.sleep(0.5)
    assert agent.poll() is None
    job.path("go").touch()
    assert job.wait() == [0]


def test_newly_forked_workers_obey_sigterm(make_job: MakeJob) -> None:
    """A worker that does not run its script yet also ends at SIGTERM.

    /dev/null is at its end at once, and poll(2) reports it differently than a pipe.
    """
    for _ in range(3):
        job = make_job()
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
        assert job.result["state"] == "CANCELLED"
        assert "Traceback" not in job.stderr(job.agents[0])


# -- commands --------------------------------------------------------------------------------------


def test_missing_command_exits_with_127(make_job: MakeJob) -> None:
    job, command = make_job(2), "/nowhere/at all"
    job.run("--", command, "argument", code=127)
    assert f"cannot start {command}: No such file or directory" in job.result["failure"]["message"]
    assert f"cannot start {command}" in job.stderr(job.agents[0])
    assert "Traceback" not in job.stderr(job.agents[0])


def test_command_has_same_signal_dispositions_as_in_shell(make_job: MakeJob) -> None:
    """Python ignores SIGPIPE, and exec keeps that: ``yes | head`` would print an error."""
    job = make_job()
    command = ["sh", "-c", "grep -E 'Sig(Ign|Blk)' /proc/self/status; yes | head -n 1"]
    # The dispositions that this test itself has inherited.
    expected = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert expected.endswith("y\n")
    job.run("--", *command)
    assert job.log(0, "rank0.out") == expected
    assert job.log(0, "rank0.err") == ""


# -- output and disk -------------------------------------------------------------------------------


def test_job_continues_after_reader_of_output_closes_pipe(make_job: MakeJob) -> None:
    job = make_job(2)
    out, out_other = os.pipe()
    err, err_other = os.pipe()
    script = job.script(
        "import os; print('x' * 1000); "
        "raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    )
    job.start(0, "--max-restarts", "1", script, stdout=out_other, stderr=err_other)
    for descriptor in (out, out_other, err, err_other):
        os.close(descriptor)
    job.start(1, "--max-restarts", "1", script)
    assert job.wait() == [0, 0]
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)
