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
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from clusterjob.errors import PlacementError, RendezvousError
from clusterjob.node import contract
from clusterjob.node.environments.topology import Worker
from clusterjob.node.system import network
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.workers import torch_patches

_ANSWER = 2.0  # seconds for a connection, and for its first answer
_NO_ROUTE_GRACE = 3.0  # seconds to wait for a network that starts, or a busy resolver
_PARTING = 5.0  # seconds that a rank waits at its end until all ranks have the group
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.04  # seconds between two tries to reach rank 0
_JOINING_PAUSE = 0.01  # seconds between two polls of the number of joined ranks
_BACKLOG = 4096
_SIGNATURE = 64  # characters
# Seconds before the first notice of a process that waits, and between later notices.
_FIRST_NOTICE, _LATER_NOTICES = 4.0, 30.0
_own: dict[tuple[int, str, int], Any] = {}  # rank 0's stores, by pid and address
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def print_notice(text: str) -> None:
    """Write one line of clusterjob to stderr."""
    print(f"clusterjob: {sanitize(text)}", file=sys.stderr, flush=True)


def notice_time(number: int) -> float:
    """Return when a waiting process prints its notice `number`, in seconds from the beginning."""
    return number * _LATER_NOTICES if number else _FIRST_NOTICE


def polls(longest: float) -> Iterator[float]:
    """Yield the seconds that have passed, again and again, with a pause of up to `longest`."""
    begin, pause = time.monotonic(), _SHORTEST_PAUSE
    while True:
        yield time.monotonic() - begin
        time.sleep(pause)
        pause = min(longest, pause * 1.5)


class GroupStore:
    """torch's store for one process group: torch's addresses, and signed values of the ranks.

    torch's store lets any client write any value. Processes that clusterjob's agents start have a
    key (CLUSTERJOB_STORE_KEY), which signs each value; under other launchers the key is empty. A
    signature covers the value, its name and the index of the group.

    Args:
        whole: a client of the store.
        worker: this process's rank assignment.
        served: whether a launcher's agents serve the store.
        number: index of the group among the groups over this store, from 0. The next group does
            not accept the values of this group.

    Attributes:
        torch_store: the group's prefix of the store, in which torch exchanges addresses.
    """

    def __init__(self, whole: Any, worker: Worker, *, served: bool, number: int) -> None:
        import torch.distributed as dist

        # A launcher's store outlives a group and still holds its addresses. With the same keys
        # torch would connect to them, so every group has its own prefix.
        self.torch_store = dist.PrefixStore(f"clusterjob/{number}", whole)
        self._values = dist.PrefixStore("rendezvous", self.torch_store)
        self.worker, self.served = worker, served
        self._whole, self._number = whole, number

    def has(self, name: str) -> bool:
        """Return whether a value was written."""
        return bool(self._values.check([name]))

    def count(self, name: str) -> int:
        """Increase a counter, which is not signed, and return it."""
        return int(self._values.add(name, 1))

    def read(self, name: str) -> str:
        """Return a value that was written.

        Raises:
            RendezvousError: its signature is wrong: no process of this job has written it.
        """
        return self._verify(name, self._values.get(name))

    def offer(self, name: str, value: str = "") -> str:
        """Write a value if there is none; return the stored value; see `read` for errors."""
        signed = self._sign(name, value.encode()) + value
        return self._verify(name, self._values.compare_set(name, "", signed))

    def claim(self, name: str) -> bool:
        """Return whether this rank is the first that claims a task."""
        return self.offer(name, str(self.worker.rank)) == str(self.worker.rank)

    def _sign(self, name: str, value: bytes) -> str:
        import hashlib
        import hmac

        key = os.environ.get(contract.STORE_KEY, "").encode()
        signed = b"\0".join((str(self._number).encode(), name.encode(), value))
        return hmac.new(key, signed, hashlib.sha256).hexdigest()

    def _verify(self, name: str, data: bytes) -> str:
        import hmac

        signature, value = data[:_SIGNATURE], data[_SIGNATURE:]
        if not hmac.compare_digest(signature, self._sign(name, value).encode()):
            raise RendezvousError(
                f"{name!r} in torch's store was written by no process of this job",
                "another program writes to MASTER_ADDR:MASTER_PORT; "
                "`ss -tnp` shows who is connected there",
            )
        return value.decode()

    def reconnect(self) -> GroupStore:
        """Return the same over a new connection: torch's waiting request blocks the first one.

        Raises:
            OSError: the store cannot be reached any more.
            RuntimeError: torch's error.
        """
        with network.connect(*_address(self.worker), timeout=_ANSWER) as link:
            _check_store(link)
        connect = _launcher_store if self.served else _client
        whole = connect(self.worker, timedelta(seconds=_ANSWER))
        return GroupStore(whole, self.worker, served=self.served, number=self._number)

    def note_formed(self) -> None:
        """Count the group, so that the next group gets another prefix in all processes."""
        counter = _counter(self.worker.rank)
        with contextlib.suppress(RuntimeError):  # torch's error for a store that has ended
            self._whole.add(counter, self._number + 1 - self._whole.add(counter, 0))
            self.torch_store.add("joined", 1)

    def await_joined(self) -> None:
        """Wait up to 5 s until all ranks have the group, which needs this rank and the store.

        A rank that left would break the connections of one that still forms the group.
        """
        with contextlib.suppress(RuntimeError):  # torch's error for a store that has ended
            for waited in polls(_JOINING_PAUSE):
                joined = self.torch_store.add("joined", 0)
                if joined >= self.worker.world_size or waited > _PARTING:
                    return


