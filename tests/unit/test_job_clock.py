"""The axis of a job's times: clocks of nodes are aligned by common events, never compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.insight.job_clock import JobClock, read_phases_of, with_attempts
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.job_dir import PHASES
from clusterjob.node.logs.log_files import node_directory


def begin(
    phase: Phase, monotonic: float, rank: int | None = None, restart: int = 0, attempt: int = 0
) -> PhaseBegin:
    # The wall clock is wrong on purpose: nothing may depend on it.
    return PhaseBegin(
        phase, rank, restart=restart, attempt=attempt, time=monotonic * 7, monotonic=monotonic
    )


def round_of(base: float, rank: int, start: float = 10.0, formed: float = 20.0) -> list[PhaseBegin]:
    return [
        begin(Phase.SETUP, base),
        begin(Phase.IMPORT, base + start, rank),
        begin(Phase.INIT, base + start + 3, rank),
        begin(Phase.RUNNING, base + formed, rank),
        begin(Phase.ENDED, base + 60, rank),
    ]


@given(st.floats(1, 1e9), st.floats(1, 1e9), st.floats(-5, 5))
def test_nodes_are_aligned_where_the_group_is_formed(
    first: float, second: float, late: float
) -> None:
    clock = JobClock({0: round_of(first, 0), 1: round_of(second, 1, start=10 + late)}, [])
    assert clock.place(0, 0, first) == pytest.approx(0, abs=1e-3)
    assert clock.place(1, 0, second + 20) == pytest.approx(20, abs=1e-3)
    assert clock.place(0, 0, first + 20) == pytest.approx(20, abs=1e-3)
    assert not clock.unaligned


@pytest.mark.parametrize("common", [True, False])
def test_times_of_one_host_do_not_stretch_the_axis(common: bool) -> None:
    false = [*(round_of(1.0, 1) if common else ()), begin(Phase.STOP, 9e11, 1)]
    clock = JobClock({0: round_of(5000, 0), 1: false}, [], ends={0: 5070.0})
    assert clock.place(1, 0, 9e11) <= 70 + 600
    assert clock.place(1, 0, 9e11) - clock.place(0, 0, 5000) <= 70 + 2 * 600
    early = [begin(Phase.SETUP, 0.0, 1), *round_of(9e11, 1)]
    clock = JobClock({0: round_of(5000, 0), 1: early}, [], ends={0: 5070.0})
    assert clock.place(0, 0, 5060) - clock.place(0, 0, 5000) == pytest.approx(60)
    assert clock.place(0, 0, 5060) <= 60 + 600
    assert clock.place(1, 0, 0.0) == 0


def test_nodes_without_a_group_are_aligned_where_workers_start() -> None:
    phases = {
        0: [begin(Phase.SETUP, 100), begin(Phase.RUNNING, 110, 0)],
        1: [begin(Phase.SETUP, 5000), begin(Phase.RUNNING, 5004, 1)],
    }
    clock = JobClock(phases, [])
    assert clock.place(1, 0, 5004) == clock.place(0, 0, 110) == 10


def test_node_without_common_event_is_placed_at_the_begin_and_named() -> None:
    phases = {0: round_of(100, 0), 1: [begin(Phase.SETUP, 9000), begin(Phase.RENDEZVOUS, 9003)]}
    clock = JobClock(phases, [])
    placed = [clock.place(1, 0, 9000), clock.place(1, 0, 9003), clock.place(5, 0, 123.0)]
    assert placed == [0, 3, 0]
    assert clock.unaligned == {1, 5}


def test_attempts_follow_each_other_with_a_gap() -> None:
    # The second attempt runs on another machine, whose clock shows less.
    second = [begin(Phase.IMPORT, 7, 0, attempt=1), begin(Phase.ENDED, 17, 0, attempt=1)]
    clock = JobClock({0: [*round_of(1000, 0), *second]}, [], ends={0: 1100.0})
    assert clock.attempts == [0, 1]
    assert clock.place(0, 0, 1100) == 100
    assert clock.begin(1) == clock.place(0, 1, 7) == 102
    assert clock.place(0, 1, 17) == 112


def test_events_without_attempt_belong_to_the_attempt_that_starts() -> None:
    events = [
        {"event": "joined", "monotonic": 1},
        {"event": "started", "monotonic": 2, "attempt": 0},
        {"event": "restart", "monotonic": 3},
        {"event": "started", "monotonic": 4, "attempt": 0},
        {"event": "ended", "monotonic": 5},
        {"event": "joined", "monotonic": 1},
        {"event": "started", "monotonic": 2, "attempt": 2},
        {"event": "lost", "monotonic": 9},
        {"event": "no time"},
        {"event": "bad", "monotonic": float("nan")},
        {"event": "bad", "monotonic": True},
        {"event": 5, "monotonic": 5},
    ]
    assert [event["attempt"] for event in with_attempts(events)] == [0, 0, 0, 0, 0, 2, 2, 2]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Phase)),
            st.floats(0, 1e11),
            st.none() | st.integers(0, 3),
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        max_size=12,
    )
)
def test_any_phases_give_times_that_are_not_negative(values: list[tuple]) -> None:
    begins = [begin(*value) for value in values]
    clock = JobClock({0: begins[::2], 3: begins[1::2]}, [])
    for node in (0, 3):
        for one in begins:
            assert clock.place(node, one.attempt, one.monotonic) >= 0


def test_phases_with_impossible_values_are_left_out(tmp_path: Path) -> None:
    node_directory(tmp_path, 0).mkdir(parents=True)
    log = PhaseLog(tmp_path, 0)
    for monotonic, rank in ((50, 0), (-5, 0), (1e300, 0), (50, 1 << 30)):
        log.add(begin(Phase.IMPORT, monotonic, rank))
    with (node_directory(tmp_path, 0) / PHASES).open("a") as stream:
        stream.write('{"phase": "import", "mono')
    assert read_phases_of(tmp_path, [0, 1]) == {0: [begin(Phase.IMPORT, 50, 0)]}
