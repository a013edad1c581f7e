"""The preflight's decisions: steps, comparison of hosts, the table."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from clusterjob.node import preflight
from clusterjob.node.preflight import CPU, DISK, MEASURES, PAIR, Director, Task
from clusterjob.node.preflight_table import Column, HeatTable, is_slow

# The answer of a node to a probe: amounts, an error, or None.
Answer = Callable[[str, int], Any]


class Clock:
    """A clock on which each step takes some time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(preflight, "time", made)
    return made


def direct(clock: Clock, nodes: int, answer: Answer, *, per_machine: int = 1) -> Director:
    """Return a director that has measured nodes with these answers."""

    def ask(tasks: list[Task]) -> dict[tuple[Task, int], Any]:
        found = {(task, node): answer(task[0], node) for task in tasks for node in task[1]}
        clock.now += 5.0 if None in found.values() else 0.5
        return found

    hello = {
        node: {"machine": f"m{node // per_machine}", "gpus": 0, "versions": {"torch": "2.13.0"}}
        for node in range(nodes)
    }
    director = Director(ask, hello)
    director.run(clock.now)
    return director


def amounts(slow: int | None = None, probe: str = PAIR, *, part: float = 0.3) -> Answer:
    """Return answers that vary by a tenth, and are smaller on one node."""
    numbers = random.Random(1)

    def answer(asked: str, node: int) -> list[float]:
        factor = part if node == slow and asked == probe else 1.0
        return [100 * factor * (1 - 0.1 * numbers.random()) for _ in MEASURES[asked]]

    return answer


