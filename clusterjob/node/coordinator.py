"""The coordinator: receive the states of all nodes, decide, send orders, record events."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterjob.errors import RendezvousError
from clusterjob.node import decide as core
from clusterjob.node.decide import Decision, Job, Ledger, Loss, Node, Stage, View
from clusterjob.node.environments import slurm_env, this_node
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import EventLog, ended_rounds, now
from clusterjob.node.logs.job_dir import EVENTS, moved_events
from clusterjob.node.preflight import checked, differing
from clusterjob.node.preflight_table import HeatTable
from clusterjob.node.rendezvous import (
    coordinator_state,
    messages,
    outcome,
    ports,
    root_cause,
    succession,
)
from clusterjob.node.rendezvous.coordinator_state import CoordinatorState, Succession
from clusterjob.node.rendezvous.evidence import Evidence
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.round_plan import plan_round, store_address
from clusterjob.node.rendezvous.straggler_watch import StragglerWatch
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.rendezvous.until_done import UntilDone
from clusterjob.node.stacks import grouping
from clusterjob.node.states import NodeState, Order, OrderWithStore
from clusterjob.node.system import files, processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

if TYPE_CHECKING:
    import socket

    from clusterjob.node.notifications.notifier import Notifier

# Between two decisions, while states pour in: seconds, and times the duration of the last one.
_BATCH_SECONDS, _BATCH_TIMES = 0.05, 4
_MOST_NAMED = 8  # hosts or findings of the preflight
_MOST_ROUNDS = 100  # of many rounds, the latest go to the nodes that may coordinate


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


class MinorityError(RendezvousError):
    """More than half of the nodes of a job may run without this coordinator."""


class Coordinator:
    """The coordinator of a job.

    Args:
        node: the job, as the coordinator's node sees it.
        watch: reports the error of a background task.
        notifier: sends notifications; None without --notify.
        earlier: the coordinator whose place this one takes; None at the start of a job.

    Attributes:
        membership: the agents that have joined, the one of this node included.
    """

    def __init__(
        self,
        node: NodeJob,
        watch: Callable[[asyncio.Task[None]], None],
        notifier: Notifier | None = None,
        earlier: Earlier | None = None,
    ) -> None:
        topology, options, identity = node.topology, node.options, node.identity
        self._node = node
        self._topology = topology
        self._options = options
        self._identity = identity
        self._job_dir = node.directory
        self._watch = watch
        self._notifier = notifier
        self._earlier = earlier
        self._own = topology.node_rank
        moves, self._shift = (earlier.moves, earlier.clock_shift) if earlier else (0, 0.0)
        self._moves = moves
        name = moved_events(moves, self._own) if moves else EVENTS
        self._events = EventLog(self._job_dir / name, self._shift)
        self.membership = Membership(
            topology.nnodes, self._own, options=options, job=identity, events=self._events
        )
        self._peers = self.membership.peers
        self._job = Job(
            options,
            nnodes=topology.nnodes,
            own=self._own,
            attempt=identity.attempt,
            moves=succession.may_move(node),
            asks_slurm=topology.source == slurm_env.SOURCE and succession.has_scontrol(),
        )
        self._nodes: dict[int, Node] = {}
        self._joined: dict[int, Peer] = {}  # the connection of each of these nodes
        self._orders: dict[int, Order] = {}  # the last order of each
        self._ledger = Ledger(since=time.monotonic())
        self._worlds: dict[int, Any] = {}
        self._store: socket.socket | None = None  # of the preflight or of the newest round
        self._store_address, self._store_port = "", 0
        self._evidence: Evidence | None = None
        self._stragglers: StragglerWatch | None = None
        self._saving: asyncio.Future[None] | None = None
        self._slurm_up: bool | None = None
        self._kept: tuple[Any, ...] = ()  # what the successors know
        self._until_done = UntilDone(options, self._job_dir, identity.attempt)
        self._found: dict[str, Any] | None = None  # by the preflight
        self._next_batch = 0.0
        self._due = 0.0

    # -- the job -----------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run the job; return the verdict after it is on disk and was sent to every agent.

        Raises:
            RendezvousError: node 0 cannot listen.
            MinorityError: more than half of the nodes may run without this coordinator.
        """
        identity = self._identity
        listener = ports.listen(
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
            verdict = outcome.coordinator_failed(error, attempt=identity.attempt)
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
            self._node.print_line(f"node {self._own} coordinates the job now: {earlier_.why}")
        disks = {
            each.node
            for each in earlier_.rounds
            if each.node is not None
            and (each.attempt, each.kind) == (state.attempt, FailureKind.DISK)
        }
        ledger = Ledger(
            stage=Stage.RUN,
            since=time.monotonic(),
            round=state.restarts,
            nodes=state.nodes,
            groups=tuple(succession.groups(state)),
            gone=earlier_.gone,
            avoided=state.avoided,
            full_disks=frozenset(disks),
            ended=frozenset({state.node} if earlier_.moved and earlier_.ended else ()),
            rounds=earlier_.rounds,
            first_started=state.started_at,
            started=state.started_at,
            deadline=state.deadline,
            limit_runs=state.limit_runs,
        )
        lost = Failure.of_node(state.node, state.host, message=earlier_.why)
        self._apply(core.take_over(self._job, ledger, self._view(), time.monotonic(), lost))

    async def _step(self) -> None:
        """Wait for a change or for the time of the next decision; decide."""
        changed = self._receive_waiting()
        moment = time.monotonic()
        at = self._next_batch if changed else self._due
        while moment < at:
            found = await self.membership.next_message(min(at - moment, 3600.0))
            if found is not None:
                changed = self._receive(*found) or changed
                changed = self._receive_waiting() or changed
                at = min(at, self._next_batch) if changed else at
            moment = time.monotonic()
        self._apply(core.decide(self._job, self._ledger, self._view(), moment))
        lasted = time.monotonic() - moment
        self._next_batch = moment + lasted + max(_BATCH_SECONDS, _BATCH_TIMES * lasted)
        if self._ledger.stage is Stage.START:
            await self._start_round()
        elif self._ledger.stage is Stage.RESIGN:
            raise MinorityError("the other nodes may still run without this one")

    def _view(self) -> View:
        ledger, waits = self._ledger, self._ledger.stage is Stage.WAIT
        refused = ends.refusals(self._job_dir, self._identity.attempt) if waits else []
        if waits and ledger.round < 0:  # later, who may not join is nobody that the job waits for
            refused = self.membership.refusals or refused
        ended: frozenset[int] = frozenset()
        if waits and any(self._nodes[node].lost for node in ledger.nodes if node in self._nodes):
            found = ends.written(self._job_dir, self._identity.attempt)
            ended = frozenset(end["node_rank"] for end in found)
        return View(
            self._nodes,
            time=now(),
            refused=refused,
            ended=ended,
            slurm_up=self._slurm_up,
            stalled=self.membership.stalls.recent(self._options.lease),
            stacks=self._evidence.stacks if self._evidence is not None else (),
            slow=self._found["slow"] if self._found is not None else None,
        )

    # -- what follows from a decision --------------------------------------------------------------

    def _apply(self, decision: Decision) -> None:
        before, self._ledger = self._ledger, decision.ledger
        self._due = decision.due
        for line in decision.lines:
            self._node.print_line(line)
        for name, fields in decision.events:
            self._events.add(name, **fields)
            self._notify(name, fields)
        for node, why in decision.dropped.items():
            self._lose(self._joined[node], why, ended=False)
        stage = self._ledger.stage
        if stage is Stage.MEASURE and before.stage is not Stage.MEASURE:
            self._begin_measuring()
        if before.stage is Stage.MEASURE and stage is not Stage.MEASURE:
            self._report_preflight()
        if stage is Stage.COLLECT and before.stage is not Stage.COLLECT:
            self._expect_stacks()
        if stage is Stage.STOP and before.stage is not Stage.STOP and self._evidence is not None:
            # The stacks of thousands of ranks take a second.
            loop = asyncio.get_running_loop()
            self._saving = loop.run_in_executor(files.disk, self._evidence.save)
        if decision.asks_slurm:
            self._watch(asyncio.create_task(self._ask_slurm()))
        self._send_orders()
        self._keep_state()

    def _notify(self, name: str, fields: dict[str, Any]) -> None:
        if self._notifier is None:
            return
        if name == "restart":
            most = core.most_restarts(self._job, self._ledger)
            failure = self._last_failure
            self._notifier.restarts(fields["restart"], most, fields["why"], failure=failure)
        elif name == "started" and self._ledger.round == 0:
            self._notifier.started(len(fields["nodes"]), fields["world_size"])

    def _send_orders(self) -> None:
        for node, wanted in core.orders(self._job, self._ledger, self._nodes):
            order = wanted
            if order.measure is not None and self._store is not None:
                address, port = self._store_address, self._store_port
                order = replace(order, measure=replace(order.measure, address=address, port=port))
            serves = order.world is not None or order.measure is not None
            if node == self._own and serves and self._store is not None:
                order = OrderWithStore(**vars(order), store=self._store)
            known = self._orders.get(node)
            if known is None or (known is not order and known != order):
                self._orders[node] = order
                self._joined[node].send(order)

    async def _ask_slurm(self) -> None:
        host = this_node.node_name()
        down = await asyncio.to_thread(succession.slurm_says_down, host)
        self._slurm_up = down is False
        self._due = 0.0
        self.membership.wake()

    # -- the begin of a round ----------------------------------------------------------------------

    async def _start_round(self) -> None:
        """Bind the port of the store, and give each node its place."""
        nodes = core.chosen(self._job, self._ledger, self._view())
        self._worlds, self._store = plan_round(
            nodes,
            self._joined,
            self._ledger.round + 1,
            topology=self._topology,
            job=self._identity,
            serve_store=self._options.launcher == "agent" and self._identity.has_torch,
        )
        self._slurm_up = None
        self._evidence = None
        view, moment = self._view(), time.monotonic()
        self._last_failure = self._ledger.end.failure if self._ledger.end else None
        self._apply(core.begin(self._job, self._ledger, view, moment, self._worlds))
        run = self._ledger.run
        self._stragglers = StragglerWatch(self._ledger.round, run.ranks, self._events)

    # -- the preflight -----------------------------------------------------------------------------

    def _begin_measuring(self) -> None:
        self._store_address = store_address(self._topology, self._joined.values())
        alone = self._topology.nnodes == 1
        self._store = ports.listen(self._store_address, [0], alone=alone)
        self._store_port = int(self._store.getsockname()[1])
        self._node.print_line(f"preflight: measuring {_count(len(self._ledger.measured))}")

    def _report_preflight(self) -> None:
        """Print what the preflight has found, and write it into the events."""
        names = core.host_names(self._nodes)
        found = self._found or {}
        rows = [[names[node], cells] for node, cells in found.get("rows", {}).items()]
        columns = found.get("columns", [])
        table = HeatTable.from_json({"columns": columns, "rows": rows, "hosts": len(rows)})
        findings = [*found.get("findings", []), *differing(found.get("versions", {}), names)]
        slow = core.slow_lines(self._job, self._ledger, self._view())[:_MOST_NAMED]
        seconds = found.get("seconds", 0.0)
        for line in (
            f"preflight: {_count(len(rows))} in {seconds:.1f} s; cells are parts of the median",
            *table.lines(),
            *(f"preflight: {finding}" for finding in findings[:_MOST_NAMED]),
            *(f"preflight: slow {line}" for line in slow),
        ):
            self._node.print_line(line)
        self._events.add(
            "preflight",
            seconds=seconds,
            slow=slow,
            findings=findings[:_MOST_NAMED],
            table=table.to_json(),
        )

    # -- messages of the agents --------------------------------------------------------------------

    def _receive_waiting(self) -> bool:
        changed = False
        while not self.membership.inbox.empty():
            changed = self._receive(*self.membership.inbox.get_nowait()) or changed
        return changed

    def _receive(self, node_rank: int, message: Any) -> bool:
        """Take a message; return whether it may change what follows."""
        peer = self._peers[node_rank]
        if isinstance(message, messages.Hello):
            self._join(peer)
        elif isinstance(message, (messages.ConnectionLost, messages.CoordinatorLost)):
            by_agent = isinstance(message, messages.CoordinatorLost)
            ended = isinstance(message, messages.ConnectionLost) and message.ended
            self._lose(peer, sanitize(message.why), ended=ended, by_agent=by_agent)
        elif isinstance(message, NodeState) and self._joined.get(node_rank) is peer:
            self._nodes[node_rank] = self._nodes[node_rank].receive(message, time.monotonic())
        elif isinstance(message, messages.PreflightFound):  # never on the wire: of its own process
            self._found = checked(message.result)
        elif isinstance(message, messages.RankWaits) and self._stragglers is not None:
            self._stragglers.receive(peer, message)
            return False
        elif self._evidence is not None and type(message) in self._evidence.handlers:
            self._evidence.handlers[type(message)](peer, message)
            return False
        return True

    def _join(self, peer: Peer) -> None:
        self._joined[peer.node_rank] = peer
        self._orders.pop(peer.node_rank, None)
        moment = time.monotonic()
        self._nodes[peer.node_rank] = Node(
            peer.node_rank,
            peer.host,
            pid=peer.pid,
            nproc=peer.nproc,
            joined_at=moment,
            heard_at=moment,
            state=NodeState(seen=peer.rounds),
        )
        self._send_succession([peer])

    def _lose(self, peer: Peer, why: str, *, ended: bool, by_agent: bool = False) -> None:
        if self._joined.get(peer.node_rank) is not peer or peer.lost:
            return
        node = self._nodes[peer.node_rank]
        lost = Loss(why, time.monotonic(), ended=ended, by_agent=by_agent)
        self._nodes[peer.node_rank] = replace(node, lost=lost)
        peer.lost = True

    # -- stacks ------------------------------------------------------------------------------------

    def _expect_stacks(self) -> None:
        ledger = self._ledger
        end = ledger.end
        assert end is not None
        self._evidence = Evidence(
            grouping.Round(
                self._identity.job_id, self._identity.attempt, ledger.round, node_rank=self._own
            ),
            self.membership,
            job_dir=self._job_dir,
            events=self._events,
            local_rank=ledger.run.ranks.local_rank,
        )
        asked = ledger.run.collect_from
        living = sum(1 for node in ledger.nodes if not self._nodes[node].state.ended)
        self._evidence.expect(asked, end.reason, living)

    # -- another coordinator -----------------------------------------------------------------------

    def _keep_state(self) -> None:
        """Keep the ledger for another coordinator when a round begins, and when it has changed."""
        ledger = self._ledger
        if not self._options.restarts or ledger.stage is not Stage.RUN:
            return
        known = (ledger.round, ledger.groups, ledger.deadline)
        if known == self._kept:
            return
        self._kept = known
        moment = time.monotonic()
        order = succession.successors(self._peers, self._own)
        before, newest = ledger.groups[0], ledger.groups[-1]
        assert ledger.first_started is not None
        self._state = CoordinatorState(
            self._identity.attempt,
            ledger.round,
            started_at=ledger.first_started,
            seconds_left=None
            if math.isinf(ledger.deadline)
            else max(0.0, ledger.deadline - moment),
            limit_runs=ledger.limit_runs,
            node=self._own,
            host=this_node.node_name(),
            moves=self._moves,
            process=processes.identity(os.getppid()),
            members=tuple(sorted(newest.nodes)),
            before=tuple(sorted(before.nodes)) if before is not newest else (),
            before_node=before.coordinator,
            nodes=ledger.nodes,
            avoided=ledger.avoided,
            addresses=tuple(each.address for each in order),
            clock=moment + self._shift,
            made_at=moment,
            boot_id=processes.boot_id(),
        )
        files.later(coordinator_state.write, self._job_dir, self._state)
        self._send_succession(list(self._joined.values()))

    def _send_succession(self, peers: list[Peer]) -> None:
        """Tell agents who may take the coordinator's place, and these the ledger."""
        if not self._job.moves or not self._kept:
            return
        order = succession.successors(self._peers, self._own)
        heirs = {each.node for each in order}
        seen = self._state.restarts + 1
        full = Succession(order, seen, self._state, self._ledger.rounds[-_MOST_ROUNDS:])
        brief = Succession(order, seen)  # one message: it is encoded once for all agents
        for peer in peers:
            if not peer.lost:
                peer.send(full if peer.node_rank in heirs else brief)

    # -- the end -----------------------------------------------------------------------------------

    async def _give_verdict(self) -> Verdict:
        if self._saving is not None:
            await self._saving
        ledger = self._ledger
        end = ledger.end
        assert end is not None
        others: tuple[Failure, ...] = ()
        if end.failure is not None:
            view = self._view()
            found = core.entries(self._job, ledger, view)
            others = root_cause.consequences(found, core.early_exits(ledger, view))
        verdict = outcome.final_verdict(
            end,
            others,
            self._evidence,
            restarts=ledger.restarts,
            attempt=self._identity.attempt,
            started_at=ledger.first_started,
            rounds=ledger.rounds,
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
        if ledger.more_memory:
            try:
                ends.want_memory(self._job_dir, self._identity.attempt, ledger.more_memory)
            except OSError as error:
                reason = f"{ledger.rounds[-1].message} (not queued again: {error.strerror})"
                code = verdict.failure.exit_code if verdict.failure is not None else 1
                verdict = replace(
                    verdict, state=JobState.FAILED, exit_code=code or 1, reason=reason
                )
        verdict = self._until_done.decide(verdict, warned=ledger.warned is not None)
        verdict = replace(verdict, in_code=ends.files_in_code())
        if verdict.state is JobState.SUCCEEDED and (full := files.why_full(self._job_dir)):
            verdict = replace(verdict, reason=f"{full}, so output may be missing")
        coordinator_state.remove(self._job_dir)
        try:
            ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._node.print_line(
                f"the verdict cannot be written to {self._job_dir}: {error.strerror}"
            )
            reason = f"{verdict.reason} (not recorded: {error.strerror})".strip()
            verdict = replace(verdict, reason=reason)
        return verdict
