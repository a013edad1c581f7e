"""What the families have in common once their variables are read: numbers into a place, or one more
conflict.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterjob.errors import PlaceError
from clusterjob.node.environments.candidate_ports import candidates
from clusterjob.node.environments.reading import Finding, Ignored, Reading, whole_number
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system.network import is_loopback

OWN_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class Master:
    """Where rank 0 is met.

    Attributes:
        addr: its host; None with a conflict.
        port: its TCP port; None where nothing names one.
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
    """Close a reading with a node's place.

    Args:
        reading: what was read.
        nnodes: number of nodes; None with a conflict.
        node_rank: this node's index; None with a conflict.
        nproc_per_node: None where nothing says, also for 0: a machine without GPUs.
        master: node 0; its address may be missing where there is one node.
        one_means_here: whether a single node without an address is met at this machine's own.
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
    except PlaceError as error:
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
    """Close a reading with a process's place.

    Args:
        reading: what was read.
        rank: index of the process; None, as for the next three, with a conflict.
        world_size: number of processes.
        local_rank: index of the process on its node.
        local_world_size: number of processes on its node.
        master: where rank 0 is met.
        node_rank: None where no variable says; then as if every node had as many processes, in the
            order of ranks.
        nnodes: None where no variable says; likewise.
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
    except PlaceError as error:
        return reading.refuse(error)


def refuse_own_address(reading: Reading, addr: str, nnodes: int) -> None:
    """Note a conflict where several nodes are to meet at an address that means each of them itself."""
    if nnodes > 1 and is_loopback(addr):
        name = reading.evidence.get("master_addr", "the master's address")
        reading.conflicts.append(
            f"{name} is {addr!r}, which each of the {nnodes} nodes is itself (master_addr); node 0's own address in the network works"
        )


def given_master(reading: Reading) -> Master:
    """Return what MASTER_ADDR and MASTER_PORT say, as users of launchers export them; both may be
    missing.
    """
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
    """Return where the processes of a launcher meet that does not say so itself.

    Args:
        reading: what was read.
        alone: whether all processes run on one node.
        fallback: the host, where MASTER_ADDR is not set; None for none.
        fallback_port: the port, where MASTER_PORT is not set.
        key: text that is the same for all processes of this start and of no other, from which a
            port is computed where nothing names one; empty for none.
        key_variable: where the key is from; empty for launchers that have none, where a port has to
            be named.
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
    """Return a variable ``host:port``, ``[v6]:port`` or ``host``; both are None where it is not
    set.
    """
    text = reading.value(variable)
    if not text:
        return Master(None, None)
    host, colon, port = text.rpartition(":")
    if not colon or (
        ":" in host and not host.endswith("]")
    ):  # a bare IPv6 address holds colons of its own
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
    """Return a variable's list of hosts, parted by commas or white space, each without its port;
    empty where it is not set.
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
    """Note variables that are set and were not used."""
    reading.ignored += [
        Ignored(variable, why) for variable in variables if reading.is_set(variable)
    ]
