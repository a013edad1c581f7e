"""Check that a job has the parts that the user names: nodes, ranks, an element of an array."""

from __future__ import annotations

from collections.abc import Iterable

from clusterjob.core.records import Record
from clusterjob.errors import UsageError
from clusterjob.node.logs.events import read_job_events

_COUNTS = range(1, 1025)  # possible numbers of workers of a node


def check_single(record: Record, what: str) -> None:
    """Refuse an array.

    Args:
        record: the job.
        what: what each element has for itself, such as ``output``.

    Raises:
        UsageError: the job is an array.
    """
    if record.array is not None:
        raise UsageError(
            f"job {record.job_id} is an array: each element has its own {what}",
            f"name one, such as {record.job_id}_{record.array['indices'][0]}",
        )


def check_nodes(record: Record, nodes: Iterable[int] | None) -> None:
    """Refuse nodes that the job does not have.

    Raises:
        UsageError: there is no such node.
    """
    if (highest := max(nodes or (), default=0)) >= record.nodes:
        raise _missing(record, "node", highest, count=record.nodes)


def check_ranks(record: Record, ranks: Iterable[int] | None, world_size: int | None) -> None:
    """Refuse ranks that the job does not have.

    Args:
        record: the job.
        ranks: the ranks.
        world_size: the number of ranks; None if it is not known.

    Raises:
        UsageError: there is no such rank.
    """
    if world_size is not None and (highest := max(ranks or (), default=0)) >= world_size:
        raise _missing(record, "rank", highest, count=world_size)


def world_size(record: Record) -> int | None:
    """Return the largest number of ranks; None if each node sets its own number of workers."""
    job = record.job
    return None if job.nproc_is_default else (record.nodes - job.spares) * job.nproc_per_node


def nodes_with_workers(record: Record) -> list[int]:
    """Return the nodes that run workers now, or did at the end, in the order of their ranks.

    In a job with spare nodes, or one that shrinks and grows, they differ from round to round.
    """
    job = record.job
    nodes = list(range(record.nodes - job.spares))
    if not job.spares and job.min_nodes is None:
        return nodes
    for event in read_job_events(record.job_dir):
        if event.get("event") == "started" and isinstance(event.get("nodes"), list):
            # A host has written the events.
            nodes = [node for node in event["nodes"] if node in range(record.nodes)] or nodes
    return nodes


def nodes_of_ranks(record: Record) -> list[int]:
    """Return the node of each rank, as the job or its events say."""
    counts = {
        str(event.get("node_rank")): event["nproc"]
        for event in read_job_events(record.job_dir)
        if event.get("event") == "joined" and event.get("nproc") in _COUNTS  # a host has written it
    }
    usual = record.job.nproc_per_node
    nodes = nodes_with_workers(record)
    return [node for node in nodes for _ in range(counts.get(str(node), usual))]


def _missing(record: Record, part: str, number: int, count: int) -> UsageError:
    return UsageError(
        f"job {record.job_id} has no {part} {number}",
        f"its {part}s are 0 to {count - 1}" if count > 1 else f"its only {part} is 0",
    )
