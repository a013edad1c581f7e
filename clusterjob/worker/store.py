"""torch's store, over which the processes meet: a launcher's, or one that rank 0 serves itself
while the others wait for its listener.

Whatever else listens in its place is found out before torch's client meets it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from clusterjob.errors import GangError, PlaceError
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import network
from clusterjob.node.workers import torch_patches
from clusterjob.worker import once_per_host, siblings

_ANSWER = 2.0  # seconds for a connection, and for its first answer
_NO_WAY = 3.0  # seconds for which a network may be coming up, or a resolver be busy
_PARTING = 5.0  # seconds that rank 0, once it is through, gives the others to have the group
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.04  # seconds between two tries to reach rank 0
_JOINING_PAUSE = 0.01  # seconds between two looks at who has joined
_BACKLOG = 4096
_own: dict[
    tuple[int, str, int], Any
] = {}  # stores that this process serves, by its pid and their address
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class _StrangerError(OSError):
    """What listens at rank 0's port is not torch's store."""


@dataclass(frozen=True)
class Meeting:
    """Where the processes of one group tell each other their addresses.

    Attributes:
        store: the group's corner of torch's store.
        served: whether a launcher's agents serve the store.
        number: which of the groups over this store it is, from 0.
        whole: the store itself.
        counter: key of the store with the number of the next group of this rank.
        counted: what is there.
    """

    store: Any
    served: bool
    number: int
    whole: Any
    counter: str
    counted: int

    def note_formed(self) -> None:
        """Count the group: the next one has another corner, also where other processes form it."""
        try:
            self.whole.add(self.counter, self.number + 1 - self.counted)
        except RuntimeError:
            pass  # torch's, of a store that is gone


def meeting_store(worker: Worker, options: dict[str, Any], patience: float) -> Meeting:
    """Return the store over which the processes tell each other their addresses.

    Args:
        worker: this process's place.
        options: those of the process group to come.
        patience: seconds to wait for rank 0.

    Raises:
        PlaceError: nothing says where rank 0 could be met.
        GangError: the address does not resolve, there is no way to it, its port is taken, or rank 0
            does not come.
        RuntimeError: torch's own, of a launcher's store.
    """
    if worker.topology.master_port is None:
        raise PlaceError(
            f"the environment ({worker.topology.source}) names no port on which rank 0 could be met: set MASTER_PORT"
        )
    served = _is_served(worker)
    store = (
        _launchers(worker, {"timeout": options["timeout"]} if "timeout" in options else {})
        if served
        else _open(worker, patience)
    )
    # The store counts: of the processes that form this group some may be new, such as the children
    # of one trial of a sweep. Rank 0 is in each group; a rank that only larger groups have follows
    # it.
    counter, of_rank_0 = (f"clusterjob/next/{rank}" for rank in (worker.rank, 0))
    counted = store.add(counter, 0)
    number = max(counted, store.add(of_rank_0, 0))
    return Meeting(
        _corner(store, number), served, number=number, whole=store, counter=counter, counted=counted
    )


def _open(worker: Worker, timeout: float) -> Any:
    """Return a TCPStore of the job's own, where no agent serves one: rank 0 does, on a socket that
    it has bound before.

    Args:
        worker: this process's place.
        timeout: seconds to wait for rank 0, and of the store's requests.

    Raises:
        GangError: the address does not resolve, there is no way to it, its port is taken, or rank 0
            does not come.
    """
    from torch.distributed import TCPStore

    host, port = worker.topology.master_addr, worker.topology.master_port
    assert port is not None
    wait = timedelta(seconds=timeout)
    if worker.rank:
        _await_listener(worker, host, port=port, timeout=timeout)
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    address = os.getpid(), host, port
    if address in _own:
        _own[address].set_timeout(wait)
        return _own[address]
    found = siblings.take_listener(port)
    try:
        listener = found or network.listen_at(host, port, backlog=_BACKLOG)
    except OSError as error:
        why = f"rank 0 on {socket.gethostname()} (pid {os.getpid()}) cannot listen at {where(host, port)}: {error.strerror or error}"
        hint = (
            "MASTER_PORT names another port"
            if error.errno == errno.EADDRINUSE
            else "MASTER_ADDR names rank 0's machine"
        )
        raise GangError(why, hint) from error
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=listener.detach(),
    )
    if found is None and torch_patches.is_of_the_agents():
        _own[address] = (
            # A destroyed group is kept there, and its store with it: the port is not free for the
            # next one.
            store
        )
    return store


def another_connection(worker: Worker, number: int) -> Any:
    """Return the corner that `meeting_store` has returned, over a connection of its own.

    Args:
        worker: this process's place.
        number: which of the groups over this store it is for, from 0.

    Raises:
        OSError: it cannot be reached any more.
        RuntimeError: torch's own.
    """
    import torch.distributed as dist

    host, port = worker.topology.master_addr, worker.topology.master_port
    assert port is not None
    with network.connect(host, port, patience=_ANSWER) as link:
        _check_store(link)
    wait = timedelta(seconds=_ANSWER)
    if _is_served(worker):
        return _corner(_launchers(worker, {"timeout": wait}), number)
    return _corner(
        dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait), number
    )


def _is_served(worker: Worker) -> bool:
    """Return whether a launcher's agents serve a store at the master's port."""
    master = worker.topology.master_addr, str(worker.topology.master_port)
    at_master = (
        os.environ.get("MASTER_ADDR", "").strip(" []"),
        os.environ.get("MASTER_PORT"),
    ) == master
    served = (
        not torch_patches.is_of_the_agents()
        or torch_patches.served_at(master[0], int(master[1])) is not None
    )  # a script may name another one
    return at_master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and served


def _launchers(worker: Worker, wait: dict[str, Any]) -> Any:
    """Return a connection to that store, with the prefix that an older torch gives it."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", worker.rank, worker.world_size, **wait))[0]


