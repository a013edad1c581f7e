"""What PaddlePaddle's processes want to know beside torch's variables: an endpoint each, and a port
where they meet.

Rank 0 binds PADDLE_MASTER itself and can be handed no socket. So each agent holds ports for its
workers: bound, and never listening, with SO_REUSEADDR. Linux gives such a port to nobody who asks
for any port, nor to a connection that goes out, while a process that sets SO_REUSEADDR, as
PaddlePaddle and Python's servers do, can bind it and listen.

Source: PaddlePaddle 3.3.1, python/paddle/distributed/parallel.py and
launch/controllers/collective.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence

from clusterjob.node.program import Program
from clusterjob.node.system import network

# What is set for each worker; a job started from inside another must not inherit them.
VARIABLES = (
    "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_RANK_IN_NODE",
    "PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE", "FLAGS_selected_gpus",
)  # fmt: skip
_BACKEND = "PADDLE_DISTRI_BACKEND"
# Of PADDLE_TRAINER_ENDPOINTS: about 4,500 processes. Linux starts no program with a variable of
# more than 131,072 bytes.
_LONGEST = 100_000


class HeldPorts:
    """Ports of this machine that are kept for processes which will bind them themselves, until
    `close`.
    """

    def __init__(self, count: int) -> None:
        self._holders: list[socket.socket] = []
        with contextlib.suppress(OSError):  # too many open files: what cannot be held is not named
            for _ in range(count):
                holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                self._holders.append(holder)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                holder.bind(("", 0))
        self.ports = [int(holder.getsockname()[1]) for holder in self._holders]
        if len(self.ports) < count or 0 in self.ports:
            self.close()

    def close(self) -> None:
        """Let go of the ports."""
        for holder in self._holders:
            holder.close()
        self._holders, self.ports = [], []


def own_address(master_addr: str, node_rank: int) -> str:
    """Return the address by which the other nodes reach this one.

    Args:
        master_addr: node 0's, as all of them know it.
        node_rank: this node's index.
    """
    return (
        master_addr
        if node_rank == 0
        else network.address_towards(master_addr) or network.own_name()
    )


def endpoint(address: str, port: int) -> str:
    """Return an address and a port as one text."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def may_be_used(program: Program) -> bool:
    """Return whether this node's workers may be PaddlePaddle's: its interpreter has it, or a
    command brings one of its own.

    Args:
        program: what each worker runs.
    """
    import importlib.util

    return not program.is_python or importlib.util.find_spec("paddle") is not None


def listed(endpoints: Sequence[str]) -> str:
    """Return PADDLE_TRAINER_ENDPOINTS; empty where it would be longer than an environment may
    carry: gloo and NCCL do without.
    """
    text = ",".join(endpoints)
    return text if len(text) <= _LONGEST else ""


def backend_default(environ: Mapping[str, str], gpus: int) -> dict[str, str]:
    """Return the backend for a node without GPUs, as PaddlePaddle's launcher chooses it, unless the
    user has set one.

    Args:
        environ: the environment that the workers inherit.
        gpus: GPUs that a worker sees.
    """
    return {} if gpus or _BACKEND in environ else {_BACKEND: "gloo"}
