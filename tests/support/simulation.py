"""Simulate jobs with faults in one process, on a simulated clock and network.

The decisions are those of the product (`clusterjob.node.decide`). The agents, workers, connections
and clocks around them are simulated: a seed chooses the job, its faults and their times. Invariants
are checked after every step. Run seeds from the command line::

    python tests/support/simulation.py FIRST COUNT
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from clusterjob.node import decide as core
from clusterjob.node.contract import World
from clusterjob.node.decide import Job, Ledger, Loss, Node, Stage, View
from clusterjob.node.options import parse
from clusterjob.node.rendezvous import policy
from clusterjob.node.rendezvous.messages import Lasting
from clusterjob.node.rendezvous.succession import may_go_on
from clusterjob.node.states import Failing, NodeState, Order, Request
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

HORIZON = 3000.0  # seconds after which every job must have ended
BATCH = 0.05  # seconds between two decisions
HEARTBEAT, LEASE = 2.0, 10.0
LEASE_INTERVAL, LEASE_MARGIN = 0.5, 1.0  # of a forkserver
GRACE_OF_KILL = 1.0  # seconds in which a forkserver kills its workers
TURN, RETURN, SEARCH, AGAIN = 3.0, 3.0, 1.0, 5.0  # of a successor, see `Agent.search`


class Violation(AssertionError):
    """An invariant does not hold."""


def _blame_last(step: Any, nodes: Any, failures: Any, root: Any) -> Any:
    """Name the failure of the highest node that is here."""
    end = _WHY_END(step, nodes, failures, root)
    if end is not None and end.failure is not None:
        last = max(step.view.nodes)
        failure = replace(end.failure, node_rank=last, host=f"host{last}")
        return replace(end, failure=failure)
    return end


def _end_with_first(step: Any) -> None:
    """End the job when one node has ended."""
    nodes = [step.view.nodes[node] for node in step.ledger.nodes if node in step.view.nodes]
    if any(node.state.ended and not node.failures for node in nodes):
        step._end_run(Verdict(JobState.SUCCEEDED, 0))
    else:
        _RUN(step)


def _record_again(step: Any) -> None:
    """Forget in the wait that the round was recorded."""
    _NOTE_CHANGES(step)
    if step.ledger.took_over and step.ledger.stage is Stage.WAIT and len(step.ledger.rounds) < 3:
        step.change(rounds=(*step.ledger.rounds, *step.ledger.rounds[-1:]))


_WHY_END, _RUN, _NOTE_CHANGES = core._Step._why_end, core._Step.run, core._Step.note_changes
_RESTART = policy.decide


@dataclass(frozen=True)
class End(Order):
    """The end of the job."""

    state: JobState = JobState.SUCCEEDED


@dataclass
class Worker:
    """One simulated worker."""

    rank: int
    local_rank: int
    phase: str = "importing"  # running, failed, succeeded, killed
    at: float = 0.0  # the time of its end
    failure: Failure | None = None


@dataclass
class Machine:
    """One simulated machine; its agent and workers freeze and die with it."""

    number: int
    nproc: int
    up: bool = True
    frozen: bool = False
    hurt: bool = False
    agent: Agent | None = None
    round: tuple[int, int] | None = None  # of its workers: coordinator's birth, round
    workers: list[Worker] = field(default_factory=list)
    lease_until: float = 0.0
    thawed_at: float = -10.0
    watched: bool = False  # by its forkserver
    over: float = 0.0  # seconds for which its forkserver has seen that the lease is over
    stuck_until: float = 0.0  # its workers neither run nor end
    seen: int = 0
    seen_of: int = 0
    disk: dict[str, Any] = field(default_factory=dict)


class Simulation:
    """One job.

    Args:
        seed: chooses everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.births = itertools.count()
        self.cut: set[tuple[int, int]] = set()  # directed pairs of machines
        self.log: list[str] = []
        self.verdicts: list[tuple[int, Verdict]] = []
        self.ends: dict[int, JobState] = {}  # of agents
        self.shared_result: Verdict | None = None
        self.cancelled = False
        self.cancel_at: float | None = None
        rand = self.random
        count = rand.randint(2, 9)
        spares = rand.choice([0, 0, 1, 2]) if count > 3 else 0
        elastic = rand.random() < 0.4 and count - spares > 1
        words = [f"--max-restarts={rand.choice([0, 1, 1, 3])}"]
        if spares:
            words.append(f"--spares={spares}")
        if elastic:
            words.append(f"--min-nodes={rand.randint(1, count - spares)}")
        if rand.random() < 0.2:
            words.append(f"--time-limit={rand.randint(20, 200)}")
        if rand.random() < 0.2:
            words += ["--warning=60"]
        words.append("--join-timeout=120")
        self.options = parse([*words, "train.py"])
        self.work = rand.uniform(5.0, 120.0)
        self.machines = [Machine(number, rand.choice([1, 2, 4])) for number in range(count)]
        self.describe = f"{count} nodes {' '.join(words)}"
        for machine in self.machines:
            start = functools.partial(self.start_agent, machine)
            self.on(machine, rand.uniform(0.0, 2.0), start)
        self.plan_faults()

    # -- time and network ----------------------------------------------------------------------

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + seconds, next(self.numbers), function))

    def on(self, machine: Machine, seconds: float, function: Callable[[], None]) -> None:
        """Call a function of a machine after some seconds, later while the machine is frozen."""

        def call() -> None:
            if machine.frozen:
                self.after(0.5, call)
            else:
                function()

        self.after(seconds, call)

    def say(self, text: str) -> None:
        self.log.append(f"{self.now:8.2f} {text}")

    def reaches(self, a: int, b: int) -> bool:
        return a == b or ((a, b) not in self.cut and self.machines[a].up and self.machines[b].up)

    def run(self) -> None:
        """Run the job to its end, and check it."""
        while self.queue and self.now < HORIZON:
            self.now, _, function = heapq.heappop(self.queue)
            function()
            self.check()
        self.check_end()

    # -- faults --------------------------------------------------------------------------------

    def plan_faults(self) -> None:
        rand = self.random
        faults = [self.kill_machine, self.kill_agent, self.freeze, self.partition, self.one_way]
        faults += [self.fail_worker, self.fail_worker, self.reset, self.pause_network, self.stick]
        if rand.random() < 0.15:
            self.after(rand.uniform(0, self.work * 1.5), self.cancel)
        if self.options.warning and rand.random() < 0.5:
            self.after(rand.uniform(0, self.work * 1.5), self.warn)
        self.faults = rand.choice([0, 1, 1, 2, 3, 5])
        for _ in range(self.faults):
            fault = rand.choice(faults)
            at = rand.choice([rand.uniform(0, 3), rand.uniform(0, 1.5 * self.work)])
            self.after(at, fault)

    def victim(self) -> Machine:
        machine = self.random.choice(self.machines)
        if self.random.random() < 0.3:  # the coordinator's
            for each in self.machines:
                if each.agent is not None and each.agent.coordinator is not None:
                    machine = each
        return machine

    def kill_machine(self) -> None:
        machine = self.victim()
        self.say(f"machine {machine.number} is killed")
        machine.hurt = True
        machine.up = False
        machine.workers, machine.round = [], None
        if machine.agent is not None:
            machine.agent.die()
        machine.agent = None

    def kill_agent(self) -> None:
        machine = self.victim()
        if not machine.up or machine.agent is None or machine.frozen:
            return
        self.say(f"the agent of {machine.number} is killed")
        machine.hurt = True
        machine.agent.die()
        machine.agent = None
        # The forkserver dies with the agent, and the kernel kills its workers.
        self.after(self.random.uniform(0, 0.1), lambda: self.clear(machine))
        if self.options.restarts and "verdict" not in machine.disk:
            again = functools.partial(self.start_agent, machine, again=True)
            self.on(machine, self.random.uniform(0.2, 2.0), again)
        else:
            self.ends[machine.number] = JobState.LOST

    def clear(self, machine: Machine) -> None:
        machine.workers, machine.round = [], None

    def freeze(self) -> None:
        machine = self.victim()
        seconds = self.random.choice([1.0, 5.0, 15.0, 40.0, 200.0])
        self.say(f"machine {machine.number} is frozen for {seconds:g} s")
        machine.hurt = True
        machine.frozen = True
        self.after(seconds, lambda: self.thaw(machine))

    def thaw(self, machine: Machine) -> None:
        self.say(f"machine {machine.number} runs again")
        machine.frozen, machine.thawed_at = False, self.now
        if machine.agent is not None:
            machine.agent.on_thaw()

    def partition(self) -> None:
        rand = self.random
        some = {m.number for m in self.machines if rand.random() < 0.5}
        pairs = {(a, b) for a in some for b in range(len(self.machines)) if b not in some}
        self.cut_for(pairs | {(b, a) for a, b in pairs}, f"{sorted(some)} are cut off")

    def one_way(self) -> None:
        a = self.victim().number
        pairs = {(a, b) for b in range(len(self.machines)) if b != a}
        if self.random.random() < 0.5:
            pairs = {(b, a) for a, b in pairs}
        self.cut_for(pairs, f"one way of {a} is cut")

    def cut_for(self, pairs: set[tuple[int, int]], what: str) -> None:
        seconds = self.random.choice([1.0, 6.0, 14.0, 30.0, 120.0, 600.0])
        self.say(f"{what} for {seconds:g} s")
        self.cut |= pairs
        for machine in self.machines:
            machine.hurt = True
        self.after(seconds, lambda: self.cut.difference_update(pairs))

    def pause_network(self) -> None:
        pairs = {(a, b) for a in range(len(self.machines)) for b in range(len(self.machines))}
        self.cut_for({(a, b) for a, b in pairs if a != b}, "the network")

    def reset(self) -> None:
        machine = self.victim()
        agent = machine.agent
        if agent is not None and agent.link is not None:
            self.say(f"the connection of {machine.number} is reset")
            machine.hurt = True
            agent.link.reset()

    def fail_worker(self) -> None:
        machine = self.victim()
        running = [worker for worker in machine.workers if worker.phase == "running"]
        if not running or machine.frozen or not machine.up:
            return
        worker = self.random.choice(running)
        self.say(f"rank {worker.rank} on {machine.number} fails")
        machine.hurt = True
        kind = self.random.choice([FailureKind.CODE, FailureKind.DEVICE, FailureKind.SIGNAL])
        self.end_worker(machine, worker, f"error {next(self.numbers)}", kind, effect=False)

    def stick(self) -> None:
        """Let the workers of a machine wait for a disk: they neither run nor end."""
        machine = self.victim()
        if machine.workers and machine.up:
            seconds = self.random.choice([3.0, 20.0, 60.0])
            self.say(f"the workers of {machine.number} are stuck for {seconds:g} s")
            machine.hurt = True
            machine.stuck_until = self.now + seconds

    def cancel(self) -> None:
        machine = self.victim()
        if machine.agent is not None and machine.up:
            self.say(f"the job is cancelled at {machine.number}")
            self.cancelled, self.cancel_at = True, self.now
            machine.agent.request = Request(cancel="cancelled")
            machine.agent.push()

    def warn(self) -> None:
        for machine in self.machines:
            if machine.agent is not None and machine.up:
                machine.agent.request = replace(machine.agent.request, warning="SIGUSR1")
                machine.agent.push()

    # -- machines ------------------------------------------------------------------------------

    def start_agent(self, machine: Machine, *, again: bool = False) -> None:
        if not machine.up or machine.agent is not None or machine.number in self.ends:
            return
        machine.agent = Agent(self, machine, again=again)
        machine.agent.begin()

    def look_at_lease(self, machine: Machine) -> None:
        """Do what the forkserver does: kill workers that run too long without a lease."""
        machine.watched = machine.round is not None
        if not machine.watched:
            return
        if not machine.frozen:
            late = self.now > machine.lease_until
            machine.over = machine.over + LEASE_INTERVAL if late else 0.0
            if machine.over > LEASE_MARGIN:
                self.kill_workers(machine)
                if machine.agent is not None:
                    machine.agent.push()
        self.after(LEASE_INTERVAL, lambda: self.look_at_lease(machine))

    def start_workers(self, machine: Machine, world: World, birth: int) -> None:
        machine.round = (birth, world.restart)
        machine.workers = [Worker(world.first_rank + k, k) for k in range(world.nproc)]
        self.check_start(machine, world)
        if not machine.watched:
            machine.over = 0.0
            self.look_at_lease(machine)
        for worker in machine.workers:
            seconds = self.random.uniform(0.2, 2.0)
            self.on(machine, seconds, functools.partial(self.worker_runs, machine, worker))

    def worker_runs(self, machine: Machine, worker: Worker) -> None:
        if worker not in machine.workers or worker.phase != "importing":
            return
        worker.phase = "running"
        if machine.agent is not None:
            machine.agent.push()
        self.after(self.work + self.random.uniform(0, 1), lambda: self.worker_done(machine, worker))

    def worker_done(self, machine: Machine, worker: Worker) -> None:
        """The worker ends if all others of its round are with it; else it waits, or fails."""
        if worker not in machine.workers or worker.phase != "running":
            return
        others = [each for each in self.machines if each.round == machine.round]
        world = machine.agent.world if machine.agent is not None else None
        size = world.world_size if world is not None else 0
        peers = [
            (each, worker)
            for each in others
            if self.reaches(each.number, machine.number)
            and self.reaches(machine.number, each.number)
            for worker in each.workers
        ]
        # A peer that has failed or is cut off closes the connection; one that is frozen does not.
        alive = sum(worker.phase in ("importing", "running", "succeeded") for _, worker in peers)
        moves = all(not self.is_still(each) for each, _ in peers)
        ready = all(worker.phase != "importing" for _, worker in peers)
        if self.is_still(machine) or not moves or not ready or alive < size:
            if alive < size and self.random.random() < 0.2 and not self.is_still(machine):
                self.end_worker(
                    machine, worker, "Connection closed by peer", FailureKind.NETWORK, effect=True
                )
                return
            self.after(1.0, lambda: self.worker_done(machine, worker))
            return
        worker.phase, worker.at = "succeeded", self.now
        if machine.agent is not None:
            machine.agent.push()

    def is_still(self, machine: Machine) -> bool:
        return machine.frozen or machine.stuck_until > self.now

    def end_worker(
        self, machine: Machine, worker: Worker, message: str, kind: FailureKind, *, effect: bool
    ) -> None:
        worker.phase, worker.at = "failed", self.now
        worker.failure = Failure(
            worker.rank,
            worker.local_rank,
            node_rank=machine.number,
            host=f"host{machine.number}",
            exit_code=1,
            signal=None,
            message=message,
            effect=effect,
            kind=kind,
            where=f"train.py:{self.random.randint(1, 9)}" if kind is FailureKind.CODE else "",
        )
        if machine.agent is not None:
            machine.agent.push()

    def kill_workers(self, machine: Machine) -> None:
        """Kill the workers at once, unless they are stuck."""
        if machine.stuck_until > self.now and machine.workers:
            stuck = machine.round
            self.after(1.0, lambda: self.kill_again(machine, stuck))
            return
        for worker in machine.workers:
            if worker.phase in ("importing", "running"):
                worker.phase, worker.at = "killed", self.now
        machine.round = None

    def kill_again(self, machine: Machine, round_: tuple[int, int] | None) -> None:
        if machine.round == round_ and machine.up:
            self.kill_workers(machine)
            if machine.agent is not None:
                machine.agent.push()

    # -- invariants ----------------------------------------------------------------------------

    def check_start(self, machine: Machine, world: World) -> None:
        ranks = Counter(
            worker.rank
            for each in self.machines
            if each.round == machine.round
            for worker in each.workers
        )
        if any(count > 1 for count in ranks.values()):
            raise Violation(f"a rank runs twice in round {machine.round}")
        if world.first_rank + world.nproc > world.world_size:
            raise Violation("a rank beyond the world")

    def check(self) -> None:
        """Check what must hold after every step."""
        trains: set[tuple[int, int]] = set()
        alive: dict[tuple[int, int], int] = {}
        beside: dict[tuple[int, int], int] = {}
        sizes: dict[tuple[int, int], int] = {}
        for machine in self.machines:
            stuck = machine.stuck_until + 1.5 > self.now
            if machine.round is None or not machine.up or machine.frozen or stuck:
                continue
            running = sum(worker.phase in ("importing", "running") for worker in machine.workers)
            alive[machine.round] = alive.get(machine.round, 0) + running
            # A forkserver that wakes lets its workers wait for the agent's heartbeat.
            if self.now > machine.thawed_at + LEASE_MARGIN + LEASE_INTERVAL:
                beside[machine.round] = beside.get(machine.round, 0) + running
            if machine.agent is not None and machine.agent.world is not None:
                sizes[machine.round] = machine.agent.world.world_size
            over = self.now - max(machine.lease_until, machine.thawed_at)
            if running and over > LEASE_MARGIN + GRACE_OF_KILL:
                raise Violation(
                    f"workers of {machine.number} run {over:.1f} s after the end of the lease"
                )
        for round_, count in alive.items():
            if count and count >= sizes.get(round_, 1 << 30):
                trains.add(round_)
        if len(trains) > 1:
            raise Violation(f"two rounds train: {trains}")
        if sum(count > 0 for count in beside.values()) > 1:
            raise Violation(f"workers of two rounds run: {beside}")

    def check_end(self) -> None:
        """Check what must hold when the job is over."""
        for machine in self.machines:
            if machine.up and machine.number not in self.ends:
                raise Violation(f"the agent of {machine.number} has not ended")
        if len({verdict.state for _, verdict in self.verdicts}) > 1:
            raise Violation(f"{len(self.verdicts)} verdicts: {self.verdicts}")
        for _, verdict in self.verdicts:
            self.check_verdict(verdict)

    def check_success(self, ledger: Ledger, verdict: Verdict) -> None:
        """Check that a job that succeeded has run all its ranks to their ends."""
        if verdict.state is not JobState.SUCCEEDED:
            return
        for number in ledger.nodes:
            machine = self.machines[number]
            phases = {worker.phase for worker in machine.workers}
            if machine.up and phases != {"succeeded"}:
                raise Violation(f"succeeded while the workers of {number} are {phases}")
        if self.cancel_at is not None and self.now > self.cancel_at + 60 and not self.faults:
            raise Violation("succeeded a minute after it was cancelled")

    def check_verdict(self, verdict: Verdict) -> None:
        failure = verdict.failure
        if failure is not None and not self.machines[failure.node_rank].hurt:
            raise Violation(f"blamed without reason: {failure.who}: {failure.message}")
        if verdict.state is JobState.CANCELLED and not self.cancelled:
            raise Violation("cancelled by nobody")
        free = self.options.machine_restarts(len(self.machines))
        if verdict.restarts > self.options.max_restarts + free:
            raise Violation(f"{verdict.restarts} restarts")
        ended = [each for each in verdict.attempts if each.started_at]
        if len({each.restart for each in ended}) != len(ended):
            raise Violation(f"a round ended twice: {ended}")
        if verdict.restarts + 1 < len(ended):
            raise Violation("more rounds than restarts")


