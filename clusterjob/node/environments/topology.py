"""Rank assignments: of a node, of a process, and how both are read from variables.

A platform that starts one command per node gives a `Topology`; a launcher then starts the workers.
A platform that starts one command per process gives a `Worker`. With two types, node ranks are not
used as process ranks by mistake. A `Finding` records which variable gave which field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterjob.errors import PlacementError
from clusterjob.node.system.network import is_loopback
from clusterjob.node.system.ranges import expand_hostlist

NOWHERE = "none"  # the source of a finding without a family
OWN_ADDRESS = "127.0.0.1"
OWN_MASTER = "CLUSTERJOB_MASTER_ADDR"  # the user's variable of node 0's address
PORTS = 16  # number of a job's candidate ports
# Below Linux's range of ephemeral ports (32768 and up), above the usual services.
_LOWEST, _HIGHEST = 20000, 32000
_AGENTS_CONNECTED = ("clusterjob", "torchrun")  # launchers whose agents have used MASTER_ADDR
_MAX_NAME = 255  # characters of a host name
_MAX_DIGITS = 19  # a text with this many digits or more is not a valid number
_MOST = 1 << 24  # nodes, or processes
# By field, its least value, and its greatest one or the field with the count that limits it.
_RANGES: dict[str, tuple[int, Any]] = {
    "nnodes": (1, _MOST),
    "node_rank": (0, "nnodes"),
    "nproc_per_node": (1, _MOST),
    "master_port": (1, 65535),
    "world_size": (1, _MOST),
    "rank": (0, "world_size"),
    "local_world_size": (1, "world_size"),
    "local_rank": (0, "local_world_size"),
}


@dataclass(frozen=True)
class Topology:
    """The rank assignment of one node of a job.

    Attributes:
        nnodes: number of nodes, at least 1.
        node_rank: this node's index, 0 to nnodes - 1.
        nproc_per_node: number of workers on this node; None if the environment does not give it.
        master_addr: host name or address at which the other nodes reach node 0.
        master_port: TCP port on node 0 that the platform reserved; None if it gives none.
        source: the family of variables that was read.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int | None
    master_addr: str
    master_port: int | None
    source: str


@dataclass(frozen=True)
class Worker:
    """The rank assignment of one process of a job.

    Attributes:
        topology: the node that the process runs on.
        rank: index of the process in the whole job, 0 to world_size - 1.
        local_rank: index of the process on its node, 0 to local_world_size - 1.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.
    """

    topology: Topology
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


