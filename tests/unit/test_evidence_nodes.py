"""The stacks of ranks that were collected before a round is stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from clusterjob.node.logs.events import EventLog, read_events
from clusterjob.node.rendezvous.evidence import Evidence
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.stack_messages import StackFound, StacksCollected
from clusterjob.node.stacks.grouping import RankStack, Round


def test_stacks_of_asked_nodes_are_saved_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "logs" / "node0").mkdir(parents=True)
    peers = {
        node: Peer(node, f"gpu{node}", pid=1, nproc=1, send=print, heard_at=0.0)
        for node in range(3)
    }
    evidence = Evidence(
        Round("guest-1", 0, 0, 0),
        cast("Any", SimpleNamespace(peers=peers)),
        job_dir=tmp_path,
        events=EventLog(tmp_path / "events.jsonl"),
        local_rank=lambda _node, _rank: 0,
    )
    evidence.expect([0, 2], "boom", living=3)
    for node in range(3):  # node 1 was not asked
        stack = RankStack(node, node, "gpu", 1, "sleeps", answered=False)
        evidence.handlers[StackFound](peers[node], StackFound(0, stack))
        evidence.handlers[StacksCollected](peers[node], StacksCollected(0))
    assert [each.rank for each in evidence.stacks] == [0, 2]
    evidence.save()
    [event] = read_events(tmp_path / "events.jsonl")
    assert event["why"] == "boom (stacks of 2 of 3 nodes)"
    assert (event["ranks"], event["path"]) == (2, "logs/node0/stacks.txt")