@dataclass
class Link:
    """A connection: messages arrive in order, late, or not at all.

    A message that meets a cut is sent again when the network is whole, as TCP does.
    """

    sim: Simulation
    agent: Agent
    coordinator: Coordinator
    up: bool = True
    order: Order | None = None  # the last one
    queues: dict[str, list[Any]] = field(default_factory=dict)

    def to_coordinator(self, state: NodeState, beat: float | None = None) -> None:
        self._send(self.agent.machine, self.coordinator.machine, "up", (state, beat))

    def to_agent(self, order: Order | float) -> None:
        """Send an order, or a heartbeat back."""
        self._send(self.coordinator.machine, self.agent.machine, "down", order)

    def _send(self, source: Machine, target: Machine, way: str, message: Any) -> None:
        if not self.up:
            return
        queue = self.queues.setdefault(way, [])
        queue.append(message)
        if len(queue) == 1:
            self.sim.after(self._delay(source, target), lambda: self._deliver(source, target, way))

    def _delay(self, source: Machine, target: Machine) -> float:
        if source is target:
            return 0.0
        return self.sim.random.choice([0.001, 0.001, 0.02, 0.3])

    def _deliver(self, source: Machine, target: Machine, way: str) -> None:
        queue = self.queues[way]
        if not self.up or not target.up:
            return
        if not self.sim.reaches(source.number, target.number) or target.frozen:
            self.sim.after(0.4, lambda: self._deliver(source, target, way))
            return
        message = queue.pop(0)
        if queue:
            self.sim.after(self._delay(source, target), lambda: self._deliver(source, target, way))
        if way == "up":
            self.coordinator.receive(self.agent, *message, self)
        else:
            self.agent.receive(message, self)

    def reset(self, *, by_agent: bool = False) -> None:
        """End the connection; each side learns it when it can.

        Args:
            by_agent: whether the agent has lost the coordinator, and has said so.
        """
        if self.up:
            self.up = False
            tell = functools.partial(self.tell_coordinator, by_agent=by_agent)
            self.sim.on(self.coordinator.machine, 0.01, tell)
            self.sim.on(self.agent.machine, 0.01, self._tell_agent)

    def tell_coordinator(self, *, by_agent: bool = False) -> None:
        machine = self.coordinator.machine
        if machine.up and self.sim.reaches(self.agent.machine.number, machine.number):
            why = "it lost the coordinator" if by_agent else "its connection was closed"
            self.coordinator.lose(self.agent, why, self, ended=not by_agent)

    def _tell_agent(self) -> None:
        if self.agent.machine.up:
            self.agent.lost_coordinator("the connection to it was closed", self)


