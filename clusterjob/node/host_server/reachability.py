"""Find an address of node 0 that other hosts can reach: try each of its addresses."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, cast

from clusterjob.node.system import files

_LOOPBACK = ("127.", "::1")
_PEER_TIMEOUT = 2.0  # seconds for a peer to send the nonce
_MAX_PEERS = 500  # open connections; a new one replaces the oldest


def own_addresses() -> list[str]:
    """Return this machine's addresses, IPv4 first, without loopback and link-local ones."""
    found: list[str] = []
    lines = files.read_text("/proc/net/fib_trie").splitlines()
    for line, following in itertools.pairwise(lines):
        if following.strip() == "/32 host LOCAL" and "|-- " in line:
            address = line.partition("|-- ")[2].strip()
            if not address.startswith(_LOOPBACK) and address not in found:
                found.append(address)
    rows = map(str.split, files.read_text("/proc/net/if_inet6").splitlines())
    for digits, _, _, scope, flags, _ in rows:
        # Global scope, neither deprecated nor tentative.
        if scope == "00" and not int(flags, 16) & 0x60:
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def expected_reply(nonce: str) -> bytes:
    """Return the reply of a listener that knows the nonce."""
    return hashlib.sha256(f"clusterjob probe {nonce}".encode()).hexdigest().encode()


class Listener:
    """Listens on the coordinator's future port and answers peers that send the nonce.

    Args:
        ports: the coordinator's candidate ports, in order; the first free one is used.
        nonce: the secret that a peer must send.

    Raises:
        OSError: no port is free, or this process may open no more files.
    """

    def __init__(self, ports: Sequence[int], nonce: str) -> None:
        self._nonce = nonce
        # Open it here, not in the thread, so that the caller gets the error.
        self._selector = selectors.DefaultSelector()
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
        # By peer: when it connected, and the bytes that it has sent. The oldest peer comes first.
        peers: dict[socket.socket, tuple[float, bytearray]] = {}
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
                now, surplus = time.monotonic(), len(peers) - _MAX_PEERS
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
        except OSError:  # EMFILE: a descriptor becomes free when a connected peer expires
            time.sleep(0.01)
            return
        peer.setblocking(False)
        peers[peer] = (time.monotonic(), bytearray())
        selector.register(peer, selectors.EVENT_READ)

    def _hear(self, peer: socket.socket, heard: bytearray) -> bool:
        """Read from a peer, and reply to the nonce; return whether to close the connection."""
        try:
            data = peer.recv(len(self._nonce) - len(heard))
            heard += data
            if data and len(heard) < len(self._nonce):
                return False
            if hmac.compare_digest(bytes(heard), self._nonce.encode()):
                peer.sendall(expected_reply(self._nonce))
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Stop listening; the coordinator can use the port when this returns."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(5)
        self._socket.close()


def _listen(ports: Sequence[int]) -> socket.socket:
    last_error = OSError("no port is free")
    for port in ports:
        for family in (socket.AF_INET6, socket.AF_INET):
            try:
                return socket.create_server(
                    ("", port),
                    backlog=1024,
                    family=family,
                    dualstack_ipv6=family == socket.AF_INET6,
                )
            except OSError as error:
                last_error = error
            except ValueError:  # this machine has no IPv6
                pass
    raise last_error


def probe(addresses: Sequence[str], port: int, nonce: str, timeout: float) -> dict[str, Any]:
    """Try to reach a listener at each of its addresses in parallel.

    Args:
        addresses: the listener's addresses.
        port: its port.
        nonce: the secret to send.
        timeout: seconds for all addresses together.

    Returns:
        ``reached``: the addresses at which it replied; ``why``: the error of each other address.
    """
    reached: list[str] = []
    why: dict[str, str] = {}

    def attempt(address: str) -> None:
        try:
            with socket.create_connection((address, port), timeout) as link:
                link.sendall(nonce.encode())
                wanted = expected_reply(nonce)
                heard = b""
                while len(heard) < len(wanted) and (data := link.recv(len(wanted) - len(heard))):
                    heard += data
            if heard == wanted:
                reached.append(address)
            else:
                why[address] = "another program answers"
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
