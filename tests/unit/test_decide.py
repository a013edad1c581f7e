"""What a job does next, by the states of its nodes: decisions as a pure function."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node import decide as core
from clusterjob.node.decide import MOST_NODES, Decision, Job, Ledger, Loss, Node, Stage, View
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.messages import Lasting, Members
from clusterjob.node.rendezvous.root_cause import EFFECT_TIMEOUT, EXIT_TIMEOUT
from clusterjob.node.stacks.grouping import Frame, RankStack, ThreadStack
from clusterjob.node.states import Failing, Missing, NodeState, Order, Probe, Probed, Request
from clusterjob.node.verdict import Failure, FailureKind, JobState, RoundEnd, Verdict


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
        self.dropped: dict[int, str] = {}
        self.honest = True  # whether no node answers questions that it does not know yet
        self.join(*range(nnodes), nproc=nproc)

    def join(self, *numbers: int, nproc: int = 1) -> None:
        """Let agents join, also those that were started again."""
        for number in numbers:
            if number in self.nodes and self.nodes[number].here:
                self.lose(number, "its agent joins again", ended=True)
            losses = self.nodes[number].losses if number in self.nodes else ()
            self.nodes[number] = Node(
                number, f"gpu{number}", pid=1, nproc=nproc, joined_at=self.now, heard_at=self.now,
                losses=losses,
            )  # fmt: skip

    def lose(self, number: int, why: str = "no message for 10 s", **fields: Any) -> None:
        self.nodes[number] = self.nodes[number].lose(Loss(why, self.now, **fields))

    def say(self, *numbers: int, **fields: Any) -> None:
        """Let nodes send their states."""
        for number in numbers:
            node = self.nodes[number]
            self.nodes[number] = node.receive(replace(node.state, **fields), self.now)

    def fail(self, number: int, *found: Failure, age: float = 0.0, exited: bool = True) -> None:
        self.say(number, failing=tuple(Failing(each, age, exited=exited) for each in found))

    def decide(self, seconds: float = 0.0) -> Stage:
        """Let time pass, and decide; return the stage."""
        self.now += seconds
        self._take(core.decide(self.job, self.ledger, self._view(), self.now))
        if self.honest and not self.dropped:  # at the same moment, nothing changes any more
            orders = self.orders() if self.ledger.stage is not Stage.END else {}
            again = core.decide(self.job, self.ledger, self._view(), self.now)
            expected = Decision(self.ledger, due=again.due)
            assert again == expected
            assert not orders or self.orders() == orders
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
        self.say(
            *self.ledger.nodes,
            round=self.ledger.round,
            started=True,
            ended=False,
            idle=False,
            succeeded=(),
            failing=(),
            reported=False,
            exits=(),
        )
        self.decide()
        assert self.ledger.running

    def stop(self) -> None:
        """Let all nodes stop their workers as they are told."""
        for _ in range(2):
            if self.ledger.stage is Stage.COLLECT:
                self.say(*self.ledger.collect_from, collected=True)
                self.decide()
            if self.ledger.stage is Stage.STOP:
                for number in self.ledger.worlds:
                    if self.nodes[number].here:
                        self.say(number, round=self.ledger.round, idle=True, ended=True)
                self.decide()

    def orders(self) -> dict[int, Order]:
        return dict(core.orders(self.job, self.ledger, self.nodes))

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def finish(self) -> None:
        """End the round."""
        self.decide()
        self.stop()

    @property
    def end(self) -> Verdict:
        return self.ledger.ending

    @property
    def cause(self) -> Failure:
        assert self.end.failure is not None
        return self.end.failure

    def _view(self) -> View:
        return View(self.nodes, time=f"{self.now:.3f}", **self.view)

    def _take(self, decision: Decision) -> None:
        self.ledger, self.due = decision.ledger, decision.due
        self.events += decision.events
        self.lines += decision.lines
        self.dropped = decision.dropped
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


def end_round(cluster: Cluster, node: int, kind: FailureKind, message: str = "boom") -> None:
    """Let the worker of a node fail, and all nodes stop their workers."""
    rank = cluster.ledger.nodes.index(node)
    failed = failure(rank, node=node, local=0, kind=kind, message=message)
    cluster.fail(node, failed)
    cluster.finish()


# -- the first round -------------------------------------------------------------------------------


def test_round_begins_when_all_nodes_are_there_and_succeeds_when_all_workers_have() -> None:
    cluster = running(2, 2)
    assert cluster.named("started")[0]["nodes"] == [0, 1]
    assert cluster.named("running")
    succeed(cluster, 0)
    assert cluster.decide() is Stage.RUN
    succeed(cluster, 1)
    cluster.finish()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.SUCCEEDED)
    assert [each.kind for each in cluster.ledger.rounds] == [""]


def test_nodes_of_unequal_size_get_consecutive_ranks() -> None:
    cluster = Cluster(3)
    for number, nproc in enumerate((1, 3, 2)):
        cluster.join(number, nproc=nproc)
    cluster.run()
    found = cluster.ledger.worlds.values()
    assert [(each.node_rank, each.first_rank, each.nproc) for each in found] == [
        (0, 0, 1), (1, 1, 3), (2, 4, 2),
    ]  # fmt: skip
    assert {(each.nnodes, each.world_size) for each in found} == {(3, 6)}


@pytest.mark.parametrize("serves_store", [True, False])
def test_coordinator_without_workers_serves_the_store(serves_store: bool) -> None:
    cluster = Cluster(3, spares=1, max_restarts=1)
    cluster.job = replace(cluster.job, own=2, serves_store=serves_store)
    cluster.run()
    worlds = cluster.ledger.worlds
    assert list(worlds) == ([0, 1, 2] if serves_store else [0, 1])
    if serves_store:
        assert replace(worlds[2], node_rank=1, first_rank=1, nproc=1) == worlds[1]


def test_workers_that_ended_without_success_or_failure_are_no_success() -> None:
    cluster = running(2, 2)
    succeed(cluster, 0)
    cluster.say(1, ended=True, succeeded=(0,))
    cluster.finish()
    assert (cluster.cause.node_rank, cluster.cause.kind) == (1, "process_lost")


def test_missing_node_is_named_every_5_s_and_ends_the_job_after_the_timeout() -> None:
    cluster = Cluster(3, join_timeout=20.0)
    del cluster.nodes[2]
    cluster.wait(12.0)
    assert [each["missing"] for each in cluster.named("waiting")] == [[2], [2]]
    assert cluster.lines[0] == "waiting for node 2 of 3, 5 s so far"
    cluster.wait(10.0)
    assert cluster.ledger.stage is Stage.END
    assert "node 2 of 3 never joined within 20 s" in cluster.end.reason
    [ended] = cluster.ledger.rounds
    assert (ended.kind, ended.node, ended.started_at) == ("node_lost", 2, None)


def test_elastic_round_waits_5_s_for_more_nodes() -> None:
    cluster = Cluster(3, min_nodes=2)
    del cluster.nodes[1]
    assert cluster.wait(4.9) is Stage.WAIT
    cluster.wait(0.3)
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))


def test_node_that_is_refused_or_lost_before_the_first_round_ends_the_job() -> None:
    cluster = Cluster(2)
    cluster.view["refused"] = failure(None, node=1, message="claimed twice")
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


FAILED = Verdict.of_failure(failure())
CANCELLED = Verdict(JobState.CANCELLED, 143, reason="SIGTERM")


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
        (CANCELLED, 60.0, 1e9, 60.0),
        (Verdict(JobState.SUCCEEDED, 0), 60.0, 1e9, 0.0),
    ],
)
def test_grace_is_bounded_by_what_the_scheduler_leaves(
    end: Verdict, given: float | None, left: float, grace: float
) -> None:
    options = LaunchOptions(Program("script", "t.py"), grace=given)
    assert core.grace_after(end, options, left=left) == grace


# -- the preflight ---------------------------------------------------------------------------------

SLOW = {1: "its GPU computes at 0.5 of the median"}


def measuring(nnodes: int = 3, **options: Any) -> Cluster:
    """Return a cluster whose nodes measure before the first round."""
    cluster = Cluster(nnodes, **({"preflight": "refuse"} | options))
    assert cluster.decide() is Stage.WAIT
    assert cluster.orders()[0].measure is not None
    return cluster


def measured(cluster: Cluster, *numbers: int, how: str = core.MEASURED) -> None:
    cluster.say(*numbers, measured=how)


@pytest.mark.parametrize(
    ("mode", "spares", "slow", "nodes"),
    [
        ("refuse", 0, {}, (0, 1, 2)),
        ("refuse", 1, {}, (0, 1)),
        ("refuse", 1, SLOW, (0, 2)),
        ("refuse", 1, {**SLOW, 2: "slow"}, None),
        ("refuse", 0, SLOW, None),
        ("warn", 0, SLOW, (0, 1, 2)),
        ("warn", 1, SLOW, (0, 2)),
        ("refuse", 0, {7: "slow"}, (0, 1, 2)),  # no node of the job
    ],
)
def test_slow_node_is_replaced_by_a_spare_or_refused(
    mode: str, spares: int, slow: dict[int, str], nodes: tuple[int, ...] | None
) -> None:
    cluster = measuring(preflight=mode, spares=spares)
    assert [order.measure is not None for order in cluster.orders().values()] == [True] * 3
    measured(cluster, 0, 1)
    assert cluster.decide() is Stage.WAIT
    cluster.view["slow"] = slow
    measured(cluster, 2)
    cluster.decide()
    assert cluster.ledger.nodes == (nodes or ())
    assert cluster.ledger.stage is (Stage.END if nodes is None else Stage.RUN)
    assert [event["node_rank"] for event in cluster.named("avoid")] == [
        node for node in slow if node < 3
    ]
    if nodes is None:
        assert f"preflight: host gpu1: {SLOW[1]}" in cluster.end.reason
        assert cluster.cause.kind is FailureKind.LAUNCH
        assert len(cluster.named("round_ended")) == 1


def test_node_that_does_not_end_its_measures_in_time_is_slow() -> None:
    cluster = measuring(3, spares=1, join_timeout=20.0)
    measured(cluster, 0, 2)
    assert cluster.wait(49.0) is Stage.WAIT
    cluster.wait(2.0)
    assert cluster.ledger.slow == {1: "the measuring process: it does not end"}
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))


def test_node_that_cannot_measure_is_slow_and_the_others_do_not_wait_for_it() -> None:
    cluster = measuring(3, spares=1)
    measured(cluster, 1, how="CUDA error")
    cluster.wait(1.0)
    assert cluster.ledger.slow == {1: "the measuring process: CUDA error"}
    assert cluster.orders()[0].measure is None
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))


def test_node_that_is_lost_while_it_measures_is_not_waited_for() -> None:
    cluster = measuring(3, spares=1)
    measured(cluster, 0, 2)
    cluster.lose(1)
    cluster.wait(6.0)
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))
    assert not cluster.ledger.slow
    assert len(cluster.named("measuring")) == 1


def test_node_that_is_busy_after_the_measures_is_waited_for() -> None:
    cluster = measuring(2)
    measured(cluster, 0, 1)
    cluster.say(1, idle=False)
    assert cluster.decide() is Stage.WAIT
    cluster.say(1, idle=True)
    assert cluster.decide() is Stage.RUN


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


def test_nodes_measure_once() -> None:
    cluster = measuring(2, max_restarts=1)
    measured(cluster, 0, 1)
    cluster.run()
    end_round(cluster, 1, FailureKind.SIGNAL)
    cluster.run()
    assert cluster.ledger.restarts == 1
    assert len(cluster.named("measuring")) == 1


# -- ends of a round -------------------------------------------------------------------------------


def test_cancellation_stops_the_workers() -> None:
    cluster = running(2)
    cluster.say(1, request=Request(cancel="cancelled", interrupt=True))
    cluster.decide()
    assert (cluster.ledger.stage, cluster.orders()[0].stop) == (Stage.STOP, core.Stop(3.0, 2))
    cluster.stop()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.CANCELLED)
    assert [(each.kind, each.rank) for each in cluster.ledger.rounds] == [("cancelled", None)]


@pytest.mark.parametrize("stacks", [False, True])
def test_cancellation_saves_stacks_on_request(*, stacks: bool) -> None:
    cluster = running(2)
    cluster.say(0, request=Request(cancel="cancelled", stacks=stacks))
    assert cluster.decide() is (Stage.COLLECT if stacks else Stage.STOP)


def test_cancellation_ends_the_wait_for_a_lost_node() -> None:
    cluster = running(2, max_restarts=3)
    cluster.lose(1)
    cluster.finish()
    assert cluster.wait(3.0) is Stage.WAIT
    cluster.say(0, request=Request(cancel="cancelled"))
    assert cluster.decide() is Stage.END
    assert cluster.end.state is JobState.CANCELLED


@pytest.mark.parametrize("decided", [False, True])
def test_job_whose_workers_have_all_ended_with_0_before_a_cancellation_has_succeeded(
    decided: bool,
) -> None:
    cluster = running(2)
    succeed(cluster, 0, 1)
    if decided:
        assert cluster.decide() is Stage.STOP
    cluster.say(1, request=Request(cancel="cancelled"))
    cluster.finish()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.SUCCEEDED)


def test_cancellation_before_the_first_round_ends_the_job() -> None:
    cluster = Cluster(3)
    del cluster.nodes[2]
    cluster.decide(1.0)
    cluster.say(1, request=Request(cancel="cancelled"))
    assert cluster.decide() is Stage.END
    assert (cluster.end.state, cluster.named("round_ended")[0]["kind"]) == (
        JobState.CANCELLED,
        "cancelled",
    )


def test_second_interrupt_stops_without_grace() -> None:
    cluster = running(2)
    cluster.say(0, request=Request(cancel="SIGINT on gpu0", interrupt=True))
    cluster.decide()
    cluster.say(0, request=Request(cancel="SIGINT on gpu0", interrupt=True, kill=True))
    cluster.decide()
    order = cluster.orders()[1].stop
    assert order.grace == 0.0


def test_second_interrupt_does_not_wait_for_stacks() -> None:
    cluster = running(2)
    asked = Request(cancel="SIGINT on gpu0", interrupt=True, stacks=True)
    cluster.say(0, request=asked)
    assert cluster.decide() is Stage.COLLECT
    cluster.say(0, request=replace(asked, kill=True))
    assert cluster.decide() is Stage.STOP


def test_node_that_has_not_seen_its_round_yet_is_waited_for_at_the_stop() -> None:
    cluster = Cluster(2, max_restarts=1)
    while cluster.decide(0.25) is not Stage.RUN:
        pass
    cluster.say(0, round=0, started=True, idle=False)
    cluster.fail(0, failure(0))
    cluster.decide()
    cluster.say(0, collected=True)
    cluster.wait(2.0)
    cluster.say(0, idle=True, ended=True)
    assert cluster.decide() is Stage.STOP
    cluster.say(1, round=0, ended=True)
    assert cluster.decide() is not Stage.STOP


def test_cancellation_during_the_stop_of_a_failed_round_ends_the_job() -> None:
    cluster = running(2, max_restarts=3)
    cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
    cluster.decide()
    cluster.say(0, request=Request(cancel="cancelled"))
    cluster.finish()
    assert (cluster.ledger.stage, cluster.end.state) == (Stage.END, JobState.CANCELLED)


def test_time_limit_counts_from_the_first_start() -> None:
    cluster = Cluster(2, time_limit=10.0)
    cluster.decide()
    assert cluster.wait(9.0) is Stage.RUN
    cluster.wait(1.5)
    assert cluster.end.exit_code == 124
    assert cluster.end.reason == "the time limit of 10 s was reached"
    assert all(order.collect and order.dumps for order in cluster.orders().values())
    cluster.stop()
    assert [(each.kind, each.rank) for each in cluster.ledger.rounds] == [("time_limit", None)]


def test_time_limit_includes_restarts() -> None:
    cluster = running(2, time_limit=10.0, max_restarts=3)
    cluster.wait(6.0)
    end_round(cluster, 1, FailureKind.SIGNAL)
    cluster.run()
    assert cluster.wait(3.0) is Stage.RUN
    cluster.wait(1.5)
    assert (cluster.end.exit_code, cluster.ledger.restarts) == (124, 1)


def test_failed_worker_stops_the_round_when_it_has_exited_or_after_5_s() -> None:
    late, exits = running(2), running(2)
    found = failure(1, node=1, local=0)
    for cluster in (late, exits):
        cluster.fail(1, found, exited=False)
        assert cluster.wait(EXIT_TIMEOUT - 0.1) is Stage.RUN
    exits.fail(1, found)
    assert exits.decide() is Stage.COLLECT
    assert exits.orders()[0].collect
    exits.stop()
    assert exits.end.reason == "rank 1 (node 1, local rank 0, host gpu1): ValueError: boom"
    assert late.wait(0.2) is Stage.COLLECT
    assert late.end.failure == found


def test_no_stacks_are_collected_when_no_rank_is_left() -> None:
    cluster = running(1)
    cluster.fail(0, failure(0))
    cluster.say(0, ended=True)
    assert cluster.decide() is Stage.STOP


def test_rank_that_ended_with_0_is_no_cause_of_a_failure_that_is_no_effect() -> None:
    cluster = running(2)
    left = failure(0, exit_code=0, message="")
    cluster.say(
        0, reported=True, ended=True, succeeded=(0,), exits=(Failing(left, 1.0, exited=True),)
    )
    cluster.fail(1, failure(1, node=1, local=0, exit_code=3, kind=FailureKind.EXIT_CODE))
    cluster.finish()
    assert (cluster.end.exit_code, cluster.end.failure) == (
        3,
        failure(1, node=1, local=0, exit_code=3, kind=FailureKind.EXIT_CODE),
    )


def test_all_nodes_are_asked_before_an_effect_is_the_verdict() -> None:
    cluster = running(3)
    effect = failure(0, effect=True, kind=FailureKind.NETWORK)
    cluster.fail(0, effect)
    cluster.decide()
    cluster.decide(EFFECT_TIMEOUT)
    assert cluster.orders()[1].report
    cluster.say(0, 1, reported=True)
    assert cluster.wait(10.0) is Stage.RUN
    cluster.fail(2, failure(2, node=2, local=0), age=8.0)
    cluster.decide()
    assert cluster.cause.rank == 2


def test_silent_node_delays_the_verdict_on_an_effect_for_its_lease() -> None:
    cluster = running(2, lease=10.0)
    cluster.fail(0, failure(0, effect=True))
    cluster.say(0, reported=True)
    assert cluster.wait(14.0) is Stage.RUN
    assert cluster.wait(0.5) is Stage.COLLECT


def test_report_of_an_earlier_round_is_no_answer_about_this_one() -> None:
    cluster = running(3)
    cluster.fail(0, failure(0, effect=True))
    cluster.say(0, 1, reported=True)
    cluster.say(2, reported=True, round=-1)
    assert cluster.wait(2.0) is Stage.RUN
    cluster.say(2, round=0)
    assert cluster.decide() is Stage.COLLECT


@pytest.mark.parametrize(("effect", "kind"), [(True, "time_limit"), (False, "network")])
def test_time_limit_ends_the_wait_for_the_cause_of_an_effect(effect: bool, kind: str) -> None:
    cluster = running(3, time_limit=10.0)
    cluster.now += 9.9
    cluster.say(0)
    cluster.fail(0, failure(0, effect=effect, kind=FailureKind.NETWORK))
    cluster.wait(0.5)
    cluster.finish()
    assert [each.kind for each in cluster.ledger.rounds] == [kind]


def test_early_exit_explains_effects() -> None:
    cluster = running(2)
    lines = ('  File "/venv/torch/distributed/distributed_c10d.py", line 1, in all_reduce', "x")
    cluster.fail(0, failure(0, effect=True, last_lines=lines), age=0.0)
    succeed(cluster, 1)
    left = failure(1, node=1, local=0, exit_code=0, message="")
    cluster.say(0, reported=True)
    cluster.say(1, reported=True, exits=(Failing(left, 1.0, exited=True),))
    cluster.wait(1.0)
    cluster.stop()
    assert (cluster.cause.rank, cluster.cause.kind) == (1, "early_exit")


def test_report_that_arrives_during_the_stop_may_be_the_cause() -> None:
    cluster = running(2)
    cluster.fail(0, failure(0))
    cluster.decide(1.0)
    cluster.fail(1, failure(1, node=1, local=0, message="older"), age=5.0)
    cluster.stop()
    assert "older" in cluster.end.reason


def test_node_that_does_not_stop_is_dropped_after_the_grace() -> None:
    cluster = running(2, grace=2.0)
    cluster.fail(0, failure(0))
    cluster.decide()
    cluster.wait(2.0)  # without stacks
    assert cluster.ledger.stage is Stage.STOP
    cluster.say(0, idle=True, ended=True)
    cluster.wait(8.0)
    assert cluster.ledger.stage is Stage.END
    assert not cluster.nodes[1].here
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
    found = cluster.ledger.collect_from
    # A time limit has no failed node; all are asked.
    assert abs(len(found) - asked) <= 1 + nnodes // MOST_NODES * (failed is not None)
    assert failed is None or failed in found
    assert max(found) >= nnodes - nnodes // MOST_NODES - 2


# -- restarts --------------------------------------------------------------------------------------


def test_restarts_are_charged_and_end_with_the_budget() -> None:
    cluster = running(2, max_restarts=1)
    for _ in range(2):
        cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
        cluster.decide()
        cluster.stop()
        if cluster.ledger.stage is not Stage.END:
            cluster.run()
    assert cluster.ledger.stage is Stage.END
    assert (cluster.ledger.restarts, len(cluster.ledger.rounds)) == (1, 2)
    assert [each["restart"] for each in cluster.named("restart")] == [1]
    assert cluster.lines[0].startswith("restart 1 of 1: rank 1 (node 1, ")


def test_spare_takes_the_place_of_a_lost_node_without_max_restarts() -> None:
    cluster = running(3, spares=1)
    assert cluster.ledger.nodes == (0, 1)
    cluster.lose(1)
    cluster.finish()
    assert cluster.ledger.stage is Stage.WAIT
    fence = cluster.job.options.lease + core.END_SECONDS
    assert cluster.wait(fence - 1.0) is Stage.WAIT, "its workers may run until its lease is over"
    cluster.wait(1.5)
    assert (cluster.ledger.stage, cluster.ledger.nodes) == (Stage.RUN, (0, 2))
    assert cluster.named("avoid")[0]["node_rank"] == 1


def test_node_whose_end_is_recorded_is_not_waited_for() -> None:
    cluster = running(3, spares=1)
    cluster.lose(1, ended=True)
    cluster.view["ended"] = frozenset({1})
    cluster.finish()
    cluster.wait(0.5)
    assert cluster.ledger.nodes == (0, 2)
    assert not cluster.named("avoid"), "only the agent was killed"


NODES = st.integers(0, 7)


@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.lists(NODES, unique=True),
    st.lists(NODES, unique=True, max_size=6),
)
def test_selection_keeps_places_and_avoids_nodes(
    wanted: int, least: int, usable: list[int], avoided: list[int]
) -> None:
    least = min(least, wanted)
    chosen = core.choose(usable, range(wanted), avoided, wanted=wanted, least=least)
    good = set(usable) - set(avoided)
    assert len(set(chosen)) == len(chosen) <= wanted
    assert set(chosen) <= set(usable)
    assert len(chosen) == min(wanted, max(len(good), min(len(usable), least)))
    assert len(set(chosen) & good) == min(wanted, len(good))
    if len(chosen) == wanted:  # every node that stays usable keeps its place
        for position, node in enumerate(chosen):
            assert node == position or position not in good


BROKEN, FULL = (
    "OSError: [Errno 5] Input/output error",
    "OSError: [Errno 28] No space left on device",
)


@pytest.mark.parametrize(
    ("failures", "nodes", "marked"),
    [
        ([(1, FailureKind.DISK, BROKEN)], (0, 2), [1]),
        ([(1, FailureKind.DISK, FULL)], (0, 2), []),
        ([(1, FailureKind.DISK, BROKEN), (2, FailureKind.DISK, BROKEN)], (0, 2), [1]),
        ([(1, FailureKind.DISK, FULL), (2, FailureKind.DISK, FULL)], (0, 2), []),
        ([(1, FailureKind.DISK, BROKEN), (2, FailureKind.DEVICE, "boom")], (0, 3), [1, 2]),
        ([(1, FailureKind.DEVICE, "boom"), (2, FailureKind.DEVICE, "boom")], (0, 3), [1, 2]),
        ([(0, FailureKind.NETWORK, "boom"), (1, FailureKind.NETWORK, "boom")], (2, 3), [0, 1]),
        # If too few others are left, the node that failed first comes back.
        ([(node, FailureKind.DEVICE, "boom") for node in (0, 1, 2)], (0, 3), [0, 1, 2]),
        ([(1, FailureKind.SIGNAL, "boom"), (1, FailureKind.CODE, "boom")], (0, 1), []),
    ],
)
def test_node_that_failed_is_left_out_unless_too_few_are_left_or_the_disk_is_shared(
    failures: list[tuple[int, FailureKind, str]], nodes: tuple[int, ...], marked: list[int]
) -> None:
    cluster = running(4, spares=2, max_restarts=3)
    for node, kind, message in failures:
        end_round(cluster, node, kind, message)
        cluster.run()
    assert cluster.ledger.nodes == nodes
    assert [event["node_rank"] for event in cluster.named("avoid")] == marked


def test_round_after_a_second_disk_failure_in_a_row_begins_later() -> None:
    cluster = running(4, spares=2, max_restarts=3)
    end_round(cluster, 1, FailureKind.DISK, BROKEN)
    assert cluster.decide() is Stage.RUN
    cluster.run()
    end_round(cluster, 2, FailureKind.DISK, BROKEN)
    assert cluster.wait(0.9) is Stage.WAIT
    assert cluster.wait(0.2) is Stage.RUN
    assert "the next round begins in 1 s" in cluster.lines[-2]


@pytest.mark.parametrize("noticed", [False, True])
def test_lost_node_returns_once(noticed: bool) -> None:
    cluster = running(3, min_nodes=2, max_restarts=3)
    for nodes in ((0, 1, 2), (0, 2)):
        cluster.now += 1.0
        if noticed:
            cluster.lose(1)
            cluster.decide()
        cluster.join(1)  # maybe before the coordinator has looked
        cluster.decide()
        cluster.stop()
        cluster.run()
        assert cluster.ledger.nodes == nodes
    assert [event["node_rank"] for event in cluster.named("lost")] == [1, 1]


def test_elastic_job_shrinks_and_the_node_that_returns_gets_the_last_place() -> None:
    cluster = running(3, min_nodes=2, max_restarts=2)
    cluster.lose(1, ended=True)
    cluster.view["ended"] = frozenset({1})
    cluster.finish()
    cluster.run()
    assert cluster.ledger.nodes == (0, 2)
    cluster.join(1)
    assert cluster.decide(60.0) is Stage.RUN, "no round ends for a node that has come back"
    end_round(cluster, 2, FailureKind.SIGNAL)
    cluster.run()
    assert cluster.ledger.nodes == (0, 2, 1)


def test_loss_of_an_idle_spare_does_not_disturb_the_workers() -> None:
    cluster = running(3, spares=1, max_restarts=1)
    cluster.lose(2)
    assert cluster.wait(60.0) is Stage.RUN
    assert cluster.lines == [
        "node 2 (host gpu2): the agent on gpu2 (pid 1) was lost: no message for 10 s"
    ]
    assert cluster.ledger.restarts == 0


def test_lost_node_without_others_ends_an_elastic_job_below_its_size() -> None:
    cluster = running(2, min_nodes=2, max_restarts=1, join_timeout=30.0)
    cluster.lose(1)
    cluster.finish()
    cluster.wait(31.0)
    assert cluster.ledger.stage is Stage.END
    assert "node 1 of 2 did not return within 30 s" in cluster.end.reason


def test_lost_node_that_does_not_return_ends_a_job_that_needs_it() -> None:
    cluster = running(2, max_restarts=3, lease=10.0)
    cluster.lose(1, "its connection was closed")
    cluster.finish()
    assert cluster.wait(14.5) is Stage.WAIT
    cluster.wait(1.0)
    assert (cluster.ledger.stage, cluster.ledger.restarts) == (Stage.END, 0)
    assert (cluster.cause.kind, cluster.cause.node_rank) == ("node_lost", 1)
    assert "was lost: its connection was closed; node 1 of 2 did not return" in cluster.end.reason


def test_node_that_was_started_again_in_a_round_is_lost_and_gets_no_workers() -> None:
    cluster = running(2, max_restarts=1)
    cluster.now += 1.0
    cluster.join(1)
    assert cluster.orders()[1].world is None
    cluster.decide()
    assert cluster.cause.node_rank == 1


def test_node_with_workers_takes_no_part_in_the_next_round() -> None:
    cluster = running(3, spares=1, max_restarts=2)
    cluster.say(2, idle=False)
    cluster.fail(1, failure(1, node=1, local=0, kind=FailureKind.SIGNAL))
    cluster.finish()
    cluster.run()
    assert cluster.ledger.nodes == (0, 1)


def test_coordinator_that_stood_still_blames_itself() -> None:
    cluster = running(2)
    cluster.view["stalled"] = 30.0
    cluster.lose(1, "it has lost the coordinator")
    cluster.decide()
    assert cluster.cause.node_rank == 0
    assert "did not run for 30 s" in cluster.cause.message


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
    assert cluster.due == pytest.approx(cluster.now + 0.5)
    assert cluster.decide(0.51) is Stage.STOP
    assert cluster.end.state is JobState.PREEMPTED


@pytest.mark.parametrize(("warn_signal", "state"), [("SIGUSR1", "PREEMPTED"), ("", "FAILED")])
def test_any_end_after_a_warning_signal_is_an_answer_to_it(warn_signal: str, state: str) -> None:
    cluster = running(1, warning=60.0, warn_signal=warn_signal)
    warned(cluster)
    cluster.fail(0, failure(0, exit_code=3))
    cluster.say(0, ended=True)
    cluster.finish()
    assert cluster.end.state == state


def test_worker_that_leaves_after_a_warning_preempts_the_job_with_its_effects() -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    cluster.fail(0, failure(0, effect=True))
    cluster.decide()
    assert cluster.ledger.stage is Stage.RUN
    cluster.fail(1, failure(1, node=1, local=0, exit_code=75, kind=FailureKind.PREEMPTED))
    cluster.say(0, 1, ended=True)
    cluster.finish()
    assert cluster.end.reason == "SIGUSR1 on gpu0: its workers left to be queued again"


def test_workers_that_our_own_stop_has_ended_were_not_preempted() -> None:
    cluster = running(2, warning=60.0)
    cluster.fail(0, failure(0))
    cluster.decide()
    cluster.wait(2.0)  # for stacks
    assert cluster.ledger.stage is Stage.STOP
    terminated = failure(1, node=1, local=0, exit_code=143, kind=FailureKind.TERMINATED)
    cluster.now += 0.1
    cluster.fail(1, terminated)
    cluster.say(1, request=Request(warning="SIGTERM on gpu1"))
    cluster.finish()
    assert (cluster.end.state, cluster.end.failure) == (JobState.FAILED, failure(0))
    view = cluster._view()
    assert core.explain(cluster.job, cluster.ledger, view) == (failure(0), ())


def test_warning_is_added_to_the_other_orders() -> None:
    cluster = running(2, warning=60.0)
    before = cluster.orders()
    warned(cluster)
    assert cluster.orders() == {node: replace(order, warned=True) for node, order in before.items()}
    assert cluster.orders()[0].world is not None
    cluster.fail(1, failure(1, node=1, local=0))
    cluster.decide()
    assert {(order.warned, order.collect) for order in cluster.orders().values()} == {(True, True)}
    cluster.wait(2.0)
    assert cluster.ledger.stage is Stage.STOP
    assert all(order.warned and order.stop for order in cluster.orders().values())
    assert len(cluster.named("warned")) == 1


def test_other_failure_after_a_warning_is_a_failure() -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    cluster.fail(1, failure(1, node=1, local=0))
    cluster.decide()
    assert cluster.end.state is JobState.FAILED


@pytest.mark.parametrize("kind", [FailureKind.TERMINATED, FailureKind.PREEMPTED])
def test_worker_that_leaves_with_an_exception_after_a_warning_is_preempted(
    kind: FailureKind,
) -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    cluster.fail(1, failure(1, node=1, local=0, kind=kind))
    cluster.say(0, 1, ended=True)
    cluster.finish()
    assert (cluster.end.state, cluster.end.exit_code) == (JobState.PREEMPTED, 75)


@pytest.mark.parametrize(
    ("exit_code", "kind"), [(143, FailureKind.TERMINATED), (75, FailureKind.EXIT_CODE)]
)
def test_suspected_preemption_waits_3_s_for_its_warning(exit_code: int, kind: FailureKind) -> None:
    cluster = running(2, warning=60.0)
    killed = failure(1, node=1, local=0, exit_code=exit_code, kind=kind)
    cluster.fail(1, killed)
    cluster.decide()
    assert cluster.wait(2.9) is Stage.RUN
    cluster.wait(0.2)
    assert cluster.end.failure == killed
    assert cluster.end.state is JobState.FAILED
    other = running(2, warning=60.0)
    other.fail(1, killed)
    other.decide(1.0)
    warned(other)
    assert other.wait(10.0) is Stage.RUN
    never = running(2)
    never.fail(1, killed)
    never.decide()
    assert never.end.failure == killed


def test_node_that_is_lost_after_a_warning_preempts_the_job() -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    cluster.lose(1)
    cluster.decide()
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
    cluster.say(2, probed=Probed(Probe((5,)), ("rank 5: it sleeps",)))
    cluster.decide()
    found = {node: order.found for node, order in cluster.orders().items()}
    assert found == {0: ("rank 5: it sleeps",), 1: (), 2: ()}


def test_missing_rank_is_the_cause_when_those_that_waited_have_given_up() -> None:
    cluster = running(2, 2)
    gave_up = failure(0, effect=True, kind=FailureKind.RENDEZVOUS)
    stuck = failure(3, node=1, local=1, message="the others gave up waiting for it")
    waiting(cluster, 3, gave_up=True)
    cluster.fail(0, gave_up)
    cluster.say(0, 1, reported=True)
    assert cluster.wait(2.0) is Stage.RUN, "the answer may take 3 s"
    probe = cluster.orders()[1].probe
    assert probe == Probe((3,), gave_up=True)
    cluster.say(1, probed=Probed(probe, ("rank 3: it sleeps",), (stuck,)))
    cluster.decide()
    assert cluster.end.failure == stuck


@pytest.mark.parametrize(("kind", "cause"), [(FailureKind.RENDEZVOUS, 3), (FailureKind.NETWORK, 0)])
def test_rank_for_which_others_gave_up_is_no_cause_of_a_lost_connection(
    kind: FailureKind, cause: int
) -> None:
    cluster = running(2, 2)
    waiting(cluster, 3, gave_up=True)
    stuck = failure(3, node=1, local=1)
    cluster.say(1, probed=Probed(Probe((3,), gave_up=True), ("rank 3: it sleeps",), (stuck,)))
    assert cluster.decide(60.0) is Stage.RUN, "the script may handle the error"
    cluster.fail(0, failure(0, effect=True, kind=kind))
    cluster.say(0, 1, reported=True)
    cluster.wait(1.0)
    cluster.stop()
    assert cluster.cause.rank == cause


def test_missing_ranks_are_asked_on_nodes_of_unequal_size() -> None:
    cluster = Cluster(4)
    for number, nproc in enumerate((1, 3, 2, 1)):
        cluster.join(number, nproc=nproc)
    cluster.run()
    waiting(cluster, 1, 3, 4, 6)
    orders = cluster.orders()
    assert [order.probe.ranks if order.probe else None for order in orders.values()] == [
        None,
        (1, 3),
        (4,),
        (6,),
    ]


def test_answer_to_an_earlier_question_is_no_cause() -> None:
    cluster = running(2, 2)
    waiting(cluster, 3, gave_up=True)
    waiting(cluster, 2, gave_up=True)
    stuck = failure(3, node=1, local=1)
    earlier = Probed(Probe((3,), gave_up=True), ("rank 3: it sleeps",), (stuck,))
    cluster.say(1, probed=earlier, reported=True)
    cluster.fail(0, failure(0, effect=True, kind=FailureKind.RENDEZVOUS))
    cluster.say(0, reported=True)
    cluster.wait(4.0)
    assert cluster.cause.rank == 0


def test_ranks_that_still_run_10_s_after_the_others_are_named_once() -> None:
    cluster = running(2, 2)
    succeed(cluster, 0)
    cluster.say(1, succeeded=(0,))
    cluster.decide()
    cluster.wait(9.5)
    assert not cluster.lines
    assert cluster.due == pytest.approx(cluster.now + 0.5)
    cluster.wait(30.0)
    text = "rank 3 still runs; ranks 0-2 ended 10 s ago"
    assert cluster.lines == [f"{text}; `clusterjob stacks` shows what they do"]


def test_many_ranks_that_still_run_are_grouped_in_one_text() -> None:
    cluster = running(2, 16)
    cluster.say(0, succeeded=(0, 1, 2, 5))
    cluster.say(1, succeeded=(3,))
    cluster.wait(10.5)
    [line] = cluster.lines
    assert line.startswith("ranks 3-4, 6-18, 20-31 still run; ranks 0-2, 5, 19 ended 10 s ago; ")
    cluster.say(1, succeeded=(3, 4))
    cluster.wait(10.5)
    assert len(cluster.lines) == 2, "another rank has ended"


def test_counts_never_fall() -> None:
    cluster = running(4, 8)
    for joined in (8, 0, 8):
        for number in (0, 1):
            cluster.say(number, joined=joined)
            cluster.decide(1.0)
    for number in (2, 3):
        cluster.say(number, joined=8)
        cluster.decide(1.0)
    assert [each["joined"] for each in cluster.named("ranks")] == [8, 16, 24, 32]


# -- a hang ----------------------------------------------------------------------------------------


class Quiet(Cluster):
    """Two nodes whose workers are silent; each answers a request for a sample at once.

    In a sample, workers that move show a sign of life.
    """

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
                    if self.moved[number]:
                        self.output_at[number] = self.now
                    quiet = self.now - self.output_at[number]
                    self.say(number, sampled=order.sample, quiet=quiet, step=number)
            self.decide()
        return self.ledger.stage is not Stage.RUN


def test_job_hangs_after_the_timeout_without_any_sign() -> None:
    cluster = Quiet(hang_timeout=20.0)
    begin = cluster.now
    assert cluster.hangs(60)
    assert cluster.now - begin == pytest.approx(20.0, abs=0.5)
    cluster.stop()
    assert cluster.cause.kind is FailureKind.HANG


def test_workers_are_started_again_after_a_hang_whose_rank_is_named() -> None:
    cluster = Quiet(hang_timeout=20.0, max_restarts=1)
    assert cluster.hangs(60)
    assert cluster.ledger.stage is Stage.COLLECT
    assert all(order.collect and order.dumps for order in cluster.orders().values())
    torch = "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
    places = ((Frame(torch, 7, "all_reduce"),), (Frame("train.py", 3, "load"),))
    cluster.view["stacks"] = [
        RankStack(
            rank, rank, f"gpu{rank}", 10, state="sleeps", answered=True,
            threads=(ThreadStack("MainThread", frames),),
        )
        for rank, frames in enumerate(places)
    ]  # fmt: skip
    cluster.stop()
    cluster.run()
    assert cluster.ledger.restarts == 1
    why = cluster.named("restart")[0]["why"]
    assert why.startswith("rank 1 (node 1, local rank 0, host gpu1): no progress for 20s: ")
    assert "train.py:3" in why


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
    cluster.say(*cluster.nodes, seen=1)
    cluster.decide()
    cluster.view.update(view)
    for number in set(cluster.nodes) - set(own):
        cluster.lose(number)
    cluster.finish()
    return cluster


@pytest.mark.parametrize(
    ("others", "since"),
    [((), 100.0), ((7.0,), 100.0), ((7.0, 9.0), 9.0), ((7.0, 9.0, 8.0), 9.0),
     ((7.0, 9.0, 8.0, 6.0), 8.0)],
)  # fmt: skip
def test_workers_beside_the_coordinator_have_a_lease_of_half_of_the_nodes(
    others: tuple[float, ...], since: float
) -> None:
    cluster = running(len(others) + 1, moves=True)
    heard = dict(enumerate(others, 1))
    assert core.heard_at(cluster.job, cluster.ledger, heard, 100.0) == since
    fixed = replace(cluster.job, moves=False)
    assert core.heard_at(fixed, cluster.ledger, heard, 100.0) == 100.0
    assert core.heard_at(cluster.job, Ledger(), heard, 100.0) == 100.0


def test_smaller_part_of_a_split_job_resigns_and_decides_nothing() -> None:
    cluster = split(5, [0, 1])
    cluster.wait(7.0)
    assert cluster.ledger.stage is Stage.RESIGN
    assert not cluster.ledger.rounds


def test_coordinator_that_stood_still_does_not_end_a_round_with_nodes_that_may_have_left() -> None:
    cluster = split(4, [0, 2], stalled=20.0)
    cluster.wait(5.0)
    assert not cluster.ledger.rounds
    cluster.view.clear()
    cluster.lose(2)
    cluster.wait(7.0)
    assert cluster.ledger.stage is Stage.RESIGN
    assert not cluster.ledger.rounds


def test_coordinator_that_stood_still_before_the_next_round_gives_no_verdict() -> None:
    """Its nodes seem to be missing, because others have taken its place meanwhile."""
    cluster = split(4, [0, 2])
    assert cluster.ledger.stage is Stage.WAIT
    cluster.now += 1000.0
    cluster.view["stalled"] = 1000.0
    assert cluster.wait(5.0) is Stage.WAIT
    cluster.view.clear()
    cluster.lose(2)
    assert cluster.wait(0.1) is Stage.RESIGN


def test_node_that_knows_an_equal_round_of_another_coordinator_counts_for_that_one() -> None:
    cluster = running(4, max_restarts=3, moves=True)
    cluster.say(0, 1, 3, seen=1)
    cluster.say(2, seen=1, seen_of=1)
    cluster.decide()
    for number in (1, 3):
        cluster.lose(number)
    cluster.finish()
    assert cluster.wait(7.0) is Stage.RESIGN
    assert not cluster.ledger.rounds


def test_larger_part_of_a_split_job_goes_on() -> None:
    cluster = split(5, [0, 1, 2])
    assert cluster.ledger.stage is Stage.WAIT
    assert len(cluster.ledger.rounds) == 1


def test_new_coordinator_charges_the_round_once_and_only_with_the_larger_part() -> None:
    members = Members((0, 1, 2), 0)
    lasting = Lasting(round=0, nodes=(0, 1, 2), groups=(members,), first_started="t")
    cluster = Cluster(3, max_restarts=1, min_nodes=2, moves=True)
    cluster.job = replace(cluster.job, own=1)
    lost = failure(None, node=0, kind=FailureKind.NODE_LOST, message="it was killed")
    cluster.nodes.clear()
    cluster.join(1)
    cluster.say(1, seen=1)
    cluster.ledger = core.take_over(cluster.job, lasting, lost, cluster.now)
    cluster.wait(2.0)
    assert not cluster.ledger.rounds
    cluster.join(2)
    cluster.say(2, seen=1)
    cluster.decide()
    assert [each.kind for each in cluster.ledger.rounds] == ["node_lost"]
    recorded = replace(lasting, rounds=cluster.ledger.rounds)
    again = core.take_over(cluster.job, recorded, lost, cluster.now)
    assert core.decide(cluster.job, again, cluster._view(), cluster.now).ledger.rounds == (
        cluster.ledger.rounds
    )
    cluster.wait(13.0)
    assert (cluster.ledger.round, cluster.ledger.nodes) == (1, (1, 2))


@pytest.mark.parametrize(
    ("kind", "restarts", "stage", "state"),
    [
        ("", 1, Stage.END, JobState.SUCCEEDED),
        ("cancelled", 1, Stage.END, JobState.CANCELLED),
        ("preempted", 1, Stage.END, JobState.PREEMPTED),
        ("time_limit", 1, Stage.END, JobState.FAILED),
        ("exit_code", 0, Stage.END, JobState.FAILED),
        ("exit_code", 1, Stage.RUN, None),
    ],
)
def test_new_coordinator_carries_out_the_end_that_was_recorded(
    kind: str, restarts: int, stage: Stage, state: JobState | None
) -> None:
    cluster = Cluster(2, max_restarts=restarts)
    place: dict[str, Any] = {"host": "gpu1", "node": 1} if kind == "exit_code" else {}
    ended = RoundEnd(0, 0, kind=kind, message="exited with code 3", **place)
    lasting = Lasting(round=0, nodes=(0, 1), rounds=(ended,), first_started="t")
    lost = failure(None, node=0, kind=FailureKind.NODE_LOST, message="it was killed")
    cluster.ledger = core.take_over(cluster.job, lasting, lost, cluster.now)
    assert cluster.decide() is stage
    assert (cluster.ledger.end.state if cluster.ledger.end else None) is state
    assert len(cluster.ledger.rounds) == 1


def test_round_without_its_lost_spares_ends_if_they_may_go_on_alone() -> None:
    cluster = Cluster(5, spares=3, max_restarts=3, moves=True)
    cluster.run()
    cluster.say(*cluster.nodes, seen=1)
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


# -- any state, any number of times ----------------------------------------------------------------


RANKS = st.sampled_from([0, 1, 2, 3, 4, (1 << 24) - 1])
NUMBERS = st.integers(0, 4) | st.just((1 << 24) - 1)
AGES = st.sampled_from([0.0, 0.1, 5.0, 1e8])
FAILURES = st.builds(
    failure,
    st.none() | RANKS,
    node=st.integers(0, 1),
    local=RANKS,
    exit_code=st.sampled_from([0, 1, 75, 143]),
    kind=st.sampled_from(FailureKind),
    effect=st.booleans(),
)
FAILING = st.lists(st.builds(Failing, FAILURES, AGES, exited=st.booleans()), max_size=3).map(tuple)
LINES = st.lists(st.just("rank 3: it sleeps"), max_size=2).map(tuple)
PROBES = st.builds(Probe, st.sampled_from([(3,), (2, 3)]), gave_up=st.booleans())
STATES = st.builds(
    NodeState,
    round=st.sampled_from([-1, 0, 0, 0, 1, (1 << 24) - 1]),
    succeeded=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    failing=FAILING,
    exits=FAILING,
    missing=st.none()
    | st.builds(
        Missing,
        st.integers(0, 4095),
        st.lists(RANKS, max_size=3).map(tuple),
        gave_up=st.booleans(),
    ),
    probed=st.none() | st.builds(Probed, PROBES, LINES, st.lists(FAILURES, max_size=2).map(tuple)),
    joined=NUMBERS,
    formed=NUMBERS,
    quiet=AGES,
    step=st.sampled_from([-1, 0, 2**62]),
    sampled=NUMBERS,
    measured=st.sampled_from(["", "done", "CUDA error"]),
    seen=NUMBERS,
    request=st.just(Request())
    | st.builds(Request, cancel=st.sampled_from(["", "why\x1b[2J"]), kill=st.booleans())
    | st.just(Request(warning="why")),
    **{name: st.booleans() for name in ("started", "ended", "idle", "reported", "collected")},
)
OPTIONS = [
    {},
    {"max_restarts": 2, "min_nodes": 1, "moves": True},
    {"hang_timeout": 20.0, "time_limit": 30.0},
    {"warning": 10.0, "spares": 1},
    {"preflight": "refuse"},
]


@fuzz(
    options=st.sampled_from(OPTIONS),
    said=st.lists(st.tuples(st.integers(0, 1), STATES, AGES), min_size=1, max_size=5),
)
def test_whatever_a_node_says_is_decided_without_an_error_and_without_haste(
    options: dict[str, Any], said: list[tuple[int, NodeState, float]]
) -> None:
    cluster = Cluster(2, 2, **options)
    cluster.honest = False
    cluster.decide()
    for number, state, seconds in said:
        cluster.say(number, **vars(state))
        stage = cluster.decide(seconds)
        assert stage in (Stage.END, Stage.RESIGN) or cluster.due > cluster.now
        for order in cluster.orders().values():
            data = json.loads(messages.FROM_COORDINATOR.encode(order))
            assert messages.FROM_COORDINATOR.decode(data) == order


ABORTED = {"exit_code": 134, "signal": "SIGABRT", "message": "killed by SIGABRT"}


@pytest.mark.parametrize(
    ("first", "effect", "warned_at", "state", "rank"),
    [
        (1, True, 0.0, JobState.PREEMPTED, None),
        (1, True, 1.0, JobState.PREEMPTED, None),
        (0, True, 0.0, JobState.PREEMPTED, None),
        (0, True, 1.0, JobState.PREEMPTED, None),
        (1, True, None, JobState.FAILED, 1),  # no warning came: the worker that left is the cause
        (1, False, 1.0, JobState.FAILED, 0),  # a crash of its own
    ],
)
def test_abort_after_another_worker_has_left_is_its_effect(
    first: int, effect: bool, warned_at: float | None, state: JobState, rank: int | None
) -> None:
    cluster = running(2, warning=60.0)
    if warned_at == 0.0:
        warned(cluster)
    left = failure(1, node=1, local=0, exit_code=75, message="exited with code 75")
    found = [failure(0, effect=effect, kind=FailureKind.SIGNAL, **ABORTED), left]
    for number in (first, 1 - first):
        assert cluster.decide(0.1) is Stage.RUN, "the other one may save"
        cluster.fail(number, found[number])
        cluster.say(number, ended=True, reported=True)
    cluster.wait(1.0)
    if warned_at == 1.0:
        warned(cluster)
    cluster.wait(5.0)
    cluster.stop()
    assert cluster.end.state is state
    assert (cluster.end.failure.rank if cluster.end.failure else None) == rank


# -- what jobs with real processes need not show ---------------------------------------------------


def test_job_whose_workers_succeed_after_a_warning_has_succeeded() -> None:
    cluster = running(2, warning=60.0)
    warned(cluster)
    succeed(cluster, 0, 1)
    cluster.decide()
    cluster.stop()
    assert cluster.end.state is JobState.SUCCEEDED


def test_workers_that_sigterm_has_ended_before_its_warning_are_preempted() -> None:
    cluster = running(2, warning=60.0)
    for number in (0, 1):
        killed = failure(
            number, node=number, local=0, exit_code=143, signal="SIGTERM",
            kind=FailureKind.TERMINATED,
        )  # fmt: skip
        cluster.fail(number, killed)
        cluster.say(number, ended=True)
    assert cluster.decide(0.3) is Stage.RUN, "the warning may still come"
    warned(cluster)
    cluster.stop()
    assert (cluster.end.state, cluster.end.exit_code) == (JobState.PREEMPTED, 75)


def test_cancellation_ends_the_restarts() -> None:
    cluster = running(2, max_restarts=1000)
    for _ in range(3):
        end_round(cluster, 1, FailureKind.SIGNAL)
        cluster.run()
    cluster.say(1, request=Request(cancel="SIGTERM on gpu1"))
    cluster.decide()
    cluster.stop()
    assert (cluster.end.state, cluster.ledger.restarts) == (JobState.CANCELLED, 3)
