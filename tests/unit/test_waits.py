"""Waits in collectives: how they are measured, and which rank is named as a straggler."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import JSON, fuzz
from hypothesis import strategies as st

from clusterjob.backends import job_progress
from clusterjob.backends.base import Status, Straggler
from clusterjob.backends.job_progress import progress
from clusterjob.cli.top_columns import rank_columns
from clusterjob.insight import sample_files
from clusterjob.insight import stragglers as insight
from clusterjob.insight.live_node import RankNow
from clusterjob.node.contract import World
from clusterjob.node.coordinator import waits_of
from clusterjob.node.logs import events
from clusterjob.node.logs.events import EventLog, read_events
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.samples import NodeFacts, Sample, SampleWriter, WorkerSample
from clusterjob.node.metrics.stragglers import StragglerWatch, Wait
from clusterjob.node.rendezvous import messages
from clusterjob.node.verdict import JobState
from clusterjob.node.workers import torch_patches
from clusterjob.node.workers.torch_patches import Waits

Sent = list[tuple[float, float]]
WORKER = WorkerSample(0, 99.0, rss=1024, read=0.0, written=0.0, threads=4)
SAMPLE = Sample(
    1.7e9, 5.0, restart=0, quiet=0.0, cpu=99.0, memory=1, load=1.0, received=0.0, sent=0.0,
    read=0.0, written=0.0,
)  # fmt: skip


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the monotonic clock of the tests; they set its `now`."""
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: made.now)
    return made


# -- the measurement in a worker -------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    made: Sent = []
    monkeypatch.setattr(torch_patches, "send", lambda _, step, waited: made.append((step, waited)))
    return made


def steps(waits: Waits, clock: Any, count: int, *, step: float, waited: float) -> None:
    for _ in range(count):
        clock.now += step
        waits.add(step, waited)


def test_usual_step_and_wait_are_sent_every_5_s(clock: Any, sent: Sent) -> None:
    steps(Waits(), clock, 180, step=0.1, waited=0.025)
    assert sent == [(pytest.approx(0.1), pytest.approx(0.025))] * 4


def test_first_steps_and_rare_long_waits_do_not_count(clock: Any, sent: Sent) -> None:
    waits = Waits()
    for _ in range(6):
        steps(waits, clock, 1, step=20.0, waited=19.0)  # the others wait for a checkpoint
        steps(waits, clock, 49, step=0.1, waited=0.01)
    assert sent
    assert all(one == (pytest.approx(0.1), pytest.approx(0.01)) for one in sent)


def test_few_readings_are_not_sent(clock: Any, sent: Sent) -> None:
    steps(Waits(), clock, 2, step=10.0, waited=1.0)
    assert not sent


# -- the rule --------------------------------------------------------------------------------------


def late_in(waits: dict[int, Wait]) -> dict[int, Wait]:
    return {rank: each for rank, each in stragglers.compare(waits).items() if each.is_long}


def even(count: int, step: float = 0.5, waited: float = 0.05) -> dict[int, Wait]:
    return {rank: Wait(step, waited) for rank in range(count)}


@pytest.mark.parametrize(
    ("late", "count"),
    [([3], 4), ([0], 2), ([2, 3], 4), ([7], 1024), (list(range(8, 16)), 64)],
    ids=["one", "of two", "a node of two", "one of many", "a node of many"],
)
def test_ranks_that_wait_less_than_half_of_the_ranks_are_late(late: list[int], count: int) -> None:
    waits = even(count, waited=0.45) | {rank: Wait(0.5, 0.05) for rank in late}
    found = late_in(waits)
    assert sorted(found) == late
    assert found[late[0]] == Wait(0.5, pytest.approx(0.4))
    assert found[late[0]].waited / found[late[0]].step == pytest.approx(0.8)


def balanced(count: int) -> dict[int, Wait]:
    chance = random.Random(count)
    return {rank: Wait(0.5, 0.2 + chance.uniform(-0.02, 0.02)) for rank in range(count)}


@pytest.mark.parametrize(
    "waits",
    [
        *(pytest.param(balanced(count), id=f"balanced {count}") for count in (2, 3, 4, 64)),
        pytest.param({}, id="no rank"),
        pytest.param({0: Wait(0.5, 0.0)}, id="one rank"),
        pytest.param(even(4, step=0.0, waited=0.0), id="no step"),
        # 1 ms of 5 ms is too short to tell.
        pytest.param(even(4, 0.005, 0.0015) | {1: Wait(0.005, 0.0005)}, id="short steps"),
        # Rank 0 collects what the others compute.
        pytest.param(even(8, waited=0.01) | {0: Wait(0.5, 0.49)}, id="few wait long"),
        pytest.param(even(4, waited=0.4) | {3: Wait(60.0, 0.0)}, id="another step"),
    ],
)
def test_no_rank_is_late_in_a_balanced_job(waits: dict[int, Wait]) -> None:
    assert not late_in(waits)


