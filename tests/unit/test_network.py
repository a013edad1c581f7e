"""What the kernel knows of this machine's addresses."""

from __future__ import annotations

import errno
import socket

import pytest

from clusterjob.node.system import network

HAS_IPV6 = socket.has_ipv6 and network.address_towards("::1") is not None


def test_loopback_leads_to_itself() -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_towards("127.0.0.1") == "lo"
    assert network.interface_towards("localhost") == "lo"


def test_every_address_of_the_loopback_block_is_lo_s() -> None:
    assert network.interface_towards("127.0.1.1") == "lo"


@pytest.mark.parametrize(
    "host", ["999.1.1.1", "a b", "\0", "node0..cluster", pytest.param("a" * 70, id="long"), "."]
)
def test_a_host_that_is_none_leads_nowhere(host: str) -> None:
    assert network.address_towards(host) is None
    assert network.interface_towards(host) is None


@pytest.mark.parametrize("host", ["999.1.1.1", "node0..cluster", pytest.param("a" * 70, id="long")])
def test_nobody_listens_at_a_host_that_is_none(host: str) -> None:
    with pytest.raises(OSError):
        network.listen_at(host, 0, backlog=16)


def test_the_address_towards_elsewhere_is_one_of_this_machine_s() -> None:
    address = network.address_towards("192.0.2.1")  # TEST-NET-1, RFC 5737
    if address is None:
        pytest.skip("this machine has no route to elsewhere")
    with socket.socket() as probe:
        probe.bind((address, 0))
    interface = network.interface_towards("192.0.2.1")
    assert interface in [name for _, name in socket.if_nameindex()]


def test_the_interface_of_an_ipv6_address() -> None:
    if not HAS_IPV6:
        pytest.skip("no IPv6 here")
    assert network.address_towards("::1") == "::1"
    assert network.interface_towards("::1") == "lo"


def test_a_listener_is_bound_to_the_one_address() -> None:
    with network.listen_at("127.0.0.1", 0, backlog=16) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        with socket.create_connection((host, port), 5):
            pass


def test_a_listener_of_ipv6() -> None:
    if not HAS_IPV6:
        pytest.skip("no IPv6 here")
    with network.listen_at("::1", 0, backlog=16) as listener:
        assert listener.getsockname()[0] == "::1"


def test_an_address_of_another_machine_means_all_of_this_one() -> None:
    """Behind NAT the address by which the others come is not this machine's own."""
    with (
        network.listen_at("192.0.2.1", 0, backlog=16) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), 5),
    ):
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_an_error_and_leaks_nothing() -> None:
    with (
        network.listen_at("127.0.0.1", 0, backlog=16) as listener,
        pytest.raises(OSError) as caught,
    ):
        network.listen_at("127.0.0.1", listener.getsockname()[1], backlog=16)
    assert caught.value.errno == errno.EADDRINUSE


def test_the_backlog_holds_early_clients() -> None:
    with network.listen_at("127.0.0.1", 0, backlog=64) as listener:
        clients = [socket.create_connection(listener.getsockname(), 5) for _ in range(60)]
        for client in clients:
            client.close()


def test_node_0_of_several_does_not_take_the_way_to_its_own_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian resolves the own name to 127.0.1.1, to which ``lo`` leads: the others would be told an
    address that is their own.
    """
    own = socket.gethostname()
    answer = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: answer if host == own else real(host, *rest, **more),
    )
    assert network.interface_towards(own) == "lo"
    assert network.interface_among(own, 1) == "lo"
    assert network.interface_among(own, 2) == network.interface_towards("198.51.100.1") != "lo"
    assert network.interface_among("127.0.0.1", 2) == "lo"  # a rehearsal on one machine
    with network.listen_at(own, 0, backlog=1) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_an_interface_is_there_or_not() -> None:
    assert network.has_interface("lo")
    assert not network.has_interface("missing0")
