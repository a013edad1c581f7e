"""Run a job on another number of nodes while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from clusterjob.backends import base
from clusterjob.core import job_parts, polling
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node.logs.events import read_job_events
from clusterjob.node.verdict import JobState

_ANSWER_SECONDS = 30.0  # the coordinator looks every 2 s; a host may be polled every few seconds
_PAUSE = 0.2  # seconds between two polls for the answer


@dataclass
class _Nodes:
    """The nodes of a job by its events, which hosts have written.

    Attributes:
        joined: the nodes whose agents are alive.
        working: the nodes that run workers, in the order of their ranks.
        answers: the answers to requests.
    """

    joined: set[int] = field(default_factory=set)
    working: list[int] = field(default_factory=list)
    answers: list[tuple[bool, bool]] = field(default_factory=list)

    @classmethod
    def of(cls, record: Record) -> _Nodes:
        found = cls()
        last = 0
        for event in read_job_events(record.job_dir):
            kind, node, nodes = event.get("event"), event.get("node_rank"), event.get("nodes")
            if kind == "joined" and type(node) is int and node in range(record.nodes):
                found.joined.add(node)
                last = node
            elif kind == "lost":
                found.joined.discard(node)
            elif kind == "listening":  # a coordinator has begun; its own node has joined before
                found.joined = {last}
            elif kind == "started" and isinstance(nodes, list):
                found.working = nodes
            elif kind == "resize":
                found.answers.append((event.get("accepted") is True, event.get("changes") is True))
        return found


def resize(record: Record, nodes: int) -> str:
    """Let a running job go on with another number of nodes; return what the job answers.

    The workers are stopped and start again; this does not count for --max-restarts.

    Raises:
        UsageError: the job is not elastic, does not run, or cannot have this number of nodes.
        ClusterJobError: the job cannot be reached, or does not answer.
    """
    job_parts.check_single(record, "nodes")
    job, backend = record.job, base.instance(record.backend)
    if job.min_nodes is None or not isinstance(backend, base.Resizer):
        raise UsageError(
            f"job {record.job_id} has a fixed number of nodes: {job.working_nodes}",
            "submit it with --nodes MIN:MAX to change the number while it runs",
        )
    status = polling.status(record)
    if status.state is not JobState.RUNNING:
        raise UsageError(
            f"job {record.job_id} does not run: it is {status.state}",
            f"`clusterjob status {record.job_id}` shows its state",
        )
    before = _Nodes.of(record)
    _check(record, nodes, before)
    backend.resize(record, nodes)
    end = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < end:
        polling.status(record)
        answers = _Nodes.of(record).answers[len(before.answers) :]
        if answers:
            return _answer(record, nodes, *answers[-1])
        time.sleep(_PAUSE)
    raise ClusterJobError(
        f"job {record.job_id} does not answer the request",
        f"`clusterjob status {record.job_id}` shows its state",
    )


def _check(record: Record, nodes: int, now: _Nodes) -> None:
    """Refuse a number of nodes that the job cannot have."""
    least, most = record.job.min_nodes, record.job.working_nodes
    if not (least or 1) <= nodes <= most:
        raise UsageError(
            f"{nodes} nodes: job {record.job_id} was submitted with --nodes {least}:{most}",
            f"give a number from {least} to {most}",
        )
    if nodes > len(now.joined):
        raise UsageError(
            f"{nodes} nodes: {len(now.joined)} nodes of job {record.job_id} are available now",
            "a lost node can be used again when its agent has joined again",
        )


def _answer(record: Record, nodes: int, accepted: bool, changes: bool) -> str:  # noqa: FBT001
    count = f"{nodes} node{'s' * (nodes > 1)}"
    if not accepted:
        raise ClusterJobError(f"job {record.job_id} cannot run on {count}: a node was lost")
    if not changes:
        return f"job {record.job_id} runs on {count} already"
    return f"job {record.job_id}: its workers start again on {count}"
