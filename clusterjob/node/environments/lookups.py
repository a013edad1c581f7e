"""Look up the host files, descriptors and commands that some variables name.

`look_up` adds each result to the mapping of variables, under a key that is no variable's name. The
families read it there, so their `detect` stays a pure function.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

from clusterjob.node.environments import flux_env, hydra_env, lsf_env, pals_env
from clusterjob.node.environments.reading import whole_number
from clusterjob.node.system import files, network

_MAX_TEXT = 1 << 20  # characters of a host file
_TIMEOUT = 4.0  # seconds for `flux hostlist local`


def look_up(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the mapping and the values that a family needs to look up.

    Returns:
        A new mapping; the same mapping if no value is needed.
    """
    found: dict[str, str] = {}
    if environ.get("PALS_RANKID") and environ.get("PBS_NODEFILE"):
        found[pals_env.FIRST_NODE] = (
            files.read_text(environ["PBS_NODEFILE"], _MAX_TEXT).partition("\n")[0].strip()
        )
    if environ.get("JSM_NAMESPACE_RANK"):
        found[lsf_env.OWN_NAME] = socket.gethostname()
        if environ.get("LSB_DJOB_RANKFILE"):
            found[lsf_env.RANKFILE] = files.read_text(environ["LSB_DJOB_RANKFILE"], _MAX_TEXT)
    if (
        environ.get("FLUX_TASK_RANK")
        and environ.get("FLUX_JOB_NNODES") != "1"
        and not environ.get("MASTER_ADDR")
    ):
        found[flux_env.HOSTLIST] = _flux_hosts(environ)
    if environ.get("MPI_LOCALRANKID") and environ.get("PMI_FD") and not environ.get("MASTER_PORT"):
        found[hydra_env.PROXY] = _peer(environ["PMI_FD"])
    return {**environ, **found} if found else environ


def _flux_hosts(environ: Mapping[str, str]) -> str:
    try:
        result = subprocess.run(
            ["flux", "hostlist", "local"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return os.fsdecode(result.stdout).strip() if result.returncode == 0 else ""


def _peer(descriptor: str) -> str:
    """Return the pid of the peer of a local socket; empty if it is not a socket.

    The peer of PMI_FD is the proxy that started this node's processes.
    """
    number = whole_number(descriptor)
    if number is None or number > 1 << 20:
        return ""
    try:
        with socket.socket(fileno=os.dup(number)) as link:
            pid = network.peer_of(link)[0]
    except OSError:
        return ""
    return str(pid) if pid > 0 else ""
