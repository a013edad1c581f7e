"""Kill an agent, a forkserver or torch's store of a job whose workers may be restarted."""

from __future__ import annotations

import os
import signal
import time

import pytest
from procs import (
    QUICK_LEASE,
    TEST_TIMEOUT,
    WITH_TORCH,
    Job,
    MakeJob,
    alive,
    below,
    children,
    command_line,
    own_processes,
    wait_for_no_processes,
    wait_until,
)

RESTARTS = ("--max-restarts", "3")

# Each rank of a round creates a file, and ends when a file ``go`` names the round.
ROUNDS = """
    import os, pathlib, sys, time
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    print(f"rank {rank} in round {restart}", flush=True)
    pathlib.Path(f"up{rank}.{restart}").touch()
    while not os.path.exists(f"go{restart}"):
        time.sleep(0.02)
    print(f"rank {rank} ends", flush=True)
"""
# Ranks that add ones until the file ``go`` exists; each creates a file after its first sum.
SUMS = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, restart = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    pathlib.Path(f"up{rank}.{restart}").touch()
    go = torch.zeros(1)
    while not go.item():
        go = torch.tensor([float(os.path.exists(f"go{restart}"))])
        dist.all_reduce(go, op=dist.ReduceOp.MIN)
        time.sleep(0.02)
    dist.destroy_process_group()
