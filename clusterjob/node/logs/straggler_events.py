"""The events about stragglers: ranks that the others wait for in collectives.

The coordinator adds ``straggling`` when a rank has been late for three measurements, and again
every 10 minutes; and ``caught_up`` when it is no longer late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import read_events
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize

STRAGGLING, CAUGHT_UP = "straggling", "caught_up"
_MAX_RANK, _MAX_SECONDS, _MAX_HOST = 1 << 24, 1e9, 200
_MAX_NAMED = 3  # nodes that a text names
_MAX_KEPT = 64  # stragglers that are kept of a job; a host may forge events


@dataclass(frozen=True)
class Straggler:
    """One straggler.

    Attributes:
        rank, node_rank, host: the rank.
        waited: seconds for which the others wait for it in each step.
        step: the length of a step in seconds.
    """

    rank: int
    node_rank: int
    host: str
    waited: float
    step: float

    def to_event(self) -> dict[str, Any]:
        """Return the details of the event `STRAGGLING`."""
        return {
            "rank": self.rank,
            "node_rank": self.node_rank,
            "host": self.host,
            "waited_s": round(self.waited, 4),
            "step_s": round(self.step, 4),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the straggler for a user's program."""
        return {
            "rank": self.rank,
            "node": self.node_rank,
            "host": self.host,
            "waited_s": round(self.waited, 4),
            "step_s": round(self.step, 4),
            "share": round(self.waited / self.step, 3),
        }


class StragglersNow:
    """The stragglers of a job after the events so far."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Straggler] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        kind = event.get("event")
        if kind == STRAGGLING:
            found = read(event)
            if found is not None and len(self._by_rank) < _MAX_KEPT:
                self._by_rank[found.rank] = found
        elif kind == CAUGHT_UP:
            rank = event.get("rank")
            if type(rank) is int:
                self._by_rank.pop(rank, None)
        elif kind in ("started", "stop", "ended"):
            self._by_rank.clear()

    @property
    def found(self) -> tuple[Straggler, ...]:
        """The stragglers by rank."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))


def of_job(job_dir: Path) -> tuple[Straggler, ...]:
    """Return all stragglers of the newest round of a job, as they were told the last time."""
    found: dict[int, Straggler] = {}
    for event in read_events(job_dir / EVENTS):
        if event.get("event") == "started":
            found.clear()
        elif event.get("event") == STRAGGLING and len(found) < _MAX_KEPT:
            straggler = read(event)
            if straggler is not None:
                found[straggler.rank] = straggler
    return tuple(found[rank] for rank in sorted(found))


def read(event: Mapping[str, Any]) -> Straggler | None:
    """Return the straggler of an event `STRAGGLING`; None if the event is malformed."""
    rank, node, host = event.get("rank"), event.get("node_rank"), event.get("host")
    waited, step = event.get("waited_s"), event.get("step_s")
    counts = all(type(each) is int and 0 <= each < _MAX_RANK for each in (rank, node))
    seconds = all(type(each) in (int, float) for each in (waited, step))
    if not counts or not seconds or not isinstance(host, str):
        return None
    if not 0 < step < _MAX_SECONDS or not 0 <= waited <= step:  # type: ignore[operator]
        return None
    return Straggler(rank, node, sanitize(host[:_MAX_HOST]), waited, step)  # type: ignore[arg-type]


def lines(stragglers: Iterable[Straggler]) -> list[str]:
    """Return one line for each node with stragglers, the worst one first."""
    by_node: dict[int, list[Straggler]] = {}
    for each in stragglers:
        by_node.setdefault(each.node_rank, []).append(each)
    found = []
    for own in by_node.values():
        worst = max(own, key=lambda each: each.waited)
        several = len(own) > 1
        numbers = ", ".join(ranges(sorted(each.rank for each in own)))
        of_node = f"(node {worst.node_rank}{f', {worst.host}' if worst.host else ''})"
        waits = f"the others wait {_seconds(worst.waited)} of each {_seconds(worst.step)} step"
        them = "them" if several else "it"
        line = f"rank{'s' if several else ''} {numbers} {of_node}: {waits} for {them}"
        found.append((worst.waited, line))
    return [line for _, line in sorted(found, reverse=True)]


def text(stragglers: Iterable[Straggler]) -> str:
    """Return the stragglers as one line; empty without one."""
    found = lines(stragglers)
    more = [f"{len(found) - _MAX_NAMED} more nodes"] if len(found) > _MAX_NAMED else []
    return "; ".join([*found[:_MAX_NAMED], *more])


def _seconds(value: float) -> str:
    """Format seconds with two digits or more: 12 ms, 0.42 s, 1.3 s, 15 s."""
    if value < 0.1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.{2 if value < 1 else 1 if value < 10 else 0}f} s"
