"""Rank assignments: of a node, of a process, and how both are read from variables.

A platform that starts one command per node gives a `Topology`; a launcher then starts the workers.
A platform that starts one command per process gives a `Worker`. With two types, node ranks are not
used as process ranks by mistake. A `Reading` records which variable gave which field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from clusterjob.errors import PlacementError
from clusterjob.node.system.hostlist import expand_hostlist
from clusterjob.node.system.network import is_loopback

NOWHERE = "none"  # the source of a finding without a family
OWN_ADDRESS = "127.0.0.1"
PORTS = 16  # number of a job's candidate ports
# Below Linux's range of ephemeral ports (32768 and up), above the usual services.
_LOWEST, _HIGHEST = 20000, 32000
_MAX_NAME = 255  # characters of a host name
_MAX_DIGITS = 19  # a text with this many digits or more is not a valid number


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

    Raises:
        PlacementError: a number is out of range, or the master has no address.
    """

    nnodes: int
    node_rank: int
    nproc_per_node: int | None
    master_addr: str
    master_port: int | None
    source: str

    def __post_init__(self) -> None:
        if self.nnodes < 1:
            raise PlacementError(f"nnodes is {self.nnodes}: a job has at least 1 node")
        if not 0 <= self.node_rank < self.nnodes:
            raise PlacementError(
                f"node_rank is {self.node_rank}, outside 0..{self.nnodes - 1} (nnodes is "
                f"{self.nnodes})"
            )
        if self.nproc_per_node is not None and self.nproc_per_node < 1:
            raise PlacementError(
                f"nproc_per_node is {self.nproc_per_node}: a node has at least 1 worker"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise PlacementError(f"master_port is {self.master_port}, outside 1..65535")
        if not self.master_addr:
            raise PlacementError("master_addr is empty")


@dataclass(frozen=True)
class Worker:
    """The rank assignment of one process of a job.

    Attributes:
        topology: the node that the process runs on.
        rank: index of the process in the whole job, 0 to world_size - 1.
        local_rank: index of the process on its node, 0 to local_world_size - 1.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.

    Raises:
        PlacementError: a number is out of range.
    """

    topology: Topology
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise PlacementError(f"world_size is {self.world_size}: a job has at least 1 process")
        if not 0 <= self.rank < self.world_size:
            raise PlacementError(
                f"rank is {self.rank}, outside 0..{self.world_size - 1} (world_size is "
                f"{self.world_size})"
            )
        if not 1 <= self.local_world_size <= self.world_size:
            raise PlacementError(
                f"local_world_size is {self.local_world_size}, outside 1..{self.world_size}"
            )
        if not 0 <= self.local_rank < self.local_world_size:
            raise PlacementError(
                f"local_rank is {self.local_rank}, outside 0..{self.local_world_size - 1} "
                f"(local_world_size is {self.local_world_size})"
            )


@dataclass(frozen=True)
class Ignored:
    """A variable that is set but was not used, and the reason."""

    variable: str
    why: str


@dataclass(frozen=True)
class Finding:
    """The rank assignment that one family of variables gives this process or node.

    Attributes:
        source: the family, such as ``torchrun``; ``none`` if no family applies.
        placement: a `Worker` or a `Topology`; None if nothing was found or there are conflicts.
        evidence: the variable that gave each field.
        ignored: variables that are set but were not used.
        conflicts: one line for each reason why the variables give no rank assignment; empty
            without such reasons.
    """

    source: str
    placement: Topology | Worker | None
    evidence: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    conflicts: tuple[str, ...] = ()

    @property
    def level(self) -> str:
        """The level: ``worker`` for a process, ``node`` for a node, ``none`` for neither."""
        if isinstance(self.placement, Worker):
            return "worker"
        return "node" if isinstance(self.placement, Topology) else "none"

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


class Reading:
    """The variables of one family, and the fields of a rank assignment that they give.

    Attributes:
        environ: the mapping of variables.
        source: the family.
        numbers: the value of each field that is a number.
        master_addr: the host of rank 0; empty if it is not known.
        evidence: the variable that gave each field.
        conflicts: the errors so far. A required field that could not be read has one.
        ignored: variables that are set but are not used.
    """

    def __init__(self, environ: Mapping[str, str], source: str, *, quoted: bool = False) -> None:
        """Prepare to read the mapping.

        Args:
            environ: the mapping.
            source: the family.
            quoted: whether to remove quotes around values, left by a shell or a YAML file.
        """
        self.environ = environ
        self.source = source
        self._quoted = quoted
        self.numbers: dict[str, int] = {}
        self.master_addr = ""
        self.evidence: dict[str, str] = {}
        self.conflicts: list[str] = []
        self.ignored: list[Ignored] = []

    def is_set(self, *variables: str) -> bool:
        """Return whether any of these variables has a value."""
        return any(self.value(variable) for variable in variables)

    def first_set(self, *variables: str) -> str:
        """Return the first of these variables that has a value.

        If no variable has a value, return the first variable, which an error message then names.
        """
        return next((variable for variable in variables if self.value(variable)), variables[0])

    def value(self, variable: str) -> str:
        """Return the variable's value without surrounding white space; empty if it is unset.

        With ``quoted``, surrounding quotes are removed too. No evidence is recorded.
        """
        value = self.environ.get(variable, "").strip()
        if self._quoted and len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].strip()
        return value

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

    def host(self, variable: str, *, required: bool = True) -> str:
        """Read rank 0's host from a variable; a text that is not a host is a conflict."""
        value = self.text("master_addr", variable, required=required)
        return self.as_host(variable, value) if value else ""

    def as_host(self, variable: str, text: str) -> str:
        """Read rank 0's host from a part of a variable's value.

        Brackets around an IPv6 address are removed. Several addresses of the host have commas
        between them.

        Returns:
            The host, which is then `master_addr`; empty with a conflict.
        """
        name = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if (
            not name
            or len(name) > _MAX_NAME
            or not all(letter.isalnum() or letter in "._-:%," for letter in name)
        ):
            self.conflicts.append(f"{variable}={text[:80]!r} is not a host (master_addr)")
            return ""
        self.evidence["master_addr"] = variable
        self.master_addr = name
        return name

    def endpoint(self, variable: str, text: str) -> None:
        """Read rank 0's host and port from a text such as ``host:port``, ``[v6]:port``, ``host``.

        Args:
            variable: the variable that contains the text.
            text: the text.
        """
        host, port = _split(text)
        self.as_host(variable, host)
        if whole_number(port) is not None:
            self.as_number("master_port", variable, port)
        elif port:
            self.conflicts.append(f"{variable}={text[:80]!r} does not end in a port (master_port)")

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
            self.as_host(*first)
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
        self.ignored += [Ignored(name, why) for name in variables if self.is_set(name)]

    def node(self, *, by_platform: bool = True) -> Topology | None:
        """Return the placement of a node, or None with conflicts.

        The index of a single node need not be set.

        Args:
            by_platform: whether a platform sets the variables. Then 0 workers, for a machine
                without GPUs, count as unset, and a loopback address for several nodes is refused.

        Raises:
            PlacementError: a number is out of range.
        """
        if by_platform and self.numbers.get("nproc_per_node") == 0:
            del self.numbers["nproc_per_node"], self.evidence["nproc_per_node"]
        self.numbers.setdefault("node_rank", 0)
        return None if self.conflicts else self._topology(refuse_loopback=by_platform)

    def worker(self, *, refuse_loopback: bool = True) -> Worker | None:
        """Return the placement of a process, or None with conflicts.

        Without the number of nodes and the node's index, both are computed as if every node had
        `local_world_size` processes, in the order of ranks.

        Args:
            refuse_loopback: whether to refuse a loopback address for several nodes.

        Raises:
            PlacementError: a number is out of range.
        """
        if self.conflicts:
            return None
        numbers = self.numbers
        rank, world_size = numbers["rank"], numbers["world_size"]
        size = max(1, numbers["local_world_size"])
        numbers["nproc_per_node"] = numbers["local_world_size"]
        nnodes = numbers.setdefault("nnodes", max(1, -(-world_size // size)))
        numbers.setdefault("node_rank", min(rank // size, nnodes - 1))
        return Worker(
            self._topology(refuse_loopback=refuse_loopback),
            rank,
            local_rank=numbers["local_rank"],
            world_size=world_size,
            local_world_size=numbers["local_world_size"],
        )

    def _topology(self, *, refuse_loopback: bool) -> Topology:
        nnodes = self.numbers["nnodes"]
        if refuse_loopback and nnodes > 1 and is_loopback(self.master_addr):
            name = self.evidence.get("master_addr", "the master's address")
            self.conflicts.append(
                f"{name} is {self.master_addr!r}, a loopback address, but there are {nnodes} nodes "
                "(master_addr): set node 0's address in the network"
            )
        return Topology(
            nnodes,
            self.numbers["node_rank"],
            nproc_per_node=self.numbers.get("nproc_per_node"),
            master_addr=self.master_addr,
            master_port=self.numbers.get("master_port"),
            source=self.source,
        )

    def finding(self, place: Callable[[Reading], Topology | Worker | None]) -> Finding:
        """Return what a function finds in this reading; its source is ``none`` if that is nothing.

        Args:
            place: returns the placement, or None with conflicts or if the family does not apply.
                A `PlacementError` that it raises is a conflict.
        """
        placement = None
        try:
            placement = place(self)
        except PlacementError as error:
            # The message begins with the field's name.
            variable = self.evidence.get(error.message.partition(" ")[0])
            self.conflicts.append(f"{variable}: {error.message}" if variable else error.message)
        return Finding(
            source=self.source if self.conflicts or placement else NOWHERE,
            placement=None if self.conflicts else placement,
            evidence=dict(self.evidence),
            ignored=tuple(self.ignored),
            conflicts=tuple(self.conflicts),
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
