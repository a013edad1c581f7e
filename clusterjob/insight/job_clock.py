"""Place the times of a job's nodes on one axis, without comparing the clocks of hosts.

Each node measures with its own monotonic clock. An event that all nodes see at the same moment
aligns two clocks: the ranks of a round form their first group together, within milliseconds.
Without a group, it is the start of the round's workers, which follows one message of the
coordinator. The axis is node 0's clock. Attempts follow each other with a short gap: no node
measured the time in the queue between them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import Phase, PhaseBegin, read_phases

_GAP = 0.02  # between two attempts, as a part of the first one's duration
_SMALLEST_GAP = 1.0  # seconds
# Seconds by which another node may begin before node 0, or end after it. A host that records any
# time must not stretch the axis so that nothing else can be seen.
_MARGIN = 600.0
_MAX_ATTEMPTS = 1000
_MAX_EVENTS = 100_000
MAX_RANK = 1 << 16

# Monotonic times of events that all nodes see, by kind (0: the first group is formed, 1: the
# workers start) and restart.
_Common = dict[tuple[int, int], float]
_FORMED, _START = 0, 1


class JobClock:
    """Convert a node's monotonic times to seconds since the begin of the job.

    Args:
        phases: the begins of phases by node.
        events: the coordinator's events, with their ``attempt`` (see `with_attempts`).
        ends: the last monotonic time that is known of each attempt's node 0, by attempt, if it is
            later than its phases and events.

    Attributes:
        unaligned: the nodes that saw no event together with node 0; their first record is placed
            at the begin of the attempt.
    """

    def __init__(
        self,
        phases: Mapping[int, Sequence[PhaseBegin]],
        events: Sequence[Mapping[str, Any]],
        ends: Mapping[int, float] | None = None,
    ) -> None:
        self.unaligned: set[int] = set()
        self._shifts: dict[tuple[int, int], float] = {}  # (node, attempt) -> node 0's clock
        self._begins: dict[int, float] = {}  # attempt -> its begin by node 0's clock
        self._bases: dict[int, float] = {}  # attempt -> its begin on the axis
        self._limits: dict[int, float] = {}  # attempt -> the last possible time on the axis
        records: dict[int, dict[int, list[PhaseBegin]]] = {}
        for node, begins in phases.items():
            for begin in begins:
                records.setdefault(begin.attempt, {}).setdefault(node, []).append(begin)
        told: dict[int, list[Mapping[str, Any]]] = {}
        for event in events:
            told.setdefault(event["attempt"], []).append(event)
        base = 0.0
        for attempt in sorted({*records, *told})[:_MAX_ATTEMPTS]:
            first, last, latest = self._align(
                attempt,
                records.get(attempt, {}),
                told.get(attempt, []),
                end=(ends or {}).get(attempt),
            )
            self._begins[attempt], self._bases[attempt] = first, base
            self._limits[attempt] = base + latest - first
            base += last - first + max(_SMALLEST_GAP, _GAP * (last - first))

    @property
    def attempts(self) -> list[int]:
        """The known attempts."""
        return sorted(self._bases)

    def begin(self, attempt: int) -> float:
        """Return the begin of an attempt on the axis; 0 if the attempt is not known."""
        return self._bases.get(attempt, 0.0)

    def place(self, node: int, attempt: int, monotonic: float) -> float:
        """Return the seconds from the begin of the job to a time of a node's clock."""
        begin = self._begins.setdefault(attempt, monotonic)
        base = self._bases.setdefault(attempt, 0.0)
        if (node, attempt) not in self._shifts:
            if node:
                self.unaligned.add(node)
            self._shifts[node, attempt] = begin - monotonic if node else 0.0
        time = monotonic + self._shifts[node, attempt] - begin + base
        return max(base, min(time, self._limits.get(attempt, math.inf)))

    def _align(
        self,
        attempt: int,
        records: Mapping[int, Sequence[PhaseBegin]],
        events: Sequence[Mapping[str, Any]],
        end: float | None,
    ) -> tuple[float, float, float]:
        """Align the nodes of an attempt; return its begin and end by node 0's clock.

        The third time is the last one that any node may have; infinity if it is unknown.
        """
        own = _common_events(records.get(0, ())) or {
            (_START, event["restart"]): event["monotonic"]
            for event in reversed(events)
            if event.get("event") == "started" and type(event.get("restart")) is int
        }
        times = [event["monotonic"] for event in events]
        times += [begin.monotonic for begin in records.get(0, ())]
        times += [] if end is None else [end]
        first, last = (min(times), max(times)) if times else (math.inf, math.inf)
        others = []  # the times of other nodes
        late = []
        self._shifts[0, attempt] = 0.0
        for node, begins in records.items():
            seen = _common_events(begins)
            common = sorted(own.keys() & seen.keys())
            if node and not common:
                late.append((node, begins))
            elif node:
                shift = own[common[0]] - seen[common[0]]
                self._shifts[node, attempt] = shift
                others += [begin.monotonic + shift for begin in begins]
        if not times:  # nothing of node 0 is known: the first node's clock takes its place
            others = [begin.monotonic for _, begins in late[:1] for begin in begins]
            first = min(others)
        for node, begins in late:
            shift = first - min(begin.monotonic for begin in begins)
            self._shifts[node, attempt] = shift
            self.unaligned.add(node)
            others += [begin.monotonic + shift for begin in begins]
        ended = end is not None or any(event.get("event") == "ended" for event in events)
        latest = last + _MARGIN if ended else math.inf
        times += [max(first - _MARGIN, min(time, latest)) for time in others]
        return min(times), max(times), latest


