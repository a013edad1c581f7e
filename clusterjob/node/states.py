"""What an agent tells the coordinator of its node, and what the coordinator wants of it.

An agent sends the whole state of its node whenever it changes, and the coordinator answers with all
that it wants of the node. Both may be repeated, and the newest one replaces those before it: a lost
connection loses no event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from clusterjob.node.contract import World
from clusterjob.node.system.codec import Limit
from clusterjob.node.verdict import Failure

MAX_WORKERS = 1 << 12  # of a node
Number = Annotated[int, Limit((1 << 24) - 1)]
LocalRank = Annotated[int, Limit(MAX_WORKERS - 1)]
Text = Annotated[str, Limit(300)]
Lines = Annotated[tuple[Text, ...], Limit(MAX_WORKERS)]


@dataclass(frozen=True)
class Failing:
    """A worker, or the node, that has failed in this round.

    Attributes:
        age: seconds since the failure, when the state was made.
        exited: whether the process has ended; until then its last lines may be missing.
    """

    failure: Failure
    age: float
    exited: bool


@dataclass(frozen=True)
class Missing:
    """A worker that waits for ranks which have not joined the process group.

    Attributes:
        ranks: the first of them.
        gave_up: whether it does not wait any more.
    """

    local_rank: LocalRank
    ranks: Annotated[tuple[Number, ...], Limit(8)]
    gave_up: bool


@dataclass(frozen=True)
class Probe:
    """A question about workers of the node for which other ranks wait.

    Attributes:
        gave_up: whether some ranks do not wait for them any more.
    """

    ranks: Annotated[tuple[Number, ...], Limit(1 << 14)]
    gave_up: bool = False


@dataclass(frozen=True)
class Probed:
    """The answer to a probe: a line for each of its ranks; each as a failure after a give-up."""

    probe: Probe
    lines: Lines
    failures: Annotated[tuple[Failure, ...], Limit(MAX_WORKERS)] = ()


@dataclass(frozen=True)
class Request:
    """A request that has reached the node and concerns the whole job.

    Attributes:
        cancel: why the job must end; empty without a request.
        interrupt: whether that was Ctrl-C: the workers then get SIGINT.
        stacks: whether to save the stacks of the workers first.
        kill: whether to stop the workers without grace, after a second Ctrl-C.
        warning: why the scheduler takes the nodes soon; empty without a warning.
    """

    cancel: Text = ""
    interrupt: bool = False
    stacks: bool = False
    kill: bool = False
    warning: Text = ""


@dataclass(frozen=True)
class NodeState:
    """The state of one node.

    Attributes:
        round: the newest round whose workers the node has started; -1 before the first. All that
            follows concerns this round.
        started: whether all its workers have been started.
        ended: whether all its workers have ended.
        idle: whether no process of a round is left on the node.
        succeeded: the workers that have ended with exit code 0.
        failing: the workers that have failed, and the node itself.
        reported: whether `failing` and `exits` are complete up to the coordinator's question.
        exits: the first of the workers that have ended with exit code 0, as failures.
        missing: a worker that waits for others; None without one.
        probed: the answer to the newest question about missing ranks; None without one.
        joined, formed: the number of ranks that have begun, and completed, a process group.
        quiet: seconds since the last sign of life of a worker, when the state was made: output, a
            heartbeat, or a sample of the stacks in which it has moved.
        step: the step of the last heartbeat; -1 without one.
        sampled: the number of the newest sample of the workers' stacks; 0 without one.
        collected: whether the stacks of its workers have been sent.
        dumps: the dumps of torch's flight recorder of that moment, relative to the job directory.
        measured: how the measuring process has ended: "done", or why it failed; empty before.
        by_exec: why the node starts its workers by exec; empty if it forks them.
        seen: the number of the newest round whose members the node knows, plus 1.
        seen_of: the coordinator's node that began this round: another one may have begun a round
            with the same number in another part of the job.
        request: what was asked of this node for the whole job.
    """

    round: Annotated[int, Limit((1 << 24) - 1, minimum=-1)] = -1
    started: bool = False
    ended: bool = False
    idle: bool = True
    succeeded: Annotated[tuple[LocalRank, ...], Limit(MAX_WORKERS)] = ()
    failing: Annotated[tuple[Failing, ...], Limit(MAX_WORKERS + 1)] = ()
    reported: bool = False
    exits: Annotated[tuple[Failing, ...], Limit(MAX_WORKERS)] = ()
    missing: Missing | None = None
    probed: Probed | None = None
    joined: Number = 0
    formed: Number = 0
    quiet: float = 0.0
    step: Annotated[int, Limit(2**62, minimum=-1)] = -1
    sampled: Number = 0
    collected: bool = False
    dumps: Lines = ()
    measured: Text = ""
    by_exec: Text = ""
    seen: Number = 0
    seen_of: Number = 0
    request: Request = Request()


@dataclass(frozen=True)
class Stop:
    """Stop the workers: send `signal`, and SIGKILL `grace` seconds later.

    Attributes:
        early: whether a worker that saves nothing gets SIGKILL earlier.
    """

    grace: float
    signal: int
    early: bool = False


@dataclass(frozen=True)
class Measure:
    """Measure the node before the first round, with the others.

    Attributes:
        address, port: the store in which the measuring processes meet.
        nodes: the nodes that measure.
    """

    address: Text
    port: Number
    nodes: Annotated[tuple[Number, ...], Limit(1 << 14)]


@dataclass(frozen=True)
class Order:
    """What the coordinator wants of one node.

    Attributes:
        round: the round that the order concerns.
        world: the place of the node in the round; None if it runs no workers in it.
        stop: how to stop the workers of this round and of earlier ones; None if they may run.
        warned: whether the scheduler takes the nodes soon.
        report: whether to send all failures that are known by now.
        probe: a question about workers of the node; None without one.
        found: what the ranks do for which a worker of the node waits, for that worker's log.
        sample: the number of the sample of the stacks to take; 0 for none.
        collect: whether to send the stacks of all workers.
        dumps: whether to wait for the dumps of torch's flight recorder; the restart after a failure
            does not.
        measure: how to measure the node; None if it need not be.
    """

    round: Annotated[int, Limit((1 << 24) - 1, minimum=-1)] = -1
    world: World | None = None
    stop: Stop | None = None
    warned: bool = False
    report: bool = False
    probe: Probe | None = None
    found: Lines = ()
    sample: Number = 0
    collect: bool = False
    dumps: bool = False
    measure: Measure | None = None
