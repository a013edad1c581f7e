"""Let another node go on as the coordinator when the coordinator's node is lost.

When a round begins, the coordinator tells every agent which nodes may take its place, in order, and
gives these nodes its state. An agent that loses the coordinator looks for it at its old address and
at those of the successors. A successor whose turn has come becomes the coordinator. It starts a
round only if no other part of the job can (`may_go_on`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.node.logs import ends, events
from clusterjob.node.logs.job_dir import COORDINATOR
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.messages import MAX_SUCCESSORS, CoordinatorState, Members
from clusterjob.node.system import files, processes
from clusterjob.node.system.codec import MalformedMessageError, read
from clusterjob.node.verdict import Failure

# Platforms on which every node of the job can be reached under the address that it has.
FREE_ADDRESSES = ("clusterjob", "slurm")


@dataclass(frozen=True)
class Earlier:
    """An earlier coordinator, whose place this process takes.

    Attributes:
        state: its state.
        why: how it was lost.
        ended: whether its process has certainly ended.
        moved: whether it ran on another node.
        received_at: when its state arrived, by this machine's monotonic clock.
        failure: why its round ended, if it ran in this process and has given up.
    """

    state: CoordinatorState
    why: str
    ended: bool
    moved: bool
    received_at: float
    failure: Failure | None = None


def may_go_on(groups: Iterable[Members], present: Set[int]) -> bool:
    """Return whether some nodes of a job may go on, because no others can.

    Of the nodes of a round, they must be more than half, or half with its coordinator. A round that
    some of its nodes may not have seen adds its members to those of the last round that all have
    seen: then this must hold for both.

    Args:
        groups: the members of these rounds.
        present: the nodes that are together, and have seen no newer round.
    """

    def holds(group: Members) -> bool:
        most, twice = len(group.nodes), 2 * len(present & set(group.nodes))
        return twice > most or (twice == most and group.coordinator in present)

    return all(map(holds, groups))


def successors(peers: Mapping[int, Peer], own: int) -> tuple[tuple[int, str], ...]:
    """Return the nodes that may be the next coordinator, its own last, with addresses.

    Args:
        peers: the agents, by the number of their node.
        own: the coordinator's node.
    """
    alive = [node for node, peer in peers.items() if not peer.lost and peer.hello.address]
    order = sorted(alive, key=lambda node: (node <= own, node == own, node))
    chosen = [*[node for node in order if node != own][: MAX_SUCCESSORS - 1], own]
    return tuple((node, peers[node].hello.address) for node in chosen if node in alive)


def from_disk(job_dir: Path, attempt: int, why: str) -> Earlier | None:
    """Return the coordinator that ran in an earlier agent of this node; None if there was none.

    Args:
        job_dir: the job's directory, as this node sees it.
        attempt: the job's attempt.
        why: how that agent ended.
    """
    try:
        state = read(CoordinatorState, files.read_json(job_dir / COORDINATOR))
    except (OSError, MalformedMessageError):
        return None
    if state.attempt != attempt or ends.has_result(job_dir, attempt):
        return None
    # The last round may have ended since the state was written.
    rounds = events.ended_rounds(job_dir, running=True)
    state = replace(state, lasting=replace(state.lasting, rounds=rounds))
    received_at = state.made_at if state.boot == processes.boot_id() else time.monotonic()
    return Earlier(state, why, ended=True, moved=False, received_at=received_at)
