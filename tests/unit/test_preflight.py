"""The preflight's decisions: pairs, comparison of hosts, the table."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.node import preflight
from clusterjob.node.preflight import CPU, DISK, GPU, MEASURES, PAIR, Answer, HeatTable, is_slow
from clusterjob.node.system import codec
from clusterjob.node.system.codec import MalformedMessageError

# What a node says to a probe: amounts, an error, or None; `...` for a silent node.
Said = Callable[[str, int], Any]


class Measured:
    """Nodes that were measured with these answers; each pass takes 4 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int, say: Said) -> None:
        self.now, self._say = 0.0, say
        self.passes: list[list[str]] = []
        monkeypatch.setattr(preflight, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.found = preflight.direct([*range(nodes)], self._take)
        self.slow = self.found["slow"]

    def _take(self, nodes: list[int], probes: list[str], _: float) -> dict[int, Answer]:
        self.now += 4.0
        self.passes.append(probes)
        said = {node: {probe: self._say(probe, node) for probe in probes} for node in nodes}
        return {node: answer_of(of) for node, of in said.items() if ... not in of.values()}


def answer_of(said: dict[str, Any]) -> Answer:
    amounts: list[tuple[str, float, str]] = []
    for name, (probe, _) in MEASURES.items():
        index = [each for each, (of, _) in MEASURES.items() if of == probe].index(name)
        value = said.get(probe)
        if isinstance(value, str):
            amounts.append((name, 0.0, value))
        elif value is not None:
            amounts.append((name, value[index], ""))
    return Answer(tuple(amounts))


Measure = Callable[[int, Said], Measured]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Measure:
    return lambda nodes, answer: Measured(monkeypatch, nodes, answer)


def usual(probe: str, _node: int) -> Any:
    """Return amounts that vary by a tenth; no node has a GPU."""
    count = sum(of == probe for of, _ in MEASURES.values())
    return None if probe == GPU else [random.uniform(90, 100) for _ in range(count)]


def but(probe: str, node: int, answer: Any) -> Said:
    """Return the usual answers, but another one for one probe of one node."""
    return lambda *asked: answer if asked == (probe, node) else usual(*asked)


# -- pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 5, 8, 33])
def test_pairs_are_a_tournament(nodes: int) -> None:
    found = preflight.pairs_of(range(nodes), 100)
    assert len(set(map(frozenset, found))) == len(found) == nodes * (nodes - 1) // 2
    members = [node for pair in preflight.pairs_of(range(nodes), 1) for node in pair]
    assert len(members) == len(set(members)) >= nodes - 1
    assert not preflight.pairs_of([0])


@pytest.mark.parametrize(
    "rates",
    [{1: 9.0, 2: 8.0, 3: 1.0, 4: 7.0}, {1: 9.0, 2: None, 3: 8.0, 4: None}],
    ids=["slow partner", "broken partners"],
)
def test_partner_that_is_slow_or_broken_makes_no_other_node_slow(
    monkeypatch: pytest.MonkeyPatch, rates: dict[int, float | None]
) -> None:
    monkeypatch.setattr(preflight, "_all_reduce", partner(rates))
    assert preflight._pairs(range(5), 0, time.monotonic() + 9.0, None) == [[8.0]]
    assert preflight._pairs(range(5), 0, 0.0, None) == [], "no time is left"


def test_node_whose_all_reduces_fail_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_all_reduce", partner({}))
    with pytest.raises(RuntimeError, match="gloo is broken"):
        preflight._pairs(range(5), 0, time.monotonic() + 9.0, None)


def partner(rates: Mapping[int, float | None]) -> Callable[..., float]:
    """Return all-reduces with these rates by partner, or an error."""

    def all_reduce(pair: tuple[int, int], node: int, _store: Any, _number: int) -> float:
        rate = rates.get(sum(pair) - node)
        if rate is None:
            raise RuntimeError("gloo is broken\nat line 1")
        return rate

    return all_reduce


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


def test_answer_names_the_slowest_gpu_or_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(probe: str, amounts: Callable[..., Any]) -> Any:
        monkeypatch.setattr(preflight, "_amounts", amounts)
        return preflight._measured(probe, [0], 0, 0.0, None, Path())

    found = measured(GPU, lambda *_: [[9.0, 9.0], [9.0, 1.0]])
    assert found == [("GPU matrix multiply", 9.0, "GPU 0"), ("GPU memory", 1.0, "GPU 1")]
    assert measured(CPU, lambda *_: [[9.0, 8.0]]) == [
        ("matrix multiply", 9.0, ""),
        ("memory", 8.0, ""),
    ]
    assert measured(GPU, lambda *_: []) == [], "there is no GPU"
    error = OSError(28, "No space left")
    assert measured(PAIR, lambda *_: (_ for _ in ()).throw(error)) == [
        ("all-reduce", 0.0, "No space left")
    ]


def test_note_is_shown_behind_the_amount() -> None:
    answers = {
        node: Answer((("GPU memory", 1.0 if node == 1 else 9.0, "GPU 3"),)) for node in range(3)
    }
    found = preflight.direct([0, 1, 2], lambda *_: answers)
    assert found["slow"] == {1: "GPU memory 0.11 of the median (1 GB/s of 9 GB/s; GPU 3)"}


def test_measure_that_fails_everywhere_blames_nobody(measure: Measure) -> None:
    found = measure(3, lambda *asked: "gloo is broken" if asked[0] == PAIR else usual(*asked))
    assert not found.slow
    assert found.found["findings"] == ["all-reduce could not be measured: gloo is broken"]


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, "1", True, None])
def test_wrong_answer_is_refused(wrong: Any) -> None:
    with pytest.raises(MalformedMessageError):
        codec.read(Answer, {"amounts": [["memory", wrong, ""]]})


def test_unknown_measure_is_ignored() -> None:
    answer = Answer((("memory", 1.0, ""), ("a lie", 1.0, "")))
    found = preflight.direct([0], lambda *_: {0: answer})
    assert [name for name, *_ in found["columns"]] == ["memory"]


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
