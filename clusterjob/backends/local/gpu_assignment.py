"""The GPUs and the number of workers of each node of a job on this machine.

All nodes share the machine's GPUs and cores.
"""

from __future__ import annotations

import os
from dataclasses import replace

from clusterjob.core import gpus
from clusterjob.core.gpu_request import IDLE, shown
from clusterjob.core.plans import Plan
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError, SubmitError
from clusterjob.node.system import devices

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def counted(spec: JobSpec) -> JobSpec:
    """Return the job with the numbers that ``--gpus auto`` and words of --nproc-per-node mean.

    Raises:
        SpecError: the word is ``gpu``, and there are fewer GPUs than nodes.
        SubmitError: the GPUs are ``auto``, and there are fewer idle ones than nodes.
    """
    word, nodes = spec.nproc_word, spec.resources.nodes
    if spec.gpus == IDLE and spec.resources.gpus_per_node is None:
        each = _idle(nodes)
        spec = replace(spec, resources=replace(spec.resources, gpus_per_node=each))
        if spec.nproc_is_default and word != "cpu":
            return replace(spec, nproc_per_node=each, nproc_word="")
    if not word:
        return spec
    uses_none = word == "cpu" or spec.resources.gpus_per_node == 0
    installed = 0 if uses_none else len(gpus.visible_gpus(os.environ))
    if each := installed // nodes:
        resources = replace(spec.resources, gpus_per_node=each)
        return replace(spec, resources=resources, nproc_per_node=each, nproc_word="")
    if word == "gpu":
        raise SpecError(
            f"--nproc-per-node gpu: this machine has {installed} GPUs"
            + (f" for {nodes} nodes" if nodes > 1 else ""),
            "--nproc-per-node cpu starts one worker per core",
        )
    return replace(spec, nproc_per_node=max(1, devices.usable_cores() // nodes), nproc_word="")


def _idle(nodes: int) -> int:
    """Return the number of idle GPUs for each node."""
    try:
        locks = devices.pick("", IDLE, count=None, environ=os.environ)
    except (devices.TooFewGpusError, OSError) as error:
        raise SubmitError(f"--gpus {IDLE}: {error}", "nvidia-smi shows the GPUs") from error
    devices.release(locks)
    count = len(locks)
    if count < nodes:
        raise SubmitError(f"--gpus {IDLE}: {count} idle GPUs for {nodes} nodes", "lower --nodes")
    return count // nodes


def of_nodes(spec: JobSpec) -> tuple[list[dict[str, str]], list[str]]:
    """Return each node's device variables, and notes for the user.

    Raises:
        SpecError: there are too few GPUs and `require_gpus` is set, or the chosen GPUs do not
            fit the nodes.
    """
    nodes, per_node = spec.resources.nodes, spec.resources.gpus_per_node
    if spec.gpus:
        if spec.gpus != IDLE and nodes > 1:
            raise SpecError(
                f"--gpus {shown(spec.gpus)}: {nodes} nodes on this machine cannot share these GPUs",
                f"--gpus auto:{per_node} takes {per_node} idle GPUs for each node",
            )
        return [{} if spec.gpus == IDLE else {_VARIABLE: spec.gpus}] * nodes, []
    if per_node is None:
        return [{}] * nodes, []
    available = gpus.visible_gpus(os.environ) if per_node else []
    notes = []
    if (shares := gpus.shares(available, nodes, per_node=per_node)) is None:
        missing = f"this machine has {len(available)} of the {nodes * per_node} GPUs asked for"
        if spec.require_gpus:
            raise SpecError(
                missing, "--no-require-gpus runs the workers on the CPU, as a rehearsal"
            )
        notes = [f"{missing}: a rehearsal, with the workers on the CPU and gloo"]
        shares = [[]] * nodes
    return [{_VARIABLE: ",".join(share)} for share in shares], notes


def reserve(plan: Plan) -> tuple[list[dict[str, str]], devices.Locks]:
    """Lock the chosen or idle GPUs of a job, so that no other job chooses them.

    Returns:
        The device variables of each node, and the locks, which the agents inherit; nothing if the
        job chooses no GPUs.

    Raises:
        SubmitError: a GPU does not exist, is not idle, or is locked by another job.
    """
    spec = plan.spec
    if not spec.gpus:
        return [], {}
    nodes, per_node = spec.resources.nodes, spec.resources.gpus_per_node or 0
    try:
        locks = devices.pick(plan.job_id, spec.gpus, count=nodes * per_node, environ=os.environ)
    except (devices.TooFewGpusError, OSError) as error:
        raise SubmitError(
            f"--gpus {shown(spec.gpus)}: {error}", "nvidia-smi shows the GPUs"
        ) from error
    shares = gpus.shares(list(locks), nodes, per_node=per_node) or []
    return [{_VARIABLE: ",".join(share)} for share in shares], locks
