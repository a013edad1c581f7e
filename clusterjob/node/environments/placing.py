"""Turn the numbers that a family has read into a `Topology`, a `Worker` or a conflict."""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.errors import PlacementError
from clusterjob.node.environments.candidate_ports import candidates
from clusterjob.node.environments.reading import Finding, Ignored, Reading, whole_number
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system.network import is_loopback

OWN_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Master:
    """Address of rank 0 for the rendezvous.

    Attributes:
        addr: the host of rank 0; None with a conflict.
        port: the TCP port; None if no variable gives one.
    """

    addr: str | None
    port: int | None


def node(
    reading: Reading,
    *,
    nnodes: int | None,
    node_rank: int | None,
    nproc_per_node: int | None,
    master: Master,
    one_means_here: bool = True,
) -> Finding:
    """Return the finding of a reading for a node.

    Args:
        reading: the variables that were read.
        nnodes: number of nodes; None with a conflict.
        node_rank: this node's index; None with a conflict.
        nproc_per_node: number of workers on this node; None if no variable gives it, or 0 on a
            machine without GPUs.
        master: address of node 0; a single node needs none.
        one_means_here: whether a single node without an address uses `OWN_ADDRESS`.
    """
    if nproc_per_node == 0:
        reading.evidence.pop("nproc_per_node", None)
    addr = master.addr
    if addr is None and nnodes == 1 and one_means_here:
        addr = OWN_ADDRESS
    if nnodes is None or node_rank is None or addr is None or reading.conflicts:
        return reading.finding(None)
    refuse_own_address(reading, addr, nnodes=nnodes)
    try:
        return reading.finding(
            Topology(
                nnodes,
                node_rank,
                nproc_per_node=nproc_per_node or None,
                master_addr=addr,
                master_port=master.port,
                source=reading.source,
            )
        )
    except PlacementError as error:
        return reading.refuse(error)


def worker(
    reading: Reading,
    *,
    rank: int | None,
    world_size: int | None,
    local_rank: int | None,
    local_world_size: int | None,
    master: Master,
    node_rank: int | None = None,
    nnodes: int | None = None,
) -> Finding:
    """Return the finding of a reading for a process.

    Args:
        reading: the variables that were read.
        rank: index of the process; None with a conflict.
        world_size: number of processes; None with a conflict.
        local_rank: index of the process on its node; None with a conflict.
        local_world_size: number of processes on its node; None with a conflict.
        master: address of rank 0.
        node_rank: index of the node; None if no variable gives it. It is then computed as if
            every node had `local_world_size` processes, in the order of ranks.
        nnodes: number of nodes; None if no variable gives it. It is then computed in the same way
            as the node rank.
    """
    if (
        rank is None
        or world_size is None
        or local_rank is None
        or local_world_size is None
        or master.addr is None
        or reading.conflicts
    ):
        return reading.finding(None)
    size = max(1, local_world_size)
    nnodes = max(1, -(-world_size // size)) if nnodes is None else nnodes
    node_rank = min(rank // size, nnodes - 1) if node_rank is None else node_rank
    refuse_own_address(reading, master.addr, nnodes=nnodes)
    try:
        topology = Topology(
            nnodes,
            node_rank,
            nproc_per_node=local_world_size,
            master_addr=master.addr,
            master_port=master.port,
            source=reading.source,
        )
        return reading.finding(
            Worker(
                topology,
                rank,
                local_rank=local_rank,
                world_size=world_size,
                local_world_size=local_world_size,
            )
        )
    except PlacementError as error:
        return reading.refuse(error)


def refuse_own_address(reading: Reading, addr: str, nnodes: int) -> None:
    """Add a conflict if several nodes have a loopback address as the address of node 0."""
    if nnodes > 1 and is_loopback(addr):
        name = reading.evidence.get("master_addr", "the master's address")
        reading.conflicts.append(
            f"{name} is {addr!r}, a loopback address, but there are {nnodes} nodes (master_addr): "
            "set node 0's address in the network"
        )


def given_master(reading: Reading) -> Master:
    """Return MASTER_ADDR and MASTER_PORT, which users may export; None for each unset variable."""
    return Master(
        reading.host("master_addr", "MASTER_ADDR", required=False),
        reading.number("master_port", "MASTER_PORT", required=False),
    )


def process_master(
    reading: Reading,
    *,
    alone: bool,
    fallback: str | None = None,
    fallback_port: int | None = None,
    key: str = "",
    key_variable: str = "",
) -> Master:
    """Return the address of rank 0 for a launcher that sets no variable for it.

    Args:
        reading: the variables that were read.
        alone: whether all processes run on one node.
        fallback: the host to use if MASTER_ADDR is not set; None if there is no such host.
        fallback_port: the port to use if MASTER_PORT is not set.
        key: text shared by all processes of this start and by no other start. If no variable gives
            a port, it is computed from this text. Empty if there is no such text.
        key_variable: the variable that contains the key; empty for launchers without one, for
            which MASTER_PORT is required.
    """
    given = given_master(reading)
    addr = given.addr
    if addr is None and not reading.is_set("MASTER_ADDR"):
        addr = OWN_ADDRESS if alone and fallback is None else fallback
        if addr is None:
            reading.conflicts.append("MASTER_ADDR is not set (master_addr)")
    port = given.port
    if port is None and not reading.is_set("MASTER_PORT"):
        if fallback_port is not None:
            port = fallback_port
        elif key:
            port = candidates(key, 0)[0]
            reading.evidence["master_port"] = key_variable
        elif not key_variable:
            reading.conflicts.append("MASTER_PORT is not set (master_port)")
    return Master(addr, port)


def endpoint(reading: Reading, variable: str) -> Master:
    """Return the host and port of a variable such as ``host:port``, ``[v6]:port`` or ``host``.

    Both are None if the variable is not set.
    """
    text = reading.value(variable)
    if not text:
        return Master(None, None)
    host, colon, port = text.rpartition(":")
    if not colon or (
        ":" in host and not host.endswith("]")
    ):  # an IPv6 address without brackets contains colons
        host, port = text, ""
    addr = reading.as_host("master_addr", variable, host)
    if not port:
        return Master(addr, None)
    number = whole_number(port)
    if number is None:
        reading.conflicts.append(f"{variable}={text[:80]!r} does not end in a port (master_port)")
    else:
        reading.evidence["master_port"] = variable
    return Master(addr, number)


def hosts(reading: Reading, variable: str) -> list[str]:
    """Return a variable's hosts without their ports; empty if the variable is not set.

    Commas or white space separate them.
    """
    found = []
    for item in reading.value(variable).replace(",", " ").split():
        host, colon, port = item.rpartition(":")
        bare = (
            item
            if not colon or (":" in host and not host.endswith("]")) or not port.isdigit()
            else host
        )
        found.append(bare.strip("[]"))
    return found


def ignore(reading: Reading, why: str, *variables: str) -> None:
    """Add each of the variables that is set to the reading's ignored variables."""
    reading.ignored += [
        Ignored(variable, why) for variable in variables if reading.is_set(variable)
    ]