class Agent:
    """The agent of one machine."""

    def __init__(self, sim: Simulation, machine: Machine, *, again: bool) -> None:
        self.sim = sim
        self.machine = machine
        self.again = again
        self.pid = next(sim.numbers)
        self.coordinator: Coordinator | None = None
        self.link: Link | None = None
        self.world: World | None = None
        self.round = -1
        self.joined = False
        self.heard_at = sim.now
        self.request = Request()
        self.collected = False
        self.reported = False
        self.stopping = False
        self.dead = False
        self.search_id = 0
        self.deadline: float | None = None  # of the search, until a round begins
        self.alone = 0
        self.resigned: Failure | None = None  # why the round ended, if this node gave up then
        self.ticked = sim.now

    # -- life ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self.tick()
        state = self.machine.disk.get("coordinates")
        if self.again and state is not None:
            self.search(ended=True, turn=0.5)
        elif self.machine.number == 0 and not self.again:
            self.coordinate(Ledger(since=self.sim.now), None)
        else:
            self.search(ended=False, turn=None)

    def die(self) -> None:
        self.dead = True
        if self.coordinator is not None:
            self.coordinator.die()
        if self.link is not None:
            link, self.link = self.link, None
            link.up = False
            if link.coordinator.machine is not self.machine:
                self.sim.on(link.coordinator.machine, 0.01, link.tell_coordinator)

    def on_thaw(self) -> None:
        if self.coordinator is not None:
            self.coordinator.on_thaw()

    def tick(self) -> None:
        """Send a heartbeat, and look at the lease."""
        if self.dead:
            return
        sim = self.sim
        if not self.machine.frozen:
            stalled = sim.now - self.ticked > 2 * HEARTBEAT
            self.ticked = sim.now
            if self.link is not None:
                if self.link.coordinator is self.coordinator:
                    self.heard_at = self.link.coordinator.heard_at()
                self.machine.lease_until = max(self.machine.lease_until, self.heard_at + LEASE)
                self.push(beat=sim.now)
                if sim.now - self.heard_at > LEASE and not stalled:
                    self.lost_coordinator("no message from it", self.link)
            elif self.machine.round is not None and sim.now > self.machine.lease_until:
                sim.kill_workers(self.machine)
        sim.after(HEARTBEAT / 2, self.tick)

    def end(self, state: JobState) -> None:
        self.sim.say(f"agent {self.machine.number} ends: {state.value}")
        self.machine.hurt |= state is JobState.LOST  # nobody finds it any more
        self.sim.ends[self.machine.number] = state
        self.sim.kill_workers(self.machine)
        self.die()
        self.machine.agent = None

    # -- the node's state ----------------------------------------------------------------------

    def state(self) -> NodeState:
        machine, now = self.machine, self.sim.now
        workers = machine.workers
        running = [worker for worker in workers if worker.phase in ("importing", "running")]
        failing = tuple(
            Failing(worker.failure, max(0.0, now - worker.at), exited=True)
            for worker in workers
            if worker.failure is not None
        )
        idle = not running or machine.round is None
        return NodeState(
            round=self.round,
            started=bool(workers) and all(w.phase != "importing" for w in workers),
            ended=bool(workers) and not running,
            idle=idle,
            succeeded=tuple(worker.local_rank for worker in workers if worker.phase == "succeeded"),
            failing=failing,
            reported=self.reported,
            collected=self.collected,
            seen=self.machine.seen,
            seen_of=self.machine.seen_of,
            request=self.request,
        )

    def push(self, beat: float | None = None) -> None:
        if self.link is not None and not self.machine.frozen and not self.dead:
            self.link.to_coordinator(self.state(), beat)

    # -- orders --------------------------------------------------------------------------------

    def receive(self, order: Order | float, link: Link) -> None:
        if self.dead or link is not self.link:
            return
        if isinstance(order, float):
            self.heard_at = max(self.heard_at, order)
            self.machine.lease_until = max(self.machine.lease_until, self.heard_at + LEASE)
            return
        if isinstance(order, End):
            self.end(order.state)
            return
        if order.round + 1 > self.machine.seen:
            self.machine.seen = order.round + 1
            self.machine.seen_of = link.coordinator.ledger.groups[-1].coordinator
        if order.round < self.round:
            return
        if order.world is not None and order.round > self.round:
            self.round, self.world = order.round, order.world
            self.collected = self.reported = self.stopping = False
            self.alone, self.deadline = 0, None
            self.sim.start_workers(self.machine, order.world, link.coordinator.birth)
        if order.report:
            self.reported = True
        if order.collect:
            self.collected = True
        if order.stop is not None:
            if order.round > self.round:
                self.round, self.machine.workers = order.round, []
            self.stop(order.stop.grace)
        self.push()

    def stop(self, grace: float) -> None:
        if not self.stopping:
            self.stopping = True
            number = self.round
            wait = self.sim.random.choice([0.01, 0.1, min(1.0, grace)])
            self.sim.on(self.machine, wait, lambda: self.stopped(number))

    def stopped(self, number: int) -> None:
        if not self.dead and self.round == number and self.machine.agent is self:
            self.sim.kill_workers(self.machine)
            self.push()

    # -- the coordinator's loss ----------------------------------------------------------------

    def lost_coordinator(self, why: str, link: Link) -> None:
        if self.dead or self.link is not link:
            return
        sim = self.sim
        sim.say(f"agent {self.machine.number} lost the coordinator: {why}")
        ended = not link.up
        self.link = None
        if link.up:
            link.reset(by_agent=True)
        self.sim.after(
            sim.random.uniform(0.0, GRACE_OF_KILL * 0.5), lambda: sim.kill_workers(self.machine)
        )
        if not sim.options.restarts:
            if sim.shared_result is None:
                self.end(JobState.LOST)
            else:
                self.end(sim.shared_result.state)
            return
        sim.on(self.machine, GRACE_OF_KILL, lambda: self.search(ended=ended))

    def search(self, *, ended: bool, turn: float | None = -1.0) -> None:
        """Look for the coordinator at the known addresses, and take its place in turn."""
        if self.dead:
            return
        if self.state().idle:
            self.round, self.machine.workers = -1, []
        self.search_id += 1
        sim, heirs = self.sim, self.machine.disk.get("heirs", [])
        after = RETURN if ended else SEARCH
        after += self.alone * AGAIN
        if turn is None:
            at = float("inf")
        elif turn >= 0:
            at = sim.now + turn
        elif self.machine.number in heirs and self.machine.disk.get("ledger"):
            at = sim.now + after + heirs.index(self.machine.number) * TURN
        else:
            at = float("inf")
        wait = self.sim.options.join_timeout
        if self.joined and not (self.sim.options.spares or self.sim.options.min_nodes):
            wait = self.sim.options.return_timeout
        if self.deadline is None:
            self.deadline = sim.now + wait
        self.try_join(self.search_id, at, self.deadline, ended)

    def try_join(self, search: int, turn: float, deadline: float, ended: bool) -> None:
        if self.dead or search != self.search_id or self.link is not None:
            return
        sim, machine = self.sim, self.machine
        if sim.shared_result is not None and sim.random.random() < 0.5:
            self.end(sim.shared_result.state)  # a shared disk shows the verdict
            return
        for number in dict.fromkeys([0, *machine.disk.get("heirs", [])]):
            other = sim.machines[number]
            agent = other.agent
            if (
                agent is not None
                and agent.coordinator is not None
                and not other.frozen
                and sim.reaches(number, machine.number)
                and sim.reaches(machine.number, number)
                and agent.coordinator.admit(self)
            ):
                return
        if sim.now >= turn and self.may_coordinate():
            sim.say(f"agent {machine.number} becomes the coordinator")
            ledger, node = machine.disk["ledger"]
            self.alone += 1
            self.coordinate(ledger, node)
            return
        if sim.now >= deadline:
            self.end(JobState.LOST)
            return
        sim.on(machine, 0.3, lambda: self.try_join(search, turn, deadline, ended))

    def may_coordinate(self) -> bool:
        found = self.machine.disk.get("ledger")
        if found is None:
            return False
        ledger, node = found
        others = set(range(len(self.sim.machines))) - ({node} - {self.machine.number})
        return may_go_on(ledger.groups, others)

    def coordinate(self, ledger: Ledger, before: int | None) -> None:
        self.coordinator = Coordinator(self.sim, self, ledger, before)
        self.machine.disk["coordinates"] = True
        self.coordinator.admit(self)
        self.coordinator.begin()


