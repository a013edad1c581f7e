"""What a job does next, by the states of its nodes: decisions as a pure function."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node import decide as core
from clusterjob.node.contract import World
from clusterjob.node.decide import MOST_NODES, Decision, Job, Ledger, Loss, Node, Stage, View
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import outcome
from clusterjob.node.rendezvous.messages import Members
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.root_cause import EFFECT_TIMEOUT, EXIT_TIMEOUT
from clusterjob.node.states import Failing, Missing, Order, Probed, Request
from clusterjob.node.verdict import Failure, FailureKind, JobState, RoundEnd


def failure(
    rank: int | None = 0, *, node: int = 0, local: int | None = None, **fields: Any
) -> Failure:
    """Return the failure of a worker, or of a node if the rank is None."""
    made = Failure(
        rank,
        rank if local is None else local,
        node_rank=node,
        host=f"gpu{node}",
        exit_code=1,
        signal=None,
        message="ValueError: boom",
    )
    return replace(made, **fields)


class Cluster:
    """A job with its coordinator on node 0, and agents that do what the test says.

    Args:
        nnodes: the number of nodes.
        nproc: workers of each node.
        **options: of the job.
    """

    def __init__(
        self, nnodes: int = 2, nproc: int = 1, *, moves: bool = False, **options: Any
    ) -> None:
        self.now = 100.0
        self.job = Job(
            LaunchOptions(Program("script", "train.py"), **options), nnodes=nnodes, moves=moves
        )
        self.ledger = Ledger(since=self.now)
        self.nodes: dict[int, Node] = {}
        self.view: dict[str, Any] = {}  # other fields of the view
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []
        self.due = math.inf
        self.join(*range(nnodes), nproc=nproc)

    def join(self, *numbers: int, nproc: int = 1) -> None:
        for number in numbers:
            self.nodes[number] = Node(
                number, f"gpu{number}", pid=1, nproc=nproc, joined_at=self.now, heard_at=self.now
            )

    def lose(self, number: int, why: str = "no message for 10 s", **fields: Any) -> None:
        self.nodes[number] = replace(self.nodes[number], lost=Loss(why, self.now, **fields))

    def say(self, number: int, **fields: Any) -> None:
        """Let a node send its state."""
        node = self.nodes[number]
        self.nodes[number] = node.receive(replace(node.state, **fields), self.now)

    def fail(self, number: int, *found: Failure, age: float = 0.0, exited: bool = True) -> None:
        self.say(number, failing=tuple(Failing(each, age, exited=exited) for each in found))

    def decide(self, seconds: float = 0.0) -> Stage:
        """Let time pass, decide, and begin the round that follows; return the stage.

        A decision that is repeated without a change must change nothing.
        """
        self.now += seconds
        first = core.decide(self.job, self.ledger, self._view(), self.now)
        self._take(first)
        if not first.dropped:
            again = core.decide(self.job, self.ledger, self._view(), self.now)
            assert (again.ledger, again.events, again.lines) == (self.ledger, [], [])
        if self.ledger.stage is Stage.START:
            worlds, first = {}, 0
            chosen = core.chosen(self.job, self.ledger, self._view())
            size = sum(self.nodes[node].nproc for node in chosen)
            for rank, number in enumerate(chosen):
                nproc = self.nodes[number].nproc
                worlds[number] = World(
                    self.ledger.round + 1, "gpu0", 29500, agent_store=True, node_rank=rank,
                    nnodes=len(chosen), nproc=nproc, first_rank=first, world_size=size,
                )  # fmt: skip
                first += nproc
            self._take(core.begin(self.job, self.ledger, self._view(), self.now, worlds))
        return self.ledger.stage

    def wait(self, seconds: float) -> Stage:
        """Let time pass; decide whenever a decision is due."""
        end = self.now + seconds
        self.decide()
        while self.now < end:
            self.now = min(end, max(self.now + 0.001, self.due))
            self.decide()
        return self.ledger.stage

    def run(self) -> None:
        """Start a round, and let all its workers run."""
        for _ in range(40):
            if self.decide(0.25) is Stage.RUN:
                break
        assert self.ledger.stage is Stage.RUN
        for number in self.ledger.nodes:
            self.say(
                number, round=self.ledger.round, started=True, ended=False, idle=False,
                succeeded=(), failing=(), reported=False, exits=(),
            )  # fmt: skip
        self.decide()
        assert self.ledger.run.running

    def stop(self) -> None:
        """Let all nodes stop their workers as they are told."""
        for _ in range(2):
            if self.ledger.stage is Stage.COLLECT:
                for number in self.ledger.run.collect_from:
                    self.say(number, collected=True)
                self.decide()
            if self.ledger.stage is Stage.STOP:
                for number in self.ledger.run.worlds:
                    if self.nodes[number].lost is None:
                        self.say(number, round=self.ledger.round, idle=True, ended=True)
                self.decide()

    def orders(self) -> dict[int, Order]:
        return dict(core.orders(self.job, self.ledger, self.nodes))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    @property
    def end(self) -> Outcome:
        assert self.ledger.end is not None
        return self.ledger.end

    def _view(self) -> View:
        return View(self.nodes, time=f"{self.now:.3f}", **self.view)

    def _take(self, decision: Decision) -> None:
        self.ledger, self.due = decision.ledger, decision.due
        self.events += decision.events
        self.lines += decision.lines
        for number, why in decision.dropped.items():
            self.lose(number, why)


def running(nnodes: int = 2, nproc: int = 1, **options: Any) -> Cluster:
    cluster = Cluster(nnodes, nproc, **options)
    cluster.run()
    return cluster


def succeed(cluster: Cluster, *numbers: int) -> None:
    for number in numbers:
        nproc = cluster.nodes[number].nproc
        cluster.say(number, ended=True, succeeded=tuple(range(nproc)))


def test_failure_has_the_time_of_its_first_report_in_a_round() -> None:
    node = Node(1, "gpu1", pid=1, nproc=1)
    times = []
    for round_, age, now in ((0, 2.0, 100.0), (0, 7.0, 110.0), (1, 1.0, 200.0)):
        failing = (Failing(failure(1, node=1), age, exited=True),)
        node = node.receive(replace(node.state, round=round_, failing=failing), now)
        times.append([entry.at for entry in node.failures])
    assert times == [[98.0], [98.0], [199.0]]


# -- the first round -------------------------------------------------------------------------------


def test_round_begins_when_all_nodes_are_there_and_succeeds_when_all_workers_have() -> None:
    cluster = running(2, 2)
    assert cluster.named("started")[0]["nodes"] == [0, 1]
    assert cluster.named("running")
    succeed(cluster, 0)
    assert cluster.decide() is Stage.RUN
    succeed(cluster, 1)
    cluster.decide()
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.SUCCEEDED)
    assert [each.kind for each in cluster.ledger.rounds] == [""]


def test_workers_that_ended_without_success_or_failure_are_no_success() -> None:
    cluster = running(2, 2)
    succeed(cluster, 0)
    cluster.say(1, ended=True, succeeded=(0,))
    cluster.decide()
    cluster.stop()
    assert cluster.end.failure is not None
    assert (cluster.end.failure.node_rank, cluster.end.failure.kind) == (1, "process_lost")


def test_missing_node_is_named_every_5_s_and_ends_the_job_after_the_timeout() -> None:
    cluster = Cluster(3, join_timeout=20.0)
    del cluster.nodes[2]
    cluster.wait(12.0)
    assert [each["missing"] for each in cluster.named("waiting")] == [[2], [2]]
    assert cluster.lines[0] == "waiting for node 2 of 3, 5 s so far"
    cluster.wait(10.0)
    assert cluster.ledger.stage is Stage.END
    assert "node 2 of 3 never joined within 20 s" in cluster.end.reason
    [only] = cluster.ledger.rounds
    assert (only.kind, only.node, only.started_at) == ("node_lost", 2, None)


def test_elastic_round_waits_5_s_for_more_nodes() -> None:
    cluster = Cluster(3, min_nodes=2)
    del cluster.nodes[1]
    assert cluster.wait(4.9) is Stage.WAIT
    cluster.wait(0.3)
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))


def test_node_that_is_refused_or_lost_before_the_first_round_ends_the_job() -> None:
    cluster = Cluster(2)
    cluster.view["refused"] = [failure(None, node=1, message="claimed twice")]
    assert cluster.decide() is Stage.END
    assert cluster.end.reason == "node 1 (host gpu1): claimed twice"
    other = Cluster(2)
    other.lose(1)
    assert other.decide() is Stage.END
    assert "the agent on gpu1 (pid 1) was lost" in other.end.reason


def test_warning_before_the_first_round_preempts_the_job() -> None:
    cluster = Cluster(2, warning=60.0)
    cluster.say(1, request=Request(warning="SIGUSR1 on gpu1"))
    assert cluster.decide() is Stage.END
    assert cluster.end.state is JobState.PREEMPTED
    assert cluster.end.reason == "SIGUSR1 on gpu1: before its workers had started"


# -- the preflight ---------------------------------------------------------------------------------


def measuring(nnodes: int, preflight: str = "refuse", **options: Any) -> Cluster:
    cluster = Cluster(nnodes, preflight=preflight, **options)
    assert cluster.decide() is Stage.MEASURE
    assert cluster.named("measuring") == [{"nodes": nnodes}]
    return cluster


def test_each_node_is_measured_once_and_the_coordinator_is_the_first_process() -> None:
    cluster = Cluster(3, preflight="refuse", join_timeout=40.0)
    cluster.job = replace(cluster.job, own=1)
    assert cluster.decide() is Stage.MEASURE
    asked = {node: order.measure for node, order in cluster.orders().items()}
    assert [asked[node] for node in (1, 0, 2)] == [
        core.Measure("", 0, number, 3, start_seconds=40.0) for number in range(3)
    ]
    for number in (0, 1):
        cluster.say(number, measured="done")
    assert cluster.decide() is Stage.MEASURE
    cluster.say(2, measured="done")
    assert cluster.decide() is Stage.RUN
    assert all(order.measure is None for order in cluster.orders().values())


@pytest.mark.parametrize(
    ("preflight", "spares", "slow", "nodes", "reason"),
    [
        ("refuse", 0, {}, (0, 1, 2), ""),
        ("refuse", 0, {1: "memory 0.5"}, None, "preflight: host gpu1: memory 0.5"),
        ("refuse", 1, {1: "memory 0.5"}, (0, 2), ""),
        ("refuse", 1, {0: "a", 1: "b"}, None, "preflight: host gpu0: a; host gpu1: b"),
        ("warn", 0, {1: "memory 0.5"}, (0, 1, 2), ""),
        ("warn", 1, {1: "memory 0.5"}, (0, 2), ""),
    ],
)
def test_slow_node_is_replaced_or_refused_or_only_named(
    preflight: str, spares: int, slow: dict[int, str], nodes: tuple[int, ...] | None, reason: str
) -> None:
    cluster = measuring(3, preflight, spares=spares)
    cluster.view["slow"] = slow
    for number in range(3):
        cluster.say(number, measured="done")
    cluster.decide()
    assert [each["node_rank"] for each in cluster.named("avoid")] == list(slow)
    if nodes is not None:
        assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, nodes)
        return
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.FAILED)
    assert cluster.end.failure is not None
    assert (cluster.end.failure.kind, cluster.end.failure.message) == (FailureKind.LAUNCH, reason)


@pytest.mark.parametrize(
    ("measured", "seconds", "why"),
    [("it has ended", 0.0, "it has ended"), ("", 69.0, ""), ("", 71.0, "it does not end")],
)
def test_measuring_process_that_fails_or_does_not_end_is_named(
    measured: str, seconds: float, why: str
) -> None:
    cluster = measuring(2, join_timeout=40.0)
    cluster.say(0, measured="done")
    cluster.say(1, measured=measured)
    cluster.wait(seconds)
    if why:
        assert cluster.end.reason.endswith(f"host gpu1: the measuring process: {why}")
    else:
        assert cluster.ledger.stage is Stage.MEASURE


@pytest.mark.parametrize(
    ("request_", "state"),
    [
        (Request(cancel="cancelled"), JobState.CANCELLED),
        (Request(warning="SIGUSR1 on gpu1"), JobState.PREEMPTED),
    ],
)
def test_request_during_the_preflight_ends_the_job_before_its_workers_start(
    request_: Request, state: JobState
) -> None:
    cluster = measuring(2, warning=60.0)
    cluster.say(1, request=request_)
    assert cluster.decide() is Stage.END
    assert cluster.end.state is state
    assert not cluster.named("started")


def test_node_that_is_lost_during_the_preflight_is_waited_for_again() -> None:
    cluster = measuring(3, min_nodes=2)
    cluster.lose(2)
    cluster.say(0, measured="done")
    cluster.say(1, measured="done")
    assert cluster.decide() is Stage.WAIT
    cluster.wait(1.0)
    cluster.join(2)
    assert cluster.decide() is Stage.RUN
    assert cluster.ledger.nodes == (0, 1, 2)
    assert len(cluster.named("measuring")) == 1


# -- ends of a round -------------------------------------------------------------------------------


def test_cancellation_stops_the_workers_and_is_no_failure() -> None:
    cluster = running(2, max_restarts=3)
    cluster.say(1, request=Request(cancel="cancelled", interrupt=True))
    cluster.decide()
    assert (cluster.ledger.stage, cluster.orders()[0].stop) == (Stage.STOP, core.Stop(3.0, 2))
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.CANCELLED)
    assert [(each.kind, each.rank) for each in cluster.ledger.rounds] == [("cancelled", None)]


@pytest.mark.parametrize(
    ("ended", "moment", "state"),
    [
        ((0,), "with the last end", JobState.CANCELLED),
        ((0, 1), "with the last end", JobState.SUCCEEDED),
        ((0, 1), "during the stop", JobState.SUCCEEDED),
    ],
)
def test_cancellation_after_the_success_of_all_workers_changes_nothing(
    ended: tuple[int, ...], moment: str, state: JobState
) -> None:
    cluster = running(2)
    succeed(cluster, *ended)
    if moment == "during the stop":
        assert cluster.decide() is Stage.STOP
    cluster.say(1, request=Request(cancel="cancelled"))
    cluster.decide()
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, state)


@pytest.mark.parametrize(("stacks", "stage"), [(False, Stage.STOP), (True, Stage.COLLECT)])
def test_second_interrupt_stops_at_once_without_grace(stacks: bool, stage: Stage) -> None:
    cluster = running(2)
    first = Request(cancel="SIGINT on gpu0", interrupt=True, stacks=stacks)
    cluster.say(0, request=first)
    assert cluster.decide() is stage
    cluster.say(0, request=replace(first, kill=True))
    assert cluster.decide() is Stage.STOP
    assert cluster.orders()[1].stop == core.Stop(0.0, signal.SIGINT)


@pytest.mark.parametrize("again", [False, True])
def test_cancellation_during_the_stop_of_a_failed_round_ends_the_job(again: bool) -> None:
    cluster = running(2, max_restarts=3)
    cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
    cluster.decide()
    cluster.wait(2.0)  # without stacks
    cluster.say(1, request=Request(cancel="cancelled"))
    assert cluster.decide() is Stage.STOP
    if again:  # its agent was killed, and the next one knows nothing of the cancellation
        cluster.join(1)
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.CANCELLED)


def test_cancellation_during_the_wait_for_a_lost_node_ends_the_job() -> None:
    cluster = running(2, max_restarts=3)
    cluster.lose(1)
    cluster.decide()
    cluster.stop()
    assert cluster.wait(5.0) is Stage.WAIT
    cluster.say(0, request=Request(cancel="cancelled"))
    assert cluster.decide() is Stage.END
    assert cluster.end.state is JobState.CANCELLED


def test_time_limit_counts_from_when_all_workers_run() -> None:
    cluster = Cluster(2, time_limit=10.0, join_timeout=30.0, max_restarts=3)
    cluster.decide()
    cluster.wait(25.0)
    assert cluster.ledger.stage is Stage.RUN
    for number in (0, 1):
        cluster.say(number, round=0, started=True, idle=False)
    cluster.decide()
    assert cluster.wait(9.0) is Stage.RUN
    cluster.wait(1.5)
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.exit_code) == (Stage.END, 124)
    assert cluster.end.reason == "the time limit of 10 s was reached"
    assert [(each.kind, each.rank) for each in cluster.ledger.rounds] == [("time_limit", None)]


def test_time_limit_includes_restarts() -> None:
    cluster = running(1, time_limit=10.0, max_restarts=9)
    cluster.wait(6.0)
    cluster.fail(0, failure(0, kind=FailureKind.SIGNAL))
    cluster.decide()
    cluster.stop()
    cluster.run()
    assert cluster.ledger.restarts == 1
    assert cluster.wait(3.0) is Stage.RUN
    cluster.wait(1.5)
    assert cluster.end.exit_code == 124


@pytest.mark.parametrize("exits", [True, False])
def test_failure_stops_the_round_when_the_worker_has_exited_or_does_not(exits: bool) -> None:
    cluster = running(2)
    cluster.fail(1, failure(1, node=1, local=0), exited=False)
    cluster.decide()
    assert cluster.due == pytest.approx(cluster.now + EXIT_TIMEOUT)
    if not exits:
        assert cluster.wait(EXIT_TIMEOUT - 0.1) is Stage.RUN
        cluster.wait(0.2)
    else:
        cluster.fail(1, failure(1, node=1, local=0))
        cluster.decide()
    assert cluster.ledger.stage is Stage.COLLECT
    assert cluster.orders()[0].collect
    cluster.stop()
    assert cluster.end.reason == "rank 1 (node 1, local rank 0, host gpu1): ValueError: boom"


def test_all_nodes_are_asked_before_an_effect_is_the_verdict() -> None:
    cluster = running(3)
    effect = failure(0, effect=True, kind=FailureKind.NETWORK)
    cluster.fail(0, effect)
    cluster.decide()
    cluster.decide(EFFECT_TIMEOUT)
    assert cluster.orders()[1].report
    for number in (0, 1):
        cluster.say(number, reported=True)
    assert cluster.wait(10.0) is Stage.RUN
    cluster.fail(2, failure(2, node=2, local=0), age=8.0)
    cluster.decide()
    assert cluster.end.failure is not None
    assert cluster.end.failure.rank == 2


def test_silent_node_delays_the_verdict_on_an_effect_for_its_lease() -> None:
    cluster = running(2, lease=10.0, heartbeat=2.0)
    cluster.fail(0, failure(0, effect=True))
    cluster.say(0, reported=True)
    assert cluster.wait(14.0) is Stage.RUN
    assert cluster.wait(0.5) is Stage.COLLECT


@pytest.mark.parametrize(
    ("effect", "cause"), [(True, (1, FailureKind.EARLY_EXIT)), (False, (0, FailureKind.CODE))]
)
def test_early_exit_explains_effects_alone(effect: bool, cause: tuple[int, FailureKind]) -> None:
    cluster = running(2)
    lines = ('  File "/venv/torch/distributed/distributed_c10d.py", line 1, in all_reduce', "x")
    cluster.fail(0, failure(0, effect=effect, last_lines=lines), age=0.0)
    cluster.say(0, ended=True)
    succeed(cluster, 1)
    if effect:
        assert cluster.wait(5.0) is Stage.RUN, "the exits are not known yet"
        assert cluster.orders()[1].report
    left = failure(1, node=1, local=0, exit_code=0, message="")
    cluster.say(0, reported=True)
    cluster.say(1, reported=True, exits=(Failing(left, 7.0, exited=True),))
    cluster.wait(1.0)
    cluster.stop()
    assert cluster.end.failure is not None
    assert (cluster.end.failure.rank, cluster.end.failure.kind) == cause


def test_report_that_arrives_during_the_stop_may_be_the_cause() -> None:
    cluster = running(2)
    cluster.fail(0, failure(0))
    cluster.decide(1.0)
    cluster.fail(1, failure(1, node=1, local=0, message="older"), age=5.0)
    cluster.stop()
    assert "older" in cluster.end.reason


def test_node_that_has_not_begun_the_round_is_idle_only_after_its_stop() -> None:
    cluster = Cluster(2)
    assert cluster.decide() is Stage.RUN
    cluster.say(0, round=0, idle=True, request=Request(cancel="cancelled"))
    assert cluster.decide(0.1) is Stage.STOP
    assert cluster.nodes[1].state.idle
    assert cluster.wait(2.0) is Stage.STOP, "it may start its workers before it gets the order"
    cluster.say(1, round=0)
    assert cluster.decide() is Stage.END


@pytest.mark.parametrize("stalled", [False, True])
def test_node_that_does_not_stop_is_dropped_after_the_grace(stalled: bool) -> None:
    cluster = running(2, grace=2.0)
    cluster.fail(0, failure(0))
    cluster.decide()
    cluster.wait(2.0)  # without stacks
    assert cluster.ledger.stage is Stage.STOP
    assert cluster.orders()[1].stop == core.Stop(2.0, signal.SIGTERM, early=True)
    cluster.say(0, idle=True, ended=True)
    if stalled:  # nothing could be received meanwhile
        cluster.now += 30.0
        cluster.view["stalled"] = 30.0
        assert cluster.decide() is Stage.STOP
        cluster.view.clear()
        assert cluster.wait(6.0) is Stage.STOP
    cluster.wait(8.0)
    assert cluster.ledger.stage is Stage.END
    assert cluster.nodes[1].lost is not None
    assert "node 1 (host gpu1) does not answer the stop order" in cluster.lines


@pytest.mark.parametrize(
    ("nnodes", "failed", "asked"),
    [(MOST_NODES, 3, MOST_NODES), (1000, 501, 129), (1000, 0, 128), (1000, None, 1000)],
)
def test_after_failure_of_large_job_some_nodes_are_asked_for_stacks(
    nnodes: int, failed: int | None, asked: int
) -> None:
    cluster = running(nnodes, time_limit=5.0)
    if failed is None:
        cluster.wait(5.5)
    else:
        cluster.fail(failed, failure(failed, node=failed, local=0))
        cluster.decide()
    found = cluster.ledger.run.collect_from
    # A time limit has no failed node; all are asked.
    assert abs(len(found) - asked) <= 1 + nnodes // MOST_NODES * (failed is not None)
    assert failed is None or failed in found
    assert max(found) >= nnodes - nnodes // MOST_NODES - 2


@pytest.mark.parametrize(
    ("request_", "ended", "stage"),
    [
        (Request(cancel="cancelled"), False, Stage.STOP),
        (Request(cancel="cancelled", stacks=True), False, Stage.COLLECT),
        (None, False, Stage.COLLECT),
        (None, True, Stage.STOP),  # no rank is left
    ],
)
def test_stacks_are_collected_of_the_ranks_that_are_left_unless_the_job_is_cancelled(
    request_: Request | None, ended: bool, stage: Stage
) -> None:
    cluster = running(1, 2)
    if request_ is not None:
        cluster.say(0, request=request_)
    else:
        cluster.fail(0, failure(0))
        cluster.say(0, ended=ended)
    assert cluster.decide() is stage


FAILED = outcome.failed(failure())
CANCELLED = outcome.cancelled("SIGTERM", interrupt=False)


@pytest.mark.parametrize(
    ("end", "given", "left", "grace"),
    [
        (FAILED, None, 1e9, 30.0),
        (FAILED, 3.0, 1e9, 3.0),
        (CANCELLED, None, 1e9, 3.0),
        (FAILED, 60.0, 1e9, 60.0),
        (FAILED, 1.0, 1e9, 1.0),
        (FAILED, 60.0, 20.0, 20.0),  # after a warning
        (FAILED, 60.0, -5.0, 0.5),
        (outcome.failed(failure(None, kind=FailureKind.NODE_LOST)), 60.0, 1e9, 10.0),  # the lease
        (CANCELLED, 60.0, 1e9, 60.0),
        (replace(CANCELLED, terminated=True), 60.0, 1e9, 25.0),
        (Outcome(JobState.SUCCEEDED), 60.0, 1e9, 0.0),
    ],
)
def test_grace_is_bounded_by_what_the_scheduler_leaves(
    end: Outcome, given: float | None, left: float, grace: float
) -> None:
    options = LaunchOptions(Program("script", "t.py"), grace=given)
    assert core.grace_after(end, options, left=left) == grace


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "most"), [({"max_restarts": 1}, 1), ({"retry": ("code:0", "signal:2")}, 2)]
)
def test_restarts_are_charged_and_end_with_the_budget(options: dict[str, Any], most: int) -> None:
    cluster = running(2, **options)
    for _ in range(most + 1):
        cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
        cluster.decide()
        cluster.stop()
        if cluster.ledger.stage is not Stage.END:
            cluster.run()
    assert cluster.ledger.stage is Stage.END
    assert (cluster.ledger.restarts, len(cluster.ledger.rounds)) == (most, most + 1)
    why = "rank 1 (node 1, local rank 0, host gpu1): ValueError: boom"
    restarts = list(range(1, most + 1))
    assert [each["restart"] for each in cluster.named("restart")] == restarts
    assert cluster.lines == [f"restart {number} of {most}: {why}" for number in restarts]


def test_error_of_an_earlier_attempt_ends_the_job_and_its_rounds_stay_listed() -> None:
    cluster = Cluster(2, max_restarts=3)
    earlier = (
        RoundEnd(0, 0, kind="code", message="ValueError: boom", where="train.py:7"),
        RoundEnd(0, 1, kind="preempted"),
    )
    cluster.job = replace(cluster.job, attempt=1)
    cluster.ledger = replace(cluster.ledger, rounds=earlier)
    cluster.run()
    cluster.fail(1, failure(1, node=1, local=0, where="train.py:7"))
    cluster.decide()
    cluster.stop()
    assert (cluster.ledger.stage, cluster.ledger.restarts) == (Stage.END, 0)
    assert "the same error at train.py:7 in two attempts" in cluster.end.reason
    assert [(each.attempt, each.restart, each.kind) for each in cluster.ledger.rounds] == [
        (0, 0, "code"), (0, 1, "preempted"), (1, 0, "code"),
    ]  # fmt: skip


def test_spare_takes_the_place_of_a_lost_node_without_max_restarts() -> None:
    cluster = running(3, spares=1)
    assert cluster.ledger.nodes == (0, 1)
    cluster.lose(1)
    cluster.decide()
    cluster.stop()
    assert cluster.ledger.stage is Stage.WAIT
    fence = cluster.job.options.lease + core.END_SECONDS
    assert cluster.wait(fence - 1.0) is Stage.WAIT, "its workers may run until its lease is over"
    cluster.wait(1.5)
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))
    assert cluster.named("avoid")[0]["node_rank"] == 1


NODES = st.integers(0, 7)


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(NODES, unique=True),
    st.lists(NODES, unique=True, max_size=6),
)
def test_selection_keeps_places_and_avoids_nodes(
    wanted: int, least: int, usable: Collection[int], avoided: list[int]
) -> None:
    least = min(least, wanted)
    found = core.choose(usable, range(wanted), avoided, wanted=wanted, least=least)
    good = set(usable) - set(avoided)
    assert len(set(found)) == len(found) <= wanted
    assert set(found) <= set(usable)
    assert len(found) == min(wanted, max(len(good), min(len(usable), least)))
    assert len(set(found) & good) == min(wanted, len(good))
    if len(found) == wanted:  # every node that stays usable keeps its place
        for position, node in enumerate(found):
            assert node == position or position not in good


def fail_round(cluster: Cluster, number: int, kind: FailureKind, message: str) -> None:
    """Let a round end by a failure of a node, and the next one begin."""
    if kind is FailureKind.NODE_LOST:
        cluster.lose(number, message)
    else:
        rank = cluster.ledger.run.worlds[number].first_rank
        lost = failure(rank, node=number, local=0, kind=kind, message=message)
        cluster.fail(number, lost)
    cluster.decide()
    cluster.stop()
    if kind is FailureKind.NODE_LOST:
        cluster.now += 1.0
        cluster.join(number)
        cluster.say(number, round=cluster.ledger.round)
    cluster.run()


FULL, BROKEN = "[Errno 28] No space left on device", "[Errno 5] Input/output error"


@pytest.mark.parametrize(
    ("failures", "rounds", "avoided", "told"),
    [
        # A spare takes the place of a node whose disk fails; who empties a full disk may use it.
        ([(1, FailureKind.DISK, BROKEN)], [(0, 2)], (1,), [1]),
        ([(1, FailureKind.DISK, FULL)], [(0, 2)], (1,), []),
        ([(1, FailureKind.DEVICE, "ECC error")], [(0, 2)], (1,), [1]),
        ([(1, FailureKind.SIGNAL, "was killed")], [(0, 1)], (), []),
        # A disk that fails on two nodes is a shared one: no node is at fault.
        (
            [(1, FailureKind.DISK, BROKEN), (2, FailureKind.DISK, BROKEN)],
            [(0, 2), (0, 2)],
            (),
            [1],
        ),
        # The node that failed longest ago is used again, if there are not enough others.
        (
            [(1, FailureKind.DEVICE, "a"), (2, FailureKind.DEVICE, "b")],
            [(0, 2), (0, 1)],
            (1, 2),
            [1, 2],
        ),
        # A lost node may return once.
        ([(1, FailureKind.NODE_LOST, "silent")], [(0, 1)], (), [1]),
        ([(1, FailureKind.NODE_LOST, "silent")] * 2, [(0, 1), (0, 2)], (1,), [1, 1]),
    ],
)
def test_node_that_caused_a_failure_is_avoided_if_there_are_enough_others(
    failures: list[tuple[int, FailureKind, str]],
    rounds: list[tuple[int, ...]],
    avoided: tuple[int, ...],
    told: list[int],
) -> None:
    cluster = running(3, spares=1, max_restarts=9)
    found = []
    for number, kind, message in failures:
        fail_round(cluster, number, kind, message)
        found.append(cluster.ledger.nodes)
    assert found == rounds
    assert cluster.ledger.avoided == avoided
    assert [each["node_rank"] for each in cluster.named("avoid")] == told


@pytest.mark.parametrize(
    ("attempt", "node", "marked"),
    [(0, 1, []), (0, 2, [2]), (1, 1, [2])],
    ids=["shared disk", "same node", "earlier attempt"],
)
def test_disk_failures_before_a_new_coordinator_or_attempt_tell_a_shared_disk(
    attempt: int, node: int, marked: list[int]
) -> None:
    cluster = Cluster(3, spares=1, max_restarts=9)
    cluster.job = replace(cluster.job, attempt=attempt)
    before = RoundEnd(0, 0, kind="disk", host=f"gpu{node}", node=node, message=BROKEN)
    number = -1 if attempt else 0
    cluster.ledger = replace(cluster.ledger, round=number, rounds=(before,), nodes=(0, 2))
    cluster.run()
    fail_round(cluster, 2, FailureKind.DISK, BROKEN)
    assert [each["node_rank"] for each in cluster.named("avoid")] == marked


def test_restart_after_a_second_disk_failure_waits() -> None:
    cluster = running(1, max_restarts=9)
    begins = []
    for _ in range(4):
        begin = cluster.now
        fail_round(cluster, 0, FailureKind.DISK, FULL)
        begins.append(cluster.now - begin)
    assert begins == pytest.approx([0.25, 1.0, 2.0, 4.0], abs=0.5)
    assert [line.partition(":")[0] for line in cluster.lines if "next" in line] == [
        f"the next round begins in {seconds} s" for seconds in (1, 2, 4)
    ]


def test_node_whose_end_is_recorded_is_not_waited_for() -> None:
    cluster = running(3, spares=1)
    cluster.lose(1, ended=True)
    cluster.view["ended"] = frozenset({1})
    cluster.decide()
    cluster.stop()
    cluster.wait(0.5)
    assert cluster.ledger.nodes == (0, 2)
    assert not cluster.named("avoid"), "only the agent was killed"


def test_loss_of_an_idle_spare_is_only_named() -> None:
    cluster = running(3, spares=1, max_restarts=1)
    cluster.lose(2)
    assert cluster.decide() is Stage.RUN
    assert cluster.lines[-1].startswith("node 2 (host gpu2): the agent on gpu2 (pid 1) was lost")
    succeed(cluster, 0, 1)
    cluster.decide()
    cluster.stop()
    assert (cluster.end.state, cluster.ledger.restarts) == (JobState.SUCCEEDED, 0)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({"min_nodes": 2, "join_timeout": 30.0}, 30.0), ({}, 15.0)],
)
def test_job_ends_when_too_few_nodes_are_left(options: dict[str, Any], seconds: float) -> None:
    cluster = running(2, max_restarts=1, **options)
    cluster.lose(1)
    cluster.decide()
    cluster.stop()
    assert cluster.wait(seconds - 0.5) is Stage.WAIT
    cluster.wait(1.0)
    assert cluster.ledger.stage is Stage.END
    assert cluster.end.failure is not None
    assert (cluster.end.failure.node_rank, cluster.end.failure.kind) == (1, FailureKind.NODE_LOST)
    assert f"1 of 2 nodes are left, and none came within {seconds:g} s" in cluster.end.reason


def test_node_that_was_started_again_in_a_round_is_lost_and_gets_no_workers() -> None:
    cluster = running(2, max_restarts=1)
    cluster.now += 1.0
    cluster.join(1)
    assert cluster.orders()[1].world is None
    cluster.decide()
    assert cluster.end.failure is not None
    assert cluster.end.failure.node_rank == 1
    assert cluster.ledger.run.collect_from == {0}
    cluster.say(0, collected=True)
    assert cluster.decide() is Stage.STOP
    cluster.say(0, idle=True, ended=True)
    assert cluster.decide() is Stage.RUN, "the new agent has no workers to stop"
    assert cluster.ledger.round == 1


def test_node_with_workers_takes_no_part_in_the_next_round() -> None:
    cluster = running(3, spares=1, max_restarts=2)
    cluster.say(2, idle=False)
    cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
    cluster.decide()
    cluster.stop()
    cluster.run()
    assert cluster.ledger.nodes == (0, 1)


def test_coordinator_that_stood_still_blames_itself() -> None:
    cluster = running(2)
    cluster.view["stalled"] = 30.0
    cluster.lose(1, "no message from it", by_agent=True)
    cluster.decide()
    assert cluster.end.failure is not None
    assert cluster.end.failure.node_rank == 0
    assert "did not run for 30 s" in cluster.end.failure.message


# -- preemption ------------------------------------------------------------------------------------


def warned(cluster: Cluster) -> None:
    cluster.say(0, request=Request(warning="SIGUSR1 on gpu0"))
    cluster.decide()


@pytest.mark.parametrize(("warning", "seconds"), [(90.0, 85.0), (4.0, 2.0)])
def test_workers_get_the_warning_time_minus_the_grace_or_half_of_it(
    warning: float, seconds: float
) -> None:
    cluster = running(2, warning=warning)
    warned(cluster)
    assert cluster.named("warned")[0]["seconds"] == seconds
    assert cluster.orders()[1].warned
    assert cluster.wait(seconds - 0.5) is Stage.RUN
    cluster.wait(1.0)
    assert cluster.end.state is JobState.PREEMPTED


def test_worker_that_leaves_after_a_warning_preempts_the_job_with_its_effects() -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    cluster.fail(0, failure(0, effect=True))
    cluster.decide()
    assert cluster.ledger.stage is Stage.RUN
    cluster.fail(1, failure(1, node=1, local=0, exit_code=75, kind=FailureKind.PREEMPTED))
    assert cluster.wait(5.0) is Stage.RUN, "node 0 still saves"
    for number in (0, 1):
        cluster.say(number, ended=True)
    cluster.decide()
    cluster.stop()
    assert cluster.end.reason == "SIGUSR1 on gpu0: its workers left to be queued again"


@pytest.mark.parametrize(
    ("warn_signal", "state"), [("", JobState.FAILED), ("SIGUSR1", JobState.PREEMPTED)]
)
def test_other_end_after_a_warning_is_a_failure_unless_the_workers_got_a_signal(
    warn_signal: str, state: JobState
) -> None:
    cluster = running(2, warning=60.0, warn_signal=warn_signal)
    warned(cluster)
    cluster.fail(1, failure(1, node=1, local=0))
    for number in (0, 1):
        cluster.say(number, ended=True, succeeded=(0,) * (not number))
    cluster.decide()
    assert cluster.end.state is state


@pytest.mark.parametrize(
    ("code", "kind"), [(143, FailureKind.TERMINATED), (75, FailureKind.EXIT_CODE)]
)
def test_suspected_preemption_waits_3_s_for_its_warning(code: int, kind: FailureKind) -> None:
    cluster = running(2, warning=60.0)
    killed = failure(1, node=1, local=0, exit_code=code, kind=kind)
    cluster.fail(1, killed)
    cluster.decide()
    assert cluster.wait(2.9) is Stage.RUN
    cluster.wait(0.2)
    assert cluster.end.failure == killed
    other = running(2, warning=60.0)
    other.fail(1, killed)
    other.decide(1.0)
    warned(other)
    assert other.wait(10.0) is Stage.RUN
    never = running(2)
    never.fail(1, killed)
    never.decide()
    assert never.end.failure == killed


ABORTED = {"exit_code": 134, "signal": "SIGABRT", "message": "killed by SIGABRT"}


@pytest.mark.parametrize(
    ("effect", "warned_at", "state", "rank"),
    [
        (True, 1.0, JobState.PREEMPTED, None),
        (True, None, JobState.FAILED, 1),  # no warning came: the worker that left is the cause
        (False, 1.0, JobState.FAILED, 0),  # a crash of its own
    ],
)
def test_abort_after_another_worker_has_left_is_its_effect(
    effect: bool, warned_at: float | None, state: JobState, rank: int | None
) -> None:
    cluster = running(2, warning=60.0)
    cluster.fail(1, failure(1, node=1, local=0, exit_code=75, message="exited with code 75"))
    cluster.decide(0.1)
    aborted = failure(0, effect=effect, kind=FailureKind.SIGNAL, **ABORTED)
    cluster.fail(0, aborted)
    for number in (0, 1):
        cluster.say(number, ended=True, reported=True)
    cluster.wait(1.0 if warned_at is None else warned_at)
    if warned_at is not None:
        warned(cluster)
    cluster.wait(5.0)
    cluster.stop()
    assert cluster.end.state is state
    assert (cluster.end.failure.rank if cluster.end.failure else None) == rank


@pytest.mark.parametrize("warning_arrives", [False, True])
def test_sigterm_of_the_own_stop_is_no_preemption(warning_arrives: bool) -> None:
    cluster = running(2, warning=60.0)
    cluster.fail(0, failure(0))
    cluster.decide()
    cluster.wait(2.0)  # without stacks
    assert cluster.ledger.stage is Stage.STOP
    stopped = failure(1, node=1, local=0, exit_code=143, kind=FailureKind.TERMINATED)
    cluster.now += 0.5
    cluster.fail(1, stopped)
    if warning_arrives:
        warned(cluster)
    cluster.stop()
    assert cluster.ledger.stage is Stage.END
    assert cluster.end.failure == failure(0)
    view = View(cluster.nodes)
    found = core.entries(cluster.job, cluster.ledger, view)
    assert [each.failure.rank for each in found] == [0], "it is no consequence either"


@pytest.mark.parametrize("stage", [Stage.RUN, Stage.COLLECT, Stage.STOP])
def test_warning_is_added_to_the_orders_of_a_round_and_changes_nothing_else(stage: Stage) -> None:
    cluster = running(3, spares=1, warning=60.0)
    if stage is not Stage.RUN:
        cluster.fail(1, failure(1, node=1, local=0))
        cluster.decide()
    if stage is Stage.STOP:
        cluster.wait(2.0)
    before = cluster.orders()
    assert not any(order.warned for order in before.values())
    warned(cluster)
    assert cluster.ledger.stage is stage
    for number, order in cluster.orders().items():
        assert order.warned
        assert order == replace(before[number], warned=True)


@pytest.mark.parametrize(
    ("failed", "state"), [(False, JobState.PREEMPTED), (True, JobState.FAILED)]
)
def test_node_that_is_lost_after_a_warning_preempts_the_job_unless_a_worker_has_failed(
    failed: bool, state: JobState
) -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    if failed:
        cluster.fail(0, failure(0), age=1.0)
    cluster.lose(1)
    cluster.decide()
    assert cluster.end.state is state


def test_warning_during_the_wait_for_a_lost_node_preempts_the_job_at_its_deadline() -> None:
    cluster = running(2, max_restarts=3, lease=30.0, warning=20.0)
    cluster.lose(1)
    cluster.decide()
    cluster.stop()
    assert cluster.wait(5.0) is Stage.WAIT
    warned(cluster)
    assert cluster.wait(14.5) is Stage.WAIT
    assert cluster.wait(1.0) is Stage.END
    assert cluster.end.state is JobState.PREEMPTED


# -- what ranks wait for ---------------------------------------------------------------------------


def waiting(cluster: Cluster, *ranks: int, gave_up: bool = False) -> None:
    cluster.say(0, missing=Missing(0, ranks, gave_up=gave_up))
    cluster.decide()


def test_nodes_of_missing_ranks_are_asked_and_the_answer_goes_to_who_waits() -> None:
    cluster = running(3, 2)
    waiting(cluster, 2, 5, 99)
    asked = {node: order.probe for node, order in cluster.orders().items()}
    assert asked[0] is None
    assert [probe.ranks for probe in (asked[1], asked[2]) if probe is not None] == [(2,), (5,)]
    cluster.say(2, probed=Probed(1, ("rank 5: it sleeps",)))
    cluster.decide()
    found = cluster.orders()[0].found
    assert found is not None
    assert (found.local_rank, found.lines) == (0, ("rank 5: it sleeps",))
    assert cluster.named("missing") == [{"node_rank": 2, "workers": ["rank 5: it sleeps"]}]


def test_failure_of_a_missing_rank_ends_the_round_at_once() -> None:
    cluster = running(2, 2)
    waiting(cluster, 3)
    left = failure(3, node=1, local=1, exit_code=7, kind=FailureKind.EXIT_CODE)
    cluster.fail(1, left)
    assert cluster.decide() is Stage.COLLECT
    assert cluster.end.failure == left


def test_missing_rank_is_the_cause_when_those_that_waited_have_given_up() -> None:
    cluster = running(2, 2)
    gave_up = failure(0, effect=True, kind=FailureKind.RENDEZVOUS)
    stuck = failure(3, node=1, local=1, message="the others gave up waiting for it")
    waiting(cluster, 3, gave_up=True)
    cluster.fail(0, gave_up)
    cluster.say(0, reported=True)
    cluster.say(1, reported=True)
    assert cluster.wait(2.0) is Stage.RUN, "the answer may take 3 s"
    cluster.say(1, probed=Probed(1, ("rank 3: it sleeps",), (stuck,)))
    cluster.decide()
    assert cluster.end.failure == stuck


@pytest.mark.parametrize("fails", [True, False])
def test_answer_is_no_cause_if_nobody_failed_because_it_gave_up(fails: bool) -> None:
    cluster = running(2, 2)
    waiting(cluster, 3, gave_up=True)  # a script may catch that error
    stuck = failure(3, node=1, local=1, message="the others gave up waiting for it")
    cluster.say(1, probed=Probed(1, ("rank 3: it sleeps",), (stuck,)), reported=True)
    assert cluster.wait(4.0) is Stage.RUN
    effect = failure(0, effect=True, kind=FailureKind.NETWORK)
    if fails:
        cluster.fail(0, effect)
        cluster.say(0, reported=True)
    else:
        succeed(cluster, 0, 1)
    cluster.wait(1.0)
    assert cluster.end.failure == (effect if fails else None)


@pytest.mark.parametrize(
    ("sizes", "missing", "asked"),
    [
        ((1, 4, 2), (0, 4, 5, 6), {0: (0,), 1: (4,), 2: (5, 6)}),
        ((4, 1, 2), (3, 4, 5), {0: (3,), 1: (4,), 2: (5,)}),
        ((2, 2, 1), (4, 5, 99), {2: (4,)}),
        ((1, 1, 8), (2, 9), {2: (2, 9)}),
    ],
)
def test_missing_ranks_belong_to_nodes_of_different_size(
    sizes: tuple[int, ...], missing: tuple[int, ...], asked: dict[int, tuple[int, ...]]
) -> None:
    cluster = Cluster(3)
    for number, nproc in enumerate(sizes):
        cluster.join(number, nproc=nproc)
    cluster.run()
    waiting(cluster, *missing)
    probes = {node: order.probe for node, order in cluster.orders().items()}
    assert {node: probe.ranks for node, probe in probes.items() if probe is not None} == asked


def test_node_that_only_serves_the_store_has_no_ranks() -> None:
    worlds = {
        number: World(
            0, "gpu3", 29500, agent_store=True, node_rank=number, nnodes=3, nproc=nproc,
            first_rank=first_rank, world_size=2,
        )
        for number, nproc, first_rank in ((1, 1, 0), (2, 1, 1), (3, 0, 0))
    }  # fmt: skip
    assert core.Run(worlds=worlds).by_node([0, 1]) == {1: [0], 2: [1]}


def test_missing_ranks_follow_the_places_of_a_round_with_a_spare() -> None:
    cluster = Cluster(4, spares=1, max_restarts=1)
    for number, nproc in enumerate((1, 4, 2, 3)):
        cluster.join(number, nproc=nproc)
    cluster.run()
    fail_round(cluster, 1, FailureKind.DEVICE, "ECC error")
    assert cluster.ledger.nodes == (0, 3, 2)
    waiting(cluster, 3, 4)
    probes = {node: order.probe for node, order in cluster.orders().items()}
    assert {node: probe.ranks for node, probe in probes.items() if probe is not None} == {
        3: (3,),
        2: (4,),
    }


def test_answer_to_an_earlier_question_is_no_cause() -> None:
    cluster = running(2, 2)
    waiting(cluster, 3, gave_up=True)
    waiting(cluster, 2, gave_up=True)
    stuck = failure(3, node=1, local=1)
    cluster.say(1, probed=Probed(1, ("rank 3: it sleeps",), (stuck,)), reported=True)
    cluster.fail(0, failure(0, effect=True, kind=FailureKind.RENDEZVOUS))
    cluster.say(0, reported=True)
    cluster.wait(4.0)
    assert cluster.end.failure is not None
    assert cluster.end.failure.rank == 0


@pytest.mark.parametrize(
    ("nproc", "ended", "text", "asked"),
    [
        (
            2,
            {0: (0, 1), 1: (0,)},
            "rank 3 still runs; ranks 0-2 ended 10 s ago",
            {1: (3,)},
        ),
        (
            4,
            {0: (0, 2), 1: (0,)},
            "ranks 1, 3, 5-7 still run; ranks 0, 2, 4 ended 10 s ago",
            {0: (1, 3), 1: (5, 6, 7)},
        ),
        (
            16,
            {1: (0,)},
            "ranks 0-15, 17-31 still run; rank 16 ended 10 s ago",
            {0: tuple(range(8)), 1: tuple(range(17, 25))},
        ),
    ],
)
def test_ranks_that_still_run_10_s_after_the_others_are_named_once_in_one_text(
    nproc: int, ended: dict[int, tuple[int, ...]], text: str, asked: dict[int, tuple[int, ...]]
) -> None:
    cluster = running(2, nproc)
    for number, local_ranks in ended.items():
        cluster.say(number, succeeded=local_ranks)
    cluster.decide()
    cluster.wait(9.5)
    assert not cluster.named("unfinished")
    cluster.wait(30.0)
    assert cluster.named("unfinished") == [{"text": text}]
    probes = {node: order.probe for node, order in cluster.orders().items()}
    found = {node: probe for node, probe in probes.items() if probe is not None}
    assert {node: probe.ranks for node, probe in found.items()} == asked
    assert {probe.note for probe in found.values()} == {text}


@pytest.mark.parametrize(("world_size", "most"), [(4096, 48), (8, 16)])
def test_counts_of_ranks_in_a_large_world_get_few_events(world_size: int, most: int) -> None:
    cluster = running(world_size // 8, 8)
    chosen = random.Random(1)
    for field in ("joined", "formed"):
        ranks = [node for node in cluster.nodes for _ in range(8)]
        chosen.shuffle(ranks)
        for index, node in enumerate(ranks):
            cluster.say(node, **{field: getattr(cluster.nodes[node].state, field) + 1})
            if index % (world_size // 128 or 1) == 0 or index > len(ranks) - 3:
                cluster.decide()
    events = cluster.named("ranks")
    assert 8 < len(events) <= most
    assert (events[-1]["joined"], events[-1]["formed"]) == (world_size, world_size)


def test_counts_never_fall_and_are_told_before_a_question_about_missing_ranks() -> None:
    cluster = running(4, 8)
    for number, joined in enumerate((8, 8, 1, 0)):
        cluster.say(number, joined=joined)
        cluster.decide()
    assert cluster.named("ranks")[-1]["joined"] == 16
    cluster.say(0, joined=0, missing=Missing(0, (31,), gave_up=False))
    cluster.say(1, joined=8)
    cluster.say(2, joined=8)
    cluster.decide()
    cluster.say(0, joined=8, missing=Missing(0, (30,), gave_up=False))
    cluster.say(3, joined=1)
    cluster.decide()
    assert [each["joined"] for each in cluster.named("ranks")][-2:] == [16, 25]


def test_imports_get_few_events() -> None:
    cluster = running(2)
    for _ in range(50):
        for importing in (True, False):
            cluster.say(0, importing=importing)
            cluster.decide()
    assert [event["torch"] for event in cluster.named("importing")] == [True, False] * 4


# -- a hang ----------------------------------------------------------------------------------------


class Quiet(Cluster):
    """Two nodes whose workers are silent; each answers a request for a sample at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(2, **options)
        self.run()
        self.output_at = [self.now, self.now]
        self.moved = [False, False]
        self.silent: set[int] = set()

    def hangs(self, seconds: float) -> bool:
        """Let time pass until the job hangs, or for a time; return whether it hangs."""
        end = self.now + seconds
        while self.now < end and self.ledger.stage is Stage.RUN:
            self.now = min(end, max(self.now + 0.01, self.due))
            self.decide()
            for number, order in self.orders().items():
                if number not in self.silent and order.sample:
                    moved = self.moved[number] and not order.first
                    quiet = self.now - self.output_at[number]
                    self.say(number, sampled=order.sample, moved=moved, quiet=quiet, step=number)
            self.decide()
        return self.ledger.stage is not Stage.RUN


