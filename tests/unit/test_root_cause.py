"""Root cause among several failures of a job."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.rendezvous import root_cause as ranking
from clusterjob.node.rendezvous.root_cause import EFFECT_TIMEOUT, EXIT_TIMEOUT, Entry
from clusterjob.node.verdict import Failure, FailureKind


class RootCause:
    """The failures of one node: its agent reports them, and the coordinator ranks them."""

    def __init__(self) -> None:
        self.report = StateReport()
        self.exits: list[Entry] = []

    def add(self, failure: Failure, at: float, *, exited: bool) -> None:
        self.report.fail(failure, at, exited=exited)

    def add_early_exit(self, failure: Failure, at: float) -> None:
        self.exits.append(Entry(failure, at, exited=True))

    def note_stop(self, at: float) -> None:
        self.report.stopped_at = min(self.report.stopped_at, at)

    def entries(self) -> list[Entry]:
        moment = time.monotonic()
        found = self.report.now().failing
        return [Entry(each.failure, moment - each.age, exited=each.exited) for each in found]

    def root(self) -> Failure | None:
        return ranking.root(self.entries(), self.exits)

    def consequences(self) -> tuple[Failure, ...]:
        return ranking.consequences(self.entries(), self.exits)

    def stop_due(self) -> float:
        return ranking.stop_due(self.entries())


def failure(
    rank: int | None,
    *,
    effect: bool = False,
    node: int = 0,
    code: int = 1,
    signal: str | None = None,
    message: str = "m",
) -> Failure:
    return Failure(
        rank,
        rank,
        node_rank=node,
        host="host",
        exit_code=code,
        signal=signal,
        message=message,
        last_lines=(),
        effect=effect,
    )


def test_job_without_failure_has_no_root_cause() -> None:
    root_cause = RootCause()
    assert root_cause.root() is None
    assert root_cause.consequences() == ()
    assert root_cause.stop_due() == math.inf


def test_earliest_failure_is_root_cause_in_any_order_of_arrival() -> None:
    root_cause = RootCause()
    root_cause.add(failure(2), 10.5, exited=True)
    root_cause.add(failure(0), 10.1, exited=True)
    root_cause.add(failure(1), 10.3, exited=True)
    assert root_cause.root() == failure(0)
    assert root_cause.consequences() == (failure(1), failure(2))


@pytest.mark.parametrize(
    ("announced", "end", "kind"),
    [
        (FailureKind.CODE, FailureKind.EXIT_CODE, FailureKind.CODE),  # no traceback in the output
        (FailureKind.CODE, FailureKind.DEVICE, FailureKind.DEVICE),
        (FailureKind.EXIT_CODE, FailureKind.CODE, FailureKind.CODE),  # Hydra prints it and exits
        (FailureKind.IMPORT, FailureKind.CODE, FailureKind.IMPORT),
    ],
)
def test_more_specific_kind_of_report_and_end_counts(
    announced: FailureKind, end: FailureKind, kind: FailureKind
) -> None:
    root_cause = RootCause()
    root_cause.add(replace(failure(0), kind=announced, where="t.py:3"), 10.0, exited=False)
    root_cause.add(replace(failure(0), kind=end, where="t.py:1"), 10.1, exited=True)
    root = root_cause.root()
    assert root is not None
    assert (root.kind, root.where) == (kind, "t.py:3")


def test_effect_is_not_root_cause_beside_other_failure() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, effect=True), 10.0, exited=True)
    assert root_cause.root() == failure(0, effect=True)
    root_cause.add(failure(1), 11.0, exited=True)
    assert root_cause.root() == failure(1)
    assert root_cause.consequences() == (failure(0, effect=True),)


def test_earliest_effect_is_root_cause_without_other_failures() -> None:
    root_cause = RootCause()
    root_cause.add(failure(1, effect=True), 10.2, exited=True)
    root_cause.add(failure(0, effect=True), 10.1, exited=True)
    assert root_cause.root() == failure(0, effect=True)


def test_cause_that_has_exited_stops_job_at_once() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0), 10.0, exited=True)
    assert root_cause.stop_due() <= 10.0


def test_effect_delays_stop_until_cause_or_effect_timeout() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, effect=True), 10.0, exited=True)
    assert root_cause.stop_due() == pytest.approx(10.0 + EFFECT_TIMEOUT, abs=0.1)
    root_cause.add(failure(1), 10.1, exited=True)
    assert root_cause.stop_due() <= 10.0


def test_cause_before_its_exit_delays_stop_by_exit_timeout() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0), 10.0, exited=False)
    root_cause.add(failure(1), 12.0, exited=False)
    assert root_cause.stop_due() == pytest.approx(10.0 + EXIT_TIMEOUT, abs=0.1)
    root_cause.add(failure(0), 10.2, exited=True)
    assert root_cause.stop_due() <= 10.0


def test_later_effects_do_not_delay_stop() -> None:
    root_cause = RootCause()
    for index in range(20):
        root_cause.add(failure(index, effect=True), 10.0 + index, exited=True)
    assert root_cause.stop_due() == pytest.approx(10.0 + EFFECT_TIMEOUT, abs=0.1)


def test_effect_before_its_exit_delays_stop_by_exit_timeout() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, effect=True), 10.0, exited=False)
    assert root_cause.stop_due() == pytest.approx(10.0 + EXIT_TIMEOUT, abs=0.1)


def test_exit_after_early_report_keeps_its_time_and_message() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, message="ValueError: boom"), 10.0, exited=False)
    root_cause.add(failure(1, message="later"), 10.1, exited=True)
    end = replace(
        failure(0, code=1, message="exited with code 1"),
        last_lines=("Traceback", "ValueError: boom"),
    )
    root_cause.add(end, 12.0, exited=True)
    assert root_cause.root() == replace(end, message="ValueError: boom")
    assert root_cause.consequences() == (failure(1, message="later"),)


def test_signal_after_reported_exception_is_in_message_and_not_cause() -> None:
    """An interpreter may abort while it exits, after the exception that ended the program."""
    root_cause = RootCause()
    root_cause.add(failure(0, message="ValueError: boom"), 10.0, exited=False)
    root_cause.add(
        replace(
            failure(0, code=134, signal="SIGABRT", message="was killed by SIGABRT"),
            last_lines=("ValueError: boom",),
        ),
        10.5,
        exited=True,
    )
    root = root_cause.root()
    assert root is not None
    assert (root.exit_code, root.signal, root.last_lines) == (1, None, ("ValueError: boom",))
    assert root.message.startswith("ValueError: boom")
    assert "SIGABRT" in root.message


def test_worker_stopped_while_exiting_keeps_reported_exit_code() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, code=3, message="sys.exit(3)"), 10.0, exited=False)
    root_cause.note_stop(15.0)
    root_cause.add(
        failure(0, code=143, signal="SIGTERM", message="was killed by SIGTERM"), 15.1, exited=True
    )
    root = root_cause.root()
    assert root is not None
    assert (root.exit_code, root.signal, root.message) == (3, None, "sys.exit(3)")


def test_failure_marked_as_effect_by_report_or_exit_is_effect() -> None:
    for early, late in ((True, False), (False, True)):
        root_cause = RootCause()
        root_cause.add(failure(0, effect=early), 10.0, exited=False)
        root_cause.add(failure(0, effect=late), 10.1, exited=True)
        root = root_cause.root()
        assert root is not None
        assert root.effect


def test_worker_ended_after_stop_is_not_failure() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0), 10.0, exited=True)
    root_cause.note_stop(10.1)
    root_cause.add(failure(1, code=143, signal="SIGTERM"), 10.2, exited=True)
    assert root_cause.consequences() == ()


def test_failure_before_stop_counts_when_reported_after_it() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0), 10.0, exited=True)
    root_cause.note_stop(10.1)
    root_cause.add(failure(1), 9.9, exited=True)
    assert root_cause.root() == failure(1)
    assert root_cause.consequences() == (failure(0),)


def test_second_stop_changes_nothing() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0), 10.0, exited=True)
    root_cause.note_stop(10.1)
    root_cause.note_stop(20.0)
    root_cause.add(failure(1), 15.0, exited=True)
    assert root_cause.consequences() == ()


def test_node_and_its_workers_are_separate_failures() -> None:
    root_cause = RootCause()
    root_cause.add(failure(None, node=1), 10.0, exited=True)
    root_cause.add(failure(0, node=1), 9.0, exited=True)
    root_cause.add(failure(0, node=0), 9.5, exited=True)
    assert root_cause.root() == failure(0, node=1)
    assert root_cause.consequences() == (failure(0, node=0), failure(None, node=1))


def test_second_end_of_same_worker_changes_nothing() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, message="first"), 10.0, exited=True)
    root_cause.add(failure(0, message="second"), 9.0, exited=True)
    assert root_cause.root() == failure(0, message="first")
    assert root_cause.consequences() == ()


OWN_CONNECTION = (
    "Traceback (most recent call last):",
    (
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/elastic/'
        'multiprocessing/errors/__init__.py", line 355, in wrapper'
    ),
    '  File "/home/me/data.py", line 12, in download',
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
ALL_REDUCE = (
    "Traceback (most recent call last):",
    (
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", '
        "line 83, in wrapper"
    ),
    (
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", '
        "line 3008, in all_reduce"
    ),
    (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "
        "Connection closed by peer [127.0.0.1]:1234"
    ),
)
NCCL_ABORT = ("  what():  [PG ID 0 Rank 2] NCCL communicator was aborted on rank 2.",)


def test_rank_with_exit_code_0_is_not_cause_of_connection_lost_by_script() -> None:
    root_cause = RootCause()
    root_cause.add_early_exit(failure(0, code=0), 10.0)
    lost = replace(failure(1, effect=True, message=OWN_CONNECTION[-1]), last_lines=OWN_CONNECTION)
    root_cause.add(lost, 610.0, exited=True)
    assert root_cause.root() == lost
    assert root_cause.consequences() == ()


@pytest.mark.parametrize(
    ("lines", "where"), [(ALL_REDUCE, "all_reduce"), (NCCL_ABORT, "a collective")]
)
def test_rank_with_exit_code_0_is_cause_of_connection_lost_by_torch(
    lines: tuple[str, ...], where: str
) -> None:
    root_cause = RootCause()
    root_cause.add_early_exit(failure(0, code=0), 10.0)
    own = replace(failure(1, effect=True, message=OWN_CONNECTION[-1]), last_lines=OWN_CONNECTION)
    root_cause.add(own, 10.5, exited=True)
    root_cause.add(replace(failure(2, effect=True), last_lines=lines), 10.6, exited=True)
    root = root_cause.root()
    assert root is not None
    assert (root.rank, root.kind) == (0, "early_exit")
    assert root.message == f"ended with exit code 0 0.5 s before; rank 2 was in {where}"
    assert len(root_cause.consequences()) == 2


@pytest.mark.parametrize(("seconds", "cause"), [(1.5, 0), (2.5, 1)])
def test_rank_with_exit_code_0_is_cause_if_its_exit_is_noticed_at_most_2_s_late(
    seconds: float, cause: int
) -> None:
    root_cause = RootCause()
    root_cause.add(replace(failure(1, effect=True), last_lines=ALL_REDUCE), 10.0, exited=True)
    root_cause.add_early_exit(failure(0, code=0), 10.0 + seconds)
    root = root_cause.root()
    assert root is not None
    assert root.rank == cause
    if cause == 0:
        assert root.message == "ended with exit code 0 at that moment; rank 1 was in all_reduce"


def test_rank_with_cut_traceback_is_not_named_beside_rank_with_collective() -> None:
    root_cause = RootCause()
    root_cause.add_early_exit(failure(0, code=0), 10.0)
    root_cause.add(replace(failure(1, effect=True), last_lines=ALL_REDUCE), 10.5, exited=True)
    root_cause.add(
        replace(failure(2, effect=True, message=ALL_REDUCE[-1]), last_lines=ALL_REDUCE[:2]),
        10.6,
        exited=True,
    )
    root = root_cause.root()
    assert root is not None
    assert root.message == "ended with exit code 0 0.5 s before; rank 1 was in all_reduce"


report = st.tuples(
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 100).map(float),
    st.booleans(),
    st.booleans(),
)  # node, local rank, time, effect, exited


@given(st.lists(report), st.one_of(st.none(), st.integers(0, 100).map(float)))
def test_each_failure_is_once_root_cause_or_consequence_in_order(
    reports: list[tuple[int, int, float, bool, bool]], stopped: float | None
) -> None:
    root_cause = RootCause()
    if stopped is not None:
        root_cause.note_stop(stopped)
    first: dict[tuple[int, int], float] = {}
    for node, local_rank, at, effect, exited in reports:
        root_cause.add(failure(local_rank, node=node, effect=effect), at, exited=exited)
        if stopped is None or at < stopped:
            first.setdefault((node, local_rank), at)
    root = root_cause.root()
    if not first:
        assert root is None
        assert root_cause.stop_due() == math.inf
        return
    assert root is not None
    named = [root, *root_cause.consequences()]
    keys = [(item.node_rank, item.local_rank) for item in named]
    assert sorted(keys) == sorted(first)
    times = [first[key] for key in keys]
    assert times[1:] == sorted(times[1:])
    causes = [at for item, at in zip(named, times, strict=True) if not item.effect]
    if causes:
        assert not root.effect
        assert times[0] == min(causes)
    else:
        assert times[0] == min(times)
    assert root_cause.stop_due() <= max(times) + EXIT_TIMEOUT + 0.1
