"""Make the report of a job or of an array: poll it, fetch its logs, gather, render."""

from __future__ import annotations

from dataclasses import replace

from clusterjob.core import polling
from clusterjob.core.records import Record, Records
from clusterjob.errors import ClusterJobError
from clusterjob.insight import stacks
from clusterjob.insight.efficiency import total
from clusterjob.insight.report import page, values
from clusterjob.insight.report.gather import gather
from clusterjob.node.system.sanitize import sanitize


def make(record: Record) -> str:
    """Return the HTML page of a job, or of an array with a row for each element.

    A host that cannot be reached, or a damaged file, is named on the page; the rest is shown.
    """
    if record.array is not None:
        pairs = polling.statuses(Records().elements(record))
        used = total([element for element, _ in pairs])
        return page.render(lambda _: values.of_array(record, pairs, used))
    [(record, status)] = polling.statuses([record])
    problems = [] if status.state.final or not status.reason else [status.reason]
    try:
        polling.collect(record)
    except ClusterJobError as error:
        problems.append(f"The latest logs could not be fetched: {error.message}")
    found = stacks_of(record)
    problems += found.errors if found is not None else []
    data = gather(record, status, found)
    data = replace(data, notes=[*map(sanitize, problems), *data.notes])
    return page.render(lambda detail: values.of_job(data, detail))


def stacks_of(record: Record) -> stacks.JobStacks | None:
    """Return the stacks of a running job, or those that were saved at its end; None without any."""
    try:
        return stacks.of_job(record, node=None, rank=None, native=False)
    except ClusterJobError:  # it waits, it ended well, or its backend reaches no worker
        return None
