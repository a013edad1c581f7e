"""Find node 0's address with Slurm if its name does not resolve.

A NodeName of Slurm need not be a host name; Slurm itself connects to NodeAddr.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from clusterjob.errors import PlacementError
from clusterjob.node.environments import slurm_env
from clusterjob.node.environments.topology import Topology, Worker
from clusterjob.node.system import network
from clusterjob.node.system.hostlist import expand_hostlist
from clusterjob.node.system.network import is_loopback

_TIMEOUT = 4.0  # seconds for one scontrol command


def resolve_master_address(topology: Topology, environ: Mapping[str, str]) -> Topology:
    """Return the topology with an address of node 0 that resolves on this machine.

    Args:
        topology: the detected topology; only one from Slurm is changed.
        environ: the environment that it was detected in.

    Returns:
        A new topology; the given one if its address resolves or its source is not Slurm.

    Raises:
        PlacementError: neither the resolver nor Slurm has an address for the name.
    """
    if topology.source != slurm_env.SOURCE:
        return topology
    error = network.why_unresolvable(topology.master_addr)
    if not error:
        return topology
    address = (
        "127.0.0.1"
        if topology.nnodes == 1
        else _launch_address(topology, environ)
        or next(iter(node_addresses(topology.master_addr, environ)), None)
    )
    if address is None:
        raise PlacementError(
            f"node 0 is {topology.master_addr}, which does not resolve here ({error}), and Slurm "
            "gives no address for it",
            "`export MASTER_ADDR=ADDRESS` before srun sets the address of the step's first node",
        )
    return replace(topology, master_addr=address)


def as_worker(placement: Topology | Worker, environ: Mapping[str, str]) -> Worker:
    """Return a step's task as a process, with an address of node 0 that resolves.

    Raises:
        PlacementError: no variable gives the rendezvous port, or node 0 has no address.
    """
    if isinstance(placement, Topology):
        placement = slurm_env.as_worker(placement, environ)
    return replace(placement, topology=resolve_master_address(placement.topology, environ))


def _launch_address(topology: Topology, environ: Mapping[str, str]) -> str | None:
    """Return the address of the node that ran srun, if that is node 0.

    It is node 0 if srun ran in a batch script, which runs on the job's first node.
    """
    address = environ.get("SLURM_LAUNCH_NODE_IPADDR", "").strip()
    if environ.get("ENVIRONMENT") != "BATCH" or not address or is_loopback(address):
        return None
    try:
        first = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))[:1]
    except PlacementError:
        return None
    return address if first == [topology.master_addr] else None


def node_addresses(names: str, environ: Mapping[str, str]) -> list[str]:
    """Return NodeAddr of each node of a list from ``scontrol show node``.

    Returns:
        The addresses that resolve; empty if there is no scontrol, no answer or no such node.
    """
    if names.startswith("-"):
        return []
    import re
    import subprocess

    kept = {
        variable: value
        for variable, value in environ.items()
        if not variable.startswith("SCONTROL_")
    }
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", names],
            env=kept,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"(?:^| )NodeAddr=(\S+)", os.fsdecode(shown.stdout), re.MULTILINE)
    known = [] if shown.returncode else found
    return [address for address in known if not network.why_unresolvable(address)]
