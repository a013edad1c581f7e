"""Run one node's part of a job: join the coordinator, follow its orders, record the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from clusterjob.errors import ClusterJobError, RendezvousError
from clusterjob.node import preflight
from clusterjob.node.agent.connection import Connection
from clusterjob.node.agent.node_metrics import NodeMetrics
from clusterjob.node.agent.node_workers import NodeWorkers, StackReports
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.agent.stop_requests import StopRequests
from clusterjob.node.decide import MEASURED
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.events import now
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.rendezvous.messages import Succession
from clusterjob.node.stacks import grouping
from clusterjob.node.states import Measure, Order, OrderWithStore
from clusterjob.node.system import crashes, files, network, processes
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, JobState, Verdict
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier

_RENEW_INTERVAL = 0.5  # seconds
_GONE_SECONDS = 6.0  # seconds for the workers to end before this node joins again
_MAX_MEASURED = 1 << 24  # bytes of the preflight's result
_MEASURED_SECONDS = 5.0  # seconds for the result to arrive


class Agent:
    """The agent of one node; it needs a running event loop.

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
        topology, self._job = node.topology, node.identity
        self._topology = topology
        self._options = node.options
        self._job_dir = node.directory
        self._forkserver = forkserver
        self._console = console
        self._notifier = notifier
        self._parent = parent
        self._replaces = parent is not None and parent.starts > 0  # an agent that was killed
        self._process = os.getpid() if parent is None else parent.pid  # the scheduler's child
        self._supervisor = this_node.supervisor(os.environ, self._process)
        self._crashes = crashes.Crashes()
        self._report = StateReport((parent is not None and parent.kept("rounds")) or 0)
        self._requests = StopRequests(
            node.options, node.directory, attempt=self._job.attempt, report=self._report
        )
        # One more port, which rank 0 binds itself.
        self._held = worker_variables.hold_ports(nproc + 1)
        self._connection = Connection(
            node,
            self._hello(nproc),
            report=self._report,
            requests=self._requests,
            crashes=self._crashes,
            notifier=notifier,
            parent=parent,
            polls=self._supervisor is not None,
        )
        self._workers = NodeWorkers(node, forkserver, console, report=self._report)
        self._stacks = StackReports(
            forkserver.pid,
            topology.node_rank,
            workers=self._workers,
            connection=self._connection,
            report=self._report,
            crashes=self._crashes,
        )
        self._metrics = NodeMetrics(node, forkserver.pid, workers=self._workers)
        self._order = Order()  # the last one
        self._measuring: asyncio.Task[None] | None = None  # of the preflight
        self._ended = False

    # -- from join to verdict ----------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run this node's part of the job until its processes have ended; return the verdict."""
        files.use_thread()
        self._workers.phases.begin(None if self._replaces else self._process)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._forkserver.control, self._receive)
        self._requests.listen(self._forkserver.early)
        if self._notifier is not None:
            self._workers.spared = self._notifier.pids
            if self._topology.node_rank == 0 and not self._replaces:
                self._notifier.attempt_begins(self._job.attempt)
        await self._metrics.serve()
        following = asyncio.create_task(self._follow_output())
        self._crashes.watch(following)
        self._crashes.watch(asyncio.create_task(self._connection.report()))
        try:
            verdict = await self._serve()
        except Exception as error:
            if isinstance(error, ClusterJobError):
                verdict = self._own_verdict(JobState.FAILED, error.message)
            else:
                who = f"the agent of node {self._topology.node_rank} on {this_node.node_name()}"
                why = f"{who} (pid {os.getpid()}) failed: {crashes.summary(error)}"
                verdict = self._own_verdict(JobState.FAILED, why)
                self._connection.end_job(verdict)
            await self._connection.stop_coordinating()
        finally:
            following.cancel()
        self._ended = True
        if self._notifier is not None and self._reports_end(verdict):
            self._notifier.ended(verdict)
        self._workers.stop_ordered = True
        self._stop_measuring()
        await self._forkserver.quit()
        self._workers.flight_recorder.close()
        # Background processes of the setup lines.
        processes.kill_descendants(*self._workers.spared)
        self._workers.phases.flush()
        # After all earlier writes.
        await loop.run_in_executor(files.disk, self._workers.timeline.note)
        self._console.finish()
        self._record_end(verdict)
        for holder in self._held:
            holder.close()
        await self._connection.end()
        return verdict

    @property
    def coordinates(self) -> bool:
        """Whether the coordinator is in this process."""
        return self._connection.coordinates

    async def finish_notifications(self) -> None:
        """Wait a limited time until the end is notified; a second Ctrl-C ends the wait."""
        if self._notifier is not None:
            await self._notifier.close(hurry=self._requests.kill_now)
            processes.kill_descendants()

    def _hello(self, nproc: int) -> messages.Hello:
        topology = self._topology
        address = this_node.own_address(topology)
        # Node 0 of hosts with several addresses has them all in `address`.
        host = address.partition(",")[0]
        ports = [holder.getsockname()[1] for holder in self._held]
        return messages.Hello(
            node_rank=topology.node_rank,
            host=this_node.node_name(),
            pid=os.getpid(),
            attempt=self._job.attempt,
            nnodes=topology.nnodes,
            nproc=nproc,
            address=address,
            counted_by=self._job.counted_by,
            endpoints=tuple(network.with_port(host, port) for port in ports),
            wants_endpoints=worker_variables.may_use_paddle(self._options.program),
            again=self._parent is not None and bool(self._parent.kept("joined")),
            rounds=self._report.state.seen,
            key=self._job.key,
        )

    async def _serve(self) -> Verdict:
        connection = self._connection
        if not await connection.join():
            ended = self._without_coordinator()
            return ended or self._own_verdict(JobState.LOST, "the job has ended without this node")
        self._crashes.watch(asyncio.create_task(self._keep_lease()))
        while True:
            order = await connection.next_order()
            if isinstance(order, messages.End):
                return order.verdict
            if isinstance(order, messages.ConnectionLost):
                if (lost := await self._on_coordinator_lost(order)) is not None:
                    return lost
            elif isinstance(order, Succession):
                connection.note_successors(order)
            elif isinstance(order, Order):
                self._follow(order)

    def _follow(self, order: Order) -> None:
        """Do what the coordinator wants and this node does not do yet."""
        round_ = self._report.state.round
        if order.round < round_:
            return
        done, self._order = self._order, order
        if order.round > round_ and (order.world is not None or order.stop is not None):
            round_ = order.round
            self._report.begin(round_)
            if order.world is not None:
                self._connection.note_round()
                self._renew_lease()  # that of the last coordinator may be over
                self._metrics.begin_round(order.world)
                self._workers.start(order)
        if order.stop is not None and (order.round, order.stop) != (done.round, done.stop):
            self._workers.stop(order.stop.grace, order.stop.signal, early=order.stop.early)
        if order.warned and not done.warned:
            self._workers.warn()
        if order.measure is None:
            self._stop_measuring()
        elif done.measure is None:
            self._measuring = asyncio.create_task(self._measure(order, order.measure))
            self._crashes.watch(self._measuring)
        if order.round == round_:
            done = done if done.round == round_ else Order()
            self._workers.answer(order, done)
            self._stacks.follow(order, done)

    async def _on_coordinator_lost(self, lost: messages.ConnectionLost) -> Verdict | None:
        """Stop the workers, and go on with the next coordinator; else return the verdict."""
        connection, node_rank = self._connection, self._topology.node_rank
        # The coordinator may still receive messages of this node.
        connection.send(messages.CoordinatorLost(lost.why))
        reason = f"node {node_rank} lost the coordinator: {lost.why}"
        saved = ("", 0)
        if not self._options.restarts:  # else other nodes may start workers soon
            # An error of the connection may have discarded the end of the job.
            if (verdict := self._recorded()) is not None:
                return verdict
            restart = max(0, self._report.state.round)
            round_ = grouping.Round(self._job.job_id, self._job.attempt, restart, node_rank)
            saved = await self._stacks.save(self._job_dir, round_, why=reason)
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
        verdict = self._own_verdict(JobState.LOST, reason)
        return replace(verdict, evidence=saved[0], evidence_ranks=saved[1])

    def _receive(self) -> None:
        """Handle one message of the forkserver; if it was lost, let another agent replace this."""
        if not (why := self._workers.receive()):
            return
        asyncio.get_running_loop().remove_reader(self._forkserver.control)
        if (
            self._parent is not None
            and self._parent.starts_again
            and not self._ended
            and not self._requests.cancelled.done()
        ):
            self._connection.send(self._report.now())  # this process ends before its next turn
            self._parent.replace_agent(why)

    async def _keep_lease(self) -> None:
        while self._parent is not None:
            self._renew_lease()
            await asyncio.sleep(_RENEW_INTERVAL)

    def _renew_lease(self) -> None:
        """Tell the forkserver, which outlives this process, until when the workers may run."""
        if self._parent is not None and (heard_at := self._connection.heard_at):
            self._parent.lease.write({"until": heard_at + self._options.lease})

    async def _follow_output(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(log_files.INTERVAL)
            grown = await loop.run_in_executor(files.disk, self._workers.timeline.note)
            self._workers.phases.on_output(grown)
            self._workers.phases.flush()
            if (waits := self._workers.waits.due()) is not None:
                self._connection.send(waits)
            if self._options.hang_timeout is not None:
                self._report.note_alive(*self._workers.signs_of_life())
            self._console.show()
            if self._supervisor is not None and self._supervisor[1] != processes.parent(
                self._process
            ):
                why = f"{self._supervisor[0]}, the parent of this node's agent, was killed"
                self._supervisor = None
                self._workers.fail_node(why)
                if self._parent is not None:  # the next round must not use this node
                    raise ClusterJobError(why)

    # -- the preflight -----------------------------------------------------------------------------

    async def _measure(self, order: Order, wanted: Measure) -> None:
        """Measure this node in a process of the forkserver, which ends with this call."""
        if self._forkserver.error:
            self._report.set(measured=self._forkserver.error[:300])
            return
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        own.setblocking(False)
        variables = worker_variables.quiet_defaults(
            os.environ, self._topology.master_addr, nnodes=self._topology.nnodes
        )
        store = order.store if isinstance(order, OrderWithStore) else None
        seconds = wanted.start_seconds + preflight.SECONDS + _MEASURED_SECONDS
        begin = json.dumps(vars(wanted) | {"seconds": seconds}).encode()
        with own:
            self._forkserver.send(forkserver_messages.StartMeasuring(variables), other)
            socket.send_fds(own, [begin], [store.fileno()] if store is not None else [])
            if store is not None:
                store.close()
            data, loop = b"", asyncio.get_running_loop()
            while len(data) < _MAX_MEASURED:
                try:
                    part = await loop.sock_recv(own, 1 << 16)
                except OSError:
                    part = b""
                if not part:
                    break
                data += part
        try:
            error = json.loads(data).get("error", "")
        except (ValueError, AttributeError):
            error = "it has ended; its log is preflight.log"
        if store is not None:  # before the state: the coordinator in this process needs both
            self._connection.send(messages.PreflightFound(data))
        self._report.set(measured=str(error)[:300] or MEASURED)

    def _stop_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()

    # -- the end -----------------------------------------------------------------------------------

    def _own_verdict(self, state: JobState, reason: str) -> Verdict:
        """Return the verdict of this node, whose coordinator gives none."""
        cancelled = state is JobState.CANCELLED
        return Verdict(
            state,
            CANCELLED_EXIT_CODE if cancelled else 1,
            reason=reason,
            failure=None if cancelled else self._workers.failures.of_node(reason),
            attempt=self._job.attempt,
            ended_at=now(),
        )

    def _recorded(self) -> Verdict | None:
        """Return the verdict of this attempt from the shared job directory; None without one."""
        verdict = ends.read_result(self._job_dir)
        return verdict if verdict is not None and verdict.attempt == self._job.attempt else None

    def _without_coordinator(self) -> Verdict | None:
        """Return the verdict if the job was cancelled, or has ended without this node."""
        if self._requests.cancelled.done():
            return self._own_verdict(JobState.CANCELLED, self._requests.cancelled.result())
        return self._recorded()

    def _reports_end(self, verdict: Verdict) -> bool:
        """Return whether this node notifies of the end of the job."""
        if self.coordinates or self._topology.node_rank:
            return self.coordinates
        if verdict.state is JobState.LOST:  # the other nodes go on if they are the larger part
            return self._topology.nnodes <= 2
        return not self._connection.follows

    def _record_end(self, verdict: Verdict) -> None:
        """Write this node's end, and the job's verdict if the coordinator here could not."""
        job_dir, node_rank = self._job_dir, self._topology.node_rank
        try:
            end = verdict.to_json() | {"host": this_node.node_name(), "usage": self._metrics.end()}
            # One node looks at each copy of the code: the coordinator's, and those with a copy.
            shared = node_rank and log_files.node_directory(job_dir, 0).exists()
            if not self.coordinates and not shared:
                end["in_code"] = ends.files_in_code()
            ends.write(job_dir, node_rank, end=end)
            if self.coordinates and not ends.has_result(job_dir, self._job.attempt):
                ends.write_result(job_dir, verdict)
        except OSError as error:
            self._console.print(
                f"the end of node {node_rank} cannot be recorded in {job_dir}: {error.strerror}"
            )