# -- steps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_machine", [1, 2, 3, 12])
def test_each_task_is_in_one_step_and_no_machine_twice_in_a_step(per_machine: int) -> None:
    tasks: list[Task] = [(CPU, (node,)) for node in range(12)]
    tasks += [(PAIR, pair) for pairs in preflight.pair_rounds(range(12), 3) for pair in pairs]
    found = preflight.steps(tasks, lambda node: str(node // per_machine))
    assert sorted(task for step in found for task in step) == sorted(tasks)
    for step in found:
        used = [machine for _, nodes in step for machine in {node // per_machine for node in nodes}]
        assert len(used) == len(set(used))
    assert max(map(len, found)) >= 12 // per_machine


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 33])
def test_pair_rounds_are_a_tournament(nodes: int) -> None:
    rounds = preflight.pair_rounds(range(nodes), 100)
    for pairs in rounds:
        members = [node for pair in pairs for node in pair]
        assert len(members) == len(set(members))
    pairs = [frozenset(pair) for one in rounds for pair in one]
    assert len(pairs) == len(set(pairs)) == nodes * (nodes - 1) // 2
    assert len(preflight.pair_rounds(range(nodes), 1)) == 1


@pytest.mark.parametrize(("nodes", "sizes"), [(1, []), (2, [2]), (32, [32]), (33, [17, 16])])
def test_rings_have_at_most_32_nodes(nodes: int, sizes: list[int]) -> None:
    found = preflight.rings(range(nodes), 32)
    assert [len(ring) for ring in found] == sizes


# -- comparison ------------------------------------------------------------------------------------


def test_suspect_is_cleared_by_one_value_or_if_the_others_were_slow_too() -> None:
    assert preflight.is_cleared([0.3, 0.8], [[1.0], [1.1]])
    assert preflight.is_cleared([0.3], [[0.4], [1.0]])
    assert preflight.is_cleared([0.3, 0.4], [[1.0, 0.2], [0.9, 0.35]]), "a busy machine"
    assert not preflight.is_cleared([0.3, 0.4], [[1.0, 0.2], [0.9, 0.8]])
    assert not preflight.is_cleared([], [[1.0]])
    assert not preflight.is_cleared([0.0], [[0.0]])


def test_short_time_is_enough_for_a_clear_difference() -> None:
    assert preflight.is_slow([0.3, 0.4], [[1.0, 0.5], [0.9]])
    assert not preflight.is_slow([0.3, 0.6], [[1.0], [0.9]])
    assert preflight.is_slow([0.3, 0.6, 0.5], [[1.0], [0.9]])
    assert not preflight.is_slow([0.3], [[1.0], [0.9]])
    assert not preflight.is_slow([0.3, 0.3, 0.3], [[1.0], []])


@pytest.mark.parametrize(("probe", "name"), [(PAIR, "all-reduce"), (CPU, "matrix multiply")])
def test_slow_host_is_named_with_its_measure(clock: Clock, probe: str, name: str) -> None:
    director = direct(clock, 5, amounts(3, probe))
    assert list(director.slow) == [3]
    assert name in director.slow[3]
    assert " 0.3" in director.slow[3]
    assert clock.now <= preflight.SECONDS


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_equal_hosts_are_not_named(clock: Clock, nodes: int) -> None:
    assert not direct(clock, nodes, amounts(), per_machine=2).slow


def test_host_that_is_slow_once_is_cleared(clock: Clock) -> None:
    seen: list[int] = []
    usual = amounts()

    def answer(probe: str, node: int) -> Any:
        if (probe, node) == (DISK, 2):
            seen.append(node)
            if len(seen) == 1:
                return [10.0, 100.0]
        return usual(probe, node)

    assert not direct(clock, 4, answer).slow
    assert len(seen) == 2, "measured again"


def test_host_with_an_error_is_named_with_the_error(clock: Clock) -> None:
    usual = amounts()

    def answer(probe: str, node: int) -> Any:
        return "No space left\x1b[2J" if (probe, node) == (DISK, 1) else usual(probe, node)

    text = direct(clock, 4, answer).slow[1]
    assert text.startswith("disk write 0.00 of the median (0 of ")
    assert "No space left" in text
    assert "\x1b" not in text
    assert "also small: disk read" in text


def test_measure_that_fails_everywhere_blames_nobody(clock: Clock) -> None:
    usual = amounts()

    def answer(probe: str, node: int) -> Any:
        return "gloo is broken" if probe == PAIR else usual(probe, node)

    director = direct(clock, 3, answer)
    assert not director.slow
    assert director.findings() == ["all-reduce could not be measured: gloo is broken"]


def test_host_that_lies_about_its_pairs_blames_only_itself(clock: Clock) -> None:
    usual = amounts()

    def answer(probe: str, node: int) -> Any:
        return [0.0] if (probe, node) == (PAIR, 2) else usual(probe, node)

    assert list(direct(clock, 5, answer).slow) == [2]


@pytest.mark.parametrize("wrong", [[float("nan")] * 2, [-1.0, 1.0], ["1", 1], [True, 1], [1.0], {}])
def test_wrong_answer_is_an_error_of_its_node(clock: Clock, wrong: Any) -> None:
    usual = amounts()

    def answer(probe: str, node: int) -> Any:
        return wrong if (probe, node) == (CPU, 2) else usual(probe, node)

    assert "a wrong answer" in direct(clock, 4, answer).slow[2]


def test_silent_process_is_named_and_asked_once(clock: Clock) -> None:
    usual, asked = amounts(), []

    def answer(probe: str, node: int) -> Any:
        asked.append(node)
        return None if node == 1 else usual(probe, node)

    director = direct(clock, 4, answer)
    assert director.broken == {1: "no answer in 5 s"}
    assert asked.count(1) == 1
    assert not director.slow


def test_differing_versions_are_named_with_their_hosts(clock: Clock) -> None:
    director = direct(clock, 3, amounts())
    assert director.versions() == {}
    director.hello[1]["versions"]["torch"] = "2.12.0"  # type: ignore[index]
    assert preflight.differing(director.versions(), {0: "a", 1: "b", 2: "c"}) == [
        "torch is not the same: 2.13.0 on a, c, 2.12.0 on b"
    ]


def test_result_of_another_form_is_none() -> None:
    good = {
        "seconds": 1, "slow": {"1": "x\x1b"}, "findings": [], "versions": {"torch": {"1": [0]}},
        "columns": [], "rows": {"0": []},
    }  # fmt: skip
    found = preflight.checked(json.dumps(good).encode())
    assert found is not None
    assert "\x1b" not in found["slow"][1]
    for name in good:
        for wrong in (None, 3, {"x": 1}):
            changed = preflight.checked(json.dumps(good | {name: wrong}).encode())
            assert changed is None or name in ("seconds", "columns", "findings")
    assert preflight.checked(b"") is None
    assert preflight.checked(b"[" * 100_000) is None


# -- the table -------------------------------------------------------------------------------------


def table(amounts: dict[int, float]) -> HeatTable:
    rows = tuple((f"gpu{node}", (amount,)) for node, amount in amounts.items())
    return HeatTable((Column("matrix multiply", "GFLOP/s", 100.0),), rows, len(rows))


def test_table_shows_parts_of_the_median_and_survives_json() -> None:
    made = table({0: 1.0, 1: 1.1, 2: 0.31})
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
    full = table({node: 1.0 if node != 700 else 0.1 for node in range(900)})
    made = HeatTable.from_json(json.loads(json.dumps(full.to_json())))
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
