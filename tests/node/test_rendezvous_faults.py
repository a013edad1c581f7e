"""Frozen agents, links cut in one direction, and late root causes.

In each case the verdict names the root cause, not a consequence.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from namespaces import Machine, machines, skip_reason
from procs import QUICK_LEASE, TEST_TIMEOUT, WITH_TORCH, Job, MakeJob, below, wait_until

from clusterjob.node.rendezvous.membership import Stalls

FREEZE_SECONDS = 5.0  # seconds; more than twice the lease

# Rank 0 reads from rank 1 and fails when rank 1 is gone, like a collective. It needs no torch.
TALK_SCRIPT = """
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
        port = int((here / "port").read_text())
        peer = socket.create_connection((os.environ["MASTER_ADDR"], port))
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


def talk_script(job: Job) -> str:
    return job.script(TALK_SCRIPT.replace("PLACE", str(job.directory)))


def freeze(pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_coordinator_that_was_frozen_names_itself_as_root_cause(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all(*QUICK_LEASE, talk_script(job), until=("up0", "up1"))
    freeze([job.agents[0].pid], FREEZE_SECONDS)
    assert 0 not in job.wait()
    failure = job.result["failure"]
    assert (failure["node_rank"], failure["rank"]) == (0, None), job.result
    match = re.search(
        r"did not run for (\d+) s \(stopped, suspended or without a CPU\), and node 1 lost it",
        failure["message"],
    )
    assert match is not None, failure["message"]
    assert int(match[1]) >= int(FREEZE_SECONDS) - 1
    stalled = job.events("stalled")  # a slow machine adds some short stalls
    assert {event["node_rank"] for event in stalled} == {0}
    assert max(event["seconds"] for event in stalled) >= FREEZE_SECONDS - 1


@pytest.mark.slow
def test_job_continues_after_all_its_processes_were_frozen(make_job: MakeJob) -> None:
    """This happens when all machines of a job are suspended together."""
    job = make_job(2)
    job.start_all(*QUICK_LEASE, talk_script(job), until=("up0", "up1"))
    freeze(
        [agent.pid for agent in job.agents]
        + [pid for agent in job.agents for pid in below(agent.pid)],
        FREEZE_SECONDS,
    )
    for rank in (0, 1):
        job.path(f"up{rank}").unlink()
    job.wait_for("up0", "up1")
    time.sleep(1.0)  # five heartbeats
    assert [agent.poll() for agent in job.agents] == [None, None], job.stderr(job.agents[0])
    job.agents[0].terminate()
    job.wait()
    assert job.result["state"] == "CANCELLED"


def test_stall_includes_time_while_machine_was_suspended() -> None:
    """The test provides the clock, because it cannot suspend the machine."""
    moment = 100.0
    stalls = Stalls(2.0, lambda: moment)
    for _ in range(3):
        moment += 2.5
        assert stalls.tick() == 0.0
    moment += 30.0
    assert stalls.recent(10.0) == 30.0, "before it is recorded"
    assert stalls.tick() == stalls.last == 30.0
    moment += 3.0
    assert stalls.recent(10.0) == 30.0
    assert stalls.recent(1.0) == 0.0


# -- a consequence that is reported before its root cause ------------------------------------------


def kill_worker(job: Job, rank: int) -> None:
    os.kill(int(job.path(f"pid{rank}").read_text()), signal.SIGKILL)


def test_verdict_waits_for_frozen_forkserver(make_job: MakeJob) -> None:
    """The agent answers, but the forkserver, which reaps the workers, does not."""
    job = make_job(2)
    job.start_all("--lease", "6", talk_script(job), until=("up0", "up1"))
    forkserver = job.forkserver_of(job.agents[1])
    os.kill(forkserver, signal.SIGSTOP)
    kill_worker(job, 1)
    wait_until(lambda: "by peer" in job.log(0, "rank0.err"), TEST_TIMEOUT)
    time.sleep(1.0)
    os.kill(forkserver, signal.SIGCONT)
    assert job.wait() == [137, 137]
    assert job.result["failure"]["rank"] == 1


# -- a link that is cut in one direction -----------------------------------------------------------


@pytest.fixture
def two_machines() -> Iterator[list[Machine]]:
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with machines(2) as pair:
        yield pair


def cut_link(source: Machine, target: Machine) -> None:
    """Cut the link from source to target; packets from target to source still arrive.

    The packets go to a hardware address that no machine has.
    """
    arguments = (
        f"-n {source.name} neighbour replace {target.address} lladdr 02:00:00:00:00:99 "
        "nud permanent dev eth0"
    )
    subprocess.run(["ip", *arguments.split()], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
def test_link_cut_in_one_direction_is_not_failure_of_rank_0(
    make_job: MakeJob, two_machines: list[Machine], direction: tuple[int, int]
) -> None:
    job = make_job(2)
    program = talk_script(job)
    for node_rank, machine in enumerate(two_machines):
        env = {"CLUSTERJOB_MASTER_ADDR": two_machines[0].address, "TMPDIR": str(job.directory)}
        job.start(
            node_rank,
            *QUICK_LEASE,
            program,
            python=(*machine.command(sys.executable, "-S"),),
            env=env,
        )
    job.wait_for("up0", "up1")
    cut_link(two_machines[direction[0]], two_machines[direction[1]])
    assert 0 not in job.wait()
    failure = job.result["failure"]
    assert (failure["node_rank"], failure["rank"]) == (1, None), job.result
    assert "no message for" in failure["message"], failure["message"]


# -- a rank that exits with code 0 -----------------------------------------------------------------

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


def test_rank_that_exits_while_others_wait_in_collective_is_root_cause(make_job: MakeJob) -> None:
    job = make_job(2)
    job.run("--nproc-per-node", "2", job.script(LEAVE), python=WITH_TORCH, code=1)
    failure, others = job.result["failure"], {item["rank"] for item in job.result["consequences"]}
    assert (failure["rank"], failure["kind"], failure["exit_code"]) == (1, "early_exit", 0), (
        job.result
    )
    message = (
        r"ended with exit code 0 (\d+\.\d s before|at that moment); "
        r"ranks? [023, -]+ (was|were) in all_reduce"
    )
    assert re.fullmatch(message, failure["message"]), failure["message"]
    assert others <= {0, 2, 3}


# -- time limit ------------------------------------------------------------------------------------


# -- agents with internal errors -------------------------------------------------------------------


def test_too_small_limit_of_open_files_is_named(make_job: MakeJob) -> None:
    job = make_job(2)
    limited = ("sh", "-c", 'ulimit -n 20; exec "$@"', "sh", sys.executable, "-S")
    job.start(0, job.script("print('ran')"), python=limited)
    assert job.wait() == [2]
    message = "the hard limit of 20 open files is too small, needed: 34"
    assert message in job.stderr(job.agents[0])


BROKEN = """
    import asyncio, os, runpy, sys, time
    from clusterjob.node.rendezvous.membership import Membership
    from clusterjob.node.system.files import Appender

    async def beat(self):
        while not os.path.exists("up1"):
            await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug")

    append = Appender.write

    def write(self, data):
        if self._path.name != "events.jsonl":
            return append(self, data)
        while not os.path.exists("up1"):
            time.sleep(0.05)
        raise ZeroDivisionError("a bug")

    {broken}
    del sys.argv[:3]
    sys.argv.insert(0, "clusterjob.node")
    runpy.run_module("clusterjob.node", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("broken", "where"),
    [("Membership._find_silent = beat", "beat"), ("Appender.write = write", "write")],
    ids=["task", "disk thread"],
)
def test_exception_in_agent_ends_all_nodes_with_reason(
    make_job: MakeJob, broken: str, where: str
) -> None:
    job = make_job(2)
    program = talk_script(job)
    text = BROKEN.format(broken=broken)
    job.start(0, program, python=(sys.executable, "-S", job.script(text, "broken.py")))
    job.start(1, program)
    assert job.wait() == [1, 1]
    assert job.result["state"] == "FAILED"
    assert (
        f"(pid {job.agents[0].pid}) failed: ZeroDivisionError: a bug ({where}, broken.py line"
        in job.result["reason"]
    )
    assert "failed: ZeroDivisionError: a bug" in job.node_end(1)["reason"]
