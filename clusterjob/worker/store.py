"""Open torch's store for the rendezvous of ranks.

A launcher serves the store, or rank 0 serves it and the other ranks wait until rank 0 listens. A
check before torch's client connects detects another program at the store's port.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from clusterjob.errors import PlacementError, RendezvousError
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import network
from clusterjob.node.workers import torch_patches
from clusterjob.worker import once_per_host, siblings

_ANSWER = 2.0  # seconds for a connection, and for its first answer
_NO_ROUTE_GRACE = 3.0  # seconds to wait for a network that starts, or a busy resolver
_PARTING = 5.0  # seconds that rank 0 waits at its end until all ranks have the group
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.04  # seconds between two tries to reach rank 0
_JOINING_PAUSE = 0.01  # seconds between two polls of the number of joined ranks
_BACKLOG = 4096
# Stores that this process serves, by (pid, host, port).
_own: dict[tuple[int, str, int], Any] = {}
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class _ForeignListenerError(OSError):
    """The program that listens at rank 0's port is not torch's store."""


@dataclass(frozen=True)
class GroupStore:
    """The store in which the processes of one group exchange their addresses.

    Attributes:
        store: the group's prefix of torch's store.
        served: whether a launcher's agents serve the store.
        number: index of the group among the groups over this store, from 0.
        whole: the store without the prefix.
        counter: key of the store that holds the number of this rank's next group.
        counted: the value of that key.
    """

    store: Any
    served: bool
    number: int
    whole: Any
    counter: str
    counted: int

    def note_formed(self) -> None:
        """Count the group, so that the next group gets another prefix in all processes."""
        with contextlib.suppress(RuntimeError):  # torch's error for a store that has ended
            self.whole.add(self.counter, self.number + 1 - self.counted)


def open_store(worker: Worker, options: dict[str, Any], timeout: float) -> GroupStore:
    """Return the store in which the processes exchange their addresses.

    Args:
        worker: this process's rank assignment.
        options: options of the process group that will be made.
        timeout: seconds to wait for rank 0.

    Raises:
        PlacementError: the environment has no port of rank 0.
        RendezvousError: the address does not resolve, there is no route to it, its port is taken,
            or rank 0 does not listen in time.
        RuntimeError: torch's error about a launcher's store.
    """
    if worker.topology.master_port is None:
        raise PlacementError(
            f"the environment ({worker.topology.source}) has no port of rank 0: set MASTER_PORT"
        )
    served = _is_served(worker)
    store = (
        _launcher_store(worker, {"timeout": options["timeout"]} if "timeout" in options else {})
        if served
        else _open(worker, timeout)
    )
    # The store counts the groups, because a process may be newer than the first group, such as the
    # children of one trial of a sweep. Rank 0 is in every group; other ranks use its count.
    counter, of_rank_0 = (f"clusterjob/next/{rank}" for rank in (worker.rank, 0))
    counted = store.add(counter, 0)
    number = max(counted, store.add(of_rank_0, 0))
    return GroupStore(
        _group_prefix(store, number),
        served,
        number=number,
        whole=store,
        counter=counter,
        counted=counted,
    )


def _open(worker: Worker, timeout: float) -> Any:
    """Return a TCPStore that rank 0 serves; rank 0 binds the socket first.

    Args:
        worker: this process's rank assignment.
        timeout: seconds to wait for rank 0, and for each request to the store.

    Raises:
        RendezvousError: the address does not resolve, there is no route to it, its port is taken,
            or rank 0 does not listen in time.
    """
    import torch.distributed as dist

    host, port = worker.topology.master_addr, worker.topology.master_port
    assert port is not None
    wait = timedelta(seconds=timeout)
    if worker.rank:
        _await_listener(worker, host, port=port, timeout=timeout)
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)
    address = os.getpid(), host, port
    if address in _own:
        _own[address].set_timeout(wait)
        return _own[address]
    found = siblings.take_listener(port)
    try:
        listener = found or network.listen_at(host, port, backlog=_BACKLOG)
    except OSError as error:
        why = (
            f"rank 0 on {socket.gethostname()} (pid {os.getpid()}) "
            f"cannot listen at {network.with_port(host, port)}: {error.strerror or error}"
        )
        hint = (
            "set MASTER_PORT to another port"
            if error.errno == errno.EADDRINUSE
            else "set MASTER_ADDR to rank 0's machine"
        )
        raise RendezvousError(why, hint) from error
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=wait,
        master_listen_fd=listener.detach(),
    )
    if found is None and torch_patches.has_agent_variables():
        # Under clusterjob's agents a destroyed group keeps its store, so the port stays in use:
        # reuse the store.
        _own[address] = store
    return store


def another_connection(worker: Worker, number: int) -> Any:
    """Return the prefix store that `open_store` returned, over a separate connection.

    Args:
        worker: this process's rank assignment.
        number: index of the group among the groups over this store, from 0.

    Raises:
        OSError: the store cannot be reached any more.
        RuntimeError: torch's error.
    """
    import torch.distributed as dist

    host, port = worker.topology.master_addr, worker.topology.master_port
    assert port is not None
    with network.connect(host, port, timeout=_ANSWER) as link:
        _check_store(link)
    wait = timedelta(seconds=_ANSWER)
    if _is_served(worker):
        return _group_prefix(_launcher_store(worker, {"timeout": wait}), number)
    return _group_prefix(
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
        not torch_patches.has_agent_variables()
        or torch_patches.served_at(master[0], int(master[1])) is not None
    )  # a script may set another master
    return at_master and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and served


def _launcher_store(worker: Worker, wait: dict[str, Any]) -> Any:
    """Return a connection to the launcher's store, with the prefix that an older torch adds."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", worker.rank, worker.world_size, **wait))[0]


