"""Define `Topology`, a node's rank assignment, and `Worker`, a process's rank assignment.

A platform that starts one command per node gives a `Topology`; a launcher then starts the workers.
A platform that starts one command per process gives a `Worker`. With two types, node ranks are not
used as process ranks by mistake.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clusterjob.errors import PlacementError

_MAX_NAMES = 65536  # the limit of Slurm's own tools
_MAX_NAME = 255  # maximum characters of a host name
_MAX_LIST = 1 << 22  # maximum characters of a host list
_TOO_MANY = f"it names more than {_MAX_NAMES} hosts"
_IN_A_NAME = "._-:%@+"


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


def ranks_by_node(first_ranks: Sequence[int], ranks: Iterable[int]) -> dict[int, list[int]]:
    """Return the given ranks grouped by node.

    Args:
        first_ranks: the rank of each node's first worker.
        ranks: the ranks to group, each below the world size.
    """
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(bisect_right(first_ranks, rank) - 1, []).append(rank)
    return found


def expand_hostlist(text: str) -> list[str]:
    """Return the host names of a Slurm host list, in the written order.

    An example is ``gpu[01-03,7]-ib,login``. Ranges count up and keep the leading zeros of their
    first number. In a name with several brackets, the last bracket changes fastest, as in Slurm
    22.05 with up to two brackets. For three brackets Slurm has another order, and it refuses some
    texts after a bracket.

    Args:
        text: the list; commas or white space separate the names.

    Raises:
        PlacementError: the text is not a host list, or it names more than 65,536 hosts.
    """
    if len(text) > _MAX_LIST:
        raise PlacementError(f"the host list is {len(text)} characters long")
    names: list[str] = []
    try:
        for item in split_hostlist(text):
            names += _expand_name(item, _MAX_NAMES - len(names))
    except ValueError as error:
        raise PlacementError(f"{text[:80]!r} is not a list of hosts: {error}") from error
    return names


def split_hostlist(text: str) -> list[str]:
    """Split a host list at commas and white space outside brackets.

    Raises:
        ValueError: a bracket is not closed, or is not opened.
    """
    items, start, depth = [], 0, 0
    for index, letter in enumerate(text):
        if letter in "[]":
            depth += 1 if letter == "[" else -1
            if depth not in (0, 1):
                raise ValueError("its brackets do not match")
        elif depth == 0 and (letter == "," or letter.isspace()):
            items.append(text[start:index])
            start = index + 1
    if depth:
        raise ValueError("a bracket is not closed")
    return [item for item in [*items, text[start:]] if item]


def _expand_name(item: str, most: int) -> list[str]:
    first, *brackets = item.split("[")
    names = [_checked(first)]
    for bracket in brackets:
        numbers, _, rest = bracket.partition("]")
        _checked(rest)
        endings = [number + rest for number in expand_numbers(numbers, most // len(names))]
        if len(names[0]) + len(endings[0]) > _MAX_NAME:
            raise ValueError(f"a name is longer than {_MAX_NAME} characters")
        names = [name + ending for name in names for ending in endings]
    if len(names[0]) > _MAX_NAME:
        raise ValueError(f"a name is longer than {_MAX_NAME} characters")
    if len(names) > most:
        raise ValueError(_TOO_MANY)
    return names


def expand_numbers(numbers: str, most: int = _MAX_NAMES) -> list[str]:
    """Return the numbers of one bracket, such as ``01-03,7``.

    The size of each range is checked before the range is expanded.

    Raises:
        ValueError: a part is not a range of numbers, or there are more than `most` numbers.
    """
    found: list[str] = []
    for part in numbers.split(","):
        low, dash, high = part.partition("-")
        ends = (low, high) if dash else (low, low)
        if not all(end.isascii() and end.isdigit() and len(end) < 19 for end in ends) or int(
            ends[1]
        ) < int(ends[0]):
            raise ValueError(f"{part[:40]!r} is not a range of numbers")
        if len(found) + int(ends[1]) - int(ends[0]) + 1 > most:
            raise ValueError(_TOO_MANY)
        found += [f"{number:0{len(low)}d}" for number in range(int(ends[0]), int(ends[1]) + 1)]
    return found


def _checked(part: str) -> str:
    """Return a part of a name if it has no characters special to a shell (CVE-2024-27763)."""
    for letter in part:
        if not (letter.isalnum() or letter in _IN_A_NAME):
            raise ValueError(f"a host name cannot contain {letter!r}")
    return part
