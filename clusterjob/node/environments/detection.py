"""Detect the rank assignment: try the families in order, and compare those that apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from clusterjob.node.environments import (
    clusterjob_env,
    flux_env,
    hydra_env,
    kubeflow_env,
    lsf_env,
    missing_index,
    mlp_env,
    modelarts_env,
    mvapich_env,
    openmpi_env,
    paddle_env,
    pals_env,
    rank_env,
    sagemaker_env,
    skypilot_env,
    slurm_env,
    torch_env,
    volcano_env,
)
from clusterjob.node.environments.conflicts import compare
from clusterjob.node.environments.reading import NOWHERE, Finding, Ignored

Detector = Callable[[Mapping[str, str]], Finding | None]

# The first family that applies wins. The launcher nearest to the process comes first.
FAMILIES: tuple[Detector, ...] = (
    # torchrun may run inside clusterjob, Slurm, MPI or a platform; then its variables apply.
    torch_env.detect,
    # The rendered script sets more values for this job than the platform that runs the script.
    clusterjob_env.detect,
    # jsrun, PALS and Flux also set variables of Open MPI or PMI. Their own variables say more.
    lsf_env.detect,
    pals_env.detect,
    flux_env.detect,
    # mpirun's processes inherit the variables of the platform and of the Slurm step of its daemons.
    openmpi_env.detect,
    # MVAPICH2's launchers also set Hydra's PMI_RANK. Their own variables say more.
    mvapich_env.detect,
    hydra_env.detect,
    # Paddle's launcher starts a node's processes, inside the platform that started the node.
    paddle_env.detect,
    # A step's variables describe this task; a platform's variables describe its machine.
    slurm_env.detect,
    # Platforms come next; they start one command per node. A machine belongs to one platform, so
    # two platforms that disagree are a conflict.
    mlp_env.detect,
    # PET_ variables without RANK belong to trainer v2. Trainer v1 sets RANK too.
    kubeflow_env.detect,
    # ModelArts runs on Volcano and has its own host count.
    modelarts_env.detect,
    # RANK without LOCAL_RANK is ambiguous, so more specific families come first. Volcano's index
    # comes later: it counts the pods of one task of the job, and RANK counts those of all tasks.
    rank_env.detect,
    volcano_env.detect,
    skypilot_env.detect,
    # `openmpi_env` detects SageMaker's MPI jobs; SageMaker's other jobs run one command per host.
    sagemaker_env.detect,
)


def detect(environ: Mapping[str, str]) -> Finding:
    """Return the detected rank assignment with its evidence.

    The function reads only the mapping: no file, no socket, no clock. `look_up` adds the contents
    of files, sockets and commands that variables point at.
    """
    ignored: tuple[Ignored, ...] = ()
    findings: list[Finding] = []
    for family in FAMILIES:
        finding = family(environ)
        if finding is None:
            continue
        if finding.source == NOWHERE:
            ignored += finding.ignored
        else:
            findings.append(finding)
    found = (
        compare(findings[0], findings[1:])
        if findings
        else missing_index.detect(environ) or Finding(source=NOWHERE, placement=None)
    )
    return replace(found, ignored=found.ignored + ignored + _unused_master(found, environ))


def _unused_master(found: Finding, environ: Mapping[str, str]) -> tuple[Ignored, ...]:
    """Return MASTER_ADDR and MASTER_PORT as ignored, if they are set and not used.

    Many scripts export these variables.
    """
    if found.conflicts:
        return ()  # these variables may be the reason for the conflict
    why = (
        "no other variable gives a rank"
        if found.source == NOWHERE
        else f"{found.source} has its own variables for it"
    )
    known = {*found.evidence.values(), *(item.variable for item in found.ignored)}
    return tuple(
        Ignored(name, why)
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if environ.get(name, "").strip() and name not in known
    )