def open_store(worker: Worker, timeout: float) -> GroupStore:
    """Return the store in which the processes exchange their addresses.

    Args:
        worker: this process's rank assignment.
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
    served, wait = _is_served(worker), timedelta(seconds=timeout)
    if served:
        store = _launcher_store(worker, wait)
    elif worker.rank:
        _await_listener(worker, timeout)
        store = _client(worker, wait)
    else:
        store = _serve(worker, wait)
    # The store counts the groups, because a process may be newer than the first group, such as the
    # children of one trial of a sweep. Rank 0 is in every group; other ranks use its count.
    number = max(store.add(_counter(rank), 0) for rank in (worker.rank, 0))
    return GroupStore(store, worker, served=served, number=number)


def _address(worker: Worker) -> tuple[str, int]:
    return worker.topology.master_addr, worker.topology.master_port or 0


def _counter(rank: int) -> str:
    """Return the key of the store that holds the number of a rank's next group."""
    return f"clusterjob/next/{rank}"


def _client(worker: Worker, wait: timedelta) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(*_address(worker), is_master=False, wait_for_workers=False, timeout=wait)


def _serve(worker: Worker, wait: timedelta) -> Any:
    """Return rank 0's store; its socket is bound before, because torch's own errors are pages."""
    import torch.distributed as dist

    host, port = _address(worker)
    address = os.getpid(), host, port
    if address in _own:
        _own[address].set_timeout(wait)
        return _own[address]
    try:
        listener = network.listen_at(host, port, backlog=_BACKLOG)
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
    if torch_patches.has_agent_variables():
        # Under clusterjob's agents a destroyed group keeps its store, so the port stays in use.
        _own[address] = store
    return store


def _is_served(worker: Worker) -> bool:
    """Return whether a launcher's agents serve a store at the master's port."""
    environ, (host, port) = os.environ, _address(worker)
    named = environ.get("MASTER_ADDR", "").strip(" []"), environ.get("MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or named != (host, str(port)):
        return False
    # A script may set another master.
    is_agents = torch_patches.has_agent_variables()
    return not is_agents or torch_patches.served_at(port) is not None


def _launcher_store(worker: Worker, wait: timedelta) -> Any:
    """Return a connection to the launcher's store, with the prefix that an older torch adds."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", worker.rank, worker.world_size, timeout=wait))[0]


def _await_listener(worker: Worker, timeout: float) -> None:
    """Wait until rank 0 listens at its port; one rank of each node prints the error meanwhile.

    Raises:
        RendezvousError: rank 0 cannot be reached.
    """
    host, port = _address(worker)
    # Local rank 0 prints; beside rank 0, for which all wait, it is local rank 1.
    prints = worker.local_rank == (1 if worker.rank == worker.local_rank else 0)
    notices = 0
    for waited in polls(_LONGEST_PAUSE):
        try:
            with network.connect(host, port, timeout=_ANSWER) as link:
                _check_store(link)
            return
        except OSError as error:
            reason = error.strerror or str(error)
            lost = isinstance(error, socket.gaierror) or error.errno in (*_NO_ROUTE, errno.EPROTO)
        text = (
            f"rank {worker.rank} on {socket.gethostname()} "
            f"cannot reach rank 0 at {network.with_port(host, port)}: {reason}"
        )
        if waited > timeout or (lost and waited > _NO_ROUTE_GRACE):
            raise RendezvousError(
                f"{text}; gave up after {waited:.0f} s",
                "check MASTER_ADDR and MASTER_PORT: they must be rank 0's",
            )
        if waited > notice_time(notices):
            notices += 1
            if prints:
                print_notice(f"{text}; {waited:.0f} s so far")


def _check_store(link: socket.socket) -> None:
    """Refuse a listener that is not torch's store.

    torch's client would print pages of C++ frames at each try. This sends the client's first
    messages (torch/csrc/distributed/c10d/TCPStoreBackend.hpp): VALIDATE and a magic number, then
    PING and a number, which the store sends back.

    Raises:
        OSError: the answer is not that of torch's store (EPROTO), or none arrived.
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
    if answer != struct.pack("=I", number):
        raise OSError(
            errno.EPROTO,
            f"something listens there that is not torch's store: it answers {answer!r}",
        )
