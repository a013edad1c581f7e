"""The coordinator: receive the states of all nodes, decide, send orders, record events."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterjob.errors import RendezvousError
from clusterjob.node import decide as core
from clusterjob.node.contract import World
from clusterjob.node.decide import Decision, Job, Ledger, Loss, Node, Stage, View
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.environments.topology import Topology, candidate_ports
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import EventLog, ended_rounds, now
from clusterjob.node.logs.job_dir import COORDINATOR, EVENTS, moved_events
from clusterjob.node.metrics.stragglers import StragglerWatch, Wait
from clusterjob.node.rendezvous import membership, messages, policy, succession
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.messages import CoordinatorState, Lasting, Succession
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.states import Measure, NodeState
from clusterjob.node.system import files, network, processes
from clusterjob.node.system.codec import plain
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import PREEMPTED_EXIT_CODE, Failure, JobState, Verdict, bounded

if TYPE_CHECKING:
    from clusterjob.node.notifications import Notifier

_MOST_NAMED = 8  # hosts that the preflight has found slow
_MAX_CONSEQUENCES = 256  # failures that a verdict lists besides the root cause
_MAX_MESSAGE = 200  # characters of the message of such a failure
_MOST_ROUNDS = 100  # of many rounds, the latest go to the nodes that may coordinate
_NO_LIMIT = 1e8  # seconds; JSON has no infinity


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


class MinorityError(RendezvousError):
    """More than half of the nodes of a job may run without this coordinator.

    Attributes:
        failure: why its round has ended.
    """

    def __init__(self, failure: Failure | None) -> None:
        super().__init__("the other nodes may still run without this one")
        self.failure = failure


class Coordinator:
    """The coordinator of a job.

    Args:
        node: the job, as the coordinator's node sees it.
        watch: reports the error of a background task.
        notifier: sends notifications.
        earlier: the coordinator whose place this one takes; None at the start of a job.

    Attributes:
        membership: the agents that have joined, the one of this node included.
        store: the socket of torch's store, of the preflight or of the newest round; this node's
            agent takes it.
        measured: what the measuring process of this node has found, as the agent says.
    """

    def __init__(
        self,
        node: NodeJob,
        watch: Callable[[asyncio.Task[None]], None],
        notifier: Notifier,
        earlier: Earlier | None = None,
    ) -> None:
        topology, options, identity = node.topology, node.options, node.identity
        self._node = node
        self._topology = topology
        self._identity = identity
        self._job_dir = node.directory
        self._watch = watch
        self._notifier = notifier
        self._earlier = earlier
        self._moves, self._shift = 0, 0.0  # to the clock of the job's events
        if earlier is not None:
            self._moves = earlier.state.moves + earlier.moved
            self._shift = earlier.state.clock - earlier.received_at
        name = moved_events(self._moves, topology.node_rank) if self._moves else EVENTS
        self._events = EventLog(self._job_dir / name, self._shift)
        self.membership = Membership(node, self._events)
        self._peers = self.membership.peers
        self._job = Job(
            options,
            nnodes=topology.nnodes,
            own=topology.node_rank,
            attempt=identity.attempt,
            serves_store=options.launcher == "agent" and identity.has_torch,
            # Not from an address that the platform has fixed.
            moves=options.restarts
            and topology.nnodes > 1
            and topology.source in succession.FREE_ADDRESSES,
        )
        self._nodes: dict[int, Node] = {}
        self._ledger = Ledger(since=time.monotonic())
        self.store: socket.socket | None = None
        self._stacks: dict[int, RankStack] = {}  # that were collected in the newest round, by rank
        self._stragglers: StragglerWatch | None = None
        self._saving: asyncio.Future[str] | None = None  # of these stacks: the path of the file
        self._kept: tuple[Any, ...] = ()  # what the successors know
        self._began = time.monotonic()
        self._begun = policy.begin_attempt(options, self._job_dir, identity.attempt)
        self.measured: dict[str, Any] = {}
        self._due = 0.0  # when to decide if nothing changes
        self._earliest = 0.0  # when to decide after a change

    # -- the job -----------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run the job; return the verdict after it is on disk and was sent to every agent.

        Raises:
            RendezvousError: node 0 cannot listen.
            MinorityError: more than half of the nodes may run without this coordinator.
        """
        identity = self._identity
        listener = membership.listen(
            self._topology.master_addr, identity.ports, alone=self._topology.nnodes == 1
        )
        await self.membership.open(listener, self._topology.master_addr)
        for task in self.membership.tasks:
            self._watch(task)
        if identity.attempt and self._earlier is None:
            self._node.print_line(f"attempt {identity.attempt}: the job was queued again")
        try:
            self._begin()
            while self._ledger.stage is not Stage.END:
                await self._step()
            return await self._give_verdict()
        except MinorityError:
            raise  # the agents look for another coordinator
        except Exception as error:  # otherwise the other agents wait until their leases end
            why = f"node 0 failed: {type(error).__name__}: {error}"
            verdict = Verdict(
                JobState.FAILED, 1, reason=why, attempt=identity.attempt, ended_at=now()
            )
            self.membership.broadcast(messages.End(verdict))
            raise
        finally:
            await self.membership.close()

    def _begin(self) -> None:
        """Go on with the ledger of an earlier coordinator, or of earlier attempts."""
        if self._earlier is None:
            earlier = ended_rounds(self._job_dir, running=False) if self._identity.attempt else ()
            self._ledger = replace(self._ledger, rounds=tuple(earlier))
            return
        earlier_, state = self._earlier, self._earlier.state
        if earlier_.moved:
            self._node.print_line(f"node {self._job.own} coordinates the job now: {earlier_.why}")
        moment = time.monotonic()
        loss = Loss(earlier_.why, moment, ended=earlier_.ended)
        self._nodes[state.node] = Node(state.node, state.host, pid=0, nproc=1).lose(loss)
        lost = earlier_.failure or Failure.of_node(state.node, state.host, message=earlier_.why)
        deadline = earlier_.received_at + state.lasting.deadline
        lasting = replace(state.lasting, deadline=deadline)
        self._ledger = core.take_over(self._job, lasting, lost, moment)

    @property
    def heard_at(self) -> float:
        """The monotonic time at which the lease of this node's workers begins."""
        return core.heard_at(
            self._job,
            self._ledger,
            {node: peer.heard_at for node, peer in self._peers.items()},
            time.monotonic(),
        )

    async def _step(self) -> None:
        """Wait for a change or for the time of the next decision; decide."""
        inbox, moment, at = self.membership.inbox, time.monotonic(), self._due
        while not inbox.empty() or moment < at:
            changed = False
            if not inbox.empty():
                changed = self._receive(*inbox.get_nowait())
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    found = await asyncio.wait_for(inbox.get(), min(at - moment, 3600.0))
                    changed = self._receive(*found)
            if changed:
                at = min(at, self._earliest)
            moment = time.monotonic()
        view = self._view()
        decision = core.decide(self._job, self._ledger, view, moment)
        self._apply(decision, view)
        # With thousands of nodes, decisions take at most a fifth of the time, unless a stop waits.
        pause = 1 if self._ledger.stage is Stage.COLLECT else 5
        self._earliest = moment + pause * (time.monotonic() - moment)
        if self._ledger.stage is Stage.RESIGN:
            end = self._ledger.end
            raise MinorityError(end.failure if end is not None else None)

    def _view(self) -> View:
        ledger, options, waits = self._ledger, self._job.options, self._ledger.stage is Stage.WAIT
        found = ends.refusals(self._job_dir, self._identity.attempt) if waits else []
        refused = next(iter(found), None)
        if waits and ledger.round < 0:  # later, who may not join is nobody that the job waits for
            refused = self.membership.refusal or refused
        ended: frozenset[int] = frozenset()
        nodes = [self._nodes[node] for node in ledger.nodes if node in self._nodes]
        if waits and not all(node.here for node in nodes):
            written = ends.written(self._job_dir, self._identity.attempt)
            ended = frozenset(end["node_rank"] for end in written)
        return View(
            self._nodes,
            time=now(),
            refused=refused,
            ended=ended,
            # Until the silence of nodes that have left meanwhile is noticed.
            stalled=self.membership.stalls.recent(options.lease + 2 * options.heartbeat),
            stacks=[self._stacks[rank] for rank in sorted(self._stacks)],
            slow={int(node): why for node, why in self.measured.get("slow", {}).items()},
        )

    # -- what follows from a decision --------------------------------------------------------------

    def _apply(self, decision: Decision, view: View) -> None:
        before, self._ledger = self._ledger, decision.ledger
        self._due = decision.due
        for line in decision.lines:
            self._node.print_line(line)
        for name, fields in decision.events:
            # The verdict has the same times.
            self._events.add(name, **({"time": view.time} | fields))
            self._notify(name, fields, before)
            if name == "avoid":
                ends.avoid(self._job_dir, fields["host"])
        for node, why in decision.dropped.items():
            self._lose(self._peers[node], why)
        if self._ledger.worlds and self._ledger.round != before.round:
            self._begin_round()
        if self._ledger.measure is not None and before.measure is None:
            self._begin_measuring(self._ledger.measure)
        if self._ledger.slow is not None and before.slow is None:
            self._report_preflight(self._ledger.slow)
        self._send_orders()
        stopped = self._ledger.stage is Stage.STOP and before.stage is Stage.COLLECT
        if stopped and self._stacks:
            # After the orders: the stacks of thousands of ranks take a second.
            self._saving = asyncio.get_running_loop().run_in_executor(
                files.disk,
                self._save_stacks,
                self._ledger,
                replace(view, nodes=dict(view.nodes)),  # of this moment
            )
        self._keep_state()

    def _notify(self, name: str, fields: dict[str, Any], before: Ledger) -> None:
        if name == "restart":
            number, most, failure = fields["restart"], fields["most"], before.ending.failure
            self._notifier.restarts(number, most, fields["why"], failure=failure)
        elif name == "started" and self._ledger.round == 0:
            self._notifier.started(len(fields["nodes"]), fields["world_size"])

    def _send_orders(self) -> None:
        for node, order in core.orders(self._job, self._ledger, self._nodes):
            peer = self._peers[node]
            if peer.order is not order and peer.order != order:
                peer.order = order
                peer.send(order)

    # -- the begin of a round ----------------------------------------------------------------------

    def _begin_round(self) -> None:
        """Bind the port of the store, and tell it to each node."""
        ledger = self._ledger
        peers = {node: self._peers[node].hello for node in ledger.worlds}
        store_at = store_address(self._topology, self._peers.values())
        worlds, self.store = with_store(
            ledger.worlds, peers, self._topology, store_at, job=self._identity
        )
        self._ledger = replace(ledger, worlds=worlds)
        self._stacks, self._saving = {}, None
        self._stragglers = StragglerWatch(
            ledger.round, len(ledger.nodes), ledger.world_size, self._events
        )

    # -- the preflight -----------------------------------------------------------------------------

    def _begin_measuring(self, measure: Measure) -> None:
        address = store_address(self._topology, self._peers.values())
        self.store = membership.listen(address, [0], alone=self._topology.nnodes == 1)
        port = int(self.store.getsockname()[1])
        self._ledger = replace(self._ledger, measure=replace(measure, address=address, port=port))
        self._node.print_line(f"preflight: measuring {_count(len(measure.nodes))}")

    def _report_preflight(self, slow_nodes: Mapping[int, str]) -> None:
        """Print what the preflight has found, and write it into the events."""
        from clusterjob.node import preflight  # few jobs have one

        found: dict[str, Any] = {"seconds": 0.0, "findings": [], "columns": [], "rows": {}}
        found |= self.measured
        names = core.host_names(self._nodes)
        rows = [(names[int(node)], cells) for node, cells in found["rows"].items()]
        table = found["columns"], preflight.smallest_rows(rows, preflight.MAX_ROWS), len(rows)
        slow = core.slow_lines(slow_nodes, self._nodes)[:_MOST_NAMED]
        measured = f"{_count(len(rows))} in {found['seconds']} s"
        for line in (
            f"preflight: {measured}; cells are parts of the median",
            *preflight.table_lines(*table),
            *(f"preflight: {finding}" for finding in found["findings"]),
            *(f"preflight: slow {line}" for line in slow),
        ):
            self._node.print_line(line)
        self._events.add(
            "preflight",
            seconds=found["seconds"],
            slow=slow,
            findings=found["findings"],
            table=dict(zip(("columns", "rows", "hosts"), table, strict=True)),
        )

    # -- messages of the agents --------------------------------------------------------------------

    def _receive(self, peer: Peer, message: Any) -> bool:
        """Take a message; return whether it may change what follows."""
        node = peer.node_rank
        if self._peers[node] is not peer:
            return False  # of an agent that was replaced
        if isinstance(message, messages.Hello):
            self._join(peer)
        elif isinstance(message, messages.ConnectionLost):
            self._lose(peer, sanitize(message.why), ended=message.ended)
        elif isinstance(message, NodeState):
            if message.by_exec and not self._nodes[node].state.by_exec:
                self._events.add("exec", node_rank=node, why=message.by_exec)
            self._nodes[node] = self._nodes[node].receive(message, time.monotonic())
        elif isinstance(message, messages.RankWaits):
            waits = waits_of(message, self._ledger.worlds.get(node))
            if waits and self._stragglers is not None:
                self._stragglers.receive(node, peer.hello.host, waits)
            return False
        elif isinstance(message, messages.StackFound):
            world, rank = self._ledger.worlds.get(node), message.stack.rank
            wanted = self._ledger.stage is Stage.COLLECT and message.restart == self._ledger.round
            if wanted and world is not None and 0 <= rank - world.first_rank < world.nproc:
                self._stacks[rank] = replace(message.stack, host=peer.hello.host)
            return False
        return True

    def _join(self, peer: Peer) -> None:
        hello, moment = peer.hello, time.monotonic()
        before = self._nodes.get(peer.node_rank)
        self._nodes[peer.node_rank] = Node(
            peer.node_rank,
            hello.host,
            pid=hello.pid,
            nproc=hello.nproc,
            joined_at=moment,
            heard_at=moment,
            losses=before.losses if before is not None else (),
        )
        self._send_succession([peer])

    def _lose(self, peer: Peer, why: str, *, ended: bool = False) -> None:
        if not peer.lost:
            loss = Loss(why, time.monotonic(), ended=ended)
            self._nodes[peer.node_rank] = self._nodes[peer.node_rank].lose(loss)
            peer.lost = True

    # -- stacks ------------------------------------------------------------------------------------

    def _save_stacks(self, ledger: Ledger, view: View) -> str:
        """Write the stacks of a round that is stopped; return the path, empty without a file."""
        job, why, nodes = self._identity, ledger.ending.reason, view.nodes
        asked = [nodes[node] for node in sorted(ledger.collect_from)]
        name = f"stacks{log_files.round_suffix(job.attempt, ledger.round)}.txt"
        path = log_files.node_directory(self._job_dir, self._job.own) / name
        silent = [each for each in asked if not each.state.collected]
        try:
            grouping.write_evidence(
                path,
                job.job_id,
                view.stacks,
                why=why,
                silent=[f"node {each.node_rank} on {each.host}" for each in silent],
                dumps=[sanitize(dump) for each in asked for dump in each.state.dumps],
            )
        except OSError as error:
            self._events.add("evidence", why=why, error=error.strerror)
            return ""
        shown = str(path.relative_to(self._job_dir))
        self._events.add("evidence", why=why, path=shown, ranks=len(view.stacks))
        return shown

    # -- another coordinator -----------------------------------------------------------------------

    def _keep_state(self) -> None:
        """Keep the ledger for another coordinator when a round begins, and when it has changed."""
        ledger, restarts = self._ledger, self._job.options.restarts
        known = (ledger.round, ledger.groups, ledger.deadline)
        if not restarts or ledger.stage is not Stage.RUN or known == self._kept:
            return
        self._kept = known
        moment = time.monotonic()
        lasting = Lasting(**{name: getattr(ledger, name) for name in vars(Lasting())})
        self._state = CoordinatorState(
            self._identity.attempt,
            replace(
                lasting,
                rounds=ledger.rounds[-_MOST_ROUNDS:],
                deadline=min(max(0.0, ledger.deadline - moment), _NO_LIMIT),
            ),
            node=self._job.own,
            host=this_node.node_name(),
            moves=self._moves,
            addresses=tuple(at for _, at in succession.successors(self._peers, self._job.own)),
            boot=processes.boot_id(),
            clock=moment + self._shift,
            made_at=moment,
        )
        files.later(files.write_json, self._job_dir / COORDINATOR, plain(self._state))
        self._send_succession(self._peers.values())

    def _send_succession(self, peers: Iterable[Peer]) -> None:
        """Tell agents who may take the coordinator's place, and these its state."""
        if not self._job.moves or not self._kept:
            return
        order = succession.successors(self._peers, self._job.own)
        heirs = {node for node, _ in order}
        lasting = self._state.lasting
        brief = Succession(order, lasting.round + 1, lasting.groups[-1].coordinator)
        full = replace(brief, state=self._state)  # each is one message: it is encoded once for all
        for peer in peers:
            if not peer.lost:
                peer.send(full if peer.node_rank in heirs else brief)

    # -- the end -----------------------------------------------------------------------------------

    async def _give_verdict(self) -> Verdict:
        path = await self._saving if self._saving is not None else ""
        ledger, end = self._ledger, self._ledger.ending
        _, others = core.explain(self._job, ledger, self._view())
        verdict = replace(
            end,
            # Every worker has its own log; the messages of a thousand ranks do not fit into one
            # message between agents.
            consequences=tuple(
                replace(each, last_lines=(), message=each.message[:_MAX_MESSAGE])
                for each in others[: _MAX_CONSEQUENCES if end.failure is not None else 0]
                if each != end.failure
            ),
            restarts=ledger.restarts,
            attempt=self._identity.attempt,
            started_at=ledger.first_started,
            ended_at=now(),
            evidence=path,
            evidence_ranks=len(self._stacks) if path else 0,
            attempts=bounded(ledger.rounds),
        )
        loop = asyncio.get_running_loop()
        verdict = await loop.run_in_executor(files.disk, self._record_verdict, verdict)
        self._events.add(
            "ended", state=str(verdict.state), exit_code=verdict.exit_code, reason=verdict.reason
        )
        self.membership.broadcast(messages.End(verdict))
        return verdict

    def _record_verdict(self, verdict: Verdict) -> Verdict:
        ledger = self._ledger
        if factor := policy.more_memory(verdict, self._job.options, ledger.rounds):
            reason = f"{verdict.reason}; queued again with {factor:g} times the memory"
            again: dict[str, Any] = {
                "state": JobState.PREEMPTED,
                "exit_code": PREEMPTED_EXIT_CODE,
            }
            try:
                ends.want_memory(self._job_dir, self._identity.attempt, factor)
            except OSError as error:
                reason = f"{verdict.reason} (not queued again: {error.strerror})"
                again = {}
            verdict = replace(verdict, reason=reason, **again)
        verdict = policy.end_attempt(
            self._job.options,
            self._job_dir,
            verdict,
            self._begun,
            seconds=time.monotonic() - self._began,
            warned=ledger.warned is not None,
        )
        verdict = replace(verdict, in_code=ends.files_in_code())
        if verdict.state is JobState.SUCCEEDED and (full := files.why_full(self._job_dir)):
            verdict = replace(verdict, reason=f"{full}, so output may be missing")
        try:
            ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._node.print_line(
                f"the verdict cannot be written to {self._job_dir}: {error.strerror}"
            )
            reason = f"{verdict.reason} (not recorded: {error.strerror})".strip()
            verdict = replace(verdict, reason=reason)
        return verdict


