"""Resolve hosts, find local addresses and interfaces, connect and listen over TCP."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from clusterjob.node.system import files

_SIOCGIFCONF = 0x8912  # netdevice(7)
_IFREQ = struct.Struct("16s4x4s16x")  # name and IPv4 address
_UNUSED = 0x60  # flags of an IPv6 address: deprecated, tentative
# A documentation address (RFC 5737): the route to it is the default route.
_ELSEWHERE = "198.51.100.1"
_LOOPBACK_NAMES = {
    "localhost",
    "localhost.localdomain",
    "localhost6",
    "ip6-localhost",
    "ip6-loopback",
    "::1",
    "0.0.0.0",  # noqa: S104
    "::",
}
TIMEOUT = 3.0  # seconds for a name: a resolver takes half a minute if no server answers
# The running lookups by host name, each with the time of its begin.
_lookups: dict[str, tuple[float, Future[list[str]]]] = {}


class NoNameServerError(socket.gaierror):
    """The resolver has not answered within `TIMEOUT` seconds."""


def _look_up(host: str, future: Future[list[str]]) -> None:
    """Set the result of a lookup, in a thread: getaddrinfo cannot be cancelled."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        future.set_result(list(dict.fromkeys(str(each[4][0]) for each in found)))
    except UnicodeError:  # a part of the name between two dots is empty or too long
        future.set_exception(socket.gaierror(socket.EAI_NONAME, f"{host!r} is not a host name"))
    except OSError as error:
        future.set_exception(error)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is loopback, so that no other node can use it."""
    name = host.strip("[]").lower().removesuffix(".")
    return name in _LOOPBACK_NAMES or name.startswith("127.") or name.endswith(".localhost")


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host, in the resolver's order.

    The call gives up after `TIMEOUT` seconds, and the lookup continues: a later call for the same
    name gets its result.

    Args:
        host: a name, an address, or several addresses of one machine with commas between them.

    Raises:
        NoNameServerError: no name server answers.
        OSError: the name does not resolve; its strerror is the reason.
    """
    if "," in host or "%" in host:  # getaddrinfo would lose the zone of fe80::1%eth0
        return host.split(",")
    lookup = _lookups.get(host)
    if lookup is None:
        lookup = _lookups[host] = (time.monotonic(), Future())
        threading.Thread(target=_look_up, args=(host, lookup[1]), daemon=True).start()
    begin, future = lookup
    if not wait([future], max(0.0, begin + TIMEOUT - time.monotonic())).done:
        raise NoNameServerError(socket.EAI_AGAIN, f"no name server answered within {TIMEOUT:.0f} s")
    _lookups.pop(host, None)
    return future.result()


def addresses_of_all(hosts: Iterable[str]) -> set[str]:
    """Return the addresses of those hosts that resolve now; see `plain_address`."""
    found = set()
    for host in hosts:
        try:
            found |= set(map(plain_address, addresses_of(host)))
        except NoNameServerError:
            break  # it would not answer for the others either
        except OSError:
            continue
    # Debian resolves its own name to 127.0.1.1, but connects from 127.0.0.1.
    return found | {"127.0.0.1"} if "127.0.1.1" in found else found


def plain_address(address: str) -> str:
    """Return an address without its zone, and an IPv4-mapped one as IPv4."""
    import ipaddress

    plain = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(plain, "ipv4_mapped", None) or plain)


def connect(host: str, port: int, timeout: float) -> socket.socket:
    """Return a TCP connection to a host.

    Args:
        host: its name or address.
        port: the port on which it listens.
        timeout: timeout in seconds for each of its addresses.

    Raises:
        OSError: the name does not resolve, or none of its addresses answers; that of the last.
    """
    *others, last = addresses_of(host)
    for address in others:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout)
    return socket.create_connection((last, port), timeout)


def address_towards(host: str) -> str | None:
    """Return the local address from which this machine reaches a host; None without a route.

    The function connects a UDP socket, which sends nothing, and reads the address that the kernel
    chose. getfqdn and gethostbyname are not used: for this machine's own name they return 127.0.1.1
    on Debian, and ip6.arpa names elsewhere (pytorch#150532).

    Args:
        host: a name, an address, or several addresses with commas between them, of which the first
            with a route counts.
    """
    for each in host.split(","):
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = _resolve(each, 9, kind=socket.SOCK_DGRAM)
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def interface_towards(host: str) -> str | None:
    """Return the interface, such as eth0, through which this machine reaches a host, or None."""
    address = address_towards(host) or ""
    if address.startswith("127."):
        return "lo"  # lo has every 127.x.y.z, but only one of them is configured
    return interfaces().get(address.partition("%")[0])


def interfaces() -> dict[str, str]:
    """Return the interface of each address of this machine that may be used, IPv4 first.

    Sources: netdevice(7) for IPv4, /proc/net/if_inet6 for IPv6.
    """
    room = array.array("B", bytes(1 << 16))
    asked = struct.pack("iL", len(room), room.buffer_info()[0])
    size = 0  # outside of Linux, or in a sandbox, the request is refused
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        size, _ = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    found = {}
    for label, address in _IFREQ.iter_unpack(room[:size]):
        name = label.rstrip(b"\0").partition(b":")[0]  # eth0:1 is a label of eth0
        found[socket.inet_ntoa(address)] = name.decode()
    for row in files.read_text("/proc/net/if_inet6").splitlines():
        digits, _, _, _, flags, name = row.split()
        if not int(flags, 16) & _UNUSED:
            found[socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))] = name
    return found


def is_own(host: str) -> bool:
    """Return whether a name or an address belongs to this machine."""
    try:
        family, kind, _, _, address = _resolve(host, 0, kind=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def with_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_among(host: str, nnodes: int) -> str | None:
    """Return the interface through which this machine reaches the job's other nodes, or None.

    Args:
        host: node 0's name or address.
        nnodes: number of nodes of the job. With several nodes, node 0 uses the default route,
            because the route to its own name is ``lo``.
    """
    interface = interface_towards(host)
    if interface == "lo" and nnodes > 1 and not is_loopback(host):
        return interface_towards(_ELSEWHERE)
    return interface


def _resolve(host: str, port: int, kind: int) -> Any:
    return socket.getaddrinfo(addresses_of(host)[0], port, type=kind)[0]


def why_unresolvable(host: str) -> str:
    """Return why this machine cannot resolve a name; empty for an address or a resolvable name."""
    try:
        _resolve(host, 9, kind=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def listen_at(host: str, port: int, backlog: int, *, alone: bool = False) -> socket.socket:
    """Return a TCP socket that listens on one address of this machine, or on all addresses.

    Args:
        host: the address by which other machines reach this machine. Behind NAT it may not be an
            address of this machine. Its name may also resolve to loopback on this machine. In both
            cases, and for several addresses, the socket listens on all addresses.
        port: the port; 0 for any free port.
        backlog: maximum connections that wait before the first accept.
        alone: whether all clients run on this machine, so that a loopback address is enough.

    Raises:
        OSError: the port is taken (EADDRINUSE), or the name does not resolve.
    """
    if "," not in host:
        family, _, _, _, address = _resolve(host, port, kind=socket.SOCK_STREAM)
        # Debian resolves its own name to 127.0.1.1, which other machines cannot reach.
        if alone or is_loopback(host) or not str(address[0]).startswith("127."):
            try:
                return socket.create_server(address, family=family, backlog=backlog)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise OSError(error.errno, os.strerror(error.errno or 0)) from error
                # The address is not this machine's: clients connect through NAT.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
