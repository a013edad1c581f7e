"""Addresses, interfaces and listeners of this machine."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from launching import free_port

from clusterjob.node.system import network

HAS_IPV6 = socket.has_ipv6 and network.address_towards("::1") is not None
LOOPBACK = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")),
]


@pytest.mark.parametrize("address", LOOPBACK)
def test_loopback_address_is_its_own_source_and_is_listened_at_alone(address: str) -> None:
    assert network.address_towards(address) == address
    with network.listen_at(address, 0, backlog=16) as listener:
        assert listener.getsockname()[0] == address


@pytest.mark.parametrize("host", [*LOOPBACK, "localhost", "127.0.1.1"])
def test_loopback_address_is_reached_through_lo(host: str) -> None:
    assert network.interface_towards(host) == "lo"


@pytest.mark.parametrize(
    "host", ["999.1.1.1", "a b", "\0", "node0..cluster", pytest.param("a" * 70, id="long"), "."]
)
def test_invalid_host_has_no_address_and_no_interface(host: str) -> None:
    assert network.address_towards(host) is None
    assert network.interface_towards(host) is None


@pytest.mark.parametrize("host", ["999.1.1.1", "node0..cluster", pytest.param("a" * 70, id="long")])
def test_listening_at_invalid_host_is_error(host: str) -> None:
    with pytest.raises(OSError):
        network.listen_at(host, 0, backlog=16)


def test_address_towards_remote_host_belongs_to_this_machine() -> None:
    address = network.address_towards("192.0.2.1")  # TEST-NET-1, RFC 5737
    if address is None:
        pytest.skip("this machine has no route to elsewhere")
    with socket.socket() as probe:
        probe.bind((address, 0))
    interface = network.interface_towards("192.0.2.1")
    assert interface in [name for _, name in socket.if_nameindex()]


def test_interface_is_unknown_where_the_system_refuses_to_list_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENOTTY, "not Linux")

    monkeypatch.setattr(network, "address_towards", lambda _host: "192.0.2.7")
    monkeypatch.setattr(network.fcntl, "ioctl", refuse)
    assert network.interface_towards("192.0.2.1") is None


def test_listener_at_address_of_other_machine_uses_all_addresses() -> None:
    """Behind NAT, the address that other nodes use is not an address of this machine."""
    port = free_port()
    with (
        network.listen_at("192.0.2.1", port, backlog=16) as listener,
        socket.create_connection(("127.0.0.1", port), 5),
    ):
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


def test_listener_at_several_addresses_is_reached_at_each() -> None:
    assert network.address_towards("255.255.255.255,127.0.0.1") == "127.0.0.1"
    with network.listen_at("127.0.0.1,127.0.0.2", 0, backlog=16) as listener:
        port = listener.getsockname()[1]
        for address in network.addresses_of("127.0.0.1,127.0.0.2"):
            with (
                socket.create_connection((address, port), 5),
                listener.accept()[0] as accepted,
            ):
                assert network.plain_address(accepted.getsockname()[0]) == address


def test_listening_at_used_port_is_error_and_leaves_no_socket() -> None:
    with network.listen_at("127.0.0.1", 0, backlog=16) as listener:
        before = os.listdir("/proc/self/fd")
        # The error's traceback keeps the frame of `listen_at`, with any socket that
        # is still open.
        with pytest.raises(OSError) as caught:
            network.listen_at("127.0.0.1", listener.getsockname()[1], backlog=16)
        assert len(os.listdir("/proc/self/fd")) == len(before)
    assert caught.value.errno == errno.EADDRINUSE


def test_interface_of_own_host_name_is_not_lo_with_several_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian resolves its own host name to 127.0.1.1, an address of ``lo``.

    Other nodes would get an address that is their own.
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
    assert network.interface_among("127.0.0.1", 2) == "lo"  # two nodes on one machine
    with network.listen_at(own, 0, backlog=1) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")


def test_addresses_of_all_are_plain_and_leave_out_names_that_do_not_resolve() -> None:
    hosts = ["192.0.2.1", "::ffff:192.0.2.2", "2001:DB8::1", "nowhere.invalid", "fe80::1%lo"]
    found = {"192.0.2.1", "192.0.2.2", "2001:db8::1", "fe80::1"}
    assert network.addresses_of_all(hosts) == found
    assert network.addresses_of_all(["127.0.1.1"]) == {"127.0.1.1", "127.0.0.1"}
