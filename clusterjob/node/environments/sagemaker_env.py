"""Detect a node of Amazon SageMaker, which lists the hosts as JSON.

The family of Open MPI detects the processes of SageMaker's MPI jobs and uses `nodes`.

Source: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clusterjob.node.environments import placing
from clusterjob.node.environments.reading import Finding, Reading


@dataclass(frozen=True)
class Nodes:
    """SageMaker's hosts and this host's index among them; unset outside SageMaker."""

    hosts: list[str] = field(default_factory=list)
    node_rank: int | None = None
    nnodes: int | None = None


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology from SM_HOSTS and SM_CURRENT_HOST; None if they are not set."""
    reading = Reading(environ, "sagemaker")
    if not reading.is_set("SM_HOSTS", "SM_CURRENT_HOST"):
        return None
    found = nodes(reading, required=True)
    nproc_per_node = reading.number("nproc_per_node", "SM_NUM_GPUS", required=False)
    master = placing.master_or_first(reading, "SM_HOSTS", found.hosts)
    return placing.node(
        reading,
        nnodes=found.nnodes,
        node_rank=found.node_rank,
        nproc_per_node=nproc_per_node,
        master=master,
    )


def nodes(reading: Reading, *, required: bool = False) -> Nodes:
    """Return SageMaker's hosts and this host's index among them.

    Args:
        reading: records the evidence, and a conflict if the variables contradict each other.
        required: whether missing variables are a conflict.
    """
    if not reading.is_set("SM_HOSTS", "SM_CURRENT_HOST") and not required:
        return Nodes()
    text = reading.text("nnodes", "SM_HOSTS")
    own = reading.text("node_rank", "SM_CURRENT_HOST")
    if text is None or own is None:
        return Nodes()
    import json

    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        listed = None
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(name, str) and name for name in listed)
    ):
        reading.conflicts.append(f"SM_HOSTS={text[:80]!r} is not a JSON list of hosts")
        return Nodes()
    if own not in listed:
        reading.conflicts.append(f"SM_CURRENT_HOST={own[:80]!r} is not in SM_HOSTS")
        return Nodes()
    count = reading.number("nnodes", "SM_HOST_COUNT", required=False)
    if count is not None and count != len(listed):
        reading.conflicts.append(f"SM_HOST_COUNT={count}, but SM_HOSTS lists {len(listed)}")
    reading.evidence["nnodes"] = "SM_HOSTS"
    return Nodes(listed, listed.index(own), nnodes=len(listed))
