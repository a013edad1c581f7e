"""Run one node's workers through the forkserver, and report what they do to the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from clusterjob.node import contract, job_processes
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.contract import World
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.rendezvous import messages
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.stacks.progress import Progress
from clusterjob.node.states import Missing, Order, OrderWithStore, Probe, Stop
from clusterjob.node.system import devices, files, processes
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
_MAX_BYTES = 200_000  # of the stacks of one rank in a message, which has at most 256 KiB
# Numbers of threads, and of frames of each, until the stacks of a rank fit.
_SIZES = ((250, 250), (64, 100), (32, 50), (8, 25))
# No descriptor or thread is free, or a process has ended meanwhile.
_ERRORS = (OSError, ValueError, RuntimeError)


class NodeWorkers:
    """The workers of one node.

    Args:
        node: the job, as this node sees it.
        send: sends a message to the coordinator.

    Attributes:
        forkserver: starts, reaps and stops the workers.
        report: the state of this node.
        failures: describes the failures of this node and its workers.
        timeline: knows when the workers wrote output.
        spared: pids of the processes that send notifications now; they outlive the workers.
        phases: records the phases of the node and its ranks.
        waits: keeps how long the workers wait in collectives.
        flight_recorder: asks the workers for torch's last collectives.
    """

    def __init__(
        self,
        node: NodeJob,
        forkserver: ForkserverClient,
        report: StateReport,
        send: Callable[[Any], None],
    ) -> None:
        job_dir, node_rank, attempt = node.directory, node.topology.node_rank, node.identity.attempt
        directory = log_files.node_directory(job_dir, node_rank)
        self._node = node
        self._options = node.options
        self.forkserver = forkserver
        self.report = report
        self._send = send
        self._status: WorkerStatus | None = None  # of this round
        self._drain: int | None = None  # the process that writes the workers' output
        self._progress = Progress()
        self.spared: set[int] = set()
        self.timeline = log_files.Timeline(directory)
        self.phases = PhaseRecorder(PhaseLog(job_dir, node_rank), attempt, report)
        self.waits = NodeWaits()
        self.flight_recorder = FlightRecorder(job_dir, node_rank, attempt)
        self.failures = Failures(
            node_rank,
            this_node.node_name(),
            directory=directory,
            attempt=attempt,
            under_torchrun=node.options.launcher == "torchrun",
        )

    # -- orders of the coordinator -----------------------------------------------------------------

    def start(self, order: Order) -> None:
        """Start a round of workers, and record the growth of their files."""
        assert order.world is not None
        world = replace(order.world, gpus=devices.visible_gpus(os.environ))
        pairs = log_files.round_files(
            self.failures.directory,
            world,
            attempt=self.failures.attempt,
            torchrun=self.failures.under_torchrun,
        )
        self.timeline.follow(itertools.chain.from_iterable(pairs))
        self._status = WorkerStatus(self.failures, world)
        if self.forkserver.error:
            self.fail_node(self.forkserver.error)
            return
        self.waits.begin_round(world)
        message = forkserver_messages.StartRound(world, self._variables(world))
        store = order.store if isinstance(order, OrderWithStore) else None
        if self.forkserver.start_round(message, store):
            self._on_started()

    def _variables(self, world: World) -> dict[str, str]:
        """Return the environment variables of all workers of a round."""
        job = self._node.identity
        variables = {
            contract.JOB_ID: job.job_id,
            contract.JOB_DIR: str(self._node.directory),
            contract.ATTEMPT: str(job.attempt),
            contract.STORE: contract.store_address(world, self._options.launcher),
            contract.STORE_KEY: contract.store_key(
                job.token, job.job_id, attempt=job.attempt, restart=world.restart
            ),
        }
        if self._options.metrics:
            variables[contract.WAITS] = "1"
        return (
            worker_variables.quiet_defaults(os.environ, world.master_addr, nnodes=world.nnodes)
            | worker_variables.cpu_defaults(os.environ, world.gpus)
            | variables
            | self.flight_recorder.variables(os.environ, world.restart)
        )

    def stop(self, stop: Stop) -> None:
        """Stop the workers."""
        self.report.stop()
        self.phases.stop()
        if self.forkserver.ready and not self.forkserver.gone:
            self.forkserver.send(
                forkserver_messages.StopWorkers(stop.grace, stop.signal, stop.early)
            )
        else:
            self.forkserver.drop_round()
            self.report.set(idle=True)

    def warn(self) -> None:
        """Warn the workers of a preemption."""
        # Workers that another launcher, such as torchrun, has started poll this file.
        files.later(ends.warn, self._node.directory, self.failures.attempt)
        self.forkserver.send(forkserver_messages.WarnWorkers())

    def answer(self, order: Order, done: Order) -> list[Coroutine[Any, Any, None]]:
        """Answer the coordinator's new questions; return the answers that take time.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
        slow = []
        if order.probe is not None and order.probe != done.probe:
            slow.append(self._answer_probe(order, order.probe))
        if order.sample not in (0, done.sample):
            slow.append(self._take_sample(order))
        if order.collect and not done.collect:
            slow.append(self._collect(order))
        if self._status is None:
            return slow
        new = tuple(line for line in order.found if line not in done.found)
        if new and (missing := self.report.state.missing) is not None:
            stderr = self.failures.stderr_of(self._status.world, missing.local_rank)
            files.later(log_files.append, stderr, new)
        if order.report and not done.report:
            # The forkserver reports the end of every worker first.
            if self.forkserver.ready and not self.forkserver.gone:
                self.forkserver.send(forkserver_messages.ReportEnds())
            else:
                self.report.complete(self._status.early_exits())
        return slow

    def _on_started(self) -> None:
        """Report that the workers have been started."""
        assert self._status is not None
        self._status.started = time.monotonic()
        self.phases.start(self._status.world, is_python=self._options.program.is_python)
        self.report.set(started=True)

    # -- messages of the forkserver ----------------------------------------------------------------

    def receive(self) -> str:
        """Handle one message of the forkserver; return why it was lost, or nothing."""
        handlers: dict[type, Callable[[Any], object]] = {
            forkserver_messages.Ready: self._on_ready,
            forkserver_messages.WorkerFailing: self._on_worker_failing,
            forkserver_messages.WorkerExited: self._on_worker_exited,
            forkserver_messages.WorkerWaiting: lambda waiting: self.report.set(
                missing=Missing(waiting.local_rank, waiting.ranks, gave_up=waiting.final)
            ),
            forkserver_messages.WorkerAlive: lambda alive: self.report.note_alive(
                time.monotonic(), alive.step
            ),
            forkserver_messages.WorkerPhase: self.phases.on_worker_phase,
            forkserver_messages.WorkerWaits: self.waits.receive,
            forkserver_messages.StoreExited: self._on_store_exited,
            forkserver_messages.EndsReported: lambda _reported: self.report.complete(
                self._status.early_exits() if self._status is not None else ()
            ),
            forkserver_messages.WorkersGone: lambda _gone: self.report.set(idle=True),
        }
        message = self.forkserver.receive()
        if message is None:
            return self._on_forkserver_exited()
        handlers[type(message)](message)
        return ""

    def _on_ready(self, message: forkserver_messages.Ready) -> None:
        self._drain = message.drain
        if self.forkserver.mark_ready():
            self._on_started()
        else:
            self.phases.add(Phase.RENDEZVOUS)  # ready before the other nodes
        if message.why and self._options.start == "fork":
            self.fail_node(f"--start fork is impossible: {message.why}")
        elif message.why:
            why = f"node {self.failures.node_rank} starts its workers by exec: {message.why}"
            self._node.print_line(why)
            self.report.set(by_exec=why[:300])

    def _on_store_exited(self, message: forkserver_messages.StoreExited) -> None:
        if not self.report.stops:
            ended = how(*processes.exit_code_of(message.status))
            last = log_files.last_lines(self.failures.directory / STORE_LOG, 1)
            why = ": ".join([f"torch's store was lost ({ended})", *last])
            self._add_failure(why, FailureKind.PROCESS_LOST)

    def _on_forkserver_exited(self) -> str:
        """Report the end of the forkserver; the kernel has killed the workers with it."""
        why = f"the forkserver was lost ({how(*self.forkserver.reap())})"
        processes.kill_descendants(*self.spared, self._drain)  # which writes the last output
        if self.report.stops:
            self.report.set(idle=True)
        else:
            self._add_failure(why, FailureKind.PROCESS_LOST)
        self.forkserver.error = self.forkserver.error or why
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
        self.report.fail(failure, message.monotonic, exited=not message.started)

    def _on_worker_exited(self, message: forkserver_messages.WorkerExited) -> None:
        assert self._status is not None
        status, local_rank = self._status, message.local_rank
        torchrun = self.failures.under_torchrun  # it has started the workers, and ends with them
        ranks = range(status.world.nproc) if torchrun else [local_rank]
        code, signal_name = processes.exit_code_of(message.status)
        ended = how(code, signal_name)
        status.ended |= dict.fromkeys(ranks, ended)
        self.phases.ended(ranks, ended)
        if code != 0:
            failure = self.failures.of_worker(
                status.world, local_rank, code=code, signal_name=signal_name, message=ended
            )
            self.report.fail(failure, message.monotonic, exited=True)
        else:
            if not torchrun:
                status.exits[local_rank] = message.monotonic
            self.report.succeed(ranks)
        if len(status.ended) == status.world.nproc:
            self.report.set(ended=True)

    def fail_node(self, why: str) -> None:
        """Report that this node cannot run workers: now, or in `start` if no round has begun."""
        self.forkserver.error = why
        self._add_failure(why, FailureKind.LAUNCH)

    def _add_failure(self, why: str, kind: FailureKind) -> None:
        """Report a failure of a process of this node that runs no user code."""
        if self._status is not None:
            failure = replace(self.failures.of_node(why), kind=kind)
            self.report.fail(failure, time.monotonic(), exited=True)

    # -- signs of life and stacks ------------------------------------------------------------------

    def note_output(self, grown: Iterable[str]) -> None:
        """Record what the workers have written into these log files."""
        self.phases.on_output(grown)
        self.phases.count()
        self.report.note_alive(self.timeline.grown_at)

    async def _answer_probe(self, order: Order, probe: Probe) -> None:
        """Report what workers do for which other ranks wait."""
        found: list[RankStack] = []
        with contextlib.suppress(*_ERRORS):
            found = await asyncio.to_thread(self._stacks)
        if self._status is not None and self.report.state.round == order.round:
            lines, failures = self._status.describe(probe, found)
            if not probe.note:
                self.report.answer(probe, lines, failures)

    async def _collect(self, order: Order) -> None:
        """Send the stacks of all living ranks."""
        dumps: tuple[str, ...] = ()
        with contextlib.suppress(*_ERRORS):
            found = await asyncio.to_thread(self._stacks)
            for stack in found:
                self._send(messages.StackFound(order.round, bounded(stack)))
            ranks, seconds = [each.rank for each in found], _DUMP_SECONDS if order.dumps else 0.0
            request = self.flight_recorder.request
            dumps = await asyncio.to_thread(request, order.round, ranks, seconds)
        if self.report.state.round == order.round:
            self.report.set(collected=True, dumps=dumps)

    async def _take_sample(self, order: Order) -> None:
        """Report whether the workers have moved since the last sample of their stacks."""
        try:
            moved = await asyncio.to_thread(self._progress.sample, self._stacks)
        except _ERRORS:  # without a sample, nothing shows that the workers stand still
            moved = True
        if self.report.state.round == order.round:
            if moved:
                self.report.note_alive(time.monotonic())
            self.report.set(sampled=order.sample)

    def _stacks(self) -> list[RankStack]:
        # Another process of the job may offer a false table.
        found = job_processes.of_forkserver(self.forkserver.pid)
        return collect(found, self.failures.node_rank, _SAMPLE_SECONDS)


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


