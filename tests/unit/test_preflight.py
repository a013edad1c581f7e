"""The preflight's decisions: pairs, comparison of hosts, the table."""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from clusterjob.insight.preflight import HostTable
from clusterjob.node import preflight
from clusterjob.node.preflight import (
    CPU,
    GPU,
    MAX_ROWS,
    PAIR,
    UNITS,
    Answer,
    Row,
    smallest_rows,
    table_lines,
)
from clusterjob.node.system import codec
from clusterjob.node.system.codec import MalformedMessageError

# What a node says to a probe: amounts, an error, or None.
Said = Callable[[str, int], Any]


def compared(nodes: int, say: Said) -> dict[str, Any]:
    """Return the comparison of nodes that say this."""
    return preflight.compare({node: answer_of(say, node) for node in range(nodes)})


def answer_of(say: Said, node: int) -> Answer:
    amounts: list[tuple[str, float, str]] = []
    for name in UNITS:
        said = say(name, node)
        if isinstance(said, str):
            amounts.append((name, 0.0, said))
        elif said is not None:
            amounts.append((name, said, ""))
    return Answer(tuple(amounts))


def usual(probe: str, _node: int) -> Any:
    """Return amounts that vary by a tenth; no node has a GPU."""
    return None if probe == GPU else random.uniform(90, 100)


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
    assert preflight._pairs(range(5), 0, time.monotonic() + 9.0, None) == [8.0]
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


@pytest.mark.parametrize("name", [PAIR, CPU])
def test_slow_host_is_named_with_its_measure(name: str) -> None:
    [(node, text)] = compared(5, but(name, 3, 30.0))["slow"].items()
    assert node == 3
    assert text.startswith(f"{name} 0.")


@pytest.mark.parametrize("nodes", [1, 2, 3, 5])
def test_equal_hosts_are_not_named(nodes: int) -> None:
    found = compared(nodes, usual)
    assert not found["slow"]
    assert len(found["rows"]) == nodes


def test_host_with_an_error_is_named_with_the_error() -> None:
    slow_pair = but(PAIR, 1, 30.0)
    text = compared(
        4,
        lambda *asked: "out of memory\x1b[2J" if asked == (CPU, 1) else slow_pair(*asked),
    )["slow"][1]
    assert text.startswith("matrix multiply 0.00 of the median (0 GFLOP/s of ")
    assert "out of memory" in text
    assert "\x1b" not in text
    assert "also small: all-reduce" in text


def test_note_is_shown_behind_the_amount() -> None:
    answers = {node: Answer(((GPU, 1.0 if node == 1 else 9.0, "GPU 3"),)) for node in range(3)}
    assert preflight.compare(answers)["slow"] == {
        1: "GPU matrix multiply 0.11 of the median (1 GFLOP/s of 9 GFLOP/s; GPU 3)"
    }


def test_measure_that_fails_everywhere_blames_nobody() -> None:
    found = compared(3, lambda *asked: "gloo is broken" if asked[0] == PAIR else usual(*asked))
    assert not found["slow"]
    assert found["findings"] == ["all-reduce could not be measured: gloo is broken"]


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, "1", True, None])
def test_wrong_answer_is_refused(wrong: Any) -> None:
    with pytest.raises(MalformedMessageError):
        codec.read(Answer, {"amounts": [[CPU, wrong, ""]]})


def test_unknown_measure_is_ignored() -> None:
    found = preflight.compare({0: Answer(((CPU, 1.0, ""), ("a lie", 1.0, "")))})
    assert [name for name, *_ in found["columns"]] == [CPU]


# -- the processes, without torch ------------------------------------------------------------------


class Store:
    """A store of torch with what other processes have set; a missing key has no time."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def wait(self, keys: list[str], _timeout: Any) -> None:
        if keys[0] not in self.values:
            raise RuntimeError("wait timeout")

    def get(self, key: str) -> str:
        return self.values[key]


GIVEN = {"node": 0, "nodes": [0, 1, 2, 3], "start_seconds": 0.0}


@pytest.fixture
def prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stores of a group be that of all, without an import of torch."""
    torch = SimpleNamespace(PrefixStore=lambda _prefix, store: store)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=torch))
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)