NUMBER = st.floats(0, 1e9, allow_nan=False, allow_infinity=False)


@fuzz(pairs=st.lists(st.tuples(NUMBER, NUMBER), max_size=12))
def test_any_numbers_give_shares_between_0_and_1(pairs: list[tuple[float, float]]) -> None:
    found = late_in({rank: Wait(*pair) for rank, pair in enumerate(pairs)})
    assert len(found) <= len(pairs) / 2
    for lateness in found.values():
        assert 0 < lateness.waited <= lateness.step * (1 + 1e-9)
        assert stragglers.SHARE <= lateness.waited / lateness.step <= 1 + 1e-9


@fuzz(lie=st.tuples(NUMBER, NUMBER), liar=st.integers(0, 7))
def test_one_rank_that_lies_makes_no_other_rank_late(lie: tuple[float, float], liar: int) -> None:
    assert set(late_in(even(8) | {liar: Wait(*lie)})) <= {liar}


# -- from the agents to the events -----------------------------------------------------------------


def world_of(node: int, nnodes: int, nproc: int) -> World:
    return World(
        0, "gpu0", 29500, agent_store=True, node_rank=node, nnodes=nnodes, nproc=nproc,
        first_rank=node * nproc, world_size=nnodes * nproc,
    )  # fmt: skip


class Watched:
    """A watch of 2 nodes x 2 ranks, and its events."""

    def __init__(self, directory: Path, clock: Any) -> None:
        self.directory = directory
        self._clock = clock
        self._watch = StragglerWatch(0, 2, 4, EventLog(directory / "events.jsonl"))

    def measure(self, times: int, *waited: float, restart: int = 0) -> None:
        """Send the waits of all ranks in steps of 0.5 s."""
        for _ in range(times):
            self._clock.now += 5.0
            for node in range(2):
                first = 2 * node
                ranks = tuple((local, 0.5, waited[first + local]) for local in (0, 1))
                self._receive(node, messages.RankWaits(restart, ranks))

    def forge(self, *ranks: tuple[int, float, float]) -> None:
        self._receive(0, messages.RankWaits(0, ranks))

    def _receive(self, node: int, message: messages.RankWaits) -> None:
        self._watch.receive(node, f"gpu{node}", waits_of(message, world_of(node, 2, 2)))

    def events(self) -> list[tuple[str, int]]:
        found = read_events(self.directory / "events.jsonl")
        return [(event["event"], event["rank"]) for event in found]


@pytest.fixture
def watched(tmp_path: Path, clock: Any) -> Watched:
    return Watched(tmp_path, clock)


def test_rank_that_stays_late_gets_one_event_until_it_has_caught_up(watched: Watched) -> None:
    watched.measure(2, 0.4, 0.4, 0.4, 0.0)
    assert not watched.events()
    watched.measure(100, 0.4, 0.4, 0.4, 0.0)
    assert watched.events() == [("straggling", 3)]
    watched.measure(1, 0.05, 0.05, 0.05, 0.05)
    watched.measure(1, 0.4, 0.4, 0.4, 0.0)
    watched.measure(10, 0.05, 0.05, 0.05, 0.05)
    assert watched.events()[1:] == [("caught_up", 3)]
    watched.measure(4, 0.4, 0.4, 0.4, 0.0)
    watched.measure(4, 0.05, 0.05, 0.05, 0.05)
    assert watched.events()[2:] == [("straggling", 3), ("caught_up", 3)]


def test_all_ranks_of_a_slow_node_are_stragglers(watched: Watched) -> None:
    watched.measure(5, 0.4, 0.4, 0.0, 0.0)
    assert watched.events() == [("straggling", 2), ("straggling", 3)]
    now = progress(watched.directory).stragglers
    assert job_progress.straggler_text(now) == (
        "rank 2 (node 1, gpu1): the others wait 0.4 s of each 0.5 s step for it;"
        " rank 3 (node 1, gpu1): the others wait 0.4 s of each 0.5 s step for it"
    )


def test_rank_that_is_late_once_or_now_and_then_gets_no_event(watched: Watched) -> None:
    for _ in range(20):
        watched.measure(2, 0.4, 0.4, 0.4, 0.0)
        watched.measure(1, 0.05, 0.05, 0.05, 0.05)
    assert not watched.events()


def test_waits_of_another_round_and_of_impossible_ranks_are_ignored(watched: Watched) -> None:
    watched.measure(9, 0.4, 0.4, 0.4, 0.0, restart=1)
    for _ in range(9):
        watched.forge((3, 0.5, 0.0), (4000, 0.5, 0.5))
    assert not watched.events()


