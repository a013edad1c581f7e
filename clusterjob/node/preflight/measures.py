"""The measures of the preflight, and which hosts are slow: below a part of the median.

A slow host is slow again: in its first measure, and in later ones next to healthy hosts. Load that
comes and goes makes a measure smaller, never larger. So the best of several values counts, of the
suspect and of the hosts next to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

THRESHOLD = 0.7  # of the median of all nodes; a host below it is slow
# How often a suspect must be slow again: if the time is short, fewer times are enough; and if it is
# below half of the healthy nodes, even fewer.
AGAIN, _SHORT_AGAIN, _CLEAR_AGAIN = 4, 3, 2
_CLEAR = 0.5


class Probe(str, Enum):
    """A question to the nodes; each answers one or several measures."""

    CPU = "cpu"
    DISK = "disk"
    GPU = "gpu"
    PAIR = "pair"  # two nodes
    RING = "ring"  # all nodes, in groups

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Measure:
    """One measured value; larger is better.

    Attributes:
        name: its name in tables and messages.
        unit: its unit.
        probe: the question that it answers.
        compared: whether a node with a small value is slow. All nodes of a ring have the value of
            its slowest link, so it shows no host.
    """

    name: str
    unit: str
    probe: Probe
    compared: bool = True


# In the order of the values in an answer.
MEASURES = (
    Measure("matrix multiply", "GFLOP/s", Probe.CPU),
    Measure("memory", "GB/s", Probe.CPU),
    Measure("disk write", "MB/s", Probe.DISK),
    Measure("disk read", "MB/s", Probe.DISK),
    Measure("GPU matrix multiply", "GFLOP/s", Probe.GPU),
    Measure("GPU memory", "GB/s", Probe.GPU),
    Measure("all-reduce", "GB/s", Probe.PAIR),
    Measure("ring all-reduce", "GB/s", Probe.RING, compared=False),
)


def measures_of(probe: Probe) -> tuple[Measure, ...]:
    """Return the measures that answer a probe, in the order of its values."""
    return tuple(measure for measure in MEASURES if measure.probe is probe)


@dataclass(frozen=True)
class Value:
    """A measured value of a node.

    Attributes:
        amount: in the unit of the measure; 0 after an error.
        note: the device with the smallest value, or the error; empty without one.
    """

    amount: float
    note: str = ""


def values_of(probe: Probe, amounts: tuple[float, ...], error: str = "") -> dict[Measure, Value]:
    """Return the values in the answer of one node; with several GPUs, those of the slowest one."""
    measures = measures_of(probe)
    if error or not amounts or len(amounts) % len(measures):
        return dict.fromkeys(measures, Value(0.0, error or "a wrong number of values"))
    found = {}
    for index, measure in enumerate(measures):
        of_devices = amounts[index :: len(measures)]
        least = min(of_devices)
        note = f"GPU {of_devices.index(least)}" if len(of_devices) > 1 else ""
        found[measure] = Value(least, note)
    return found


def median_of(values: Mapping[int, Value]) -> float:
    """Return the median of the values of all nodes; 0 without any."""
    return statistics.median(value.amount for value in values.values()) if values else 0.0


def suspects(values: Mapping[int, Value]) -> list[int]:
    """Return the nodes with a value below `THRESHOLD` of the median of all nodes."""
    median = median_of(values)
    return sorted(node for node, value in values.items() if value.amount < THRESHOLD * median)


def of_pairs(pairs: Mapping[tuple[int, int], Value]) -> dict[int, Value]:
    """Return the value of each node: the upper median over its pairs.

    A slow node makes all its pairs slow; its partners have other pairs.
    """
    by_node: dict[int, list[Value]] = {}
    for pair, value in pairs.items():
        for node in pair:
            by_node.setdefault(node, []).append(value)
    return {
        node: sorted(own, key=lambda value: value.amount)[len(own) // 2]
        for node, own in by_node.items()
    }


def references(values: Mapping[int, Value], excluded: Collection[int], count: int) -> list[int]:
    """Return healthy nodes to compare a suspect with: those nearest to the median."""
    median = median_of(values)
    healthy = [node for node in values if node not in excluded and values[node].amount > 0]
    return sorted(healthy, key=lambda node: (abs(values[node].amount - median), node))[:count]


def is_cleared(suspect: Sequence[float], healthy: Collection[Sequence[float]]) -> bool:
    """Return whether a suspect is not slow, compared with healthy nodes measured next to it.

    A slow host is below `THRESHOLD` of the best value of each healthy node. On a busy machine, all
    values vary by more than that: a slow host is also below three quarters of the single values of
    healthy nodes.

    Args:
        suspect: its later values; without any, it stays a suspect.
        healthy: the values of each healthy node.
    """
    best = max(suspect, default=0.0)
    limit = THRESHOLD * min(max(values, default=0.0) for values in healthy)
    single = sorted(value for values in healthy for value in values)
    return best > 0 and best >= min(limit, single[len(single) // 4] if single else 0.0)


def is_slow(suspect: Sequence[float], healthy: Collection[Sequence[float]]) -> bool:
    """Return whether a suspect that was never cleared is slow, although the time has ended."""
    if len(suspect) < _CLEAR_AGAIN or not all(healthy):
        return False
    clear = max(suspect) < _CLEAR * min(map(max, healthy))
    return clear or len(suspect) >= _SHORT_AGAIN