"""


def up(restart: int, ranks: int = 2) -> list[str]:
    return [f"up{rank}.{restart}" for rank in range(ranks)]


def forkserver_of(job: Job, node: int) -> int:
    (forkserver,) = children(job.agent_of(node))
    return forkserver


def store_of(job: Job) -> int:
    own = command_line(job.agents[0].pid)
    same = [pid for pid in children(forkserver_of(job, 0)) if command_line(pid) == own]
    return same[1]  # the first one writes the workers' output


def victim_of(job: Job, victim: str) -> int:
    kind, _, node = victim.partition(" ")
    return job.agent_of(int(node)) if kind == "agent" else forkserver_of(job, int(node))


PARTS = ["agent 0", "agent 1", "forkserver 0", "forkserver 1"]


@pytest.mark.parametrize("victim", PARTS)
def test_killed_part_restarts_the_workers(make_job: MakeJob, victim: str) -> None:
    job = make_job(2)
    job.start_all(*RESTARTS, job.script(ROUNDS), until=up(0))
    # The loss of a round that does not count as running yet costs nothing.
    wait_until(lambda: job.events("running"), TEST_TIMEOUT)
    workers = [pid for agent in job.agents for pid in below(agent.pid)]
    os.kill(victim_of(job, victim), signal.SIGKILL)
    job.wait_for(*up(1))
    kept = [pid for pid in workers if alive(pid)]
    job.path("go1").touch()
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    result = job.result
    assert (result["state"], result["restarts"]) == ("SUCCEEDED", 1)
    assert len(kept) == 3, "the other node's agent, forkserver and output process stay"
    kind, node = victim.split()
    (restart,) = job.events("restart")
    assert f"node {node} " in restart["why"]
    assert kind in restart["why"]
    assert not job.events("avoid"), "the host is healthy"
    for rank in (0, 1):
        assert (
            job.log(rank, f"rank{rank}.restart1.out")
            == f"rank {rank} in round 1\nrank {rank} ends\n"
        )
        # No line of the output is lost or repeated.
        lines = [line for line in job.stdout(job.agents[rank]).splitlines() if line]
        assert lines == [
            f"[{rank}] rank {rank} in round 0",
            f"[{rank}] rank {rank} in round 1",
            f"[{rank}] rank {rank} ends",
        ]
        assert job.node_end(rank)["state"] == "SUCCEEDED"
    assert not own_processes()


def test_killed_store_restarts_the_workers(make_job: MakeJob) -> None:
    job = make_job(2)
    job.start_all(*RESTARTS, job.script(SUMS), python=WITH_TORCH, until=up(0))
    os.kill(store_of(job), signal.SIGKILL)
    job.wait_for(*up(1))
    job.path("go1").touch()
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    assert (job.result["state"], job.result["restarts"]) == ("SUCCEEDED", 1)
    (restart,) = job.events("restart")
    assert "store" in restart["why"]
    assert not own_processes()


def test_each_kill_of_the_coordinator_costs_one_restart(make_job: MakeJob) -> None:
    """The verdict about the last one names it."""
    job = make_job()
    job.start(0, *RESTARTS, job.script(ROUNDS))
    for restart in range(4):
        job.wait_for(f"up0.{restart}")
        # The loss of a round that does not count as running yet costs nothing.
        wait_until(lambda rounds=restart: job.events("running")[rounds:], TEST_TIMEOUT)
        agent = job.agent_of(0)
        os.kill(agent, signal.SIGKILL)
    assert job.wait() == [1], job.stderr(job.agents[0])
    assert (job.result["state"], job.result["restarts"]) == ("FAILED", 3)
    assert [each["kind"] for each in job.result["attempts"]] == ["node_lost"] * 4
    last = f"the agent of node 0 on {os.uname().nodename} (pid {agent}) was killed by SIGKILL"
    assert last in job.result["reason"]
    assert not own_processes()


def test_agent_of_node_0_killed_before_the_first_round_costs_no_restart(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script(ROUNDS)
    job.start(0, *RESTARTS, script)
    wait_until(lambda: job.events("listening"), TEST_TIMEOUT)
    os.kill(job.agent_of(0), signal.SIGKILL)
    job.path("go0").touch()
    job.start(1, *RESTARTS, script)
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    assert job.result["restarts"] == 0


# -- the parent of the agent -----------------------------------------------------------------------


def test_job_without_restarts_has_no_parent_process(make_job: MakeJob) -> None:
    job = make_job()
    job.start(0, job.script(ROUNDS), until=("up0.0",))
    forkserver = job.forkserver_of(job.agents[0])
    assert [len(children(pid)) for pid in children(forkserver)] == [0, 0]
    job.path("go0").touch()
    assert job.wait() == [0]
    assert not (job.dir / "coordinator.json").exists()


@pytest.mark.parametrize("nodes", [1, 2])
def test_killed_parent_ends_its_node(make_job: MakeJob, nodes: int) -> None:
    job = make_job(nodes)
    job.start_all(*QUICK_LEASE, *RESTARTS, job.script(ROUNDS), until=up(0, nodes))
    job.agents[-1].kill()
    assert job.wait() == [*[1] * (nodes - 1), -signal.SIGKILL]
    wait_for_no_processes(10)
    assert job.node_end(nodes - 1)["state"] == "LOST"
    if nodes == 2:
        assert (job.result["state"], job.result["restarts"]) == ("FAILED", 0)
        assert job.result["failure"]["node_rank"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_to_parent_and_agent_cancels_job_once(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job = make_job()
    script = job.script("""
        import os, pathlib, signal, time
        def note(number, _frame):
            with open("signals", "a") as file:
                file.write(f"{number}\\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        pathlib.Path("up").touch()
        while True:
            time.sleep(0.05)
    """)
    job.start(0, *RESTARTS, "--grace", "3", script, until=("up",))
    agent = job.agent_of(0)
    for pid in (job.agents[0].pid, agent):  # as Ctrl-C, or a scheduler
        os.kill(pid, number)
    assert job.wait() == [143]
    assert job.result["state"] == "CANCELLED"
    expected = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert job.path("signals").read_text() == f"{int(expected)}\n"


def test_agent_killed_after_cancel_is_not_started_again(make_job: MakeJob) -> None:
    job = make_job()
    script = job.script("""
        import pathlib, signal, time
        signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told").touch())
        pathlib.Path("up").touch()
        while True:
            time.sleep(0.05)
    """)
    job.start(0, *RESTARTS, "--grace", "1000", script, until=("up",))
    job.agents[0].terminate()
    job.wait_for("told")
    os.kill(job.agent_of(0), signal.SIGKILL)
    assert job.wait() == [128 + signal.SIGKILL]
    assert job.node_end(0)["state"] == "LOST"
    assert not own_processes()


# -- what is kept ----------------------------------------------------------------------------------


def test_numbered_lines_go_on_after_agent_was_killed(make_job: MakeJob) -> None:
    job = make_job()
    job.start(0, *RESTARTS, job.script(ROUNDS), env={"CLUSTERJOB_STREAM": "1"}, until=("up0.0",))
    wait_until(lambda: "round 0" in job.stdout(job.agents[0]), TEST_TIMEOUT)
    time.sleep(0.3)  # the console has noted the line
    os.kill(job.agent_of(0), signal.SIGKILL)
    job.wait_for("up0.1")
    job.path("go1").touch()
    assert job.wait() == [0]
    lines = job.stdout(job.agents[0]).splitlines()
    numbers = [int(line.partition(" ")[0].partition("@")[0]) for line in lines]
    assert numbers == list(range(1, len(lines) + 1))
    for text in ("rank 0 in round 0", "rank 0 in round 1", "rank 0 ends", "restart 1 of 3"):
        assert sum(text in line for line in lines) == 1, lines


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_node_whose_agent_was_frozen_comes_back(make_job: MakeJob, node: int) -> None:
    job = make_job(2)
    job.start_all(*QUICK_LEASE, *RESTARTS, job.script(ROUNDS), until=up(0))
    agent = job.agent_of(node)
    os.kill(agent, signal.SIGSTOP)
    time.sleep(4.0)
    os.kill(agent, signal.SIGCONT)
    job.wait_for(*up(1))
    assert job.agent_of(node) == agent
    job.path("go1").touch()
    assert job.wait() == [0, 0], [job.stderr(agent) for agent in job.agents]
    assert job.result["restarts"] == 1
