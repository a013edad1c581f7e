"""Decide what a job does next, from the states of its nodes.

The functions here are pure: no clock, no socket, no file. The coordinator calls `decide` after a
change and at the time that the last call has named, carries out what it returns, and keeps the
ledger. All times are seconds of the coordinator's monotonic clock.
"""

from __future__ import annotations

import enum
import math
import signal
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from clusterjob.node.contract import World
from clusterjob.node.logs import failure_texts
from clusterjob.node.logs.events import ROUND_ENDED
from clusterjob.node.options import GRACE, LaunchOptions
from clusterjob.node.rendezvous import policy, root_cause
from clusterjob.node.rendezvous.messages import Lasting, Members
from clusterjob.node.rendezvous.root_cause import Entry
from clusterjob.node.rendezvous.succession import may_go_on
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.states import (
    Measure,
    Missing,
    NodeState,
    Order,
    Probe,
    Probed,
    Request,
    Stop,
)
from clusterjob.node.system.ranges import ranges, ranks_text
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    FailureKind,
    JobState,
    RoundEnd,
    Verdict,
)

_SETTLE_SECONDS = 5.0  # seconds to wait for more nodes when there are enough: others start too
_ALONE_SECONDS = 6.0  # seconds for the other nodes to join a coordinator that has moved
_NOTICE_SECONDS = 5.0  # seconds between two notices about missing nodes
_DISK_SECONDS = 0.25  # seconds between two looks at the files of nodes that cannot start
END_SECONDS = 2.0  # seconds for a node to kill its workers after the end of its lease
_ANSWER_SECONDS = 3.0  # seconds for nodes to say what missing ranks do
_UNFINISHED_SECONDS = 10.0  # seconds after the last success until the other ranks are named
_MOST_LINES = 64  # about missing ranks, to each node that waits for some
_MOST_NAMED = 8  # slow nodes in an error of the preflight
MOST_NODES = 128  # to ask for stacks after a failure: the stop must not wait for thousands
_COLLECT_SECONDS = 1.9  # seconds for all nodes to send their stacks
# Seconds between SIGTERM and SIGKILL after a failure, as torchrun: for workers whose handler saves.
_FAILURE_GRACE = 30.0
_LEAST_GRACE = 0.5  # seconds, if a warning has left less
_STOP_SECONDS = 5.0  # seconds for a node to end its workers, after the grace
_SUSPECT_SECONDS = 3.0  # seconds to wait for the warning that explains a worker's end
_MARGIN = 2.0  # seconds for the verdict of a job that is preempted, beyond the grace
# The interval of the looks for a hang: a part of the timeout, between these seconds.
_HANG_PARTS, _HANG_SHORTEST, _HANG_LONGEST = 20, 1.0, 5.0
_SAMPLE_SECONDS = 4.0  # seconds for all nodes to answer
_NO_ANSWER = "does not answer the stop order"
_NOT_STARTED = "before its workers had started"
_PREFLIGHT_SECONDS = 30.0  # the longest preflight, after the start of its processes
MEASURED = "done"


_NEW_STATE = NodeState()


class Stage(enum.Enum):
    """What the coordinator does."""

    WAIT = "wait"  # for the nodes of a round, and for the preflight
    RUN = "run"
    COLLECT = "collect"  # the stacks of a round that is to be stopped
    STOP = "stop"  # the workers of a round
    END = "end"  # the job: the caller gives the verdict
    RESIGN = "resign"  # other nodes may go on without this coordinator


@dataclass(frozen=True)
class Job:
    """What does not change in one attempt of a job.

    Attributes:
        nnodes: the number of all nodes, spare ones included.
        own: the coordinator's node.
        serves_store: whether that node serves torch's store, with or without workers.
        moves: whether another node may become the coordinator.
    """

    options: LaunchOptions
    nnodes: int
    own: int = 0
    attempt: int = 0
    serves_store: bool = True
    moves: bool = False


@dataclass(frozen=True)
class Loss:
    """How an agent was lost.

    Attributes:
        ended: whether its process has certainly ended.
    """

    why: str
    at: float
    ended: bool = False


@dataclass(frozen=True)
class Node:
    """An agent that has joined, with the newest state of its node.

    Attributes:
        joined_at: when it joined.
        heard_at: when its newest state arrived.
        failures: the failures of its round, with the time of each.
        here: whether its agent is not lost.
        losses: how its agents were lost, the latest last; also those before this one.
    """

    node_rank: int
    host: str
    pid: int
    nproc: int
    joined_at: float = 0.0
    heard_at: float = 0.0
    state: NodeState = _NEW_STATE
    failures: tuple[Entry, ...] = ()
    here: bool = True
    losses: tuple[Loss, ...] = ()

    def lose(self, loss: Loss) -> Node:
        """Return the node without its agent."""
        return replace(self, here=False, losses=(*self.losses, loss))

    def receive(self, state: NodeState, now: float) -> Node:
        """Return the node with a new state; a failure keeps the time of its first report."""
        same = state.round == self.state.round
        known = {root_cause.key_of(each.failure): each.at for each in self.failures if same}
        failures = tuple(
            Entry(
                each.failure,
                known.get(root_cause.key_of(each.failure), now - each.age),
                exited=each.exited,
            )
            for each in state.failing
        )
        return replace(self, state=state, heard_at=now, failures=failures)


@dataclass(frozen=True)
class View:
    """What the coordinator sees at one moment.

    Attributes:
        nodes: the agents that have joined, by the number of their node.
        time: the time for records, RFC 3339.
        refused: a node that may not join, or cannot start, as a failure.
        ended: the nodes whose end is recorded in the job's directory.
        stalled: seconds for which the coordinator's process did not run lately.
        stacks: the stacks that were collected in this round.
        slow: the nodes that the preflight has found to be slow, and why.
    """

    nodes: Mapping[int, Node]
    time: str = ""
    refused: Failure | None = None
    ended: frozenset[int] = frozenset()
    stalled: float = 0.0
    stacks: Sequence[RankStack] = ()
    slow: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned:
    """A warning that the scheduler takes the nodes.

    Attributes:
        due: when the workers must be stopped.
        ends_at: when the scheduler ends the job.
    """

    reason: str
    due: float
    ends_at: float