@dataclass
class Finding:
    """The rank assignment that one family of variables gives this process or node.

    The methods read variables into the fields of the assignment, and note what is wrong.

    Attributes:
        source: the family, such as ``torchrun``; ``none`` if no family applies.
        environ: the mapping of variables.
        placement: a `Worker` or a `Topology`; None if nothing was found or there are conflicts.
        numbers: the value of each field that is a number.
        master_addr: the host of rank 0; empty if it is not known.
        evidence: the variable that gave each field.
        conflicts: one line for each reason why the variables give no rank assignment. A required
            field that could not be read has one.
        ignored: variables that are set but were not used, with the reason.
    """

    source: str
    environ: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    placement: Topology | Worker | None = None
    numbers: dict[str, int] = field(default_factory=dict)
    master_addr: str = ""
    evidence: dict[str, str] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)

    @property
    def level(self) -> str:
        """The level: ``worker`` for a process, ``node`` for a node, ``none`` for neither."""
        return {Worker: "worker", Topology: "node"}.get(type(self.placement), "none")

    def check(self) -> Finding:
        """Return the finding itself.

        Raises:
            PlacementError: the variables are incomplete or contradict each other; the message names
                them.
        """
        if self.conflicts:
            raise PlacementError(
                f"the environment ({self.source}) gives no rank assignment: "
                f"{'; '.join(self.conflicts)}",
                PlacementError.general_hint,
            )
        return self

    # -- reading -----------------------------------------------------------------------------------

    def value(self, variable: str) -> str:
        """Return the variable's value; empty if it is unset. No evidence is recorded.

        White space around it is removed, then quotes, left by a shell or a YAML file.
        """
        value = self.environ.get(variable, "").strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].strip()
        return value

    def is_set(self, *variables: str) -> bool:
        """Return whether any of these variables has a value."""
        return any(self.value(variable) for variable in variables)

    def first_set(self, *variables: str) -> str:
        """Return the first of these variables that has a value.

        If no variable has a value, return the first variable, which an error message then names.
        """
        return next((variable for variable in variables if self.value(variable)), variables[0])

    def text(self, field_name: str, variable: str, *, required: bool = True) -> str:
        """Return the variable's value; empty if it is unset, which is a conflict if required."""
        value = self.value(variable)
        if value:
            self.evidence[field_name] = variable
        elif required:
            self.conflicts.append(f"{variable} is not set ({field_name})")
        return value

    def number(self, field_name: str, *variables: str, required: bool = True) -> int | None:
        """Read the first variable that is set as a whole number; any other text is a conflict.

        Returns:
            The number, which `numbers` then has under the field's name, or None.
        """
        variable = self.first_set(*variables)
        value = self.text(field_name, variable, required=required)
        return self.as_number(field_name, variable, value) if value else None

    def as_number(self, field_name: str, variable: str, text: str) -> int | None:
        """Read a part of a variable's value as a whole number; any other text is a conflict."""
        found = whole_number(text)
        self.evidence[field_name] = variable
        if found is None:
            self.conflicts.append(f"{variable}={text[:80]!r} is not a whole number ({field_name})")
        else:
            self.numbers[field_name] = found
        return found

    def host(self, variable: str, text: str | None = None) -> None:
        """Read rank 0's host from a variable; a text that is not a host is a conflict.

        Brackets around an IPv6 address are removed. Several addresses of the host have commas
        between them.

        Args:
            variable: the variable.
            text: the part of its value that names the host; None for all.
        """
        text = self.text("master_addr", variable) if text is None else text
        name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if name and len(name) <= _MAX_NAME and not re.search(r"[^\w.\-:%,]", name):
            self.evidence["master_addr"], self.master_addr = variable, name
        elif text:
            self.conflicts.append(f"{variable}={text[:80]!r} is not a host (master_addr)")

    def endpoint(self, variable: str) -> None:
        """Read rank 0's host and port: ``host:port``, ``[v6]:port`` or ``host``."""
        host, port = _split(self.value(variable))
        self.host(variable, host)
        if port:
            self.as_number("master_port", variable, port)

    def hosts(self, variable: str) -> list[str]:
        """Return a variable's hosts without their ports; empty if the variable is not set.

        Commas or white space separate them.
        """
        found = []
        for item in self.value(variable).replace(",", " ").split():
            host, port = _split(item)
            found.append((host if port.isdigit() else item).strip("[]"))
        return found

    def hostlist(self, variable: str) -> list[str]:
        """Return the hosts of a list with ranges; a text that is no such list is a conflict."""
        try:
            return expand_hostlist(self.value(variable))
        except PlacementError as error:
            self.conflicts.append(f"{variable}: {error.message}")
            return []

    def check_count(self, variable: str, hosts: Sequence[object]) -> None:
        """Add a conflict if a list of the nodes does not have as many as the number of nodes."""
        if hosts and self.numbers.get("nnodes") not in (None, len(hosts)):
            self.conflicts.append(
                f"{variable} lists {len(hosts)} nodes, "
                f"{self.evidence['nnodes']} is {self.numbers['nnodes']}"
            )

    def find_master(
        self,
        addr: str = "MASTER_ADDR",
        port: str = "MASTER_PORT",
        *,
        first: tuple[str, str] = ("", ""),
        missing: str = "",
    ) -> None:
        """Read rank 0's address from a variable, else from a list of hosts.

        A job on one node needs none.

        Args:
            addr: the variable of the host, which users may export; it comes before the list.
            port: the variable of the port, which need not be set.
            first: the variable of the list, and its first host; empty if there is no list.
            missing: the variable that a conflict names if no host is known; by default ``addr``.
        """
        if self.is_set(addr):
            self.host(addr)
        elif first[1]:
            self.host(*first)
        elif self.alone:
            self.master_addr = OWN_ADDRESS
        else:
            self.conflicts.append(f"{missing or addr} is not set (master_addr)")
        self.number("master_port", port, required=False)

    @property
    def alone(self) -> bool:
        """Whether the job has one node, as far as the fields tell."""
        if "world_size" in self.numbers:
            return self.numbers["world_size"] == self.numbers.get("local_world_size")
        return self.numbers.get("nnodes") == 1

    def ignore(self, why: str, *variables: str) -> None:
        """Record as ignored each of these variables that is set."""
        self.ignored |= {name: why for name in variables if self.is_set(name)}

    # -- placements --------------------------------------------------------------------------------

    def node(self) -> Topology | None:
        """Return the placement of a node, or None with conflicts.

        The index of a single node need not be set. 0 workers, for a machine without GPUs, count as
        unset.
        """
        if self.numbers.get("nproc_per_node") == 0:
            del self.numbers["nproc_per_node"], self.evidence["nproc_per_node"]
        self.numbers.setdefault("node_rank", 0)
        return self._topology()

    def worker(self) -> Worker | None:
        """Return the placement of a process, or None with conflicts.

        Without the number of nodes and the node's index, both are computed as if every node had
        `local_world_size` processes, in the order of ranks.
        """
        if self.conflicts:
            return None
        numbers = self.numbers
        rank, world_size = numbers["rank"], numbers["world_size"]
        size = numbers["nproc_per_node"] = max(1, numbers["local_world_size"])
        nnodes = numbers.setdefault("nnodes", max(1, -(-world_size // size)))
        numbers.setdefault("node_rank", min(rank // size, nnodes - 1))
        topology = self._topology()
        local_rank = numbers["local_rank"]
        return None if topology is None else Worker(topology, rank, local_rank, world_size, size)

    def _topology(self) -> Topology | None:
        numbers = self.numbers
        for name, (least, limit) in _RANGES.items():
            count = numbers.get(limit, _MOST) if isinstance(limit, str) else limit + 1 - least
            if name in numbers and not least <= numbers[name] < least + count:
                where = f"{self.evidence[name]}: " if name in self.evidence else ""
                of = f" ({self.evidence.get(limit, limit)}={count})" if limit in numbers else ""
                self.conflicts.append(
                    f"{where}{name} is {numbers[name]}, outside {least}..{least + count - 1}{of}"
                )
        variable = self.evidence.get("master_addr", "the master's address")
        # Agents have used their address already, and users set clusterjob's variable themselves.
        is_right = self.source in _AGENTS_CONNECTED or variable == OWN_MASTER
        if numbers.get("nnodes", 1) > 1 and is_loopback(self.master_addr) and not is_right:
            self.conflicts.append(
                f"{variable} is {self.master_addr!r}, a loopback address, but there are "
                f"{numbers['nnodes']} nodes (master_addr): set node 0's address in the network"
            )
        if self.conflicts:
            return None
        return Topology(
            numbers["nnodes"],
            numbers["node_rank"],
            nproc_per_node=numbers.get("nproc_per_node"),
            master_addr=self.master_addr,
            master_port=numbers.get("master_port"),
            source=self.source,
        )


def _split(text: str) -> tuple[str, str]:
    """Return (host, port) of a text such as ``host:port``; the port is empty if there is none."""
    host, colon, port = text.rpartition(":")
    # An IPv6 address without brackets contains colons.
    return (text, "") if not colon or (":" in host and not host.endswith("]")) else (host, port)


def whole_number(text: str) -> int | None:
    """Return a text of ASCII digits as a number; None for any other text.

    int() would also accept signs, spaces, underscores and digits of other scripts.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS else None


def candidate_ports(job_id: str, attempt: int) -> list[int]:
    """Return a job's candidate rendezvous ports in the order to try them.

    They are for platforms that set no port. Every process computes the same ports. A shared file
    would be slow: NFS shows a new file seconds late.

    Args:
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0; each attempt has its own sequence.
    """
    import hashlib  # slow to load, and most environments set a port

    seed = hashlib.sha256(f"{job_id}\0{attempt}".encode(errors="surrogateescape")).digest()
    width = _HIGHEST - _LOWEST
    return [
        _LOWEST + int.from_bytes(seed[2 * index : 2 * index + 2], "big") % width
        for index in range(PORTS)
    ]
