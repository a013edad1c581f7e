"""Run one node's part of a job: join the coordinator, follow its orders, record the end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import ClusterJobError
from clusterjob.node.agent.node_metrics import NodeMetrics
from clusterjob.node.agent.node_workers import NodeWorkers
from clusterjob.node.agent.stack_reports import StackReports
from clusterjob.node.environments import scheduler, worker_endpoints
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.events import now
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import coordinator_link, messages
from clusterjob.node.rendezvous.coordinator import Coordinator
from clusterjob.node.rendezvous.coordinator_link import LocalLink, RemoteLink
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.stop_requests import StopRequests
from clusterjob.node.stacks import evidence_files
from clusterjob.node.system import crashes, network, processes
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, JobState, Verdict
from clusterjob.node.workers.forkserver_client import ForkserverClient

if TYPE_CHECKING:
    from clusterjob.node.notifications.notifier import Notifier

_LOST_GRACE = 0.5  # seconds between SIGTERM and SIGKILL when the coordinator is lost


class Agent:
    """The agent of one node.

    Args:
        topology: this node.
        nproc: workers of this node.
        options: the node's options.
        job: the job's identity and secret.
        job_dir: the job's directory, as this node sees it.
        forkserver: the forkserver, which was forked before.
        console: prints the agent's messages and the workers' output.
        notifier: sends notifications; None without --notify, and on other nodes.
    """

    def __init__(
        self,
        topology: Topology,
        nproc: int,
        options: LaunchOptions,
        job: JobIdentity,
        job_dir: Path,
        forkserver: ForkserverClient,
        console: Console,
        notifier: Notifier | None = None,
    ) -> None:
        self._topology = topology
        self._nproc = nproc
        self._options = options
        self._job = job
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._console = console
        self._notifier = notifier
        self._host = scheduler.node_name()
        self._link: LocalLink | RemoteLink | None = None
        self._coordinator: Coordinator | None = None  # on node 0
        self._coordinator_task: asyncio.Task[Verdict] | None = None
        self._supervisor = scheduler.supervisor(os.environ)
        self._sent: set[asyncio.Future[Any]] = set()  # the stop requests that were sent
        # Node 0 holds one more port, which rank 0 binds itself.
        self._held = worker_endpoints.HeldPorts(nproc + (topology.node_rank == 0))
        self._timeline = log_files.Timeline(log_files.node_directory(job_dir, topology.node_rank))
        self._workers = NodeWorkers(
            topology,
            options,
            job=job,
            job_dir=job_dir,
            forkserver=forkserver,
            console=console,
            send=self._send,
        )
        self._reports = StackReports(
            forkserver.pid,
            topology.node_rank,
            dumps=self._workers.dumps,
            signs=self._signs_of_life,
            send=self._send,
            watch=lambda task: self._crashes.watch(task),  # noqa: PLW0108 - made in run()
        )
        self._restart = 0  # the round
        self._metrics = NodeMetrics(
            topology,
            options,
            job_id=job.job_id,
            attempt=job.attempt,
            job_dir=job_dir,
            forkserver=forkserver.pid,
            timeline=self._timeline,
            alive=lambda: self._workers.alive_at,
            print_line=console.print,
        )

    # -- from join to verdict ----------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run this node's part of the job until its processes have ended; return the verdict."""
        self._workers.phases.begin()
        self._crashes = crashes.Crashes()
        asyncio.get_running_loop().add_reader(self._forkserver.control, self._workers.receive)
        self._requests = StopRequests(self._options, self._job_dir, attempt=self._job.attempt)
        self._requests.listen(self._forkserver.early)
        if self._supervisor is not None and self._topology.node_rank == 0:
            self._requests.poll_job_dir()  # node 0's coordinator informs the other nodes
        if self._notifier is not None:
            self._workers.sender = await self._notifier.start()
        await self._metrics.serve()
        following = asyncio.create_task(self._follow_output())
        self._crashes.watch(following)
        try:
            verdict = await self._serve()
        except ClusterJobError as error:
            verdict = self._own_verdict(JobState.FAILED, error.message)
        except Exception as error:
            who = f"the agent of node {self._topology.node_rank} on {self._host}"
            why = f"{who} (pid {os.getpid()}) failed: {crashes.summary(error)}"
            verdict = self._own_verdict(JobState.FAILED, why)
            if self._coordinator is not None:
                self._coordinator.membership.broadcast(messages.End(verdict))
        finally:
            following.cancel()
        if self._notifier is not None:
            self._notifier.ended(verdict)
        if self._coordinator_task is not None:
            self._coordinator_task.cancel()
            await asyncio.wait([self._coordinator_task])
        self._workers.stop_ordered = True
        await self._forkserver.quit()
        self._workers.close()
        processes.kill_descendants(
            keep=self._workers.sender
        )  # background processes of the setup lines
        self._timeline.note()
        self._workers.phases.flush()
        self._console.finish()
        self._record_end(verdict)
        self._held.close()
        if self._link is not None:
            await self._link.close()
        return verdict

    async def finish_notifications(self) -> None:
        """Wait a limited time until the end is notified; a second Ctrl-C ends the wait."""
        if self._notifier is not None:
            await self._notifier.close(hurry=self._requests.kill_now)
            processes.kill_descendants()

    async def _serve(self) -> Verdict:
        await self._join()
        if self._link is None:
            return self._own_verdict(JobState.CANCELLED, self._requests.cancelled.result())
        handlers: dict[type, Callable[[Any], None]] = {
            messages.Start: self._start_round,
            messages.StartWithStore: self._start_round,
            messages.Stop: lambda stop: self._workers.stop(stop.grace, stop.signal),
            messages.Warn: lambda _warn: self._workers.warn(),
            messages.ProbeRanks: self._workers.probe,
            messages.RanksFound: self._workers.note_found,
            messages.ReportFailures: lambda _report: self._workers.report_failures(),
            messages.CollectStacks: self._reports.collect,
            messages.ReportProgress: self._reports.report_progress,
            # The handshake has handled Welcome and Refused, and the link handles heartbeats.
            messages.Heartbeat: lambda _message: None,
            messages.Welcome: lambda _message: None,
            messages.Refused: lambda _message: None,
        }
        while True:
            order = await self._next_order()
            if isinstance(order, messages.End):
                return order.verdict
            if isinstance(order, messages.ConnectionLost):
                # The coordinator may still receive messages of this node.
                self._send(messages.CoordinatorLost(order.why))
                reason = f"node {self._topology.node_rank} lost node 0: {order.why}"
                saved = await self._reports.save(self._job_dir, self._round(), why=reason)
                self._workers.stop(_LOST_GRACE)
                verdict = self._own_verdict(JobState.LOST, reason)
                return replace(verdict, evidence=saved[0], evidence_ranks=saved[1])
            if order is not None:
                handlers[type(order)](order)

    def _start_round(self, order: messages.Start) -> None:
        """Start a round of workers, and record the growth of their files."""
        self._restart = order.world.restart
        directory = log_files.node_directory(self._job_dir, self._topology.node_rank)
        for files in log_files.round_files(
            directory,
            order.world,
            attempt=self._job.attempt,
            torchrun=self._options.launcher == "torchrun",
        ):
            self._timeline.follow(files)
        self._metrics.begin_round(order.world)
        self._workers.start(order)

    async def _next_order(self) -> Any:
        """Return the coordinator's next message; None after a stop request was passed on."""
        assert self._link is not None
        ordering = asyncio.ensure_future(self._link.orders.get())
        waiting = {ordering, self._crashes.first, *self._unsent_requests()}
        if self._coordinator_task is not None:
            waiting.add(self._coordinator_task)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            raise self._crashes.first.result()
        if ordering.done():
            return ordering.result()
        ordering.cancel()
        task = self._coordinator_task
        if task is not None and task.done() and task.exception() is not None:
            task.result()  # raises the coordinator's error
        self._send_stop_requests()
        return None

    def _unsent_requests(self) -> dict[asyncio.Future[Any], Any]:
        """Return the unsent stop requests, arrived or not, each with the maker of its message."""
        requests = self._requests
        unsent: dict[asyncio.Future[Any], Any] = {
            requests.warned: messages.PreemptionWarning,
            requests.cancelled: lambda _why: self._cancellation(),
            requests.kill_now: lambda _none: messages.KillNow(),
        }
        if self._workers.stop_ordered:
            del unsent[requests.cancelled]
        return {request: make for request, make in unsent.items() if request not in self._sent}

    def _send_stop_requests(self) -> None:
        """Send each new stop request to the coordinator."""
        for request, make in self._unsent_requests().items():
            if request.done():
                self._send(make(request.result()))
                if request is self._requests.cancelled:
                    self._workers.stop_ordered = True  # the coordinator's stop order follows
                else:
                    self._sent.add(request)

    async def _join(self) -> None:
        """Join the coordinator; if the job is cancelled first, leave the link unset."""
        address = worker_endpoints.own_address(self._topology.master_addr, self._topology.node_rank)
        hello = messages.Hello(
            node_rank=self._topology.node_rank,
            host=self._host,
            pid=os.getpid(),
            attempt=self._job.attempt,
            nnodes=self._topology.nnodes,
            nproc=self._nproc,
            counted_by=self._job.counted_by,
            endpoints=tuple(network.with_port(address, p) for p in self._held.ports),
            wants_endpoints=worker_endpoints.may_be_used(self._options.program),
        )
        if self._topology.node_rank == 0:
            self._coordinator = Coordinator(
                self._topology,
                self._options,
                job=self._job,
                job_dir=self._job_dir,
                print_line=self._console.print,
                watch=self._crashes.watch,
                notifier=self._notifier,
            )
            self._link = LocalLink(self._coordinator.membership, hello)
            # The coordinator handles requests that arrived during the imports before it starts
            # workers.
            self._send_stop_requests()
            self._coordinator_task = asyncio.create_task(self._coordinator.run())
            return
        connecting = asyncio.create_task(
            coordinator_link.connect(
                self._topology,
                self._options,
                job=self._job,
                hello=hello,
                print_line=self._console.print,
                refusal=self._node_0_refusal,
                leave=self._cancellation,
            )
        )
        either: set[asyncio.Future[Any]] = {
            connecting,
            self._requests.cancelled,
            self._crashes.first,
        }
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            connecting.cancel()
            raise self._crashes.first.result()
        if connecting.done():
            self._link = link = connecting.result()
            for task in link.tasks:
                self._crashes.watch(task)
        else:
            connecting.cancel()

    def _cancellation(self) -> messages.Cancel | None:
        """Return the message that the job was cancelled, if it was."""
        requests = self._requests
        if not requests.cancelled.done():
            return None
        return messages.Cancel(
            requests.cancelled.result(),
            interrupt=requests.interrupted,
            stacks=ends.stacks_wanted(self._job_dir) or requests.terminated,
        )

    def _node_0_refusal(self) -> str:
        """Return why node 0 cannot start, from the shared job directory; empty if it may start."""
        refusals = ends.refusals(self._job_dir, self._job.attempt)
        return next((failure.message for failure in refusals if failure.node_rank == 0), "")

    def _send(self, message: Any) -> bool:
        """Send a message to the coordinator; return False without a connection."""
        if self._link is None:
            return False
        self._link.send(message)
        return True

    # -- output ------------------------------------------------------------------------------------

    async def _follow_output(self) -> None:
        while True:
            await asyncio.sleep(log_files.INTERVAL)
            self._workers.phases.on_output(self._timeline.note())
            self._workers.phases.flush()
            self._console.show()
            if self._supervisor is not None and self._supervisor[1] != os.getppid():
                name, self._supervisor = self._supervisor[0], None
                self._workers.node_failed(f"{name}, the parent of this node's agent, was killed")

    def _signs_of_life(self) -> tuple[float, int]:
        """Return the time of the last output or heartbeat of a worker, and the last step."""
        self._workers.note_touched()
        return max(self._timeline.grown_at, self._workers.alive_at), self._workers.step

    def _round(self) -> evidence_files.Round:
        return evidence_files.Round(
            self._job.job_id, self._job.attempt, self._restart, self._topology.node_rank
        )

    # -- the end -----------------------------------------------------------------------------------

    def _own_verdict(self, state: JobState, reason: str) -> Verdict:
        cancelled = state is JobState.CANCELLED
        failure = None if cancelled else self._workers.failures.of_node(reason)
        return Verdict(
            state,
            CANCELLED_EXIT_CODE if cancelled else 1,
            reason=reason,
            failure=failure,
            attempt=self._job.attempt,
            ended_at=now(),
        )

    def _record_end(self, verdict: Verdict) -> None:
        """Write this node's end, and on node 0 the job's verdict if the coordinator wrote none."""
        try:
            ends.write(
                self._job_dir,
                self._topology.node_rank,
                end=verdict.to_json() | {"host": self._host, "usage": self._metrics.end()},
            )
            if self._topology.node_rank == 0 and not ends.has_result(
                self._job_dir, self._job.attempt
            ):
                ends.write_result(self._job_dir, verdict)
        except OSError as error:
            self._console.print(
                f"the end of node {self._topology.node_rank} cannot be recorded in {self._job_dir}:"
                f" {error.strerror}"
            )
