"""Placement of a task from srun's variables, as Slurm 22.05 sets them.

The tests also cover incomplete and contradictory sets of variables.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import PlacementError
from clusterjob.node.contract import World
from clusterjob.node.environments import slurm_env, this_node
from clusterjob.node.environments.this_node import detect
from clusterjob.node.environments.topology import Topology, Worker

# The job has four nodes and the step uses two of them, so the job's lists are wrong for the step.
# SLURM_NTASKS_PER_NODE is stale.
JOB = {
    "SLURM_JOB_ID": "71", "SLURM_JOBID": "71", "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NODELIST": "n[1-4]", "SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "16", "SLURM_NPROCS": "16", "SLURM_TASKS_PER_NODE": "4(x4)",
    "SLURM_NTASKS_PER_NODE": "4", "SLURM_GPUS_PER_NODE": "a100:4", "SLURM_JOB_NAME": "bash",
    "SLURM_SUBMIT_HOST": "login1",
}  # fmt: skip
BATCH = JOB | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "ENVIRONMENT": "BATCH",
}
STEP = JOB | {
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[3,2]",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
}  # fmt: skip


def one_per_node(node: int) -> dict[str, str]:
    return STEP | {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_NODEID": str(node), "SLURM_PROCID": str(node), "SLURM_LOCALID": "0",
        "SLURM_GTIDS": str(node),
    }  # fmt: skip


def task(
    rank: int, local_rank: int, node: int, tasks: str = "3,2", total: int = 5
) -> dict[str, str]:
    return STEP | {
        "SLURM_STEP_NUM_TASKS": str(total), "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": str(node), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank),
    }  # fmt: skip


def topology_of(environ: dict[str, str]) -> Topology:
    return this_node.node_of(this_node.find_node(environ))


def worker_of(environ: dict[str, str]) -> Worker:
    placement = detect(environ).placement
    assert isinstance(placement, Worker)
    return placement


def conflicts(environ: dict[str, str]) -> str:
    finding = detect(environ)
    assert (finding.source, finding.placement) == ("slurm", None)
    with pytest.raises(PlacementError):
        finding.check()
    return "; ".join(finding.conflicts)


# -- one task per node -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "nproc", "address", "port", "variable"),
    [
        ({}, None, "n3", None, "SLURM_STEP_NODELIST"),
        ({"CLUSTERJOB_NPROC_PER_NODE": "4"}, 4, "n3", None, "SLURM_STEP_NODELIST"),
        ({"MASTER_PORT": "29500"}, None, "n3", 29500, "SLURM_STEP_NODELIST"),
        (
            {
                "CLUSTERJOB_JOB_ID": "j",
                "CLUSTERJOB_JOB_DIR": "/j",
                "CLUSTERJOB_TOKEN_FILE": "/j/token",
                "CLUSTERJOB_MASTER_ADDR": "n3-ib",
            },
            None,
            "n3-ib",
            None,
            "CLUSTERJOB_MASTER_ADDR",
        ),
        *(
            ({"MASTER_ADDR": address}, None, address, None, "MASTER_ADDR")
            for address in ("n3", "n3.cluster.example", "10.0.0.3", "n3-ib", "gateway")
        ),
    ],
)
def test_one_task_per_node_gives_placement_of_node(
    own: dict[str, str], nproc: int | None, address: str, port: int | None, variable: str
) -> None:
    finding = detect(one_per_node(1) | own)
    assert finding.placement == Topology(2, 1, nproc, address, port, "slurm")
    assert finding.evidence["node_rank"] == "SLURM_NODEID"
    assert finding.evidence["master_addr"] == variable


def test_single_process_of_node_has_rank_of_node() -> None:
    known = {"CLUSTERJOB_MASTER_ADDR": "192.0.2.1"}
    environ = one_per_node(1) | known
    node: Any = detect(environ).placement
    worker = slurm_env.as_worker(node, environ)
    assert (worker.rank, worker.local_rank, worker.world_size, worker.local_world_size) == (
        1,
        0,
        2,
        1,
    )
    assert worker.topology.nproc_per_node is None
    assert (
        worker.topology.master_port
        == slurm_env.as_worker(node, one_per_node(0)).topology.master_port
    )


# -- several tasks per node ------------------------------------------------------------------------


def test_master_port_differs_per_step_and_restart_unless_set() -> None:
    def port(**more: str) -> int | None:
        return worker_of(task(0, 0, 0) | more).topology.master_port

    found = [
        port(),
        port(SLURM_STEP_ID="1"),
        port(SLURM_RESTART_COUNT="1"),
        port(SLURM_JOB_ID="72"),
    ]
    assert len(set(found)) == 4
    assert all(number is not None and 1024 < number < 32768 for number in found)
    assert port(MASTER_PORT="29500") == 29500
    assert port(MASTER_PORT="29500", CLUSTERJOB_MASTER_PORT="29501") == 29501


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda sizes: max(sizes) > 1),
    st.randoms(),
)
def test_each_task_of_step_has_its_rank_in_any_distribution(sizes: list[int], random: Any) -> None:
    ranks = list(range(sum(sizes)))
    random.shuffle(ranks)
    nodes = {
        "SLURM_STEP_NUM_NODES": str(len(sizes)),
        "SLURM_STEP_NODELIST": f"m[1-{len(sizes)}]",
    }
    port = worker_of(task(0, 0, 0)).topology.master_port
    for node, size in enumerate(sizes):
        topology = Topology(len(sizes), node, size, "m1", port, "slurm")
        for local_rank in range(size):
            rank = ranks.pop()
            environ = task(rank, local_rank, node, ",".join(map(str, sizes)), sum(sizes)) | nodes
            expected = Worker(topology, rank, local_rank, sum(sizes), size)
            assert detect(environ).placement == expected


# -- outside a step --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step", ["", "batch", "4294967291", "interactive", "4294967290", "extern", "4294967292"]
)
def test_batch_script_and_salloc_shell_are_not_detected_as_step(step: str) -> None:
    finding = detect(BATCH | ({"SLURM_STEP_ID": step, "SLURM_STEP_NUM_TASKS": "1"} if step else {}))
    assert (finding.source, finding.placement, finding.conflicts) == ("none", None, [])
    assert "SLURM_PROCID" in finding.ignored
    assert all("step" in why for why in finding.ignored.values())


def test_launch_outside_step_on_several_nodes_is_refused() -> None:
    with pytest.raises(PlacementError, match="outside srun, in an allocation of 4 nodes"):
        topology_of(BATCH)
    assert topology_of(BATCH | {"SLURM_JOB_NUM_NODES": "1"}).nnodes == 1
    assert (
        topology_of(BATCH | {"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"}).source
        == "clusterjob"
    )
    assert topology_of(one_per_node(1)).node_rank == 1


# -- master address --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "LOCALHOST", "0.0.0.0"]
)
def test_loopback_master_address_of_several_nodes_is_refused(address: str) -> None:
    found = conflicts(one_per_node(1) | {"MASTER_ADDR": address})
    assert f"MASTER_ADDR is {address!r}, a loopback address, but there are 2 nodes" in found


@pytest.mark.parametrize("address", ["n2", "n1", "n4.cluster.example"])
def test_master_address_of_other_node_than_first_is_refused(address: str) -> None:
    """`export MASTER_ADDR=$(hostname)` in a batch script may name a node outside the step."""
    assert "not the first of SLURM_STEP_NODELIST, 'n3'" in conflicts(
        one_per_node(1) | {"MASTER_ADDR": address}
    )


def test_single_node_named_localhost_is_accepted() -> None:
    alone = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "localhost"}
    assert worker_of(task(1, 1, 0, "2", 2) | alone).topology.master_addr == "localhost"
    assert not detect(task(1, 1, 0, "2", 2) | alone | {"MASTER_ADDR": "127.0.0.1"}).conflicts


def test_node_list_of_two_nodes_with_localhost_is_refused() -> None:
    assert "SLURM_STEP_NODELIST is 'localhost', a loopback address" in conflicts(
        one_per_node(1) | {"SLURM_STEP_NODELIST": "localhost,n2"}
    )


# -- conflicts -------------------------------------------------------------------------------------


def test_missing_task_count_of_step_is_taken_from_job() -> None:
    environ = task(3, 0, 1) | {"SLURM_STEP_NUM_TASKS": ""}
    assert worker_of(environ | {"SLURM_NTASKS": "5"}).world_size == 5
    assert "SLURM_STEP_NUM_TASKS is not set" in conflicts(environ | {"SLURM_NTASKS": ""})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: ""}, f"{name} is not set")
            for name in (
                "SLURM_PROCID",
                "SLURM_LOCALID",
                "SLURM_NODEID",
                "SLURM_STEP_NUM_NODES",
                "SLURM_STEP_NODELIST",
                "SLURM_STEP_TASKS_PER_NODE",
                "SLURM_JOB_ID",
            )
        ),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' is not a whole number"),
        ({"SLURM_PROCID": "5"}, "rank is 5"),
        ({"SLURM_LOCALID": "2"}, "local_rank is 2"),
        ({"SLURM_NODEID": "2"}, "node_rank is 2"),
        ({"SLURM_STEP_NUM_TASKS": "6"}, "and SLURM_STEP_NUM_TASKS=6"),
        ({"SLURM_STEP_NUM_NODES": "3"}, "lists 2 nodes, SLURM_STEP_NUM_NODES is 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,"}, "is not a list of numbers of tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "is not a list of numbers of tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2"}, "is not a list of numbers of tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x)"}, "is not a list of numbers of tasks"),
        ({"SLURM_STEP_NODELIST": "n[3"}, "SLURM_STEP_NODELIST: 'n[3' is not a list of hosts"),
        ({"SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE"),
        ({"MASTER_PORT": "70000"}, "master_port is 70000"),
    ],
)
def test_missing_or_contradictory_variables_are_named(change: dict[str, str], message: str) -> None:
    assert message in conflicts(task(3, 0, 1) | change)


@given(st.text("0123456789(x),", max_size=20))
def test_any_list_of_tasks_is_read_or_refused(text: str) -> None:
    finding = detect(task(3, 0, 1) | {"SLURM_STEP_TASKS_PER_NODE": text})
    assert (finding.placement is None) == bool(finding.conflicts)


# -- restarts --------------------------------------------------------------------------------------


def test_attempt_of_requeued_job_is_restart_count() -> None:
    assert this_node.read_attempt({"SLURM_RESTART_COUNT": "2"}) == 2
    assert this_node.read_attempt({"SLURM_RESTART_COUNT": "2", "CLUSTERJOB_ATTEMPT": "0"}) == 0
    with pytest.raises(PlacementError, match="SLURM_RESTART_COUNT='x'"):
        this_node.read_attempt({"SLURM_RESTART_COUNT": "x"})


def test_worker_after_a_lost_node_has_slurm_variables_of_its_round() -> None:
    world = World(
        1, "n3", master_port=1, agent_store=True, node_rank=2, nnodes=4, nproc=2, first_rank=4,
        world_size=8,
    )  # fmt: skip
    found = slurm_env.worker_variables(world, 1, {"SLURM_STEP_ID": "0"})
    assert found.pop("SLURM_STEP_TASKS_PER_NODE") == "2(x4)"
    assert found.pop("SLURM_GTIDS") == "4,5"
    assert (found["SLURM_PROCID"], found["SLURM_LOCALID"], found["SLURM_NODEID"]) == ("5", "1", "2")
    assert {found[f"SLURM_{name}"] for name in ("NTASKS", "NPROCS", "STEP_NUM_TASKS")} == {"8"}
    assert slurm_env.worker_variables(world, 1, {}) == {}
