"""The agent of one node: follow the coordinator and run the workers through the forkserver."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.environments import scheduler, worker_defaults, worker_endpoints
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.events import now
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.options import LaunchOptions
from clusterjob.node.rendezvous import coordinator_link, messages
from clusterjob.node.rendezvous.coordinator import Coordinator
from clusterjob.node.rendezvous.coordinator_link import Link, LocalLink
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.rendezvous.stop_requests import StopRequests
from clusterjob.node.system import crashes, devices, processes
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, Failure, JobState, Verdict
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient
from clusterjob.node.workers.missing_worker import MissingWorker
from clusterjob.node.workers.worker_failures import Failures, how
from clusterjob.node.workers.worker_status import WorkerStatus

_LOST_GRACE = 0.5  # seconds between SIGTERM and SIGKILL when the coordinator is lost
_QUIT_TIMEOUT = 3.0  # seconds for the forkserver to exit


def _ignore(_message: object) -> None:
    """Ignore a message that needs no action after the handshake."""


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
    ) -> None:
        self._topology = topology
        self._nproc = nproc
        self._options = options
        self._job = job
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._console = console
        self._host = scheduler.node_name()
        self._link: Link | None = None
        self._coordinator: Coordinator | None = None  # on node 0
        self._coordinator_task: asyncio.Task[Verdict] | None = None
        self._world: World | None = None
        self._running: set[int] = set()  # local ranks
        self._exec_reason = ""  # why the workers are not forked, until it is sent
        self._supervisor = scheduler.supervisor(os.environ)
        self._stop_ordered = False
        self._warning_sent = self._kill_sent = False
        self._forkserver_end: asyncio.Future[None] | None = None
        # Node 0 holds one more port, which rank 0 binds itself.
        self._held = worker_endpoints.HeldPorts(nproc + (topology.node_rank == 0))
        self._directory = log_files.node_directory(job_dir, topology.node_rank)
        self._timeline = log_files.Timeline(self._directory)
        self._failures = Failures(
            topology.node_rank,
            self._host,
            directory=self._directory,
            attempt=job.attempt,
            under_torchrun=options.launcher == "torchrun",
        )
        self._status = WorkerStatus(
            topology.node_rank,
            self._host,
            directory=self._directory,
            attempt=job.attempt,
            failures=self._failures,
        )

    # -- from join to verdict ----------------------------------------------------------------------

    async def run(self) -> Verdict:
        """Run this node's part of the job until its processes have ended; return the verdict."""
        loop = asyncio.get_running_loop()
        self._forkserver_end = loop.create_future()
        self._crashes = crashes.Crashes()
        loop.add_reader(self._forkserver.control, self._receive_from_forkserver)
        self._requests = StopRequests(self._options, self._job_dir, attempt=self._job.attempt)
        self._requests.listen(self._forkserver.early)
        if self._supervisor is not None and self._topology.node_rank == 0:
            self._requests.poll_job_dir()  # the coordinator then informs the other nodes
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
                self._coordinator.abort(verdict)
        finally:
            following.cancel()
        if self._coordinator_task is not None:
            self._coordinator_task.cancel()
            await asyncio.wait([self._coordinator_task])
        await self._quit_forkserver()
        self._kill_descendants()  # background processes of the setup lines
        self._timeline.note()
        self._console.finish()
        self._record_end(verdict)
        self._held.close()
        if self._link is not None:
            await self._link.close()
        return verdict

    async def _serve(self) -> Verdict:
        await self._join()
        if self._link is None:
            return self._own_verdict(JobState.CANCELLED, self._requests.cancelled.result())
        handlers: dict[type, Callable[[Any], None]] = {
            messages.Start: self._on_start,
            messages.StartWithStore: self._on_start,
            messages.Stop: self._on_stop,
            messages.Warn: self._on_warn,
            messages.ProbeRanks: self._on_probe_ranks,
            messages.RanksFound: self._on_ranks_found,
            messages.ReportFailures: self._on_report_failures,
            **dict.fromkeys((messages.Heartbeat, messages.Welcome, messages.Refused), _ignore),
        }
        while True:
            order = await self._next_order()
            if isinstance(order, messages.End):
                return order.verdict
            if isinstance(order, messages.ConnectionLost):
                # The coordinator may still receive messages of this node.
                self._send(messages.CoordinatorLost(order.why))
                self._stop_workers(_LOST_GRACE)
                reason = f"node {self._topology.node_rank} lost node 0: {order.why}"
                return self._own_verdict(JobState.LOST, reason)
            if order is not None:
                handlers[type(order)](order)

    async def _next_order(self) -> Any:
        """Return the coordinator's next message; None after a stop request was passed on."""
        assert self._link is not None
        ordering = asyncio.ensure_future(self._link.orders.get())
        waiting: set[asyncio.Future[Any]] = {ordering, self._crashes.first}
        if not self._stop_ordered:
            waiting.add(self._requests.cancelled)
        if not self._warning_sent:
            waiting.add(self._requests.warned)
        if self._coordinator_task is not None:
            waiting.add(self._coordinator_task)
        if not self._kill_sent:
            waiting.add(self._requests.kill_now)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if self._crashes.first.done():
            raise self._crashes.first.result()
        if ordering.done():
            return ordering.result()
        ordering.cancel()
        task = self._coordinator_task
        if task is not None and task.done() and task.exception() is not None:
            task.result()  # raises
        self._send_stop_requests()
        return None

    def _send_stop_requests(self) -> None:
        """Send each new stop request to the coordinator."""
        requests = self._requests
        if requests.warned.done() and not self._warning_sent:
            self._warning_sent = True
            self._send(messages.PreemptionWarning(requests.warned.result()))
        if requests.cancelled.done() and not self._stop_ordered:
            self._stop_ordered = True  # the coordinator's stop order follows
            why = requests.cancelled.result()
            self._send(messages.Cancel(why, interrupt=requests.interrupted))
        if requests.kill_now.done() and not self._kill_sent:
            self._kill_sent = True
            self._send(messages.KillNow())

    async def _join(self) -> None:
        """Join the coordinator. No link is set if the job was cancelled first."""
        address = worker_endpoints.own_address(self._topology.master_addr, self._topology.node_rank)
        hello = messages.Hello(
            node_rank=self._topology.node_rank,
            host=self._host,
            pid=os.getpid(),
            attempt=self._job.attempt,
            nnodes=self._topology.nnodes,
            nproc=self._nproc,
            counted_by=self._job.counted_by,
            endpoints=tuple(worker_endpoints.endpoint(address, p) for p in self._held.ports),
            wants_endpoints=worker_endpoints.may_be_used(self._options.program),
        )
        if self._topology.node_rank == 0:
            self._coordinator = Coordinator(
                self._topology,
                self._options,
                job=self._job,
                job_dir=self._job_dir,
                say=self._console.say,
                watch=self._crashes.watch,
            )
            self._link = LocalLink(self._coordinator.membership, hello)
            # Requests that arrived during the imports: the coordinator handles them before it
            # starts workers.
            self._send_stop_requests()
            self._coordinator_task = asyncio.create_task(self._coordinator.run())
            return
        connecting = asyncio.create_task(
            coordinator_link.connect(
                self._topology,
                self._options,
                job=self._job,
                hello=hello,
                say=self._console.say,
                refusal=self._node_0_refusal,
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

    def _node_0_refusal(self) -> str:
        """Return why node 0 cannot start, from the shared job directory; empty if it may start."""
        refusals = ends.refusals(self._job_dir, self._job.attempt)
        return next((failure.message for failure in refusals if failure.node_rank == 0), "")

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send(message)

    # -- orders of the coordinator -----------------------------------------------------------------

    def _on_start(self, order: messages.Start) -> None:
        gpus = devices.visible_gpus(os.environ)
        world = replace(order.world, gpus=gpus)
        self._world = world
        self._stop_ordered = False
        self._status.begin(world)
        self._running = set(range(1 if self._options.launcher == "torchrun" else world.nproc))
        if self._forkserver.error:
            self._node_failed(self._forkserver.error)
            return
        variables = worker_defaults.quiet_defaults(
            os.environ, world.master_addr, nnodes=world.nnodes
        ) | worker_endpoints.backend_default(os.environ, gpus)
        variables |= {
            contract.JOB_ID: self._job.job_id,
            contract.JOB_DIR: str(self._job_dir),
            contract.ATTEMPT: str(self._job.attempt),
            contract.STORE: contract.store_address(world, self._options.launcher),
            contract.STORE_KEY: contract.store_key(
                self._job.token, self._job.job_id, attempt=self._job.attempt, restart=world.restart
            ),
        }
        self._send_exec_reason()
        store = order.store if isinstance(order, messages.StartWithStore) else None
        if self._forkserver.start_round(forkserver_messages.StartRound(world, variables), store):
            self._send(messages.Running())

    def _on_stop(self, order: messages.Stop) -> None:
        self._stop_workers(order.grace, order.signal)

    def _stop_workers(self, grace: float, number: int = signal.SIGTERM) -> None:
        self._stop_ordered = True
        if self._forkserver.ready and not self._forkserver.gone:
            self._forkserver.send(forkserver_messages.StopWorkers(grace, int(number)))
            return
        self._forkserver.drop_round()
        self._send(messages.Stopped())

    def _on_warn(self, _order: messages.Warn) -> None:
        # Workers that another launcher, such as torchrun, has started poll this file.
        ends.warn(self._job_dir, self._job.attempt)
        self._forkserver.send(forkserver_messages.WarnWorkers())

    def _on_probe_ranks(self, order: messages.ProbeRanks) -> None:
        """Report what each of these workers does; the forkserver probes those that run."""
        if self._world is None:
            return
        wanted = [rank - self._world.first_rank for rank in order.ranks]
        started = self._forkserver.ready and not self._forkserver.waiting
        known = [] if order.note else self._status.known(wanted, started=started)
        if known:
            self._send_probed(known, final=order.final)
        running = tuple(rank for rank in wanted if rank in self._running and started)
        if running:
            self._forkserver.send(
                forkserver_messages.ProbeWorkers(running, final=order.final, note=order.note)
            )

    def _on_ranks_found(self, order: messages.RanksFound) -> None:
        self._status.note_found(order.local_rank, order.lines)

    def _on_report_failures(self, _order: messages.ReportFailures) -> None:
        """Report all failures known by now; the forkserver first reports every worker's end."""
        if self._forkserver.ready and not self._forkserver.gone:
            self._forkserver.send(forkserver_messages.ReportEnds())
        else:
            self._send_early_exits()

    # -- messages of the forkserver ----------------------------------------------------------------

    def _receive_from_forkserver(self) -> None:
        handlers: dict[type, Callable[[Any], None]] = {
            forkserver_messages.Ready: self._on_ready,
            forkserver_messages.WorkerFailing: self._on_worker_failing,
            forkserver_messages.WorkerExited: self._on_worker_exited,
            forkserver_messages.WorkerWaiting: self._on_worker_waiting,
            forkserver_messages.WorkersProbed: self._on_workers_probed,
            forkserver_messages.StoreExited: self._on_store_exited,
            forkserver_messages.EndsReported: self._on_ends_reported,
            forkserver_messages.WorkersGone: self._on_workers_gone,
        }
        message = self._forkserver.receive()
        if message is None:
            self._on_forkserver_exited()
        else:
            handlers[type(message)](message)

    def _on_ready(self, message: forkserver_messages.Ready) -> None:
        if self._forkserver.mark_ready():
            self._send(messages.Running())
        if message.why and self._options.start == "fork":
            self._forkserver_failed(f"--start fork is impossible: {message.why}")
        elif message.why:
            node = f"node {self._topology.node_rank}"
            self._exec_reason = f"{node} starts its workers by exec: {message.why}"
            self._console.say(self._exec_reason)
            self._send_exec_reason()

    def _send_exec_reason(self) -> None:
        if self._link is not None and self._exec_reason:
            self._link.send(messages.StartedByExec(self._exec_reason))
            self._exec_reason = ""

    def _on_worker_waiting(self, message: forkserver_messages.WorkerWaiting) -> None:
        if self._world is not None:
            self._send(
                messages.RanksMissing(
                    self._world.restart,
                    message.local_rank,
                    ranks=message.ranks,
                    final=message.final,
                )
            )

    def _on_workers_probed(self, message: forkserver_messages.WorkersProbed) -> None:
        found = [
            self._status.describe(each.local_rank, each.pid, text=each.text, stack=each.stack)
            for each in message.workers
        ]
        self._send_probed(found, final=message.final)

    def _send_probed(self, found: Sequence[MissingWorker], *, final: bool) -> None:
        if self._world is not None:
            self._send(
                messages.RanksProbed(
                    self._world.restart,
                    final=final,
                    lines=self._status.lines(found),
                    failures=self._status.missing_failures(found) if final else (),
                )
            )

    def _on_store_exited(self, message: forkserver_messages.StoreExited) -> None:
        if not self._stop_ordered:
            ended = how(*processes.exit_code_of(message.status))
            last = log_files.last_lines(self._directory / STORE_LOG, 1)
            self._node_failed(": ".join([f"torch's store was lost ({ended})", *last]))

    def _on_ends_reported(self, _message: forkserver_messages.EndsReported) -> None:
        self._send_early_exits()

    def _send_early_exits(self) -> None:
        if self._world is not None:
            exits = tuple(messages.EarlyExit(*each) for each in self._status.early_exits())
            self._send(messages.FailuresReported(self._world.restart, exits))

    def _on_workers_gone(self, _message: forkserver_messages.WorkersGone) -> None:
        self._send(messages.Stopped())

    def _on_forkserver_exited(self) -> None:
        """Fail, unless the forkserver was stopped: the kernel has killed the workers with it."""
        assert self._forkserver_end is not None
        asyncio.get_running_loop().remove_reader(self._forkserver.control)
        ended = how(*self._forkserver.reap())
        if not self._forkserver_end.done():
            self._forkserver_end.set_result(None)
        self._kill_descendants()
        if self._stop_ordered:
            self._send(messages.Stopped())
        else:
            self._forkserver_failed(f"the forkserver was lost ({ended})")

    def _forkserver_failed(self, why: str) -> None:
        """Report that no workers can run: now if a round runs, else when one starts."""
        self._forkserver.error = why
        if self._world is not None:
            self._node_failed(why)

    def _kill_descendants(self) -> None:
        """Kill every process below this one, adopted orphans included."""
        for _ in range(100):
            try:
                left = processes.descendants(os.getpid())
            except OSError:  # no free descriptor; the kernel ends the workers with the forkserver
                return
            if not left:
                return
            for pid in left:
                processes.send_signal(pid, signal.SIGKILL)
            time.sleep(0.01)

    # -- failures ----------------------------------------------------------------------------------

    def _on_worker_failing(self, message: forkserver_messages.WorkerFailing) -> None:
        assert self._world is not None
        failure = self._failures.of_worker(
            self._world,
            message.local_rank,
            code=message.exit_code,
            signal_name=None,
            message=message.message,
            kind=forkserver_messages.failure_kind(message),
        )
        self._send_failure(failure, message.monotonic, exited=not message.started)

    def _on_worker_exited(self, message: forkserver_messages.WorkerExited) -> None:
        assert self._world is not None
        local_rank = message.local_rank
        self._running.discard(local_rank)
        code, signal_name = processes.exit_code_of(message.status)
        self._status.ended[local_rank] = how(code, signal_name)
        if code == 0 and self._options.launcher == "agent":
            self._status.note_exit(local_rank, message.monotonic)
            self._send(messages.Succeeded(local_rank))
        if code != 0:
            failure = self._failures.of_worker(
                self._world,
                local_rank,
                code=code,
                signal_name=signal_name,
                message=how(code, signal_name),
            )
            self._send_failure(failure, message.monotonic, exited=True)
        if not self._running:
            self._send(messages.Done())

    def _node_failed(self, why: str) -> None:
        self._send_failure(self._failures.of_node(why), time.monotonic(), exited=True)

    def _send_failure(self, failure: Failure, monotonic: float, *, exited: bool) -> None:
        age = max(0.0, time.monotonic() - monotonic)
        self._send(messages.Failing(failure, age, exited=exited))

    # -- output ------------------------------------------------------------------------------------

    async def _follow_output(self) -> None:
        while True:
            await asyncio.sleep(log_files.INTERVAL)
            self._timeline.note()
            self._console.show()
            if self._supervisor is not None and self._supervisor[1] != os.getppid():
                name, self._supervisor = self._supervisor[0], None
                self._node_failed(f"{name}, the parent of this node's agent, was killed")

    # -- the end -----------------------------------------------------------------------------------

    async def _quit_forkserver(self) -> None:
        assert self._forkserver_end is not None
        self._stop_ordered = True
        if self._forkserver.ready:
            self._forkserver.send(forkserver_messages.Quit())
        elif not self._forkserver.gone:
            processes.send_signal(self._forkserver.pid, signal.SIGKILL)
        try:
            await asyncio.wait_for(asyncio.shield(self._forkserver_end), _QUIT_TIMEOUT)
        except asyncio.TimeoutError:
            processes.send_signal(self._forkserver.pid, signal.SIGKILL)
            await self._forkserver_end

    def _own_verdict(self, state: JobState, reason: str) -> Verdict:
        cancelled = state is JobState.CANCELLED
        failure = None if cancelled else self._failures.of_node(reason)
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
                end=verdict.to_json() | {"host": self._host},
            )
            if self._topology.node_rank == 0 and not ends.has_result(
                self._job_dir, self._job.attempt
            ):
                ends.write_result(self._job_dir, verdict)
        except OSError as error:
            node = f"node {self._topology.node_rank}"
            self._console.say(
                f"the end of {node} cannot be recorded in {self._job_dir}: {error.strerror}"
            )
