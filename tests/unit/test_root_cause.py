"""Root cause among several failures of a job."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.agent.node_workers import StateReport
from clusterjob.node.rendezvous import root_cause as ranking
from clusterjob.node.rendezvous.root_cause import EFFECT_TIMEOUT, EXIT_TIMEOUT, Entry
from clusterjob.node.verdict import Failure, FailureKind


class RootCause:
    """The failures of one node: its agent reports them, and the coordinator ranks them."""

    def __init__(self, *exits: tuple[Failure, float]) -> None:
        self.report = StateReport()
        self.exits = [Entry(failure, at, exited=True) for failure, at in exits]

    def add(self, failure: Failure, at: float, *, exited: bool = True) -> None:
        self.report.fail(failure, at, exited=exited)

    def entries(self) -> list[Entry]:
        moment = time.monotonic()
        found = self.report.now().failing
        return [Entry(each.failure, moment - each.age, exited=each.exited) for each in found]

    def root(self) -> Failure:
        found, _ = ranking.explain(self.entries(), self.exits)
        assert found is not None
        return found

    def consequences(self) -> tuple[Failure, ...]:
        return ranking.explain(self.entries(), self.exits)[1]

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
    root_cause.add(replace(failure(0), kind=end, where="t.py:1"), 10.1)
    assert (root_cause.root().kind, root_cause.root().where) == (kind, "t.py:3")


@pytest.mark.parametrize(
    ("found", "due"),
    [
        ([(False, 10.0, True)], 0.0),  # effect, time, exited
        ([(True, 10.0, True)], 10.0 + EFFECT_TIMEOUT),
        ([(True, 10.0, True), (False, 10.1, True)], 0.0),
        ([(True, 10.0 + index, True) for index in range(20)], 10.0 + EFFECT_TIMEOUT),
        ([(True, 10.0, False)], 10.0 + EXIT_TIMEOUT),
        ([(False, 10.0, False), (False, 12.0, False)], 10.0 + EXIT_TIMEOUT),
        ([(False, 10.0, False), (False, 12.0, True)], 0.0),
        ([], math.inf),
    ],
)
def test_workers_are_stopped_when_a_cause_has_exited_or_none_comes(
    found: list[tuple[bool, float, bool]], due: float
) -> None:
    root_cause = RootCause()
    for rank, (effect, at, exited) in enumerate(found):
        root_cause.add(failure(rank, effect=effect), at, exited=exited)
    assert root_cause.stop_due() == pytest.approx(due, abs=0.1)


def test_exit_after_early_report_keeps_its_time_and_message() -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, message="ValueError: boom"), 10.0, exited=False)
    root_cause.add(failure(1, message="later"), 10.1)
    lines = ("Traceback", "ValueError: boom")
    end = replace(failure(0, code=1, message="exited with code 1"), last_lines=lines)
    root_cause.add(end, 12.0)
    root_cause.add(failure(0, message="a second end"), 9.0)
    assert root_cause.root() == replace(end, message="ValueError: boom")
    assert root_cause.consequences() == (failure(1, message="later"),)


@pytest.mark.parametrize(
    ("stopped", "after"), [(False, " (then was killed by SIGABRT)"), (True, "")]
)
def test_signal_after_a_reported_exception_is_not_the_cause(stopped: bool, after: str) -> None:
    """An interpreter may abort while it exits, or the agent stops it."""
    root_cause = RootCause()
    root_cause.add(failure(0, code=3, message="ValueError: boom"), 10.0, exited=False)
    if stopped:
        root_cause.report.stopped_at = 10.2
    aborted = failure(0, code=134, signal="SIGABRT", message="was killed by SIGABRT")
    root_cause.add(replace(aborted, last_lines=("ValueError: boom",)), 10.5)
    root = root_cause.root()
    assert (root.exit_code, root.signal, root.last_lines) == (3, None, ("ValueError: boom",))
    assert root.message == f"ValueError: boom{after}"


@pytest.mark.parametrize("early", [True, False])
def test_failure_marked_as_effect_by_report_or_exit_is_effect(early: bool) -> None:
    root_cause = RootCause()
    root_cause.add(failure(0, effect=early), 10.0, exited=False)
    root_cause.add(failure(0, effect=not early), 10.1)
    assert root_cause.root().effect


def test_node_and_its_workers_are_separate_failures() -> None:
    root_cause = RootCause()
    root_cause.add(failure(None, node=1), 10.0)
    root_cause.add(failure(0, node=1), 9.0)
    root_cause.add(failure(0, node=0), 9.5)
    assert root_cause.root() == failure(0, node=1)
    assert root_cause.consequences() == (failure(0, node=0), failure(None, node=1))


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


def lost(rank: int, lines: tuple[str, ...]) -> Failure:
    return replace(failure(rank, effect=True, message=lines[-1]), last_lines=lines)


def test_rank_with_exit_code_0_is_not_cause_of_connection_lost_by_script() -> None:
    root_cause = RootCause((failure(0, code=0), 10.0))
    root_cause.add(lost(1, OWN_CONNECTION), 610.0)
    assert root_cause.root() == lost(1, OWN_CONNECTION)
    assert root_cause.consequences() == ()


@pytest.mark.parametrize(
    ("lines", "where"), [(ALL_REDUCE, "all_reduce"), (NCCL_ABORT, "a collective")]
)
def test_rank_with_exit_code_0_is_cause_of_connection_lost_by_torch(
    lines: tuple[str, ...], where: str
) -> None:
    root_cause = RootCause((failure(0, code=0), 10.0))
    root_cause.add(lost(1, OWN_CONNECTION), 10.5)
    root_cause.add(lost(2, lines), 10.6)
    root = root_cause.root()
    assert (root.rank, root.kind) == (0, "early_exit")
    assert root.message == f"ended with exit code 0 0.5 s before; rank 2 was in {where}"
    assert len(root_cause.consequences()) == 2


@pytest.mark.parametrize(("seconds", "cause"), [(1.5, 0), (2.5, 1)])
def test_rank_with_exit_code_0_is_cause_if_its_exit_is_noticed_at_most_2_s_late(
    seconds: float, cause: int
) -> None:
    root_cause = RootCause((failure(0, code=0), 10.0 + seconds))
    root_cause.add(lost(1, ALL_REDUCE), 10.0)
    root = root_cause.root()
    assert root.rank == cause
    at_once = "ended with exit code 0 at that moment; rank 1 was in all_reduce"
    assert (root.message == at_once) == (cause == 0)


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
        root_cause.report.stopped_at = stopped
    first: dict[tuple[int, int], float] = {}
    for node, local_rank, at, effect, exited in reports:
        root_cause.add(failure(local_rank, node=node, effect=effect), at, exited=exited)
        if stopped is None or at < stopped:
            first.setdefault((node, local_rank), at)
    if not first:
        assert ranking.explain(root_cause.entries()) == (None, ())
        return
    root = root_cause.root()
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
