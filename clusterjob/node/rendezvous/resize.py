"""Requests of `clusterjob resize`: the coordinator reads them in the job's directory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.logs import ends, size_request
from clusterjob.node.logs.events import EventLog
from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.node_selection import NodeSelection
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.system import files


@dataclass(frozen=True)
class Resize:
    """The user wants workers on this number of nodes. It is never sent to another process."""

    nodes: int


def follow_requests(job_dir: Path, membership: Membership, own: int) -> None:
    """Put each request into the coordinator's inbox, until the membership is closed.

    Args:
        job_dir: the job's directory.
        membership: has the inbox.
        own: the coordinator's node.
    """
    membership.tasks.append(asyncio.create_task(_follow(job_dir, membership, own)))


async def _follow(job_dir: Path, membership: Membership, own: int) -> None:
    loop = asyncio.get_running_loop()
    while True:
        nodes = await loop.run_in_executor(files.disk, size_request.take, job_dir)
        if nodes is not None:
            membership.inbox.put_nowait((own, Resize(nodes)))
        await asyncio.sleep(ends.REQUEST_SECONDS)


def apply(
    request: Resize, selection: NodeSelection, membership: Membership, events: EventLog
) -> Outcome | None:
    """Change the number of nodes of the next rounds; return an outcome if a running one changes.

    Args:
        request: the request; with too few or too many nodes it changes nothing.
        selection: chooses the nodes of the next rounds.
        membership: the nodes that may be chosen.
        events: records the answer.
    """
    usable = membership.usable()
    possible = selection.least <= request.nodes <= len(usable)
    if possible:
        selection.wanted = request.nodes
    changes = possible and selection.choose(usable) != selection.nodes
    events.add("resize", nodes=request.nodes, accepted=possible, changes=changes)
    return outcome.resized(request.nodes) if changes else None
