"""Detection of the rank assignment from environment variables, and its conflicts."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import this_node
from clusterjob.node.environments.this_node import detect
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.worker import group

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}  # fmt: skip
OURS = {
    "CLUSTERJOB_NNODES": "3", "CLUSTERJOB_NODE_RANK": "2", "CLUSTERJOB_NPROC_PER_NODE": "8",
    "CLUSTERJOB_MASTER_ADDR": "n0", "CLUSTERJOB_MASTER_PORT": "2222",
}  # fmt: skip


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# -- no job ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "", "LOCAL_RANK": "", "CLUSTERJOB_NNODES": ""},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "h"},
        {"WORLD_SIZE": "many"},
        {"VC_WORKER_HOSTS": "a.job"},
    ],
)
def test_environment_without_job_gives_no_placement_and_no_conflict(
    environ: dict[str, str],
) -> None:
    finding = detect(environ)
    assert (finding.source, finding.placement, finding.level, not finding.conflicts) == (
        "none",
        None,
        "none",
        True,
    )
    assert finding.check() is finding


# -- torch variables -------------------------------------------------------------------------------


def test_worker_of_unknown_launcher_has_source_env() -> None:
    assert detect(without(TORCHRUN, "TORCHELASTIC_RUN_ID")).source == "env"


ALONE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
TENTH = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


def worker(
    nnodes: int, node_rank: int, nproc: int, rank: int, local_rank: int, *rest: Any
) -> Worker:
    """Return a worker; `rest` is address, port and source."""
    topology = Topology(nnodes, node_rank, nproc, *rest)
    return Worker(topology, rank, local_rank, nnodes * nproc, nproc)


@pytest.mark.parametrize(
    ("environ", "placement"),
    [
        (ALONE, Topology(2, 0, None, "h", 1, "nodes")),
        (
            without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"),
            worker(2, 1, 4, 5, 1, "10.0.0.1", 29500, "torchrun"),
        ),
        (
            without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
            | {"LOCAL_RANK": "5"},
            worker(1, 0, 8, 5, 5, "10.0.0.1", 29500, "torchrun"),
        ),
        (
            TORCHRUN | {"MASTER_ADDR": "[fd00::1]"},
            worker(2, 1, 4, 5, 1, "fd00::1", 29500, "torchrun"),
        ),
        (TENTH | {"LOCAL_WORLD_SIZE": "8"}, worker(2, 1, 8, 9, 1, "a", 1, "env")),
        (TENTH | {"RANK": "1"}, worker(1, 0, 16, 1, 1, "a", 1, "env")),
        (
            without(OURS, "CLUSTERJOB_NPROC_PER_NODE", "CLUSTERJOB_MASTER_PORT"),
            Topology(3, 2, None, "n0", None, "clusterjob"),
        ),
        (
            {"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"},
            Topology(1, 0, None, "127.0.0.1", None, "clusterjob"),
        ),
    ],
)
def test_variables_that_need_not_be_set_give_placement(
    environ: dict[str, str], placement: Topology | Worker
) -> None:
    assert detect(environ).placement == placement


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, "rank is 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local_rank is 4"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "local_world_size is 9"),
        (TORCHRUN | {"GROUP_RANK": "2"}, "node_rank is 2"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "master_port is 0"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "0"),
        *((TORCHRUN | {name: "1" * 5000}, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
        *(
            (ALONE | {name: "1"}, "LOCAL_RANK is not set")
            for name in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
        ),
        (OURS | without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE is not set"),
        # RANK=9 with LOCAL_RANK=1 cannot be a job of one node.
        (TENTH, "LOCAL_WORLD_SIZE"),
        *(
            (environ | {name: address}, f"{name}={address!r} is not a host")
            for environ, name in ((TORCHRUN, "MASTER_ADDR"), (OURS, "CLUSTERJOB_MASTER_ADDR"))
            for address in ("tcp://10.0.0.1:29500", "h\x1b[31m", "\udcff", "a b", "[]")
        ),
    ],
)
def test_unusable_or_missing_variable_is_named(environ: dict[str, str], message: str) -> None:
    finding = detect(environ)
    assert finding.placement is None
    assert message in "; ".join(finding.conflicts)


# -- torch and clusterjob variables together -------------------------------------------------------


def test_worker_variables_take_precedence_over_node_variables() -> None:
    finding = detect(OURS | TORCHRUN)
    assert finding.level == "worker"
    assert finding.ignored.keys() == {
        "CLUSTERJOB_NNODES",
        "CLUSTERJOB_NODE_RANK",
        "CLUSTERJOB_MASTER_ADDR",
        "CLUSTERJOB_MASTER_PORT",
        "CLUSTERJOB_NPROC_PER_NODE",
    }
    assert all(finding.ignored.values())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 9))
def test_every_rank_is_detected_from_variables_of_its_agent(sizes: list[int], restart: int) -> None:
    for node_rank, nproc in enumerate(sizes):
        first, total = sum(sizes[:node_rank]), sum(sizes)
        world = World(
            restart, "h", master_port=1234, agent_store=False, node_rank=node_rank,
            nnodes=len(sizes), nproc=nproc, first_rank=first, world_size=total,
        )  # fmt: skip
        topology = Topology(len(sizes), node_rank, nproc, "h", 1234, "clusterjob")
        for local_rank in range(nproc):
            environ = contract.worker_variables(world, local_rank, job_id="job", max_restarts=9)
            environ |= {contract.JOB_ID: "job", contract.REPORT_FD: "5:77"}
            expected = Worker(topology, first + local_rank, local_rank, total, nproc)
            assert detect(environ).placement == expected


def test_init_under_another_launcher_leaves_the_output_of_child_processes_buffered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "2345",
    }  # fmt: skip
    monkeypatch.setattr(os, "environ", environ)
    group.prepare(group.find_rank({}))
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in environ
    assert "PYTHONUNBUFFERED" not in environ


def test_node_started_by_a_worker_of_torchrun_has_not_the_id_of_that_torchrun() -> None:
    assert this_node.job_id("torchrun", TORCHRUN) == "none"
    assert this_node.job_id("none", {"TORCHELASTIC_RUN_ID": "none"}) == ""
    assert this_node.job_id("slurm", {"SLURM_JOB_ID": "4", "SLURM_STEP_ID": "2"}) == "slurm-4.2"
