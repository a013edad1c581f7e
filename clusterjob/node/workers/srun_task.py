"""Start one task of ``--launcher srun`` with the submitted code and torch's variables.

Plain ``env://`` scripts read the variables. Without MASTER_ADDR some scripts fail and others wait
without a message (dino, Lightning).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.environments import slurm_env, this_node, worker_variables
from clusterjob.node.system import devices
from clusterjob.node.workers import hook, preload


def main(argv: Sequence[str], gpus: int = 0) -> NoReturn:
    """Exec the program; its Python processes import the submitted code.

    If the step gives no rank assignment, the program runs without torch's variables, and one line
    on stderr gives the reason.

    Args:
        argv: the program's command line.
        gpus: number of GPUs that the task must see; with fewer, it ends before the program starts.
    """
    is_python = os.path.basename(argv[0]).startswith("python")
    if error := preload.missing_gpus(gpus, is_python=is_python):
        sys.exit(f"clusterjob: {this_node.node_name()}: {error}")
    if os.environ.get(contract.CODE_TREE):
        job_dir = Path(os.environ[contract.JOB_DIR])
        os.environ.update(hook.write(job_dir, os.environ))
    try:
        os.environ.update(_torch_variables(os.environ))
    except ClusterJobError as no_ranks:
        print(
            f"clusterjob: torch's variables are not set: {no_ranks.message}",
            file=sys.stderr,
            flush=True,
        )
    try:
        os.execvp(argv[0], list(argv))
    except OSError as failed:
        print(
            f"clusterjob: {argv[0]} cannot be run: {failed.strerror}", file=sys.stderr, flush=True
        )
        sys.exit(126 if isinstance(failed, PermissionError) else 127)


def _torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return torch's variables for this task; none outside a step.

    `slurm_env.TASK_RANK` is added: it tells `bootstrap` that the variables come from Slurm.

    Raises:
        PlacementError: the step's variables contradict each other, or node 0 has no address.
    """
    finding = this_node.detect(this_node.look_up(environ)).check()
    if finding.source != slurm_env.SOURCE or finding.placement is None:
        return {}
    worker = slurm_env.as_worker(finding.placement, environ)
    node = worker.topology
    addr, port = node.master_addr, str(node.master_port)
    quiet = worker_variables.quiet_defaults(environ, addr, nnodes=node.nnodes)
    quiet |= worker_variables.cpu_defaults(environ, devices.visible_gpus(environ))
    return quiet | {
        "RANK": str(worker.rank), "WORLD_SIZE": str(worker.world_size),
        "LOCAL_RANK": str(worker.local_rank), "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_RANK": str(node.node_rank), "GROUP_WORLD_SIZE": str(node.nnodes),
        "MASTER_ADDR": addr, "MASTER_PORT": port,
        # `slurm_env` refuses some values of MASTER_ADDR, but accepts any value of these variables.
        "CLUSTERJOB_MASTER_ADDR": addr, "CLUSTERJOB_MASTER_PORT": port,
        slurm_env.TASK_RANK: str(worker.rank),
    }  # fmt: skip
