"""The coordinator on node 0: start rounds of workers, find the root cause, give the verdict."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import EventLog
from clusterjob.node.logs.job_dir import EVENTS
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import hang_verdict, messages, outcome, ports, stopping
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.membership import Membership, Peer
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.rendezvous.preemption import Preemption
from clusterjob.node.rendezvous.round import Round, plan_round
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier

_NOTICE_INTERVAL = 5.0  # seconds between two notices about missing nodes
_REFUSALS_INTERVAL = 0.25  # seconds between two checks for a node that cannot start


class Coordinator:
    """The coordinator of a job.

    Args:
        topology: node 0.
        options: the node's options.
        job: the job's identity and secret.
        job_dir: the directory for events and the verdict.
        print_line: prints one line for the user.
        watch: reports the error of a background task.
        notifier: sends notifications; None without --notify.

    Attributes:
        membership: the agents that have joined, node 0's included.
    """

    def __init__(
        self,
        topology: Topology,
        options: LaunchOptions,
        job: JobIdentity,
        job_dir: Path,
        print_line: Callable[[str], None],
        watch: Callable[[asyncio.Task[None]], None],
        notifier: Notifier | None = None,
    ) -> None:
        self._topology = topology
        self._options = options
        self._job = job
        self._job_dir = job_dir
        self._print_line = print_line
        self._watch = watch
        self._notifier = notifier
        self._events = EventLog(job_dir / EVENTS)
        self.membership = Membership(topology.nnodes, options, job=job, events=self._events)
        self._inbox = self.membership.inbox
        self._peers = self.membership.peers
        self._started_at: str | None = None
        self._deadline = inf
        self._time_limit_runs = False
        self._restarts = 0
        self._preemption = Preemption(options.warning, options.grace)
        self._new_round = functools.partial(
            Round,
            membership=self.membership,
            preemption=self._preemption,
            options=options,
            events=self._events,
            job=job,
            job_dir=job_dir,
        )
        self._round = self._new_round(self._restarts)
        # `Round.handlers` has the functions for the other messages.
        self._handlers: dict[type, Callable[[Peer, Any], Outcome | None]] = {
            messages.KillNow: lambda _peer, _kill: None,
            messages.Hello: lambda _peer, _hello: None,
            messages.Running: self._on_running,
            messages.StartedByExec: self._on_started_by_exec,
            messages.Cancel: self._on_cancel,
            messages.PreemptionWarning: self._on_preemption_warning,
            messages.CoordinatorLost: self._on_lost,
            messages.ConnectionLost: self._on_lost,
        }

    # -- the job -----------------------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run the job; return the verdict after it is on disk and was sent to every agent.

        Raises:
            RendezvousError: node 0 cannot listen.
        """
        listener = ports.listen(
            self._topology.master_addr, self._job.ports, alone=self._topology.nnodes == 1
        )
        await self.membership.open(listener, self._topology.master_addr)
        for task in self.membership.tasks:
            self._watch(task)
        if self._job.attempt:
            self._print_line(f"attempt {self._job.attempt}: the job was queued again")
        try:
            end = await self._wait_for_nodes()
            while end is None:
                self._start_round()
                end, cancelled = await self._stop_round(await self._wait_for_round())
                if self._may_restart(end):
                    self._restarts += 1
                    number, most, why = self._restarts, self._options.max_restarts, end.reason
                    self._print_line(f"restart {number} of {most}: {why}")
                    self._events.add("restart", restart=number, why=why)
                    if self._notifier is not None:
                        self._notifier.restarts(number, most, why, failure=end.failure)
                    end = cancelled
            return self._give_verdict(end)
        except Exception as error:  # otherwise the other agents wait until their leases end
            verdict = outcome.coordinator_failed(error, attempt=self._job.attempt)
            self.membership.broadcast(messages.End(verdict))
            raise
        finally:
            await self.membership.close()

    def _may_restart(self, end: Outcome) -> bool:
        """Return whether to start the workers again: not after the failure or loss of a node."""
        failure = end.failure
        worker_failed = failure is not None and (
            failure.rank is not None
            or failure.kind is FailureKind.HANG
            or self._options.launcher == "torchrun"
        )
        none_lost = not any(peer.lost for peer in self._peers.values())
        return worker_failed and none_lost and self._restarts < self._options.max_restarts

    # -- waiting for the nodes ---------------------------------------------------------------------

    async def _wait_for_nodes(self) -> Outcome | None:
        """Wait until every node has joined; return an outcome if the job cannot start."""
        begin = noticed = checked = time.monotonic()
        while len(self._peers) < self._topology.nnodes:
            message = await self._next_message(checked + _REFUSALS_INTERVAL - time.monotonic())
            end = self._handle(*message) if message is not None else None
            if end is not None or self.membership.refusals:
                return self._refused_nodes() or end
            if time.monotonic() - checked < _REFUSALS_INTERVAL:
                continue
            checked = time.monotonic()
            end = self._refused_nodes() or self._check_missing_nodes(begin, noticed)
            if end is not None:
                return end
            noticed = checked if checked - noticed > _NOTICE_INTERVAL else noticed
        # Start no worker if the job was cancelled when the last agent joined.
        end = self._handle_waiting()
        if end is None and self._preemption.reason:
            return self._preempted("before its workers had started")
        return end

    def _refused_nodes(self) -> Outcome | None:
        """Return the failure of a node that was refused or could not start its agent, else None."""
        refused = self.membership.refusals or ends.refusals(self._job_dir, self._job.attempt)
        return outcome.failed(refused[0]) if refused else None

    def _check_missing_nodes(self, begin: float, noticed: float) -> Outcome | None:
        """Return an outcome after --join-timeout; until then print the missing nodes every 5 s."""
        waited = time.monotonic() - begin
        if time.monotonic() > self._preemption.due:
            return self._preempted("before its workers had started")
        if waited <= self._options.join_timeout and time.monotonic() - noticed <= _NOTICE_INTERVAL:
            return None
        missing = [rank for rank in range(self._topology.nnodes) if rank not in self._peers]
        names = f"node {', '.join(map(str, missing))} of {self._topology.nnodes}"
        if waited > self._options.join_timeout:
            text = f"{names} never joined within {self._options.join_timeout:g} s"
            return outcome.failed(Failure.of_node(missing[0], "unknown", message=text))
        self._print_line(f"waiting for {names}, {waited:.0f} s so far")
        self._events.add("waiting", missing=missing, seconds=round(waited, 1))
        return None

    async def _next_message(self, timeout: float) -> tuple[int, Any] | None:
        """Return the next message and its sender's node_rank; None after `timeout` seconds."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        try:
            return await asyncio.wait_for(self._inbox.get(), max(0.0, timeout))
        except asyncio.TimeoutError:
            return None

    def _handle_waiting(self) -> Outcome | None:
        """Handle the waiting messages until one ends the round; return its outcome."""
        while not self._inbox.empty():
            end = self._handle(*self._inbox.get_nowait())
            if end is not None:
                return end
        return None

    # -- one round ---------------------------------------------------------------------------------

    def _start_round(self) -> None:
        worlds, store = plan_round(
            [self._peers[rank] for rank in sorted(self._peers)],
            self._restarts,
            topology=self._topology,
            job=self._job,
            serve_store=self._options.launcher == "agent" and self._job.has_torch,
        )
        self._round = self._new_round(self._restarts, worlds=worlds)
        for world in worlds:
            start = messages.Start(world)
            if store is not None and world.node_rank == 0:
                start = messages.StartWithStore(world, store)
            self._peers[world.node_rank].send(start)
        at = self._events.add(
            "started",
            attempt=self._job.attempt,
            restart=self._restarts,
            world_size=worlds[0].world_size,
            master_port=worlds[0].master_port,
            preload=self._options.preloads_torch,
        )
        if self._started_at is None:
            self._started_at = at
            if self._notifier is not None:
                self._notifier.started(len(worlds), worlds[0].world_size)
            if self._options.time_limit is not None:
                # `_on_running` sets the deadline again when all workers run. If an import hangs,
                # the limit counts from the end of --join-timeout.
                latest_start = time.monotonic() + self._options.join_timeout
                self._deadline = latest_start + self._options.time_limit

    async def _wait_for_round(self) -> Outcome:
        """Wait until all workers have ended, one has failed, or the job must end."""
        current = self._round
        while current.undone or current.is_unexplained() or self._preemption.suspects_due < inf:
            due = min(
                current.root_cause.stop_due(),
                self._preemption.suspects_due,
                self._preemption.due,
                self._deadline,
                current.stragglers.due,
                current.hang.due,
            )
            end = None
            if due > time.monotonic():
                message = await self._next_message(min(due - time.monotonic(), 3600.0))
                if message is not None:
                    # Handle all waiting messages before the failures are ranked again.
                    end = self._handle(*message) or self._handle_waiting()
            else:
                end = self._handle_due()
            if end is not None:
                return end
        root = current.root()
        if root is not None:
            return outcome.failed(root)
        if self._preemption.left:
            return self._preempted("its workers left to be queued again")
        return Outcome(JobState.SUCCEEDED)

    def _handle_due(self) -> Outcome | None:
        """Handle a deadline that has passed; return an outcome if it ends the round."""
        moment, current = time.monotonic(), self._round
        if current.stragglers.due <= moment:
            current.name_stragglers()
        self._preemption.release(current.root_cause, moment)
        root = current.root()
        if (
            root is not None
            and current.root_cause.stop_due() <= moment
            and (not root.effect or current.poll_is_over(moment))
        ):
            return outcome.failed(root)
        if self._preemption.due <= moment:
            after = f"{self._preemption.seconds:g} s later"
            return self._preempted(f"its workers still ran {after} and were stopped")
        if self._deadline <= moment:
            if root is not None:
                return outcome.failed(root)
            return outcome.out_of_time(self._options.time_limit or 0.0)
        if current.hang.due <= moment and current.hang.check(current.living_nodes()):
            return hang_verdict.hang(self._peers[0], self._options.hang_timeout or 0.0)
        return None

    def _preempted(self, how: str) -> Outcome:
        return outcome.preempted(f"{self._preemption.reason}: {how}")

    # -- messages of the agents --------------------------------------------------------------------

    def _handle(self, node_rank: int, message: Any) -> Outcome | None:
        """Handle one message; return an outcome if it ends the round."""
        handle = self._handlers.get(type(message)) or self._round.handlers[type(message)]
        return handle(self._peers[node_rank], message)

    def _on_running(self, peer: Peer, _message: messages.Running) -> None:
        if not self._round.note_running(peer) or self._time_limit_runs:
            return
        self._time_limit_runs = True
        if self._options.time_limit is not None:  # importing torch does not count
            self._deadline = time.monotonic() + self._options.time_limit

    def _on_started_by_exec(self, peer: Peer, message: messages.StartedByExec) -> None:
        self._events.add("exec", node_rank=peer.node_rank, why=message.why)

    def _on_cancel(self, _peer: Peer, message: messages.Cancel) -> Outcome:
        return outcome.cancelled(
            sanitize(message.why), interrupt=message.interrupt, stacks=message.stacks
        )

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
        peer.lost = True
        self._round.unstopped.discard(peer.node_rank)
        why = sanitize(message.why)
        self._events.add("lost", node_rank=peer.node_rank, host=peer.host, why=why)
        failure = outcome.node_loss(
            peer,
            self._peers[0],
            why=why,
            by_agent=isinstance(message, messages.CoordinatorLost),
            stalled=self.membership.stalls.recent(self._options.lease),
        )
        if self._preemption.reason and self._round.root() is None:
            return self._preempted(failure.message)  # the scheduler has taken the node
        self._round.root_cause.add(failure, time.monotonic(), exited=True)
        return outcome.failed(self._round.root_cause.root() or failure)

    # -- the end -----------------------------------------------------------------------------------

    async def _stop_round(self, end: Outcome) -> tuple[Outcome, Outcome | None]:
        """Stop the workers; return the outcome, and a cancellation that arrives meanwhile."""
        stop = stopping.RoundStop(
            self._round,
            self.membership,
            preemption=self._preemption,
            options=self._options,
            next_message=self._next_message,
            handle=self._handle,
            print_line=self._print_line,
        )
        end = await stop.save_evidence(end)
        if end.state is not JobState.SUCCEEDED:
            self._events.add("stop", restart=self._restarts, why=end.reason)
        await stop.stop(end)
        return end, stop.cancelled

    def _give_verdict(self, end: Outcome) -> Verdict:
        verdict = outcome.final_verdict(
            end,
            self._round.root_cause,
            self._round.evidence,
            restarts=self._restarts,
            attempt=self._job.attempt,
            started_at=self._started_at,
        )
        try:
            ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._print_line(f"the verdict cannot be written to {self._job_dir}: {error.strerror}")
            reason = f"{verdict.reason} (not recorded: {error.strerror})".strip()
            verdict = replace(verdict, reason=reason)
        self._events.add(
            "ended", state=str(verdict.state), exit_code=verdict.exit_code, reason=verdict.reason
        )
        self.membership.broadcast(messages.End(verdict))
        return verdict
