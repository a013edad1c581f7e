"""Placement of a node and of a process: impossible values are refused with a message."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import PlacementError
from clusterjob.node.environments.topology import Topology, Worker

NODE = Topology(
    nnodes=2,
    node_rank=1,
    nproc_per_node=4,
    master_addr="10.0.0.1",
    master_port=29500,
    source="test",
)
WORKER = Worker(NODE, rank=5, local_rank=1, world_size=8, local_world_size=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nnodes": 0}, "nnodes is 0"),
        ({"nnodes": -1}, "nnodes is -1"),
        ({"node_rank": 2}, "node_rank is 2, outside 0..1"),
        ({"node_rank": -1}, "node_rank is -1"),
        ({"nproc_per_node": 0}, "nproc_per_node is 0"),
        ({"master_port": 0}, "master_port is 0"),
        ({"master_port": 65536}, "master_port is 65536"),
        ({"master_addr": ""}, "master_addr is empty"),
    ],
)
def test_impossible_node_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=f"^{message}"):
        dataclasses.replace(NODE, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 8}, "rank is 8, outside 0..7"),
        ({"rank": -1}, "rank is -1"),
        ({"local_rank": 4}, "local_rank is 4, outside 0..3"),
        ({"local_rank": -1}, "local_rank is -1"),
        ({"local_world_size": 0}, "local_world_size is 0"),
        ({"local_world_size": 9}, "local_world_size is 9"),
    ],
)
def test_impossible_process_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=f"^{message}"):
        dataclasses.replace(WORKER, **change)


small = st.integers(-2, 5)


@given(small, small, st.none() | small, st.none() | st.integers(-1, 70000))
def test_node_is_accepted_exactly_when_possible(
    nnodes: int, node_rank: int, nproc: int | None, port: int | None
) -> None:
    possible = (
        nnodes >= 1
        and 0 <= node_rank < nnodes
        and (nproc is None or nproc >= 1)
        and (port is None or 1 <= port <= 65535)
    )
    try:
        Topology(
            nnodes,
            node_rank,
            nproc_per_node=nproc,
            master_addr="h",
            master_port=port,
            source="test",
        )
    except PlacementError:
        assert not possible
    else:
        assert possible


@given(small, small, small, small)
def test_process_is_accepted_exactly_when_possible(
    rank: int, local_rank: int, world_size: int, local_world_size: int
) -> None:
    possible = 0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size
    try:
        Worker(
            NODE,
            rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
        )
    except PlacementError:
        assert not possible
    else:
        assert possible
