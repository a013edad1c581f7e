"""Run one node's part of a job: join the coordinator, follow its orders, record the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from clusterjob.errors import ClusterJobError, RendezvousError
from clusterjob.node import states
from clusterjob.node.agent.connection import Connection
from clusterjob.node.agent.measuring import measure
from clusterjob.node.agent.node_end import NodeEnd
from clusterjob.node.agent.node_metrics import NodeMetrics
from clusterjob.node.agent.node_workers import NodeWorkers
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.agent.stack_reports import StackReports
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.agent.stop_requests import StopRequests
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.coordinator_state import Succession
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.stacks import grouping
from clusterjob.node.system import crashes, files, network, processes
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.workers.forkserver_client import ForkserverClient

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier

_RENEW_INTERVAL = 0.5  # seconds
_GONE_SECONDS = 6.0  # seconds for the workers to end before this node joins again


class Agent:
    """The agent of one node.

    Args:
        node: the job, as this node sees it.
        nproc: workers of this node.
        forkserver: the forkserver, which was forked before.
        console: prints the agent's messages and the workers' output.
        notifier: sends notifications if the coordinator is here; None without --notify.
        parent: starts this agent again if it is killed; None without restarts.
    """

    def __init__(
        self,
        node: NodeJob,
        nproc: int,
        forkserver: ForkserverClient,
        console: Console,
        notifier: Notifier | None = None,
        parent: AgentParent | None = None,
    ) -> None:
        topology, job_dir = node.topology, node.directory
        self._node = node
        self._topology = topology
        self._nproc = nproc
        self._options = node.options
        self._job = node.identity
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._console = console
        self._notifier = notifier
        self._parent = parent
        self._replaces = parent is not None and parent.starts > 0  # an agent that was killed
        self._host = this_node.node_name()
        self._connection: Connection | None = None
        self._process = os.getpid() if parent is None else parent.pid  # the scheduler's child
        self._supervisor = this_node.supervisor(os.environ, self._process)
        # One more port, which rank 0 binds itself.
        self._held = worker_variables.hold_ports(nproc + 1)
        self._timeline = log_files.Timeline(log_files.node_directory(job_dir, topology.node_rank))
        seen = (parent is not None and parent.kept("rounds")) or 0
        self._report = StateReport(seen)
        self._workers = NodeWorkers(
            node,
            forkserver,
            console,
            report=self._report,
            replace_agent=self._replace_agent,
        )
        self._reports = StackReports(
            forkserver.pid,
            topology.node_rank,
            dumps=self._workers.dumps,
            signs=self._signs_of_life,
            send=self._send,
            report=self._report,
            watch=lambda task: self._crashes.watch(task),  # noqa: PLW0108 - made in run()
        )
        self._measuring: asyncio.Task[None] | None = None  # of the preflight
        self._restart = 0  # the round
        self._round, self._order = -1, states.Order()
        self._metrics = NodeMetrics(
            node,
            forkserver.pid,
            timeline=self._timeline,
            alive=lambda: self._workers.alive_at,
            waits=self._workers.waits.newest,
            note=parent.usage if parent is not None else None,
        )
        self._end = NodeEnd(
            job_dir,
            topology.node_rank,
            host=self._host,
            attempt=self._job.attempt,
            failure=self._workers.failures.of_node,
        )
        self._ended = False

    # -- from join to verdict ----------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run this node's part of the job until its processes have ended; return the verdict."""
        files.use_thread()
        self._workers.phases.begin(None if self._replaces else self._process)
        self._crashes = crashes.Crashes()
        asyncio.get_running_loop().add_reader(self._forkserver.control, self._workers.receive)
        self._requests = StopRequests(
            self._options, self._job_dir, attempt=self._job.attempt, report=self._report
        )
        self._requests.listen(self._forkserver.early)
        self._connection = Connection(
            self._node,
            self._hello(),
            report=self._report,
            requests=self._requests,
            crashes=self._crashes,
            notifier=self._notifier,
            parent=self._parent,
            polls=self._supervisor is not None,
        )
        if self._notifier is not None:
            self._workers.spared = self._notifier.pids
            if self._topology.node_rank == 0 and not self._replaces:
                self._notifier.attempt_begins(self._job.attempt)
        await self._metrics.serve()
        following = asyncio.create_task(self._follow_output())
        self._crashes.watch(following)
        self._crashes.watch(asyncio.create_task(self._connection.report()))
        try:
            verdict = await self._serve(self._connection)
        except ClusterJobError as error:
            verdict = self._end.verdict(JobState.FAILED, error.message)
        except Exception as error:
            who = f"the agent of node {self._topology.node_rank} on {self._host}"
            why = f"{who} (pid {os.getpid()}) failed: {crashes.summary(error)}"
            verdict = self._end.verdict(JobState.FAILED, why)
            self._connection.end_job(verdict)
        finally:
            following.cancel()
        self._ended = True
        if self._notifier is not None and self._reports_end(verdict):
            self._notifier.ended(verdict)
        await self._connection.stop_coordinating()
        self._workers.stop_ordered = True
        self._stop_measuring()
        await self._forkserver.quit()
        self._workers.close()
        # Background processes of the setup lines.
        processes.kill_descendants(*self._workers.spared)
        self._workers.phases.flush()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(files.disk, self._timeline.note)  # after all earlier writes
        self._console.finish()
        self._record_end(verdict)
        for holder in self._held:
            holder.close()
        await self._connection.close()
        return verdict

    @property
    def coordinates(self) -> bool:
        """Whether the coordinator is in this process."""
        return self._connection is not None and self._connection.coordinates

    async def finish_notifications(self) -> None:
        """Wait a limited time until the end is notified; a second Ctrl-C ends the wait."""
        if self._notifier is not None:
            await self._notifier.close(hurry=self._requests.kill_now)
            processes.kill_descendants()

    def _reports_end(self, verdict: Verdict) -> bool:
        """Return whether this node notifies of the end of the job."""
        if self.coordinates or self._topology.node_rank:
            return self.coordinates
        if verdict.state is JobState.LOST:  # the other nodes go on if they are the larger part
            return self._topology.nnodes <= 2
        return self._connection is None or not self._connection.follows

    async def _serve(self, connection: Connection) -> Verdict:
        if not await connection.join():
            ended = self._without_coordinator()
            return ended or self._end.verdict(JobState.LOST, "the job has ended without this node")
        self._crashes.watch(asyncio.create_task(self._renew_lease(connection)))
        handlers: dict[type, Callable[[Any], None]] = {
            states.Order: self._follow,
            states.OrderWithStore: self._follow,
            Succession: connection.note_successors,
        }
        for handled in (messages.Heartbeat, messages.Welcome, messages.Refused):  # by the link
            handlers[handled] = lambda _message: None
        while True:
            order = await connection.next_order()
            if isinstance(order, messages.End):
                return order.verdict
            if isinstance(order, messages.ConnectionLost):
                if (lost := await self._on_coordinator_lost(connection, order)) is not None:
                    return lost
            elif order is not None:
                handlers[type(order)](order)

    def _follow(self, order: states.Order) -> None:
        """Do what the coordinator wants and this node does not do yet."""
        if order.round < self._round:
            return
        done, self._order = self._order, order
        if order.round > self._round and (order.world is not None or order.stop is not None):
            self._round = order.round
            self._report.begin(order.round)
            if order.world is not None:
                self._start_round(order)
        if order.stop is not None and (order.round, order.stop) != (done.round, done.stop):
            self._report.stopped_at = min(self._report.stopped_at, time.monotonic())
            self._workers.stop(order.stop.grace, order.stop.signal, early=order.stop.early)
        if order.warned and not done.warned:
            self._workers.warn()
        if order.measure is not None and done.measure is None:
            measuring = measure(order, self._topology, self._forkserver, self._report, self._send)
            self._measuring = asyncio.create_task(measuring)
            self._crashes.watch(self._measuring)
        elif order.measure is None:
            self._stop_measuring()
        if order.round == self._round:
            self._answer(order, done if done.round == order.round else states.Order())

    def _stop_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    def _answer(self, order: states.Order, done: states.Order) -> None:
        """Answer the coordinator's questions about the workers.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
        if order.probe is not None and order.probe != done.probe:
            self._workers.probe(order.probe)
        if order.found is not None and order.found != done.found:
            known = done.found.lines if done.found is not None else ()
            lines = tuple(line for line in order.found.lines if line not in known)
            self._workers.note_found(replace(order.found, lines=lines))
        if order.report and not done.report:
            self._workers.report_failures()
        if order.sample != done.sample:
            self._reports.sample(order)
        if order.collect and not done.collect:
            self._reports.collect(order)

    async def _on_coordinator_lost(
        self, connection: Connection, lost: messages.ConnectionLost
    ) -> Verdict | None:
        """Stop the workers, and go on with the next coordinator; else return the verdict."""
        # The coordinator may still receive messages of this node.
        connection.send(messages.CoordinatorLost(lost.why))
        reason = f"node {self._topology.node_rank} lost the coordinator: {lost.why}"
        round_ = grouping.Round(
            self._job.job_id, self._job.attempt, self._restart, self._topology.node_rank
        )
        saved = ("", 0)
        if not self._options.restarts:  # else other nodes may start workers soon
            saved = await self._reports.save(self._job_dir, round_, why=reason)
        self._report.stopped_at = min(self._report.stopped_at, time.monotonic())
        self._workers.stop(0.0, signal.SIGKILL)
        if self._options.restarts:
            await connection.close()
            self._console.print(f"{reason}; it may come back")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._workers.gone.wait(), _GONE_SECONDS)
            try:
                if await connection.join_again(lost):
                    return None
            except RendezvousError as error:
                reason += f"; {error.message}"
            if (verdict := self._without_coordinator()) is not None:
                return verdict
        verdict = self._end.verdict(JobState.LOST, reason)
        return replace(verdict, evidence=saved[0], evidence_ranks=saved[1])

    def _replace_agent(self, why: str) -> None:
        """Let another agent with a new forkserver replace this one, if the job may restart it."""
        if (
            self._parent is not None
            and self._parent.starts_again
            and not self._ended
            and not self._requests.cancelled.done()
        ):
            self._send(self._report.now())  # this process ends before its next turn
            self._parent.replace_agent(why)

    def _start_round(self, order: states.Order) -> None:
        """Start a round of workers, and record the growth of their files."""
        assert order.world is not None
        self._restart = order.world.restart
        if self._connection is not None:
            self._connection.note_round()
        directory = log_files.node_directory(self._job_dir, self._topology.node_rank)
        for pair in log_files.round_files(
            directory,
            order.world,
            attempt=self._job.attempt,
            torchrun=self._options.launcher == "torchrun",
        ):
            self._timeline.follow(pair)
        self._metrics.begin_round(order.world)
        self._workers.start(order)

    def _hello(self) -> messages.Hello:
        address = this_node.own_address(self._topology)
        ports = [holder.getsockname()[1] for holder in self._held]
        return messages.Hello(
            node_rank=self._topology.node_rank,
            host=self._host,
            pid=os.getpid(),
            attempt=self._job.attempt,
            nnodes=self._topology.nnodes,
            nproc=self._nproc,
            address=address,
            counted_by=self._job.counted_by,
            endpoints=tuple(network.with_port(address, port) for port in ports),
            wants_endpoints=worker_variables.may_use_paddle(self._options.program),
            again=self._parent is not None and bool(self._parent.kept("joined")),
            rounds=self._report.state.seen,
            key=self._job.key,
        )

    def _send(self, message: Any) -> None:
        """Send the coordinator a message, if there is one."""
        if self._connection is not None:
            self._connection.send(message)

    async def _renew_lease(self, connection: Connection) -> None:
        """Tell the forkserver, which outlives this process, until when the workers may run."""
        while self._parent is not None:
            if heard_at := connection.heard_at:
                self._parent.lease.write({"until": heard_at + self._options.lease})
            await asyncio.sleep(_RENEW_INTERVAL)

    # -- output ------------------------------------------------------------------------------------

    async def _follow_output(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(log_files.INTERVAL)
            grown = await loop.run_in_executor(files.disk, self._timeline.note)
            self._workers.phases.on_output(grown)
            self._workers.phases.flush()
            if (waits := self._workers.waits.due()) is not None:
                self._send(waits)
            if self._options.hang_timeout is not None:
                self._report.note_alive(*self._signs_of_life())
            self._console.show()
            if self._supervisor is not None and self._supervisor[1] != processes.parent(
                self._process
            ):
                why = f"{self._supervisor[0]}, the parent of this node's agent, was killed"
                self._supervisor = None
                self._workers.node_failed(why)
                if self._parent is not None:  # the next round must not use this node
                    raise ClusterJobError(why)

    def _signs_of_life(self) -> tuple[float, int]:
        """Return the time of the last output or heartbeat of a worker, and the last step."""
        self._workers.note_touched()
        return max(self._timeline.grown_at, self._workers.alive_at), self._workers.step

    # -- the end -----------------------------------------------------------------------------------

    def _without_coordinator(self) -> Verdict | None:
        """Return the verdict if the job was cancelled, or has ended without this node."""
        if self._requests.cancelled.done():
            return self._end.verdict(JobState.CANCELLED, self._requests.cancelled.result())
        return self._end.recorded()

    def _record_end(self, verdict: Verdict) -> None:
        try:
            self._end.record(verdict, self._metrics.end(), coordinates=self.coordinates)
        except OSError as error:
            self._console.print(
                f"the end of node {self._topology.node_rank} cannot be recorded in {self._job_dir}:"
                f" {error.strerror}"
            )
