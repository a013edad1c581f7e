"""The preflight's decisions: tasks, comparison of hosts, the table."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.node import preflight
from clusterjob.node.preflight import CPU, DISK, GPU, MEASURES, PAIR, HeatTable, is_slow

# The answer of a node to a probe: amounts, an error, or None; `...` for a silent node.
Answer = Callable[[str, int], Any]


class Measured:
    """Nodes that were measured with these answers; each pass takes 4 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int, answer: Answer) -> None:
        self.now, self._answer = 0.0, answer
        self.passes: list[list[str]] = []
        monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.found = preflight.direct([*range(nodes)], self._take)
        self.slow = self.found["slow"]

    def _take(self, nodes: list[int], probes: list[str], _: float) -> preflight.Answers:
        self.now += 4.0
        self.passes.append(probes)
        asked = [(task, node) for task in preflight.tasks(nodes, probes) for node in task[1]]
        answers = {each: self._answer(each[0][0], each[1]) for each in asked}
        return {each: answer for each, answer in answers.items() if answer is not ...}


Measure = Callable[[int, Answer], Measured]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    return lambda nodes, answer: Measured(monkeypatch, nodes, answer)


def usual(probe: str, _node: int) -> Any:
    """Return amounts that vary by a tenth; no node has a GPU."""
    count = sum(of == probe for of, _ in MEASURES.values())
    return None if probe == GPU else [random.uniform(90, 100) for _ in range(count)]


def but(probe: str, node: int, answer: Any) -> Answer:
    """Return the usual answers, but another one for one probe of one node."""
    return lambda *asked: answer if asked == (probe, node) else usual(*asked)


# -- tasks -----------------------------------------------------------------------------------------


def test_each_node_takes_each_probe_and_is_in_pairs_of_a_few_rounds() -> None:
    found = preflight.tasks(range(8), [CPU, PAIR])
    assert [nodes for probe, nodes in found if probe == CPU] == [(node,) for node in range(8)]
    assert sum(probe == PAIR for probe, _ in found) == 5 * 4
    assert not preflight.tasks([0], [PAIR])


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 33])
def test_pairs_are_a_tournament(nodes: int) -> None:
    found = preflight.pairs_of(range(nodes), 100)
    assert len(set(map(frozenset, found))) == len(found) == nodes * (nodes - 1) // 2
    members = [node for pair in preflight.pairs_of(range(nodes), 1) for node in pair]
    assert len(members) == len(set(members)) >= nodes - 1


# -- comparison ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("probe", "name"), [(PAIR, "all-reduce"), (CPU, "matrix multiply")])
def test_slow_host_is_named_with_its_measure(measure: Measure, probe: str, name: str) -> None:
    def answer(asked: str, node: int) -> Any:
        amounts = usual(asked, node)
        return [0.3 * amounts[0], *amounts[1:]] if (asked, node) == (probe, 3) else amounts

    found = measure(5, answer)
    assert list(found.slow) == [3]
    assert found.slow[3].startswith(f"{name} 0.")
    assert found.passes[1:] == [[probe]] * 3, "only what was small is measured again"
    assert found.now <= preflight.SECONDS


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_equal_hosts_are_not_named(measure: Measure, nodes: int) -> None:
    found = measure(nodes, usual)
    assert not found.slow
    assert len(found.passes) == 1
    assert len(found.found["rows"]) == nodes


def test_host_that_is_slow_once_is_cleared(measure: Measure) -> None:
    seen: list[int] = []

    def answer(probe: str, node: int) -> Any:
        if (probe, node) == (DISK, 2):
            seen.append(node)
            if len(seen) == 1:
                return [10.0, 100.0]
        return usual(probe, node)

    assert not measure(4, answer).slow
    assert len(seen) == 2, "measured again"


def test_host_with_an_error_is_named_with_the_error(measure: Measure) -> None:
    text = measure(4, but(DISK, 1, "No space left\x1b[2J")).slow[1]
    assert text.startswith("disk write 0.00 of the median (0 MB/s of ")
    assert "No space left" in text
    assert "\x1b" not in text
    assert "also small: disk read" in text


def test_slowest_gpu_of_a_host_is_named(measure: Measure) -> None:
    def answer(probe: str, node: int) -> Any:
        if probe != GPU:
            return usual(probe, node)
        return [9.0, 9.0, 9.0, 1.0 if node == 1 else 9.0]  # of two GPUs

    assert measure(3, answer).slow == {1: "GPU memory 0.11 of the median (1 GB/s of 9 GB/s; GPU 1)"}


def test_measure_that_fails_everywhere_blames_nobody(measure: Measure) -> None:
    found = measure(3, lambda *asked: "gloo is broken" if asked[0] == PAIR else usual(*asked))
    assert not found.slow
    assert found.found["findings"] == ["all-reduce could not be measured: gloo is broken"]


def test_host_that_lies_about_its_pairs_blames_only_itself(measure: Measure) -> None:
    assert list(measure(5, but(PAIR, 2, [0.0])).slow) == [2]


@pytest.mark.parametrize("wrong", [[float("nan")] * 2, [-1.0, 1.0], ["1", 1], [True, 1], [1.0], {}])
def test_wrong_answer_is_an_error_of_its_node(measure: Measure, wrong: Any) -> None:
    assert "a wrong answer" in measure(4, but(CPU, 2, wrong)).slow[2]


def test_silent_process_is_named_and_asked_once(measure: Measure) -> None:
    slow = but(CPU, 0, [1.0, 1.0])
    found = measure(4, lambda *asked: ... if asked == (DISK, 1) else slow(*asked))
    assert found.slow[1] == "the measuring process does not answer"
    assert list(found.slow) == [1, 0]
    assert len(found.passes) > 1


# -- the table -------------------------------------------------------------------------------------


def table(amounts: dict[int, float]) -> HeatTable:
    rows = [(f"gpu{node}", (amount,)) for node, amount in amounts.items()]
    return HeatTable.of([("matrix multiply", "GFLOP/s", 100.0)], rows)


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
    assert HeatTable.from_json(json.loads(json.dumps(vars(made)))) == made


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
    good = json.loads(json.dumps(vars(table({0: 1.0}))))
    assert HeatTable.from_json(good) != HeatTable()
    assert HeatTable.from_json(good | change) == HeatTable()
    assert HeatTable.from_json(None) == HeatTable()


def test_forged_host_name_is_harmless() -> None:
    good = json.loads(json.dumps(vars(table({0: 1.0}))))
    forged = good | {"rows": [["\x1b]0;x\x07" + "y" * 500, [1.0]]]}
    [(name, _)] = HeatTable.from_json(forged).rows
    assert "\x1b" not in name
    assert len(name) <= 80
