"""Detect a process of MVAPICH2's launchers.

Source: the user guide of MVAPICH2 2.3, "Running Collectives with Hardware based Multicast support"
and following, and https://mvapich.cse.ohio-state.edu/static/media/mvapich/mvapich2-userguide.html
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this process's rank assignment from MVAPICH2's variables; None if they are not set."""
    reading = Reading(environ, "mvapich2")
    if not reading.is_set("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"):
        return None
    ranks = placing.Ranks.read(
        reading,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    )
    master = placing.process_master(reading, alone=ranks.alone)
    return placing.worker(reading, ranks, master=master)