class PhaseRecorder:
    """Record the phases of one node, and count the ranks that have joined a group.

    The phases of a rank that runs:

    - ``import`` from its start;
    - ``running`` from its first line of output, or from its start if it is no Python program;
    - ``rendezvous``, ``init``, again ``running`` when it forms a process group (`torch_patches`).

    Args:
        log: the file of this node.
        attempt: the job's attempt.
        report: the state of this node.
    """

    def __init__(self, log: PhaseLog, attempt: int, report: StateReport) -> None:
        self._log = log
        self._attempt = attempt
        self._report = report
        self._restart = self._first_rank = 0
        self._started = 0.0  # the begin of the round
        self._ranks: dict[int, Phase] = {}  # the current phase by local rank
        self._left = 0  # phases of ranks that may still be recorded in this round
        # Local ranks that have begun, and completed, a group, and that import torch now.
        self._joined, self._formed, self._importing = set[int](), set[int](), set[int]()

    # -- the node ----------------------------------------------------------------------------------

    def start(self, world: World, *, is_python: bool) -> None:
        """Record that the workers of a round are started.

        Args:
            world: the round.
            is_python: whether they run a Python program.
        """
        self._restart, self._first_rank = world.restart, world.first_rank
        self._left = _MAX_PHASES * world.nproc
        self._joined, self._formed, self._importing = set(), set(), set()
        self.add(Phase.RUNNING)
        self._ranks = dict.fromkeys(range(world.nproc), Phase.SETUP)
        for local_rank in self._ranks:
            self._add_rank(local_rank, Phase.IMPORT if is_python else Phase.RUNNING)
        self._started = time.monotonic()

    def stop(self) -> None:
        """Record that the workers that still run are being stopped."""
        if running := [rank for rank, phase in self._ranks.items() if phase not in _OVER]:
            self.add(Phase.STOP)
            for local_rank in running:
                self._add_rank(local_rank, Phase.STOP)

    # -- ranks -------------------------------------------------------------------------------------

    def on_worker_phase(self, message: forkserver_messages.WorkerPhase) -> None:
        """Record a phase that a worker reports; ignore phases that it cannot have."""
        local_rank = message.local_rank
        current = self._ranks.get(local_rank)
        if message.phase == Phase.IMPORT and current is not None:
            self._importing.add(local_rank)
            return
        self._importing.discard(local_rank)
        missing = self._report.state.missing
        if missing is not None and missing.local_rank == local_rank:
            self._report.set(missing=None)  # it does not wait for those ranks any more
        # User code can write anything into the pipe.
        phase = next((each for each in _FROM_WORKER if each.value == message.phase), None)
        if phase is None or current is None or current in _OVER:
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

    def ended(self, local_ranks: Iterable[int], how: str) -> None:
        """Record the end of ranks, and that of the node's last one."""
        for local_rank in local_ranks:
            self._importing.discard(local_rank)
            self._add_rank(local_rank, Phase.ENDED, detail=how)
        if all(phase is Phase.ENDED for phase in self._ranks.values()):
            self.add(Phase.ENDED)

    def count(self) -> None:
        """Put the counts of ranks into the state if they have changed."""
        joined, formed, importing = len(self._joined), len(self._formed), bool(self._importing)
        known = self._report.state
        if (joined, formed, importing) != (known.joined, known.formed, known.importing):
            self._report.set(joined=joined, formed=formed, importing=importing)

    def _add_rank(
        self, local_rank: int, phase: Phase, detail: str = "", at: float | None = None
    ) -> None:
        if self._ranks.get(local_rank, phase) is not phase:
            self._ranks[local_rank] = phase
            self._left -= 1
            if self._left >= 0 or phase in _OVER:
                self.add(phase, self._first_rank + local_rank, at=at, detail=detail)

    def add(
        self, phase: Phase, rank: int | None = None, at: float | None = None, detail: str = ""
    ) -> None:
        """Record the begin of a phase, of the node or of a rank.

        Args:
            phase: the phase.
            rank: the rank; None for the node.
            at: the monotonic time; None for now.
            detail: one short text.
        """
        moment = time.monotonic()
        at = moment if at is None else at
        begin = PhaseBegin(
            phase,
            rank,
            restart=self._restart,
            attempt=self._attempt,
            time=round(time.time() - (moment - at), 3),
            monotonic=round(at, 6),
            detail=detail,
        )
        files.later(self._log.add, begin)


class NodeWaits:
    """How long the workers of one node wait in collectives."""

    def __init__(self) -> None:
        self._world: World | None = None
        # The last wait of each local rank, and the monotonic time at which it has arrived.
        self._waits: dict[int, tuple[float, Wait]] = {}
        self._new: set[int] = set()
        self._sent = 0.0

    def begin_round(self, world: World) -> None:
        """Forget the workers of the last round."""
        self._world, self._waits, self._new = world, {}, set()

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
        world, moment = self._world, time.monotonic()
        if world is None or not self._new:
            return None
        if moment < self._sent + stragglers.interval(world.nnodes):
            return None
        ranks = tuple(
            (rank, round(wait.step, 6), round(wait.waited, 6))
            for rank, (_, wait) in sorted(self._waits.items())
            if rank in self._new
        )
        self._sent = moment
        self._new.clear()
        return messages.RankWaits(world.restart, ranks[:_MOST_WAITS])
