"""Set torch's variables for one task of a Slurm step, then exec the program.

``--launcher srun`` uses it. Plain ``env://`` scripts read the variables. Without MASTER_ADDR some
scripts fail and others wait without a message (dino, Lightning).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from clusterjob.errors import ClusterJobError
from clusterjob.node.environments import (
    detection,
    lookups,
    slurm_addresses,
    slurm_env,
    worker_defaults,
)
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import devices


def main(argv: Sequence[str]) -> NoReturn:
    """Exec the program with torch's variables.

    If the step gives no rank assignment, the program runs without the variables, and one line on
    stderr gives the reason.

    Args:
        argv: the program's command line.
    """
    try:
        os.environ.update(variables(os.environ))
    except ClusterJobError as error:
        print(
            f"clusterjob: torch's variables are not set: {error.message}",
            file=sys.stderr,
            flush=True,
        )
    try:
        os.execvp(argv[0], list(argv))
    except OSError as error:
        print(f"clusterjob: {argv[0]} cannot be run: {error.strerror}", file=sys.stderr, flush=True)
        sys.exit(126 if isinstance(error, PermissionError) else 127)


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for this task; none outside a step.

    `slurm_env.TASK_RANK` is added: it tells `bootstrap` that the variables come from Slurm.

    Args:
        environ: the task's own environment.

    Raises:
        PlacementError: the step's variables contradict each other, or node 0 has no address.
    """
    finding = detection.detect(lookups.look_up(environ)).check()
    placement = finding.placement
    if finding.source != slurm_env.SOURCE or placement is None:
        return {}
    worker = slurm_addresses.as_worker(placement, environ)
    own = _torch_variables(worker)
    quiet = worker_defaults.quiet_defaults(
        environ, own["MASTER_ADDR"], nnodes=worker.topology.nnodes
    )
    # `slurm_env` refuses some values of MASTER_ADDR, but accepts any value of these variables.
    ours = {
        "CLUSTERJOB_MASTER_ADDR": own["MASTER_ADDR"],
        "CLUSTERJOB_MASTER_PORT": own["MASTER_PORT"],
    }
    quiet |= worker_defaults.cpu_defaults(environ, devices.visible_gpus(environ))
    return quiet | own | ours | {slurm_env.TASK_RANK: own["RANK"]}


def _torch_variables(worker: Worker) -> dict[str, str]:
    topology = worker.topology
    return {
        "RANK": str(worker.rank), "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank), "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(topology.node_rank), "GROUP_WORLD_SIZE": str(topology.nnodes),
        "MASTER_ADDR": topology.master_addr, "MASTER_PORT": str(topology.master_port),
    }  # fmt: skip
