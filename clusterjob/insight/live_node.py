"""Read what one node's files say about its ranks now; each call reads only what was added."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterjob.insight import sample_files
from clusterjob.insight.live_output import LiveOutput
from clusterjob.node.logs.events import Phase, PhaseBegin, read_phases
from clusterjob.node.logs.job_dir import PHASES
from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.metrics.samples import NodeFacts, Sample
from clusterjob.node.system.files import size_of
from clusterjob.node.system.sanitize import sanitize

_HISTORY = 60  # samples that are kept for the sparklines
_HISTORY_TIME = 300.0  # seconds of samples that the first call reads
# Seconds without a new sample after which a node counts as silent: this, and this many intervals.
_NO_DATA, _NO_DATA_INTERVALS = 20.0, 4
_MAX_SAMPLES = 4 << 20  # bytes of samples that one call reads
_MAX_RANKS = 4096  # ranks of one node that are shown; a host may name any number


@dataclass(frozen=True)
class RankNow:
    """One rank.

    Attributes:
        rank, node_rank, host: the worker.
        phase: its phase; empty if it is unknown.
        detail: one short text about the phase, such as the exit code.
        cpu: percent of one core; None without metrics.
        memory: resident bytes.
        gpu: percent of its GPU; None if it has none, or shares one.
        waits: percent of its steps for which it waits in collectives; None if it is unknown.
        quiet: seconds since its last output; None if it is unknown.
        line: its last line.
        cpu_history, gpu_history: percents, the oldest first.
    """

    rank: int
    node_rank: int
    host: str
    phase: str = ""
    detail: str = ""
    cpu: float | None = None
    memory: int | None = None
    gpu: float | None = None
    waits: float | None = None
    quiet: float | None = None
    line: str = ""
    cpu_history: tuple[float, ...] = ()
    gpu_history: tuple[float, ...] = ()


@dataclass(frozen=True)
class NodeNow:
    """One node, with its ranks.

    Attributes:
        node_rank, host: the node.
        phase, detail: as of a rank.
        cpu: percent of all cores that the job may use.
        memory, memory_limit: bytes.
        gpu: percent, the mean of its GPUs; None without GPUs.
        gpu_memory, gpu_memory_limit: bytes, the sums of its GPUs.
        load: the load average of one minute.
        received, sent: bytes per second through the network.
        quiet: seconds since the last output of any of its ranks.
        line: the newest line of any of its ranks.
        no_data: seconds since the last sample arrived here; 0 while samples arrive.
        cpu_history, gpu_history: percents, the oldest first.
        ranks: its ranks.
    """

    node_rank: int
    host: str = ""
    phase: str = ""
    detail: str = ""
    cpu: float | None = None
    memory: int | None = None
    memory_limit: int | None = None
    gpu: float | None = None
    gpu_memory: int | None = None
    gpu_memory_limit: int | None = None
    load: float | None = None
    received: float | None = None
    sent: float | None = None
    quiet: float | None = None
    line: str = ""
    no_data: float = 0.0
    cpu_history: tuple[float, ...] = ()
    gpu_history: tuple[float, ...] = ()
    ranks: tuple[RankNow, ...] = ()


def _history() -> deque[float]:
    return deque(maxlen=_HISTORY)


class _Metrics:
    """The newest sample of a node, and short histories for the sparklines."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self._job_dir = job_dir
        self._node_rank = node_rank
        self._offset = 0  # bytes of the file that were read
        self._arrived = time.monotonic()
        self._round = (0, 0)  # attempt and restart of the sample
        self.facts: NodeFacts | None = None
        self.sample: Sample | None = None
        self.interval = 0.0  # seconds between the last two samples
        self.cpu = _history()
        self.gpu = _history()
        self.ranks_cpu: dict[int, deque[float]] = defaultdict(_history)
        self.ranks_gpu: dict[int, deque[float]] = defaultdict(_history)

    def read(self) -> None:
        """Add the new samples: the first time those of 5 minutes."""
        path = sample_files.path_of(self._job_dir, self._node_rank)
        size = size_of(path)
        if size == self._offset:
            return
        if self.sample is None:
            for facts, sample in sample_files.read(self._job_dir, self._node_rank, _HISTORY_TIME):
                self._add(facts, sample)
            self._offset = size
            return
        for line in self._added_lines(path):
            with contextlib.suppress(ValueError):
                value = sample_files.parse(line)
                if isinstance(value, NodeFacts):
                    self.facts = value
                elif self.facts is not None:
                    self._add(self.facts, value)

    def _added_lines(self, path: Path) -> list[bytes]:
        """Return the whole lines that were added to the file."""
        with contextlib.suppress(OSError), open_regular(path, buffering=0) as stream:
            stream.seek(self._offset)
            data = stream.read(_MAX_SAMPLES)
            data = data[: data.rfind(b"\n") + 1]
            self._offset += len(data)
            return data.splitlines()
        return []

    def _add(self, facts: NodeFacts, sample: Sample) -> None:
        if self._round != (facts.attempt, sample.restart):  # other processes
            self._round = (facts.attempt, sample.restart)
            self.ranks_cpu.clear()
            self.ranks_gpu.clear()
        if self.sample is not None:
            self.interval = sample.monotonic - self.sample.monotonic
        self.facts, self.sample, self._arrived = facts, sample, time.monotonic()
        self.cpu.append(sample.cpu / max(1, facts.cores))
        if (used := mean_use(sample)) is not None:
            self.gpu.append(used)
        for worker in sample.workers[:_MAX_RANKS]:
            self.ranks_cpu[worker.rank].append(worker.cpu)
        for rank, use in gpu_of_ranks(sample).items():
            self.ranks_gpu[rank].append(use)

    @property
    def age(self) -> float:
        """Seconds since the newest sample arrived on this machine."""
        return time.monotonic() - self._arrived

    @property
    def node_time(self) -> float:
        """The time now by the node's clock; 0 without a sample."""
        return 0.0 if self.sample is None else self.sample.time + self.age


def mean_use(sample: Sample) -> float | None:
    """Return the mean use of a node's GPUs in percent; None without a GPU that tells it."""
    uses = [gpu.use for gpu in sample.gpus if gpu.use is not None]
    return sum(uses) / len(uses) if uses else None


def gpu_of_ranks(sample: Sample) -> dict[int, float]:
    """Return the use of each rank's GPU, if a node has as many GPUs as ranks, or one rank."""
    ranks = sorted(worker.rank for worker in sample.workers)
    if len(ranks) == 1 and (used := mean_use(sample)) is not None:
        return {ranks[0]: used}
    if len(ranks) != len(sample.gpus):
        return {}
    return {
        rank: gpu.use for rank, gpu in zip(ranks, sample.gpus, strict=True) if gpu.use is not None
    }


class NodeReader:
    """Read one node of a job; keeps what was read before.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        host: the node's name, until its own files give one.
    """

    def __init__(self, job_dir: Path, node_rank: int, host: str = "") -> None:
        self._job_dir = job_dir
        self._node_rank = node_rank
        self._host = host
        self._output = LiveOutput(node_directory(job_dir, node_rank))
        self._metrics = _Metrics(job_dir, node_rank)
        self._phases_size = -1
        self._phases: dict[int | None, PhaseBegin] = {}

    def read(self, *, ended: bool) -> NodeNow:
        """Return the node now.

        Args:
            ended: whether the job has ended: no rank is silent then, and none uses a CPU.
        """
        self._read_phases()
        node_time = self._output.read()
        self._metrics.read()
        node_time = max(node_time, self._metrics.node_time)
        sample, facts = (None, None) if ended else (self._metrics.sample, self._metrics.facts)
        host = sanitize(self._metrics.facts.host) if self._metrics.facts else self._host
        quiet = {
            rank: max(0.0, node_time - seconds)
            for rank, seconds in ({} if ended else self._output.newest).items()
        }
        latest = max(self._output.newest, key=self._output.newest.__getitem__, default=None)
        node = self._phases.get(None)
        silent = sample is not None and self._metrics.age > max(
            _NO_DATA, _NO_DATA_INTERVALS * self._metrics.interval
        )
        gpus = [] if sample is None or facts is None else list(sample.gpus)
        used = [gpu.memory for gpu in gpus if gpu.memory is not None]
        return NodeNow(
            self._node_rank,
            host,
            phase="" if node is None else str(node.phase),
            detail="" if node is None else sanitize(node.detail),
            cpu=sample.cpu / max(1, facts.cores) if sample and facts else None,
            memory=sample.memory if sample else None,
            memory_limit=facts.memory if facts else None,
            gpu=mean_use(sample) if sample else None,
            gpu_memory=sum(used) if used else None,
            gpu_memory_limit=sum(gpu.memory for gpu in facts.gpus) if facts and used else None,
            load=sample.load if sample else None,
            received=sample.received if sample else None,
            sent=sample.sent if sample else None,
            quiet=min(quiet.values(), default=None),
            line="" if latest is None else self._output.line(latest),
            no_data=self._metrics.age if silent else 0.0,
            cpu_history=tuple(self._metrics.cpu),
            gpu_history=tuple(self._metrics.gpu),
            ranks=tuple(self._ranks(host, sample, quiet)),
        )

    def _ranks(
        self, host: str, sample: Sample | None, quiet: Mapping[int, float]
    ) -> Iterator[RankNow]:
        newest = self._metrics.sample
        workers = {worker.rank: worker for worker in newest.workers} if newest else {}
        known = {*self._phases, *self._output.newest, *workers}
        ranks = sorted(rank for rank in known if rank is not None)[:_MAX_RANKS]
        gpus = {} if sample is None else gpu_of_ranks(sample)
        for rank in ranks:
            begin = self._phases.get(rank)
            over = begin is not None and begin.phase is Phase.ENDED
            worker = None if sample is None or over else workers.get(rank)
            yield RankNow(
                rank,
                self._node_rank,
                host=host,
                phase="" if begin is None else str(begin.phase),
                detail="" if begin is None else sanitize(begin.detail),
                cpu=None if worker is None else worker.cpu,
                memory=None if worker is None else worker.rss,
                gpu=None if worker is None else gpus.get(rank),
                waits=None if worker is None else sample_files.waits(worker),
                quiet=None if over else quiet.get(rank),
                line=self._output.line(rank),
                cpu_history=tuple(self._metrics.ranks_cpu.get(rank, ())),
                gpu_history=tuple(self._metrics.ranks_gpu.get(rank, ())),
            )

    def _read_phases(self) -> None:
        """Read the phases again if their file has grown, which is rare while a job runs."""
        size = size_of(node_directory(self._job_dir, self._node_rank) / PHASES)
        if size == self._phases_size:
            return
        self._phases_size = size
        begins = list(read_phases(self._job_dir, self._node_rank))
        start = max(((begin.attempt, begin.restart) for begin in begins), default=(0, 0))
        # A rank keeps the end of its last round until the next round begins.
        self._phases = {}
        for begin in begins:
            if begin.rank is None or (begin.attempt, begin.restart) == start:
                self._phases[begin.rank] = begin
