"""Detect a process from torch's own variables, as torchrun and clusterjob's agent set them.

Source: torch's documentation of torchrun ("Environment Variables"),
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master, Ranks
from clusterjob.node.environments.reading import Finding, Reading
from clusterjob.node.environments.slurm_env import TASK_RANK

# RANK alone counts nodes on several platforms; with one of these variables it counts processes.
_OF_A_PROCESS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
# The agents of these launchers have used MASTER_ADDR already, so a loopback address is right.
_AGENTS_CONNECTED = ("clusterjob", "torchrun")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from RANK, LOCAL_RANK and related variables.

    Returns:
        The finding; None if the variables do not describe a process.
    """
    if (
        environ.get(TASK_RANK)
        and environ.get(TASK_RANK) == environ.get("RANK")
        and not environ.get("TORCHELASTIC_RUN_ID")
    ):
        return None  # the step's own variables contain the same and more
    if environ.get("LOCAL_RANK") or (
        environ.get("RANK") and any(environ.get(name) for name in _OF_A_PROCESS)
    ):
        return read(environ)
    return None


def read(environ: Mapping[str, str]) -> Finding:
    """Return the rank assignment from torch's variables; missing ones are conflicts."""
    reading = Reading(environ, _launcher(environ))
    rank = reading.number("rank", "RANK")
    world_size = reading.number("world_size", "WORLD_SIZE")
    local_rank = reading.number("local_rank", "LOCAL_RANK")
    master_addr = reading.host("master_addr", "MASTER_ADDR")
    master_port = reading.number("master_port", "MASTER_PORT")
    local_world_size = reading.number("local_world_size", "LOCAL_WORLD_SIZE", required=False)
    node_rank = reading.number("node_rank", "GROUP_RANK", required=False)
    nnodes = reading.number("nnodes", "GROUP_WORLD_SIZE", required=False)
    if (
        rank is None
        or world_size is None
        or local_rank is None
        or master_addr is None
        or master_port is None
    ):
        return reading.finding(None)
    if rank >= world_size > 0:
        reading.conflicts.append(
            f"RANK: rank is {rank}, outside 0..{world_size - 1} (WORLD_SIZE={world_size})"
        )
        return reading.finding(None)
    if local_world_size is None and nnodes in (None, 1) and rank != local_rank:
        # On a single node RANK would equal LOCAL_RANK. So the job has several nodes, and the number
        # of workers on each is unknown.
        reading.conflicts.append(
            "LOCAL_WORLD_SIZE is not set (local_world_size), and RANK differs from LOCAL_RANK"
        )
        return reading.finding(None)
    if local_world_size is None:
        local_world_size = (
            world_size if nnodes in (None, 1) else max(1, world_size // (nnodes or 1))
        )
    if nnodes is None:
        nnodes = max(1, world_size // max(1, local_world_size))
    if node_rank is None:
        node_rank = rank // max(1, local_world_size)
    return placing.worker(
        reading,
        Ranks(rank, world_size, local_rank=local_rank, local_world_size=local_world_size),
        master=Master(master_addr, master_port),
        node_rank=node_rank,
        nnodes=nnodes,
        refuse_loopback=reading.source not in _AGENTS_CONNECTED,
    )


def _launcher(environ: Mapping[str, str]) -> str:
    if environ.get("CLUSTERJOB_JOB_ID") and environ.get("CLUSTERJOB_REPORT_FD"):
        return "clusterjob"
    return "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else "env"
