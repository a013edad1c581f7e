"""Connections of other clients do not block the listener of the address probe."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from clusterjob.node.host_server import reachability

NONCE = "0123456789abcdef" * 2


@pytest.fixture
def listener() -> Iterator[reachability.Listener]:
    made = reachability.Listener([0], NONCE)
    yield made
    made.close()


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[list[socket.socket]]:
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
    yield peers
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("count", [10, 800])
def test_probe_is_answered_despite_idle_connections(
    listener: reachability.Listener, count: int
) -> None:
    with idle_connections(listener.port, count):
        found = reachability.probe(["127.0.0.1"], listener.port, nonce=NONCE, timeout=20)
    assert found == {"reached": ["127.0.0.1"], "why": {}}


def test_probe_is_answered_after_listener_runs_out_of_descriptors(
    listener: reachability.Listener,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with idle_connections(listener.port, 20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            with contextlib.ExitStack() as held:
                with contextlib.suppress(OSError):
                    while True:
                        held.enter_context(socket.socket())
                time.sleep(0.1)  # the listener meets EMFILE
            found = reachability.probe(["127.0.0.1"], listener.port, nonce=NONCE, timeout=20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found["reached"] == ["127.0.0.1"]


def test_wrong_nonce_gets_no_answer(listener: reachability.Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as peer:
        peer.sendall(b"x" * len(NONCE))
        assert peer.recv(1) == b""


def test_nonce_sent_in_pieces_is_answered(listener: reachability.Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port), 20) as peer:
        for part in (NONCE[:5], NONCE[5:]):
            peer.sendall(part.encode())
            time.sleep(0.05)
        assert peer.recv(100) == reachability.expected_reply(NONCE)


def test_closed_listener_frees_its_port(listener: reachability.Listener) -> None:
    with idle_connections(listener.port, 3):
        listener.close()
    reachability.Listener([listener.port], NONCE).close()
