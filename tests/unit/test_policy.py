"""The kind of a failure decides whether the workers are started again, and where."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterjob.core.spec import launch_arguments
from clusterjob.errors import SpecError
from clusterjob.node.logs import events
from clusterjob.node.logs.events import EventLog, read_job_events
from clusterjob.node.logs.job_dir import EVENTS, moved_events
from clusterjob.node.options import LaunchOptions, Retry, parse
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import policy
from clusterjob.node.rendezvous.policy import Restart
from clusterjob.node.verdict import Failure, FailureKind, JobState, RoundEnd, Verdict, bounded

MACHINE = ("device", "disk", "network", "node_lost", "launch")
FAILURE = Failure(
    1, 1, node_rank=2, host="gpu7", exit_code=1, signal=None, message="RuntimeError: boom"
)


def failed(kind: FailureKind) -> Verdict:
    return Verdict.of_failure(replace(FAILURE, kind=kind, where="t.py:3"))


SUCCESS = Verdict(JobState.SUCCEEDED, 0)
OUT_OF_TIME = Verdict(JobState.FAILED, 124, reason="the time limit of 3 s was reached")


class Restarts:
    """The decisions after rounds that end one after another.

    Args:
        max_restarts: --max-restarts.
        *retry: --retry.
        earlier: rounds that have ended before.
        free: how many failures of machines are restarted without --max-restarts.
    """

    def __init__(
        self, max_restarts: int, *retry: str, earlier: tuple[RoundEnd, ...] = (), free: int = 0
    ) -> None:
        program = Program("script", "t.py")
        self.options = LaunchOptions(
            program, max_restarts=max_restarts, retry=retry, min_nodes=1 if free else None
        )
        self.nnodes, self.rounds = free + 1, list(earlier)

    def after(self, kind: FailureKind, message: str = "boom", **more: Any) -> Restart:
        failure = replace(FAILURE, kind=kind, message=message, **more)
        decision = policy.decide(failure, self.options, self.rounds, 0, self.nnodes)
        if decision.retry:
            self.rounds.append(RoundEnd.of(Verdict.of_failure(failure), 0, len(self.rounds)))
        return decision

    def retried(self, times: int, kind: FailureKind, **more: Any) -> list[bool]:
        return [self.after(kind, **more).retry for _ in range(times)]

    @property
    def most(self) -> int:
        return policy.most_restarts(self.options, self.nnodes)


def round_end(kind: str, attempt: int = 0, restart: int = 0, **more: Any) -> RoundEnd:
    place = {"host": "gpu7", "node": 2, "rank": 1, "started_at": "t0", "ended_at": "t1"}
    return RoundEnd(attempt, restart, kind, **(place | more))


@pytest.mark.parametrize("kind", FailureKind)
def test_each_kind_is_restarted_once_with_max_restarts_1_unless_it_would_repeat(
    kind: FailureKind,
) -> None:
    assert Restarts(0).after(kind) == Restart()
    why = policy.RULES[kind].why
    assert bool(why) == (kind.value in ("import", "oom_host", "oom_device"))
    expected = Restart(why=why) if why else Restart(retry=True, avoid=kind.value in MACHINE)
    own = Restarts(1)
    assert own.after(kind) == expected
    assert own.after(kind).retry is False
    # A preemption is not charged.
    assert own.after(FailureKind.SIGNAL).retry is (bool(why) or kind is FailureKind.PREEMPTED)


@pytest.mark.parametrize("kind", FailureKind)
def test_spares_restart_failures_of_machines_alone(kind: FailureKind) -> None:
    own = Restarts(0, free=2)
    machine = kind.value in MACHINE
    assert own.retried(3, kind, rank=None) == [machine, machine, False]
    assert own.most == 2


def test_charged_restarts_follow_when_the_restarts_of_machines_are_used() -> None:
    earlier = (round_end("node_lost"), round_end("signal", restart=1))
    own = Restarts(2, earlier=earlier, free=1)  # a coordinator that took over
    assert own.retried(2, FailureKind.NODE_LOST) == [True, False]


def test_same_launch_error_of_a_second_node_ends_a_job_with_spares() -> None:
    own = Restarts(0, free=3)
    assert own.after(FailureKind.LAUNCH, node_rank=1).retry
    why = "the same error in two attempts: it would fail again"
    assert own.after(FailureKind.LAUNCH, node_rank=2) == Restart(why=why)


@pytest.mark.parametrize(
    ("options", "nnodes", "times"),
    [({"spares": 1}, 3, 1), ({"min_nodes": 1}, 3, 2), ({"min_nodes": 1, "spares": 1}, 3, 2)],
)
def test_restarts_of_machines_are_as_many_as_the_job_can_lose(
    options: dict[str, int], nnodes: int, times: int
) -> None:
    assert LaunchOptions(Program("script", "t.py"), **options).machine_restarts(nnodes) == times


def test_host_is_not_avoided_for_failure_that_only_names_a_lost_peer() -> None:
    assert Restarts(1).after(FailureKind.NETWORK, effect=True) == Restart(retry=True)


def test_same_error_at_same_line_in_two_rounds_is_not_retried() -> None:
    own = Restarts(5)
    where = {"where": "train.py:12"}
    assert own.after(FailureKind.CODE, "ValueError: 7 at 0xAF", **where).retry
    again = own.after(FailureKind.CODE, "ValueError: 8 at 0x1 (exited with code 1)", **where)
    why = "the same error at train.py:12 in two attempts: it would fail again"
    assert again == Restart(why=why)


@pytest.mark.parametrize(
    "second",
    [
        {"where": "train.py:13"},
        {"message": "TypeError: 7", "where": "train.py:12"},
        {"message": "ValueError: other", "where": "train.py:12"},
        {"kind": FailureKind.SIGNAL, "where": "train.py:12"},
    ],
)
def test_another_error_is_retried(second: dict[str, Any]) -> None:
    own = Restarts(5)
    where = "train.py:12"
    first: dict[str, Any] = {"kind": FailureKind.CODE, "message": "ValueError: 7", "where": where}
    assert own.after(**first).retry
    assert own.after(**(first | second)).retry


@pytest.mark.parametrize(
    ("kind", "where"), [(FailureKind.CODE, ""), (FailureKind.SIGNAL, "train.py:12")]
)
def test_error_that_may_pass_is_retried_as_often_as_allowed(kind: FailureKind, where: str) -> None:
    assert Restarts(2).retried(3, kind, where=where) == [True, True, False]


def test_restarts_after_disk_failures_in_a_row_are_delayed_more_and_more() -> None:
    own = Restarts(20)
    pauses = [own.after(FailureKind.DISK).pause for _ in range(9)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert own.after(FailureKind.SIGNAL).pause == 0
    assert own.after(FailureKind.DISK).pause == 0


@pytest.mark.parametrize(("rank", "retried"), [(1, False), (None, True)])
def test_program_that_cannot_start_ends_the_job_and_lost_forkserver_does_not(
    rank: int | None, retried: bool
) -> None:
    assert Restarts(5).retried(2, FailureKind.LAUNCH, rank=rank) == [True, retried]


def test_same_error_in_earlier_attempt_of_job_is_not_retried() -> None:
    error = {"message": "ValueError: boom", "where": "train.py:12"}
    earlier = (round_end("code", attempt=1, **error), round_end("preempted"))
    assert not Restarts(5, earlier=earlier).after(FailureKind.CODE, **error).retry


def test_retry_has_its_own_count_for_its_kind() -> None:
    own = Restarts(1, "device:2", "code:0", "import:1")
    assert own.most == 4
    assert own.after(FailureKind.DEVICE) == Restart(retry=True, avoid=True)
    assert own.retried(2, FailureKind.DEVICE) == [True, False]
    assert own.retried(1, FailureKind.CODE) == [False]
    assert own.retried(1, FailureKind.IMPORT) == [True]
    assert own.retried(2, FailureKind.SIGNAL) == [True, False], "--max-restarts was not used up"


@pytest.mark.parametrize(("max_restarts", "restarts"), [(0, 1), (3, 3)])
def test_retry_without_number_means_max_restarts(max_restarts: int, restarts: int) -> None:
    own = Restarts(max_restarts, "code")  # even with the same error
    assert sum(own.retried(5, FailureKind.CODE, where="train.py:12")) == restarts


def test_count_of_retry_includes_earlier_attempts() -> None:
    own = Restarts(0, "oom_host:2:mem*1.5")
    assert own.after(FailureKind.OOM_HOST) == Restart(), "the job is queued again"
    rounds = [round_end("oom_host", attempt=number) for number in range(3)]
    found = [
        policy.more_memory(failed(FailureKind.OOM_HOST), own.options, rounds[:number])
        for number in (1, 2, 3)
    ]
    assert found == [1.5, 1.5, 0.0]
    assert not policy.more_memory(failed(FailureKind.SIGNAL), own.options, rounds[:1])
    assert not policy.more_memory(SUCCESS, own.options, rounds[:1])


@pytest.mark.parametrize(
    ("text", "retry"),
    [
        ("hang", Retry(FailureKind.HANG)),
        ("device:5", Retry(FailureKind.DEVICE, 5)),
        ("oom_host:2:mem*1.5", Retry(FailureKind.OOM_HOST, 2, memory=1.5)),
    ],
)
def test_retry_is_read_from_text(text: str, retry: Retry) -> None:
    assert Retry.parse(text) == retry


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("devise", "did you mean device?"),
        ("x", "the kinds are code, import, oom_host"),
        ("code:-1", ""),
        ("code:many", ""),
        ("device:1:mem*2", ""),
        ("oom_host:1:mem*0.5", ""),
        ("oom_host:1:mem*0", ""),
        ("", "the kinds are"),
    ],
)
def test_wrong_retry_is_refused(text: str, hint: str) -> None:
    with pytest.raises(SpecError) as found:
        Retry.parse(text)
    assert found.value.message.startswith(f"{text!r}: ")
    assert hint in found.value.hint


def test_retry_travels_on_the_command_line_of_a_node() -> None:
    options = parse(["--retry", "device:5,code:0", "--retry", "hang", "t.py"])
    assert options.retry == ("device:5", "code:0", "hang")
    assert parse(launch_arguments(options)) == options
    assert parse(["t.py"]).retry == ()


def test_round_ends_survive_the_verdict_and_the_events(tmp_path: Path) -> None:
    ends = [
        RoundEnd.of(failed(FailureKind.DEVICE), 0, 0, started_at="t0"),
        RoundEnd.of(OUT_OF_TIME, 0, 1, started_at="t1"),
        RoundEnd.of(SUCCESS, 0, 2, started_at="t2"),
    ]
    assert [each.kind for each in ends] == ["device", "time_limit", ""]
    assert (ends[0].host, ends[0].node, ends[0].rank) == ("gpu7", 2, 1)
    verdict = Verdict(JobState.SUCCEEDED, 0, attempts=tuple(ends))
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict
    log = EventLog(tmp_path / EVENTS)
    for end in ends:
        log.add("started", attempt=0, restart=end.restart)
        fields = {key: value for key, value in vars(end).items() if key != "ended_at"}
        log.add(events.ROUND_ENDED, **fields)
    found = events.ended_rounds(tmp_path, running=False)
    assert [replace(each, ended_at=None) for each in found] == [
        replace(each, ended_at=None) for each in ends
    ]


@pytest.mark.parametrize(
    "end",
    [
        *(failed(kind) for kind in FailureKind),
        OUT_OF_TIME,
        Verdict(JobState.PREEMPTED, 75, reason="SIGUSR1 on gpu7: its workers left"),
        Verdict(JobState.CANCELLED, 143, reason="cancelled"),
        SUCCESS,
    ],
)
def test_recorded_round_is_read_as_the_end_that_it_had(end: Verdict) -> None:
    recorded = RoundEnd.of(end, 0, 1)
    found = recorded.verdict()
    assert (found.state, found.exit_code) == (end.state, end.exit_code)
    assert RoundEnd.of(found, 0, 1).message == recorded.message
    causes = [each.failure for each in (found, end)]
    seen = [each and (each.kind, each.node_rank, each.host) for each in causes]
    assert seen[0] == seen[1]


def test_round_without_end_was_lost_when_another_attempt_begins(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS)
    log.add("started", attempt=0, restart=0)
    assert events.ended_rounds(tmp_path, running=True) == ()
    (lost,) = events.ended_rounds(tmp_path, running=False)
    assert (lost.attempt, lost.kind, lost.node, lost.ended_at) == (0, "node_lost", 0, None)
    log.add("listening", nnodes=1)
    assert events.ended_rounds(tmp_path, running=True) == (lost,)


def test_round_that_two_coordinators_end_counts_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS)
    for restart in range(2):
        log.add("listening")  # the agent of the coordinator was killed
        if restart:
            lost = RoundEnd.of(failed(FailureKind.NODE_LOST), 0, restart - 1, started_at="t")
            log.add(events.ROUND_ENDED, **vars(lost))
        log.add("started", attempt=0, restart=restart)
    ended = events.ended_rounds(tmp_path, running=True)
    assert [(each.restart, each.kind) for each in ended] == [(0, "node_lost")]


def test_coordinator_that_was_cut_off_leaves_no_events_of_the_job(tmp_path: Path) -> None:
    EventLog(tmp_path / EVENTS).add("started", attempt=0, restart=0)
    cut_off = EventLog(tmp_path / moved_events(1, 2))
    cut_off.add("listening")
    cut_off.add(events.ROUND_ENDED, attempt=0, restart=0, kind="node_lost")
    assert [event["event"] for event in read_job_events(tmp_path)] == ["started"]
    cut_off.add("started", attempt=0, restart=1)
    assert len(list(read_job_events(tmp_path))) == 4


def test_forged_events_are_no_rounds(tmp_path: Path) -> None:
    log = EventLog(tmp_path / EVENTS)
    log.add("started", attempt="x", restart=None)
    log.add(events.ROUND_ENDED, attempt=0, restart=[], kind=3)
    assert events.ended_rounds(tmp_path, running=False) == ()


def test_many_rounds_are_shortened_to_first_and_latest() -> None:
    many = [round_end("signal", restart=number) for number in range(100)]
    kept = [each.restart for each in bounded(many)]
    assert kept == [*range(10), *range(70, 100)]
    assert bounded(many[:40]) == tuple(many[:40])
