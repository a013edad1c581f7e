"""The phases and the events of a job on its time axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.insight.job_clock import JobClock, read_phases_of, with_attempts
from clusterjob.node.logs import events
from clusterjob.node.logs.events import Phase, PhaseBegin
from clusterjob.node.system.sanitize import sanitize

_MAX_MARKS = 200
_MAX_TEXT = 300  # characters of an event's text
# Events of which each node or connection writes one: a timeline with them would hide the others.
_MANY = ("joined", "unauthenticated", "exec", "ranks")
_UNSHOWN = ("time", "monotonic", "event", "attempt", "pid", "port", "bound", "master_port", "table")


@dataclass(frozen=True)
class Span:
    """A phase of a rank or a node on the job's time axis, in seconds."""

    phase: str
    begin: float
    end: float
    restart: int
    attempt: int
    detail: str = ""


@dataclass(frozen=True)
class Mark:
    """An event of the job: its time in seconds, its name and one line about it."""

    time: float
    name: str
    text: str


@dataclass(frozen=True)
class JobTimes:
    """The phases and the events of a job.

    Attributes:
        clock: places other times on the axis.
        end: the last time on the axis, in seconds; 0 if no time is known.
        spans: by node, the phases of each rank, and of the node itself under None.
        marks: the events, in order.
        left_out: the number of events that are not in `marks`.
        hosts: the hosts of the nodes that have joined.
    """

    clock: JobClock
    end: float
    spans: Mapping[int, Mapping[int | None, Sequence[Span]]]
    marks: Sequence[Mark]
    left_out: int
    hosts: Mapping[int, str]


def read(
    job_dir: Path, nodes: Iterable[int], sampled: Mapping[tuple[int, int], float], *, runs: bool
) -> JobTimes:
    """Return the phases and the events of a job.

    Args:
        job_dir: the job's directory.
        nodes: the nodes.
        sampled: the monotonic time of the last sample by node and attempt.
        runs: whether the job runs: the phases of its last attempt that are open last until `end`.
    """
    phases = read_phases_of(job_dir, nodes)
    told = with_attempts(events.read_job_events(job_dir))
    clock = JobClock(
        phases, told, {attempt: last for (node, attempt), last in sampled.items() if node == 0}
    )
    lasts = {key: clock.place(*key, last) for key, last in sampled.items()}
    for node, begins in phases.items():
        for begin in begins:
            time = clock.place(node, begin.attempt, begin.monotonic)
            lasts[node, begin.attempt] = max(time, lasts.get((node, begin.attempt), 0.0))
    marks, left_out = _marks_of(told, clock)
    end = max([0.0, *lasts.values(), *(mark.time for mark in marks)])
    if runs and lasts:
        newest = max(attempt for _, attempt in lasts)
        lasts |= {key: end for key in lasts if key[1] == newest}
    spans = {
        node: _spans_of(
            node,
            begins,
            clock,
            until={attempt: time for (owner, attempt), time in lasts.items() if owner == node},
        )
        for node, begins in phases.items()
    }
    return JobTimes(clock, end, spans, marks, left_out, _hosts(told))


def _hosts(told: Sequence[Mapping[str, object]]) -> dict[int, str]:
    found = {}
    for event in told:
        node, host = event.get("node_rank"), event.get("host")
        if event["event"] == "joined" and type(node) is int and isinstance(host, str):
            found[node] = host
    return found


def _spans_of(
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


def _marks_of(events: Sequence[Mapping[str, Any]], clock: JobClock) -> tuple[list[Mark], int]:
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
