"""Detect a process of Hydra's mpiexec, as in MPICH, Intel MPI and related MPIs.

PMI_RANK alone is ambiguous: srun, Flux and PALS set it for their tasks too. Only Hydra sets
MPI_LOCALRANKID. Source: the documentation of Intel MPI, "Global Hydra Environment Variables", and
dumps of MPICH 4.0.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading

# Key under which `lookups.look_up` stores the pid behind PMI_FD: the proxy that started the
# processes of this node.
PROXY = "PMI_FD peer"


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from PMI_RANK and MPI_LOCALRANKID.

    Returns:
        The finding; None if the variables are not set, or PMI_RANK belongs to a Slurm step.
    """
    reading = Reading(environ, "hydra")
    if not reading.is_set("MPI_LOCALRANKID") and (
        not reading.is_set("PMI_RANK") or reading.is_set("SLURM_STEP_ID")
    ):
        return None
    rank = reading.number("rank", "PMI_RANK")
    world_size = reading.number("world_size", "PMI_SIZE")
    local_rank = reading.number("local_rank", "MPI_LOCALRANKID")
    local_world_size = reading.number("local_world_size", "MPI_LOCALNRANKS")
    alone = world_size is not None and world_size == local_world_size
    peer = reading.value(PROXY)
    master = placing.process_master(
        reading,
        alone=alone,
        key=f"hydra {peer}" if peer and alone else "",
        key_variable="PMI_FD" if peer and alone else "",
    )
    return placing.worker(
        reading,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master=master,
    )
