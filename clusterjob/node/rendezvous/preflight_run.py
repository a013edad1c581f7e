"""Run the preflight: measure all nodes, measure suspects again, name the slow hosts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs.events import EventLog
from clusterjob.node.options import LaunchOptions
from clusterjob.node.preflight import measures, turns
from clusterjob.node.preflight.heat_table import HeatTable, amount_text
from clusterjob.node.preflight.measures import Measure, Probe
from clusterjob.node.preflight.preflight_messages import MeasuringStarted
from clusterjob.node.preflight.turns import Step
from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.membership import Membership
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preflight_findings import differing_versions
from clusterjob.node.rendezvous.preflight_steps import PreflightSteps
from clusterjob.node.verdict import Failure, FailureKind

# Seconds since all measuring processes have started: until then, first measures begin; first
# measures end; suspects are measured again.
_FIRST_BEGIN, _FIRST_END, _AGAIN_END = 9.0, 13.5, 19.5
_MAX_PAIR_ROUNDS = 8
_MAX_RING = 32  # nodes
_CROWDED = 15  # rounds of pairs, times the nodes of one machine, which are measured in turn
_MAX_NAMED = 8  # hosts or findings in a text


@dataclass
class PreflightResult:
    """What a preflight has found.

    Attributes:
        slow: the nodes to avoid, each with the reason.
        findings: differences that make no host slow, one line each.
        table: the measured values.
        seconds: how long it took.
    """

    slow: dict[int, str] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    table: HeatTable = field(default_factory=HeatTable)
    seconds: float = 0.0


class Preflight:
    """The preflight of a job; `run` may be called again for nodes that join later.

    Args:
        topology: the node of the coordinator.
        options: --preflight, and the timeout for the start of the measuring processes.
        membership: the agents.
        events: the job's events.
        next_message: returns the next message and its sender; None after a number of seconds.
        handle: handles a message; returns an outcome if it ends the job.
        print_line: prints one line for the user.

    Attributes:
        result: what the last run has found.
        handlers: the function for each message of an agent.
    """

    def __init__(
        self,
        topology: Topology,
        options: LaunchOptions,
        membership: Membership,
        events: EventLog,
        next_message: Callable[[float], Awaitable[tuple[int, Any] | None]],
        handle: Callable[[int, Any], Outcome | None],
        print_line: Callable[[str], None],
    ) -> None:
        self._options = options
        self._peers = membership.peers
        self._events = events
        self._print_line = print_line
        self._steps = PreflightSteps(topology, membership, next_message, handle)
        self._known: dict[int, MeasuringStarted] = {}  # of all runs, for the versions
        self.result = PreflightResult()
        self.handlers = self._steps.handlers

    async def run(self, nodes: Collection[int]) -> Outcome | None:
        """Measure these nodes and set `result`; return an outcome that ends the job meanwhile.

        The values of an earlier run count in the medians.
        """
        self.result = PreflightResult()
        chosen = sorted(nodes)
        self._print_line(f"preflight: measuring {_count(chosen)}")
        self._events.add("measuring", nodes=len(chosen))
        end = await self._steps.start(chosen, self._options.join_timeout)
        begin = time.monotonic()
        self._known |= self._steps.started
        if end is None:
            end = await self._measure(begin)
        self._steps.end(chosen)
        if end is None:
            self.result.seconds = time.monotonic() - begin
            self._report(chosen)
        return end

    def refusal(self) -> Outcome | None:
        """Return the failure of a job that must not run on a slow host; None without one."""
        if not self.result.slow or self._options.preflight != "refuse":
            return None
        node = min(self.result.slow)
        named = self._slow_lines()
        more = len(named) - _MAX_NAMED
        message = f"preflight: {'; '.join(named[:_MAX_NAMED])}"
        message += f"; and {more} more hosts" if more > 0 else ""
        return outcome.failed(
            Failure.of_node(node, self._peers[node].host, message=message, kind=FailureKind.LAUNCH)
        )

    # -- steps -------------------------------------------------------------------------------------

    async def _measure(self, begin: float) -> Outcome | None:
        """Measure all nodes that have started, then the suspects again."""
        end = await self._steps.take(
            self._first_steps(), begin_until=begin + _FIRST_BEGIN, until=begin + _FIRST_END
        )
        if end is None:
            self._steps.values[_PAIRS].update(measures.of_pairs(self._steps.pairs))
            end = await self._find_slow(begin + _AGAIN_END)
            self._steps.values[_PAIRS].update(measures.of_pairs(self._steps.pairs))
        return end

    def _first_steps(self) -> list[Step]:
        started = self._steps.started
        nodes = sorted(started)
        found: list[tuple[Probe, tuple[int, ...]]] = []
        found += [(Probe.CPU, (node,)) for node in nodes]
        found += [(Probe.GPU, (node,)) for node in nodes if started[node].gpus]
        if self._steps.backend(nodes):
            crowd = max(Counter(map(self._steps.machine_of, nodes)).values())
            rounds = min(_MAX_PAIR_ROUNDS, max(3, _CROWDED // crowd))
            for pairs in turns.pair_rounds(nodes, rounds):
                found += [(Probe.PAIR, pair) for pair in pairs]
            found += [(Probe.RING, ring) for ring in turns.rings(nodes, _MAX_RING)]
        found += [(Probe.DISK, (node,)) for node in nodes]
        return self._steps.numbered(found)

    async def _find_slow(self, until: float) -> Outcome | None:
        """Measure suspects again, next to healthy nodes, and name those that are slow again."""
        left = self._suspects()
        healthy = {
            probe: self._healthy(probe, {node for measure, node in left if measure.probe is probe})
            for probe in Probe
        }
        self._steps.taken.clear()
        while left and time.monotonic() < until:
            # The smallest value of a host is enough to name it.
            worst = {node: measure for measure, node in reversed(left)}
            current = [(measure, node) for node, measure in worst.items()]
            end = await self._steps.take(self._again(current, healthy), until, until)
            if end is not None:
                return end
            for measure, node in current:
                values, compared = self._compared(measure, node, healthy[measure.probe])
                if not compared or measures.is_cleared(values, compared):
                    left.remove((measure, node))
                elif len(values) >= measures.AGAIN:
                    self._name(node, left)
            left = [(measure, node) for measure, node in left if node not in self.result.slow]
        for measure, node in left:
            values, compared = self._compared(measure, node, healthy[measure.probe])
            if node not in self.result.slow and measures.is_slow(values, compared):
                self._name(node, left)
        names = self._names()
        for measure, node in left[:_MAX_NAMED]:
            if node not in self.result.slow:
                why = f"{self._why(measure, node)} on {names[node]}"
                self.result.findings.append(f"{why}; there was no time to measure it again")
        return None

    def _name(self, node: int, left: list[tuple[Measure, int]]) -> None:
        """Name a slow host with its smallest value, and the other values that were small."""
        worst, *others = [measure for measure, one in left if one == node]
        why = self._why(worst, node)
        if others:
            why += f"; also small: {', '.join(measure.name for measure in others)}"
        self.result.slow[node] = why

    def _suspects(self) -> list[tuple[Measure, int]]:
        """Return measures and nodes with small values, the smallest first."""
        found = []
        for measure, values in self._steps.values.items():
            median = measures.median_of(values)
            if values and not median:
                error = next((value.note for value in values.values() if value.note), "no value")
                self.result.findings.append(f"{measure.name} could not be measured: {error}")
            if measure.compared:
                found += [
                    (values[node].amount / median, measures.MEASURES.index(measure), node)
                    for node in measures.suspects(values)
                    if self._is_present(node)
                ]
        return [(measures.MEASURES[index], node) for _, index, node in sorted(found)]

    def _is_present(self, node: int) -> bool:
        return node in self._steps.started and node not in self._steps.broken

    def _healthy(self, probe: Probe, suspects: Collection[int]) -> list[int]:
        """Return the nodes with which suspects are compared: two, or fewer if there are few."""
        values = self._steps.values[measures.measures_of(probe)[0]]
        present = {node: value for node, value in values.items() if self._is_present(node)}
        return measures.references(present, excluded=suspects, count=2)

    def _again(
        self, suspects: list[tuple[Measure, int]], healthy: Mapping[Probe, list[int]]
    ) -> list[Step]:
        """Return steps that measure suspects and healthy nodes next to each other."""
        groups: list[tuple[Probe, tuple[int, ...]]] = []
        for probe in dict.fromkeys(measure.probe for measure, _ in suspects):
            nodes = [node for measure, node in suspects if measure.probe is probe]
            others = healthy[probe]
            if probe is not Probe.PAIR:
                groups += [(probe, (node,)) for node in (*others[:1], *nodes, *others[1:])]
            elif len(others) > 1:
                groups += [(probe, tuple(others)), *((probe, (node, others[0])) for node in nodes)]
        return self._steps.numbered(groups)

    def _compared(
        self, measure: Measure, node: int, healthy: list[int]
    ) -> tuple[list[float], list[list[float]]]:
        """Return the later values of a suspect, and those of each healthy node or pair."""

        def taken(*nodes: int) -> list[float]:
            return self._steps.taken.get((measure, tuple(sorted(nodes))), [])

        if measure is not _PAIRS:
            return taken(node), [taken(one) for one in healthy]
        if len(healthy) < 2:
            return [], []
        return taken(node, healthy[0]), [taken(*healthy)]

    # -- result ------------------------------------------------------------------------------------

    def _why(self, measure: Measure, node: int) -> str:
        values = self._steps.values[measure]
        value, median = values[node], measures.median_of(values)
        amounts = f"{amount_text(value.amount)} of {amount_text(median)} {measure.unit}"
        note = f"; {value.note}" if value.note else ""
        return f"{measure.name} {value.amount / median:.2f} of the median ({amounts}{note})"

    def _names(self) -> dict[int, str]:
        """Return the host of each node, with the node's number if the host has several nodes."""
        hosts = {node: peer.host for node, peer in self._peers.items()}
        nodes = Counter(hosts.values())
        return {
            node: f"{host} (node {node})" if nodes[host] > 1 else host
            for node, host in hosts.items()
        }

    def _slow_lines(self) -> list[str]:
        names = self._names()
        return [f"host {names[node]}: {why}" for node, why in sorted(self.result.slow.items())]

    def _report(self, nodes: list[int]) -> None:
        """Complete the result, print it and write it into the events."""
        result = self.result
        for node, why in self._steps.broken.items():
            result.slow.setdefault(node, why)
        for node in self._steps.lost:  # its agent may have been killed: the host is not to blame
            result.slow.pop(node, None)
        names = self._names()
        measured = {node: names[node] for node in nodes if node not in self._steps.lost}
        result.findings += differing_versions(self._known, names)
        result.findings += self._steps.clocks.findings(measured)
        result.table = HeatTable.of(self._steps.values, measured)
        slow = self._slow_lines()
        for line in (
            f"preflight: {_count(nodes)} in {result.seconds:.1f} s; cells are parts of the median",
            *result.table.lines(),
            *(f"preflight: {finding}" for finding in result.findings[:_MAX_NAMED]),
            *(f"preflight: slow {line}" for line in slow[:_MAX_NAMED]),
        ):
            self._print_line(line)
        self._events.add(
            "preflight",
            seconds=round(result.seconds, 1),
            slow=slow[:_MAX_NAMED],
            findings=result.findings[:_MAX_NAMED],
            table=result.table.to_json(),
        )


[_PAIRS] = measures.measures_of(Probe.PAIR)


def _count(nodes: Collection[int]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
