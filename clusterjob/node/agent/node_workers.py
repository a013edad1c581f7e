"""Run one node's workers through the forkserver, and report what they do to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node import contract, job_processes
from clusterjob.node.agent.connection import Connection
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.contract import World
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.console import Console
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.stacks.progress import Progress
from clusterjob.node.states import Missing, Order, OrderWithStore, Probe
from clusterjob.node.system import devices, files, processes
from clusterjob.node.system.crashes import Crashes
from clusterjob.node.verdict import FailureKind
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.flight_recorder import FlightRecorder
from clusterjob.node.workers.forkserver_client import ForkserverClient
from clusterjob.node.workers.worker_failures import Failures, WorkerStatus, how

_MAX_PHASES = 64  # phases to record of a rank in one round: a program may form groups in a loop
_FROM_WORKER = (Phase.RENDEZVOUS, Phase.INIT, Phase.RUNNING)  # the phases that a worker reports
_OVER = (Phase.STOP, Phase.ENDED)
_MOST_WAITS = 2000  # ranks in one message
_SAMPLE_SECONDS = 1.5  # maximum time for one sample
_DUMP_SECONDS = 0.5  # seconds for torch's flight recorders
_SAVE_SECONDS = 1.9  # maximum time until the stacks are saved
_MAX_BYTES = 200_000  # of the stacks of one rank in a message, which has at most 256 KiB
# Numbers of threads, and of frames of each, until the stacks of a rank fit.
_SIZES = ((250, 250), (64, 100), (32, 50), (8, 25))
# No descriptor or thread is free, or a process has ended meanwhile.
_ERRORS = (OSError, ValueError, RuntimeError)


class NodeWorkers:
    """The workers of one node.

    Args:
        node: the job, as this node sees it.
        forkserver: starts, reaps and stops the workers.
        console: prints messages for the user.
        report: the state of this node.

    Attributes:
        stop_ordered: whether the workers of this round must stop.
        failures: describes the failures of this node and its workers.
        timeline: knows when the workers wrote output.
        alive_at: the monotonic time of the last heartbeat of a worker.
        spared: pids of the processes that send notifications now; they outlive the workers.
        phases: records the phases of the node and its ranks.
        gone: set while no worker runs.
        waits: keeps how long the workers wait in collectives.
        flight_recorder: asks the workers for torch's last collectives.
    """

    def __init__(
        self,
        node: NodeJob,
        forkserver: ForkserverClient,
        console: Console,
        report: StateReport,
    ) -> None:
        topology, job, job_dir = node.topology, node.identity, node.directory
        self._topology = topology
        self._options = node.options
        self._job = job
        self._job_dir = job_dir
        self._forkserver = forkserver
        self._console = console
        self._report = report
        self._status: WorkerStatus | None = None  # of this round
        self._running: set[int] = set()  # local ranks of the workers that run
        self._probe = 0  # the number of the newest question about missing ranks
        self.stop_ordered = False
        self.gone = asyncio.Event()
        self.gone.set()
        self.spared: set[int] = set()
        self._drain: int | None = None  # the process that writes the workers' output
        self.alive_at = time.monotonic()
        self._step = -1  # the largest in a heartbeat of this round
        directory = log_files.node_directory(job_dir, topology.node_rank)
        self.timeline = log_files.Timeline(directory)
        self.phases = PhaseRecorder(job_dir, topology.node_rank, attempt=job.attempt, report=report)
        self.waits = NodeWaits()
        self.flight_recorder = FlightRecorder(job_dir, topology.node_rank, job.attempt)
        self.failures = Failures(
            topology.node_rank,
            this_node.node_name(),
            directory=directory,
            attempt=job.attempt,
            under_torchrun=node.options.launcher == "torchrun",
        )

    # -- orders of the coordinator -----------------------------------------------------------------

    def start(self, order: Order) -> None:
        """Start a round of workers, and record the growth of their files."""
        assert order.world is not None
        under_torchrun = self._options.launcher == "torchrun"
        for pair in log_files.round_files(
            self.failures.directory, order.world, attempt=self._job.attempt, torchrun=under_torchrun
        ):
            self.timeline.follow(pair)
        gpus = devices.visible_gpus(os.environ)
        world = replace(order.world, gpus=gpus)
        self.stop_ordered, self._step = False, -1
        self.gone.clear()
        self._status = WorkerStatus(self.failures, world)
        self._running = set(range(1 if under_torchrun else world.nproc))
        if self._forkserver.error:
            self.fail_node(self._forkserver.error)
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
        variables |= self.flight_recorder.variables(os.environ, world.restart)
        if self._options.metrics:
            variables[contract.WAITS] = "1"
        self.waits.begin_round(world)
        store = order.store if isinstance(order, OrderWithStore) else None
        if self._forkserver.start_round(forkserver_messages.StartRound(world, variables), store):
            self._on_started()

    def stop(self, grace: float, number: int = signal.SIGTERM, *, early: bool = False) -> None:
        """Stop the workers: a signal, then SIGKILL after `grace` seconds.

        Args:
            grace: the time in seconds.
            number: the signal.
            early: whether a worker that saves nothing gets SIGKILL earlier.
        """
        self.stop_ordered = True
        self._report.stopped_at = min(self._report.stopped_at, time.monotonic())
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

    def answer(self, order: Order, done: Order) -> None:
        """Answer the coordinator's new questions about missing ranks and failures.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
        if order.probe is not None and order.probe != done.probe:
            self._answer_probe(order.probe)
        if order.found is not None and order.found != done.found:
            known = done.found.lines if done.found is not None else ()
            lines = tuple(line for line in order.found.lines if line not in known)
            self._note_found(order.found.local_rank, lines)
        if order.report and not done.report:
            self._report_failures()

    def _answer_probe(self, order: Probe) -> None:
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

    def _note_found(self, local_rank: int, lines: Sequence[str]) -> None:
        """Write the state of missing ranks into the stderr of the worker that waits for them."""
        if self._status is not None:
            stderr = self.failures.stderr_of(self._status.world, local_rank)
            files.later(log_files.append, stderr, lines)

    def _report_failures(self) -> None:
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

    def receive(self) -> str:
        """Handle one message of the forkserver; return why it was lost, or nothing."""
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
            return self._on_forkserver_exited()
        handlers[type(message)](message)
        return ""

    def _on_ready(self, message: forkserver_messages.Ready) -> None:
        self._drain = message.drain
        if self._forkserver.mark_ready():
            self._on_started()
        else:
            self.phases.imported()
        if message.why and self._options.start == "fork":
            self.fail_node(f"--start fork is impossible: {message.why}")
        elif message.why:
            node = f"node {self._topology.node_rank}"
            why = f"{node} starts its workers by exec: {message.why}"
            self._console.print(why)
            self._report.set(by_exec=why[:300])

    def _on_worker_waiting(self, message: forkserver_messages.WorkerWaiting) -> None:
        if self._status is not None:
            missing = Missing(message.local_rank, message.ranks, gave_up=message.final)
            self._report.set(missing=missing)

    def signs_of_life(self) -> tuple[float, int]:
        """Return the time of the last output or heartbeat of a worker, and the last step."""
        return max(self.timeline.grown_at, self.alive_at), self._step

    def _on_worker_alive(self, message: forkserver_messages.WorkerAlive) -> None:
        self.alive_at, self._step = time.monotonic(), max(self._step, message.step)

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
            self._process_lost(": ".join([f"torch's store was lost ({ended})", *last]))

    def _add_early_exits(self) -> None:
        if self._status is not None:
            self._report.complete(self._status.early_exits())

    def _on_forkserver_exited(self) -> str:
        """Report the end of the forkserver; the kernel has killed the workers with it."""
        why = f"the forkserver was lost ({how(*self._forkserver.reap())})"
        processes.kill_descendants(*self.spared, self._drain)  # which writes the last output
        if not self._stops and self._status is not None:
            self._process_lost(why)
        self._forkserver.error = self._forkserver.error or why
        if self._stops:
            self._on_gone()
        return why

    # -- failures ----------------------------------------------------------------------------------

    def _on_worker_failing(self, message: forkserver_messages.WorkerFailing) -> None:
        assert self._status is not None
        failure = self.failures.of_worker(
            self._status.world,
            message.local_rank,
            code=message.exit_code,
            signal_name=None,
            message=message.message,
            kind=next((each for each in FailureKind if each.value == message.kind), None),
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

    def fail_node(self, why: str) -> None:
        """Report that this node cannot run workers: now, or in `start` if no round has begun."""
        self._forkserver.error = why
        if self._status is not None:
            self._report.fail(self.failures.of_node(why), time.monotonic(), exited=True)

    def _process_lost(self, why: str) -> None:
        """Report that a process of this node that runs no user code was killed."""
        failure = replace(self.failures.of_node(why), kind=FailureKind.PROCESS_LOST)
        self._report.fail(failure, time.monotonic(), exited=True)


class PhaseRecorder:
    """Record the phases of one node, and count the ranks that have joined a group.

    The phases of a rank that runs:

    - ``import`` from its start;
    - ``running`` from its first line of output, or from its start if it is no Python program;
    - ``rendezvous``, ``init``, again ``running`` when it forms a process group (`torch_patches`).

    Args:
        job_dir: the job's directory, as this node sees it.
        node_rank: this node.
        attempt: the job's attempt.
        report: the state of this node.
    """

    def __init__(self, job_dir: Path, node_rank: int, attempt: int, report: StateReport) -> None:
        self._log = PhaseLog(job_dir, node_rank)
        self._attempt = attempt
        self._report = report
        self._restart = 0
        self._first_rank = 0
        self._started = 0.0  # the begin of the round
        self._ranks: dict[int, Phase] = {}  # the current phase by local rank
        self._counts: dict[int, int] = {}  # the recorded phases by local rank
        self._joined: set[int] = set()
        self._formed: set[int] = set()
        self._importing: set[int] = set()  # local ranks that import torch at this moment
        self._unwritten: list[PhaseBegin] = []

    # -- the node ----------------------------------------------------------------------------------

    def begin(self, script: int | None) -> None:
        """Record the setup lines and the import of torch.

        Args:
            script: pid of the process that the node's script has become; None if this agent
                replaces one that was killed, and no setup lines have run.
        """
        if script is not None:
            self._add_node(Phase.SETUP, time.monotonic() - _age(script))
        self._add_node(Phase.IMPORT, time.monotonic())

    def imported(self) -> None:
        """Record that the forkserver is ready before the other nodes."""
        self._add_node(Phase.RENDEZVOUS, time.monotonic())

    def start(self, world: World, *, is_python: bool) -> None:
        """Record that the workers of a round are started.

        Args:
            world: the round.
            is_python: whether they run a Python program.
        """
        self._restart, self._first_rank = world.restart, world.first_rank
        self._counts = {}
        self._joined, self._formed, self._importing = set(), set(), set()
        self._add_node(Phase.RUNNING, time.monotonic())
        self._ranks = dict.fromkeys(range(world.nproc), Phase.SETUP)
        for local_rank in self._ranks:
            self._add_rank(local_rank, Phase.IMPORT if is_python else Phase.RUNNING)
        self._started = time.monotonic()

    def stop(self) -> None:
        """Record that the workers that still run are being stopped."""
        if running := [rank for rank, phase in self._ranks.items() if phase not in _OVER]:
            self._add_node(Phase.STOP, time.monotonic())
            for local_rank in running:
                self._add_rank(local_rank, Phase.STOP)

    # -- ranks -------------------------------------------------------------------------------------

    def on_worker_phase(self, message: forkserver_messages.WorkerPhase) -> None:
        """Record a phase that a worker reports; ignore phases that it cannot have."""
        local_rank = message.local_rank
        if message.phase == Phase.IMPORT and local_rank in self._ranks:
            self._importing.add(local_rank)
            return
        self._importing.discard(local_rank)
        try:
            phase = Phase(message.phase)
        except ValueError:
            return  # user code can write anything into the pipe
        current = self._ranks.get(local_rank)
        if phase not in _FROM_WORKER or current is None or current in _OVER:
            return
        self._joined.add(local_rank)
        if phase is Phase.RUNNING:
            self._formed.add(local_rank)
        at = min(max(message.monotonic, self._started), time.monotonic())
        self._add_rank(local_rank, phase, at=at)

    def on_output(self, grown: Iterable[str]) -> None:
        """Record that the ranks run which write output before they join a process group.

        Args:
            grown: the names of the log files that have grown.
        """
        if Phase.IMPORT not in self._ranks.values():
            return
        ranks = {
            match["rank"] and int(match["rank"]) - self._first_rank  # torchrun's file has no rank
            for match in map(log_files.FILE_NAME.fullmatch, grown)
            if match is not None
            and match["stream"] == "out"
            and int(match["restart"] or 0) == self._restart
        }
        for local_rank, phase in self._ranks.items():
            if phase is Phase.IMPORT and (local_rank in ranks or None in ranks):
                self._add_rank(local_rank, Phase.RUNNING, detail="first output")

    def ended(self, local_rank: int, how: str) -> None:
        """Record the end of a rank."""
        self._importing.discard(local_rank)
        self._add_rank(local_rank, Phase.ENDED, detail=how)

    def all_ended(self) -> None:
        """Record the end of all workers, including those that torchrun has started."""
        for local_rank in self._ranks:
            self._add_rank(local_rank, Phase.ENDED)
        self._add_node(Phase.ENDED, time.monotonic())

    def flush(self) -> None:
        """Write the new phases; put the counts of ranks into the state if they have changed."""
        files.later(self._log.add, *self._unwritten)
        self._unwritten.clear()
        joined, formed, importing = len(self._joined), len(self._formed), bool(self._importing)
        known = self._report.state
        if (joined, formed, importing) != (known.joined, known.formed, known.importing):
            self._report.set(joined=joined, formed=formed, importing=importing)

    # -- the file ----------------------------------------------------------------------------------

    def _add_node(self, phase: Phase, at: float) -> None:
        self._add(phase, None, at=at)

    def _add_rank(
        self, local_rank: int, phase: Phase, detail: str = "", at: float | None = None
    ) -> None:
        if local_rank not in self._ranks or self._ranks[local_rank] is phase:
            return
        self._ranks[local_rank] = phase
        self._counts[local_rank] = count = self._counts.get(local_rank, 0) + 1
        if count <= _MAX_PHASES or phase in _OVER:
            rank = self._first_rank + local_rank
            self._add(phase, rank, at=time.monotonic() if at is None else at, detail=detail)

    def _add(self, phase: Phase, rank: int | None, at: float, detail: str = "") -> None:
        self._unwritten.append(
            PhaseBegin(
                phase,
                rank,
                restart=self._restart,
                attempt=self._attempt,
                time=round(time.time() - (time.monotonic() - at), 3),
                monotonic=round(at, 6),
                detail=detail,
            )
        )


def _age(pid: int) -> float:
    """Return for how many seconds a process has run."""
    ticks = processes.start_ticks(pid) or 0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, age)


