"""This node's or process's part of a job: ranks, peers, GPUs, name, attempt, job id.

`detect` is the reader of the variables.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from clusterjob.errors import PlacementError
from clusterjob.node import contract
from clusterjob.node.environments import families, slurm_env
from clusterjob.node.environments.families import FAMILIES, Family
from clusterjob.node.environments.topology import (
    NOWHERE,
    OWN_ADDRESS,
    Finding,
    Topology,
    Worker,
    whole_number,
)
from clusterjob.node.system import files, processes

_MAX_TEXT = 1 << 20  # characters of a host file
_TIMEOUT = 4.0  # seconds for `flux hostlist local`
# (family, count, index): the launcher sets both. A batch script may export a count for its steps.
# In a step a family applies, and then the count is not read. No family reads PADDLE_TRAINER_ID.
_COUNTS = (
    ("env", "WORLD_SIZE", "RANK"),
    ("openmpi", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mvapich2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("hydra", "PMI_SIZE", "PMI_RANK"),
    ("paddle", "PADDLE_TRAINERS_NUM", "RANK"),
    ("sagemaker", "SM_HOST_COUNT", "SM_CURRENT_HOST"),
)
FIELDS = (
    "nnodes", "node_rank", "nproc_per_node", "master_addr", "master_port", "rank", "local_rank",
    "world_size", "local_world_size",
)  # fmt: skip


def detect(environ: Mapping[str, str]) -> Finding:
    """Return the detected rank assignment with its evidence.

    The first family that applies gives it. The variables of later families are ignored, or are a
    conflict. The function reads only the mapping: no file, no socket, no clock. `look_up` adds the
    contents of files, sockets and commands that variables point at.
    """
    findings = [(family, family.detect(environ)) for family in FAMILIES]
    applied = [each for each in findings if each[1].source != NOWHERE]
    found = _compare(applied) if applied else _without_family(environ)
    for _, other in findings:
        if other.source == NOWHERE:
            found.ignored |= other.ignored
    if not found.conflicts:  # many scripts set these; they may be the reason for a conflict
        unused = {"MASTER_ADDR", "MASTER_PORT"} - {*found.evidence.values(), *found.ignored}
        found.ignore(
            "no other variable gives a rank"
            if found.source == NOWHERE
            else f"{found.source} has its own variables for it",
            *sorted(unused),
        )
    return found


def _compare(applied: Sequence[tuple[Family, Finding]]) -> Finding:
    """Return the first finding; add the others' variables as ignored, or a conflict with them."""
    (family, winner), *others = applied
    used = {*winner.evidence.values()}
    conflicts = []
    for other_family, other in others:
        why = (
            f"{winner.source} comes before {other.source}"
            if other.source != winner.source
            else f"another variable of {winner.source} has precedence"
        )
        known = used | winner.ignored.keys()
        winner.ignored |= {name: why for name in other.evidence.values() if name not in known}
        are_platforms = family.is_platform and other_family.is_platform
        conflicts.append(_disagreement(winner, other, are_platforms=are_platforms))
        if winner.source == "env" and winner.conflicts and other.level == "node":
            names = ", ".join(sorted(set(winner.evidence.values())))
            conflicts.append(
                f"{names}: of one process of a job, but the variables of {other.source} are those "
                f"of a node: unset {names}"
            )
    if first := next(filter(None, conflicts), ""):
        winner.placement = None
        winner.conflicts.insert(0, first)
    return winner


def _disagreement(winner: Finding, other: Finding, *, are_platforms: bool) -> str:
    """Return the conflict between two findings; empty if they agree or need not agree."""
    first, second = winner.placement, other.placement
    if isinstance(first, Worker) and isinstance(second, Worker) and winner.source == "env":
        # A launcher inside a task starts more processes than there are tasks, so its ranks differ.
        # Without more processes, a different rank is a mistake: a batch script may have set RANK
        # for all tasks.
        name = "rank"
        own, theirs = (first.rank, first.world_size), (second.rank, second.world_size)
        agree = own == theirs or first.world_size > second.world_size
    elif isinstance(first, Topology) and isinstance(second, Topology) and are_platforms:
        name = "node_rank"
        own, theirs = (first.node_rank, first.nnodes), (second.node_rank, second.nnodes)
        # PyTorchJob v1 counts processes in WORLD_SIZE.
        counts = (first.nnodes, first.nnodes * (first.nproc_per_node or 1))
        agree = first.node_rank == second.node_rank and second.nnodes in counts
    else:
        return ""
    if agree:
        return ""
    return (
        f"{winner.evidence.get(name, name)}={own[0]} of {own[1]} and "
        f"{other.evidence.get(name, name)}={theirs[0]} of {theirs[1]} disagree "
        f"({winner.source}, {other.source})"
    )


def _without_family(environ: Mapping[str, str]) -> Finding:
    """Return an empty finding, or a conflict if variables give a count above 1 and no index.

    Without this check each process would train its own copy of the model alone.
    """
    found = Finding(NOWHERE, environ)
    for source, count, index in _COUNTS:
        value = found.value(count)
        if (whole_number(value) or 0) > 1 and not found.is_set(index):
            why = f"{index} is not set, but {count}={value}: the launcher sets both"
            return Finding(source, environ, conflicts=[why])
    return found


