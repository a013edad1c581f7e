"""Node 0's part: calls the roll, starts each round of workers, hears of the first failure, stops
all, gives the verdict.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.environments import paddle_endpoints
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import EventLog, now
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import missing_ranks, ports
from clusterjob.node.rendezvous.failure_poll import Check
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Gathering, Peer
from clusterjob.node.rendezvous.preemption import Notice
from clusterjob.node.rendezvous.protocol import Message
from clusterjob.node.rendezvous.root_cause import Judge
from clusterjob.node.rendezvous.stragglers import Stragglers
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import (
    CANCELLED_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    Failure,
    JobState,
    Verdict,
)

_MOST_CONSEQUENCES = 256  # failures after the first that a verdict lists
_LONGEST_MESSAGE = 200  # characters of each
_FAILURE_GRACE = (
    0.5  # between SIGTERM and SIGKILL once a worker has failed: its peers have nothing left to save
)
_WAITING_NOTICE = 5.0  # between two lines that say who is missing
_MOST_SHOWN = 8  # workers of a node that still run whose stacks are shown
_STOP_PATIENCE = 5.0  # beyond the grace, for an agent that does not answer the order to stop
_ROLL_CALL_LOOK = 0.25  # between two looks for a node that said it cannot start


@dataclass(frozen=True)
class Outcome:
    """How a round ended: exactly one of success (all None), a failure, or a reason to stop."""

    state: JobState
    exit_code: int = 0
    reason: str = ""
    failure: Failure | None = None
    signal: int = signal.SIGTERM  # that asks the workers to end


class Lead:
    """The coordinator of a job.

    Args:
        topology: node 0's place.
        options: what the nodes were told.
        job: the job's identity and secret.
        job_dir: where events and the verdict are written.
        say: shows one line to whoever watches this node.
        watch: hears of the error with which a task ends that nobody waits for.

    Attributes:
        gathering: the agents that have come; node 0's own joins it too.
    """

    def __init__(
        self,
        topology: Topology,
        options: LaunchOptions,
        job: JobIdentity,
        job_dir: Path,
        say: Callable[[str], None],
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._topology = topology
        self._options = options
        self._job = job
        self._job_dir = job_dir
        self._say = say
        self._watch = watch
        self._events = EventLog(job_dir / "events.jsonl")
        self.gathering = Gathering(topology.nnodes, options, job=job, events=self._events)
        self._inbox = self.gathering.inbox
        self._peers = self.gathering.peers
        self._started_at: str | None = None
        self._deadline = float("inf")
        self._clock_runs = False  # of the time limit
        self._unstarted: set[int] = set()  # nodes whose workers have not begun, in this round
        self._undone: set[int] = set()  # ... whose workers have not all ended
        self._unstopped: set[int] = (
            set()
        )  # ... that have not said that nothing of this round runs any more
        self._restarts = 0
        self._judge = Judge()
        self._check = Check(0, self._judge, gathering=self.gathering, options=options)
        self._notice = Notice(options.warning, options.grace)
        self._search = missing_ranks.Search()
        self._stragglers = Stragglers()

    # -- the story -----------------------------------------------------------------------------------------------------

    async def lead(self) -> Verdict:
        """Run the job from the roll-call to the verdict, which is on disk and with every agent when
        this returns.

        Raises:
            GangError: node 0 cannot listen.
        """
        await self.gathering.open(
            ports.listen(
                self._topology.master_addr, self._job.ports, alone=self._topology.nnodes == 1
            ),
            self._topology.master_addr,
        )
        for task in self.gathering.tasks:
            self._watch(task)
        if self._job.attempt:
            self._say(f"attempt {self._job.attempt}: the job was queued again")
        try:
            outcome = await self._roll_call()
            while outcome is None:
                self._start_round()
                outcome = await self._round()
                cancelled = await self._stop_round(outcome)
                if self._may_restart(outcome):
                    self._note_restart(outcome)
                    outcome = cancelled
            return self._give_verdict(outcome)
        except Exception as error:  # the others hear of it at once, and not by their leases
            self.give_up(
                Verdict(
                    JobState.FAILED,
                    1,
                    reason=f"node 0 broke: {type(error).__name__}: {error}",
                    attempt=self._job.attempt,
                    ended_at=now(),
                )
            )
            raise
        finally:
            await self.gathering.close()

    def give_up(self, verdict: Verdict) -> None:
        """End the job at the other nodes; node 0's own agent has come to a verdict itself.

        Args:
            verdict: what the others are told.
        """
        self.gathering.tell_all({"t": "end", "verdict": verdict.to_json()})

    def _note_restart(self, outcome: Outcome) -> None:
        self._restarts += 1
        self._say(f"restart {self._restarts} of {self._options.max_restarts}: {outcome.reason}")
        self._events.add("restart", restart=self._restarts, why=outcome.reason)

    def _may_restart(self, outcome: Outcome) -> bool:
        """A worker that failed may be started again; a node that is gone, or a launcher that is
        broken, may not.
        """
        worker_failed = outcome.failure is not None and (
            outcome.failure.rank is not None or self._options.launcher == "torchrun"
        )
        nobody_lost = not any(peer.lost for peer in self._peers.values())
        return worker_failed and nobody_lost and self._restarts < self._options.max_restarts

    # -- the roll-call ------------------------------------------------------------------------------------------------------

    async def _roll_call(self) -> Outcome | None:
        """Wait until every node's agent is here; an outcome instead if the job cannot begin."""
        begin = told = looked = time.monotonic()
        while len(self._peers) < self._topology.nnodes:
            message = await self._next_message(looked + _ROLL_CALL_LOOK - time.monotonic())
            outcome = self._decisive(*message) if message is not None else None
            if outcome is not None or self.gathering.refusals:
                return self._refused_nodes() or outcome
            if time.monotonic() - looked < _ROLL_CALL_LOOK:
                continue
            looked = time.monotonic()
            outcome = self._refused_nodes() or self._still_missing(begin, told)
            if outcome is not None:
                return outcome
            told = looked if looked - told > _WAITING_NOTICE else told
        outcome = (
            self._hear_waiting()
        )  # no worker starts in a job that was cancelled when the last agent came
        if outcome is None and self._notice.why:
            return self._preempted("before its workers had started")
        return outcome

    def _refused_nodes(self) -> Outcome | None:
        """A node whose script could not even start the agent says so in a file, where the directory
        is shared.
        """
        refused = self.gathering.refusals or ends.refusals(self._job_dir, self._job.attempt)
        return self._failed(refused[0]) if refused else None

    def _still_missing(self, begin: float, told: float) -> Outcome | None:
        """Return the outcome once nodes cannot be waited for any longer; until then, say every few
        seconds which are missing.
        """
        waited = time.monotonic() - begin
        if time.monotonic() > self._notice.due:
            return self._preempted("before its workers had started")
        if waited <= self._options.join_timeout and time.monotonic() - told <= _WAITING_NOTICE:
            return None
        missing = [rank for rank in range(self._topology.nnodes) if rank not in self._peers]
        names = "node " + ", ".join(map(str, missing))
        if waited > self._options.join_timeout:
            text = f"{names} of {self._topology.nnodes} never joined within {self._options.join_timeout:g} s"
            return self._failed(
                Failure(
                    None,
                    None,
                    node_rank=missing[0],
                    host="unknown",
                    exit_code=1,
                    signal=None,
                    message=f"{text}: never heard of",
                )
            )
        self._say(f"waiting for {names} of {self._topology.nnodes}, {waited:.0f} s so far")
        self._events.add("waiting", missing=missing, seconds=round(waited, 1))
        return None

    async def _next_message(self, patience: float) -> tuple[int, Message] | None:
        """Return the next message of an agent and its node_rank; None after so many seconds
        (patience) without one.
        """
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        try:
            return await asyncio.wait_for(self._inbox.get(), max(0.0, patience))
        except asyncio.TimeoutError:
            return None

    def _hear_waiting(self) -> Outcome | None:
        """Take in the messages that have come in, up to the first that ends the round; return its
        outcome.
        """
        while not self._inbox.empty():
            outcome = self._decisive(*self._inbox.get_nowait())
            if outcome is not None:
                return outcome
        return None

    # -- one round -----------------------------------------------------------------------------------------------------

    def _start_round(self) -> None:
        self._judge = Judge()
        self._check = Check(
            self._restarts, self._judge, gathering=self.gathering, options=self._options
        )
        self._notice.begin_round()
        self._unstarted, self._undone, self._unstopped = (
            set(self._peers),
            set(self._peers),
            set(self._peers),
        )
        peers = [self._peers[rank] for rank in sorted(self._peers)]
        serve = self._options.launcher == "agent" and self._job.has_torch
        candidates = (
            [0]
            if serve
            else ports.of_workers(self._job.job_id, self._job.attempt, restart=self._restarts)
        )
        store = ports.listen(
            self._topology.master_addr, candidates, alone=self._topology.nnodes == 1
        )
        port = int(store.getsockname()[1])
        world_size = sum(peer.nproc for peer in peers)
        if not serve:
            store.close()  # rank 0, or torchrun's own agent, binds the port itself
        first_ranks = [0, *accumulate(peer.nproc for peer in peers)]
        self._search = missing_ranks.Search(first_ranks[:-1], world_size)
        self._stragglers = Stragglers(first_ranks[:-1], world_size)
        held = all(len(peer.endpoints) >= peer.nproc + (peer.node_rank == 0) for peer in peers)
        wanted = held and any(
            peer.wants_endpoints for peer in peers
        )  # a list as long as the job, once for each node
        endpoints = (
            paddle_endpoints.listed(
                [each for peer in peers for each in peer.endpoints[: peer.nproc]]
            )
            if wanted
            else ""
        )
        for peer, first_rank in zip(peers, first_ranks, strict=False):
            world = World(
                self._restarts,
                self._topology.master_addr,
                master_port=port,
                agent_store=serve,
                node_rank=peer.node_rank,
                nnodes=len(peers),
                nproc=peer.nproc,
                first_rank=first_rank,
                world_size=world_size,
                paddle_master=peers[0].endpoints[-1] if held else "",
                endpoints=endpoints if peer.wants_endpoints else "",
                own_endpoints=",".join(peer.endpoints[: peer.nproc]),
            )
            peer.send(
                {"t": "start", "world": asdict(world)}
                | ({"store": store} if serve and peer.node_rank == 0 else {})
            )
        at = self._events.add(
            "started",
            attempt=self._job.attempt,
            restart=self._restarts,
            world_size=world_size,
            master_port=port,
        )
        if self._started_at is None:
            self._started_at = at
            if (
                self._options.time_limit is not None
            ):  # counts from when all workers run; an import that hangs does not put it off for ever
                self._deadline = (
                    time.monotonic() + self._options.join_timeout + self._options.time_limit
                )

    async def _round(self) -> Outcome:
        """Wait until all workers have ended, or one has failed, or someone wants an end."""
        while self._undone or self._notice.suspicion_due < float("inf") or self._is_unexplained():
            due = min(
                self._judge.stop_due(),
                self._notice.suspicion_due,
                self._notice.due,
                self._deadline,
                self._stragglers.due,
            )
            outcome = None
            if due > time.monotonic():
                message = await self._next_message(min(due - time.monotonic(), 3600.0))
                if (
                    message is not None
                ):  # and all that came in with it, before the failures are ranked again
                    outcome = self._decisive(*message) or self._hear_waiting()
            else:
                outcome = self._overdue()
            if outcome is not None:
                return outcome
        root = self._root()
        if root is not None:
            return self._failed(root)
        return (
            self._preempted("its workers left to be queued again")
            if self._notice.left
            else Outcome(JobState.SUCCEEDED)
        )

    def _is_unexplained(self) -> bool:
        """Return whether workers have failed of a lost peer alone, so that all nodes are to be
        asked for the cause.
        """
        root = self._root()
        return root is not None and root.effect

    def _overdue(self) -> Outcome | None:
        """Return the outcome now that something cannot be waited for any longer; None if it can,
        after all.
        """
        moment = time.monotonic()
        if self._stragglers.due <= moment:
            self._name_stragglers()
        self._notice.give_up(self._judge, moment)
        root = self._root()
        if (
            root is not None
            and self._judge.stop_due() <= moment
            and (not root.effect or self._check.is_over(moment))
        ):
            return self._failed(root)
        if self._notice.due <= moment:
            return self._preempted(
                f"its workers still ran {self._notice.seconds:g} s later and were stopped"
            )
        if self._deadline <= moment:
            return self._failed(root) if root is not None else self._out_of_time()
        return None

    def _root(self) -> Failure | None:
        """Return the first failure; one that only tells of a peer that has left on purpose is none."""
        if self._notice.left:
            self._judge.pardon_effects()
        return self._judge.root()

    def _decisive(self, node_rank: int, message: Message) -> Outcome | None:
        """Take in one message; return an outcome if it ends the round at once."""
        peer = self._peers[node_rank]
        kind = message["t"]
        if kind == "failing":
            failure, at = (
                Failure.from_json(message["failure"]),
                time.monotonic() - float(message["age"]),
            )
            if not self._notice.takes(failure, at, exited=message["exited"]):
                self._judge.hear(failure, at, exited=message["exited"])
                self._search.note(failure)
                self._blame_the_missing()
        elif kind == "missing" and message["restart"] == self._restarts:
            self._search_for(node_rank, message)
        elif kind == "where" and message["restart"] == self._restarts:
            self._hear_where(node_rank, message)
        elif kind in ("succeeded", "running", "done", "stopped"):
            if self._started_at is not None:  # before the first round no agent has workers
                self._note_progress(kind, peer, message=message)
        elif kind == "checked" and message["restart"] == self._restarts:
            self._check.answer(node_rank, message)
        elif kind == "exec":
            self._events.add("exec", node_rank=node_rank, why=message["why"])
        elif kind in ("cancel", "interrupt"):
            number = signal.SIGINT if kind == "interrupt" else signal.SIGTERM
            return Outcome(
                JobState.CANCELLED,
                CANCELLED_EXIT_CODE,
                reason=sanitize(message["why"]),
                signal=number,
            )
        elif kind == "warned":
            self._warn(sanitize(message["why"]))
        elif kind in ("lost", "gave_up") and not peer.lost:
            return self._lose(peer, message)
        return None

    def _name_stragglers(self) -> None:
        """Have workers that still run named, with their stacks, in their own logs: whoever follows
        the job sees them.
        """
        text, by_node = self._stragglers.name()
        self._events.add("stragglers", text=text)
        for node_rank, ranks in by_node.items():
            self._peers[node_rank].send(
                {"t": "where", "ranks": ranks[:_MOST_SHOWN], "final": False, "note": text}
            )

    def _note_progress(self, kind: str, peer: Peer, message: Message) -> None:
        """Note that one of a node's workers has ended with 0, or that all have begun, have ended,
        or do not run any more.
        """
        if kind == "succeeded":
            if message["local_rank"] < peer.nproc:
                self._stragglers.ended(peer.node_rank, message["local_rank"])
            return
        {"running": self._unstarted, "done": self._undone, "stopped": self._unstopped}[
            kind
        ].discard(peer.node_rank)
        if not self._unstarted and not self._clock_runs:
            self._clock_runs = True
            self._events.add("running", restart=self._restarts)
            if (
                self._options.time_limit is not None
            ):  # of which no second is spent on importing torch
                self._deadline = time.monotonic() + self._options.time_limit

    def _lose(self, peer: Peer, message: Message) -> Outcome:
        """End the round because of a node that is gone, or that has given up node 0."""
        peer.lost = True
        self._unstopped.discard(peer.node_rank)
        self._events.add("lost", node_rank=peer.node_rank, host=peer.host, why=message["why"])
        agent, why = f"the agent on {peer.host} (pid {peer.pid})", message["why"]
        failure = Failure(
            None,
            None,
            node_rank=peer.node_rank,
            host=peer.host,
            exit_code=1,
            signal=None,
            message=f"{agent} was lost: {why}",
        )
        if message["t"] == "gave_up":
            failure = replace(
                failure, message=f"{agent} gave node 0 up, which still hears it: {sanitize(why)}"
            )
            stalled = self.gathering.stalls.recent(self._options.lease)
            if stalled:
                own = self._peers[0]
                text = f"the agent on {own.host} (pid {own.pid}) did not run for {stalled:.0f} s (stopped, suspended or without a CPU)"
                failure = Failure(
                    None,
                    None,
                    node_rank=0,
                    host=own.host,
                    exit_code=1,
                    signal=None,
                    message=f"{text}, and node {peer.node_rank} gave it up",
                )
        if self._notice.why and self._root() is None:
            return self._preempted(failure.message)  # whoever warned has taken the node
        self._judge.hear(failure, time.monotonic(), exited=True)
        return self._failed(self._judge.root() or failure)

    def _search_for(self, node_rank: int, message: Message) -> None:
        """Ask the agents what has become of workers for which another one waits."""
        questions = self._search.ask(node_rank, message)
        if message["final"] and questions:
            self._judge.await_cause(time.monotonic() + missing_ranks.PATIENCE, "missing")
        for asked, ranks in questions.items():
            self._peers[asked].send({"t": "where", "ranks": ranks, "final": message["final"]})

    def _hear_where(self, node_rank: int, message: Message) -> None:
        self._events.add("missing", node_rank=node_rank, workers=message["lines"])
        told = self._search.answer(node_rank, message)
        if told is not None:
            self._peers[told[0]].send(told[1])
        if message["final"] and self._search.answered:
            self._judge.await_cause(0.0, "missing")
        self._blame_the_missing()

    def _blame_the_missing(self) -> None:
        for failure in self._search.causes():
            self._judge.hear(failure, time.monotonic(), exited=True)

    def _warn(self, why: str) -> None:
        if not self._notice.begin(why, time.monotonic()):
            return
        self._say(f"warned: {why}: the workers have {self._notice.seconds:g} s to leave")
        self._events.add("warned", attempt=self._job.attempt, why=why, seconds=self._notice.seconds)
        self.gathering.tell_all({"t": "warn"})

    async def _stop_round(self, outcome: Outcome) -> Outcome | None:
        """Have every agent stop what still runs, and wait for their word; return the wish to cancel
        if one came meanwhile.
        """
        cancelled = None
        self._notice.end_round(self._judge)
        self._judge.stopped(time.monotonic())
        grace = (
            0.0
            if outcome.state is JobState.SUCCEEDED
            else _FAILURE_GRACE
            if outcome.failure
            else self._options.grace
        )
        self.gathering.tell_all({"t": "stop", "grace": grace, "signal": int(outcome.signal)})
        deadline, stalled = time.monotonic() + grace + _STOP_PATIENCE, self.gathering.stalls.total
        while self._unstopped:
            message = await self._next_message(deadline - time.monotonic())
            if message is not None:
                if message[1]["t"] == "at_once":
                    self.gathering.tell_all({"t": "stop", "grace": 0.0})
                wish = self._decisive(*message)
                cancelled = (
                    wish if wish is not None and wish.state is JobState.CANCELLED else cancelled
                )
                continue
            self.gathering.stalls.tick()
            if self.gathering.stalls.total > stalled:  # it was this process that did not run
                deadline, stalled = (
                    time.monotonic() + grace + _STOP_PATIENCE,
                    self.gathering.stalls.total,
                )
                continue
            for peer in map(self._peers.__getitem__, sorted(self._unstopped)):
                peer.lost = True
                self._say(f"node {peer.node_rank} on {peer.host} does not answer the order to stop")
            self._unstopped.clear()
        return cancelled

    # -- the end -------------------------------------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> Outcome:
        return Outcome(
            JobState.FAILED,
            failure.exit_code or 1,
            reason=f"{failure.who}: {failure.message}",
            failure=failure,
        )

    def _preempted(self, how: str) -> Outcome:
        return Outcome(JobState.PREEMPTED, PREEMPTED_EXIT_CODE, reason=f"{self._notice.why}: {how}")

    def _out_of_time(self) -> Outcome:
        return Outcome(
            JobState.FAILED,
            TIMEOUT_EXIT_CODE,
            reason=f"the time limit of {self._options.time_limit:g} s was reached",
        )

    def _give_verdict(self, outcome: Outcome) -> Verdict:
        if outcome.failure is not None and outcome.failure.rank is not None:
            root = (
                self._judge.root() or outcome.failure
            )  # what came in while stopping may be older, or know more
            outcome = self._failed(root)
        # Each has its own log; all that a thousand ranks have to say would not fit into a message
        # between agents.
        others = [item for item in self._judge.consequences() if item != outcome.failure][
            :_MOST_CONSEQUENCES
        ]
        consequences = tuple(
            replace(item, last_lines=(), message=item.message[:_LONGEST_MESSAGE]) for item in others
        )
        verdict = Verdict(
            outcome.state, outcome.exit_code, reason=outcome.reason, failure=outcome.failure,
            consequences=consequences if outcome.failure else (), restarts=self._restarts, attempt=self._job.attempt,
            started_at=self._started_at, ended_at=now(),
        )  # fmt: skip
        try:
            ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._say(f"the verdict cannot be written to {self._job_dir}: {error.strerror}")
            verdict = replace(
                verdict, reason=f"{verdict.reason} (not recorded: {error.strerror})".strip()
            )
        self._events.add(
            "ended", state=str(verdict.state), exit_code=verdict.exit_code, reason=verdict.reason
        )
        self.gathering.tell_all({"t": "end", "verdict": verdict.to_json()})
        return verdict
