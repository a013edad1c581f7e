"""Detect a process of Hydra's mpiexec, as in MPICH, Intel MPI and related MPIs.

PMI_RANK alone is ambiguous: srun, Flux and PALS set it for their tasks too. Only Hydra sets
MPI_LOCALRANKID. Source: the documentation of Intel MPI, "Global Hydra Environment Variables", and
dumps of MPICH 4.0.2.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading

# Key under which `lookups.look_up` stores the pid of the proxy that started this node's processes.
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
    ranks = placing.Ranks.read(
        reading,
        "PMI_RANK",
        "PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    )
    peer = reading.value(PROXY) if ranks.alone else ""
    master = placing.process_master(
        reading,
        alone=ranks.alone,
        key=f"hydra {peer}" if peer else "",
        key_variable="PMI_FD" if peer else "",
    )
    return placing.worker(reading, ranks, master=master)
