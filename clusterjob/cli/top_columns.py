"""The columns of the live screen's tables, and the lines that describe the chosen job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from rich.text import Text

from clusterjob.backends import job_progress
from clusterjob.cli.phase_text import phase_text
from clusterjob.cli.top_table import Column
from clusterjob.core.record_index import ListRow
from clusterjob.core.times import show_age, show_duration
from clusterjob.insight.live_jobs import JobNow, Snapshot
from clusterjob.insight.live_node import NodeNow, RankNow
from clusterjob.insight.silence import LONG
from clusterjob.node.system.sanitize import sanitize

_SILENT, _TOO_SILENT = 60.0, LONG  # seconds without output that are marked
_TREND = 20  # samples of a sparkline

_STATE_STYLE = {
    "RUNNING": "green",
    "SUCCEEDED": "cyan",
    "FAILED": "bold red",
    "LOST": "bold red",
    "CANCELLED": "yellow",
    "PREEMPTED": "yellow",
    "PENDING": "yellow",
    "UNKNOWN": "magenta",
}
_PHASE_STYLE = {"running": "green", "stop": "yellow", "ended": "cyan"}


def _size(size: float | None) -> str:
    """Format bytes in at most 5 characters: 512M, 1.5G."""
    if size is None:
        return ""
    value, unit = float(size), "B"
    for larger in "KMGTP":
        if value < 1000:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}{unit}" if value < 10 and unit in "GTP" else f"{value:.0f}{unit}"


def _sizes(size: float | None, limit: float | None) -> str:
    return "" if size is None else f"{_size(size)}/{_size(limit)}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _short_time(seconds: float | None) -> str:
    """Format seconds in at most 6 characters: 5s, 3m20s, 2h05m, 4d."""
    if seconds is None:
        return ""
    first, _, rest = show_duration(seconds).partition(" ")
    return first if first.endswith("d") else first + rest


def _silence_style(seconds: float | None) -> str:
    if seconds is None or seconds < _SILENT:
        return ""
    return "yellow" if seconds < _TOO_SILENT else "red"


JOB_COLUMNS: list[Column[ListRow]] = [
    Column("JOB", lambda row: sanitize(row.job_id), width=30),
    Column(
        "STATE", lambda row: row.state, width=9, style=lambda row: _STATE_STYLE.get(row.state, "")
    ),
    Column(
        "TIME",
        lambda row: "" if row.seconds is None else show_duration(row.seconds),
        priority=2,
        width=8,
        key=lambda row: row.seconds,
        right=True,
        descending=True,
    ),
    Column(
        "NODES",
        lambda row: row.nodes,
        priority=4,
        width=5,
        key=lambda row: int(row.nodes),
        right=True,
    ),
    Column("NAME", lambda row: sanitize(row.name), priority=7, width=20),
    Column("CLUSTER", lambda row: sanitize(row.cluster), priority=5, width=12),
    Column(
        "SUBMITTED",
        lambda row: show_age(row.submitted_at),
        priority=6,
        width=16,
        key=lambda row: row.submitted_at,
        descending=True,
    ),
    Column("CODE", lambda row: row.exit_code, priority=8, width=4, right=True),
    Column("REASON", lambda row: sanitize(row.reason), priority=3, width=16, wide=True),
]


_Row = TypeVar("_Row")


def _number(
    title: str,
    value: Callable[[_Row], float | None],
    text: Callable[[_Row], str],
    width: int,
    **options: Any,
) -> Column[_Row]:
    """Return a column of numbers: sorted by the value, the largest first."""
    return Column(title, text, width=width, key=value, right=True, descending=True, **options)


# The columns that nodes and ranks share.
_USE: list[Column[NodeNow | RankNow]] = [
    _number("CPU%", lambda row: row.cpu, lambda row: _percent(row.cpu), 4, steady=True),
    Column(
        "CPU TREND",
        lambda _: "",
        priority=4,
        width=_TREND,
        trend=lambda row: row.cpu_history,
        style=lambda _: "cyan",
    ),
    _number("GPU%", lambda row: row.gpu, lambda row: _percent(row.gpu), 4, steady=True),
    Column(
        "GPU TREND",
        lambda _: "",
        priority=3,
        width=_TREND,
        trend=lambda row: row.gpu_history,
        style=lambda _: "magenta",
    ),
]


def _silent(priority: int) -> Column[NodeNow | RankNow]:
    return _number(
        "SILENT",
        lambda row: row.quiet,
        lambda row: _short_time(row.quiet),
        6,
        priority=priority,
        style=lambda row: _silence_style(row.quiet),
        steady=True,
    )


def _state(row: NodeNow | RankNow) -> str:
    """Return the phase with its detail, such as how the process has ended."""
    if row.phase == "running":  # the detail is how that was noticed
        return row.phase
    if row.phase == "ended" and row.detail:
        return row.detail
    return f"{row.phase} {row.detail}".strip()


def _node_state(node: NodeNow) -> str:
    return f"no data {_short_time(node.no_data)}" if node.no_data else _state(node)


def _node_style(node: NodeNow) -> str:
    return "bold red" if node.no_data else _PHASE_STYLE.get(node.phase, "yellow")


NODE_COLUMNS: list[Column[NodeNow]] = [
    Column(
        "NODE",
        lambda node: str(node.node_rank),
        width=5,
        key=lambda node: node.node_rank,
        right=True,
    ),
    Column("HOST", lambda node: node.host, priority=1, width=24),
    Column("STATE", _node_state, width=14, style=_node_style),
    *_USE,
    _number(
        "MEMORY",
        lambda node: node.memory,
        lambda node: _sizes(node.memory, node.memory_limit),
        11,
        priority=2,
    ),
    _number(
        "GPU MEM",
        lambda node: node.gpu_memory,
        lambda node: _sizes(node.gpu_memory, node.gpu_memory_limit),
        11,
        priority=5,
    ),
    _number(
        "LOAD",
        lambda node: node.load,
        lambda node: "" if node.load is None else f"{node.load:.1f}",
        6,
        priority=7,
    ),
    _number("RECV/s", lambda node: node.received, lambda node: _size(node.received), 6, priority=8),
    _number("SENT/s", lambda node: node.sent, lambda node: _size(node.sent), 6, priority=8),
    _silent(2),
    Column("LAST LINE", lambda node: node.line, priority=2, width=20, wide=True),
]


def rank_columns(failed: set[int], stragglers: set[int]) -> list[Column[RankNow]]:
    """Return the columns of ranks.

    Args:
        failed: receives the ranks that the verdict blames; they are marked.
        stragglers: receives the ranks that the others wait for; they are marked.
    """

    def style(rank: RankNow, usual: str) -> str:
        if rank.rank in failed:
            return "bold red"
        return "bold yellow" if rank.rank in stragglers else usual

    return [
        Column(
            "RANK",
            lambda rank: str(rank.rank),
            width=5,
            key=lambda rank: rank.rank,
            style=lambda rank: style(rank, ""),
            right=True,
        ),
        Column(
            "NODE",
            lambda rank: str(rank.node_rank),
            priority=5,
            width=5,
            key=lambda rank: (rank.node_rank, rank.rank),
            right=True,
        ),
        Column("HOST", lambda rank: rank.host, priority=8, width=20),
        Column(
            "STATE",
            _state,
            width=18,
            style=lambda rank: style(rank, _PHASE_STYLE.get(rank.phase, "yellow")),
        ),
        *_USE,
        _number(
            "WAIT%",
            lambda rank: rank.waits,
            lambda rank: _percent(rank.waits),
            5,
            priority=3,
            style=lambda rank: style(rank, ""),
        ),
        _number("MEM", lambda rank: rank.memory, lambda rank: _size(rank.memory), 5, steady=True),
        _silent(1),
        Column("LAST LINE", lambda rank: rank.line, priority=2, width=26, wide=True),
    ]


def title_line(snapshot: Snapshot, *, paused: bool) -> Text:
    """Return the first line of the screen: how many jobs are in which state."""
    counts = Counter(row.state for row in snapshot.jobs or ())
    line = Text("clusterjob top", style="bold")
    for state, count in sorted(counts.items(), key=lambda item: -item[1]):
        line.append(f"   {count} ", style="bold")
        line.append(state.lower(), style=_STATE_STYLE.get(state, ""))
    if not snapshot.jobs:
        line.append("   reading the jobs" if snapshot.jobs is None else "   no jobs")
    if paused:
        line.append("   paused: Space continues", style="bold yellow")
    if snapshot.error:
        line.append(f"   {snapshot.error}", style="red")
    return line


def job_lines(job: JobNow | None) -> tuple[Text, Text]:
    """Return two lines about the chosen job: what it does, and what is the matter with it."""
    if job is None:
        return Text(""), Text("")
    status, verdict = job.status, job.verdict
    state = str(verdict.state if verdict is not None else status.state if status else "")
    head = Text.assemble((sanitize(job.record.job_id), "bold"), "  ")
    head.append(state, style=_STATE_STYLE.get(state, ""))
    if status is not None and status.elapsed is not None:
        head.append(f" {show_duration(status.elapsed)}")
    ranks = job.ranks
    if status is not None and verdict is None:
        phase = phase_text(status, has_output=any(rank.line for rank in ranks))
        if not phase.startswith("running"):
            head.append(f"   {sanitize(phase)}", style="yellow")
    if ranks:
        phases = Counter(rank.phase or "started" for rank in ranks)
        head.append(f"   {len(ranks)} rank{'s' if len(ranks) > 1 else ''}: ")
        head.append(
            ", ".join(f"{count} {phase}" for phase, count in phases.most_common(4))
            if len(phases) > 1
            else next(iter(phases))
        )
    restarts = verdict.restarts if verdict is not None else status.restarts if status else 0
    if restarts:
        head.append(f"   {restarts} restart{'s' if restarts > 1 else ''}", style="yellow")
    return head, _matter(job)


def _matter(job: JobNow) -> Text:
    """Return why the job failed, waits or is silent; empty if it simply runs."""
    status, verdict = job.status, job.verdict
    if verdict is not None:
        return Text.assemble((sanitize(verdict.reason.partition("\n")[0]), "red"))
    reason = sanitize(status.reason.partition("\n")[0]) if status is not None else ""
    if status is not None and status.stragglers:
        reason = job_progress.straggler_text(status.stragglers) + (reason and f"; {reason}")
    quiet = min((node.quiet for node in job.nodes if node.quiet is not None), default=0.0)
    if quiet >= _TOO_SILENT:
        reason = f"no output for {_short_time(quiet)}: t shows the stacks" + (
            reason and f"; {reason}"
        )
    return Text.assemble((reason, "yellow"))
