"""Agents that stand still, links that are cut one way, causes that come late: the verdict names the
cause and no bystander.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from namespaces import Machine, machines, why_not
from procs import PATIENCE, WITH_TORCH, Job, below, wait_until

from clusterjob.node.rendezvous.stalls import Stalls

NewJob = Callable[..., Job]
QUICK = ("--heartbeat", "0.2", "--lease", "2")
STILL = 5.0  # seconds; more than twice that lease

# Rank 0 reads from rank 1 as a collective does, and fails as one when that is gone. No torch: the
# tests are about agents.
TALK = """
    import os, pathlib, socket, sys, time
    rank = int(os.environ["RANK"])
    here = pathlib.Path("PLACE")
    if rank == 0:
        with socket.create_server((os.environ["MASTER_ADDR"], 0)) as server:
            (here / "new").write_text(str(server.getsockname()[1]))
            (here / "new").rename(here / "port")
            peer = server.accept()[0]
    else:
        while not (here / "port").exists():
            time.sleep(0.02)
        peer = socket.create_connection((os.environ["MASTER_ADDR"], int((here / "port").read_text())))
    (here / f"pid{rank}").write_text(str(os.getpid()))
    while True:
        peer.sendall(b"x")
        if not peer.recv(1):
            raise RuntimeError("Connection closed by peer")
        if (here / f"leave{rank}").exists():
            sys.exit(0)
        (here / f"up{rank}").touch()
        time.sleep(0.05)
"""


def talking(job: Job) -> str:
    return job.script(TALK.replace("PLACE", str(job.directory)))


def freeze(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def test_a_frozen_coordinator_blames_itself(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(*QUICK, talking(job))
    job.wait_for("up0", "up1")
    freeze([job.agents[0].pid], STILL)
    assert 0 not in job.wait()
    failure = job.result["failure"]
    assert (failure["node_rank"], failure["rank"]) == (0, None), job.result
    stood = re.search(
        r"did not run for (\d+) s \(stopped, suspended or without a CPU\), and node 1 gave it up",
        failure["message"],
    )
    assert stood is not None, failure["message"]
    assert int(stood[1]) >= int(STILL) - 1
    stalled = job.events("stalled")  # a slow machine adds some short ones
    assert {event["node_rank"] for event in stalled} == {0}
    assert max(event["seconds"] for event in stalled) >= STILL - 1


def test_a_job_of_which_all_processes_stood_still_goes_on(new_job: NewJob) -> None:
    """As when virtual machines are suspended, or the only one of a job."""
    job = new_job(2)
    job.start_all(*QUICK, talking(job))
    job.wait_for("up0", "up1")
    freeze(
        [agent.pid for agent in job.agents]
        + [pid for agent in job.agents for pid in below(agent.pid)],
        STILL,
    )
    for rank in (0, 1):
        job.path(f"up{rank}").unlink()
    job.wait_for("up0", "up1")
    time.sleep(1.0)  # five heartbeats
    assert [agent.poll() for agent in job.agents] == [None, None], job.stderr(job.agents[0])
    job.agents[0].terminate()
    job.wait()
    assert job.result["state"] == "CANCELLED"


def test_a_frozen_member_is_still_lost(new_job: NewJob) -> None:
    job = new_job(2)
    job.start_all(*QUICK, talking(job))
    job.wait_for("up0", "up1")
    freeze([job.agents[1].pid], STILL)
    assert 0 not in job.wait()
    assert job.result["failure"]["node_rank"] == 1
    assert "nothing was heard of it for" in job.result["reason"]


def test_a_stall_counts_the_time_of_a_suspended_machine() -> None:
    """CLOCK_BOOTTIME cannot be suspended here: the clock is the test's."""
    moment = 100.0
    stalls = Stalls(2.0, lambda: moment)
    for _ in range(3):
        moment += 2.5
        assert stalls.tick() == 0.0
    moment += 30.0
    assert stalls.tick() == 30.0
    assert (stalls.last, stalls.total) == (30.0, 30.0)
    moment += 3.0
    assert stalls.recent(10.0) == 30.0
    assert stalls.recent(1.0) == 0.0


