"""How long the ranks of a job wait for its stragglers now, by the nodes' newest samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clusterjob.backends.base import Status, Straggler
from clusterjob.insight import sample_files
from clusterjob.node.logs import log_files
from clusterjob.node.metrics import stragglers
from clusterjob.node.metrics.stragglers import Wait

_MAX_NODES = 64  # other nodes whose samples are read


def now(job_dir: Path, status: Status) -> tuple[Straggler, ...]:
    """Return the stragglers of a status with the newest numbers.

    The events have the numbers of the time when a rank was first named.

    Args:
        job_dir: the job's directory.
        status: the job's status.
    """
    if not status.stragglers:
        return ()
    own = {each.node_rank for each in status.stragglers}
    others = [node for node in log_files.nodes(job_dir) if node not in own]
    chosen = own.union(others[:: max(1, len(others) // _MAX_NODES)][:_MAX_NODES])
    waits: dict[int, Wait] = {}
    for node in chosen:
        found = sample_files.latest(job_dir, node)
        for worker in found[1].workers if found is not None else ():
            if worker.step is not None and worker.waited is not None:
                waits[worker.rank] = Wait(worker.step / 1000, worker.waited / 1000)
    late = stragglers.compare(waits)
    return tuple(
        replace(each, waited_s=late[each.rank].waited, step_s=late[each.rank].step)
        if each.rank in late
        else each
        for each in status.stragglers
    )
