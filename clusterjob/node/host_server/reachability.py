"""Where node 0 can truly be reached: its own addresses, asked of the kernel, and tried from the
other hosts.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

_LOOPBACK = ("127.", "::1")
_PEER_TIMEOUT = 2.0  # seconds in which a peer has to send the nonce
_MOST_PEERS = 500  # connections that are held at a time; the oldest is dropped for a new one


def own_addresses() -> list[str]:
    """Return this machine's addresses but the loopback's and those of one link alone, IPv4 before
    IPv6.
    """
    found: list[str] = []
    try:
        lines = Path("/proc/net/fib_trie").read_text().splitlines()
    except OSError:
        lines = []
    for line, following in itertools.pairwise(lines):
        if following.strip() == "/32 host LOCAL" and "|-- " in line:
            address = line.partition("|-- ")[2].strip()
            if not address.startswith(_LOOPBACK) and address not in found:
                found.append(address)
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        rows = []
    for digits, _, _, scope, flags, _ in rows:
        if (
            scope == "00" and not int(flags, 16) & 0x60
        ):  # global, and neither deprecated nor tentative
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def answer_to(nonce: str) -> bytes:
    """Return what the right listener answers."""
    return hashlib.sha256(f"clusterjob probe {nonce}".encode()).hexdigest().encode()


class Listener:
    """Listens where the lead will, and answers those who try.

    Args:
        ports: where the lead may listen, in order; the first that is free is taken.
        nonce: what a caller has to send.

    Raises:
        OSError: none is free, or this process may open no more files.
    """

    def __init__(self, ports: Sequence[int], nonce: str) -> None:
        self._nonce = nonce
        self._selector = (
            selectors.DefaultSelector()
        )  # here, where the caller sees that it cannot be opened
        try:
            self._socket = _listen(ports)
        except OSError:
            self._selector.close()
            raise
        self._socket.setblocking(False)
        self._closed = False
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        peers: dict[
            socket.socket, tuple[float, bytearray]
        ] = {}  # when each connected, and what it has sent; the oldest first
        with self._selector as selector:
            selector.register(self._socket, selectors.EVENT_READ)

            def drop(peer: socket.socket) -> None:
                del peers[peer]
                selector.unregister(peer)
                peer.close()

            while not self._closed:
                for key, _ in selector.select(0.2):
                    if key.fileobj is self._socket:
                        self._accept(selector, peers)
                    elif self._hear(peer := cast("socket.socket", key.fileobj), peers[peer][1]):
                        drop(peer)
                now, surplus = time.monotonic(), len(peers) - _MOST_PEERS
                for index, (peer, (since, _)) in enumerate(list(peers.items())):
                    if index < surplus or now - since > _PEER_TIMEOUT:
                        drop(peer)
            for peer in list(peers):
                drop(peer)

    def _accept(
        self, selector: selectors.BaseSelector, peers: dict[socket.socket, tuple[float, bytearray]]
    ) -> None:
        try:
            peer, _ = self._socket.accept()
        except OSError:  # EMFILE: those who are connected expire, then there is room again
            time.sleep(0.01)
            return
        peer.setblocking(False)
        peers[peer] = (time.monotonic(), bytearray())
        selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket, heard: bytearray) -> bool:
        """Read what a peer has sent, and answer the nonce; return whether the peer is done with."""
        try:
            data = peer.recv(len(self._nonce) - len(heard))
            heard += data
            if data and len(heard) < len(self._nonce):
                return False
            if hmac.compare_digest(bytes(heard), self._nonce.encode()):
                peer.sendall(answer_to(self._nonce))
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Stop listening; the port is free for the lead when this returns."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        self._thread.join(5)
        self._socket.close()


def _listen(ports: Sequence[int]) -> socket.socket:
    trouble: OSError | None = None
    for port in ports:
        try:
            return socket.create_server(
                ("", port), backlog=1024, family=socket.AF_INET6, dualstack_ipv6=True
            )
        except (OSError, ValueError) as error:
            try:
                return socket.create_server(("", port), backlog=1024)
            except OSError:
                trouble = error if isinstance(error, OSError) else None
    raise trouble or OSError("no port is free")


def probe(addresses: Sequence[str], port: int, nonce: str, timeout: float) -> dict[str, Any]:
    """Try to reach a listener at each of its addresses, all at once.

    Args:
        addresses: where it says it is.
        port: where it said it listens.
        nonce: what it wants to hear.
        timeout: seconds for all.

    Returns:
        ``reached``: the addresses at which it answered; ``why``: for each other one what the kernel
            said.
    """
    reached: list[str] = []
    why: dict[str, str] = {}

    def attempt(address: str) -> None:
        try:
            with socket.create_connection((address, port), timeout) as link:
                link.sendall(nonce.encode())
                wanted = answer_to(nonce)
                heard = b""
                while len(heard) < len(wanted) and (data := link.recv(len(wanted) - len(heard))):
                    heard += data
            if heard == wanted:
                reached.append(address)
            else:
                why[address] = "somebody else answers"
        except TimeoutError:
            why[address] = "no answer"
        except OSError as error:
            why[address] = (error.strerror or str(error)).lower()

    threads = [
        threading.Thread(target=attempt, args=(address,), daemon=True) for address in addresses
    ]
    end = time.monotonic() + timeout + 1
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {
        "reached": [address for address in addresses if address in reached],
        "why": {
            address: why.get(address, "no answer")
            for address in addresses
            if address not in reached
        },
    }
