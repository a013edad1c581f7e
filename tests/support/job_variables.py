"""The environment variables that launchers and platforms set."""

from __future__ import annotations

_JOB_PREFIXES = (
    "SLURM_", "SBATCH_", "SRUN_", "CLUSTERJOB_", "TORCHELASTIC_", "MASTER_", "PET_", "MLP_",
    "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_", "PALS_", "JSM_", "LSB_", "FLUX_", "PADDLE_",
    "VC_", "VK_", "PBS_", "MA_NUM_", "SKYPILOT_", "SM_", "AZ_BATCH", "DLC_", "AIHC_",
)  # fmt: skip
_JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NPROC_PER_NODE", "RES_OPTIONS", "PYTHONUNBUFFERED",
)  # fmt: skip


def is_job_variable(name: str) -> bool:
    """Return whether a launcher or platform sets this variable; tests run without it."""
    return name.startswith(_JOB_PREFIXES) or name in _JOB_VARIABLES
