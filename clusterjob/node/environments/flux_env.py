"""Detect a process that ``flux run`` started.

No variable contains the hosts; ``flux hostlist local`` prints them. Source: flux-environment(7),
https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.errors import PlacementError
from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading
from clusterjob.node.system.hostlist import expand_hostlist

# Key under which `lookups.look_up` stores the output of `flux hostlist local`.
HOSTLIST = "flux hostlist local"


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from Flux's variables; None if they are not set."""
    reading = Reading(environ, "flux")
    if not reading.is_set("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"):
        return None
    rank = reading.number("rank", "FLUX_TASK_RANK")
    world_size = reading.number("world_size", "FLUX_JOB_SIZE")
    local_rank = reading.number("local_rank", "FLUX_TASK_LOCAL_ID")
    nnodes = reading.number("nnodes", "FLUX_JOB_NNODES")
    if world_size is None or not nnodes:
        return reading.finding(None)
    # Flux does not set the number of tasks per node; it spreads them evenly.
    if world_size % nnodes:
        reading.conflicts.append(
            f"FLUX_JOB_SIZE={world_size} is not a multiple of FLUX_JOB_NNODES={nnodes}: no "
            "variable gives the number of tasks of each node"
        )
    job = f"flux {reading.value('FLUX_JOB_ID')}" if reading.is_set("FLUX_JOB_ID") else ""
    return placing.worker(
        reading,
        placing.Ranks(
            rank, world_size, local_rank=local_rank, local_world_size=world_size // nnodes
        ),
        nnodes=nnodes,
        master=placing.process_master(
            reading,
            alone=nnodes == 1,
            fallback=_first_host(reading),
            key=job,
            key_variable="FLUX_JOB_ID",
        ),
    )


def _first_host(reading: Reading) -> str | None:
    if reading.is_set("MASTER_ADDR") or not reading.is_set(HOSTLIST):
        return None
    try:
        hosts = expand_hostlist(reading.value(HOSTLIST))
    except PlacementError as error:
        reading.conflicts.append(f"`{HOSTLIST}`: {error.message}")
        return None
    return reading.as_host("master_addr", HOSTLIST, hosts[0]) if hosts else None