def _group_prefix(store: Any, number: int) -> Any:
    import torch.distributed as dist

    # A launcher's store outlives a group and still holds its addresses. With the same keys torch
    # would connect to them, so every group has its own prefix.
    return dist.PrefixStore(f"clusterjob/{number}", store)


def _await_listener(worker: Worker, host: str, port: int, timeout: float) -> None:
    """Wait until rank 0 listens at its port; meanwhile print the error once per host.

    Raises:
        RendezvousError: rank 0 cannot be reached.
    """
    notices = once_per_host.notice_times()
    begin = time.monotonic()
    due, pause = next(notices), _MIN_PAUSE
    turn = None
    try:
        while True:
            try:
                with network.connect(host, port, timeout=_ANSWER) as link:
                    _check_store(link)
                return
            except OSError as error:
                reason = error.strerror or str(error)
                # The resolver has waited for its own timeout.
                silent = isinstance(error, network.NoNameServerError)
                lost = (
                    isinstance(error, (socket.gaierror, _ForeignListenerError))
                    or error.errno in _NO_ROUTE
                )
            waited = time.monotonic() - begin
            text = (
                f"rank {worker.rank} on {socket.gethostname()} "
                f"cannot reach rank 0 at {network.with_port(host, port)}: {reason}"
            )
            if waited > timeout or silent or (lost and waited > _NO_ROUTE_GRACE):
                raise RendezvousError(
                    f"{text}; gave up after {waited:.0f} s",
                    "check MASTER_ADDR and MASTER_PORT: they must be rank 0's",
                )
            if waited > due:
                due = next(notices)
                turn = turn or once_per_host.lock_subject(f"reach {network.with_port(host, port)}")
                if turn:
                    once_per_host.print_line(f"{text}; {waited:.0f} s so far")
            time.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)
    finally:
        if turn:
            turn.close()


def _check_store(link: socket.socket) -> None:
    """Refuse a listener that is not torch's store.

    torch's client would print pages of C++ frames at each try. This sends the client's first
    messages (torch/csrc/distributed/c10d/TCPStoreBackend.hpp, torch 2.3 and newer): VALIDATE and a
    magic number, then PING and a number, which the store sends back. An older store closes the
    connection at the PING, and counts as valid.

    Raises:
        _ForeignListenerError: the answer is not that of torch's store.
        OSError: no answer arrived.
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
        raise _ForeignListenerError(
            errno.EPROTO,
            f"something listens there that is not torch's store: it answers {answer!r}",
        )


def note_joined(store: Any) -> None:
    """Count this process as one that has the group."""
    store.add("joined", 1)


def await_joined(store: Any, world_size: int) -> None:
    """Wait up to 5 s until all ranks have the group, which needs this rank and the store."""
    end = time.monotonic() + _PARTING
    with contextlib.suppress(RuntimeError):  # torch's error for a store that has ended
        while store.add("joined", 0) < world_size and time.monotonic() < end:
            time.sleep(_JOINING_PAUSE)
