"""Read the variables of Volcengine's machine learning platform (MLP) or a compatible one.

Each node runs the entry command. The platform sets MLP_ROLE, MLP_ROLE_INDEX and, for each role, the
number of nodes, their GPUs, hosts and ports. MLP_{ROLE}_{i}_HOST is the RDMA address if the node
has RDMA. _PRIMARY_HOST is always the VPC address, which is right for TCP.
MLP_{ROLE}_RACK_RANK_INDEX orders the nodes by switch. All nodes must use the same index; the agents
check this at the rendezvous.

Source: the platform's documentation of its environment variables,
https://www.volcengine.com/docs/6459/96563
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from clusterjob.node.environments.topology import Finding, Topology

SOURCE = "mlp"
_ROLES = ("WORKER", "CHIEF", "PS", "SERVER", "SCHEDULER", "EVALUATOR")
# The family applies if one of these is set.
SIGNS = " ".join(
    ["MLP_ROLE", "MLP_ROLE_INDEX"]
    + [f"MLP_{role}_{what}" for role in _ROLES for what in ("NUM", "0_HOST", "0_PRIMARY_HOST")]
)


def place(found: Finding) -> Topology | None:
    """Return this node's topology within its role, or None with conflicts."""
    role = _role(found)
    if role not in _ROLES:
        found.conflicts.append(f"MLP_ROLE={role[:80]!r} is none of {', '.join(_ROLES)}")
        return None
    found.number("nnodes", f"MLP_{role}_NUM")
    _read_index(found, f"MLP_{role}_RACK_RANK_INDEX")
    found.number("nproc_per_node", f"MLP_{role}_GPU", required=False)
    host, primary = f"MLP_{role}_0_HOST", f"MLP_{role}_0_PRIMARY_HOST"
    found.find_master(found.first_set(primary, host), f"MLP_{role}_0_PORT", missing=host)
    if found.is_set(primary):
        found.ignore(
            f"{primary} is the VPC address, which is right for TCP; this may be an RDMA address",
            host,
        )
    _refuse_other_kinds(found, role)
    for variable in (f"MLP_{role}_ALL_PRIMARY_HOSTS", f"MLP_{role}_ALL_HOSTS"):
        found.check_count(variable, found.hosts(variable))
    return found.node()


def peers(environ: Mapping[str, str], nnodes: int) -> list[str]:
    """Return the names and addresses of all nodes; empty if the variables do not give them all."""
    found = Finding(SOURCE, environ)
    role = _role(found)
    lists = []
    for kind in ("HOST", "PRIMARY_HOST"):
        each = (found.hosts(f"MLP_{role}_{node}_{kind}") for node in range(nnodes))
        lists += [found.hosts(f"MLP_{role}_ALL_{kind}S"), [*itertools.chain.from_iterable(each)]]
    are_all = any(len(hosts) >= nnodes for hosts in lists)
    return list(dict.fromkeys(itertools.chain.from_iterable(lists))) if are_all else []


def _role(found: Finding) -> str:
    return (found.value("MLP_ROLE") or "WORKER").upper()


def _read_index(found: Finding, by_rack: str) -> None:
    own = found.number("node_rank", "MLP_ROLE_INDEX", required=not found.is_set(by_rack))
    if not found.is_set(by_rack):
        return
    index = found.number("node_rank", by_rack)
    if own is not None and index is not None and (own == 0) != (index == 0):
        # All nodes use the address of worker 0, so it must be the first in both orders.
        found.conflicts.append(f"MLP_ROLE_INDEX={own} and {by_rack}={index} disagree about node 0")
    else:
        found.ignore(
            f"{by_rack} orders the nodes by switch; all nodes have to use the same index",
            "MLP_ROLE_INDEX",
        )


def _refuse_other_kinds(found: Finding, role: str) -> None:
    """Refuse roles and kinds of tasks in which nodes would train alone without an error."""
    workers = found.value("MLP_WORKER_NUM")
    if role != "WORKER" and workers not in ("", "0"):
        found.conflicts.append(
            f"MLP_ROLE={role}, but MLP_WORKER_NUM={workers}: only nodes with the role worker train"
        )
    hosts = found.hosts("MLP_MPI_HOSTS")
    if len(hosts) > 1:
        port = found.value("MLP_SSH_PORT")
        found.conflicts.append(
            "MLP_MPI_HOSTS is set: a task of the MPI kind runs its entry command on worker 0 "
            f"alone, but there are {len(hosts)} hosts. "
            "Choose the kind PyTorchDDP or Custom, or start `clusterjob run --cluster ssh "
            "--hostfile $MLP_MPI_HOSTFILE`" + (f" (SSH listens on port {port[:9]})" if port else "")
        )
