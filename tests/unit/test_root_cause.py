"""Which of several failures was the first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.rendezvous.root_cause import EFFECT_PATIENCE, EXIT_PATIENCE, Judge
from clusterjob.node.verdict import Failure


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


def test_nothing_has_failed() -> None:
    judge = Judge()
    assert judge.root() is None
    assert judge.consequences() == ()
    assert judge.stop_due() == math.inf


def test_the_first_by_time_is_the_cause_whatever_the_order_of_arrival() -> None:
    judge = Judge()
    judge.hear(failure(2), 10.5, exited=True)
    judge.hear(failure(0), 10.1, exited=True)
    judge.hear(failure(1), 10.3, exited=True)
    assert judge.root() == failure(0)
    assert judge.consequences() == (failure(1), failure(2))


def test_an_effect_is_no_cause_while_there_is_another() -> None:
    judge = Judge()
    judge.hear(failure(0, effect=True), 10.0, exited=True)
    assert judge.root() == failure(0, effect=True)
    judge.hear(failure(1), 11.0, exited=True)
    assert judge.root() == failure(1)
    assert judge.consequences() == (failure(0, effect=True),)


def test_the_first_effect_where_there_is_nothing_else() -> None:
    judge = Judge()
    judge.hear(failure(1, effect=True), 10.2, exited=True)
    judge.hear(failure(0, effect=True), 10.1, exited=True)
    assert judge.root() == failure(0, effect=True)


def test_a_cause_that_has_ended_stops_the_job_at_once() -> None:
    judge = Judge()
    judge.hear(failure(0), 10.0, exited=True)
    assert judge.stop_due() <= 10.0


def test_an_effect_waits_a_moment_for_its_cause() -> None:
    judge = Judge()
    judge.hear(failure(0, effect=True), 10.0, exited=True)
    assert judge.stop_due() == pytest.approx(10.0 + EFFECT_PATIENCE)
    judge.hear(failure(1), 10.1, exited=True)
    assert judge.stop_due() <= 10.0


def test_a_cause_that_is_about_to_end_is_waited_for() -> None:
    judge = Judge()
    judge.hear(failure(0), 10.0, exited=False)
    assert judge.stop_due() == pytest.approx(10.0 + EXIT_PATIENCE)
    judge.hear(failure(0), 10.2, exited=True)
    assert judge.stop_due() <= 10.0


def test_more_effects_do_not_put_the_end_off() -> None:
    judge = Judge()
    for index in range(20):
        judge.hear(failure(index, effect=True), 10.0 + index, exited=True)
    assert judge.stop_due() == pytest.approx(10.0 + EFFECT_PATIENCE)


def test_an_effect_that_is_about_to_end_does_not_wait_for_ever() -> None:
    judge = Judge()
    judge.hear(failure(0, effect=True), 10.0, exited=False)
    assert judge.stop_due() == pytest.approx(10.0 + EXIT_PATIENCE)


def test_the_exit_adds_to_the_early_report_and_leaves_its_time_and_words() -> None:
    judge = Judge()
    judge.hear(failure(0, message="ValueError: boom"), 10.0, exited=False)
    judge.hear(failure(1, message="later"), 10.1, exited=True)
    end = replace(
        failure(0, code=1, message="exited with code 1"),
        last_lines=("Traceback", "ValueError: boom"),
    )
    judge.hear(end, 12.0, exited=True)
    assert judge.root() == replace(end, message="ValueError: boom")
    assert judge.consequences() == (failure(1, message="later"),)


def test_a_signal_after_the_announcement_is_told_and_is_not_the_cause() -> None:
    """An interpreter may abort while it exits, after the exception that ended the program."""
    judge = Judge()
    judge.hear(failure(0, message="ValueError: boom"), 10.0, exited=False)
    judge.hear(
        replace(
            failure(0, code=134, signal="SIGABRT", message="was killed by SIGABRT"),
            last_lines=("ValueError: boom",),
        ),
        10.5,
        exited=True,
    )
    root = judge.root()
    assert root is not None
    assert (root.exit_code, root.signal, root.last_lines) == (1, None, ("ValueError: boom",))
    assert root.message.startswith("ValueError: boom")
    assert "SIGABRT" in root.message


def test_a_worker_that_was_stopped_on_its_way_out_keeps_its_own_exit_code() -> None:
    judge = Judge()
    judge.hear(failure(0, code=3, message="sys.exit(3)"), 10.0, exited=False)
    judge.stopped(15.0)
    judge.hear(
        failure(0, code=143, signal="SIGTERM", message="was killed by SIGTERM"), 15.1, exited=True
    )
    root = judge.root()
    assert root is not None
    assert (root.exit_code, root.signal, root.message) == (3, None, "sys.exit(3)")


def test_an_effect_stays_one_whether_the_report_or_the_exit_says_so() -> None:
    for early, late in ((True, False), (False, True)):
        judge = Judge()
        judge.hear(failure(0, effect=early), 10.0, exited=False)
        judge.hear(failure(0, effect=late), 10.1, exited=True)
        root = judge.root()
        assert root is not None
        assert root.effect


def test_what_ends_after_the_order_to_stop_was_stopped_by_us() -> None:
    judge = Judge()
    judge.hear(failure(0), 10.0, exited=True)
    judge.stopped(10.1)
    judge.hear(failure(1, code=143, signal="SIGTERM"), 10.2, exited=True)
    assert judge.consequences() == ()


def test_what_began_before_the_order_and_was_heard_of_after_it_counts() -> None:
    judge = Judge()
    judge.hear(failure(0), 10.0, exited=True)
    judge.stopped(10.1)
    judge.hear(failure(1), 9.9, exited=True)
    assert judge.root() == failure(1)
    assert judge.consequences() == (failure(0),)


def test_a_second_order_to_stop_changes_nothing() -> None:
    judge = Judge()
    judge.hear(failure(0), 10.0, exited=True)
    judge.stopped(10.1)
    judge.stopped(20.0)
    judge.hear(failure(1), 15.0, exited=True)
    assert judge.consequences() == ()


def test_a_node_and_each_of_its_workers_fail_on_their_own() -> None:
    judge = Judge()
    judge.hear(failure(None, node=1), 10.0, exited=True)
    judge.hear(failure(0, node=1), 9.0, exited=True)
    judge.hear(failure(0, node=0), 9.5, exited=True)
    assert judge.root() == failure(0, node=1)
    assert judge.consequences() == (failure(0, node=0), failure(None, node=1))


def test_a_second_end_of_the_same_worker_changes_nothing() -> None:
    judge = Judge()
    judge.hear(failure(0, message="first"), 10.0, exited=True)
    judge.hear(failure(0, message="second"), 9.0, exited=True)
    assert judge.root() == failure(0, message="first")
    assert judge.consequences() == ()


OWN_CONNECTION = (
    "Traceback (most recent call last):",
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 355, in wrapper',
    '  File "/home/me/data.py", line 12, in download',
    "ConnectionResetError: [Errno 104] Connection reset by peer",
)
ALL_REDUCE = (
    "Traceback (most recent call last):",
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper',
    '  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3008, in all_reduce',
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234",
)
NCCL_ABORT = ("  what():  [PG ID 0 Rank 2] NCCL communicator was aborted on rank 2.",)


def test_rank_that_ended_with_zero_is_not_blamed_for_a_lost_connection_of_the_script() -> None:
    judge = Judge()
    judge.note_exit(failure(0, code=0), 10.0)
    lost = replace(failure(1, effect=True, message=OWN_CONNECTION[-1]), last_lines=OWN_CONNECTION)
    judge.hear(lost, 610.0, exited=True)
    assert judge.root() == lost
    assert judge.consequences() == ()


@pytest.mark.parametrize(
    ("lines", "where"), [(ALL_REDUCE, "all_reduce"), (NCCL_ABORT, "a collective")]
)
def test_rank_that_ended_with_zero_is_blamed_where_torch_lost_it(
    lines: tuple[str, ...], where: str
) -> None:
    judge = Judge()
    judge.note_exit(failure(0, code=0), 10.0)
    own = replace(failure(1, effect=True, message=OWN_CONNECTION[-1]), last_lines=OWN_CONNECTION)
    judge.hear(own, 10.5, exited=True)
    judge.hear(replace(failure(2, effect=True), last_lines=lines), 10.6, exited=True)
    root = judge.root()
    assert root is not None
    assert (root.rank, root.kind) == (0, "early_exit")
    assert root.message == f"ended with exit code 0 0.5 s before; rank 2 was in {where}"
    assert len(judge.consequences()) == 2


def test_rank_whose_traceback_was_cut_is_not_named_beside_one_that_names_its_collective() -> None:
    judge = Judge()
    judge.note_exit(failure(0, code=0), 10.0)
    judge.hear(replace(failure(1, effect=True), last_lines=ALL_REDUCE), 10.5, exited=True)
    judge.hear(
        replace(failure(2, effect=True, message=ALL_REDUCE[-1]), last_lines=ALL_REDUCE[:2]),
        10.6,
        exited=True,
    )
    root = judge.root()
    assert root is not None
    assert root.message == "ended with exit code 0 0.5 s before; rank 1 was in all_reduce"


heard = st.tuples(
    st.integers(0, 3),
    st.integers(0, 2),
    st.floats(0, 100, allow_nan=False),
    st.booleans(),
    st.booleans(),
)  # node, local rank, time, effect, exited


@given(st.lists(heard), st.one_of(st.none(), st.floats(0, 100, allow_nan=False)))
def test_one_cause_and_every_other_failure_once_in_order(
    reports: list[tuple[int, int, float, bool, bool]], stopped: float | None
) -> None:
    judge = Judge()
    if stopped is not None:
        judge.stopped(stopped)
    first: dict[tuple[int, int], float] = {}
    for node, local_rank, at, effect, exited in reports:
        judge.hear(failure(local_rank, node=node, effect=effect), at, exited=exited)
        if stopped is None or at < stopped:
            first.setdefault((node, local_rank), at)
    root = judge.root()
    if not first:
        assert root is None
        assert judge.stop_due() == math.inf
        return
    assert root is not None
    named = [root, *judge.consequences()]
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
    assert judge.stop_due() <= max(times) + EXIT_PATIENCE