class Coordinator:
    """The loop around `decide`."""

    def __init__(self, sim: Simulation, agent: Agent, ledger: Ledger, before: int | None) -> None:
        self.sim = sim
        self.agent = agent
        self.machine = agent.machine
        self.birth = next(sim.births)
        self.ledger = ledger
        self.before = before
        self.nodes: dict[int, Node] = {}
        self.links: dict[int, Link] = {}
        self.dead = False
        self.planned: float | None = None
        self.decided = -1.0
        self.ticked = sim.now
        self.stalled_until = self.patient_until = -1.0
        if before is not None:
            lost = Node(before, f"host{before}", pid=0, nproc=1)
            self.nodes[before] = lost.lose(Loss("it was lost", sim.now))
        number = len(sim.machines)
        self.job = Job(
            sim.options,
            nnodes=number,
            own=self.machine.number,
            moves=sim.options.restarts and number > 1,
        )

    def begin(self) -> None:
        if self.before is not None:
            lost = self.agent.resigned or Failure.of_node(
                self.before, f"host{self.before}", message="the coordinator was lost"
            )
            lasting = lasting_of(self.ledger)
            self.ledger = core.take_over(self.job, lasting, lost, self.sim.now)
        self.tick()
        self.plan(0.0)

    def die(self) -> None:
        self.dead = True
        for number, link in self.links.items():
            if number != self.machine.number:
                link.reset()

    def on_thaw(self) -> None:
        stalled = self.sim.now - self.ticked
        if stalled > 2 * HEARTBEAT:
            self.stalled_until = self.sim.now + LEASE + 2 * HEARTBEAT
            self.patient_until = self.sim.now + 2 * HEARTBEAT
        self.plan(0.0)

    def heard_at(self) -> float:
        heard = {number: node.heard_at for number, node in self.nodes.items()}
        return core.heard_at(self.job, self.ledger, heard, self.sim.now)

    # -- agents --------------------------------------------------------------------------------

    def admit(self, agent: Agent) -> bool:
        """Admit an agent; return False if an earlier connection of its node is not lost yet."""
        number, sim = agent.machine.number, self.sim
        if self.dead:
            return False
        known = self.nodes.get(number)
        if known is not None and known.here:
            same = known.pid == agent.pid  # it has lost this coordinator, else it was killed
            self.lose(
                self.links[number].agent,
                "its agent joins again",
                self.links[number],
                ended=not same,
            )
            return False
        self.nodes[number] = Node(
            number,
            f"host{number}",
            pid=agent.pid,
            nproc=agent.machine.nproc,
            joined_at=sim.now,
            heard_at=sim.now,
            state=agent.state(),
            losses=known.losses if known is not None else (),
        )
        link = self.links[number] = Link(sim, agent, self)
        agent.link, agent.joined = link, True
        agent.heard_at = sim.now
        agent.machine.lease_until = max(agent.machine.lease_until, sim.now + LEASE)
        if agent is not self.agent:
            agent.resigned = None
            agent.machine.disk.pop("coordinates", None)
        self.plan()
        return True

    def receive(self, agent: Agent, state: NodeState, beat: float | None, link: Link) -> None:
        number = agent.machine.number
        if self.dead or self.links.get(number) is not link:
            return
        node = self.nodes[number]
        if not node.here:
            return
        self.nodes[number] = node.receive(state, self.sim.now)
        if beat is not None and agent is not self.agent:
            link.to_agent(beat)
        if state != node.state:
            self.plan()

    def lose(
        self,
        agent: Agent,
        why: str,
        link: Link,
        *,
        ended: bool = False,
    ) -> None:
        number = agent.machine.number
        if self.dead or self.links.get(number) is not link:
            return
        node = self.nodes[number]
        if node.here:
            self.nodes[number] = node.lose(Loss(why, self.sim.now, ended=ended))
            link.up = False
            self.plan(0.0)

    def tick(self) -> None:
        """Find silent agents."""
        if self.dead:
            return
        sim = self.sim
        if not self.machine.frozen:
            stalled = sim.now - self.ticked > 2 * HEARTBEAT
            if stalled:
                self.on_thaw()
            self.ticked = sim.now
            for number in list(self.links):
                node = self.nodes[number]
                silent = sim.now - node.heard_at
                patient = sim.now < self.patient_until or number == self.machine.number
                if node.here and silent > LEASE and not patient:
                    self.lose(
                        self.links[number].agent,
                        f"no message for {silent:.0f} s",
                        self.links[number],
                    )
        sim.after(HEARTBEAT, self.tick)

    # -- decisions -----------------------------------------------------------------------------

    def plan(self, seconds: float | None = None) -> None:
        """Decide soon."""
        sim = self.sim
        at = sim.now + seconds if seconds is not None else max(sim.now, self.decided + BATCH)
        if self.planned is None or at < self.planned:
            self.planned = at
            sim.on(self.machine, at - sim.now, lambda: self.decide(at))

    def decide(self, planned: float) -> None:
        if self.dead or self.planned != planned:
            return
        self.planned = None
        self.decided = self.sim.now
        view = View(
            self.nodes,
            time=f"{self.sim.now:.3f}",
            stalled=20.0 if self.sim.now < self.stalled_until else 0.0,
        )
        self.apply(core.decide(self.job, self.ledger, view, self.sim.now))

    def apply(self, decision: Any) -> None:
        sim, before = self.sim, self.ledger.round
        self.ledger = decision.ledger
        for number, why in decision.dropped.items():
            link = self.links[number]
            self.nodes[number] = self.nodes[number].lose(Loss(why, sim.now))
            link.reset()
        for name, fields in decision.events:
            sim.say(f"[{self.machine.number}] {name} {fields}")
        if self.ledger.worlds and self.ledger.round != before:
            self.check_round()
        if self.ledger.stage is Stage.RESIGN:
            sim.say(f"coordinator {self.machine.number} resigns")
            agent = self.agent
            end = self.ledger.end
            agent.coordinator, agent.resigned = None, end.failure if end is not None else None
            self.machine.disk["ledger"] = (self.ledger, self.machine.number)
            self.die()
            if agent.link is not None:
                agent.link.up = True
                agent.lost_coordinator("it resigned", agent.link)
            return
        if self.ledger.stage is Stage.END:
            self.give_verdict()
            return
        self.send_orders()
        if decision.due < float("inf"):
            self.plan(max(decision.due - sim.now, 0.001))

    def check_round(self) -> None:
        """Check that a new round begins with its nodes."""
        sim, nodes = self.sim, self.ledger.nodes
        for number in nodes:
            node = self.nodes[number]
            if not node.here or not node.state.idle:
                raise Violation(f"round starts without node {number}")
        if len(nodes) < min(sim.options.min_nodes or 1, len(sim.machines)):
            raise Violation("too few nodes")
        sim.say(f"coordinator {self.machine.number} starts round on {nodes}")

    def send_orders(self) -> None:
        heirs = [number for number in sorted(self.nodes) if self.nodes[number].here]
        heirs.sort(key=lambda n: (n <= self.machine.number, n == self.machine.number, n))
        for number, order in core.orders(self.job, self.ledger, self.nodes):
            link = self.links[number]
            if link.order != order:
                link.order = order
                if self.ledger.stage is Stage.RUN:
                    note = (self.ledger, self.machine.number, heirs)
                    self.deliver_note(link, note)
                link.to_agent(order)

    def deliver_note(self, link: Link, note: Any) -> None:
        """A start carries the ledger; it arrives with the next order."""
        ledger, node, heirs = note
        agent = link.agent
        ledger = Ledger(**vars(lasting_of(ledger)))

        def keep() -> None:
            agent.machine.disk["heirs"] = heirs
            agent.machine.disk["ledger"] = (ledger, node)

        if agent.machine is self.machine or self.sim.reaches(
            self.machine.number, agent.machine.number
        ):
            keep()

    def give_verdict(self) -> None:
        end = self.ledger.end
        verdict = replace(end, restarts=self.ledger.restarts, attempts=self.ledger.rounds)
        sim = self.sim
        sim.say(f"verdict of {self.machine.number}: {end.state.value} {end.reason}")
        sim.verdicts.append((self.birth, verdict))
        sim.check_success(self.ledger, verdict)
        sim.shared_result = self.machine.disk["verdict"] = verdict
        for number, node in self.nodes.items():
            if node.here and number != self.machine.number:  # its agent ends last, in `leave`
                self.links[number].to_agent(End(state=verdict.state))
        self.dead = True
        sim.after(3.0, lambda: self.leave(verdict))

    def leave(self, verdict: Verdict) -> None:
        """Close all connections after the verdict was sent."""
        for number, link in self.links.items():
            if link.up and number != self.machine.number:
                link.reset()
        if self.agent.coordinator is self and not self.agent.dead:
            self.agent.coordinator = None
            self.agent.end(verdict.state)


