"""Node 0's address where its name does not resolve: what Slurm knows of it.

A NodeName of Slurm need not be a host's name; NodeAddr is what Slurm itself connects to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from clusterjob.errors import PlaceError
from clusterjob.node.environments import slurm_env
from clusterjob.node.environments.topology import Topology, expand_hostlist
from clusterjob.node.system import network
from clusterjob.node.system.network import is_loopback

_PATIENCE = 4.0  # seconds for one question to Slurm's controller


def settle(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """Return the topology with an address of node 0 that resolves here; it is the topology itself
    wherever its own does.

    Args:
        topology: a place, of which only Slurm's are looked after.
        environ: what it was found in.

    Raises:
        PlaceError: neither the resolver nor Slurm knows the name.
    """
    if topology.source != slurm_env.SOURCE:
        return topology
    trouble = network.why_unresolvable(topology.master_addr)
    if not trouble:
        return topology
    address = (
        "127.0.0.1"
        if topology.nnodes == 1
        else _launch_address(topology, environ) or _node_address(topology.master_addr, environ)
    )
    if address is None:
        raise PlaceError(
            f"node 0 is {topology.master_addr}, which does not resolve here ({trouble}), and Slurm tells no address of it",
            "MASTER_ADDR, exported before srun, names an address of the step's first node",
        )
    return replace(topology, master_addr=address)


def _launch_address(topology: Topology, environ: Mapping[str, str]) -> str | None:
    """Return the address of the node that ran srun, where that is node 0: in a batch script, on the
    first node of the job.
    """
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR", "").strip()
    if environ.get("ENVIRONMENT") != "BATCH" or not address or is_loopback(address):
        return None
    try:
        first = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))[:1]
    except PlaceError:
        return None
    return address if first == [topology.master_addr] else None


def _node_address(name: str, environ: Mapping[str, str]) -> str | None:
    """Return NodeAddr as ``scontrol show node`` tells it; None where there is no scontrol, no
    answer, or no such node.
    """
    if name.startswith("-"):
        return None
    import re
    import subprocess

    kept = {
        variable: value
        for variable, value in environ.items()
        if not variable.startswith("SCONTROL_")
    }
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name], env=kept, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"(?:^| )NodeAddr=(\S+)", os.fsdecode(shown.stdout))
    return (
        found[1]
        if shown.returncode == 0 and found and not network.why_unresolvable(found[1])
        else None
    )