# -- values that variables point at ----------------------------------------------------------------


def look_up(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the mapping and the values that a family needs to look up.

    These are the contents of host files, descriptors and commands that some variables name. Each
    is added under a key that is no variable's name, so that `detect` stays a pure function.

    Returns:
        A new mapping; the same mapping if no value is needed.
    """
    found: dict[str, str] = {}
    if environ.get("PALS_RANKID") and environ.get("PBS_NODEFILE"):
        hosts = files.read_text(environ["PBS_NODEFILE"], _MAX_TEXT)
        found[families.PALS_FIRST_NODE] = hosts.partition("\n")[0].strip()
    several = environ.get("FLUX_TASK_RANK") and environ.get("FLUX_JOB_NNODES") != "1"
    if several and not environ.get("MASTER_ADDR"):
        found[families.FLUX_HOSTS] = processes.output_of(
            families.FLUX_HOSTS.split(), environ, timeout=_TIMEOUT
        )
    if environ.get("MPI_LOCALRANKID") and environ.get("PMI_FD") and not environ.get("MASTER_PORT"):
        found[families.HYDRA_PROXY] = _peer(environ["PMI_FD"])
    return {**environ, **found} if found else environ


def _peer(descriptor: str) -> str:
    """Return the pid of the peer of a local socket; empty if it is not a socket.

    The peer of PMI_FD is the proxy that started this node's processes.
    """
    refused = contextlib.suppress(OSError, ValueError, OverflowError)
    with refused, socket.socket(fileno=os.dup(int(descriptor))) as link:
        # With its uid and gid; see unix(7).
        pid, _, _ = struct.unpack(
            "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return str(pid) if pid > 0 else ""
    return ""


# -- this node -------------------------------------------------------------------------------------


def find_node(environ: Mapping[str, str]) -> Finding:
    """Return this node's placement in the job; one node if the environment names no job.

    Raises:
        PlacementError: the environment is incomplete or contradictory, belongs to one process
            (each process would then start all workers), or is a Slurm allocation of several nodes,
            outside srun.
    """
    finding = detect(look_up(environ)).check()
    if isinstance(finding.placement, Topology):
        return finding
    if finding.placement is not None:
        raise PlacementError(
            "this process is already one process of a job"
            f" ({finding.source}: {', '.join(sorted(set(finding.evidence.values())))})",
            "run `clusterjob launch` once per node; it starts all workers of the node",
        )
    nodes = whole_number(environ.get("SLURM_JOB_NUM_NODES", "").strip()) or 1
    if nodes > 1:
        raise PlacementError(
            f"this process runs outside srun, in an allocation of {nodes} nodes:"
            " only one would be used",
            "use `srun --ntasks-per-node=1 clusterjob launch ...`; to use this node only, set"
            " CLUSTERJOB_NNODES=1 CLUSTERJOB_NODE_RANK=0",
        )
    finding.placement = Topology(
        1,
        0,
        nproc_per_node=None,
        master_addr=OWN_ADDRESS,
        master_port=None,
        source=finding.source,
    )
    return finding


def node_of(finding: Finding) -> Topology:
    """Return the topology in a finding of `find_node`."""
    assert isinstance(finding.placement, Topology)
    return finding.placement


def gpus(finding: Finding, environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the platform's variables promise this node; 0 if none does."""
    if finding.source == slurm_env.SOURCE:
        return whole_number(environ.get("SLURM_GPUS_ON_NODE", "").strip()) or 0
    names_gpus = "GPU" in finding.evidence.get("nproc_per_node", "")  # MLP_WORKER_GPU, MA_NUM_GPUS
    return (node_of(finding).nproc_per_node or 0) if names_gpus else 0


def peers(topology: Topology, environ: Mapping[str, str]) -> list[str]:
    """Return the names or addresses of all nodes of the job; empty if the variables name none."""
    if topology.source == slurm_env.SOURCE:
        return slurm_env.peers(environ)
    if topology.source == "mlp":
        return families.mlp_peers(environ, topology.nnodes)
    if topology.source == "skypilot":
        return Finding(topology.source, environ).hosts("SKYPILOT_NODE_IPS")
    return []


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


def job_id(source: str, environ: Mapping[str, str]) -> str:
    """Return the id of the job that gave a node or process its rank; empty if it is unknown.

    For a step of srun it is ``slurm-JOB.STEP``.

    Args:
        source: the family that gave the rank assignment.
        environ: the environment of the process.
    """
    own = ""
    if source == slurm_env.SOURCE:
        own = f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    elif source == "torchrun":  # not for a node that a torchrun's worker starts
        own = environ.get("TORCHELASTIC_RUN_ID", "")
    return environ.get(contract.JOB_ID) or own


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


def describe(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data; a field that its level does not have is None."""
    place = finding.placement
    fields = vars(place) if place is not None else {}
    if isinstance(place, Worker):
        fields = vars(place.topology) | fields
    return {
        "source": finding.source,
        "level": finding.level,
        **{name: fields.get(name) for name in FIELDS},
        "evidence": finding.evidence,
        "ignored": [{"variable": name, "why": why} for name, why in finding.ignored.items()],
        "conflicts": finding.conflicts,
    }