class NodeWaits:
    """How long the workers of one node wait in collectives."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._interval = 0.0
        # The last wait of each local rank, and the monotonic time at which it has arrived.
        self._waits: dict[int, tuple[float, Wait]] = {}
        self._new: set[int] = set()
        self._sent = 0.0

    def begin_round(self, world: World) -> None:
        """Forget the workers of the last round."""
        self._world = world
        self._interval = stragglers.interval(world.nnodes)
        self._waits = {}
        self._new.clear()

    def receive(self, message: forkserver_messages.WorkerWaits) -> None:
        """Record the message of a worker; user code can write anything into the pipe."""
        if self._world is not None and message.local_rank < self._world.nproc:
            wait = Wait(message.step, message.waited)
            self._waits[message.local_rank] = time.monotonic(), wait
            self._new.add(message.local_rank)

    def newest(self) -> dict[int, Wait]:
        """Return the waits by rank; another thread may call this."""
        world, moment = self._world, time.monotonic()
        return {
            world.first_rank + local_rank: wait
            for local_rank, (at, wait) in list(self._waits.items())
            if world is not None and wait.is_fresh(moment - at)
        }

    def due(self) -> messages.RankWaits | None:
        """Return a message with the new waits, if the last one is old enough; else None."""
        moment = time.monotonic()
        if not self._new or self._world is None or moment - self._sent < self._interval:
            return None
        chosen = sorted(self._new)[:_MOST_WAITS]
        ranks = tuple(
            messages.RankWait(
                local_rank,
                step=round(self._waits[local_rank][1].step, 6),
                waited=round(self._waits[local_rank][1].waited, 6),
            )
            for local_rank in chosen
        )
        self._sent = moment
        self._new.difference_update(chosen)
        return messages.RankWaits(self._world.restart, ranks)


class StackReports:
    """The stacks and the progress of one node's workers.

    Args:
        forkserver: pid of the forkserver. Another process of the job may offer a false table.
        node_rank: this node.
        workers: the workers.
        connection: sends messages to the coordinator.
        report: the state of this node.
        crashes: the errors of background tasks.
    """

    def __init__(
        self,
        forkserver: int,
        node_rank: int,
        workers: NodeWorkers,
        connection: Connection,
        report: StateReport,
        crashes: Crashes,
    ) -> None:
        self._forkserver = forkserver
        self._node_rank = node_rank
        self._workers = workers
        self._connection = connection
        self._report = report
        self._crashes = crashes
        self._progress = Progress()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, order: Order, done: Order) -> None:
        """Answer new questions: take a sample of the stacks, send those of all living ranks.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
        if order.sample not in (0, done.sample):
            self._start(self._take_sample(order))
        if order.collect and not done.collect:
            self._start(self._collect(order))

    async def save(self, job_dir: Path, round_: grouping.Round, why: str) -> tuple[str, int]:
        """Write the stacks of this node's ranks into its logs before they are stopped.

        Return the path of the text and the number of ranks; ("", 0) if there is no file.
        """
        with contextlib.suppress(asyncio.TimeoutError, *_ERRORS):
            found = await asyncio.wait_for(asyncio.to_thread(self._stacks), _SAVE_SECONDS)
            if found:
                dumps = self._workers.flight_recorder.request(
                    round_.restart, [each.rank for each in found], 0.0
                )
                write = functools.partial(grouping.write_evidence, why=why, dumps=dumps)
                loop = asyncio.get_running_loop()
                path = await loop.run_in_executor(files.disk, write, job_dir, round_, found)
                return path, len(found)
        return "", 0

    async def _collect(self, order: Order) -> None:
        dumps: tuple[str, ...] = ()
        with contextlib.suppress(*_ERRORS):
            found = await asyncio.to_thread(self._stacks)
            for stack in found:
                self._connection.send(messages.StackFound(order.round, bounded(stack)))
            dumps = await asyncio.to_thread(
                self._workers.flight_recorder.request,
                order.round,
                [each.rank for each in found],
                _DUMP_SECONDS if order.dumps else 0.0,
            )
        self._connection.send(messages.StacksCollected(order.round, dumps))
        if self._report.state.round == order.round:
            self._report.set(collected=True)

    async def _take_sample(self, order: Order) -> None:
        try:
            moved = await asyncio.to_thread(self._sample, first=order.first)
        except _ERRORS:  # without a sample, nothing shows that the workers stand still
            moved = True
        self._report.note_alive(*self._workers.signs_of_life())
        if self._report.state.round == order.round:
            self._report.set(sampled=order.sample, moved=moved)

    def _sample(self, *, first: bool) -> bool:
        self._progress.begin()
        return self._progress.moved(self._stacks(), first=first)

    def _stacks(self) -> list[RankStack]:
        found = job_processes.of_forkserver(self._forkserver)
        return collect(found, self._node_rank, _SAMPLE_SECONDS)

    def _start(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answer)
        self._crashes.watch(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bounded(stack: RankStack) -> RankStack:
    """Return the stacks of a rank, with fewer threads and frames if they are too long to send."""
    for threads, frames in _SIZES:
        stack = replace(
            stack,
            threads=tuple(
                replace(thread, frames=thread.frames[:frames]) for thread in stack.threads[:threads]
            ),
        )
        if len(json.dumps(stack.to_json())) <= _MAX_BYTES:
            return stack
    return replace(stack, threads=())
