"""The coordinator's part of the preflight, with simulated agents: turns, measures, findings."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.node.environments.topology import Topology
from clusterjob.node.options import LaunchOptions
from clusterjob.node.preflight import measures, turns
from clusterjob.node.preflight import preflight_messages as messages
from clusterjob.node.preflight.heat_table import HeatTable, is_slow
from clusterjob.node.preflight.measures import Probe, Value
from clusterjob.node.preflight.turns import Step, Turns
from clusterjob.node.program import Program
from clusterjob.node.rendezvous.messages import FROM_AGENT, ConnectionLost
from clusterjob.node.rendezvous.preflight_findings import Clocks, differing_versions
from clusterjob.node.rendezvous.preflight_run import Preflight
from clusterjob.node.system.codec import MalformedMessageError

VERSIONS = (("Python", "3.12.1"), ("torch", "2.13.0"))
# Host and amounts of each answer: matrix multiply and memory, disk write and read.
Answer = Callable[[int, Any], "messages.Measured | None"]


# -- turns -----------------------------------------------------------------------------------------


def take_all(steps: list[Step], machine_of: Callable[[int], str]) -> tuple[int, list[int]]:
    """Take all steps; return the largest number of steps at a time, and their order."""
    taken = Turns(steps, machine_of)
    taken.begin()
    most, order = 0, []
    while taken.running:
        machines = [machine_of(n) for step in taken.running.values() for n in step.nodes]
        used = [set(map(machine_of, step.nodes)) for step in taken.running.values()]
        assert sum(map(len, used)) == len(set(machines)), "two steps use one machine"
        most = max(most, len(taken.running))
        step = random.choice(list(taken.running.values()))
        order.append(step.number)
        taken.finish(step)
    return most, order


def steps_of(nodes: int, rounds: int = 3) -> list[Step]:
    groups = [(Probe.CPU, (node,)) for node in range(nodes)]
    for one in turns.pair_rounds(range(nodes), rounds):
        groups += [(Probe.PAIR, pair) for pair in one]
    return [Step(number, *group) for number, group in enumerate(groups)]


def test_nodes_of_one_machine_are_measured_in_turn() -> None:
    steps = steps_of(5)
    assert take_all(steps, lambda _: "m") == (1, [step.number for step in steps])


@pytest.mark.parametrize("per_machine", [1, 2, 3])
def test_every_step_is_taken_once_and_machines_work_at_the_same_time(per_machine: int) -> None:
    steps = steps_of(12)
    most, order = take_all(steps, lambda node: str(node // per_machine))
    assert sorted(order) == [step.number for step in steps]
    assert most >= 12 // per_machine


def test_waiting_steps_are_dropped() -> None:
    taken = Turns(steps_of(4), lambda _: "m")
    [first] = taken.begin()
    taken.drop_waiting()
    assert taken.finish(first) == []
    assert not taken.running


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 33])
def test_pair_rounds_are_a_tournament(nodes: int) -> None:
    rounds = turns.pair_rounds(range(nodes), 100)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    assert len(turns.pair_rounds(range(nodes), 1)) == 1


@pytest.mark.parametrize(("nodes", "sizes"), [(1, []), (2, [2]), (32, [32]), (33, [17, 16])])
def test_rings_have_at_most_32_nodes(nodes: int, sizes: list[int]) -> None:
    found = turns.rings(range(nodes), 32)
    assert [len(ring) for ring in found] == sizes


# -- measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_slow_link_belongs_to_the_node_whose_pairs_are_all_slow(nodes: int) -> None:
    pairs = {
        (a, b): Value(0.1 if b == nodes - 1 else 1.0)
        for a in range(nodes)
        for b in range(a + 1, nodes)
    }
    assert measures.suspects(measures.of_pairs(pairs)) == [nodes - 1]


def test_value_of_a_host_is_that_of_its_slowest_gpu() -> None:
    multiply, memory = measures.measures_of(Probe.GPU)
    found = measures.values_of(Probe.GPU, (900.0, 2.0, 300.0, 2.1))
    assert found == {multiply: Value(300.0, "GPU 1"), memory: Value(2.0, "GPU 0")}
    wrong = measures.values_of(Probe.GPU, (900.0,))
    assert wrong[multiply] == Value(0.0, "a wrong number of values")


def test_suspect_is_cleared_by_one_value_or_if_the_others_were_slow_too() -> None:
    assert measures.is_cleared([0.3, 0.8], [[1.0], [1.1]])
    assert measures.is_cleared([0.3], [[0.4], [1.0]])
    varied = [[1.0, 0.2], [0.9, 0.35]]
    assert measures.is_cleared([0.3, 0.4], varied), "a busy machine: values vary"
    assert not measures.is_cleared([0.3, 0.4], [[1.0, 0.2], [0.9, 0.8]])
    assert not measures.is_cleared([0.3, 0.4], [[1.0, 0.5], [0.9]])
    assert not measures.is_cleared([], [[1.0]])
    assert not measures.is_cleared([0.0], [[0.0]])


def test_short_time_is_enough_for_a_clear_difference() -> None:
    assert measures.is_slow([0.3, 0.4], [[1.0, 0.5], [0.9]])
    assert not measures.is_slow([0.3, 0.6], [[1.0], [0.9]])
    assert measures.is_slow([0.3, 0.6, 0.5], [[1.0], [0.9]])
    assert not measures.is_slow([0.3], [[1.0], [0.9]])
    assert not measures.is_slow([0.3, 0.3, 0.3], [[1.0], []])


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), -1.0, 1e308, "1", True, None])
def test_impossible_amount_is_refused(amount: Any) -> None:
    data = FROM_AGENT.encode(messages.Measured(1, (1.0,)))
    assert FROM_AGENT.decode(data) == messages.Measured(1, (1.0,))
    with pytest.raises(MalformedMessageError):
        FROM_AGENT.decode(data | {"values": [amount]})


# -- table and findings ----------------------------------------------------------------------------


def table(amounts: dict[int, float]) -> HeatTable:
    values = {measures.MEASURES[0]: {node: Value(amount) for node, amount in amounts.items()}}
    return HeatTable.of(values, {node: f"gpu{node}" for node in amounts})


def test_table_shows_parts_of_the_median_and_survives_json() -> None:
    made = table({0: 100.0, 1: 110.0, 2: 31.0})
    assert made.lines() == [
        "         matrix multiply",
        "median       100 GFLOP/s",
        "gpu0              1.00 █",
        "gpu1              1.10 █",
        "gpu2              0.31 ▂",
    ]
    assert [is_slow(cells[0]) for _, cells in made.rows] == [False, False, True]
    assert HeatTable.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_table_of_many_hosts_keeps_the_slowest() -> None:
    made = table({node: 1.0 if node != 700 else 0.1 for node in range(900)})
    assert len(made.rows) == 500
    lines = made.lines()
    assert len(lines) == 19
    assert lines[2].startswith("gpu700")
    assert lines[-1] == "884 more hosts are not shown"


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [["gpu0", [1.0, 2.0]]]},
        {"rows": [["gpu0", [-1.0]]]},
        {"rows": [["gpu0", ["1"]]]},
        {"rows": [[7, [1.0]]]},
        {"rows": 3},
        {"hosts": "many"},
        {"columns": [["a"]]},
    ],
)
def test_forged_table_is_empty(change: dict[str, Any]) -> None:
    assert HeatTable.from_json(table({0: 1.0}).to_json() | change) == HeatTable()
    assert HeatTable.from_json(None) == HeatTable()


def test_forged_host_name_is_harmless() -> None:
    [(name, _)] = HeatTable.from_json(
        table({0: 1.0}).to_json() | {"rows": [["\x1b]0;x\x07" + "y" * 500, [1.0]]]}
    ).rows
    assert "\x1b" not in name
    assert len(name) <= 80


def test_clock_with_an_offset_is_reported_by_the_shortest_round_trip() -> None:
    clocks, names = Clocks(), {0: "a", 1: "b"}
    for node, offset in ((0, 0.2), (1, -30.0)):
        for number, trip in enumerate((8.0, 0.1)):
            clocks.asked(node, number, 1000.0, 50.0)
            assert clocks.read(node, number, 1000.0 + trip / 2 + offset, 50.0 + trip)
    assert not clocks.read(1, 7, 0.0, 51.0), "an answer that nobody has asked for"
    assert clocks.findings(names) == ["the clock of b is 30.0 s behind node 0's"]


def test_differing_versions_are_reported_but_equal_ones_are_not() -> None:
    started = {
        node: messages.MeasuringStarted(
            "m", 0, (), versions=(*VERSIONS[:1], ("torch", "2.12.1" if node == 3 else "2.13.0"))
        )
        for node in range(6)
    }
    assert differing_versions(started, {node: f"gpu{node}" for node in range(6)}) == [
        "torch is not the same: 2.13.0 on 5 hosts, 2.12.1 on gpu3"
    ]


# -- whole runs with simulated agents --------------------------------------------------------------


class Simulated:
    """Agents that answer at once, each on its own machine."""

    def __init__(
        self, nodes: int, answer: Answer, mode: str = "refuse", timeout: float = 2.0
    ) -> None:
        self.inbox: list[tuple[int, Any]] = []
        self.asked: list[tuple[int, Any]] = []
        self.printed: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._answer = answer
        peers: dict[int, Any] = {}
        for node in range(nodes):
            peers[node] = SimpleNamespace(
                node_rank=node,
                host=f"gpu{node}",
                lost=False,
                send=lambda order, node=node: self._on(node, order),
            )
        self.peers = peers
        self.preflight = Preflight(
            Topology(nodes, 0, 1, "127.0.0.1", None, source="clusterjob"),
            LaunchOptions(Program("command", "true"), preflight=mode, join_timeout=timeout),
            SimpleNamespace(peers=peers),  # type: ignore[arg-type]
            SimpleNamespace(add=lambda event, **more: self.events.append((event, more))),  # type: ignore[arg-type]
            next_message=self._next,
            handle=self._handle,
            print_line=self.printed.append,
        )

    def run(self, nodes: list[int] | None = None) -> Any:
        return asyncio.run(self.preflight.run(self.peers if nodes is None else nodes))

    def _on(self, node: int, order: Any) -> None:
        self.asked.append((node, order))
        if isinstance(order, messages.BeginPreflightWithStore):
            order.store.close()
        if isinstance(order, messages.BeginPreflight):
            started = messages.MeasuringStarted(f"boot{node}", 0, ("gloo",), VERSIONS)
            self.inbox.append((node, started))
        elif isinstance(order, messages.ReadClock):
            micro = time.time_ns() // 1000
            self.inbox.append((node, messages.ClockRead(order.number, micro)))
        elif isinstance(order, (messages.MeasureHost, messages.MeasureGroup)):
            answer = self._answer(node, order)
            if answer is not None:
                self.inbox.append((node, answer))

    async def _next(self, timeout: float) -> tuple[int, Any] | None:
        if self.inbox:
            return self.inbox.pop(0)
        await asyncio.sleep(min(timeout, 0.05))
        return None

    def _handle(self, node: int, message: Any) -> Any:
        if isinstance(message, str):
            return message  # an outcome that ends the job
        if isinstance(message, ConnectionLost):
            self.peers[node].lost = True
            return None
        self.preflight.handlers[type(message)](self.peers[node], message)
        return None


def answers(
    slow: int | None = None, part: float = 0.3, noise: float = 0.1, seed: int = 1
) -> Answer:
    """Return agents of which one has a slow network."""
    numbers = random.Random(seed)
    groups: dict[int, set[int]] = {}

    def answer(node: int, order: Any) -> messages.Measured:
        amount = 100 * (1 - noise * numbers.random())
        if isinstance(order, messages.MeasureHost):
            return messages.Measured(order.number, (amount, amount))
        members = groups.setdefault(order.number, set())
        members.add(node)
        return messages.Measured(order.number, (amount * (part if node == slow else 1),))

    return answer


def test_slow_host_is_named_with_measure_and_refused() -> None:
    run = Simulated(5, answers(slow=3))
    assert run.run() is None
    assert list(run.preflight.result.slow) == [3]
    assert run.preflight.result.slow[3].startswith("all-reduce 0.3")
    outcome = run.preflight.refusal()
    assert outcome is not None
    assert (outcome.failure.node_rank, outcome.failure.host) == (3, "gpu3")
    assert str(outcome.failure.kind) == "launch"
    assert outcome.exit_code != 0
    assert "host gpu3: all-reduce 0.3" in outcome.reason
    assert "GB/s)" in outcome.reason
    assert [name for name, _ in run.events] == ["measuring", "preflight"]
    event = run.events[-1][1]
    assert json.loads(json.dumps(event["table"])) == event["table"]
    assert event["slow"][0].startswith("host gpu3: all-reduce 0.3")
    assert any(line.startswith("preflight: slow host gpu3: ") for line in run.printed)
    assert all(node in dict(run.asked) for node in run.peers)
    ended = [node for node, order in run.asked if isinstance(order, messages.EndPreflight)]
    assert sorted(ended) == list(range(5))


def test_slow_host_is_only_named_with_warn() -> None:
    run = Simulated(5, answers(slow=3), mode="warn")
    assert run.run() is None
    assert list(run.preflight.result.slow) == [3]
    assert run.preflight.refusal() is None


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_equal_hosts_are_not_named(nodes: int) -> None:
    run = Simulated(nodes, answers(noise=0.25))
    assert run.run() is None
    assert run.preflight.result.slow == {}
    assert run.preflight.refusal() is None


def test_host_that_is_slow_once_is_cleared() -> None:
    seen: list[int] = []

    def answer(node: int, order: Any) -> messages.Measured:
        amounts = (100.0, 100.0) if isinstance(order, messages.MeasureHost) else (100.0,)
        if node == 2 and getattr(order, "probe", "") == "disk":
            seen.append(node)
            if len(seen) <= 2:
                amounts = (10.0, 100.0)
        return messages.Measured(order.number, amounts)

    run = Simulated(4, answer)
    assert run.run() is None
    assert run.preflight.result.slow == {}
    assert len(seen) == 3, "measured again until it is cleared"


def test_host_with_an_error_is_named_with_the_error() -> None:
    def answer(node: int, order: Any) -> messages.Measured:
        if node == 1 and getattr(order, "probe", "") == "disk":
            return messages.Measured(order.number, (), "No space left on device\x1b[2J")
        amounts = (100.0, 100.0) if isinstance(order, messages.MeasureHost) else (100.0,)
        return messages.Measured(order.number, amounts)

    run = Simulated(4, answer)
    assert run.run() is None
    text = run.preflight.result.slow[1]
    assert text.startswith("disk write 0.00 of the median (0 of 100 MB/s; No space left on device")
    assert "\x1b" not in text
    assert "also small: disk read" in text


def test_measure_that_fails_everywhere_blames_nobody() -> None:
    def answer(_node: int, order: Any) -> messages.Measured:
        if isinstance(order, messages.MeasureGroup):
            return messages.Measured(order.number, (), "gloo is broken")
        return messages.Measured(order.number, (100.0, 100.0))

    run = Simulated(3, answer)
    assert run.run() is None
    assert run.preflight.result.slow == {}
    assert "all-reduce could not be measured: gloo is broken" in run.preflight.result.findings


def test_host_that_lies_about_its_pairs_blames_only_itself() -> None:
    def answer(node: int, order: Any) -> messages.Measured:
        amount = 0.0 if node == 2 else 100.0
        if isinstance(order, messages.MeasureHost):
            return messages.Measured(order.number, (100.0, 100.0))
        return messages.Measured(order.number, (amount,))

    run = Simulated(5, answer)
    assert run.run() is None
    assert list(run.preflight.result.slow) == [2]


def test_silent_measuring_process_is_named_within_the_limit() -> None:
    def answer(node: int, order: Any) -> messages.Measured | None:
        if node == 1:
            return None
        return messages.Measured(
            order.number, (100.0, 100.0) if isinstance(order, messages.MeasureHost) else (100.0,)
        )

    run = Simulated(4, answer)
    begin = time.monotonic()
    assert run.run() is None
    assert time.monotonic() - begin < 20.0
    assert list(run.preflight.result.slow) == [1]
    assert "no answer in 4.5 s" in run.preflight.result.slow[1]


def test_node_whose_measuring_process_ends_is_named() -> None:
    run = Simulated(4, answers())
    usual = run._answer

    def answer(node: int, order: Any) -> Any:
        if node == 2:
            return messages.MeasuringEnded("the measuring process: it has ended")
        return usual(node, order)

    run._answer = answer
    assert run.run() is None
    assert run.preflight.result.slow == {2: "the measuring process: it has ended"}


@pytest.mark.parametrize("order_lost_at", ["BeginPreflight", "MeasureHost", "MeasureGroup"])
def test_lost_node_is_neither_awaited_nor_named(order_lost_at: str) -> None:
    run = Simulated(4, answers())
    usual = run._on

    def on(node: int, order: Any) -> None:
        if node != 2 or type(order).__name__ != order_lost_at:
            usual(node, order)
        elif not run.peers[2].lost:
            run.inbox.append((2, ConnectionLost("its connection ended", ended=True)))

    run._on = on  # type: ignore[method-assign]
    begin = time.monotonic()
    assert run.run() is None
    assert time.monotonic() - begin < 2.0  # the join timeout, the shortest wait for a node
    result = run.preflight.result
    assert (result.slow, run.preflight.refusal()) == ({}, None)
    assert [host for host, _ in result.table.rows] == ["gpu0", "gpu1", "gpu3"]


def test_outcome_that_arrives_meanwhile_ends_the_preflight() -> None:
    run = Simulated(3, answers())
    usual = run._answer

    def answer(node: int, order: Any) -> Any:
        run.inbox.append((0, "cancelled"))
        return usual(node, order)

    run._answer = answer
    assert run.run() == "cancelled"
    assert [name for name, _ in run.events] == ["measuring"]


def test_answers_that_nobody_asked_for_are_ignored() -> None:
    run = Simulated(3, answers())
    usual = run._answer

    def answer(node: int, order: Any) -> Any:
        if node == 1:  # answers for a step of another node, and twice for its own
            run.inbox.append((1, messages.Measured(order.number + 1, (1e8, 1e8))))
            run.inbox.append((1, messages.Measured(order.number, (100.0, 100.0, 5.0))))
        return usual(node, order)

    run._answer = answer
    assert run.run() is None


def test_node_that_joins_later_is_compared_with_the_first_nodes() -> None:
    slow: set[int] = set()

    def answer(node: int, order: Any) -> messages.Measured:
        amount = 20.0 if node in slow else 100.0
        amounts = (amount, amount) if isinstance(order, messages.MeasureHost) else (amount,)
        return messages.Measured(order.number, amounts)

    run = Simulated(5, answer)
    assert run.run([0, 1, 2, 3]) is None
    assert run.preflight.result.slow == {}
    slow.add(4)
    assert run.run([0, 4]) is None
    assert list(run.preflight.result.slow) == [4]


@pytest.mark.slow
def test_preflight_of_2048_nodes_costs_little() -> None:
    # On a loaded machine these answers take longer than 2 s.
    run = Simulated(2048, answers(slow=77), timeout=300.0)
    begin = time.process_time()
    assert run.run() is None
    assert list(run.preflight.result.slow) == [77]
    assert time.process_time() - begin < 30.0