def _corner(store: Any, number: int) -> Any:
    import torch.distributed as dist

    # A launcher's store outlives a group, whose addresses it still holds under the very keys of the
    # next one: torch would connect to them. So every group has a corner of its own.
    return dist.PrefixStore(f"clusterjob/{number}", store)


def where(host: str, port: int) -> str:
    """Return an address and a port as one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _await_listener(worker: Worker, host: str, port: int, timeout: float) -> None:
    """Wait until somebody listens at rank 0's port, and say what the kernel says meanwhile: one
    process of a machine for all.
    """
    notices = once_per_host.notices()
    begin = time.monotonic()
    due, pause = next(notices), _SHORTEST_PAUSE
    turn = None
    try:
        while True:
            try:
                with network.connect(host, port, patience=_ANSWER) as link:
                    _check_store(link)
                return
            except OSError as error:
                reason = error.strerror or str(error)
                silent = isinstance(error, network.NoNameServerError)  # which has taken its time
                lost = (
                    isinstance(error, (socket.gaierror, _StrangerError)) or error.errno in _NO_ROUTE
                )
            waited = time.monotonic() - begin
            text = f"rank {worker.rank} on {socket.gethostname()} cannot reach rank 0 at {where(host, port)}: {reason}"
            if waited > timeout or silent or (lost and waited > _NO_WAY):
                raise GangError(
                    f"{text}; gave up after {waited:.0f} s",
                    "MASTER_ADDR and MASTER_PORT say where rank 0 is",
                )
            if waited > due:
                due = next(notices)
                turn = turn or once_per_host.take_turn(f"reach {where(host, port)}")
                if turn:
                    once_per_host.say(f"{text}; {waited:.0f} s so far")
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
    finally:
        if turn:
            turn.close()


def _check_store(link: socket.socket) -> None:
    """Refuse whatever listens in the place of torch's store: its client would write pages of C++
    frames at each try.

    The client's own first words (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, torch 2.3 and
    newer): VALIDATE and a magic number, PING and a number, which the store sends back. An older
    store hangs up at the PING, and is left to torch.

    Raises:
        _StrangerError: something else has answered.
        OSError: no answer came.
    """
    number = os.getpid() & 0xFFFFFFFF
    link.settimeout(_ANSWER)
    link.sendall(struct.pack("=BIBI", 0, 0x3C85F7CE, 13, number))
    try:
        answer = link.recv(4, socket.MSG_WAITALL)
    except TimeoutError:
        raise OSError(
            errno.ETIMEDOUT, "something listens there that does not answer as torch's store does"
        ) from None
    except ConnectionError:
        return
    if answer and answer != struct.pack("=I", number):
        raise _StrangerError(
            errno.EPROTO,
            f"something listens there that is not torch's store: it answers {answer!r}",
        )


def note_joined(store: Any) -> None:
    """Note that this process has the group: it needs the store no longer."""
    store.add("joined", 1)


def await_joined(store: Any, world_size: int) -> None:
    """Wait, some seconds at most, until all have the group: rank 0, which serves the store, may be
    through before them.
    """
    end = time.monotonic() + _PARTING
    try:
        while store.add("joined", 0) < world_size and time.monotonic() < end:
            time.sleep(_JOINING_PAUSE)
    except RuntimeError:
        pass  # torch's, of a store that is gone
