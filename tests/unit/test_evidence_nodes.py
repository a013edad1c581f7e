"""Which nodes are asked for the stacks of their ranks before a round is stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.node.logs.events import EventLog, read_events
from clusterjob.node.rendezvous.evidence import MOST_NODES, Evidence
from clusterjob.node.rendezvous.membership import Peer
from clusterjob.node.rendezvous.stack_messages import CollectStacks, StackFound, StacksCollected
from clusterjob.node.stacks.grouping import RankStack, Round


@pytest.mark.parametrize(
    ("nnodes", "failed", "asked"),
    [(MOST_NODES, 3, MOST_NODES), (8192, 4001, 129), (8192, 0, 128), (8192, None, 8192)],
)
def test_after_failure_of_large_job_some_nodes_are_asked(
    tmp_path: Path, nnodes: int, failed: int | None, asked: int
) -> None:
    (tmp_path / "logs" / "node0").mkdir(parents=True)
    questions: dict[int, Any] = {}
    membership = SimpleNamespace(peers={})
    for node in range(nnodes):
        membership.peers[node] = Peer(
            node, f"gpu{node}", pid=1, nproc=1, heard_at=0.0,
            send=lambda message, node=node: questions.setdefault(node, message),
        )  # fmt: skip
    events = EventLog(tmp_path / "events.jsonl")
    evidence = Evidence(
        Round("guest-1", 0, 0, 0),
        membership,  # type: ignore[arg-type]
        job_dir=tmp_path,
        events=events,
        local_rank=lambda _node, _rank: 0,
    )
    evidence.ask(range(nnodes), "boom", failed)
    assert abs(len(questions) - asked) <= 1
    assert failed is None or failed in questions
    assert max(questions) >= nnodes - nnodes // MOST_NODES - 2
    wanted = CollectStacks(0, 1.5, 0.5 if failed is None else 0.0)
    assert set(questions.values()) == {wanted}
    for node in sorted(questions):
        assert not evidence.complete
        peer = membership.peers[node]
        stack = RankStack(node, node, "gpu", 1, "sleeps", answered=False)
        evidence.handlers[StackFound](peer, StackFound(0, stack))
        evidence.handlers[StacksCollected](peer, StacksCollected(0))
    assert evidence.complete
    evidence.save()
    [event] = read_events(tmp_path / "events.jsonl")
    some = f" (stacks of {len(questions)} of 8192 nodes)"
    assert event["why"] == "boom" + (some if len(questions) < nnodes else "")
    assert (event["ranks"], event["path"]) == (len(questions), "logs/node0/stacks.txt")