def test_job_hangs_after_the_timeout_without_any_sign() -> None:
    cluster = Quiet(hang_timeout=20.0)
    begin = cluster.now
    assert cluster.hangs(60)
    assert cluster.now - begin == pytest.approx(20.0, abs=0.5)
    cluster.stop()
    assert cluster.end.failure is not None
    assert cluster.end.failure.kind is FailureKind.HANG


def test_job_without_timeout_never_hangs() -> None:
    cluster = Quiet()
    assert not cluster.hangs(10_000)
    assert cluster.due == math.inf


def test_output_of_one_node_and_a_moving_rank_delay_the_hang() -> None:
    cluster = Quiet(hang_timeout=20.0)
    assert not cluster.hangs(15)
    cluster.output_at[1] = cluster.now
    cluster.say(1, quiet=0.0)
    assert not cluster.hangs(15)
    cluster.moved[0] = True
    assert not cluster.hangs(100)
    cluster.moved[0] = False
    stopped = cluster.now
    assert cluster.hangs(60)
    assert cluster.now - stopped < 20 + 5 + 0.5


def test_node_without_answer_proves_no_hang() -> None:
    cluster = Quiet(hang_timeout=20.0)
    cluster.silent.add(1)
    assert not cluster.hangs(200)
    cluster.silent.clear()
    assert cluster.hangs(30)


