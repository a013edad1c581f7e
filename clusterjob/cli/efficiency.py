"""Show the efficiency of jobs below `status` and as columns of `list`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clusterjob.core.times import show_duration
from clusterjob.core.units import show_size
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.backends.base import Status
    from clusterjob.core.record_index import ListRow
    from clusterjob.core.records import Record

COLUMNS = ("CPU", "CORES", "MEMORY", "GPU", "GPU-HOURS", "IDLE", "LOST")
_SHOWN = 4  # nodes
_LIVE = 8  # nodes: the samples of more running nodes are not read


def of_jobs(jobs: Sequence[tuple[Record, Status]]) -> list[dict[str, Any] | None]:
    """Return the efficiency of each job; also of running ones, if they have few nodes."""
    from clusterjob.insight.efficiency import efficiency

    live = _live(jobs)
    return [
        None
        if now.state is JobState.PENDING
        else efficiency(record, live=live, elapsed=now.elapsed)
        for record, now in jobs
    ]


def _live(jobs: Sequence[tuple[Record, Status]]) -> bool:
    return sum(record.nodes for record, now in jobs if now.verdict is None) <= _LIVE


def print_below(wanted: Record, jobs: Sequence[tuple[Record, Status]]) -> None:
    """Print the efficiency of one job or array below its status; print nothing without samples."""
    from clusterjob.insight.efficiency import total

    if wanted.array is None:
        (found,) = of_jobs(jobs)
    else:
        found = total([record for record, _ in jobs], live=_live(jobs))
    for line in lines(found):
        print(sanitize(line))


def lines(found: dict[str, Any] | None) -> list[str]:
    """Return a job's efficiency as a few lines; none if there are no samples."""
    if found is None or (found.get("cpu_mean") is None and not found.get("nodes")):
        return []
    first = [f"wall {show_duration(found['wall_seconds'])}"]
    if found["startup_seconds"] is not None:
        first.append(f"start-up {_short(found['startup_seconds'])}")
    if found["restarts"]:
        lost = _short(found["restart_seconds"])
        word = "restart" if found["restarts"] == 1 else "restarts"
        first.append(f"{found['restarts']} {word} cost {lost}")
    if found["gpu_hours_held"]:
        idle = found["gpu_hours_idle"]
        hours = f"{found['gpu_hours_held']:.2f} GPU-hours"
        first.append(hours if idle is None else f"{hours}, {idle:.2f} of them idle")
    jobs = f" of {found['jobs']} jobs" if "jobs" in found else ""
    if found.get("attempts", 1) > 1:
        jobs = f" of {found['attempts']} attempts"
    text = [f"efficiency{jobs}: {', '.join(first)}"]
    if "jobs" in found:
        text.append(f"  all nodes: {_use(found)}")
    nodes = found.get("nodes", ())
    text += [
        f"  node {node['node_rank']} ({node['host']}): {_use(node)}" for node in nodes[:_SHOWN]
    ]
    if len(nodes) > _SHOWN:
        text.append(f"  and {len(nodes) - _SHOWN} more nodes: --json")
    if (slow := found.get("slowest_rank")) is not None:
        share = f" ({slow['percent']:.0f}%)" if (slow["percent"] or 1e9) < 1000 else ""
        text.append(
            f"  slowest: rank {slow['rank']} (node {slow['node_rank']}, host {slow['host']}),"
            f" {slow['seconds']:g} s{share} more {slow['measure']} than the median rank"
        )
    return text + [f"  advice: {advice}" for advice in found["advice"]]


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else show_duration(seconds)


def _use(node: dict[str, Any]) -> str:
    parts = [f"CPU {node['cpu_mean']:.1f} of {node['cores']:g} cores, peak {node['cpu_peak']:.1f}"]
    if node["memory_peak"] is not None:
        mean = node.get("memory_mean")
        text = f"memory {show_size(node['memory_peak'])} peak"
        parts.append(text if mean is None else f"{text}, {show_size(mean)} mean")
    if node["gpu_mean"] is not None:
        parts.append(f"GPU {node['gpu_mean']:.0f}%, peak {node['gpu_peak']:.0f}%")
    if node["gpu_memory_peak"]:
        parts.append(f"GPU memory {show_size(node['gpu_memory_peak'])} peak")
    return "; ".join(parts)


def print_table(rows: Sequence[ListRow], columns: Sequence[str]) -> None:
    """Print the table of `list` with the efficiency of each job.

    Only the end records of the shown jobs are read.
    """
    from clusterjob.cli import job_table, tables
    from clusterjob.core.records import Records
    from clusterjob.insight.efficiency import efficiency, total

    records = Records()
    ages = tables.terminal_size() is not None
    cells = job_table.cells(rows, ["id", *columns], together=True, ages=ages)
    result = [(*cells[0][1:], *COLUMNS)]
    for row in cells[1:]:
        record = records.read(row[0])
        if record is None:  # removed meanwhile, or an element that has not ended
            found = None
        elif record.array is None:
            found = efficiency(record)
        else:
            found = total(records.elements(record))
        result.append((*row[1:], *_cells(found)))
    tables.print_table(result, fit=True)


def _cells(found: dict[str, Any] | None) -> tuple[str, ...]:
    from clusterjob.insight.efficiency import averages

    if found is None:
        return ("",) * len(COLUMNS)
    use = found if "jobs" in found else averages(found)

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else form.format(value)

    peak = use["memory_peak"]
    return (
        shown(use["cpu_mean"], "{:.1f}"),
        shown(use["cores"], "{:g}"),
        "" if peak is None else show_size(peak),
        shown(use["gpu_mean"], "{:.0f}%"),
        f"{found['gpu_hours_held']:.2f}" if found["gpu_hours_held"] else "",
        shown(found["gpu_hours_idle"], "{:.2f}") if found["gpu_hours_held"] else "",
        _short(found["restart_seconds"]) if found["restarts"] else "",
    )