def lasting_of(ledger: Ledger) -> Lasting:
    return Lasting(**{name: getattr(ledger, name) for name in vars(Lasting())})


# Broken rules of the decisions: a method of `_Step` or a function of `policy`, and what it does
# instead.
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "any part of a split job goes on": ("has_majority", lambda step: True),
    "no wait for workers of lost nodes": ("may_train", lambda step: 0.0),
    "a round begins on busy nodes": (
        "usable",
        lambda step: [n for n, node in step.view.nodes.items() if node.here],
    ),
    "a round ends without its lost nodes": ("_is_gone", lambda step, node: False),
    "the end of a round is not waited for": ("stop", lambda step: step.end_round()),
    "each restart is free": (
        "decide",
        lambda failure, options, *_: _RESTART(failure, replace(options, max_restarts=9), (), 0, 1),
    ),
    "the last failure is the cause": ("_why_end", _blame_last),
    "the first rank that ends is the end of the job": ("run", _end_with_first),
    "the round is recorded again": ("note_changes", _record_again),
    "the coordinator blames node 0": (
        "loss_of",
        lambda step, node: Failure.of_node(0, "host0", message="lost"),
    ),
}


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    """Break one rule of the decisions."""
    method, replacement = MUTANTS[name]
    owner: Any = core._Step if hasattr(core._Step, method) else policy
    original, stages = getattr(owner, method), dict(core._STAGES)
    setattr(owner, method, replacement)
    core._STAGES.update({stage: replacement for stage, each in stages.items() if each is original})
    try:
        yield
    finally:
        setattr(owner, method, original)
        core._STAGES.update(stages)