def test_stop_of_the_coordinator_itself_is_no_hang() -> None:
    cluster = Quiet(hang_timeout=20.0)
    assert not cluster.hangs(10)
    cluster.now += 1000
    cluster.view["stalled"] = 1000.0
    cluster.decide()
    cluster.view.clear()
    resumed = cluster.now
    assert cluster.hangs(60)
    assert cluster.now - resumed >= 20


# -- other coordinators ----------------------------------------------------------------------------


def split(nnodes: int, own: Sequence[int], **view: Any) -> Cluster:
    """Return a cluster whose coordinator has lost all nodes but some in the first round."""
    cluster = running(nnodes, max_restarts=3, moves=True)
    for number in cluster.nodes:
        cluster.say(number, seen=1)
    cluster.decide()
    cluster.view.update(view)
    for number in set(cluster.nodes) - set(own):
        cluster.lose(number)
    cluster.decide()
    cluster.stop()
    return cluster


def test_smaller_part_of_a_split_job_resigns_and_decides_nothing() -> None:
    cluster = split(5, [0, 1])
    cluster.wait(7.0)
    assert cluster.ledger.stage is Stage.RESIGN
    assert not cluster.ledger.rounds


def test_agent_that_has_seen_no_round_does_not_make_a_part_larger() -> None:
    cluster = split(5, [0, 1])
    cluster.now += 1.0
    cluster.join(3)
    cluster.wait(7.0)
    assert cluster.ledger.stage is Stage.RESIGN