def _common_events(begins: Iterable[PhaseBegin]) -> _Common:
    """Return when a node saw each event that all nodes see, by its own clock."""
    found: _Common = {}
    forming: set[tuple[int, int]] = set()  # rank and round

    def note(kind: int, begin: PhaseBegin) -> None:
        key = kind, begin.restart
        found[key] = min(begin.monotonic, found.get(key, begin.monotonic))

    for begin in begins:
        if begin.rank is None:
            continue
        note(_START, begin)
        if begin.phase is Phase.INIT:
            forming.add((begin.rank, begin.restart))
        elif begin.phase is Phase.RUNNING and (begin.rank, begin.restart) in forming:
            note(_FORMED, begin)
    return found


def with_attempts(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the valid events, each with the number of its attempt.

    Only some events name their attempt. The others belong to the attempt whose ``started`` follows
    them, or to the last one; ``ended`` ends an attempt.
    """
    found: list[dict[str, Any]] = []
    attempt, open_from = 0, 0
    for event in itertools.islice(events, _MAX_EVENTS):
        time, name = event.get("monotonic"), event.get("event")
        if isinstance(time, bool) or not isinstance(time, (int, float)):
            continue
        if not isinstance(name, str) or not 0 <= time < 1e12:
            continue
        number = event.get("attempt")
        if type(number) is int and 0 <= number < _MAX_ATTEMPTS and number != attempt:
            attempt = number
            for earlier in found[open_from:]:
                earlier["attempt"] = attempt
        found.append({**event, "attempt": attempt})
        if name in ("started", "ended"):
            open_from = len(found)
        if name == "ended":
            attempt += 1
    return found


def read_phases_of(job_dir: Path, nodes: Iterable[int]) -> dict[int, list[PhaseBegin]]:
    """Return the begins of phases by node; a node without any is left out."""
    found = {}
    for node in nodes:
        begins = [
            begin
            for begin in read_phases(job_dir, node)
            if 0 <= begin.monotonic < 1e12 and (begin.rank is None or 0 <= begin.rank < MAX_RANK)
        ]
        if begins:
            found[node] = begins
    return found