def simulate(seed: int) -> Simulation:
    """Run one seed; raise `Violation` with the seed if an invariant does not hold."""
    sim = Simulation(seed)
    try:
        sim.run()
    except Violation as error:
        raise Violation(f"seed {seed} ({sim.describe}): {error}") from error
    return sim


def catch(name: str, seeds: Iterable[int]) -> int | None:
    """Return the first of the seeds whose invariants show a mutant; None if no seed does."""
    with mutant(name):
        for seed in seeds:
            try:
                Simulation(seed).run()
            except (Violation, AssertionError, KeyError, RecursionError):
                return seed
    return None


def main() -> None:
    """Run seeds, or look for the mutants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int, help="the first seed; with --mutants the number")
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--log", action="store_true", help="print what happens")
    parser.add_argument("--mutants", action="store_true", help="break each rule in turn")
    given = parser.parse_args()
    if given.mutants:
        for name in MUTANTS:
            print(f"{name}: seed {catch(name, range(given.first))}")
        return
    states: Counter[str] = Counter()
    bad = 0
    for seed in range(given.first, given.first + given.count):
        sim = Simulation(seed)
        try:
            sim.run()
        except Violation as error:
            bad += 1
            print(f"seed {seed} ({sim.describe}): {error}")
        states[sim.verdicts[-1][1].state.value if sim.verdicts else "none"] += 1
        if given.log:
            print("\n".join(sim.log))
    print(dict(states), f"{bad} violations")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