def test_new_round_replaces_the_last_one_when_all_its_nodes_have_seen_it() -> None:
    cluster = running(3, max_restarts=3, moves=True)
    for number in cluster.nodes:
        cluster.say(number, seen=1)
    fail_round(cluster, 1, FailureKind.SIGNAL, "was killed")
    sizes = []
    for number in cluster.nodes:
        sizes.append(len(cluster.ledger.groups))
        cluster.say(number, seen=2)
        cluster.decide()
    assert [*sizes, len(cluster.ledger.groups)] == [2, 2, 2, 1]


def test_larger_part_of_a_split_job_goes_on() -> None:
    cluster = split(5, [0, 1, 2])
    assert cluster.ledger.stage is Stage.WAIT
    assert len(cluster.ledger.rounds) == 1


@pytest.mark.parametrize(
    ("up", "stage"), [(True, Stage.RUN), (False, Stage.RESIGN), (None, Stage.WAIT)]
)
def test_half_of_a_job_goes_on_only_if_slurm_says_that_its_node_is_up(
    up: bool | None, stage: Stage
) -> None:
    cluster = running(4, max_restarts=3, min_nodes=2, moves=True)
    cluster.job = replace(cluster.job, asks_slurm=True)
    for number in cluster.nodes:
        cluster.say(number, seen=1)
    for number in (2, 3):
        cluster.lose(number)
    cluster.decide()
    cluster.stop()
    cluster.view["slurm_up"] = up
    cluster.wait(14.0)
    assert cluster.ledger.stage is stage