@dataclass(frozen=True)
class Ledger(Lasting):
    """What the coordinator remembers of the job.

    Attributes:
        since: when the stage began, or will after a pause.
        took_over: whether no round has begun since the coordinator moved.
        losses: how many losses of each node are recorded.
        started: when the newest workers were started, RFC 3339.
        warned: the scheduler's warning; None before it.
        end: how the round ends or, while the coordinator waits, how the last one ended.
        measure: the order of the preflight, also after it; the caller adds the store.
        slow: the nodes that the preflight has found slow, and why; None before its end.
        noticed: when the missing nodes were named.

    Of the round, which begins with a new ledger:

    Attributes:
        began: when its workers were started.
        worlds: the place of each node; the caller adds the address of the store.
        running: whether the workers of all nodes have been started.
        polled: when the nodes were asked for failures; None before.
        successes: how many ranks have ended with exit code 0, and when the last one did; infinity
            if the ranks that still run were named since.
        counts: the ranks that have joined and formed a group, as the last event says.
        alive: when a worker last gave a sign of life.
        sample: the number of the newest sample of stacks; 0 without one.
        sampled: when it was ordered.
        collect_from: the nodes that were asked for stacks.
        stop_at: when the round was stopped; infinity before.
    """

    stage: Stage = Stage.WAIT
    since: float = 0.0
    took_over: bool = False
    losses: Mapping[int, int] = field(default_factory=dict)
    started: str | None = None
    warned: Warned | None = None
    end: Verdict | None = None
    measure: Measure | None = None
    slow: Mapping[int, str] | None = None
    noticed: float = 0.0
    began: float = 0.0
    worlds: Mapping[int, World] = field(default_factory=dict)
    running: bool = False
    polled: float | None = None
    successes: tuple[int, float] = (0, 0.0)
    counts: tuple[int, int] = (0, 0)
    alive: float = 0.0
    sample: int = 0
    sampled: float = 0.0
    collect_from: frozenset[int] = frozenset()
    stop_at: float = math.inf

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return next((world.world_size for world in self.worlds.values()), 0)

    def by_node(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Return the given ranks grouped by node."""
        wanted, found = set(ranks), dict[int, list[int]]()
        for node, world in self.worlds.items():
            own = range(world.first_rank, world.first_rank + world.nproc)
            if here := sorted(wanted.intersection(own)):
                found[node] = here
        return found

    @property
    def restarts(self) -> int:
        """How often the workers were started again."""
        return max(0, self.round)

    @property
    def ending(self) -> Verdict:
        """How the round ends, or has ended, in a stage that follows it."""
        assert self.end is not None
        return self.end


@dataclass
class Decision:
    """What follows.

    Attributes:
        ledger: the new ledger.
        due: when to call `decide` again, if nothing changes before.
        events: the events to record: the name, and the fields of each.
        lines: lines for the user.
        dropped: nodes that count as lost from now on, and why; the caller closes their connections.
    """

    ledger: Ledger
    due: float = math.inf
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)


def decide(job: Job, ledger: Ledger, view: View, now: float) -> Decision:
    """Return what follows from what the coordinator sees now."""
    step = _Step(job, view, now, Decision(ledger))
    step.note_changes()
    while (stage := step.ledger.stage) in _STAGES:
        _STAGES[stage](step)
        if step.ledger.stage is stage:
            break
    return step.decision


def choose(
    usable: Collection[int],
    nodes: Sequence[int],
    avoided: Sequence[int],
    *,
    wanted: int,
    least: int,
) -> list[int]:
    """Return the nodes for a round, in the order of their ranks; too few if few are usable.

    A node that stays usable keeps its place, so its ranks are the same as in the last round.

    Args:
        usable: the nodes that can run workers.
        nodes: the nodes of the last round, in the order of their ranks.
        avoided: nodes to use, the first ones first, only if there are fewer than `least` others.
        wanted: the number of nodes, if there are enough.
        least: the smallest number of nodes.
    """
    there = set(usable)  # sets: a job may have 10,000 nodes
    good = sorted(there.difference(avoided))
    good += [node for node in avoided if node in there][: max(0, least - len(good))]
    kept = set(nodes[:wanted]).intersection(good)
    others = iter([node for node in good if node not in kept])
    # Another node takes the place of a lost one.
    places = [node if node in kept else next(others, None) for node in nodes[:wanted]]
    return [node for node in (*places, *others) if node is not None][:wanted]


def take_over(job: Job, lasting: Lasting, lost: Failure, now: float) -> Ledger:
    """Return the ledger of another coordinator that goes on with the job: its round has ended.

    Args:
        job: the job.
        lasting: what the coordinator before remembered, with times of this machine's clock.
        lost: how that one was lost.
        now: the time.
    """
    ledger = Ledger(
        **vars(lasting),
        stage=Stage.STOP,
        since=now,
        took_over=True,
        started=lasting.first_started,
        end=Verdict.of_failure(lost),
        stop_at=now,
    )
    if _is_recorded(job, ledger):  # its end may not have been carried out
        ledger = replace(ledger, end=ledger.rounds[-1].verdict())
    return ledger


def heard_at(job: Job, ledger: Ledger, heard: Mapping[int, float], now: float) -> float:
    """Return since when half of the round's nodes have been heard, the coordinator's with them.

    After this time and the lease, the other half may go on with another coordinator: the lease of
    the workers on the coordinator's own node begins here.

    Args:
        job: the job.
        ledger: what the coordinator remembers.
        heard: when each node was heard last.
        now: the time.
    """
    nodes = ledger.nodes if job.moves else ()
    times = sorted(now if node == job.own else heard.get(node, 0.0) for node in nodes)
    return times[len(times) // 2] if times else now


def orders(job: Job, ledger: Ledger, nodes: Mapping[int, Node]) -> Iterator[tuple[int, Order]]:
    """Yield what the coordinator wants of each node that is here; equal orders are one object.

    Nothing is yielded at the end of the job, and while stacks are collected only for nodes that
    must send them: the orders of the others do not change.
    """
    if ledger.stage is Stage.END:
        return
    runs, collects = ledger.stage in (Stage.RUN, Stage.COLLECT), ledger.stage is Stage.COLLECT
    warned = ledger.warned is not None
    shared = Order(ledger.round, warned=warned)
    if ledger.stage is Stage.STOP:
        shared = replace(shared, stop=_stop_order(job, ledger, nodes))
    elif ledger.stage is Stage.WAIT and ledger.slow is None:
        shared = replace(shared, measure=ledger.measure)
    questions = _questions(ledger, nodes)
    gave_up = any(probe.gave_up for probe in questions.values())
    answers = {} if gave_up else _answers(questions, ledger, nodes)
    found = tuple(line for answer in answers.values() for line in answer.lines)[:_MOST_LINES]
    asked = {node: nodes[node] for node in ledger.collect_from} if collects else nodes
    for node_rank, node in asked.items():
        if not node.here:
            continue
        order = shared
        # An agent that was started again since has no workers of this round.
        if runs and node_rank in ledger.worlds and node.joined_at <= ledger.began:
            order = Order(
                ledger.round,
                ledger.worlds[node_rank],
                warned=warned,
                report=ledger.polled is not None,
                probe=questions.get(node_rank),
                found=found if _missing(node, ledger) is not None else (),
                sample=ledger.sample,
                collect=collects,
                dumps=collects and (ledger.ending.failure is None or _is_hang(ledger.ending)),
            )
        yield node_rank, order


def explain(job: Job, ledger: Ledger, view: View) -> tuple[Failure | None, tuple[Failure, ...]]:
    """Return the root cause of the newest round, and the other failures before its stop.

    A worker that leaves because of a warning has not failed.
    """
    failures, _, _ = _failures(job, ledger, view, math.inf)
    return root_cause.explain(failures, _early_exits(ledger, view))


def _early_exits(ledger: Ledger, view: View) -> list[Entry]:
    """Return the workers of the newest round that ended with exit code 0, with their times."""
    nodes = (view.nodes.get(node) for node in ledger.nodes)
    return [
        Entry(each.failure, node.heard_at - each.age, exited=True)
        for node in nodes
        if node is not None and node.state.round == ledger.round
        for each in node.state.exits
    ]


def _failures(job: Job, ledger: Ledger, view: View, now: float) -> tuple[list[Entry], bool, float]:
    """Return the failures of the newest round before its stop that count.

    A worker that leaves because of a warning has not failed. One that ended as if it had been
    warned is a suspect, which the warning may still explain.

    Returns:
        The failures, whether workers have left, and when the first suspect counts as a failure.
    """
    counted, left, suspects_due = [], False, math.inf
    options, warned = job.options, ledger.warned is not None
    suspects = options.warning is not None and not warned
    for entry in sorted(_reported(ledger, view), key=lambda entry: entry.at):
        failure, due = entry.failure, entry.at + _SUSPECT_SECONDS
        # After `requeue`, a handler of the program may replace exit code 75 by an exception.
        by_kind = failure.kind in (FailureKind.TERMINATED, FailureKind.PREEMPTED)
        asked = by_kind or failure.exit_code == PREEMPTED_EXIT_CODE
        if entry.at >= ledger.stop_at:
            continue
        if failure.rank is None:
            counted.append(entry)
        elif warned and (asked or options.warn_signal):
            left = True
        elif suspects and asked and now < due:
            suspects_due = min(suspects_due, due)
        else:
            counted.append(entry)
    if left or suspects_due < math.inf:  # their peers' failures are effects of it
        counted = [entry for entry in counted if not entry.failure.effect]
    return counted, left, suspects_due


def _reported(ledger: Ledger, view: View) -> Iterator[Entry]:
    gave_up = []
    for node_rank in ledger.worlds:  # also the node that only serves the store
        node = view.nodes.get(node_rank)
        if node is not None and node.state.round == ledger.round:
            yield from node.failures
            kind = FailureKind.RENDEZVOUS
            gave_up += [each.at for each in node.failures if each.failure.kind is kind]
    if gave_up:  # else a script may have caught the error, and tries again
        questions = _questions(ledger, view.nodes)
        for answer in _answers(questions, ledger, view.nodes).values():
            yield from (Entry(each, min(gave_up), exited=True) for each in answer.failures)


def _missing(node: Node, ledger: Ledger) -> Missing | None:
    """Return for which ranks of the newest round a worker of the node waits."""
    return node.state.missing if node.state.round == ledger.round else None


def _questions(ledger: Ledger, nodes: Mapping[int, Node]) -> Mapping[int, Probe]:
    """Return the question to each node with ranks for which others wait."""
    here = (nodes[node] for node in ledger.worlds if node in nodes)
    waits = [missing for node in here if (missing := _missing(node, ledger)) is not None]
    gave_up = any(missing.gave_up for missing in waits)
    by_node = ledger.by_node(rank for missing in waits for rank in missing.ranks) if waits else {}
    return {node: Probe(tuple(own), gave_up) for node, own in by_node.items()}


def _answers(
    questions: Mapping[int, Probe], ledger: Ledger, nodes: Mapping[int, Node]
) -> dict[int, Probed]:
    """Return the answers to these questions so far, by node."""
    return {
        node: probed
        for node, probe in questions.items()
        if (probed := nodes[node].state.probed) is not None
        and probed.probe == probe
        and nodes[node].state.round == ledger.round
    }


def _is_hang(end: Verdict) -> bool:
    return end.failure is not None and end.failure.kind is FailureKind.HANG


def _requests(nodes: Iterable[Node]) -> Iterator[Request]:
    return (node.state.request for node in nodes if node.state.request != _NO_REQUEST)


_NO_REQUEST = Request()


def _cancel_request(nodes: Mapping[int, Node]) -> Request:
    """Return the request that cancels the job; an empty one without it."""
    return next((each for each in _requests(nodes.values()) if each.cancel), _NO_REQUEST)


def cancellation(nodes: Mapping[int, Node]) -> Verdict | None:
    """Return the end of a job that was cancelled at one of its nodes; None if it was not."""
    why = sanitize(_cancel_request(nodes).cancel)
    return Verdict(JobState.CANCELLED, CANCELLED_EXIT_CODE, reason=why) if why else None


def _killing(nodes: Mapping[int, Node]) -> bool:
    return any(request.kill for request in _requests(nodes.values()))


def grace_after(end: Verdict, options: LaunchOptions, left: float) -> float:
    """Return the seconds between SIGTERM and SIGKILL at the end of a round.

    Args:
        end: the end of the round.
        options: the grace; None for 30 s after a failure, else 3 s.
        left: the seconds until the end of the job that a warning has announced.
    """
    if end.state is JobState.SUCCEEDED:
        return 0.0
    if end.failure is None:
        return options.grace or GRACE
    grace = options.grace or _FAILURE_GRACE
    if end.failure.kind is FailureKind.NODE_LOST:  # another part of the job may go on
        grace = min(grace, options.lease)
    return min(grace, max(_LEAST_GRACE, left))


def _left(ledger: Ledger) -> float:
    """Return the seconds from the stop of the round to the end that a warning has announced."""
    return (ledger.warned.ends_at if ledger.warned else math.inf) - ledger.stop_at


def _stop_order(job: Job, ledger: Ledger, nodes: Mapping[int, Node]) -> Stop:
    request, ending = _cancel_request(nodes), ledger.ending
    end = cancellation(nodes) or ending
    grace = grace_after(end, job.options, left=_left(ledger))
    interrupt = request.interrupt and ending.state is JobState.CANCELLED
    return Stop(
        0.0 if _killing(nodes) else grace,
        int(signal.SIGINT if interrupt else signal.SIGTERM),
        early=ending.failure is not None,
    )


class _Step:
    """One call of `decide`: the ledger so far, and what follows."""

    def __init__(self, job: Job, view: View, now: float, decision: Decision) -> None:
        self.job = job
        self.view = view
        self.now = now
        self.decision = decision
        options = job.options
        self.wanted = max(1, job.nnodes - options.spares)
        self.least = min(options.min_nodes or self.wanted, self.wanted)

    @property
    def ledger(self) -> Ledger:
        return self.decision.ledger

    def change(self, **fields: Any) -> None:
        self.decision.ledger = replace(self.ledger, **fields)

    def go(self, stage: Stage, **fields: Any) -> None:
        self.change(stage=stage, since=self.now, **fields)

    def add(self, event: str, **fields: Any) -> None:
        self.decision.events.append((event, fields))

    def say(self, line: str) -> None:
        self.decision.lines.append(line)

    def wake(self, at: float) -> None:
        """Let the caller come back at this time."""
        self.decision.due = min(self.decision.due, at)

    # -- whatever the stage ------------------------------------------------------------------------

    def note_changes(self) -> None:
        """Record the nodes that were lost or have come back, and the scheduler's warning."""
        ledger, nodes = self.ledger, self.view.nodes
        for node_rank, node in nodes.items():
            if len(node.losses) > ledger.losses.get(node_rank, 0):
                self._note_loss(node)
        if ledger.warned is None and self.job.options.warning is not None:
            reason = next((each.warning for each in _requests(nodes.values()) if each.warning), "")
            if reason:
                self._warn(sanitize(reason), self.job.options.warning)
        groups = self.ledger.groups
        if len(groups) == 2 and all(
            node in nodes and self._knows_round(nodes[node].state) for node in groups[1].nodes
        ):
            self.change(groups=groups[1:])

    def _knows_round(self, state: NodeState) -> bool:
        groups = self.ledger.groups
        began_by = groups[-1].coordinator if groups else 0
        return (state.seen, state.seen_of) == (self.ledger.round + 1, began_by)

    def _note_loss(self, node: Node) -> None:
        ledger, rank = self.ledger, node.node_rank
        self.add("lost", node_rank=rank, host=node.host, why=node.losses[-1].why)
        self.change(losses={**ledger.losses, rank: len(node.losses)})
        is_spare = ledger.stage is Stage.RUN and rank not in ledger.worlds
        if is_spare or ledger.stage is Stage.WAIT:  # it runs no workers
            failure = self.loss_of(node)
            self.say(f"{failure.who}: {failure.message}")

    def loss_of(self, node: Node) -> Failure:
        """Return the failure of a lost node, or of the one that has made it seem lost."""
        loss, stalled, at_fault = node.losses[-1], self.view.stalled, node
        text = f"the agent on {node.host} (pid {node.pid}) was lost: {loss.why}"
        if stalled and not loss.ended:
            at_fault = self.view.nodes.get(self.job.own, node)
            text = (
                f"the agent on {at_fault.host} (pid {at_fault.pid}) did not run for {stalled:.0f} s"
                f" (stopped, suspended or without a CPU), and node {node.node_rank} lost it"
            )
        return Failure.of_node(at_fault.node_rank, at_fault.host, message=text)

    def _warn(self, reason: str, warning: float) -> None:
        seconds = self._seconds_to_leave()
        warned = Warned(reason, due=self.now + seconds, ends_at=self.now + warning - _MARGIN)
        self.change(warned=warned)
        self.say(f"warning: {reason}: the workers have {seconds:g} s to leave")
        self.add("warned", attempt=self.job.attempt, why=reason, seconds=seconds)

    def preempted(self, how: str) -> Verdict:
        warned = self.ledger.warned
        reason = f"{warned.reason if warned else ''}: {how}"
        return Verdict(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, reason=reason)

    # -- which nodes -------------------------------------------------------------------------------

    def usable(self) -> list[int]:
        """Return the nodes that are here and run no workers."""
        return [node for node, each in self.view.nodes.items() if each.here and each.state.idle]

    def chosen(self) -> list[int]:
        """Return the nodes of the round that begins, in the order of their ranks."""
        nodes = self.ledger.nodes or range(self.wanted)
        return choose(
            self.usable(), nodes, self.ledger.avoided, wanted=self.wanted, least=self.least
        )

    def present(self) -> set[int]:
        """Return the nodes that are here, and know no newer round."""
        newest, began = self.ledger.round + 1, self.ledger.began
        return {
            node
            for node, each in self.view.nodes.items()
            if each.here
            and (each.state.seen < newest or self._knows_round(each.state))
            and (each.state.seen or each.joined_at <= began)
        }

    def may_be_replaced(self) -> bool:
        """Return whether nodes that are here may have left a coordinator that stood still."""
        long = self.view.stalled > self.job.options.lease / 2
        return long and self.job.moves and self.ledger.round >= 0

    def has_majority(self) -> bool:
        """Return whether no other part of a split job can go on."""
        return not self.job.moves or may_go_on(self.ledger.groups, self.present())

    def may_train(self) -> float:
        """Return until when workers of the newest round may run on nodes that are not here."""
        until = 0.0
        for node_rank in self.ledger.nodes:
            node = self.view.nodes.get(node_rank)
            if node_rank not in self.view.ended and (node is None or not node.here):
                # Without an agent here, it has lost the coordinator before this one.
                lost_at = node.losses[-1].at if node is not None else self.ledger.stop_at
                until = max(until, lost_at + self.job.options.lease + END_SECONDS)
        return until

    # -- the wait for a round ----------------------------------------------------------------------

    def wait(self) -> None:
        ledger, now, first = self.ledger, self.now, self.ledger.end is None
        self.wake(now + _DISK_SECONDS)
        if self.may_be_replaced():
            return
        refused = self.view.refused
        end = Verdict.of_failure(refused) if refused else cancellation(self.view.nodes)
        if end is not None:
            self.finish(end)
            return
        over = self._wait_is_over()
        late = ledger.warned is not None and now > ledger.warned.due
        if late or (ledger.warned is not None and first and over):
            self.finish(self.preempted(_NOT_STARTED))
            return
        if over and now >= ledger.since and now >= self.may_train():
            if self.job.options.preflight != "off" and ledger.round < 0:
                self._measure()
                if self.ledger.slow is None or self.ledger.stage is Stage.END:
                    return
            self.begin()
            return
        few = len(self.chosen()) < self.least
        alone = not self.has_majority() or (ledger.took_over and few)
        if now - ledger.since > _ALONE_SECONDS and alone:
            self.go(Stage.RESIGN)
        elif not over:
            self._look_for_missing(first=first)

    def _measure(self) -> None:
        """Let all nodes measure; leave slow ones out, if there are enough others."""
        options, nodes = self.job.options, self.view.nodes
        if self.ledger.measure is None:
            chosen = tuple(sorted(self.usable()))
            measure = Measure("", 0, chosen)
            self.add("measuring", nodes=len(chosen))
            self.change(measure=measure, since=self.now)
            return
        here = [node for node in self.ledger.measure.nodes if nodes[node].here]
        due = self.ledger.since + options.join_timeout + _PREFLIGHT_SECONDS
        how = {node: nodes[node].state.measured for node in here}
        failed = any(text not in ("", MEASURED) for text in how.values())  # the others wait for it
        if self.now < due and not failed and not all(how.values()):
            return
        found = dict(self.view.slow)
        for node, text in how.items():
            if text != MEASURED and (text or not failed):
                found[node] = f"the measuring process: {text or 'it does not end'}"
        slow = {node: found[node] for node in sorted(found) if node in here}
        self.change(slow=slow)
        for node, why in slow.items():
            self._avoid(self._failure_of(node, why, FailureKind.LAUNCH))
        if options.preflight == "refuse" and slow.keys() & set(self.chosen()):
            text = f"preflight: {'; '.join(slow_lines(slow, nodes)[:_MOST_NAMED])}"
            failure = self._failure_of(min(slow), text, FailureKind.LAUNCH)
            self.finish(Verdict.of_failure(failure))

    def _failure_of(self, node: int, why: str, kind: FailureKind) -> Failure:
        return Failure.of_node(node, self.view.nodes[node].host, message=why, kind=kind)

    def _wait_is_over(self) -> bool:
        usable = self.usable()
        if len(usable) < self.least or not self.has_majority():
            return False
        good = len(set(usable).difference(self.ledger.avoided))
        if len(usable) == self.job.nnodes or (self.ledger.end is not None and good >= self.wanted):
            return True
        joined = max(each.joined_at for each in self.view.nodes.values())
        settled = max(self.ledger.since, joined) + _SETTLE_SECONDS
        if self.now < settled:  # other nodes may still come
            self.wake(settled)
            return False
        return len(self.chosen()) >= self.least

    def _look_for_missing(self, *, first: bool) -> None:
        """Name the missing nodes every 5 s; end the job if they do not come in time."""
        ledger, nodes, nnodes = self.ledger, self.view.nodes, self.job.nnodes
        options = self.job.options
        lost = [node for node in nodes.values() if not node.here]
        if first and nnodes - len(lost) < self.least:
            last = max(lost, key=lambda node: node.losses[-1].at)
            self.finish(Verdict.of_failure(self.loss_of(last)))
            return
        timeout = options.return_timeout
        if first or options.min_nodes is not None:
            timeout = options.join_timeout
        waited = self.now - ledger.since
        missing = [node for node in range(nnodes) if node not in nodes or not nodes[node].here]
        names = f"node {', '.join(ranges(missing))} of {nnodes}"
        if waited > timeout and missing:
            text = f"{names} {'never joined' if first else 'did not return'} within {timeout:g} s"
            failure = Failure.of_node(missing[0], "unknown", message=text)
            cause = ledger.end.failure if ledger.end is not None else None
            if cause is not None:  # it stays the root cause
                failure = replace(cause, message=f"{cause.message}; {text}")
            self.finish(Verdict.of_failure(failure))
        elif missing and self.now - max(ledger.since, ledger.noticed) > _NOTICE_SECONDS:
            self.change(noticed=self.now)
            self.say(f"waiting for {names}, {waited:.0f} s so far")
            self.add("waiting", missing=missing, seconds=round(waited, 1))

    def finish(self, end: Verdict) -> None:
        """End the job."""
        if self.ledger.started is None:
            self._record(end)
        self.go(Stage.END, end=end)

    # -- the begin of a round ----------------------------------------------------------------------

    def begin(self) -> None:
        ledger, options, nodes, own = self.ledger, self.job.options, self.view.nodes, self.job.own
        number, end, chosen = ledger.round + 1, ledger.end, self.chosen()
        *first_ranks, world_size = accumulate((nodes[node].nproc for node in chosen), initial=0)
        worlds = {
            node: World(
                number,
                "",
                0,
                agent_store=self.job.serves_store,
                node_rank=index,
                nnodes=len(chosen),
                nproc=nodes[node].nproc,
                first_rank=first_ranks[index],
                world_size=world_size,
            )
            for index, node in enumerate(chosen)
        }
        if self.job.serves_store and own not in worlds:
            last = worlds[chosen[-1]]
            worlds[own] = replace(last, node_rank=len(chosen), nproc=0, first_rank=world_size)
        here = tuple(sorted(node for node, each in nodes.items() if each.here))
        deadline = ledger.deadline
        if ledger.first_started is None and options.time_limit is not None:
            deadline = self.now + options.time_limit
        if end is not None:
            most = policy.most_restarts(options, self.job.nnodes)
            self.say(f"restart {number} of {most}: {end.reason}")
            self.add("restart", restart=number, most=most, why=end.reason)
        self.decision.ledger = Ledger(
            number,
            nodes=tuple(chosen),
            groups=(*ledger.groups[:1], Members(here, own)),
            avoided=ledger.avoided,
            rounds=ledger.rounds,
            first_started=ledger.first_started or self.view.time,
            deadline=deadline,
            stage=Stage.RUN,
            since=self.now,
            losses=ledger.losses,
            started=self.view.time,
            warned=ledger.warned,
            measure=ledger.measure,
            slow=ledger.slow,
            began=self.now,
            worlds=worlds,
            alive=self.now,
            successes=(0, self.now),
        )
        self.add(
            "started",
            attempt=self.job.attempt,
            restart=number,
            world_size=world_size,
            nodes=chosen,
            wanted=self.wanted,
            preload=options.start != "exec" and options.program.is_python,
        )

    # -- a round that runs -------------------------------------------------------------------------

    def run(self) -> None:
        ledger = self.ledger
        nodes = [self.view.nodes[node] for node in ledger.nodes if node in self.view.nodes]
        here = [node for node in nodes if node.state.round == ledger.round]
        self._note_progress(here)
        failures, left, suspects_due = _failures(self.job, ledger, self.view, self.now)
        root, _ = root_cause.explain(failures, _early_exits(ledger, self.view))
        done = len(here) == len(ledger.nodes) and all(node.state.ended for node in here)
        if done and math.isinf(suspects_due) and (root is None or not root.effect):
            self._end_run(self._outcome_of_done(here, root, left=left))
            return
        end = self._why_end(nodes, failures, root)
        if end is not None:
            self._end_run(end)
            return
        self.wake(suspects_due)
        self._name_unfinished(here)

    def _outcome_of_done(
        self, here: Sequence[Node], root: Failure | None, *, left: bool
    ) -> Verdict:
        if root is not None:
            return Verdict.of_failure(root)
        if left:
            return self.preempted("its workers left to be queued again")
        for node in here:  # the absence of a failure is no success
            if len(node.state.succeeded) < node.nproc:
                kind = FailureKind.PROCESS_LOST
                killed = self._failure_of(node.node_rank, "its workers were killed", kind)
                return Verdict.of_failure(killed)
        return Verdict(JobState.SUCCEEDED, 0)

    def _why_end(
        self, nodes: Sequence[Node], failures: Sequence[Entry], root: Failure | None
    ) -> Verdict | None:
        """Return why the round must end before its workers have ended; None if it goes on."""
        ledger, now, options = self.ledger, self.now, self.job.options
        if (cancelled := cancellation(self.view.nodes)) is not None:
            return cancelled
        gone = [node for node in nodes if self._is_gone(node)]
        if not gone and not self.has_majority():  # the other part of a split job may start a round
            gone = [node for node in self.view.nodes.values() if not node.here]
        if gone:
            losses = [Entry(self.loss_of(node), node.losses[-1].at, exited=True) for node in gone]
            if ledger.warned is not None and root is None:
                return self.preempted(losses[0].failure.message)  # the scheduler has taken it
            root, _ = root_cause.explain([*failures, *losses])
            return Verdict.of_failure(root or losses[0].failure)
        due = self._failure_due(failures, root)
        if root is not None and due <= now:
            return Verdict.of_failure(root)
        self.wake(due)
        if ledger.warned is not None:
            if ledger.warned.due <= now:
                after = f"{self._seconds_to_leave():g} s later"
                return self.preempted(f"its workers still ran {after} and were stopped")
            self.wake(ledger.warned.due)
        if ledger.deadline <= now:
            if root is not None and not root.effect:  # of an effect, the cause is not known yet
                return Verdict.of_failure(root)
            why = f"the time limit of {options.time_limit:g} s was reached"
            return Verdict(JobState.FAILED, TIMEOUT_EXIT_CODE, reason=why)
        self.wake(ledger.deadline)
        if options.hang_timeout is not None and ledger.running:
            return self._look_for_hang(options.hang_timeout)
        return None

    def _seconds_to_leave(self) -> float:
        warning = self.job.options.warning or 0.0
        return max(warning / 2, warning - (self.job.options.grace or GRACE) - _MARGIN)

    def _is_gone(self, node: Node) -> bool:
        """Return whether the agent of a node of the round was lost, also if it is back already."""
        return not node.here or node.joined_at > self.ledger.began

    def _failure_due(self, found: Sequence[Entry], root: Failure | None) -> float:
        """Return when a failure ends the round: other nodes may know the cause of an effect."""
        due, options = root_cause.stop_due(found), self.job.options
        if root is None or not root.effect:
            return due
        nodes = self.view.nodes
        questions = _questions(self.ledger, nodes)
        asks = any(probe.gave_up for probe in questions.values())
        if asks and questions.keys() - _answers(questions, self.ledger, nodes).keys():
            due = max(due, min(entry.at for entry in found) + _ANSWER_SECONDS)
        if due > self.now:
            return due
        polled = self.ledger.polled
        if polled is None:
            polled = self.now
            self.change(polled=polled)
        silent = [
            node
            for node in self.ledger.nodes
            if (each := nodes.get(node)) is not None
            and each.here
            and not (each.state.reported and each.state.round == self.ledger.round)
        ]
        return polled + options.lease + 2 * options.heartbeat if silent else due

    # -- what the ranks of a round wait for -------------------------------------------------------

    def _note_progress(self, here: Sequence[Node]) -> None:
        """Record that all workers run, and how many ranks have formed the process group."""
        ledger = self.ledger
        complete = len(here) == len(ledger.nodes) and all(node.state.started for node in here)
        if complete and not ledger.running:
            self.change(running=True, alive=self.now)
            self.add("running", restart=ledger.restarts)
        joined = sum(min(node.state.joined, node.nproc) for node in here)
        formed = sum(min(node.state.formed, node.state.joined, node.nproc) for node in here)
        counts = joined, formed = max(ledger.counts[0], joined), max(ledger.counts[1], formed)
        if counts == ledger.counts:
            return
        self.change(counts=counts)
        self.add(
            "ranks",
            restart=ledger.restarts,
            joined=joined,
            formed=formed,
            world_size=ledger.world_size,
        )

    def _name_unfinished(self, here: Sequence[Node]) -> None:
        """Name the ranks that still run 10 s after the last of the others has succeeded."""
        ledger = self.ledger
        ended = {
            ledger.worlds[node.node_rank].first_rank + local_rank
            for node in here
            for local_rank in node.state.succeeded
            if local_rank < node.nproc
        }
        if len(ended) != ledger.successes[0]:
            self.change(successes=(len(ended), self.now))
        if not 0 < len(ended) < ledger.world_size:
            return
        due = self.ledger.successes[1] + _UNFINISHED_SECONDS
        if self.now < due:
            self.wake(due)
            return
        running = sorted(set(range(ledger.world_size)) - ended)
        still = f"{ranks_text(running)} still run{'s' if len(running) == 1 else ''}"
        text = f"{still}; {ranks_text(ended)} ended {_UNFINISHED_SECONDS:.0f} s ago"
        self.say(f"{text}; `clusterjob stacks` shows what they do")
        self.change(successes=(len(ended), math.inf))

    # -- a hang ------------------------------------------------------------------------------------

    def _look_for_hang(self, timeout: float) -> Verdict | None:
        """Return the end of a round in which nothing has moved for the whole timeout.

        A node that does not answer proves nothing; its lease ends a round whose agent is gone.
        """
        ledger, now = self.ledger, self.now
        interval = min(max(timeout / _HANG_PARTS, _HANG_SHORTEST), _HANG_LONGEST)
        living = [
            node
            for node_rank in ledger.nodes
            if (node := self.view.nodes.get(node_rank)) is not None and not _has_ended(node)
        ]
        alive = max((node.heard_at - node.state.quiet for node in living), default=now)
        if self.view.stalled:
            alive = now  # the workers may have been stopped too
        alive = max(alive, ledger.alive)
        self.change(alive=alive)
        answered = all(node.state.sampled == ledger.sample for node in living)
        if answered and ledger.sampled - alive >= timeout:
            why = f"no progress for {timeout:g}s"
            failure = self._failure_of(self.job.own, why, FailureKind.HANG)
            return replace(Verdict.of_failure(failure), reason=why)  # until its rank is known
        due = max(alive, ledger.sampled) + interval
        if not answered:
            due = max(due, ledger.sampled + _SAMPLE_SECONDS)
        if now >= due:
            self.change(sample=ledger.sample + 1, sampled=now)
            due = now + _SAMPLE_SECONDS
        self.wake(due)
        return None

    # -- the end of a round ------------------------------------------------------------------------

    def _end_run(self, end: Verdict) -> None:
        """Stop the round, or first collect stacks: of many nodes from some, and the failed one."""
        alive = sorted(
            node
            for node in self.ledger.nodes
            if (each := self.view.nodes.get(node)) is not None
            and not self._is_gone(each)
            and not _has_ended(each)
        )
        if end.failure is not None and not _is_hang(end) and len(alive) > MOST_NODES:
            some = {*alive[:: len(alive) // MOST_NODES + 1], end.failure.node_rank}
            alive = [node for node in alive if node in some]
        wanted = end.state is JobState.CANCELLED and _cancel_request(self.view.nodes).stacks
        if alive and (wanted or end.state is JobState.FAILED):
            self.change(collect_from=frozenset(alive))
            self.go(Stage.COLLECT, end=end)
        else:
            self._stop_run(end)

    def collect(self) -> None:
        ledger, nodes = self.ledger, self.view.nodes
        end, due = ledger.ending, ledger.since + _COLLECT_SECONDS
        missing = [
            node
            for node in ledger.collect_from
            if not self._is_gone(nodes[node]) and not nodes[node].state.collected
        ]
        if missing and self.now < due and not _killing(nodes):
            self.wake(due)
            return
        if _is_hang(end):
            steps = (nodes[node].state.step for node in ledger.nodes if node in nodes)
            first_ranks = {node: world.first_rank for node, world in ledger.worlds.items()}
            step = max(steps, default=-1)
            end = root_cause.of_hang(end, self.view.stacks, step=step, first_ranks=first_ranks)
        self._stop_run(end)

    def _stop_run(self, end: Verdict) -> None:
        if end.state is not JobState.SUCCEEDED:
            self.add("stop", restart=self.ledger.restarts, why=end.reason)
        self.change(stop_at=self.now)
        self.go(Stage.STOP, end=end)

    def stop(self) -> None:
        ledger, nodes = self.ledger, self.view.nodes
        # A coordinator that stood still could not receive meanwhile.
        since = self.now if self.view.stalled else ledger.stop_at
        grace = grace_after(ledger.ending, self.job.options, left=_left(ledger))
        due = since + grace + _STOP_SECONDS
        running = [
            node
            for node in ledger.worlds
            if node in nodes
            and nodes[node].here
            and not (nodes[node].state.idle and nodes[node].state.round >= ledger.round)
            and nodes[node].joined_at <= ledger.began
        ]
        if running and self.now < due:
            self.wake(due)
            return
        for node in running:
            self.say(f"node {node} (host {nodes[node].host}) {_NO_ANSWER}")
            self.decision.dropped[node] = _NO_ANSWER
        self.end_round()

    def end_round(self) -> None:
        """Decide whether another round follows, if no other part of the job may decide."""
        ledger, end = self.ledger, self.ledger.ending
        decides = end.state is not JobState.SUCCEEDED or ledger.took_over
        if decides and self.may_be_replaced():
            self.wake(self.now + _DISK_SECONDS)
            return
        if decides and not self.has_majority():
            due = ledger.since + _ALONE_SECONDS
            self.wake(due)
            if self.now >= due:
                self.go(Stage.RESIGN)
            return
        if end.failure is not None and end.failure.rank is not None and not _is_hang(end):
            # Reports that arrived during the stop may be older, or more complete.
            root, _ = explain(self.job, ledger, self.view)
            end = Verdict.of_failure(root or end.failure)
        if not _is_recorded(self.job, ledger):
            self._record(end)
        decision = policy.Restart()
        if end.failure is not None:
            rounds, job = self.ledger.rounds[:-1], self.job
            decision = policy.decide(end.failure, job.options, rounds, job.attempt, job.nnodes)
        if decision.why:
            end = replace(end, reason=f"{end.reason} (not restarted: {decision.why})")
        if not decision.retry:
            self.go(Stage.END, end=end)
            return
        if decision.avoid and end.failure is not None:
            self._avoid(end.failure)
        if decision.pause:
            self.say(f"the next round begins in {decision.pause:g} s: {end.reason}")
        self.change(stage=Stage.WAIT, end=end, since=self.now + decision.pause)

    def _record(self, end: Verdict) -> None:
        times = {"started_at": self.ledger.started, "ended_at": self.view.time}
        ended = RoundEnd.of(end, self.job.attempt, self.ledger.restarts, **times)
        self.change(rounds=(*self.ledger.rounds, ended))
        self.add(ROUND_ENDED, **{name: v for name, v in vars(ended).items() if name != "ended_at"})

    def _avoid(self, failure: Failure) -> None:
        """Leave the node of a failure out of the next rounds, and name its host for later jobs."""
        node, ledger = failure.node_rank, self.ledger
        lost = failure.kind is FailureKind.NODE_LOST
        losses = self.view.nodes[node].losses if node in self.view.nodes else ()
        kind = (self.job.attempt, FailureKind.DISK)
        disks = {each.node for each in ledger.rounds if (each.attempt, each.kind) == kind}
        if failure.kind is FailureKind.DISK and len(disks) > 1:  # all nodes share it
            self.change(avoided=tuple(each for each in ledger.avoided if each not in disks))
            return
        if not lost or len(losses) > 1:  # a lost node may come back once
            self.change(avoided=(*(each for each in ledger.avoided if each != node), node))
        # If only the agent was killed, its host is not to blame. A coordinator whose agent was
        # killed is here again. A full disk is emptied.
        agent_killed = lost and (node == self.job.own or any(each.ended for each in losses[-1:]))
        if not agent_killed and failure_texts.FULL_DISK not in failure.message:
            self.add(
                "avoid",
                node_rank=node,
                host=failure.host,
                kind=failure.kind.value,
                why=failure.message,
            )


# In the other stages, it is the caller's turn.
_STAGES = {
    Stage.WAIT: _Step.wait,
    Stage.RUN: _Step.run,
    Stage.COLLECT: _Step.collect,
    Stage.STOP: _Step.stop,
}


def _is_recorded(job: Job, ledger: Ledger) -> bool:
    """Return whether the end of the newest round is in the ledger."""
    last = ledger.rounds[-1] if ledger.rounds else None
    return last is not None and (last.attempt, last.restart) == (job.attempt, ledger.restarts)


def host_names(nodes: Mapping[int, Node]) -> dict[int, str]:
    """Return the host of each node, with the node's number if the host has several nodes."""
    count = Counter(node.host for node in nodes.values())
    return {
        number: f"{node.host} (node {number})" if count[node.host] > 1 else node.host
        for number, node in nodes.items()
    }


def slow_lines(slow: Mapping[int, str], nodes: Mapping[int, Node]) -> list[str]:
    """Return a line for each node that the preflight has found to be slow."""
    names = host_names(nodes)
    return [f"host {names[node]}: {why}" for node, why in slow.items()]


def _has_ended(node: Node) -> bool:
    return node.state.ended or len(node.state.succeeded) >= node.nproc
