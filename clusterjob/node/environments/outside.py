"""What some variables only point at: a file of hosts, a descriptor, a command. Looked up here, so
that detection stays pure.

Each answer is added to the mapping under a name that no variable has, and the families read it from
there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from clusterjob.node.environments import flux_env, hydra_env, lsf_env, pals_env
from clusterjob.node.environments.reading import whole_number

_PATIENCE = 4.0  # seconds for Flux's answer
_MOST_BYTES = 1 << 20


def look(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the mapping, with what its variables point at where a family needs that; it is the
    same one where none does.
    """
    found: dict[str, str] = {}
    if environ.get("PALS_RANKID") and environ.get("PBS_NODEFILE"):
        found[pals_env.FIRST_NODE] = _text(environ["PBS_NODEFILE"]).partition("\n")[0].strip()
    if environ.get("JSM_NAMESPACE_RANK"):
        import socket

        found[lsf_env.OWN_NAME] = socket.gethostname()
        if environ.get("LSB_DJOB_RANKFILE"):
            found[lsf_env.RANKFILE] = _text(environ["LSB_DJOB_RANKFILE"])
    if (
        environ.get("FLUX_TASK_RANK")
        and environ.get("FLUX_JOB_NNODES") != "1"
        and not environ.get("MASTER_ADDR")
    ):
        found[flux_env.HOSTLIST] = _flux_hosts(environ)
    if environ.get("MPI_LOCALRANKID") and environ.get("PMI_FD") and not environ.get("MASTER_PORT"):
        found[hydra_env.PROXY] = _peer(environ["PMI_FD"])
    return {**environ, **found} if found else environ


def _text(path: str) -> str:
    """Return the beginning of a file; empty if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except (OSError, ValueError):
        return ""


def _flux_hosts(environ: Mapping[str, str]) -> str:
    import subprocess

    try:
        told = subprocess.run(
            ["flux", "hostlist", "local"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(told.stdout).strip() if told.returncode == 0 else ""


def _peer(descriptor: str) -> str:
    """Return the pid behind a descriptor that is a local socket: the proxy that started this node's
    processes; empty otherwise.
    """
    import socket
    import struct

    number = whole_number(descriptor)
    if number is None or number > 1 << 20:
        return ""
    try:
        with socket.socket(fileno=os.dup(number)) as peer:
            pid = struct.unpack(
                "3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )[0]
    except OSError:
        return ""
    return str(pid) if pid > 0 else ""
