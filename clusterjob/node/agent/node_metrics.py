"""The metrics of one node: whose processes are sampled, the Prometheus port, sums, durations."""

from __future__ import annotations

import os
import time
from typing import Any

from clusterjob.node import job_processes
from clusterjob.node.agent.node_workers import NodeWorkers
from clusterjob.node.environments import this_node
from clusterjob.node.logs.events import Phase, read_phases
from clusterjob.node.metrics.sampler import Sampler
from clusterjob.node.metrics.samples import NodeFacts
from clusterjob.node.rendezvous.identity import NodeJob
from clusterjob.node.system import devices
from clusterjob.node.system.shared_note import SharedNote


def sampler_of(node: NodeJob, workers: NodeWorkers, note: SharedNote) -> Sampler:
    """Return the sampler of a node's workers.

    Args:
        node: the job, as this node sees it.
        workers: the workers.
        note: keeps the sums for the next agent of this node.
    """

    def ranks() -> dict[int, int]:
        found = job_processes.of_forkserver(workers.forkserver.pid).ranks
        return {each.pid: each.rank for each in found if each.rank is not None}

    facts = NodeFacts(
        node.topology.node_rank,
        this_node.node_name(),
        attempt=node.identity.attempt,
        cores=devices.usable_cores(),
        memory=0,
    )
    return Sampler(
        node.directory,
        facts,
        workers=ranks,
        quiet=lambda: time.monotonic() - workers.report.alive_at,
        waits=workers.waits.newest,
        environ=os.environ,
        note=note,
    )


async def serve(node: NodeJob, sampler: Sampler) -> None:
    """Serve the metrics on --metrics-port until this process ends; print one line on an error."""
    topology, port = node.topology, node.options.metrics_port
    if not port:
        return
    if topology.nnodes > 1 and topology.master_addr in ("127.0.0.1", "localhost"):
        port += topology.node_rank  # all nodes are on this machine
    from clusterjob.node.metrics import prometheus

    job_id = node.identity.job_id
    try:
        await prometheus.serve(
            port, lambda: prometheus.text_of(job_id, sampler.latest, sampler.usage)
        )
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", "") or error
        node.print_line(f"node {topology.node_rank} serves no metrics on port {port}: {why}")


def usage(node: NodeJob, sampler: Sampler, begin: float) -> dict[str, Any]:
    """End the samples; return their sums and the node's durations for the end record.

    Args:
        node: the job, as this node sees it.
        sampler: takes the samples.
        begin: the monotonic time at which this agent has begun.
    """
    sums, node_rank = sampler.stop() or {}, node.topology.node_rank
    if sampler.error:
        node.print_line(f"node {node_rank} has no more metrics: {sampler.error}")
    return sums | durations(node, begin)


def durations(node: NodeJob, begin: float) -> dict[str, Any]:
    """Return the number of this node's GPUs, and durations by its monotonic clock, in seconds.

    ``wall``: of the agent; ``waited``: until its workers were started; ``startup``: until they
    ran; ``restarts`` and ``restart_seconds``: from the first end of a worker until the next
    round ran; ``ran``: per rank, from the begin of the last round to the rank's end.
    """
    now, attempt = time.monotonic(), node.identity.attempt
    first, started = begin, dict[int, float]()
    running, ended = dict[int, float](), dict[int, dict[int, float]]()
    for each in read_phases(node.directory, node.topology.node_rank):
        at, restart = each.monotonic, each.restart
        # A phase of another boot is not of this attempt.
        if each.attempt != attempt or not now - 30 * 86400 < at <= now:
            continue
        first = min(first, at)
        if each.rank is None and each.phase is Phase.RUNNING:
            started[restart] = at
        # The first output of a rank that joins no group says nothing about its start.
        elif each.phase is Phase.RUNNING and not each.detail:
            running[restart] = max(at, running.get(restart, at))
        elif each.rank is not None and each.phase is Phase.ENDED:
            ended.setdefault(restart, {})[each.rank] = at
    running, last = started | running, max(started, default=-1)
    # If the agent was killed, nobody has recorded the ends of the workers.
    lost = [
        running[restart] - min(ended.get(restart - 1, {}).values(), default=started[restart])
        for restart in started
        if restart > 0
    ]
    return {
        "visible_gpus": devices.visible_gpus(os.environ),
        "wall": round(now - first, 1),
        "waited": round(started.get(0, now) - first, 1),
        "startup": round(running[0] - first, 1) if 0 in running else None,
        "restarts": max(0, last),
        "restart_seconds": round(sum(max(0.0, each) for each in lost), 1),
        "ran": {
            str(rank): round(at - started[last], 1) for rank, at in ended.get(last, {}).items()
        },
    }
