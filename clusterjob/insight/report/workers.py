"""Find the ranks of a job, with their phases and failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterjob.insight.job_clock import MAX_RANK
from clusterjob.insight.job_times import Span
from clusterjob.insight.report.data import Rank
from clusterjob.node.logs.log_files import FILE_NAME, file_names, node_directory
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, Verdict

_OF_NODE = ("setup", "import", "rendezvous")  # phases of a node before its workers start


def ranks_of(
    job_dir: Path,
    nodes: Iterable[int],
    spans: Mapping[int, Mapping[int | None, Sequence[Span]]],
    verdict: Verdict | None,
    sampled: Mapping[int, Iterable[int]],
) -> list[Rank]:
    """Return all ranks that have a phase, a log file, a sample or a failure.

    Args:
        job_dir: the job's directory.
        nodes: the nodes.
        spans: the phases of each node's ranks.
        verdict: the job's verdict.
        sampled: the ranks that each node has sampled.
    """
    node_of: dict[int, int] = {}
    for node in nodes:
        own = {rank for rank in spans.get(node, {}) if rank is not None} | {*sampled.get(node, ())}
        for name in file_names(node_directory(job_dir, node)):
            match = FILE_NAME.fullmatch(name)
            if match is not None and match["rank"] and int(match["rank"]) < MAX_RANK:
                own.add(int(match["rank"]))
        for rank in own:
            node_of.setdefault(rank, node)
    failures: dict[int, Failure] = {}
    root = verdict.failure if verdict is not None else None
    for failure in (root, *(verdict.consequences if verdict is not None else ())):
        if failure is not None and failure.rank is not None and 0 <= failure.rank < MAX_RANK:
            failures.setdefault(failure.rank, failure)
            node_of.setdefault(failure.rank, failure.node_rank)
    return [
        Rank(
            rank,
            node,
            spans=_with_start(spans.get(node, {}).get(None, ()), spans.get(node, {}).get(rank, ())),
            failed=root is not None and rank == root.rank,
            message=sanitize(failures[rank].message) if rank in failures else "",
            consequence=rank in failures and failures[rank].effect,
        )
        for rank, node in sorted(node_of.items())
    ]


def _with_start(node: Sequence[Span], rank: Sequence[Span]) -> list[Span]:
    """Return the phases of a rank, after those of its node before each attempt's first worker."""
    first: dict[int, float] = {}
    for span in rank:
        first.setdefault(span.attempt, span.begin)
    before = [
        replace(span, end=min(span.end, first[span.attempt]))
        for span in node
        if span.phase in _OF_NODE and span.begin < first.get(span.attempt, 0.0)
    ]
    return sorted([*before, *rank], key=lambda span: span.begin)
