"""Detection of the rank assignment from environment variables, and its conflicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments.this_node import detect
from clusterjob.node.environments.topology import Topology, Worker

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


@pytest.mark.parametrize(("local_rank", "nproc", "first"), [(0, 4, 0), (3, 4, 4), (0, 1, 4)])
def test_variables_set_by_agent_give_the_same_worker(
    local_rank: int, nproc: int, first: int
) -> None:
    world = World(
        0,
        "10.0.0.1",
        master_port=4321,
        agent_store=True,
        node_rank=1,
        nnodes=2,
        nproc=nproc,
        first_rank=first,
        world_size=8,
    )
    environ = contract.worker_variables(world, local_rank, job_id="job", max_restarts=3)
    environ |= {contract.JOB_ID: "job", contract.REPORT_FD: "5:77"}
    finding = detect(environ)
    assert finding.source == "clusterjob"
    assert finding.placement == Worker(
        Topology(
            2,
            1,
            nproc_per_node=nproc,
            master_addr="10.0.0.1",
            master_port=4321,
            source="clusterjob",
        ),
        first + local_rank,
        local_rank=local_rank,
        world_size=8,
        local_world_size=nproc,
    )


def test_rank_without_local_rank_is_node_rank_unless_worker_variables_exist() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert detect(alone).level == "node"
    for variable in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
        assert "LOCAL_RANK is not set" in "; ".join(detect(alone | {variable: "1"}).conflicts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank is 8"),
        ({"LOCAL_RANK": "4"}, "local_rank is 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "local_world_size is 9"),
        ({"GROUP_RANK": "2"}, "node_rank is 2"),
        ({"MASTER_PORT": "0"}, "master_port is 0"),
        ({"WORLD_SIZE": "0"}, "0"),
    ],
)
def test_value_out_of_range_is_refused_with_field_name(
    change: dict[str, str], message: str
) -> None:
    finding = detect(TORCHRUN | change)
    assert finding.placement is None
    assert message in "; ".join(finding.conflicts)


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:29500", "h\x1b[31m", "\udcff", "a b", "[]"])
@pytest.mark.parametrize(
    ("environ", "name"), [(TORCHRUN, "MASTER_ADDR"), (OURS, "CLUSTERJOB_MASTER_ADDR")]
)
def test_master_address_that_is_not_a_host_is_refused(
    environ: dict[str, str], name: str, address: str
) -> None:
    assert f"{name}={address!r} is not a host" in "; ".join(
        detect(environ | {name: address}).conflicts
    )


def test_ipv6_master_address_in_brackets_is_accepted() -> None:
    place = detect(TORCHRUN | {"MASTER_ADDR": "[fd00::1]"}).placement
    assert isinstance(place, Worker)
    assert place.topology.master_addr == "fd00::1"


def test_node_rank_without_group_variables_is_computed_from_rank() -> None:
    finding = detect(without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE"))
    assert finding.placement == Worker(
        Topology(
            2, 1, nproc_per_node=4, master_addr="10.0.0.1", master_port=29500, source="torchrun"
        ),
        5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
    )
    assert "node_rank" not in finding.evidence


def test_worker_without_node_variables_is_on_single_node() -> None:
    finding = detect(
        without(TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
        | {"LOCAL_RANK": "5"}
    )
    assert finding.placement == Worker(
        Topology(
            1, 0, nproc_per_node=8, master_addr="10.0.0.1", master_port=29500, source="torchrun"
        ),
        5,
        local_rank=5,
        world_size=8,
        local_world_size=8,
    )


# -- clusterjob variables --------------------------------------------------------------------------


def test_clusterjob_node_without_nproc_and_port_is_accepted() -> None:
    assert detect(
        without(OURS, "CLUSTERJOB_NPROC_PER_NODE", "CLUSTERJOB_MASTER_PORT")
    ).placement == Topology(
        3, 2, nproc_per_node=None, master_addr="n0", master_port=None, source="clusterjob"
    )


def test_single_node_needs_no_address() -> None:
    assert detect({"CLUSTERJOB_NNODES": "1", "CLUSTERJOB_NODE_RANK": "0"}).placement == Topology(
        1, 0, nproc_per_node=None, master_addr="127.0.0.1", master_port=None, source="clusterjob"
    )


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


def test_incomplete_worker_variables_do_not_fall_back_to_node_variables() -> None:
    assert detect(OURS | without(TORCHRUN, "WORLD_SIZE")).conflicts


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_number_with_too_many_digits_is_a_conflict(name: str) -> None:
    assert detect(TORCHRUN | {name: "1" * 5000}).conflicts


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 9))
def test_every_rank_is_detected_from_its_worker_variables(sizes: list[int], restart: int) -> None:
    seen = []
    first = 0
    for node_rank, nproc in enumerate(sizes):
        world = World(
            restart,
            "h",
            master_port=1234,
            agent_store=False,
            node_rank=node_rank,
            nnodes=len(sizes),
            nproc=nproc,
            first_rank=first,
            world_size=sum(sizes),
        )
        for local_rank in range(nproc):
            place = detect(
                contract.worker_variables(world, local_rank, job_id="job", max_restarts=9)
            ).placement
            assert isinstance(place, Worker)
            assert (
                place.topology.node_rank,
                place.topology.nnodes,
                place.local_rank,
                place.local_world_size,
            ) == (
                node_rank,
                len(sizes),
                local_rank,
                nproc,
            )
            seen.append(place.rank)
        first += nproc
    assert seen == list(range(sum(sizes)))


def test_several_nodes_without_local_world_size_are_refused() -> None:
    """RANK=9 with LOCAL_RANK=1 cannot be a job of one node."""
    environ = {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    found = detect(environ)
    assert found.placement is None
    assert any("LOCAL_WORLD_SIZE" in conflict for conflict in found.conflicts)
    assert detect(environ | {"LOCAL_WORLD_SIZE": "8"}).placement is not None
    assert detect(environ | {"RANK": "1"}).placement is not None