# -- an effect that is heard of before its cause ---------------------------------------------------------------------------


def kill_worker(job: Job, rank: int) -> None:
    os.kill(int(job.path(f"pid{rank}").read_text()), signal.SIGKILL)


@pytest.mark.parametrize("thaw", [True, False])
def test_a_lost_peer_is_not_the_verdict_while_a_node_is_silent(new_job: NewJob, thaw: bool) -> None:
    """Node 1's agent stands still while its worker is killed: rank 0 has failed long before anybody
    can say why.
    """
    job = new_job(2)
    job.start_all("--heartbeat", "0.2", "--lease", "4", talking(job))
    job.wait_for("up0", "up1")
    os.kill(job.agents[1].pid, signal.SIGSTOP)
    kill_worker(job, 1)
    wait_until(lambda: "by peer" in job.log(0, "rank0.err"), PATIENCE)
    time.sleep(1.0)  # three times what an effect waits for its cause where all nodes answer
    if thaw:
        os.kill(job.agents[1].pid, signal.SIGCONT)
        assert job.wait() == [137, 137]
        assert (job.result["failure"]["rank"], job.result["failure"]["signal"]) == (1, "SIGKILL")
        assert [item["rank"] for item in job.result["consequences"]] == [0]
        return
    assert job.agents[0].wait(PATIENCE) == 1
    os.kill(job.agents[1].pid, signal.SIGCONT)
    job.wait()
    assert (job.result["failure"]["node_rank"], job.result["failure"]["rank"]) == (1, None)
    assert "nothing was heard of it for" in job.result["reason"]


def test_a_forkserver_that_cannot_tell_yet_is_waited_for(new_job: NewJob) -> None:
    """The agent answers; the process that reaps its workers does not."""
    job = new_job(2)
    job.start_all("--heartbeat", "0.2", "--lease", "6", talking(job))
    job.wait_for("up0", "up1")
    starter = job.starter_of(job.agents[1])
    os.kill(starter, signal.SIGSTOP)
    kill_worker(job, 1)
    wait_until(lambda: "by peer" in job.log(0, "rank0.err"), PATIENCE)
    time.sleep(1.0)
    os.kill(starter, signal.SIGCONT)
    assert job.wait() == [137, 137]
    assert job.result["failure"]["rank"] == 1


@pytest.mark.slow
def test_kill_9_of_a_forkserver_is_the_cause_in_twenty_runs(new_job: NewJob) -> None:
    for _ in range(20):
        job = new_job(2)
        job.start_all(talking(job))
        job.wait_for("up0", "up1")
        os.kill(job.starter_of(job.agents[1]), signal.SIGKILL)
        assert 0 not in job.wait()
        assert (job.result["failure"]["node_rank"], job.result["failure"]["rank"]) == (1, None), (
            job.result
        )
        assert "the process that starts the workers was lost" in job.result["reason"]


# -- a link that is cut one way ---------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> Iterator[list[Machine]]:
    why = why_not()
    if why:
        pytest.skip(why)
    with machines(2) as made:
        yield made


