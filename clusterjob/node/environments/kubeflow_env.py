"""Detect a node of Kubeflow's trainer v2, which sets torchrun's options as PET_* variables.

Source: pkg/constants/constants.go of https://github.com/kubeflow/trainer, and
torch/distributed/run.py: each option has a PET_ variable.
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master
from clusterjob.node.environments.reading import Finding, Reading

_PROCESSES = ("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from the PET_* variables.

    Returns:
        The finding; None if neither PET_NNODES nor PET_NODE_RANK is set.
    """
    reading = Reading(environ, "kubeflow", quoted=True)
    if not reading.is_set("PET_NNODES", "PET_NODE_RANK"):
        return None
    nnodes = _nnodes(reading)
    node_rank = reading.number("node_rank", "PET_NODE_RANK", required=nnodes != 1)
    if node_rank is None and nnodes == 1:
        node_rank = 0
    return placing.node(
        reading,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc_per_node=_nproc(reading),
        master=_master(reading, nnodes),
    )


def _nnodes(reading: Reading) -> int | None:
    least, colon, most = reading.value("PET_NNODES").partition(":")
    if not colon:
        return reading.number("nnodes", "PET_NNODES")
    if least.strip() == most.strip():
        return reading.as_number("nnodes", "PET_NNODES", text=most.strip())
    reading.conflicts.append(
        f"PET_NNODES={reading.value('PET_NNODES')[:80]!r} is elastic: the number of nodes must "
        "be fixed"
    )
    return None


def _nproc(reading: Reading) -> int | None:
    variable = reading.first_set(*_PROCESSES)
    if reading.value(variable).lower() in ("auto", "gpu", "cpu", "xpu"):
        placing.ignore(reading, "launch counts the devices itself, as torchrun does", variable)
        return None
    return reading.number("nproc_per_node", variable, required=False)


def _master(reading: Reading, nnodes: int | None) -> Master:
    if not reading.is_set("PET_MASTER_ADDR") and reading.is_set("PET_RDZV_ENDPOINT"):
        found = placing.endpoint(reading, "PET_RDZV_ENDPOINT")
        port = reading.number("master_port", "PET_MASTER_PORT", required=False)
        return Master(found.addr, found.port if port is None else port)
    return Master(
        reading.host("master_addr", "PET_MASTER_ADDR", required=nnodes != 1),
        reading.number("master_port", "PET_MASTER_PORT", required=False),
    )
