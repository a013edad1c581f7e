"""Where node 0 listens: at the port that a platform names, else at one of a sequence that every
agent computes by itself.

The lead binds the first candidate that is free, the others try them in turn, and the handshake
tells the lead from a stranger.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from clusterjob.errors import GangError
from clusterjob.node.environments.candidate_ports import COUNT
from clusterjob.node.environments.candidate_ports import candidates as _candidates
from clusterjob.node.system import network

__all__ = ["COUNT", "candidates", "listen"]

_BACKLOG = 4096


def candidates(job_id: str, attempt: int, named_port: int | None) -> list[int]:
    """Return the ports at which the lead may listen, in the order in which it tries them.

    Args:
        job_id: the job's id.
        attempt: which start of the job this is; another attempt has another sequence.
        named_port: the port that the platform set aside, which is then the only candidate.
    """
    return [named_port] if named_port is not None else _candidates(job_id, attempt)


def of_workers(job_id: str, attempt: int, restart: int) -> list[int]:
    """Return ports for workers that bind theirs themselves, seconds later: none that the kernel
    deals out meanwhile.

    Args:
        job_id: the job's id.
        attempt: which start of the job this is.
        restart: how often the workers were started again in it.
    """
    return _candidates(f"{job_id}\0{restart}", attempt)


def listen(master_addr: str, ports: Sequence[int], *, alone: bool = False) -> socket.socket:
    """Return a socket that listens at the first port that is free; one of a job of one node (alone)
    is reached from here only.

    Raises:
        GangError: none is free, or the address does not resolve; the message says what the kernel
            said.
    """
    taken = []
    for port in ports:
        try:
            return network.listen_at(master_addr, port, backlog=_BACKLOG, alone=alone)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise GangError(
                    f"node 0 cannot listen at {master_addr}:{port}: {error.strerror or error}"
                ) from error
            taken.append(str(port))
    raise GangError(
        f"node 0 finds no free port at {master_addr}: {', '.join(taken)} {'is' if len(taken) == 1 else 'are'} taken"
    )
