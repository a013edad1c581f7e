"""Let another node go on as the coordinator when the coordinator's node is lost.

When a round begins, the coordinator tells every agent which nodes may take its place, in order, and
gives these nodes its state. An agent that loses the coordinator looks for it at its old address and
at those of the successors. A successor whose turn has come becomes the coordinator. It starts a
round only if more than half of the nodes are with it (`clusterjob.node.rendezvous.nodes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.logs import ends, rounds
from clusterjob.node.rendezvous import coordinator_state
from clusterjob.node.rendezvous.coordinator_state import MAX_SUCCESSORS, CoordinatorState, Successor
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.verdict import RoundEnd

# Platforms on which every node of the job can be reached under the address that it has.
_FREE_ADDRESSES = ("clusterjob", "slurm")


@dataclass(frozen=True)
class Earlier:
    """An earlier coordinator, whose place this process takes.

    Attributes:
        state, rounds: its state, and the rounds that have ended.
        why: how it was lost.
        ended: whether its process has certainly ended.
        moved: whether it ran on another node.
        received_at: when its state arrived, by this machine's monotonic clock.
    """

    state: CoordinatorState
    rounds: tuple[RoundEnd, ...]
    why: str
    ended: bool
    moved: bool
    received_at: float

    @property
    def moves(self) -> int:
        """How often the coordinator has moved now."""
        return self.state.moves + self.moved

    @property
    def clock_shift(self) -> float:
        """Seconds from this machine's monotonic clock to the clock of the job's events."""
        return self.state.clock - (self.received_at if self.moved else self.state.made_at)


def may_move(node: NodeJob) -> bool:
    """Return whether another node can coordinate: with restarts, and without a fixed address."""
    topology, restarts = node.topology, node.options.restarts
    return restarts and topology.nnodes > 1 and topology.source in _FREE_ADDRESSES


def successors(peers: Mapping[int, Peer], own: int) -> tuple[Successor, ...]:
    """Return the nodes that may be the next coordinator: the others, then its own node.

    Args:
        peers: the agents, by the number of their node.
        own: the coordinator's node.
    """
    alive = [node for node, peer in peers.items() if not peer.lost and peer.address]
    order = sorted(alive, key=lambda node: (node <= own, node == own, node))
    chosen = [*[node for node in order if node != own][: MAX_SUCCESSORS - 1], own]
    return tuple(Successor(node, peers[node].address) for node in chosen if node in alive)


def from_disk(job_dir: Path, attempt: int, why: str) -> Earlier | None:
    """Return the coordinator that ran in an earlier agent of this node; None if there was none.

    Args:
        job_dir: the job's directory, as this node sees it.
        attempt: the job's attempt.
        why: how that agent ended.
    """
    state = coordinator_state.read(job_dir, attempt)
    if state is None or ends.has_result(job_dir, attempt):
        return None
    ended = rounds.ended(job_dir, running=True)
    return Earlier(state, ended, why=why, ended=True, moved=False, received_at=state.made_at)
