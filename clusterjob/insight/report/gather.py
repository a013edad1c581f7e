"""Gather the data of a report from a job's directory and record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from clusterjob.backends import job_progress
from clusterjob.backends.base import Status
from clusterjob.core.records import Record
from clusterjob.insight import job_times
from clusterjob.insight.efficiency import efficiency
from clusterjob.insight.job_clock import JobClock
from clusterjob.insight.preflight import read_preflight
from clusterjob.insight.report import measured, texts, workers
from clusterjob.insight.report.data import Node, ReportData
from clusterjob.insight.stacks import JobStacks
from clusterjob.node.logs import ends, events, log_files
from clusterjob.node.system.sanitize import sanitize

_MAX_NODES = 4096
_MAX_READ = 8  # nodes without an end record, for whose efficiency all samples are read


def gather(record: Record, status: Status, stacks: JobStacks | None) -> ReportData:
    """Return what a report shows of a job, which may still run; the texts are added later.

    Args:
        record: the job; its logs are on this machine.
        status: its status.
        stacks: the stacks of its ranks; None if there are none.
    """
    job_dir = record.job_dir
    nodes = sorted({*range(min(record.nodes, _MAX_NODES)), *log_files.nodes(job_dir)})[:_MAX_NODES]
    metrics = measured.Measured()
    metrics.find(job_dir, nodes)
    times = job_times.read(
        job_dir,
        nodes,
        {(one.node, one.attempt): one.last for one in metrics.extents},
        runs=not status.state.final,
    )
    if times.end > 0:
        metrics.read(job_dir, times.clock.place, times.end)
    sampled = {
        node: {number for name, number in series if name == "rank cpu"}
        for node, series in metrics.series.items()
    }
    ranks = workers.ranks_of(job_dir, nodes, times.spans, status.verdict, sampled)
    data = ReportData(
        record,
        state=str(status.state),
        reason=sanitize(status.reason or (status.verdict.reason if status.verdict else "")),
        verdict=status.verdict,
        taken_at=events.now(),
        end=times.end,
        nodes=[
            Node(
                node,
                sanitize(
                    metrics.facts[node].host if node in metrics.facts else times.hosts.get(node, "")
                )[:80],
                spans=times.spans.get(node, {}).get(None, ()),
                facts=metrics.facts.get(node),
            )
            for node in nodes
        ],
        ranks=ranks,
        marks=times.marks,
        series=metrics.series,
        attempts={attempt: times.clock.begin(attempt) for attempt in times.clock.attempts},
        preflight=read_preflight(job_dir),
        stacks=stacks,
        stragglers=job_progress.job_stragglers(job_dir),
        environments=texts.environments(job_dir, nodes),
        script=texts.scripts(dict.fromkeys((job_dir, record.whole_dir))),
        diff=texts.diff(record.whole_dir),
        efficiency=_efficiency(record, status),
        started_at=status.started_at,
        restarts=status.verdict.restarts if status.verdict else status.restarts,
    )
    return replace(
        data, notes=[*_gpu_errors(metrics), *_notes(data, times.clock, left_out=times.left_out)]
    )


def _gpu_errors(metrics: measured.Measured) -> list[str]:
    """Return one line for each GPU that reported an error."""
    found = []
    for (node, index), (xid, ecc) in sorted(metrics.gpu_errors.items())[:20]:
        errors = [f"XID error {xid:.0f}"] if xid else []
        errors += [f"{ecc:.0f} uncorrected ECC errors since its driver was loaded"] if ecc else []
        found.append(f"GPU {index} of node {node} reported {' and '.join(errors)}.")
    return found


def _efficiency(record: Record, status: Status) -> dict[str, Any] | None:
    """Return the efficiency; None if it would take long, because most nodes wrote no end."""
    attempt = status.verdict.attempt if status.verdict is not None else 0
    known = sum("usage" in end for end in ends.written(record.job_dir, attempt))
    return efficiency(record, live=True) if record.nodes - known <= _MAX_READ else None


def _notes(data: ReportData, clock: JobClock, *, left_out: int) -> list[str]:
    """Return one line for each part that is missing or incomplete."""
    notes = []
    if not data.record.job_dir.is_dir():
        notes.append(f"The job's directory {data.record.job_dir} does not exist any more.")
    if not any(rank.spans for rank in data.ranks):
        notes.append(
            "No phases are recorded: the workers have not started, no agent started them, or an"
            " older version of clusterjob did."
        )
    if not data.series:
        notes.append(
            "No metrics are recorded: the job was too short, or an older version of clusterjob ran"
            " it."
        )
    elif missing := [str(node.rank) for node in data.nodes if node.facts is None]:
        notes.append(f"No metrics of node {', '.join(missing[:20])} have arrived.")
    if clock.unaligned:
        some = ", ".join(map(str, sorted(clock.unaligned)[:20]))
        notes.append(
            f"Node {some} saw no event together with node 0: its first record is placed at the"
            " begin of the attempt."
        )
    if left_out:
        notes.append(f"{left_out} events between the first and the last ones are not shown.")
    return [sanitize(note) for note in notes]
