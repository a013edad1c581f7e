"""Detect a process of PALS, HPE Cray's launcher under PBS.

PBS_NODEFILE names a file with one host per line; the first host has rank 0. Source: aprun(1) and
mpiexec(1) of HPE's PALS, and https://docs.alcf.anl.gov/polaris/running-jobs/
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading

# Key under which `lookups.look_up` stores the first line of the file that PBS_NODEFILE names.
FIRST_NODE = "PBS_NODEFILE first"


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from PALS's variables; None if they are not set."""
    reading = Reading(environ, "pals")
    if not reading.is_set("PALS_RANKID", "PALS_LOCAL_RANKID"):
        return None
    ranks = placing.Ranks.read(
        reading,
        "PALS_RANKID",
        reading.first_set("PMI_SIZE", "PALS_SIZE"),
        local_rank="PALS_LOCAL_RANKID",
        local_world_size=reading.first_set("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    )
    fallback = None
    if reading.is_set(FIRST_NODE) and not reading.is_set("MASTER_ADDR"):
        fallback = reading.as_host("master_addr", "PBS_NODEFILE", reading.value(FIRST_NODE))
    job = reading.first_set("PALS_APID", "PBS_JOBID")
    key = f"pals {reading.value(job)}" if reading.is_set(job) else ""
    return placing.worker(
        reading,
        ranks,
        node_rank=reading.number("node_rank", "PALS_NODEID", required=False),
        master=placing.process_master(
            reading, alone=ranks.alone, fallback=fallback, key=key, key_variable=job
        ),
    )