def waits_of(message: messages.RankWaits, world: World | None) -> dict[int, Wait]:
    """Return the waits of a node's ranks, by rank; none of another round.

    Args:
        message: the node's message.
        world: the node's place in the round; None without one.
    """
    if world is None or message.restart != world.restart:
        return {}
    return {
        world.first_rank + local_rank: Wait(step, waited)
        for local_rank, step, waited in message.ranks
        if local_rank < world.nproc
    }


def store_address(topology: Topology, peers: Iterable[Peer]) -> str:
    """Return the coordinator's address for torch's store.

    Of several addresses, it is the last one at which an agent has reached the coordinator: agents
    try them in order, so this agent cannot reach an earlier one.
    """
    addresses = topology.master_addr.split(",")
    found = {peer.reached_at for peer in peers if peer.reached_at}
    reached = set(map(network.plain_address, found))  # once for thousands of peers
    return next((each for each in reversed(addresses) if each in reached), addresses[0])


def with_store(
    worlds: Mapping[int, World],
    peers: Mapping[int, messages.Hello],
    topology: Topology,
    store_at: str,
    job: JobIdentity,
) -> tuple[dict[int, World], socket.socket | None]:
    """Bind the store's port; return the worlds of a round with it, and the store's socket.

    The socket is None if rank 0 binds the port.

    Args:
        worlds: the place of each node, in the order of their ranks.
        peers: the first message of each agent, by the number of its node.
        topology: the coordinator's node.
        store_at: the coordinator's address for the store; see `store_address`.
        job: the job's identity.

    Raises:
        RendezvousError: no port for the store is free.
    """
    working = [peers[node] for node, world in worlds.items() if world.nproc]
    first, round_ = working[0], worlds[working[0].node_rank]
    store: socket.socket | None = None
    if round_.agent_store:
        address = store_at
        store = membership.listen(address, [0], alone=topology.nnodes == 1)
        port = int(store.getsockname()[1])
    else:  # a worker binds the port later, so it must not be ephemeral
        address = store_at if first.node_rank == topology.node_rank else first.address
        port = candidate_ports(f"{job.job_id}\0{round_.restart}", job.attempt)[0]
    # One endpoint per worker. A node holds one more, which rank 0 binds for its framework.
    held = all(len(peer.endpoints) > peer.nproc for peer in working)
    of_all = [each for peer in working for each in peer.endpoints[: peer.nproc]]
    endpoints = worker_variables.endpoint_list(of_all) if held else ""
    common: dict[str, Any] = {
        "master_addr": address,
        "master_port": port,
        "endpoints_master": first.endpoints[-1] if held else "",
    }
    found = {
        node: replace(
            world,
            **common,
            endpoints=endpoints if peers[node].wants_endpoints else "",
            own_endpoints=",".join(peers[node].endpoints[: world.nproc]),
        )
        for node, world in worlds.items()
    }
    return found, store
