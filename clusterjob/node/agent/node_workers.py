"""Run one node's workers through the forkserver, and report them to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from clusterjob.node import contract
from clusterjob.node.agent.node_waits import NodeWaits
from clusterjob.node.agent.phase_recorder import PhaseRecorder
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.job_dir import HEARTBEAT, STORE_LOG
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.states import Found, Missing, Order, OrderWithStore, Probe
from clusterjob.node.system import devices, files, processes
from clusterjob.node.verdict import FailureKind
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.flight_recorder import Dumps, Pipes
from clusterjob.node.workers.forkserver_client import ForkserverClient
from clusterjob.node.workers.worker_failures import Failures, WorkerStatus, how


class NodeWorkers:
    """The workers of one node.

    Args:
        node: the job, as this node sees it.
        forkserver: starts, reaps and stops the workers.
        console: prints messages for the user.
        report: the state of this node.
        replace_agent: lets a new agent with a new forkserver replace this one, for the given
            reason; returns if that is not possible.

    Attributes:
        stop_ordered: whether the workers of this round must stop.
        failures: describes the failures of this node and its workers.
        alive_at: the monotonic time of the last heartbeat of a worker.
        step: the largest step in a heartbeat of this round; -1 without one.
        spared: pids of the processes that send notifications now; they outlive the workers.
        phases: records the phases of the node and its ranks.
        gone: set while no worker runs.
        waits: keeps how long the workers wait in collectives.
    """

    def __init__(
        self,
        node: NodeJob,
        forkserver: ForkserverClient,
        console: Console,
        report: StateReport,
        replace_agent: Callable[[str], None] = lambda _why: None,
    ) -> None:
        topology, job, job_dir = node.topology, node.identity, node.directory
        self._topology = topology
        self._options = node.options
        self._job = job
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._console = console
        self._report = report
        self._replace_agent = replace_agent
        self._status: WorkerStatus | None = None  # of this round
        self._running: set[int] = set()  # local ranks of the workers that run
        self._pipes: Pipes | None = None
        self._probe = 0  # the number of the newest question about missing ranks
        self.stop_ordered = False
        self.gone = asyncio.Event()
        self.gone.set()
        self.spared: set[int] = set()
        self._drain: int | None = None  # the process that writes the workers' output
        self.alive_at = time.monotonic()
        self.step = -1
        self._touched = 0
        self.phases = PhaseRecorder(job_dir, topology.node_rank, attempt=job.attempt, report=report)
        self.waits = NodeWaits()
        self.failures = Failures(
            topology.node_rank,
            this_node.node_name(),
            directory=log_files.node_directory(job_dir, topology.node_rank),
            attempt=job.attempt,
            under_torchrun=node.options.launcher == "torchrun",
        )

    # -- orders of the coordinator -----------------------------------------------------------------

    def start(self, order: Order) -> None:
        """Start a round of workers."""
        assert order.world is not None
        gpus = devices.visible_gpus(os.environ)
        world = replace(order.world, gpus=gpus)
        self.stop_ordered, self.step = False, -1
        self.gone.clear()
        self._status = WorkerStatus(self.failures, world)
        self._running = set(range(1 if self._options.launcher == "torchrun" else world.nproc))
        if self._forkserver.error:
            self.node_failed(self._forkserver.error)
            return
        variables = worker_variables.quiet_defaults(
            os.environ, world.master_addr, nnodes=world.nnodes
        )
        variables |= worker_variables.cpu_defaults(os.environ, gpus)
        variables |= {
            contract.JOB_ID: self._job.job_id,
            contract.JOB_DIR: str(self._job_dir),
            contract.ATTEMPT: str(self._job.attempt),
            contract.STORE: contract.store_address(world, self._options.launcher),
            contract.STORE_KEY: contract.store_key(
                self._job.token, self._job.job_id, attempt=self._job.attempt, restart=world.restart
            ),
        }
        if self._pipes is None:
            with contextlib.suppress(OSError):  # no dumps
                self._pipes = Pipes()
        variables |= self.dumps(world.restart).variables(os.environ)
        if self._options.metrics:
            variables[contract.WAITS] = "1"
        self.waits.begin_round(world)
        store = order.store if isinstance(order, OrderWithStore) else None
        if self._forkserver.start_round(forkserver_messages.StartRound(world, variables), store):
            self._on_started()

    def dumps(self, restart: int) -> Dumps:
        """Return the dumps of torch's flight recorder in a round."""
        return Dumps(
            self._job_dir,
            self._pipes.path if self._pipes else None,
            node_rank=self._topology.node_rank,
            attempt=self._job.attempt,
            restart=restart,
        )

    def close(self) -> None:
        """Remove the files of this machine; the workers have ended."""
        if self._pipes is not None:
            self._pipes.close()
            self._pipes = None

    def stop(self, grace: float, number: int = signal.SIGTERM, *, early: bool = False) -> None:
        """Stop the workers: a signal, then SIGKILL after `grace` seconds.

        Args:
            grace: the time in seconds.
            number: the signal.
            early: whether a worker that saves nothing gets SIGKILL earlier.
        """
        self.stop_ordered = True
        self.phases.stop()
        if self._forkserver.ready and not self._forkserver.gone:
            self.gone.clear()
            self._forkserver.send(forkserver_messages.StopWorkers(grace, int(number), early))
            return
        self._forkserver.drop_round()
        self._on_gone()

    def _on_gone(self) -> None:
        """Report that no process of the workers is left."""
        self.gone.set()
        self._report.set(idle=True)

    def warn(self) -> None:
        """Warn the workers of a preemption."""
        # Workers that another launcher, such as torchrun, has started poll this file.
        files.later(ends.warn, self._job_dir, self._job.attempt)
        self._forkserver.send(forkserver_messages.WarnWorkers())

    def probe(self, order: Probe) -> None:
        """Report what each of these workers does; the forkserver probes those that run."""
        if self._status is None:
            return
        wanted = [rank - self._status.world.first_rank for rank in order.ranks]
        started = self._forkserver.ready and self._forkserver.pending is None
        self._probe = order.number
        known = [] if order.note else self._status.known(wanted, started=started)
        if known:
            self._add_probed(known, gave_up=order.gave_up)
        running = tuple(rank for rank in wanted if rank in self._running and started)
        if running:
            self._forkserver.send(
                forkserver_messages.ProbeWorkers(running, final=order.gave_up, note=order.note)
            )

    def note_found(self, order: Found) -> None:
        """Write the state of missing ranks into the stderr of the worker that waits for them."""
        if self._status is not None:
            stderr = self.failures.stderr_of(self._status.world, order.local_rank)
            files.later(log_files.append, stderr, order.lines)

    def report_failures(self) -> None:
        """Report all known failures, after the forkserver has reported the end of every worker."""
        if self._forkserver.ready and not self._forkserver.gone:
            self._forkserver.send(forkserver_messages.ReportEnds())
        else:
            self._add_early_exits()

    def _on_started(self) -> None:
        """Report that the workers have been started."""
        assert self._status is not None
        world = self._status.world
        self.phases.start(world, is_python=self._options.program.is_python)
        self._report.set(started=True)

    @property
    def _stops(self) -> bool:
        """Whether the workers stop, or will when the coordinator knows of a cancellation."""
        return self.stop_ordered or bool(self._report.state.request.cancel)

    # -- messages of the forkserver ----------------------------------------------------------------

    def receive(self) -> None:
        """Handle one message of the forkserver, or its end."""
        handlers: dict[type, Callable[[Any], object]] = {
            forkserver_messages.Ready: self._on_ready,
            forkserver_messages.WorkerFailing: self._on_worker_failing,
            forkserver_messages.WorkerExited: self._on_worker_exited,
            forkserver_messages.WorkerWaiting: self._on_worker_waiting,
            forkserver_messages.WorkerAlive: self._on_worker_alive,
            forkserver_messages.WorkerPhase: self.phases.on_worker_phase,
            forkserver_messages.WorkerWaits: self.waits.receive,
            forkserver_messages.WorkersProbed: lambda probed: self._add_probed(
                probed.workers, gave_up=probed.final
            ),
            forkserver_messages.StoreExited: self._on_store_exited,
            forkserver_messages.EndsReported: lambda _reported: self._add_early_exits(),
            forkserver_messages.WorkersGone: lambda _gone: self._on_gone(),
        }
        message = self._forkserver.receive()
        if message is None:
            self._on_forkserver_exited()
        else:
            handlers[type(message)](message)

    def _on_ready(self, message: forkserver_messages.Ready) -> None:
        self._drain = message.drain
        if self._forkserver.mark_ready():
            self._on_started()
        else:
            self.phases.imported()
        if message.why and self._options.start == "fork":
            self._forkserver_failed(f"--start fork is impossible: {message.why}")
        elif message.why:
            node = f"node {self._topology.node_rank}"
            why = f"{node} starts its workers by exec: {message.why}"
            self._console.print(why)
            self._report.set(by_exec=why[:300])

    def _on_worker_waiting(self, message: forkserver_messages.WorkerWaiting) -> None:
        if self._status is not None:
            missing = Missing(message.local_rank, message.ranks, gave_up=message.final)
            self._report.set(missing=missing)

    def note_touched(self) -> None:
        """Record heartbeats of workers that torchrun has started: they touch a file."""
        with contextlib.suppress(OSError):
            touched = (self.failures.directory / HEARTBEAT).stat().st_mtime_ns
            if touched != self._touched:
                self._touched, self.alive_at = touched, time.monotonic()

    def _on_worker_alive(self, message: forkserver_messages.WorkerAlive) -> None:
        self.alive_at, self.step = time.monotonic(), max(self.step, message.step)

    def _add_probed(
        self, found: Sequence[forkserver_messages.ProbedWorker], *, gave_up: bool
    ) -> None:
        status = self._status
        if status is not None:
            failures = list(map(status.missing_failure, found)) if gave_up else []
            self._report.answer(self._probe, list(map(status.line, found)), failures)

    def _on_store_exited(self, message: forkserver_messages.StoreExited) -> None:
        if not self._stops:
            ended = how(*processes.exit_code_of(message.status))
            last = log_files.last_lines(self.failures.directory / STORE_LOG, 1)
            self.process_lost(": ".join([f"torch's store was lost ({ended})", *last]))

    def _add_early_exits(self) -> None:
        if self._status is not None:
            self._report.complete(self._status.early_exits())

    def _on_forkserver_exited(self) -> None:
        """Report the end of the forkserver; the kernel has killed the workers with it."""
        asyncio.get_running_loop().remove_reader(self._forkserver.control)
        why = f"the forkserver was lost ({how(*self._forkserver.reap())})"
        processes.kill_descendants(*self.spared, self._drain)  # which writes the last output
        if not self._stops and self._status is not None:
            self.process_lost(why)
        self._replace_agent(why)
        self._forkserver.error = self._forkserver.error or why
        if self._stops:
            self._on_gone()

    def _forkserver_failed(self, why: str) -> None:
        """Report that this node cannot run workers: now, or in `start` if no round has begun."""
        self._forkserver.error = why
        if self._status is not None:
            self.node_failed(why)

    # -- failures ----------------------------------------------------------------------------------

    def _on_worker_failing(self, message: forkserver_messages.WorkerFailing) -> None:
        assert self._status is not None
        failure = self.failures.of_worker(
            self._status.world,
            message.local_rank,
            code=message.exit_code,
            signal_name=None,
            message=message.message,
            kind=forkserver_messages.failure_kind(message),
            where=message.where,
        )
        self._report.fail(failure, message.monotonic, exited=not message.started)

    def _on_worker_exited(self, message: forkserver_messages.WorkerExited) -> None:
        assert self._status is not None
        local_rank = message.local_rank
        self._running.discard(local_rank)
        code, signal_name = processes.exit_code_of(message.status)
        self._status.ended[local_rank] = how(code, signal_name)
        self.phases.ended(local_rank, how(code, signal_name))
        if code == 0 and self._options.launcher == "agent":
            self._status.exits[local_rank] = message.monotonic
            self._report.succeed([local_rank])
        if code != 0:
            failure = self.failures.of_worker(
                self._status.world,
                local_rank,
                code=code,
                signal_name=signal_name,
                message=how(code, signal_name),
            )
            self._report.fail(failure, message.monotonic, exited=True)
        if not self._running:
            self.phases.all_ended()
            if code == 0 and self._options.launcher != "agent":
                self._report.succeed(range(self._status.world.nproc))
            self._report.set(ended=True)

    def node_failed(self, why: str) -> None:
        """Report a failure of this node rather than of one worker."""
        self._report.fail(self.failures.of_node(why), time.monotonic(), exited=True)

    def process_lost(self, why: str) -> None:
        """Report that a process of this node that runs no user code was killed."""
        failure = replace(self.failures.of_node(why), kind=FailureKind.PROCESS_LOST)
        self._report.fail(failure, time.monotonic(), exited=True)
