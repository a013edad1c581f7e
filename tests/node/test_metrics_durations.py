"""The durations in a node's end record, from the phases of the node and of its ranks."""

from __future__ import annotations

from clusterjob.node.agent.node_workers import durations
from clusterjob.node.logs.events import Phase, PhaseBegin


def begins(*rows: tuple[Phase, int | None, int, float]) -> list[PhaseBegin]:
    """Return begins of phases; the wall clock jumps, and nothing depends on it."""
    return [
        PhaseBegin(phase, rank, restart, attempt=1, time=at * -7, monotonic=at)
        for phase, rank, restart, at in rows
    ]


def test_durations_come_from_phases_by_the_monotonic_clock() -> None:
    found = begins(
        (Phase.SETUP, None, 0, 990.0),
        (Phase.RUNNING, None, 0, 1010.0),
        (Phase.RUNNING, 0, 0, 1012.0),
        (Phase.RUNNING, 1, 0, 1015.0),
        (Phase.ENDED, 1, 0, 1055.0),
        (Phase.ENDED, 0, 0, 1056.0),
        (Phase.RUNNING, None, 1, 1060.0),
        (Phase.RUNNING, 0, 1, 1064.0),
        (Phase.RUNNING, 1, 1, 1065.0),
        (Phase.ENDED, 0, 1, 1160.0),
        (Phase.ENDED, 1, 1, 1170.0),
    )
    found.append(PhaseBegin(Phase.RUNNING, 1, 1, 1, time=0, monotonic=1150, detail="first output"))
    assert durations(found, 1000.0, 1172.0) == {
        "wall": 182.0,
        "waited": 20.0,
        "startup": 25.0,
        "restarts": 1,
        "restart_seconds": 10.0,
        "ran": {"0": 100.0, "1": 110.0},
    }


def test_durations_without_phases_are_those_of_the_agent() -> None:
    none = {"startup": None, "restarts": 0, "restart_seconds": 0.0, "ran": {}}
    assert durations([], 1000.0, 1004.0) == none | {"wall": 4.0, "waited": 4.0}
    found = durations(begins((Phase.RUNNING, None, 0, 1010.0)), 1000.0, 1030.0)
    assert (found["wall"], found["waited"], found["startup"]) == (30.0, 10.0, 10.0)