def test_silent_process_and_one_that_has_not_started_are_named(
    monkeypatch: pytest.MonkeyPatch, prefixes: None
) -> None:
    monkeypatch.setattr(preflight, "_measured", lambda _do: (9.0, ""))
    fast, wrong = json.dumps({"amounts": [[CPU, 9.0, ""]]}), json.dumps({"amounts": 3})
    store = Store(started0="true", started1="true", answer1=fast, started2="true", answer2=wrong)
    found = preflight._compare_all(store, GIVEN)
    assert found["slow"] == {
        2: "the measuring process does not answer",
        3: "the measuring process has not started",
    }
    assert json.loads(store.values["nodes"]) == [0, 1, 2]
    assert list(found["rows"]) == [0, 1]


def test_best_amount_of_a_node_counts(monkeypatch: pytest.MonkeyPatch, prefixes: None) -> None:
    said = itertools.cycle([(0.0, "No space left"), (7.0, "GPU 1"), (5.0, "GPU 0")])
    monkeypatch.setattr(
        preflight,
        "_measured",
        lambda do: next(said) if do is preflight._cpu else None,
    )
    store = Store()
    preflight._measure(store, GIVEN, [0, 1])
    assert json.loads(store.values["answer0"]) == {"amounts": [[CPU, 7.0, "GPU 1"]]}


def test_answer_names_the_slowest_gpu_or_the_error() -> None:
    assert preflight._measured(lambda: [9.0, 1.0]) == (1.0, "GPU 1")
    assert preflight._measured(lambda: [9.0]) == (9.0, "")
    assert preflight._measured(list) is None, "there is no GPU"
    error = OSError(28, "No space left")
    assert preflight._measured(lambda: (_ for _ in ()).throw(error)) == (0.0, "No space left")


# -- the table -------------------------------------------------------------------------------------


def rows_of(amounts: dict[int, float]) -> list[Row]:
    return [(f"gpu{node}", (amount,)) for node, amount in amounts.items()]


COLUMNS = [("matrix multiply", "GFLOP/s", 100.0)]


def test_table_shows_parts_of_the_median() -> None:
    assert table_lines(COLUMNS, rows_of({0: 1.0, 1: 1.1, 2: 0.31}), 3) == [
        "         matrix multiply",
        "median       100 GFLOP/s",
        "gpu0                1.00",
        "gpu1                1.10",
        "gpu2                0.31",
    ]


def test_table_of_many_hosts_keeps_the_slowest() -> None:
    rows = rows_of({node: 1.0 if node != 700 else 0.1 for node in range(900)})
    kept = smallest_rows(rows, MAX_ROWS)
    assert len(kept) == 500
    lines = table_lines(COLUMNS, kept, 900)
    assert len(lines) == 19
    assert lines[2].startswith("gpu700")
    assert lines[-1] == "884 more hosts are not shown"


GOOD = {"columns": [["matrix multiply", "GFLOP/s", 100.0]], "rows": [["gpu0", [1.0]]], "hosts": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [["gpu0", [-1.0]]]},
        {"rows": [["gpu0", ["1"]]]},
        {"rows": [[7, [1.0]]]},
        {"rows": 3},
        {"hosts": "many"},
        {"columns": [["a"]]},
    ],
)
def test_forged_table_is_empty(change: dict[str, Any]) -> None:
    assert HostTable.of(GOOD).lines()[-1].split() == ["gpu0", "1.00"]
    assert HostTable.of(GOOD | change) == HostTable()
    assert HostTable.of(None) == HostTable()


def test_forged_host_name_is_harmless() -> None:
    forged = GOOD | {"rows": [["\x1b]0;x\x07" + "y" * 500, [1.0]]]}
    [(name, _)] = HostTable.of(forged).rows
    assert "\x1b" not in name
    assert len(name) <= 80
