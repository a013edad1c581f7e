"""Differences between nodes that a preflight reports, but that make no host slow."""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.preflight.preflight_messages import MeasuringStarted
from clusterjob.node.system.sanitize import sanitize

_READS = 5  # of each clock; the one with the shortest round trip counts
_MAX_OFFSET = 1.0  # seconds
_MAX_NAMED = 4  # hosts in one finding


class Clocks:
    """The difference between the clock of each node and the coordinator's.

    It is measured through the connection of the agents: the node's clock, minus the time in the
    middle between question and answer.
    """

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, float, float]] = {}  # number, time, monotonic time
        self._reads: dict[int, int] = {}
        self._best: dict[int, tuple[float, float]] = {}  # by node: round trip, offset

    def asked(self, node: int, number: int, wall: float, monotonic: float) -> None:
        """Note a question."""
        self._asked[node] = (number, wall, monotonic)

    def read(self, node: int, number: int, clock: float, monotonic: float) -> bool:
        """Note an answer that has just arrived; return whether to ask again."""
        asked = self._asked.pop(node, None)
        if asked is None or asked[0] != number:
            return False
        round_trip = max(0.0, monotonic - asked[2])
        offset = clock - (asked[1] + round_trip / 2)
        self._best[node] = min((round_trip, offset), self._best.get(node, (round_trip, offset)))
        self._reads[node] = self._reads.get(node, 0) + 1
        return self._reads[node] < _READS

    def findings(self, names: Mapping[int, str]) -> list[str]:
        """Return one line for each host whose clock differs."""
        found = []
        for node, (round_trip, offset) in sorted(self._best.items()):
            if node in names and abs(offset) > _MAX_OFFSET + round_trip / 2:
                direction = "ahead of" if offset > 0 else "behind"
                found.append(
                    f"the clock of {names[node]} is {abs(offset):.1f} s {direction} node 0's"
                )
        return found


def differing_versions(
    started: Mapping[int, MeasuringStarted], names: Mapping[int, str]
) -> list[str]:
    """Return one line for each part whose version is not the same on all nodes."""
    hosts: dict[str, dict[str, list[str]]] = {}  # by part and version
    for node, message in sorted(started.items()):
        if node in names:
            for part, version in message.versions:
                of_part = hosts.setdefault(sanitize(part), {})
                of_part.setdefault(sanitize(version), []).append(names[node])
    return [
        f"{part} is not the same: "
        + ", ".join(f"{version} on {_listed(some)}" for version, some in _by_number(versions))
        for part, versions in hosts.items()
        if len(versions) > 1
    ]


def _by_number(versions: Mapping[str, list[str]]) -> list[tuple[str, list[str]]]:
    return sorted(versions.items(), key=lambda pair: -len(pair[1]))


def _listed(names: list[str]) -> str:
    if len(names) > _MAX_NAMED:
        return f"{len(names)} hosts"
    return ", ".join(names)
