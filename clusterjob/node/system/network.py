"""What the kernel knows of this machine's addresses: which of them, and which interface, leads to
another host.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Mapping
from typing import Any

_SIOCGIFADDR = 0x8915  # netdevice(7)
# An address that is nobody's (RFC 5737): the way to it is the default route.
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
PATIENCE = 3.0  # seconds for a name: a resolver whose servers do not answer takes half a minute
_lookups: dict[str, _Lookup] = {}  # that are under way


class NoNameServerError(socket.gaierror):
    """The resolver has not come to an end in `PATIENCE`."""


class _Lookup(threading.Thread):
    """One question to the resolver, which cannot be called off: whoever asks waits as long as he
    likes.
    """

    def __init__(self, host: str) -> None:
        super().__init__(name=f"resolve {host}", daemon=True)
        self.begin = time.monotonic()
        self.addresses: list[str] = []
        self.error: OSError | None = None
        self._host = host

    def run(self) -> None:
        try:
            self.addresses = list(
                dict.fromkeys(
                    str(each[4][0])
                    for each in socket.getaddrinfo(self._host, None, type=socket.SOCK_STREAM)
                )
            )
        except (
            UnicodeError
        ):  # a name with an empty or an endless label does not even reach the resolver
            self.error = socket.gaierror(socket.EAI_NONAME, f"{self._host!r} is no host's name")
        except OSError as error:
            self.error = error


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means the own machine on every machine, so no other
    node can be reached there.
    """
    name = host.strip("[]").lower().removesuffix(".")
    return name in _LOOPBACK_NAMES or name.startswith("127.") or name.endswith(".localhost")


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a host, in the resolver's order.

    A resolver that goes on after `PATIENCE` is given up: a later question for the same name hears
    what it has found by then.

    Args:
        host: a name or an address, which is returned as it is.

    Raises:
        NoNameServerError: no name server answers.
        OSError: the name does not resolve; its strerror says why.
    """
    if _is_address(host):
        return [host]
    lookup = _lookups.get(host)
    if lookup is None:
        lookup = _lookups[host] = _Lookup(host)
        lookup.start()
    lookup.join(max(0.0, lookup.begin + PATIENCE - time.monotonic()))
    if lookup.is_alive():
        raise NoNameServerError(
            socket.EAI_AGAIN, f"no name server answered within {PATIENCE:.0f} s"
        )
    _lookups.pop(host, None)
    if lookup.error is not None:
        raise lookup.error
    return lookup.addresses


def connect(host: str, port: int, patience: float) -> socket.socket:
    """Return a TCP connection to a host.

    Args:
        host: its name or address.
        port: where it listens.
        patience: seconds for each of its addresses.

    Raises:
        OSError: the name does not resolve, or none of its addresses answers.
    """
    trouble: OSError = socket.gaierror(socket.EAI_NONAME, "it has no address")
    for address in addresses_of(host):
        try:
            return socket.create_connection((address, port), patience)
        except OSError as error:
            trouble = error
    raise trouble


def _is_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    return True


def own_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return this machine's name as the user knows it: as he wrote it, else the scheduler's, else
    the host's own.
    """
    return environ.get("CLUSTERJOB_HOST") or environ.get("SLURMD_NODENAME") or socket.gethostname()


def address_towards(host: str) -> str | None:
    """Return the local address from which this machine would reach a host, or None when it has no
    route to it.

    Asks the kernel by connecting a UDP socket, which sends nothing. Never asks getfqdn or
    gethostbyname of the own name: they answer 127.0.1.1 on Debian and ip6.arpa names elsewhere
    (pytorch#150532).

    Args:
        host: a name or an address.
    """
    try:
        family, kind, protocol, _, address = _resolve(host, 9, kind=socket.SOCK_DGRAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface, such as eth0, through which this machine would reach a
    host; None if unknown.
    """
    import fcntl

    address = address_towards(host)
    if address is None:
        return None
    if ":" in address:
        return _interface_of_ipv6(address)
    if address.startswith("127."):
        return "lo"  # every 127.x.y.z is lo's, also those that are not its one configured address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def is_own(host: str) -> bool:
    """Return whether a name or an address is one of this machine's."""
    try:
        family, kind, _, _, address = _resolve(host, 0, kind=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def has_interface(name: str) -> bool:
    """Return whether this machine has an interface of this name."""
    return name in {known for _, known in socket.if_nameindex()}


def interface_among(host: str, nnodes: int) -> str | None:
    """Return the name of the interface through which this machine talks with the other nodes of a
    job; None if unknown.

    Args:
        host: node 0's name or address.
        nnodes: nodes of the job. Where there are several, node 0 itself cannot ask for the way to
            its own name: it is ``lo``.
    """
    interface = interface_towards(host)
    if interface == "lo" and nnodes > 1 and not is_loopback(host):
        return interface_towards(_ELSEWHERE)
    return interface


def _resolve(host: str, port: int, kind: int) -> Any:
    return socket.getaddrinfo(addresses_of(host)[0], port, type=kind)[0]


def _interface_of_ipv6(address: str) -> str | None:
    """Return the interface that has an IPv6 address, from proc(5): netdevice(7) has no such
    question for them.
    """
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            return next((fields[5] for fields in map(str.split, file) if fields[0] == wanted), None)
    except OSError:
        return None


def why_unresolvable(host: str) -> str:
    """Return what the resolver has against a name; empty for an address, and for a name that
    resolves here.
    """
    try:
        _resolve(host, 9, kind=socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def listen_at(host: str, port: int, backlog: int, *, alone: bool = False) -> socket.socket:
    """Return a TCP socket that listens on one address of this machine, or on all where the host is
    not its own.

    Args:
        host: the address by which the others reach this machine; behind NAT it may not be one of
            this machine's, and a name of it may mean the loopback interface here.
        port: the port, 0 for any that is free.
        backlog: connections that may wait before the first accept.
        alone: nobody comes from another machine, so that a loopback address will do.

    Raises:
        OSError: the port is taken (EADDRINUSE), or the name does not resolve.
    """
    family, _, _, _, address = _resolve(host, port, kind=socket.SOCK_STREAM)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Debian resolves the own name to 127.0.1.1, where no other machine would get through.
            if str(address[0]).startswith("127.") and not is_loopback(host) and not alone:
                address = ("0.0.0.0", port)  # noqa: S104
            listener.bind(address)
        except OSError as error:
            import errno

            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - reached through NAT
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener
