"""What a report shows, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterjob.backends.base import Straggler
from clusterjob.core.records import Record
from clusterjob.insight.job_times import Mark, Span
from clusterjob.insight.preflight import PreflightFound
from clusterjob.insight.report.measured import Key
from clusterjob.insight.report.series import Series
from clusterjob.insight.stacks import JobStacks
from clusterjob.node.metrics.samples import NodeFacts
from clusterjob.node.verdict import Verdict


@dataclass(frozen=True)
class Node:
    """One node: its host, its own phases, its facts; None or empty if they are not known."""

    rank: int
    host: str
    spans: Sequence[Span] = ()
    facts: NodeFacts | None = None


@dataclass(frozen=True)
class Rank:
    """One worker.

    Attributes:
        rank, node: the worker; for the row of a node without workers, -1 - its rank.
        spans: its phases, in order.
        failed: whether it is the root cause; its phases and values are marked.
        message: its failure, one line; empty without one.
        consequence: whether it failed only because another worker had failed.
    """

    rank: int
    node: int
    spans: Sequence[Span] = ()
    failed: bool = False
    message: str = ""
    consequence: bool = False

    @property
    def name(self) -> str:
        """The name of its row."""
        return f"rank {self.rank}" if self.rank >= 0 else f"node {self.node}"


@dataclass(frozen=True)
class ReportData:
    """All that a report shows.

    Attributes:
        record: the job.
        state, reason: its state, and why, one line.
        verdict: its verdict; None for a job that has not ended.
        taken_at: the time of the report, RFC 3339, UTC.
        end: the last time on the axis, in seconds; 0 if no time is known.
        nodes, ranks: the nodes and the workers, in order.
        marks: the events.
        series: the metrics of each node, and of its ranks and GPUs.
        attempts: the begin of each attempt, in seconds.
        efficiency: the result of `clusterjob.insight.efficiency.efficiency`; None without one.
        preflight: what the preflight has found; None if there was none.
        stacks: the stacks of the ranks; None if there are none.
        stragglers: the ranks that the others waited for in the last round.
        environments: what each group of equal nodes has recorded of its environment.
        script, diff: the rendered script and the uncommitted changes; empty without them.
        notes: what the report lacks, and why; one line each.
    """

    record: Record
    state: str
    reason: str
    verdict: Verdict | None
    taken_at: str
    end: float = 0.0
    nodes: Sequence[Node] = ()
    ranks: Sequence[Rank] = ()
    marks: Sequence[Mark] = ()
    series: Mapping[int, Mapping[Key, Series]] = field(default_factory=dict)
    attempts: Mapping[int, float] = field(default_factory=dict)
    efficiency: Mapping[str, Any] | None = None
    preflight: PreflightFound | None = None
    stacks: JobStacks | None = None
    stragglers: Sequence[Straggler] = ()
    environments: Sequence[Mapping[str, Any]] = ()
    script: Sequence[tuple[str, str]] = ()
    diff: str = ""
    notes: Sequence[str] = ()
    started_at: str | None = None
    restarts: int = 0
