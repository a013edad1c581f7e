"""One node's workers: run them by the forkserver, keep the node's state, sample its use."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from clusterjob.node import contract, job_processes
from clusterjob.node.contract import World
from clusterjob.node.environments import this_node, worker_variables
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog, read_phases
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.samples import GpuSample, NodeFacts, Sample, SampleWriter, Usage
from clusterjob.node.metrics.stragglers import Wait
from clusterjob.node.rendezvous import messages, root_cause
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.flight_recorder import FlightRecorder
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.stacks.progress import Progress
from clusterjob.node.states import (
    Failing,
    Missing,
    NodeState,
    Order,
    Probe,
    Probed,
    Stop,
)
from clusterjob.node.system import crashes, devices, files, processes
from clusterjob.node.system.codec import plain
from clusterjob.node.verdict import Failure, FailureKind
from clusterjob.node.workers import forkserver_messages
from clusterjob.node.workers.forkserver_client import ForkserverClient
from clusterjob.node.workers.worker_failures import Failures, WorkerStatus, how

_T = TypeVar("_T")

# A state must fit a message of 256 KiB. Bytes of its failures, and their number.
_FAILURE_BYTES, _MOST_FAILURES = 96 << 10, 128
_ANSWER_BYTES = 48 << 10  # of the failures in an answer about missing ranks
# Characters of a message and of the output after it; of a message without its output.
_TEXT, _SHORT = 4096, 200
_LINE = 300  # characters of a line in an answer
# The fields of a state that a new round does not change.
_OF_NODE = ("measured", "by_exec", "seen", "seen_of", "request")
_ALIVE_SECONDS = 1.0  # between two signs of life that are worth a message
_FROM_WORKER = (Phase.RENDEZVOUS, Phase.INIT, Phase.RUNNING)  # the phases that a worker reports
_OVER = (Phase.STOP, Phase.ENDED)
_SAMPLE_SECONDS = 1.5  # maximum time for one sample
_DUMP_SECONDS = 0.5  # seconds for torch's flight recorders
_MAX_BYTES = 200_000  # of the stacks of one rank in a message, which has at most 256 KiB
# Numbers of threads, and of frames of each, until the stacks of a rank fit.
_SIZES = ((250, 250), (64, 100), (32, 50), (8, 25))
# Seconds after the workers' start until measuring begins: while they start, they need the CPU.
_METRICS_AFTER = 4.0
_GPUS_FIRST = 1.0  # seconds in which most drivers answer the first time


class StateReport:
    """The state of one node.

    Args:
        seen: `seen` and `seen_of` of the state of this node's last agent.
        tells_life: whether the coordinator needs the signs of life, because it looks for a hang.

    Attributes:
        changed: set when the state has changed.
        state: the state, without what depends on the time; see `now`.
        stopped_at: the monotonic time from which the workers of the round are stopped: what fails
            later is no failure.
        alive_at: the monotonic time of the last sign of life of a worker.
    """

    def __init__(self, seen: Sequence[int] = (0, 0), *, tells_life: bool = True) -> None:
        self.changed = asyncio.Event()
        self.state = NodeState(seen=seen[0], seen_of=seen[1])
        self.stopped_at = math.inf
        self.alive_at = self._told_at = time.monotonic()
        self._tells_life = tells_life
        self._failing: dict[root_cause.Key, tuple[Failure, float, bool]] = {}
        self._exits: Sequence[tuple[Failure, float]] = ()

    def now(self) -> NodeState:
        """Return the state of this moment."""
        moment = time.monotonic()
        # An effect names no cause.
        first = sorted(self._failing.values(), key=lambda each: (each[0].effect, each[1]))
        fitting = _fitting([failure for failure, _, _ in first[:_MOST_FAILURES]], _FAILURE_BYTES)
        return replace(
            self.state,
            quiet=max(0.0, moment - self.alive_at),
            failing=tuple(
                Failing(failure, max(0.0, moment - at), exited)
                for failure, (_, at, exited) in zip(fitting, first, strict=False)
            ),
            exits=tuple(
                Failing(_bounded(failure, 0), moment - at, exited=True)
                for failure, at in self._exits
            ),
        )

    def begin(self, number: int, *, idle: bool = False) -> None:
        """Begin a round: forget the workers of the last one.

        Args:
            number: the round; -1 for none.
            idle: whether it has no workers.
        """
        kept = {name: getattr(self.state, name) for name in _OF_NODE}
        self._failing, self._exits, self.stopped_at = {}, (), math.inf
        self.alive_at = self._told_at = time.monotonic()
        self.set(**vars(NodeState(number, idle=idle, **kept)))

    def set(self, **fields: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **fields)
        self.changed.set()

    def ask(self, **fields: Any) -> None:
        """Change fields of the request to the whole job."""
        self.set(request=replace(self.state.request, **fields))

    def stop(self) -> None:
        """Note that the workers are being stopped."""
        self.stopped_at = min(self.stopped_at, time.monotonic())

    @property
    def stops(self) -> bool:
        """Whether the workers stop, or will when the coordinator knows of a cancellation."""
        return self.stopped_at < math.inf or bool(self.state.request.cancel)

    def fail(self, failure: Failure, at: float, *, exited: bool) -> None:
        """Add a failure of a worker or the node, or complete it when the worker has ended.

        Args:
            failure: the failure.
            at: the monotonic time of it.
            exited: whether the worker has ended.
        """
        key = root_cause.key_of(failure)
        known = self._failing.get(key)
        if known is None and at < self.stopped_at:
            self._failing[key] = failure, at, exited
        elif known is not None and exited and not known[2]:
            failure = root_cause.completed(known[0], failure, by_stop=at >= self.stopped_at)
            self._failing[key] = failure, known[1], True
        self.changed.set()

    def complete(self, exits: Sequence[tuple[Failure, float]]) -> None:
        """Say that all failures are known, and name workers that have ended with exit code 0.

        Args:
            exits: each with its monotonic time.
        """
        self._exits = exits
        self.set(reported=True)

    def note_alive(self, at: float, step: int = -1) -> None:
        """Record the monotonic time of a sign of life of a worker, and its step."""
        self.alive_at = max(at, self.alive_at)
        if self._tells_life and (at > self._told_at + _ALIVE_SECONDS or step > self.state.step):
            self._told_at = self.alive_at
            self.set(step=max(step, self.state.step))


def answer_to(probe: Probe, lines: Iterable[str], failures: Sequence[Failure]) -> Probed:
    """Return the answer to a question about missing ranks, cut to what a message can take."""
    cut = tuple(line[:_LINE] for line in lines)
    return Probed(probe, cut, tuple(_fitting(failures, _ANSWER_BYTES)))


def _fitting(failures: Sequence[Failure], most_bytes: int) -> list[Failure]:
    """Return the first failures that fit; the more there are, the less output they have.

    The first one keeps its output.
    """
    most = min(_TEXT, most_bytes // (12 * max(1, len(failures))))
    found = [_bounded(each, most if n else _TEXT) for n, each in enumerate(failures)]
    while sum(len(json.dumps(plain(each))) for each in found) > most_bytes:
        found.pop()
    return found


def _bounded(failure: Failure, most: int) -> Failure:
    """Return the failure with at most so many characters of the end of its output."""
    last = "\n".join(failure.last_lines)[-most:] if most else ""
    return replace(
        failure,
        message=failure.message[: max(_SHORT, most)],
        last_lines=tuple(last.split("\n")) if last else (),
    )


class NodeWorkers:
    """The workers of one node.

    The phases of a rank that runs, in the node's file:

    - ``import`` from its start;
    - ``running`` from the first line of output of the node, or from its start if it is no Python
      program;
    - ``rendezvous``, ``init``, again ``running`` when it forms its first process group
      (`torch_patches`); it may form more of them in a loop.

    Args:
        node: the job, as this node sees it.
        send: sends a message to the coordinator.

    Attributes:
        forkserver: starts, reaps and stops the workers.
        report: the state of this node.
        failures: describes the failures of this node and its workers.
        timeline: knows when the workers wrote output.
        spared: pids of the processes that send notifications now; they outlive the workers.
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
        self.forkserver = forkserver
        self.report = report
        self._send = send
        self._drain: int | None = None  # the process that writes the workers' output
        self._progress = Progress()
        # The last wait in collectives of each local rank, and the monotonic time of its arrival.
        self._waits: dict[int, tuple[float, Wait]] = {}
        self._waits_sent = 0.0
        self.spared: set[int] = set()
        self.timeline = log_files.Timeline(directory)
        self._phases = PhaseLog(job_dir, node_rank)
        self._ranks: dict[int, Phase] = {}  # the current phase by local rank
        # The local ranks that have begun a process group, and whether it is formed.
        self._formed: dict[int, bool] = {}
        self.flight_recorder = FlightRecorder(job_dir, node_rank, attempt)
        self.failures = Failures(
            node_rank,
            this_node.node_name(),
            directory=directory,
            attempt=attempt,
        )
        none = World(
            restart=0,
            master_addr="",
            master_port=0,
            agent_store=False,
            node_rank=0,
            nnodes=0,
            nproc=0,
            first_rank=0,
            world_size=0,
        )
        self._status = WorkerStatus(self.failures, none)  # of this round

    # -- orders of the coordinator -----------------------------------------------------------------

    def start(self, order: Order, store: socket.socket | None = None) -> None:
        """Start a round of workers, and record the growth of their files.

        Args:
            order: the round.
            store: the listening socket for torch's store; None if another node serves it.
        """
        assert order.world is not None
        world = replace(order.world, gpus=devices.visible_gpus(os.environ))
        pairs = log_files.round_files(self.failures.directory, world, attempt=self.failures.attempt)
        self.timeline.follow(itertools.chain.from_iterable(pairs))
        self._status = WorkerStatus(self.failures, world)
        self._ranks, self._formed, self._waits = {}, {}, {}
        if self.forkserver.error:
            self.fail_node(self.forkserver.error)
            return
        job = self._node.identity
        variables = {
            contract.JOB_ID: job.job_id,
            contract.JOB_DIR: str(self._node.directory),
            contract.ATTEMPT: str(job.attempt),
            # host:port of torch's store if an agent serves it; empty if rank 0 serves it.
            contract.STORE: f"{world.master_addr}:{world.master_port}" * world.agent_store,
        }
        if self._node.options.launcher == "ray":
            from clusterjob.node.workers import ray_node  # few jobs use Ray

            variables[contract.RAY_TOKEN] = ray_node.token_of(
                job.token, job.job_id, attempt=job.attempt, restart=world.restart
            )
        if self._node.options.metrics:
            variables[contract.WAITS] = "1"
        variables = (
            worker_variables.quiet_defaults(os.environ, world.master_addr, nnodes=world.nnodes)
            | worker_variables.cpu_defaults(os.environ, world.gpus)
            | variables
            | self.flight_recorder.variables(os.environ, world.restart)
        )
        message = forkserver_messages.StartRound(world, variables)
        if self.forkserver.start_round(message, store):
            self._on_started()

    def stop(self, stop: Stop) -> None:
        """Stop the workers."""
        self.report.stop()
        if running := [rank for rank, phase in self._ranks.items() if phase not in _OVER]:
            self.begin_phase(Phase.STOP)
            for local_rank in running:
                self._begin_rank_phase(local_rank, Phase.STOP)
        if self.forkserver.ready and not self.forkserver.gone:
            self.forkserver.send(stop)
        else:
            self.forkserver.drop_round()
            self.report.set(idle=True)

    def warn(self) -> None:
        """Warn the workers of a preemption."""
        # Workers that another launcher, such as torchrun, has started poll this file.
        warning = ends.warning_file(self._node.directory, self.failures.attempt)
        files.later(warning.touch, 0o600)
        self.forkserver.send(forkserver_messages.WarnWorkers())

    def answer(self, order: Order, done: Order) -> None:
        """Answer the coordinator's new questions that take no time.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
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

    async def look(self, order: Order, done: Order) -> None:
        """Answer the coordinator's new questions about the stacks of the workers; see `answer`."""
        status, found = self._status, dict[str, Any]()
        if order.collect and not done.collect:  # first: the coordinator waits 2 s
            stacks: list[RankStack] = await _in_thread([], self._stacks)
            for stack in stacks:
                self._send(messages.StackFound(order.round, bounded(stack)))
            ranks, seconds = [each.rank for each in stacks], _DUMP_SECONDS if order.dumps else 0.0
            request = self.flight_recorder.request
            dumps: tuple[str, ...] = await _in_thread((), request, order.round, ranks, seconds)
            if self.report.state.round == order.round:
                self.report.set(collected=True, dumps=dumps)
        if order.probe is not None and order.probe != done.probe:
            stacks = await _in_thread([], self._stacks)
            lines, failures = status.describe(order.probe, stacks)
            found["probed"] = answer_to(order.probe, lines, failures)
        if order.sample not in (0, done.sample):
            # Without a sample, nothing shows that the workers stand still.
            if await _in_thread(True, self._progress.sample, self._stacks):
                self.report.note_alive(time.monotonic())
            found["sampled"] = order.sample
        if found and self.report.state.round == order.round:
            self.report.set(**found)

    def _on_started(self) -> None:
        """Report that the workers have been started."""
        nproc, is_python = self._status.world.nproc, self._node.options.program.is_python
        self.begin_phase(Phase.RUNNING)
        self._ranks = dict.fromkeys(range(nproc), Phase.SETUP)
        for local_rank in self._ranks:
            self._begin_rank_phase(local_rank, Phase.IMPORT if is_python else Phase.RUNNING)
        self._status.started = time.monotonic()
        self.report.set(started=True)

    # -- messages of the forkserver ----------------------------------------------------------------

    def receive(self) -> str:
        """Handle one message of the forkserver; return why it was lost, or nothing."""
        handlers: dict[type, Callable[[Any], object]] = {
            forkserver_messages.Ready: self._on_ready,
            forkserver_messages.WorkerFailing: self._on_worker_failing,
            forkserver_messages.WorkerExited: self._on_worker_exited,
            Missing: lambda missing: self.report.set(missing=missing),
            forkserver_messages.WorkerAlive: lambda alive: self.report.note_alive(
                time.monotonic(), alive.step
            ),
            forkserver_messages.WorkerPhase: self._on_worker_phase,
            forkserver_messages.WorkerWaits: self._on_worker_waits,
            forkserver_messages.StoreExited: self._on_store_exited,
            forkserver_messages.EndsReported: lambda _reported: self.report.complete(
                self._status.early_exits()
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
            self.begin_phase(Phase.RENDEZVOUS)  # ready before the other nodes
        if message.why and self._node.options.start == "fork":
            self.fail_node(f"--start fork is impossible: {message.why}")
        elif message.why:
            why = f"node {self.failures.node_rank} starts its workers by exec: {message.why}"
            self._node.print_line(why)
            self.report.set(by_exec=why[:300])

    def _on_store_exited(self, message: forkserver_messages.StoreExited) -> None:
        ended = f"torch's store was lost ({how(*processes.exit_code_of(message.status))})"
        last = log_files.last_lines(self.failures.directory / STORE_LOG, 1)
        self._add_failure(": ".join([ended, *last]), FailureKind.PROCESS_LOST)

    def _on_forkserver_exited(self) -> str:
        """Report the end of the forkserver; the kernel has killed the workers with it."""
        why = f"the forkserver was lost ({how(*self.forkserver.reap())})"
        processes.kill_descendants(*self.spared, self._drain)  # which writes the last output
        self._add_failure(why, FailureKind.PROCESS_LOST)
        if self.report.stops:
            self.report.set(idle=True)
        self.forkserver.error = self.forkserver.error or why
        return why

    # -- failures ----------------------------------------------------------------------------------

    def _on_worker_failing(self, message: forkserver_messages.WorkerFailing) -> None:
        failure = self.failures.of_worker(
            self._status.world,
            message.local_rank,
            code=message.exit_code,
            signal_name=None,
            message=message.message,
            kind=message.kind,
            where=message.where,
        )
        self.report.fail(failure, message.monotonic, exited=not message.started)

    def _on_worker_exited(self, message: forkserver_messages.WorkerExited) -> None:
        status, local_rank = self._status, message.local_rank
        code, signal_name = processes.exit_code_of(message.status)
        ended = how(code, signal_name)
        status.ended[local_rank] = ended
        self._begin_rank_phase(local_rank, Phase.ENDED, detail=ended)
        if code != 0:
            failure = self.failures.of_worker(
                status.world, local_rank, code=code, signal_name=signal_name, message=ended
            )
            self.report.fail(failure, message.monotonic, exited=True)
        else:
            status.exits[local_rank] = message.monotonic
            self.report.set(succeeded=(*self.report.state.succeeded, local_rank))
        if len(status.ended) == status.world.nproc:
            self.begin_phase(Phase.ENDED)
            self.report.set(ended=True)

    def fail_node(self, why: str) -> None:
        """Report that this node cannot run workers: now, or in `start` if no round has begun."""
        self.forkserver.error = why
        self._add_failure(why, FailureKind.LAUNCH)

    def _add_failure(self, why: str, kind: FailureKind) -> None:
        """Report a failure of a process of this node that runs no user code, unless it stops."""
        if self._status.world.nnodes and not self.report.stops:
            failure = replace(self.failures.of_node(why), kind=kind)
            self.report.fail(failure, time.monotonic(), exited=True)

    # -- signs of life and stacks ------------------------------------------------------------------

    def note_output(self, grown: Iterable[str]) -> None:
        """Record what the workers have written into these log files.

        If one writes output before it joins a process group, the node's workers run.
        """
        self.report.note_alive(self.timeline.grown_at)
        if any(name.endswith(".out") for name in grown):
            for local_rank, phase in self._ranks.items():
                if phase is Phase.IMPORT:
                    self._begin_rank_phase(local_rank, Phase.RUNNING, detail="first output")
        counts: dict[str, Any] = {
            "joined": len(self._formed),
            "formed": sum(self._formed.values()),
        }
        if replace(self.report.state, **counts) != self.report.state:
            self.report.set(**counts)

    def _on_worker_phase(self, message: forkserver_messages.WorkerPhase) -> None:
        """Record a phase that a worker reports; ignore phases that it cannot have."""
        # User code can write anything into the pipe.
        local_rank, status = message.local_rank, self._status
        if self._ranks.get(local_rank, Phase.ENDED) in _OVER:
            return
        if message.phase in _FROM_WORKER:
            missing = self.report.state.missing
            if missing is not None and missing.local_rank == local_rank:
                self.report.set(missing=None)  # it does not wait for those ranks any more
            if not self._formed.get(local_rank):
                phase = Phase(message.phase)
                self._formed[local_rank] = phase is Phase.RUNNING
                at = min(max(message.monotonic, status.started or 0.0), time.monotonic())
                self._begin_rank_phase(local_rank, phase, at=at)

    def _begin_rank_phase(
        self, local_rank: int, phase: Phase, detail: str = "", at: float | None = None
    ) -> None:
        if self._ranks.get(local_rank, phase) is not phase:
            self._ranks[local_rank] = phase
            self.begin_phase(phase, local_rank, at=at, detail=detail)

    def begin_phase(
        self,
        phase: Phase,
        local_rank: int | None = None,
        at: float | None = None,
        detail: str = "",
    ) -> None:
        """Record the begin of a phase, of the node or of a worker.

        Args:
            phase: the phase.
            local_rank: the worker; None for the node.
            at: the monotonic time; None for now.
            detail: one short text.
        """
        moment, world = time.monotonic(), self._status.world
        at = moment if at is None else at
        begin = PhaseBegin(
            phase,
            None if local_rank is None else world.first_rank + local_rank,
            restart=world.restart,
            attempt=self.failures.attempt,
            time=round(time.time() - (moment - at), 3),
            monotonic=round(at, 6),
            detail=detail,
        )
        files.later(self._phases.add, begin)

    def _on_worker_waits(self, message: forkserver_messages.WorkerWaits) -> None:
        """Keep how long a worker waits; user code can write anything into the pipe."""
        if message.local_rank < self._status.world.nproc:
            wait = Wait(message.step, message.waited)
            self._waits[message.local_rank] = time.monotonic(), wait

    def waits(self) -> dict[int, Wait]:
        """Return how long each rank waits in collectives; another thread may call this."""
        first_rank, moment = self._status.world.first_rank, time.monotonic()
        return {
            first_rank + local_rank: wait
            for local_rank, (at, wait) in list(self._waits.items())
            if wait.is_fresh(moment - at)
        }

    def waits_due(self) -> messages.RankWaits | None:
        """Return a message with the waits since the last one, if that is old enough; else None."""
        world, moment, since = self._status.world, time.monotonic(), self._waits_sent
        if moment < since + stragglers.interval(world.nnodes):
            return None
        ranks = tuple(
            (local_rank, round(wait.step, 6), round(wait.waited, 6))
            for local_rank, (at, wait) in sorted(self._waits.items())
            if at > since
        )
        if ranks:
            self._waits_sent = moment
        return messages.RankWaits(world.restart, ranks) if ranks else None

    def _stacks(self) -> list[RankStack]:
        # Another process of the job may offer a false table.
        found = job_processes.of_forkserver(self.forkserver.pid)
        return collect(found, self.failures.node_rank, _SAMPLE_SECONDS)


async def _in_thread(default: _T, call: Callable[..., _T], *args: Any, **fields: Any) -> _T:
    """Return the result of a call in a thread, or the default after an error.

    No descriptor or thread may be free, or a process has ended meanwhile.
    """
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        return await asyncio.to_thread(call, *args, **fields)
    return default


def bounded(stack: RankStack) -> RankStack:
    """Return the stacks of a rank, with fewer threads and frames if they are too long to send."""
    for threads, frames in _SIZES:
        stack = replace(
            stack,
            threads=tuple(
                replace(thread, frames=thread.frames[:frames]) for thread in stack.threads[:threads]
            ),
        )
        if len(json.dumps(plain(stack))) <= _MAX_BYTES:
            return stack
    return replace(stack, threads=())


class NodeMetrics:
    """Sample the workers of one node in a thread, unless ``--no-metrics`` is given.

    Nothing here may end the job: an error ends the samples.

    Args:
        node: the job, as this node sees it.
        workers: the workers.
    """

    def __init__(self, node: NodeJob, workers: NodeWorkers) -> None:
        self._begin = time.monotonic()
        self._node = node
        self._workers = workers
        self._server: asyncio.Server | None = None
        self._usage = Usage()
        self._latest: tuple[NodeFacts, Sample] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    async def start(self) -> None:
        """Begin the samples, and serve them on --metrics-port; if it is in use, print one line."""
        options, topology = self._node.options, self._node.topology
        if options.metrics:
            self._thread.start()
        if not (port := options.metrics_port):
            return
        if topology.nnodes > 1 and topology.master_addr in ("127.0.0.1", "localhost"):
            port += topology.node_rank  # all nodes are on this machine
        from clusterjob.node.metrics import prometheus

        def text() -> str:
            job_id = self._node.identity.job_id
            return prometheus.text_of(job_id, *self._latest, self._usage) if self._latest else ""

        try:
            self._server = await prometheus.serve(port, text)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            self._node.print_line(
                f"node {topology.node_rank} serves no metrics on port {port}: {why}"
            )

    def end(self) -> dict[str, Any]:
        """End the samples; return their sums and the durations for the end record."""
        if self._server is not None:
            self._server.close()
        self._stop.set()
        if self._node.options.metrics:
            self._thread.join(1.0)  # a sample takes milliseconds, unless the disk hangs
        begins = [
            each
            for each in read_phases(self._node.directory, self._node.topology.node_rank)
            if each.attempt == self._node.identity.attempt
        ]
        return {
            **(self._usage.to_json() or {}),
            "visible_gpus": devices.visible_gpus(os.environ),
            **durations(begins, self._begin, time.monotonic()),
        }

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:
            crashes.summary(error)  # agent.log shows the traceback

    def _sample(self) -> None:
        while not self._ranks():  # the forkserver imports torch
            if self._stop.wait(1.0):
                return
        begin = time.monotonic()
        if self._stop.wait(_METRICS_AFTER):
            return
        # Loaded now: these imports would delay the start of the workers.
        from clusterjob.node.metrics import sources

        self._usage = Usage(begin)
        machine, workers = sources.Machine(), sources.Workers(self._ranks, begin)
        gpus = sources.GpuReader(os.environ)
        node_rank = self._node.topology.node_rank
        writer = SampleWriter(self._node.directory, node_rank)
        facts = NodeFacts(
            node_rank,
            this_node.node_name(),
            attempt=self._node.identity.attempt,
            cores=devices.usable_cores(),
            memory=machine.memory,
        )
        pause = _GPUS_FIRST
        while not self._stop.wait(pause):
            state = gpus.state()
            if state is not None:
                facts = replace(facts, gpus=state[0])
            waits = {
                rank: {"step": 1000 * wait.step, "waited": 1000 * wait.waited}
                for rank, wait in self._workers.waits().items()
            }
            ranks = workers.sample(waits)
            if not ranks:  # after the last round: the newest sample of a node shows its ranks
                continue
            sample = Sample(
                time.time(),
                time.monotonic(),
                restart=self._workers.report.state.round,
                quiet=time.monotonic() - self._workers.report.alive_at,
                **machine.sample(),
                workers=ranks,
                gpus=state[1] if state is not None else (GpuSample(),) * len(facts.gpus),
            )
            self._usage.add(facts, sample)
            self._latest = facts, sample
            pause = writer.add(facts, sample)

    def _ranks(self) -> dict[int, int]:
        """Return the rank of each worker by pid."""
        ranks = job_processes.of_forkserver(self._workers.forkserver.pid).ranks
        return {each.pid: each.rank for each in ranks}


def durations(begins: Iterable[PhaseBegin], begin: float, now: float) -> dict[str, Any]:
    """Return the durations of a node in one attempt, in seconds.

    ``wall``: of the agent; ``waited``: until its workers were started; ``startup``: until they
    ran; ``restarts`` and ``restart_seconds``: from the first end of a worker until the next round
    ran; ``ran``: per rank, from the begin of the last round to the rank's end.

    Args:
        begins: the begins of the phases of the node and of its ranks.
        begin: the begin of the agent, by the node's monotonic clock.
        now: the time by this clock.
    """
    rounds: dict[int, float] = {}
    running: dict[int, float] = {}
    ends: dict[int, dict[str, float]] = {}
    for each in begins:
        begin = min(begin, each.monotonic)
        if each.rank is None and each.phase is Phase.RUNNING:
            rounds[each.restart] = running[each.restart] = each.monotonic
        elif each.phase is Phase.ENDED and each.rank is not None:
            ends.setdefault(each.restart, {})[str(each.rank)] = each.monotonic
        # The first output of a rank that joins no group says nothing about its start.
        elif each.phase is Phase.RUNNING and not each.detail:
            running[each.restart] = max(running.get(each.restart, 0.0), each.monotonic)
    last = max(rounds, default=0)
    lost = sum(
        max(0.0, at - min(ends.get(number - 1, {}).values(), default=rounds[number]))
        for number, at in running.items()
        if number in rounds and number > 0
    )
    return {
        "wall": round(now - begin, 1),
        "waited": round(rounds.get(0, now) - begin, 1),
        "startup": round(running[0] - begin, 1) if 0 in running else None,
        "restarts": last,
        "restart_seconds": round(lost, 1),
        "ran": {
            rank: round(at - rounds[last], 1)
            for rank, at in ends.get(last, {}).items()
            if last in rounds  # a full disk may have lost the begin of a round
        },
    }
