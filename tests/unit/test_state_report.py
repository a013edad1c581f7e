"""The state that an agent reports of its node: what it keeps, what it forgets, and its size."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node import decide as core
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.contract import World
from clusterjob.node.decide import Job, Ledger, Node, Run, Stage, View
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.protocol import LINE_BYTES
from clusterjob.node.states import (
    MAX_WORKERS,
    Failing,
    Missing,
    NodeState,
    Probed,
    Request,
)
from clusterjob.node.system.codec import MalformedMessageError
from clusterjob.node.verdict import Failure, FailureKind

BIGGEST = (1 << 24) - 1  # number of a node, a rank or a round


def failure(rank: int, *, lines: tuple[str, ...] = (), message: str = "m") -> Failure:
    return Failure(
        rank, rank, node_rank=1, host="gpu1", exit_code=1, signal=None, message=message,
        last_lines=lines,
    )  # fmt: skip


def full_report() -> StateReport:
    """Return a report in which no field has its first value."""
    report = StateReport()
    report.begin(3)
    report.set(
        started=True,
        ended=True,
        missing=Missing(0, (7,), gave_up=True),
        joined=2,
        formed=2,
        importing=True,
        sampled=4,
        moved=True,
        collected=True,
        measured="done",
        by_exec="OMP_NUM_THREADS changes",
        seen=5,
    )
    report.ask(cancel="cancelled", warning="SIGUSR1 on gpu1")
    report.succeed([0])
    report.fail(failure(1), time.monotonic(), exited=True)
    report.answer(2, ["rank 1: it sleeps"], [failure(1)])
    report.complete([(failure(0), time.monotonic() - 5.0)])
    report.note_alive(time.monotonic() + 2.0, 9)
    return report


# -- what it keeps ---------------------------------------------------------------------------------


def test_next_round_keeps_only_what_does_not_concern_workers() -> None:
    report = full_report()
    report.stopped_at = time.monotonic()
    first, before = NodeState(), report.now()
    unchanged = [
        each.name
        for each in fields(NodeState)
        if each.name != "quiet" and getattr(before, each.name) == getattr(first, each.name)
    ]
    assert not unchanged, "the test must set each field"
    report.changed.clear()
    report.begin(4)
    assert report.changed.is_set()
    assert report.now() == NodeState(
        4,
        idle=False,
        quiet=pytest.approx(0.0, abs=1.0),
        measured="done",
        by_exec="OMP_NUM_THREADS changes",
        seen=5,
        request=Request(cancel="cancelled", warning="SIGUSR1 on gpu1"),
    )
    report.fail(failure(1, message="of this round"), time.monotonic(), exited=True)
    assert [each.failure.message for each in report.now().failing] == ["of this round"]


def test_early_exits_have_the_age_of_their_end() -> None:
    report = full_report()
    assert report.now().reported
    assert [round(each.age) for each in report.now().exits] == [5]


def test_answers_to_one_question_are_added_and_the_next_question_forgets_them() -> None:
    report = StateReport()
    report.answer(1, ["rank 0: a"], [])
    report.answer(1, ["rank 1: b"], [failure(1)])
    assert report.state.probed == Probed(1, ("rank 0: a", "rank 1: b"), (failure(1),))
    report.answer(2, ["rank 0: c"], [])
    assert report.state.probed == Probed(2, ("rank 0: c",))


@pytest.mark.parametrize(
    ("seconds", "step", "quiet", "steps", "told"),
    [
        (0.5, -1, 0.0, 5, False),  # too soon to be worth a message
        (1.5, -1, -1.5, 5, True),
        (1.5, 4, -1.5, 5, True),  # another worker is behind
        (0.0, 6, 0.0, 6, True),
        (-60.0, 6, 0.0, 6, True),  # a late message makes the node no older
        (-60.0, 5, 0.0, 5, False),
    ],
)
def test_sign_of_life_is_told_once_a_second_or_with_a_new_step(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    step: int,
    quiet: float,
    steps: int,
    told: bool,
) -> None:
    moment = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    report = StateReport()
    report.set(step=5)
    report.changed.clear()
    report.note_alive(moment + seconds, step)
    moment += 10.0
    assert report.changed.is_set() is told
    assert (report.now().quiet, report.now().step) == (10.0 + quiet, steps)


# -- its size --------------------------------------------------------------------------------------


def size(report: StateReport) -> int:
    return len(messages.FROM_AGENT.encode_json(report.now()))


@pytest.mark.parametrize("nproc", [1, 8, 64, MAX_WORKERS])
def test_state_without_failures_has_at_most_1_kib_and_256_bytes_a_worker(nproc: int) -> None:
    report = StateReport(seen=BIGGEST)
    report.begin(BIGGEST)
    missing = Missing(nproc - 1, tuple(range(BIGGEST - 8, BIGGEST)), gave_up=True)
    report.set(started=True, ended=True, missing=missing, joined=nproc, formed=nproc, step=2**62)
    report.ask(cancel=f"SIGTERM on {'h' * 64}", warning=f"SIGUSR1 on {'h' * 64}", terminated=True)
    report.succeed(range(nproc))
    assert size(report) <= 1024 + 256 * nproc


def test_report_of_many_long_failures_and_answers_fits_a_message() -> None:
    report = StateReport()
    report.begin(0)
    lines, message = ("\u00e9" * 1000,) * 50, "m" * 20_000
    for rank in range(300):
        long = failure(rank, lines=lines, message=message)
        report.fail(long, time.monotonic(), exited=True)
        report.answer(1, ["x" * 1000], [long] if rank < 64 else [])
    state = report.now()
    assert size(report) < LINE_BYTES - 1000
    assert state.probed is not None
    assert len(state.probed.failures) > 16
    assert state.failing[0].failure.last_lines


def test_first_failure_that_is_no_effect_keeps_its_output_longest() -> None:
    report = StateReport()
    report.begin(0)
    begin = time.monotonic()
    for rank in range(300):
        long = failure(rank, lines=("x" * 4096,), message=f"rank {rank}")
        report.fail(replace(long, effect=rank < 299), begin + rank, exited=True)
    found = [each.failure for each in report.now().failing]
    assert [each.rank for each in found[:3]] == [299, 0, 1]
    assert found[0].last_lines
    assert not found[-1].last_lines


@given(
    message=st.text(max_size=5) | st.text(min_size=4090, max_size=4100),
    lines=st.lists(st.integers(0, 3000), max_size=8),
)
def test_texts_of_a_failure_are_cut_to_their_first_or_last_4_kib(
    message: str, lines: list[int]
) -> None:
    report = StateReport()
    report.begin(0)
    output = tuple(f"{number}".ljust(length, ".") for number, length in enumerate(lines))
    report.fail(failure(0, lines=output, message=message), time.monotonic(), exited=True)
    [found] = [each.failure for each in report.now().failing]
    assert found.message == message[:4096]
    assert sum(map(len, found.last_lines)) == min(4096, sum(map(len, output)))
    if found.last_lines:
        oldest, *newest = found.last_lines
        assert tuple(newest) == output[len(output) - len(newest) :]
        assert output[len(output) - len(newest) - 1].startswith(oldest)


# -- a state from the network ----------------------------------------------------------------------

HOSTILE: list[Any] = [
    None, True, -1, 2**31, 2**63, 10**400, -0.5, 1e308, math.inf, math.nan, "", "x" * 301, "\ud800",
    "9" * (1 << 17), [], [[]], {}, {"rank": 0}, list(range(20_000)), [0] * (MAX_WORKERS + 2),
]  # fmt: skip
# Of a type that the field accepts; most are accepted.
EXTREME: dict[type, list[Any]] = {
    bool: [False, True],
    int: [-1, 0, 1, 2, 75, 255, MAX_WORKERS - 1, BIGGEST],
    float: [0.0, 5.0, 1e8],
    str: ["", "done", "preempted", "rendezvous", "network", "\x1b[2J" * 50],
}


def running_state() -> NodeState:
    """Return the state of a worker that fails because it waits for ranks which never joined."""
    effect = replace(failure(1), effect=True, kind=FailureKind.RENDEZVOUS)
    return NodeState(
        0,
        started=True,
        idle=False,
        failing=(Failing(effect, 0.1, exited=True),),
        missing=Missing(0, (0, 1), gave_up=True),
        probed=Probed(1, ("rank 1: it sleeps",), (failure(1),)),
        joined=1,
        sampled=1,
    )


@st.composite
def hostile_states(draw: st.DrawFn) -> Any:
    """Return a state in which up to three values, at any depth, are others."""
    made = draw(st.sampled_from([full_report().now(), running_state(), NodeState(0)]))
    state = json.loads(messages.FROM_AGENT.encode_json(replace(made, round=0)))
    for _ in range(draw(st.integers(1, 3))):
        where: Any = state
        while True:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            key = draw(st.sampled_from(keys))
            if not (where[key] and isinstance(where[key], (dict, list))) or draw(st.booleans()):
                break
            where = where[key]
        extreme = EXTREME.get(type(where[key]), [])
        if extreme and draw(st.integers(0, 3)):
            where[key] = draw(st.sampled_from(extreme))
        else:
            where[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))  # which may be changed again
    return state


def test_full_state_is_received_unchanged() -> None:
    state = full_report().now()
    data = json.loads(messages.FROM_AGENT.encode_json(state))
    found = messages.FROM_AGENT.decode(data)
    messages.check_sender(found, 1)
    assert found == state


@given(data=hostile_states())
def test_hostile_state_is_refused_or_leads_to_a_decision(data: Any) -> None:
    try:
        state = messages.FROM_AGENT.decode(data)
        messages.check_sender(state, 1)
    except MalformedMessageError:
        return
    assert isinstance(state, NodeState)
    job = Job(
        LaunchOptions(Program("script", "x.py"), warning=60.0, hang_timeout=20.0, time_limit=60.0),
        nnodes=2,
    )
    worlds = {
        number: World(
            0, "gpu0", 29500, agent_store=True, node_rank=number, nnodes=2, nproc=1,
            first_rank=number, world_size=2,
        )
        for number in (0, 1)
    }  # fmt: skip
    nodes = {number: Node(number, f"gpu{number}", pid=1, nproc=1) for number in (0, 1)}
    nodes[0] = nodes[0].receive(NodeState(0, started=True, idle=False), 100.0)
    nodes[1] = nodes[1].receive(state, 100.0)
    ledger = Ledger(Stage.RUN, round=0, nodes=(0, 1), run=Run(began=50.0, worlds=worlds))
    for seconds in (100.0, 100.5, 105.0, 115.0, 190.0, 300.0):
        decision = core.decide(job, ledger, View(nodes), seconds)
        ledger = decision.ledger
        for _, order in core.orders(job, ledger, nodes):
            messages.FROM_COORDINATOR.encode_json(order)
