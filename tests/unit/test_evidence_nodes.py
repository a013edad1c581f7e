"""The stacks of ranks that were collected before a round is stopped."""

from __future__ import annotations

from pathlib import Path

from clusterjob.node.coordinator import Evidence
from clusterjob.node.logs.events import EventLog, read_events
from clusterjob.node.rendezvous.messages import StackFound, StacksCollected
from clusterjob.node.stacks.grouping import RankStack, Round


def test_stacks_of_asked_nodes_are_saved_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "logs" / "node0").mkdir(parents=True)
    asked = {0: ("gpu0", range(1)), 2: ("gpu2", range(2, 3))}
    evidence = Evidence(Round("guest-1", 0, 0, 0), "boom", asked)
    for node in range(3):  # node 1 was not asked
        for rank in (node, 1):  # and no node has rank 1
            stack = RankStack(rank, node, "gpu", 1, "sleeps", answered=False)
            evidence.receive(node, StackFound(0, stack))
        evidence.receive(node, StackFound(1, stack))  # of another round
    evidence.receive(0, StacksCollected(0, ("dump",)))
    late = RankStack(0, 0, "gpu", 1, "runs", answered=True)
    evidence.receive(0, StackFound(0, late))
    assert [(each.rank, each.host) for each in evidence.in_order()] == [(0, "gpu0"), (2, "gpu2")]
    assert evidence.stacks[0] != late
    evidence.save(tmp_path, EventLog(tmp_path / "events.jsonl"))
    [event] = read_events(tmp_path / "events.jsonl")
    assert (event["why"], event["ranks"], event["path"]) == ("boom", 2, "logs/node0/stacks.txt")
    assert "node 2 on gpu2" in (tmp_path / evidence.path).read_text()
