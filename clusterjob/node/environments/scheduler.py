"""Read job id, attempt, node name and parent process from a scheduler's variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from clusterjob.errors import PlacementError
from clusterjob.node import contract
from clusterjob.node.environments import slurm_env
from clusterjob.node.system import processes


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this machine's name: set by the user, else by the scheduler, else its host name."""
    return environ.get("CLUSTERJOB_HOST") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_attempt(environ: Mapping[str, str]) -> int:
    """Return the number of the job's attempt, from 0.

    Raises:
        PlacementError: CLUSTERJOB_ATTEMPT, or else SLURM_RESTART_COUNT, is not a whole number.
    """
    # Slurm requeues a job under the same id, so the id alone does not identify an attempt.
    variable = contract.ATTEMPT if environ.get(contract.ATTEMPT) else "SLURM_RESTART_COUNT"
    text = environ.get(variable) or "0"
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise PlacementError(f"{variable}={text[:80]!r} is not a whole number")
    return int(text)


def step_id(source: str, environ: Mapping[str, str]) -> str:
    """Return ``slurm-JOB.STEP`` for a rank assignment of a Slurm step; empty for another source."""
    if source != slurm_env.SOURCE:
        return ""
    return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"


def job_id(source: str, environ: Mapping[str, str]) -> str:
    """Return the id of the job that gave a process its rank; empty if it is unknown.

    For ranks of srun it is Slurm's job id. Ranks that are set manually may span two Slurm jobs.

    Args:
        source: the family that gave the rank assignment.
        environ: the process's environment.
    """
    variable = "SLURM_JOB_ID" if source == slurm_env.SOURCE else "TORCHELASTIC_RUN_ID"
    return environ.get(contract.JOB_ID) or environ.get(variable) or ""


def supervisor(environ: Mapping[str, str], pid: int) -> tuple[str, int] | None:
    """Return the name and pid of a parent process that must not end before this node, or None.

    slurmstepd is the parent of a step's task. If it is killed, Slurm does not notice: the job stays
    RUNNING, and scancel does not reach the task. On other platforms the parent may end.

    Args:
        environ: this process's environment.
        pid: the first process of this node.
    """
    in_step = environ.get("SLURM_STEP_ID") and environ.get("CLUSTERJOB_TASK")
    return ("slurmstepd", processes.parent(pid)) if in_step else None
