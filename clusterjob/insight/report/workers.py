"""Place the phases of nodes and ranks, and the events, on the job's time axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.insight.job_clock import MAX_RANK, JobClock
from clusterjob.insight.report.data import Mark, Rank, Span
from clusterjob.node.logs.log_files import FILE_NAME, file_names, node_directory
from clusterjob.node.logs.phases import Phase, PhaseBegin
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, Verdict

_OF_NODE = ("setup", "import", "rendezvous")  # phases of a node before its workers start
_MAX_MARKS = 200
_MAX_TEXT = 300  # characters of an event's text
# Events of which each node or connection writes one: a timeline with them would hide the others.
_MANY = ("joined", "unauthenticated", "missing", "stragglers", "exec", "ranks")
_UNSHOWN = ("time", "monotonic", "event", "attempt", "pid", "port", "bound", "master_port")


def spans_of(
    node: int, begins: Sequence[PhaseBegin], clock: JobClock, until: Mapping[int, float]
) -> dict[int | None, list[Span]]:
    """Return the phases of each rank of a node, and of the node itself under None.

    Args:
        node: the node.
        begins: the begins of its phases.
        clock: the job's clock.
        until: when the last phase of each attempt ends, unless it is `Phase.ENDED`.
    """
    found: dict[int | None, list[Span]] = {}
    by_rank: dict[int | None, list[PhaseBegin]] = {}
    for begin in begins:
        by_rank.setdefault(begin.rank, []).append(begin)
    for rank, own in by_rank.items():
        placed = sorted(
            ((clock.place(node, one.attempt, one.monotonic), one) for one in own),
            key=lambda pair: (pair[1].attempt, pair[0]),
        )
        spans = found.setdefault(rank, [])
        for index, (time, begin) in enumerate(placed):
            follows = index + 1 < len(placed) and placed[index + 1][1].attempt == begin.attempt
            end = placed[index + 1][0] if follows else max(time, until.get(begin.attempt, time))
            spans.append(
                Span(
                    str(begin.phase),
                    time,
                    time if begin.phase is Phase.ENDED else end,
                    restart=begin.restart,
                    attempt=begin.attempt,
                    detail=sanitize(begin.detail),
                )
            )
    return found


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


def marks_of(events: Sequence[Mapping[str, Any]], clock: JobClock) -> tuple[list[Mark], int]:
    """Return the events to show, and the number of those that are left out."""
    wanted = [event for event in events if event["event"] not in _MANY]
    left = len(wanted) - _MAX_MARKS
    if left > 0:  # the first and the last ones explain most
        wanted = wanted[: _MAX_MARKS // 2] + wanted[-_MAX_MARKS // 2 :]
    marks = [
        Mark(
            clock.place(0, event["attempt"], event["monotonic"]),
            sanitize(event["event"][:40]),
            _text(event),
        )
        for event in wanted
    ]
    return sorted(marks, key=lambda mark: mark.time), max(0, left)


def _text(event: Mapping[str, Any]) -> str:
    parts = []
    for name, value in event.items():
        if name in _UNSHOWN or value in (None, "", []):
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(shown if name in ("why", "reason", "text") else f"{name} {shown}")
    return sanitize("; ".join(parts))[:_MAX_TEXT]
