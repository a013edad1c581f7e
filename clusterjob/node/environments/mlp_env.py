"""Detect a node of Volcengine's machine learning platform (MLP) or a compatible platform.

Each node runs the entry command. The platform sets MLP_ROLE, MLP_ROLE_INDEX and, for each role, the
number of nodes, their GPUs, hosts and ports. MLP_{ROLE}_{i}_HOST is the RDMA address if the node
has RDMA. _PRIMARY_HOST is always the VPC address, which is right for TCP.
MLP_{ROLE}_RACK_RANK_INDEX orders the nodes by switch. All nodes must use the same index; the agents
check this at the rendezvous.

Source: the platform's documentation of its environment variables,
https://www.volcengine.com/docs/6459/96563
"""

from __future__ import annotations

from collections.abc import Mapping

from clusterjob.node.environments import placing
from clusterjob.node.environments.placing import Master
from clusterjob.node.environments.reading import Finding, Reading

SOURCE = "mlp"
_ROLES = ("WORKER", "CHIEF", "PS", "SERVER", "SCHEDULER", "EVALUATOR")


def detect(environ: Mapping[str, str]) -> Finding | None:
    """Return this node's topology within its role; None if no variable of a role is set."""
    reading = Reading(environ, SOURCE, quoted=True)
    signs = [
        f"MLP_{role}_{what}" for role in _ROLES for what in ("NUM", "0_HOST", "0_PRIMARY_HOST")
    ]
    if not reading.is_set("MLP_ROLE", "MLP_ROLE_INDEX", *signs):
        return None
    role = (reading.value("MLP_ROLE") or "WORKER").upper()
    if role not in _ROLES:
        reading.conflicts.append(f"MLP_ROLE={role[:80]!r} is none of {', '.join(_ROLES)}")
        return reading.finding(None)
    nnodes = reading.number("nnodes", f"MLP_{role}_NUM")
    node_rank = _index(reading, role)
    nproc_per_node = reading.number("nproc_per_node", f"MLP_{role}_GPU", required=False)
    master = _master(reading, role, nnodes=nnodes)
    _refuse_other_kinds(reading, role)
    _check_hosts(reading, role, nnodes=nnodes)
    return placing.node(
        reading, nnodes=nnodes, node_rank=node_rank, nproc_per_node=nproc_per_node, master=master
    )


def peers(environ: Mapping[str, str], nnodes: int) -> list[str]:
    """Return the names and addresses of all nodes; empty if the variables do not give them all."""
    reading = Reading(environ, SOURCE, quoted=True)
    role = (reading.value("MLP_ROLE") or "WORKER").upper()
    found: list[str] = []
    complete = False
    for kind in ("HOST", "PRIMARY_HOST"):
        each = [f"MLP_{role}_{node}_{kind}" for node in range(nnodes)]
        for variables in (each, [f"MLP_{role}_ALL_{kind}S"]):
            hosts = [host for variable in variables for host in placing.hosts(reading, variable)]
            complete = complete or len(hosts) >= nnodes
            found += hosts
    return list(dict.fromkeys(found)) if complete else []


def _index(reading: Reading, role: str) -> int | None:
    by_rack = f"MLP_{role}_RACK_RANK_INDEX"
    own = reading.number("node_rank", "MLP_ROLE_INDEX", required=not reading.is_set(by_rack))
    if not reading.is_set(by_rack):
        return own
    index = reading.number("node_rank", by_rack)
    if own is not None and index is not None and (own == 0) != (index == 0):
        # All nodes use the address of worker 0, so it must be the first in both orders.
        reading.conflicts.append(
            f"MLP_ROLE_INDEX={own} and {by_rack}={index} disagree about node 0"
        )
    else:
        placing.ignore(
            reading,
            f"{by_rack} orders the nodes by switch; all nodes have to use the same index",
            "MLP_ROLE_INDEX",
        )
    return index


def _master(reading: Reading, role: str, nnodes: int | None) -> Master:
    host, primary = f"MLP_{role}_0_HOST", f"MLP_{role}_0_PRIMARY_HOST"
    if reading.is_set(primary):
        addr = reading.host("master_addr", primary)
        placing.ignore(
            reading,
            f"{primary} is the VPC address, which is right for TCP; this may be an RDMA address",
            host,
        )
    else:
        addr = reading.host("master_addr", host, required=nnodes != 1)
    return Master(addr, reading.number("master_port", f"MLP_{role}_0_PORT", required=False))


def _refuse_other_kinds(reading: Reading, role: str) -> None:
    """Refuse roles and kinds of tasks in which nodes would train alone without an error."""
    others = [
        other
        for other in _ROLES
        if other != role and reading.value(f"MLP_{other}_NUM") not in ("", "0")
    ]
    if role != "WORKER" and "WORKER" in others:
        reading.conflicts.append(
            f"MLP_ROLE={role}, but MLP_WORKER_NUM={reading.value('MLP_WORKER_NUM')}: only nodes "
            "with the role worker train"
        )
    fanned = placing.hosts(reading, "MLP_MPI_HOSTS")
    if len(fanned) > 1:
        port = reading.value("MLP_SSH_PORT")
        reading.conflicts.append(
            "MLP_MPI_HOSTS is set: a task of the MPI kind runs its entry command on worker 0 "
            f"alone, but there are {len(fanned)} hosts. "
            "Choose the kind PyTorchDDP or Custom, or start `clusterjob run --cluster ssh "
            "--hostfile $MLP_MPI_HOSTFILE`" + (f" (SSH listens on port {port[:9]})" if port else "")
        )


def _check_hosts(reading: Reading, role: str, nnodes: int | None) -> None:
    for variable in (f"MLP_{role}_ALL_PRIMARY_HOSTS", f"MLP_{role}_ALL_HOSTS"):
        listed = placing.hosts(reading, variable)
        if listed and nnodes is not None and len(listed) != nnodes:
            reading.conflicts.append(
                f"{variable} lists {len(listed)} hosts, MLP_{role}_NUM is {nnodes}"
            )
            return
