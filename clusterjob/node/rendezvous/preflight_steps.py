"""Start the measuring processes of nodes, take measures in turn, and keep the values."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import count
from typing import Any

from clusterjob.node.environments.topology import Topology
from clusterjob.node.preflight import measures
from clusterjob.node.preflight import preflight_messages as messages
from clusterjob.node.preflight.measures import Measure, Probe, Value
from clusterjob.node.preflight.turns import Step, Turns
from clusterjob.node.rendezvous import ports
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preflight_findings import Clocks
from clusterjob.node.rendezvous.round_plan import store_address
from clusterjob.node.system.sanitize import sanitize

_STEP_SECONDS = 4.5  # for the answer of a node
_MEASURE_SECONDS = 0.2
_GROUP_SECONDS = 0.15
_PROCESS_SECONDS = 60.0  # after --join-timeout, a measuring process ends by itself
_GROUPS = (Probe.PAIR, Probe.RING)


class PreflightSteps:
    """The measures of the nodes.

    Args:
        topology: the node of the coordinator.
        membership: the agents.
        next_message: returns the next message and its sender; None after a number of seconds.
        handle: handles a message; returns an outcome if it ends the job.

    Attributes:
        started: what the measuring processes of this run have reported, by node.
        broken: the nodes of this run that cannot be measured, with the reason.
        lost: those of them whose agents were lost; they may have joined again.
        clocks: the clocks of the nodes.
        values: the best value of each measure and node.
        pairs: the best value of each pair of nodes.
        taken: the values of a measure with these nodes since `taken` was cleared, in order.
        handlers: the function for each message of an agent.
    """

    def __init__(
        self,
        topology: Topology,
        membership: Membership,
        next_message: Callable[[float], Awaitable[tuple[int, Any] | None]],
        handle: Callable[[int, Any], Outcome | None],
    ) -> None:
        self._topology = topology
        self._membership = membership
        self._next_message = next_message
        self._handle = handle
        self._numbers = count()
        self._stuck: set[int] = set()  # nodes that have not answered yet
        self._turns = Turns((), self.machine_of)
        self._due: dict[int, float] = {}  # when a running step is given up
        self._answers: dict[int, dict[int, messages.Measured]] = {}  # by step and node
        self.started: dict[int, messages.MeasuringStarted] = {}
        self.broken: dict[int, str] = {}
        self.lost: set[int] = set()
        self.clocks = Clocks()
        self.values: dict[Measure, dict[int, Value]] = {each: {} for each in measures.MEASURES}
        self.pairs: dict[tuple[int, int], Value] = {}
        self.taken: dict[tuple[Measure, tuple[int, ...]], list[float]] = {}
        self.handlers: dict[type, Callable[[Peer, Any], None]] = {
            messages.MeasuringStarted: self._on_started,
            messages.MeasuringEnded: self._on_ended,
            messages.Measured: self._on_measured,
            messages.ClockRead: self._on_clock_read,
        }

    async def start(self, nodes: Collection[int], timeout: float) -> Outcome | None:
        """Start the measuring processes; return an outcome that ends the job meanwhile.

        Args:
            nodes: the nodes to measure.
            timeout: seconds to wait for the processes, which may have to import torch.
        """
        self.started.clear()
        self.broken.clear()
        self.lost.clear()
        self._stuck.clear()
        address = store_address(self._topology, self._membership.peers.values())
        store = ports.listen(address, [0], alone=self._topology.nnodes == 1)
        port = int(store.getsockname()[1])
        if self._topology.node_rank not in nodes:
            store.close()  # nobody would serve it
        seconds = timeout + _PROCESS_SECONDS
        for node in nodes:
            own = node == self._topology.node_rank
            self._send(
                node,
                messages.BeginPreflightWithStore(seconds, address, port, store=store)
                if own
                else messages.BeginPreflight(seconds, address, port),
            )
            self._ask_clock(node)
        deadline = time.monotonic() + timeout
        while any(node not in self.started and node not in self.broken for node in nodes):
            left = deadline - time.monotonic()
            end = await self._receive(left) if left > 0 else None
            if end is not None or left <= 0:
                break
        for node in nodes:
            if node not in self.started:
                self.broken.setdefault(node, "the measuring process has not started")
        return end

    def end(self, nodes: Collection[int]) -> None:
        """End the measuring processes."""
        for node in nodes:
            self._send(node, messages.EndPreflight())

    def numbered(self, found: Iterable[tuple[Probe, tuple[int, ...]]]) -> list[Step]:
        """Return steps with the next numbers."""
        return [Step(next(self._numbers), probe, nodes) for probe, nodes in found]

    async def take(self, steps: list[Step], begin_until: float, until: float) -> Outcome | None:
        """Take the steps, each when its machines are free; return an outcome that ends the job.

        Args:
            steps: the steps.
            begin_until: the monotonic time after which no step begins.
            until: the monotonic time after which no answer counts.
        """
        self._turns = Turns(steps, self.machine_of)
        self._begin(self._turns.begin())
        while self._turns.running:
            moment = time.monotonic()
            if moment >= until:
                self._turns = Turns((), self.machine_of)
                break
            if moment >= begin_until:
                self._turns.drop_waiting()
            oldest = next(iter(self._turns.running))
            if self._due[oldest] <= moment:
                self._begin(self._finish(oldest))
                continue
            end = await self._receive(min(self._due[oldest] - moment, 0.5))
            if end is not None:
                return end
        return None

    def backend(self, nodes: Collection[int]) -> str:
        """Return the backend of torch.distributed that these nodes share; empty without one."""
        known = [self.started[node].backends for node in nodes if node in self.started]
        if len(nodes) < 2 or len(known) < len(nodes):
            return ""
        return next((one for one in ("nccl", "gloo") if all(one in own for own in known)), "")

    def machine_of(self, node: int) -> str:
        """Return the machine of a node: nodes of one machine are measured in turn."""
        started = self.started.get(node)
        return started.machine if started is not None and started.machine else f"node {node}"

    def _send(self, node: int, message: Any) -> None:
        self._membership.peers[node].send(message)

    async def _receive(self, timeout: float) -> Outcome | None:
        found = await self._next_message(timeout)
        if found is None:
            return None
        end = self._handle(*found)
        peer = self._membership.peers.get(found[0])
        if peer is not None and peer.lost:
            self.lost.add(peer.node_rank)
            self._on_ended(peer, messages.MeasuringEnded("its agent is lost"))
        return end

    # -- one step ----------------------------------------------------------------------------------

    def _begin(self, steps: list[Step]) -> None:
        """Ask the nodes of steps; give up at once where a node cannot answer."""
        begun = deque(steps)
        while begun:
            step = begun.popleft()
            self._due[step.number] = time.monotonic() + _STEP_SECONDS
            self._answers[step.number] = {}
            if any(node in self.broken or node in self._stuck for node in step.nodes):
                begun += self._finish(step.number)
                continue
            for rank, node in enumerate(step.nodes):
                self._send(node, self._order(step, rank))

    def _order(self, step: Step, rank: int) -> messages.MeasureHost | messages.MeasureGroup:
        if step.probe not in _GROUPS:
            return messages.MeasureHost(step.number, step.probe.value, _MEASURE_SECONDS)
        return messages.MeasureGroup(
            step.number,
            rank,
            size=len(step.nodes),
            backend=self.backend(step.nodes),
            seconds=_GROUP_SECONDS,
        )

    def _finish(self, number: int) -> list[Step]:
        """Keep the values of a step; return the steps that can begin because it has ended."""
        step, answers = self._turns.running[number], self._answers.pop(number)
        del self._due[number]
        for node in step.nodes:
            if node not in answers:
                self._stuck.add(node)
                why = self.broken.get(node, f"no answer in {_STEP_SECONDS:g} s")
                answers[node] = messages.Measured(number, (), why)
        found = {
            node: measures.values_of(step.probe, answer.values, sanitize(answer.error))
            for node, answer in answers.items()
        }
        if step.probe is Probe.PAIR:
            # Both measure the same. A node that lies can only make its own pairs slow.
            [measure] = measures.measures_of(step.probe)
            least = min((each[measure] for each in found.values()), key=lambda one: one.amount)
            pair = (min(step.nodes), max(step.nodes))
            self.pairs[pair] = max(least, self.pairs.get(pair, least), key=lambda one: one.amount)
            self.taken.setdefault((measure, pair), []).append(least.amount)
        else:
            for node, values in found.items():
                for measure, value in values.items():
                    self.taken.setdefault((measure, (node,)), []).append(value.amount)
                    best = self.values[measure].get(node, value)
                    self.values[measure][node] = max(value, best, key=lambda one: one.amount)
        return self._turns.finish(step)

    def _answer(self, number: int, node: int, message: messages.Measured) -> None:
        step = self._turns.running.get(number)
        if step is None or node not in step.nodes:
            return  # too late, or not asked
        self._answers[number].setdefault(node, message)
        if len(self._answers[number]) == len(step.nodes):
            self._begin(self._finish(number))

    # -- messages of the agents --------------------------------------------------------------------

    def _on_started(self, peer: Peer, message: messages.MeasuringStarted) -> None:
        self.started.setdefault(peer.node_rank, message)

    def _on_ended(self, peer: Peer, message: messages.MeasuringEnded) -> None:
        self.broken.setdefault(peer.node_rank, sanitize(message.why))
        for number in list(self._turns.running):
            self._answer(number, peer.node_rank, messages.Measured(number, (), message.why))

    def _on_measured(self, peer: Peer, message: messages.Measured) -> None:
        self._stuck.discard(peer.node_rank)
        self._answer(message.number, peer.node_rank, message)

    def _ask_clock(self, node: int) -> None:
        number = next(self._numbers)
        self.clocks.asked(node, number, time.time(), time.monotonic())
        self._send(node, messages.ReadClock(number))

    def _on_clock_read(self, peer: Peer, message: messages.ClockRead) -> None:
        seconds, moment = message.microseconds / 1e6, time.monotonic()
        if self.clocks.read(peer.node_rank, message.number, seconds, moment):
            self._ask_clock(peer.node_rank)
