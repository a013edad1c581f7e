"""Where node 0 listens when no platform names a port: a sequence that every agent computes by itself.

No shared file is needed, which NFS would show seconds late. The lead binds the first candidate that is free, the others try
them in turn, and the handshake tells the lead from a stranger.
"""

from __future__ import annotations

import errno
import hashlib
import socket
from collections.abc import Sequence

from clusterjob.errors import GangError
from clusterjob.node import network

COUNT = 16
# Below Linux's range of ephemeral ports (32768 and up), above the usual services.
_LOWEST, _HIGHEST = 20000, 32000
_BACKLOG = 4096


def candidates(job_id: str, attempt: int, named_port: int | None) -> list[int]:
    """Return the ports at which the lead may listen, in the order in which it tries them.

    Args:
        job_id: the job's id.
        attempt: which start of the job this is; another attempt has another sequence.
        named_port: the port that the platform set aside, which is then the only candidate.
    """
    if named_port is not None:
        return [named_port]
    seed = hashlib.sha256(f"{job_id}\0{attempt}".encode()).digest()
    width = _HIGHEST - _LOWEST
    return [_LOWEST + int.from_bytes(seed[2 * index : 2 * index + 2], "big") % width for index in range(COUNT)]


def listen(master_addr: str, ports: Sequence[int]) -> socket.socket:
    """Return a socket that listens at the first port that is free.

    Raises:
        GangError: none is free, or the address does not resolve; the message says what the kernel said.
    """
    taken = []
    for port in ports:
        try:
            return network.listen_at(master_addr, port, _BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise GangError(f"node 0 cannot listen at {master_addr}:{port}: {error.strerror or error}") from error
            taken.append(str(port))
    raise GangError(f"node 0 finds no free port at {master_addr}: {', '.join(taken)} are taken")
