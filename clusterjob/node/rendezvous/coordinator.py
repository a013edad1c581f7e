"""The coordinator: start rounds of workers, find the root cause, give the verdict."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterjob.node.logs import ends
from clusterjob.node.logs.events import EventLog
from clusterjob.node.logs.job_dir import EVENTS, moved_events
from clusterjob.node.options import GRACE
from clusterjob.node.rendezvous import (
    coordinator_state,
    messages,
    outcome,
    ports,
    stopping,
)
from clusterjob.node.rendezvous.history import History
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.nodes import MinorityError, Nodes
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.preflight_run import Preflight
from clusterjob.node.rendezvous.round import Round
from clusterjob.node.rendezvous.round_plan import plan_round
from clusterjob.node.rendezvous.round_start import RoundStart
from clusterjob.node.rendezvous.round_watch import RoundWatch
from clusterjob.node.rendezvous.state_keeper import StateKeeper
from clusterjob.node.rendezvous.succession import Earlier
from clusterjob.node.rendezvous.time_limit import TimeLimit
from clusterjob.node.rendezvous.until_done import UntilDone
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier


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
        topology, options, job_dir = node.topology, node.options, node.directory
        self._topology = topology
        self._options = options
        self._job = job = node.identity
        self._job_dir = job_dir
        self._print_line = node.print_line
        self._watch = watch
        self._notifier = notifier
        self._own = topology.node_rank
        moves, shift = (earlier.moves, earlier.clock_shift) if earlier else (0, 0.0)
        name = moved_events(moves, self._own) if moves else EVENTS
        self._events = EventLog(job_dir / name, shift)
        self.membership = Membership(
            topology.nnodes, self._own, options=options, job=job, events=self._events
        )
        self._nodes = Nodes(self.membership, node, self._own, self._events)
        self._inbox = self.membership.inbox
        self._peers = self.membership.peers
        self._started_at: str | None = None
        self._time_limit = TimeLimit(options.time_limit, start_timeout=options.join_timeout)
        self._restarts = 0
        self._interrupted: Outcome | None = None  # the end of the round of an earlier coordinator
        self._history = History(node, self._events)
        self._state = StateKeeper(
            node,
            membership=self.membership,
            nodes=self._nodes,
            history=self._history,
            time_limit=self._time_limit,
            moves=moves,
            shift=shift,
        )
        self._preemption = Preemption(
            options.warning, options.grace or GRACE, any_end=bool(options.warn_signal)
        )
        self._until_done = UntilDone(options, job_dir, job.attempt)
        preflight = Preflight(
            topology,
            options,
            membership=self.membership,
            events=self._events,
            next_message=self.membership.next_message,
            handle=self._handle,
            print_line=node.print_line,
        )
        self._round_start = RoundStart(
            options,
            job_dir,
            job.attempt,
            membership=self.membership,
            nodes=self._nodes,
            preemption=self._preemption,
            preflight=preflight,
            handle=self._handle,
            handle_waiting=self._handle_waiting,
        )
        self._new_round = functools.partial(
            Round,
            membership=self.membership,
            preemption=self._preemption,
            options=options,
            events=self._events,
            job=job,
            job_dir=job_dir,
            own=self._own,
        )
        self._round = self._new_round(self._restarts)
        # `Round.handlers` has the functions for the other messages.
        self._handlers: dict[type, Callable[[Peer, Any], Outcome | None]] = {
            messages.KillNow: lambda _peer, _kill: None,
            messages.Hello: lambda peer, _hello: self._state.send(peer),
            messages.RoundSeen: self._on_round_seen,
            messages.Running: self._on_running,
            messages.StartedByExec: self._on_started_by_exec,
            messages.Cancel: self._on_cancel,
            messages.PreemptionWarning: self._on_preemption_warning,
            messages.CoordinatorLost: self._on_lost,
            messages.ConnectionLost: self._on_lost,
            **preflight.handlers,
        }
        if earlier is not None:
            self._take_over(earlier)

    # -- the job -----------------------------------------------------------------------------------

    def _take_over(self, earlier: Earlier) -> None:
        """Go on with the job of an earlier coordinator."""
        state = earlier.state
        self._restarts, self._started_at = state.restarts, state.started_at
        self._time_limit.resume(state.deadline, runs=state.limit_runs)
        self._history.resume(earlier.rounds)
        self._nodes.take_over(earlier)
        self.membership.fence(state.nodes)
        if earlier.moved:
            self._print_line(f"node {self._own} coordinates the job now: {earlier.why}")
        self._events.add("lost", node_rank=state.node, host=state.host, why=earlier.why)
        failure = Failure.of_node(state.node, state.host, message=earlier.why)
        self._interrupted = outcome.failed(failure)

    async def run(self) -> Verdict:
        """Run the job; return the verdict after it is on disk and was sent to every agent.

        Raises:
            RendezvousError: node 0 cannot listen.
            MinorityError: more than half of the nodes may run without this coordinator.
        """
        listener = ports.listen(
            self._topology.master_addr, self._job.ports, alone=self._topology.nnodes == 1
        )
        await self.membership.open(listener, self._topology.master_addr)
        for task in self.membership.tasks:
            self._watch(task)
        if self._job.attempt and self._interrupted is None:
            self._print_line(f"attempt {self._job.attempt}: the job was queued again")
        try:
            last = self._interrupted
            end = await (self._restart_after(last) if last else self._round_start.first())
            while end is None:
                self._start_round()
                end, cancelled = await self._stop_round(await self._watch_round())
                end = await self._restart_after(end, cancelled)
            return await self._give_verdict(end)
        except MinorityError:
            raise  # the agents look for another coordinator
        except Exception as error:  # otherwise the other agents wait until their leases end
            verdict = outcome.coordinator_failed(error, attempt=self._job.attempt)
            self.membership.broadcast(messages.End(verdict))
            raise
        finally:
            await self.membership.close()

    async def _restart_after(
        self, end: Outcome, cancelled: Outcome | None = None
    ) -> Outcome | None:
        """Wait for the nodes of the next round; return an outcome if there is none.

        Args:
            end: the outcome of the last round.
            cancelled: a cancellation that arrived while it was stopped.
        """
        end = outcome.after_stop(end, self._round.root_cause)
        end, decision = self._history.decide(end, self._restarts)
        if not decision.retry:
            return end
        if decision.avoid and end.failure is not None:
            self._nodes.avoid(end.failure)
        if decision.pause:
            self._print_line(f"the next round begins in {decision.pause:g} s: {end.reason}")
        other = cancelled or await self._round_start.next(end, decision.pause)
        if other is not None:
            return other
        if decision.avoid and end.failure is not None:
            self._nodes.note_avoided(end.failure)
        self._restarts += 1
        number, most, why = self._restarts, self._history.most, end.reason
        self._print_line(f"restart {number} of {most}: {why}")
        self._events.add("restart", restart=number, why=why)
        if self._notifier is not None:
            self._notifier.restarts(number, most, why, failure=end.failure)
        return None

    # -- one round ---------------------------------------------------------------------------------

    def _start_round(self) -> None:
        self._round_start.waits = False
        nodes = self._nodes.choose(self._restarts)
        worlds, store = plan_round(
            nodes,
            self._peers,
            self._restarts,
            topology=self._topology,
            job=self._job,
            serve_store=self._options.launcher == "agent" and self._job.has_torch,
        )
        self._round = self._new_round(self._restarts, worlds=worlds)
        for node, world in worlds.items():
            start = messages.Start(world)
            if store is not None and node == self._own:
                start = messages.StartWithStore(world, store)
            self._peers[node].send(start)
        world = worlds[nodes[0]]
        at = self._events.add(
            "started",
            attempt=self._job.attempt,
            restart=self._restarts,
            world_size=world.world_size,
            nodes=nodes,
            wanted=self._nodes.selection.wanted,
            master_port=world.master_port,
            preload=self._options.preloads_torch,
        )
        self._history.started_at = at
        if self._started_at is None:
            self._started_at = at
            if self._notifier is not None:
                self._notifier.started(world.nnodes, world.world_size)
            self._time_limit.start()
        self._state.keep(self._restarts, self._started_at)

    # -- messages of the agents --------------------------------------------------------------------

    def _handle(self, node_rank: int, message: Any) -> Outcome | None:
        """Handle one message; return an outcome if it ends the round."""
        handle = self._handlers.get(type(message)) or self._round.handlers[type(message)]
        return handle(self._peers[node_rank], message)

    def _handle_waiting(self) -> Outcome | None:
        """Handle the waiting messages until one ends the round; return its outcome."""
        while not self._inbox.empty():
            end = self._handle(*self._inbox.get_nowait())
            if end is not None:
                return end
        return None

    def _on_running(self, peer: Peer, _message: messages.Running) -> None:
        if self._round.note_running(peer):
            self._time_limit.run()
            self._state.keep(self._restarts, self._started_at)

    def _on_round_seen(self, peer: Peer, message: messages.RoundSeen) -> None:
        if self._nodes.note_seen(peer, message.rounds):
            self._state.keep(self._restarts, self._started_at)

    def _on_started_by_exec(self, peer: Peer, message: messages.StartedByExec) -> None:
        self._events.add("exec", node_rank=peer.node_rank, why=message.why)

    def _on_cancel(self, _peer: Peer, message: messages.Cancel) -> Outcome:
        end = outcome.cancelled(
            sanitize(message.why), interrupt=message.interrupt, stacks=message.stacks
        )
        return replace(end, terminated=message.terminated)

    def _on_preemption_warning(self, _peer: Peer, message: messages.PreemptionWarning) -> None:
        why = sanitize(message.why)
        if not self._preemption.warn(why, time.monotonic()):
            return
        seconds = self._preemption.seconds
        self._print_line(f"warning: {why}: the workers have {seconds:g} s to leave")
        self._events.add("warned", attempt=self._job.attempt, why=why, seconds=seconds)
        self.membership.broadcast(messages.Warn())

    def _on_lost(
        self, peer: Peer, message: messages.CoordinatorLost | messages.ConnectionLost
    ) -> Outcome | None:
        """End the round because an agent is lost, or has lost the coordinator."""
        if peer.lost:
            return None
        failure = self._nodes.lose(peer, message)
        self._round.unstopped.discard(peer.node_rank)
        if self._round_start.waits or peer.node_rank not in self._round.nodes:
            self._print_line(f"{failure.who}: {failure.message}")
            if self._round_start.waits or self._nodes.has_majority():
                return None  # it has no workers
        if self._preemption.reason and self._round.root() is None:
            # The scheduler has taken the node.
            return outcome.preempted(self._preemption.explain(failure.message))
        self._round.root_cause.add(failure, time.monotonic(), exited=True)
        return outcome.failed(self._round.root_cause.root() or failure)

    # -- the end -----------------------------------------------------------------------------------

    async def _watch_round(self) -> Outcome:
        """Wait until all workers have ended, one has failed, or the job must end."""
        watch = RoundWatch(
            self._round,
            self._preemption,
            time_limit=self._time_limit,
            options=self._options,
            own=self._peers[self._own],
            next_message=self.membership.next_message,
            handle=self._handle,
            handle_waiting=self._handle_waiting,
        )
        return await watch.wait()

    async def _stop_round(self, end: Outcome) -> tuple[Outcome, Outcome | None]:
        """Stop the workers; return the outcome, and a cancellation that arrives meanwhile."""
        stop = stopping.RoundStop(
            self._round,
            self.membership,
            preemption=self._preemption,
            options=self._options,
            next_message=self.membership.next_message,
            handle=self._handle,
            print_line=self._print_line,
        )
        end = await stop.collect_evidence(end)
        if end.state is not JobState.SUCCEEDED:
            self._events.add("stop", restart=self._restarts, why=end.reason)
        await stop.stop(end)
        return end, stop.cancelled

    async def _give_verdict(self, end: Outcome) -> Verdict:
        if self._history.started_at is None:
            self._history.add(end, self._restarts)
        verdict = outcome.final_verdict(
            end,
            self._round.root_cause.consequences(),
            self._round.evidence,
            restarts=self._restarts,
            attempt=self._job.attempt,
            started_at=self._started_at,
            rounds=self._history.rounds,
        )
        loop = asyncio.get_running_loop()
        verdict = await loop.run_in_executor(files.disk, self._record_verdict, verdict)
        self._events.add(
            "ended", state=str(verdict.state), exit_code=verdict.exit_code, reason=verdict.reason
        )
        self.membership.broadcast(messages.End(verdict))
        return verdict

    def _record_verdict(self, verdict: Verdict) -> Verdict:
        verdict = self._until_done.decide(verdict, warned=bool(self._preemption.reason))
        verdict = replace(verdict, in_code=ends.files_in_code())
        if verdict.state is JobState.SUCCEEDED and (full := files.why_full(self._job_dir)):
            verdict = replace(verdict, reason=f"{full}, so output may be missing")
        coordinator_state.remove(self._job_dir)
        try:
            ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._print_line(f"the verdict cannot be written to {self._job_dir}: {error.strerror}")
            reason = f"{verdict.reason} (not recorded: {error.strerror})".strip()
            verdict = replace(verdict, reason=reason)
        return verdict
