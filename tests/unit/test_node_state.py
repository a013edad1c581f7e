"""The state that an agent reports of its node: what fits a message, and what orders change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import JSON, changed, fuzz
from hypothesis import strategies as st

from clusterjob.node.agent.node_workers import NodeWorkers, StateReport, answer_to
from clusterjob.node.contract import World
from clusterjob.node.environments.topology import Topology
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.protocol import LINE_BYTES
from clusterjob.node.states import (
    Failing,
    Missing,
    NodeState,
    Order,
    Probe,
    Probed,
    Request,
)
from clusterjob.node.system.codec import MalformedMessageError, plain
from clusterjob.node.verdict import Failure
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient


def failure(rank: int, *, lines: int = 0) -> Failure:
    return Failure(
        rank, rank, node_rank=0, host="gpu1", exit_code=1, signal=None, message="m" * 20_000,
        last_lines=("\u00e9" * 1000,) * lines,
    )  # fmt: skip


@pytest.fixture
def report() -> StateReport:
    """The report of a node in its first round."""
    made = StateReport()
    made.begin(0)
    return made


SHORT = replace(failure(1), message="ValueError: boom", last_lines=("boom",))
FULL = NodeState(
    3,
    started=True,
    ended=True,
    idle=False,
    succeeded=(0, 1),
    failing=(Failing(SHORT, 2.5, exited=True),),
    reported=True,
    exits=(Failing(SHORT, 3, exited=True),),
    missing=Missing(1, (4, 5), gave_up=True),
    probed=Probed(Probe((1,)), ("rank 1: it sleeps",), (SHORT,)),
    joined=2,
    formed=1,
    quiet=4.5,
    step=10,
    sampled=6,
    collected=True,
    measured="done",
    seen=4,
    request=Request("cancelled", interrupt=True, warning="SIGUSR1 on gpu1"),
)


def test_new_round_forgets_the_workers_of_the_last_one_but_not_the_node(
    report: StateReport,
) -> None:
    report.set(**vars(FULL))
    report.fail(failure(1), time.monotonic(), exited=True)
    report.complete([(failure(0), time.monotonic())])
    report.stopped_at = time.monotonic()
    report.changed.clear()
    report.begin(4)
    kept = {name: getattr(FULL, name) for name in ("measured", "seen", "request")}
    assert replace(report.now(), quiet=0.0) == NodeState(4, idle=False, **kept)
    assert report.now().quiet < 1.0
    assert report.changed.is_set()
    report.fail(failure(0), time.monotonic(), exited=True)
    assert report.now().failing, "the stop of the last round hides no failure"


@pytest.mark.parametrize(
    ("later", "step", "told", "last_step"),
    [
        (0.5, 7, False, 7),
        (1.5, 7, True, 7),
        (0.5, 8, True, 8),
        (-9.0, 8, True, 8),
        (1.5, -1, True, 7),
        (-9.0, 3, False, 7),
    ],
)
def test_sign_of_life_is_told_after_a_second_or_with_a_new_step(
    report: StateReport, later: float, step: int, told: bool, last_step: int
) -> None:
    begun = time.monotonic()
    report.note_alive(begun, 7)
    report.changed.clear()
    report.note_alive(begun + later, step)
    assert (report.changed.is_set(), report.state.step) == (told, last_step)
    assert report.now().quiet < time.monotonic() - begun + 0.1


@pytest.mark.parametrize("workers", [1, 8, 64, 512])
def test_state_without_failures_takes_1_kib_and_256_bytes_a_worker(
    report: StateReport, workers: int
) -> None:
    named = tuple(range(16_000, 16_008))  # as many as a worker names
    report.set(succeeded=tuple(range(workers)))
    report.set(missing=Missing(workers - 1, named, gave_up=True), joined=workers, formed=workers)
    report.set(started=True, ended=True, step=2**40, sampled=10_000, measured="done")
    lines = ["rank 1 (node 1, local rank 1, host gpu1, pid 1): it sleeps in open (train.py:3)"]
    report.set(probed=answer_to(Probe(named), lines * min(workers, len(named)), []))
    assert len(messages.FROM_AGENT.encode(report.now())) <= 1024 + 256 * workers


def test_texts_of_a_failure_are_cut_to_4_kib_and_the_end_of_the_output_stays(
    report: StateReport,
) -> None:
    lines = tuple(f"{number:03}" + "x" * 97 for number in range(100))
    report.fail(replace(failure(0), last_lines=lines), time.monotonic(), exited=True)
    [found] = report.now().failing
    assert len(found.failure.message) == 4096
    assert len("\n".join(found.failure.last_lines)) == 4096
    assert found.failure.last_lines[-40:] == lines[-40:]


def test_cause_is_told_beside_hundreds_of_earlier_effects(report: StateReport) -> None:
    begun = time.monotonic()
    for rank in range(300):
        report.fail(replace(failure(rank), effect=True), begun - 9.0, exited=True)
    report.fail(failure(300), begun, exited=True)
    assert report.now().failing[0].failure.rank == 300
    assert len(report.now().failing) <= 128


def test_report_of_many_long_failures_and_answers_fits_a_message() -> None:
    report = StateReport()
    report.begin(0)
    for rank in range(300):
        report.fail(failure(rank, lines=50), time.monotonic(), exited=True)
    failures = [failure(rank, lines=50) for rank in range(64)]
    probe = Probe(tuple(range(300)))
    report.set(probed=answer_to(probe, ["x" * 1000] * 300, failures))
    state = report.now()
    data = messages.FROM_AGENT.encode(state)
    assert len(data) < LINE_BYTES - 1000
    assert len(state.probed.failures) > 16
    assert state.failing[0].failure.last_lines


WIRE = json.loads(messages.FROM_AGENT.encode(FULL))


def test_state_is_equal_after_its_way_over_the_network() -> None:
    assert messages.FROM_AGENT.decode(json.loads(json.dumps(WIRE))) == FULL


def within_limits(state: NodeState) -> bool:
    """Return whether the texts, lists and numbers of a state are as small as `states` says."""
    request, numbers = state.request, (state.joined, state.formed, state.sampled, state.seen)
    texts = (state.measured, request.cancel, request.warning)
    failures = [each.failure for each in (*state.failing, *state.exits)]
    ages = [each.age for each in (*state.failing, *state.exits)]
    if state.probed is not None:
        texts += state.probed.lines
        failures += state.probed.failures
    return (
        -1 <= state.round < 1 << 24
        and all(0 <= number < 1 << 24 for number in numbers)
        and max(map(len, texts)) <= 300
        and all(0 <= seconds < math.inf for seconds in (state.quiet, *ages))
        and all(len(each.message) <= 16_384 for each in failures)
        and all(len(each.last_lines) <= 200 for each in failures)
    )


@fuzz(data=changed(WIRE) | st.dictionaries(st.sampled_from(sorted(WIRE)), JSON))
def test_any_json_is_refused_or_a_state_within_limits(data: dict[str, Any]) -> None:
    with contextlib.suppress(MalformedMessageError):
        state = messages.FROM_AGENT.decode({**data, "type": "NodeState"})
        assert within_limits(state)
        messages.check_sender(state, node_rank=0)


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_value_of_any_depth_is_refused(begin: str, end: str) -> None:
    wrong = {**plain(FULL.failing[0].failure), "message": "deep"}
    text = json.dumps({**WIRE, "failing": [{**plain(FULL.failing[0]), "failure": wrong}]})
    for depth in range(sys.getrecursionlimit() // 2, sys.getrecursionlimit()):
        try:
            data = json.loads(text.replace('"deep"', f"{begin * depth}1{end * depth}"))
        except RecursionError:
            break
        with pytest.raises(MalformedMessageError):
            messages.FROM_AGENT.decode(data)


def test_early_exits_have_the_age_of_their_end() -> None:
    report = StateReport()
    report.begin(0)
    report.complete([(failure(3), time.monotonic() - 5.0)])
    assert report.now().reported
    assert [round(each.age) for each in report.now().exits] == [5]


WORLD = World(
    restart=0, master_addr="127.0.0.1", master_port=1, agent_store=True, node_rank=0, nnodes=1,
    nproc=1, first_rank=0, world_size=1,
)  # fmt: skip


@pytest.fixture
def workers(tmp_path: Path, report: StateReport) -> Iterator[NodeWorkers]:
    """The workers of a node whose forkserver cannot start any."""
    topology = Topology(
        node_rank=0, nnodes=1, nproc_per_node=1, master_addr="127.0.0.1,fd00::1", master_port=None,
        source="test",
    )  # fmt: skip
    options = LaunchOptions(Program("script", "x.py"))
    identity = JobIdentity("job", 0, b"token", [1], has_torch=False)
    node = NodeJob(topology, options, identity, tmp_path, print_line=print)
    agent_end, forkserver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent_end, forkserver_end:
        # The process has no table of workers.
        made = NodeWorkers(node, ForkserverClient(os.getpid(), agent_end), report, print)
        made.fail_node("srun was killed")
        yield made


def test_node_that_fails_before_the_first_round_says_so_when_the_round_begins(
    workers: NodeWorkers, report: StateReport
) -> None:
    assert not report.now().failing
    workers.start(Order(0, world=WORLD))
    assert [each.failure.message for each in report.now().failing] == ["srun was killed"]


def test_order_that_is_repeated_is_answered_once(
    workers: NodeWorkers, report: StateReport, tmp_path: Path
) -> None:
    log = tmp_path / "logs/node0/rank0.err"
    log.parent.mkdir(parents=True)
    log.touch()
    workers.start(Order(0, world=WORLD))
    report.set(missing=Missing(0, (5,), gave_up=False))
    found = ("rank 5: it sleeps",)
    order = Order(0, world=WORLD, report=True, probe=Probe((0,)), found=found)
    workers.answer(order, Order(0))
    asyncio.run(workers.look(order, Order(0)))
    known = report.state
    assert known.reported
    assert "was not started" in known.probed.lines[0]
    workers.answer(order, order)
    asyncio.run(workers.look(order, order))
    assert report.state is known
    assert log.read_text().count("it sleeps") == 1


def test_node_takes_a_sample_for_each_number_and_none_when_the_stop_asks_for_none(
    workers: NodeWorkers, report: StateReport
) -> None:
    done, found = Order(0), list[int]()
    for order in Order(0, sample=1), Order(0, sample=2), Order(0, sample=2), Order(0):
        before = report.state
        asyncio.run(workers.look(order, done))
        if report.state is not before:
            found.append(report.state.sampled)
        done = order
    assert found == [1, 2]


def test_agent_sends_new_waits_every_5_s_and_forgets_old_ones(
    workers: NodeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.now)

    def receive(local_rank: int, waited: float) -> None:
        clock.now += 0.1
        workers._on_worker_waits(forkserver_messages.WorkerWaits(local_rank, 0.5, waited))

    receive(0, 0.1)  # no round yet
    workers.start(Order(0, world=replace(WORLD, nproc=2, first_rank=4)))
    assert workers.waits_due() is None
    for local_rank in (0, 1, 2, 4095):
        receive(local_rank, 0.1)
    assert workers.waits_due() == messages.RankWaits(0, ((0, 0.5, 0.1), (1, 0.5, 0.1)))
    assert workers.waits_due() is None
    assert workers.waits() == {4: Wait(0.5, 0.1), 5: Wait(0.5, 0.1)}
    receive(1, 0.2)
    assert workers.waits_due() is None
    clock.now += 5.0
    assert workers.waits_due() == messages.RankWaits(0, ((1, 0.5, 0.2),))
    clock.now += 60.0
    assert not workers.waits()
