"""Build the environment for Slurm's commands, without the variables of a surrounding job."""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments.worker_endpoints import LAUNCH_VARIABLES

# Inside a job all of Slurm's variables belong to that job, except these, which locate the cluster.
# In a login shell Slurm's variables are the user's defaults, such as SBATCH_ACCOUNT.
_KEEP = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_OF_A_JOB = ("SLURM", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMIX_")
_NAMES_OF_A_JOB = (
    "CUDA_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)

# User defaults that would change a command's answer, such as a partition filter for squeue.
_DEFAULTS_OF_ANSWERS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_")
# User defaults that would make a job differ from its record, or make sbatch wait for its end.
_DEFAULTS_OF_SHAPE = frozenset(
    f"SBATCH_{name}"
    for name in (
        "ARRAY_INX",
        "ERROR",
        "EXPORT",
        "GPUS_PER_TASK",
        "INPUT",
        "JOB_NAME",
        "NO_REQUEUE",
        "OPEN_MODE",
        "OUTPUT",
        "QUIET",
        "REQUEUE",
        "SIGNAL",
        "TEST_ONLY",
        "VERBOSE",
        "WAIT",
    )
)


def slurm_environment(environ: Mapping[str, str], command: str) -> dict[str, str]:
    """Return the environment for a Slurm command (submitit#1814).

    Args:
        environ: this process's own environment.
        command: the command's name, such as ``sbatch``.
    """
    inside = bool(environ.get("SLURM_JOB_ID"))
    dropped = () if command == "sbatch" else _DEFAULTS_OF_ANSWERS
    return {
        name: value
        for name, value in environ.items()
        if name in _KEEP or not (_of_a_job(name, inside=inside) or name.startswith(dropped))
    }


def _of_a_job(name: str, *, inside: bool) -> bool:
    if name.startswith("CLUSTERJOB_") or name in LAUNCH_VARIABLES or name in _DEFAULTS_OF_SHAPE:
        return True
    return inside and (name.startswith(_OF_A_JOB) or name in _NAMES_OF_A_JOB)
