"""From whatever variables a platform sets to a place in a job: one pure function over a mapping.

A family is a file with one function, ``detect(environ) -> Finding | None``. None means that none of
its variables is there; a finding whose source is ``none``, that they are there and name no place,
and why. To add a family, write the file and give it its place in `FAMILIES`, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from clusterjob.node.environments import (
    clusterjob_env,
    counted,
    flux_env,
    hydra_env,
    kubeflow_env,
    lsf_env,
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
from clusterjob.node.environments.agreement import compare
from clusterjob.node.environments.outside import look
from clusterjob.node.environments.reading import NOWHERE, Finding, Ignored, Reading

__all__ = ["FAMILIES", "NOWHERE", "Finding", "Ignored", "Reading", "detect", "look"]

Detector = Callable[[Mapping[str, str]], Finding | None]

# The order is the meaning: the first family that applies wins. Whoever is nearer to the process
# comes first.
FAMILIES: tuple[Detector, ...] = (
    # Whoever set a process's own variables came last: torchrun may run inside our node, Slurm, MPI
    # or a platform.
    torch_env.detect,
    # Our rendered script knows more of this job than the platform that it runs on.
    clusterjob_env.detect,
    # jsrun, PALS and Flux set Open MPI's or PMI's variables for their processes too, and say more
    # by their own.
    lsf_env.detect,
    pals_env.detect,
    flux_env.detect,
    # mpirun's processes inherit the variables of Slurm's step in which its daemons run, and those
    # of the platform below.
    openmpi_env.detect,
    # MVAPICH2's launchers are Hydra's kin and set PMI_RANK as well.
    mvapich_env.detect,
    hydra_env.detect,
    # Paddle's launcher starts the processes of a node; whatever started the node is outside of it.
    paddle_env.detect,
    # A step's variables are the scheduler's own word on this very task; a platform's would be those
    # of the machine below it.
    slurm_env.detect,
    # From here on platforms, which start one command a node. A machine is on one of them; two that
    # disagree are a conflict.
    mlp_env.detect,
    # Trainer v2 is unmistakable, and v1 sets PET_ beside RANK, which says more than that.
    kubeflow_env.detect,
    # ModelArts runs on Volcano and counts its hosts itself.
    modelarts_env.detect,
    # RANK without LOCAL_RANK is the least telling name of all: after those who say more, but before
    # Volcano's index, which counts within a task of the pod's, where RANK counts across them.
    rank_env.detect,
    volcano_env.detect,
    skypilot_env.detect,
    # Its MPI jobs were Open MPI's; what is left has one command a host.
    sagemaker_env.detect,
)


def detect(environ: Mapping[str, str]) -> Finding:
    """Return what the variables say of this process's place, with the evidence.

    Reads nothing but the mapping: no file, no socket, no clock. `look` adds what variables point
    at.
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
        else counted.detect(environ) or Finding(source=NOWHERE, place=None)
    )
    return replace(found, ignored=found.ignored + ignored + _other_meeting(found, environ))


def _other_meeting(found: Finding, environ: Mapping[str, str]) -> tuple[Ignored, ...]:
    """Return torch's variables of where rank 0 is met, which many a script exports, where the
    family has not taken them.
    """
    if found.conflicts:
        return ()  # they may be what is refused
    why = (
        "nothing beside it says that this is one of several"
        if found.source == NOWHERE
        else f"{found.source} has its own word for it"
    )
    known = {*found.evidence.values(), *(item.variable for item in found.ignored)}
    return tuple(
        Ignored(name, why)
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if environ.get(name, "").strip() and name not in known
    )
