"""Choose the coordinator's port: the platform's, else one of a computed sequence.

All agents compute the same sequence. The coordinator binds the first free candidate. The other
agents try the candidates in turn, and recognise the coordinator by its proof of the token.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from clusterjob.errors import RendezvousError
from clusterjob.node.environments.topology import PORTS as COUNT
from clusterjob.node.environments.topology import candidate_ports
from clusterjob.node.system import network

__all__ = ["COUNT", "candidates", "listen"]

_BACKLOG = 4096


def candidates(job_id: str, attempt: int, named_port: int | None) -> list[int]:
    """Return the ports at which the coordinator may listen, in the order in which it tries them.

    Args:
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0; each attempt has its own sequence.
        named_port: the port that the platform reserves; it is the only candidate. None without one.
    """
    return [named_port] if named_port is not None else candidate_ports(job_id, attempt)


def listen(master_addr: str, ports: Sequence[int], *, alone: bool = False) -> socket.socket:
    """Return a socket that listens at the first free port.

    Args:
        master_addr: the address to bind.
        ports: the candidate ports.
        alone: whether the job has one node; then only this machine can connect.

    Raises:
        RendezvousError: no port is free, or the address does not resolve; the message has the
            kernel's error.
    """
    taken = []
    for port in ports:
        try:
            return network.listen_at(master_addr, port, backlog=_BACKLOG, alone=alone)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise RendezvousError(
                    f"node 0 cannot listen at {master_addr}:{port}: {error.strerror or error}"
                ) from error
            taken.append(str(port))
    raise RendezvousError(
        f"node 0 finds no free port at {master_addr}:"
        f" {', '.join(taken)} {'is' if len(taken) == 1 else 'are'} in use"
    )