def test_new_coordinator_charges_the_round_once_and_only_with_the_larger_part() -> None:
    members = Members((0, 1, 2), 0)
    ledger = Ledger(
        Stage.RUN, round=0, nodes=(0, 1, 2), groups=(members,), first_started="t", started="t"
    )
    cluster = Cluster(3, max_restarts=1, min_nodes=2, moves=True)
    cluster.job = replace(cluster.job, own=1)
    lost = failure(None, node=0, kind=FailureKind.NODE_LOST, message="it was killed")
    cluster.nodes.clear()
    cluster.join(1)
    cluster.say(1, seen=1)
    cluster._take(core.take_over(cluster.job, ledger, cluster._view(), cluster.now, lost))
    cluster.wait(2.0)
    assert not cluster.ledger.rounds
    cluster.join(2)
    cluster.say(2, seen=1)
    cluster.decide()
    assert [each.kind for each in cluster.ledger.rounds] == ["node_lost"]
    again = core.take_over(cluster.job, cluster.ledger, cluster._view(), cluster.now, lost)
    assert len(again.ledger.rounds) == 1
    cluster.wait(13.0)
    assert (cluster.ledger.round, cluster.ledger.nodes) == (1, (1, 2))


@pytest.mark.parametrize(
    ("kind", "restarts", "stage", "state"),
    [
        ("", 1, Stage.END, JobState.SUCCEEDED),
        ("cancelled", 1, Stage.END, JobState.CANCELLED),
        ("time_limit", 1, Stage.END, JobState.FAILED),
        ("exit_code", 0, Stage.END, JobState.FAILED),
        ("exit_code", 1, Stage.RUN, None),
    ],
)
def test_new_coordinator_carries_out_the_end_that_was_recorded(
    kind: str, restarts: int, stage: Stage, state: JobState | None
) -> None:
    cluster = Cluster(2, max_restarts=restarts)
    ended = RoundEnd(0, 0, kind=kind, host="gpu1", node=1, message="exited with code 3")
    ledger = Ledger(Stage.RUN, round=0, nodes=(0, 1), rounds=(ended,), first_started="t")
    lost = failure(None, node=0, kind=FailureKind.NODE_LOST, message="it was killed")
    cluster._take(core.take_over(cluster.job, ledger, cluster._view(), cluster.now, lost))
    assert cluster.decide() is stage
    assert (cluster.ledger.end.state if cluster.ledger.end else None) is state
    assert len(cluster.ledger.rounds) == 1


def test_round_without_its_lost_spares_ends_if_they_may_go_on_alone() -> None:
    cluster = Cluster(5, spares=3, max_restarts=3, moves=True)
    cluster.run()
    for number in cluster.nodes:
        cluster.say(number, seen=1)
    cluster.lose(4)
    assert cluster.decide() is Stage.RUN
    for number in (2, 3):
        cluster.lose(number)
    assert cluster.decide() is not Stage.RUN
    cluster.stop()
    assert cluster.wait(7.0) is Stage.RESIGN


def test_node_that_knows_a_newer_round_is_of_another_part() -> None:
    cluster = split(3, [0, 1])
    cluster.say(1, seen=9)
    cluster.wait(7.0)
    assert cluster.ledger.stage is Stage.RESIGN
