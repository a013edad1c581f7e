"""Turn the numbers that a family has read into a `Topology`, a `Worker` or a conflict."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Ranks:
    """The numbers of a process; a number is None if there is a conflict.

    Attributes:
        rank: index of the process.
        world_size: number of processes.
        local_rank: index of the process on its node.
        local_world_size: number of processes on its node.
    """

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None

    @classmethod
    def read(
        cls, reading: Reading, rank: str, world_size: str, local_rank: str, local_world_size: str
    ) -> Ranks:
        """Return the numbers in these variables, which are all required."""
        return cls(
            reading.number("rank", rank),
            reading.number("world_size", world_size),
            local_rank=reading.number("local_rank", local_rank),
            local_world_size=reading.number("local_world_size", local_world_size),
        )

    @property
    def alone(self) -> bool:
        """Whether all processes run on one node."""
        return self.world_size is not None and self.world_size == self.local_world_size


def node(
    reading: Reading,
    *,
    nnodes: int | None,
    node_rank: int | None,
    nproc_per_node: int | None,
    master: Master,
    by_platform: bool = True,
) -> Finding:
    """Return the finding of a reading for a node.

    Args:
        reading: the variables that were read.
        nnodes: number of nodes; None with a conflict.
        node_rank: this node's index; None with a conflict.
        nproc_per_node: number of workers on this node; None if no variable gives it. A platform
            gives 0 for a machine without GPUs.
        master: address of node 0; a single node needs none.
        by_platform: whether a platform sets the variables. Then 0 workers count as unset, and a
            loopback address for several nodes is refused.
    """
    if nproc_per_node == 0 and by_platform:
        reading.evidence.pop("nproc_per_node", None)
        nproc_per_node = None
    addr = OWN_ADDRESS if master.addr is None and nnodes == 1 else master.addr
    if nnodes is None or node_rank is None or addr is None or reading.conflicts:
        return reading.finding(None)
    if by_platform:
        _refuse_own_address(reading, addr, nnodes=nnodes)
    try:
        return reading.finding(
            Topology(
                nnodes,
                node_rank,
                nproc_per_node=nproc_per_node,
                master_addr=addr,
                master_port=master.port,
                source=reading.source,
            )
        )
    except PlacementError as error:
        return reading.refuse(error)


def worker(
    reading: Reading,
    ranks: Ranks,
    *,
    master: Master,
    node_rank: int | None = None,
    nnodes: int | None = None,
    refuse_loopback: bool = True,
) -> Finding:
    """Return the finding of a reading for a process.

    Args:
        reading: the variables that were read.
        ranks: the numbers of the process.
        master: address of rank 0.
        node_rank: index of the node; None if no variable gives it. It is then computed as if
            every node had `local_world_size` processes, in the order of ranks.
        nnodes: number of nodes; None if no variable gives it. It is then computed in the same way
            as the node rank.
        refuse_loopback: whether to refuse a loopback address for several nodes.
    """
    rank, world_size = ranks.rank, ranks.world_size
    local_rank, local_world_size = ranks.local_rank, ranks.local_world_size
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
    if refuse_loopback:
        _refuse_own_address(reading, master.addr, nnodes=nnodes)
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


def _refuse_own_address(reading: Reading, addr: str, nnodes: int) -> None:
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
        key: text that only the processes of this launch share. If no variable gives a port, it is
            computed from this text. Empty if there is no such text.
        key_variable: the variable that contains the key. If empty, MASTER_PORT is required.
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


def master_or_first(reading: Reading, variable: str, hosts: list[str]) -> Master:
    """Return MASTER_ADDR and MASTER_PORT; without MASTER_ADDR, the first of a variable's hosts."""
    given = given_master(reading)
    if reading.is_set("MASTER_ADDR") or not hosts:
        return given
    return replace(given, addr=reading.as_host("master_addr", variable, hosts[0]))


def endpoint(reading: Reading, variable: str, text: str | None = None) -> Master:
    """Return the host and port of a text such as ``host:port``, ``[v6]:port`` or ``host``.

    Args:
        reading: records the evidence and conflicts.
        variable: the variable that contains the text.
        text: the text; None for the variable's value. Both results are None for an empty text.
    """
    text = reading.value(variable) if text is None else text
    if not text:
        return Master(None, None)
    host, port = _split(text)
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
        host, port = _split(item)
        found.append((host if port.isdigit() else item).strip("[]"))
    return found


def _split(text: str) -> tuple[str, str]:
    """Return (host, port) of a text such as ``host:port``; the port is empty if there is none."""
    host, colon, port = text.rpartition(":")
    # An IPv6 address without brackets contains colons.
    return (text, "") if not colon or (":" in host and not host.endswith("]")) else (host, port)


def ignore(reading: Reading, why: str, *variables: str) -> None:
    """Record as ignored each of these variables that is set."""
    reading.ignored += [
        Ignored(variable, why) for variable in variables if reading.is_set(variable)
    ]
