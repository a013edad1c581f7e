"""Ports of the coordinator when the platform names none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.errors import RendezvousError
from clusterjob.node.contract import World
from clusterjob.node.coordinator import store_address, with_store
from clusterjob.node.environments.topology import PORTS as COUNT
from clusterjob.node.environments.topology import Topology, candidate_ports
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Peer, listen
from clusterjob.node.rendezvous.messages import Hello

LOOPBACK = ("127.0.0.1", 0)


@pytest.fixture
def used() -> Iterator[list[int]]:
    """Return two ports that are in use."""
    with socket.create_server(LOOPBACK) as first, socket.create_server(LOOPBACK) as second:
        yield [holder.getsockname()[1] for holder in (first, second)]


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 1000))
def test_candidate_ports_are_same_in_all_agents_and_not_ephemeral(
    job_id: str, attempt: int
) -> None:
    found = candidate_ports(job_id, attempt)
    assert found == candidate_ports(job_id, attempt)
    assert found != candidate_ports(job_id, attempt + 1) != candidate_ports(f"{job_id}1", attempt)
    assert len(found) == COUNT
    assert all(1024 < port < 32768 for port in found)
    assert len(set(found)) > COUNT // 2


def test_coordinator_listens_at_first_free_port(used: list[int]) -> None:
    with socket.create_server(LOOPBACK) as holder:
        free = holder.getsockname()[1]
    with (
        listen("127.0.0.1", [*used, free]) as listener,
        socket.create_connection(("127.0.0.1", free), 5) as connection,
    ):
        assert connection.getpeername() == listener.getsockname() == ("127.0.0.1", free)


def test_port_is_free_as_soon_as_coordinator_ends() -> None:
    number = 0
    for _ in range(3):  # `listen` raises an error if the port is taken
        with listen("127.0.0.1", [number]) as listener:
            number = listener.getsockname()[1]
            with socket.create_connection(listener.getsockname(), 5):
                listener.accept()[0].close()  # this side closes first: the port is in TIME_WAIT


def test_error_without_free_port_names_used_ports(used: list[int]) -> None:
    message = f"no free port at 127.0.0.1: {used[0]}, {used[1]} are in use"
    with pytest.raises(RendezvousError, match=message):
        listen("127.0.0.1", used)


@pytest.mark.parametrize("host", ["999.1.1.1", "node0..cluster"])
def test_unresolvable_address_is_error(host: str) -> None:
    with pytest.raises(RendezvousError, match=f"node 0 cannot listen at {host}"):
        listen(host, [0])


@pytest.mark.parametrize(
    ("reached", "address"),
    [
        ((), "10.0.0.1"),
        (("10.0.0.1",), "10.0.0.1"),
        (("10.0.0.1", "192.0.2.1"), "192.0.2.1"),
        (("172.31.0.9",), "10.0.0.1"),  # behind NAT
    ],
)
def test_store_is_at_address_that_all_agents_may_reach(
    reached: tuple[str, ...], address: str
) -> None:
    master = "10.0.0.1,192.0.2.1,198.51.100.1"
    topology = Topology(3, 0, None, master_addr=master, master_port=None, source="clusterjob")
    peers = [
        Peer(Hello(node, "", 1, 0, 4, 1), print, heard_at=0.0, reached_at=each)
        for node, each in enumerate(("", *reached))
    ]
    assert store_address(topology, peers) == address


NODE_1 = Topology(3, 1, None, master_addr="127.0.0.1", master_port=None, source="clusterjob")
HELLOS = {
    node: Hello(node, f"gpu{node}", 1, 0, 3, nproc, address=f"10.0.0.{node}")
    for node, nproc in enumerate((1, 3, 2))
}
JOB = JobIdentity("job", 0, b"token", [1], has_torch=True)


def round_of(*nodes: int, agent_store: bool) -> dict[int, World]:
    return {
        node: World(
            4, "", 0, agent_store, node_rank=index, nnodes=len(nodes), nproc=HELLOS[node].nproc,
            first_rank=0, world_size=6,
        )
        for index, node in enumerate(nodes)
    }  # fmt: skip


def test_all_nodes_get_the_port_of_the_store() -> None:
    worlds = round_of(2, 0, 1, agent_store=True)
    found, store = with_store(worlds, HELLOS, NODE_1, "127.0.0.1", job=JOB)
    with store:
        port = store.getsockname()[1]
    assert list(found) == [2, 0, 1]
    for node, world in found.items():
        assert (world.master_addr, world.master_port) == ("127.0.0.1", port)
        assert replace(world, master_addr="", master_port=0) == worlds[node]


@pytest.mark.parametrize(
    ("nodes", "address"), [([0, 1], "10.0.0.0"), ([2, 1], "10.0.0.2"), ([1, 2], "127.0.0.1")]
)
def test_store_that_rank_0_serves_is_on_its_node_at_a_port_that_is_not_ephemeral(
    nodes: list[int], address: str
) -> None:
    given_ = round_of(*nodes, agent_store=False)
    worlds, store = with_store(given_, HELLOS, NODE_1, "127.0.0.1", job=JOB)
    assert store is None
    assert sorted(worlds) == sorted(nodes)
    assert {world.master_addr for world in worlds.values()} == {address}
    assert all(world.master_port < 32768 for world in worlds.values())