@fuzz(
    many=st.lists(
        st.lists(st.tuples(st.integers(0, 4095), NUMBER, NUMBER), max_size=4), max_size=30
    )
)
def test_hostile_agent_names_no_rank_of_another_node(
    many: list[list[tuple[int, float, float]]], tmp_path: Path, clock: Any
) -> None:
    (tmp_path / "events.jsonl").unlink(missing_ok=True)
    watched = Watched(tmp_path, clock)
    for forged in many:
        watched.measure(1, 0.05, 0.05, 0.05, 0.05)
        watched.forge(*forged)
    assert {rank for _, rank in watched.events()} <= {0, 1}


def test_large_jobs_send_their_waits_less_often() -> None:
    assert stragglers.interval(1024) < 6
    assert stragglers.interval(10_000) == 50.0


def test_top_marks_straggler_and_shows_share_of_its_waits() -> None:
    columns = {column.title: column for column in rank_columns({1}, {2, 1})}
    ranks = [RankNow(rank, 0, "gpu0", waits=rank * 10.0) for rank in range(3)]
    assert [columns["WAIT%"].text(rank) for rank in ranks] == ["0", "10", "20"]
    assert [columns["RANK"].style(rank) for rank in ranks] == ["", "bold red", "bold yellow"]


# -- events that are read --------------------------------------------------------------------------


def straggler(rank: int, node: int, waited: float = 0.42, host: str = "gpu1") -> Straggler:
    return Straggler(rank, node, host, waited_s=waited, step_s=0.55)


def test_line_names_rank_and_how_long_the_others_wait() -> None:
    assert job_progress.straggler_text([straggler(3, 0)]) == (
        "rank 3 (node 0, gpu1): the others wait 0.42 s of each 0.55 s step for it"
    )
    several = [straggler(1, 0, 0.05), *(straggler(rank, rank, 0.5) for rank in range(2, 7))]
    text = job_progress.straggler_text(several)
    assert text.startswith("rank 2 (node 2, gpu1): the others wait 0.5 s of each 0.55 s step")
    assert text.endswith("; 3 more ranks")
    assert job_progress.straggler_text([]) == ""


def test_status_has_stragglers_until_they_have_caught_up_or_the_round_ends(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("started", world_size=4, restart=0)
    for rank in (3, 1):
        log.add("straggling", restart=0, **vars(straggler(rank, rank // 2)))
    found = progress(tmp_path).status(JobState.RUNNING).stragglers
    assert found == (straggler(1, 0), straggler(3, 1))
    assert found[0].to_json() == {
        "rank": 1, "node": 0, "host": "gpu1", "waited_s": 0.42, "step_s": 0.55, "share": 0.764,
    }  # fmt: skip
    log.add("caught_up", rank=1)
    assert progress(tmp_path).stragglers == (straggler(3, 1),)
    log.add("stop", why="boom")
    assert progress(tmp_path).stragglers == ()
    assert job_progress.job_stragglers(tmp_path) == (straggler(1, 0), straggler(3, 1))
    log.add("started", world_size=4, restart=1)
    assert job_progress.job_stragglers(tmp_path) == ()


def test_status_shows_newest_numbers_of_samples_and_keeps_those_of_the_event_without_samples(
    tmp_path: Path,
) -> None:
    now = Status(JobState.RUNNING, stragglers=(straggler(3, 1, 0.05),))
    assert insight.now(tmp_path, now) == now.stragglers
    assert insight.now(tmp_path, Status(JobState.RUNNING)) == ()
    for node in (0, 1):
        node_directory(tmp_path, node).mkdir(parents=True)
        facts = NodeFacts(node, f"gpu{node}", attempt=0, cores=8, memory=1 << 30)
        writer = SampleWriter(tmp_path, node)
        workers = tuple(
            replace(WORKER, rank=rank, step=500.0, waited=100.0 if rank == 3 else 400.0)
            for rank in (2 * node, 2 * node + 1)
        )
        writer.add(facts, replace(SAMPLE, workers=workers))
    [found] = insight.now(tmp_path, now)
    assert (found.rank, found.waited_s, found.step_s) == (3, pytest.approx(0.3), 0.5)


def test_worker_waits_for_a_share_of_its_steps() -> None:
    rows = [(None, None), (50.0, None), (0.0, 20.0), (50.0, 20.0), (50.0, 70.0)]
    shares = [sample_files.waits(replace(WORKER, step=one, waited=two)) for one, two in rows]
    assert shares == [None, None, None, 40.0, 100.0]


@fuzz(
    event=st.fixed_dictionaries(
        dict.fromkeys(("rank", "node_rank", "waited_s", "step_s"), JSON | NUMBER)
        | {"host": JSON | st.just("\x1b[2Jx\n" * 200)}
    )
)
def test_any_event_gives_a_harmless_line_or_none(event: dict[str, Any]) -> None:
    known: dict[int, Straggler] = {}
    job_progress.note_straggler(known, event | {"event": events.STRAGGLING})
    for found in known.values():
        assert job_progress.straggler_text([found]).isprintable()
        assert len(found.host) < 1000
        assert 0 <= found.to_json()["share"] <= 1