def cut(source: Machine, target: Machine) -> None:
    """Have packets from one machine to another go to a hardware address that nobody has; those of
    the other way arrive.
    """
    words = f"-n {source.name} neighbour replace {target.address} lladdr 02:00:00:00:00:99 nud permanent dev eth0"
    subprocess.run(["ip", *words.split()], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_a_link_that_is_cut_one_way_is_no_failure_of_rank_0(
    new_job: NewJob, two: list[Machine], way: tuple[int, int]
) -> None:
    job = new_job(2)
    program = talking(job)
    for node_rank, machine in enumerate(two):
        place = {"CLUSTERJOB_MASTER_ADDR": two[0].address, "TMPDIR": str(job.directory)}
        job.start(
            node_rank, *QUICK, program, python=(*machine.command(sys.executable, "-S"),), env=place
        )
    job.wait_for("up0", "up1")
    cut(two[way[0]], two[way[1]])
    assert 0 not in job.wait()
    failure = job.result["failure"]
    assert (failure["node_rank"], failure["rank"]) == (1, None), job.result
    assert "nothing was heard of it for" in failure["message"], failure["message"]


# -- a rank that leaves with exit code 0 -----------------------------------------------------------------------------------

LEAVE = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(4)
    for step in range(1000000):
        if step == 3 and dist.get_rank() == 1:
            os._exit(0)
        dist.all_reduce(total)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_rank_that_leaves_the_others_in_a_collective_is_named(
    new_job: NewJob, nnodes: int
) -> None:
    job = new_job(nnodes)
    job.start_all("--nproc-per-node", str(4 // nnodes), job.script(LEAVE), python=WITH_TORCH)
    assert job.wait() == [1] * nnodes
    failure, others = job.result["failure"], {item["rank"] for item in job.result["consequences"]}
    assert (failure["rank"], failure["kind"], failure["exit_code"]) == (1, "early_exit", 0), (
        job.result
    )
    said = re.fullmatch(
        r"ended with exit code 0 (\d+\.\d s before|at that moment); ranks? ([\d, ]+) (was|were) in all_reduce",
        failure["message"],
    )
    assert said is not None, failure["message"]
    assert {int(rank) for rank in said[2].split(",")} <= others <= {0, 2, 3}


def test_a_rank_that_leaves_after_the_others_have_ended_is_nobody_s_cause(new_job: NewJob) -> None:
    job = new_job()
    job.start(
        0,
        "--nproc-per-node",
        "2",
        job.script("import os, sys; sys.exit(3 * int(os.environ['RANK']))"),
    )
    assert job.wait() == [3]
    assert (job.result["failure"]["rank"], job.result["failure"]["kind"]) == (1, None)


# -- the time limit ----------------------------------------------------------------------------------------------------------


def test_the_time_limit_does_not_count_the_import_of_torch(new_job: NewJob) -> None:
    job = new_job(2)
    slow = job.directory / "slow" / "torch"
    slow.mkdir(parents=True)
    (slow / "__init__.py").write_text("import time\ntime.sleep(6)\nraise ImportError('no torch')\n")
    script = job.script("import time; time.sleep(0.2)")
    for node_rank in (0, 1):
        path = (
            f"{job.directory / 'slow'}:{os.environ['PYTHONPATH']}"
            if node_rank
            else os.environ["PYTHONPATH"]
        )
        job.start(node_rank, "--time-limit", "5", script, env={"PYTHONPATH": path})
    assert job.wait() == [0, 0], job.stderr(job.agents[0])


# -- an agent that breaks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [9, 10, 11, 12, 16])
def test_an_agent_that_may_open_few_files_ends_in_time(new_job: NewJob, files: int) -> None:
    """It ran on, past its own join timeout, without a part of itself."""
    job = new_job(2)
    limited = ("sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable, "-S")
    job.start(0, "--join-timeout", "1", job.script("print('ran')"), python=limited)
    assert job.wait() != [0]


BROKEN = """
    import asyncio, os, runpy, sys
    from clusterjob.node.rendezvous.membership import Gathering

    async def beat(self):
        while not os.path.exists("up1"):
            await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug")

    Gathering._beat = beat
    del sys.argv[:3]
    sys.argv.insert(0, "clusterjob.node")
    runpy.run_module("clusterjob.node", run_name="__main__")
"""


def test_a_task_of_the_agent_that_breaks_ends_all_nodes_with_the_reason(new_job: NewJob) -> None:
    job = new_job(2)
    program = talking(job)
    job.start(0, program, python=(sys.executable, "-S", job.script(BROKEN, "broken.py")))
    job.start(1, program)
    assert job.wait() == [1, 1]
    assert job.result["state"] == "FAILED"
    assert (
        f"(pid {job.agents[0].pid}) broke: ZeroDivisionError: a bug (beat, broken.py line"
        in job.result["reason"]
    )
    assert "broke: ZeroDivisionError: a bug" in job.end_of(1)["reason"]
