"""The node of an SSH job's coordinator, which decides about the status of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterjob.backends.ssh.status import coordinator_node
from clusterjob.core.records import Record
from clusterjob.core.spec import JobSpec
from clusterjob.node.logs.events import EventLog
from clusterjob.node.program import Program


def job(tmp_path: Path, restarts: int, *names: str) -> Record:
    for name in names:
        EventLog(tmp_path / name).add("started")
    spec = JobSpec(Program("command", "true"), tmp_path, max_restarts=restarts)
    return Record(
        "job-1", "job", "ssh", "ssh", tmp_path, nodes=3, submitted_at="", spec=spec.to_json()
    )


@pytest.mark.parametrize(
    ("restarts", "names", "node"),
    [
        (1, (), 0),
        (1, ("events.jsonl", "events.1.node2.jsonl"), 2),
        (1, ("events.jsonl", "events.10.node1.jsonl", "events.2.node2.jsonl"), 1),
        (1, ("events.jsonl", "events.1.node9.jsonl"), 2),  # no such node
        (0, ("events.jsonl", "events.1.node2.jsonl"), 0),  # a host claims it
    ],
)
def test_coordinator_is_on_the_node_of_the_last_events(
    tmp_path: Path, restarts: int, names: tuple[str, ...], node: int
) -> None:
    assert coordinator_node(job(tmp_path, restarts, *names), 3) == node
