"""What the kernel knows of this machine's addresses: which of them, and which interface, leads to another host."""

from __future__ import annotations

import socket
import struct
from typing import Any

_SIOCGIFADDR = 0x8915  # netdevice(7)


def address_towards(host: str) -> str | None:
    """Return the local address from which this machine would reach a host, or None when it has no route to it.

    Asks the kernel by connecting a UDP socket, which sends nothing. Never asks getfqdn or gethostbyname of the own name:
    they answer 127.0.1.1 on Debian and ip6.arpa names elsewhere (pytorch#150532).

    Args:
        host: a name or an address.
    """
    try:
        family, kind, protocol, _, address = _resolve(host, 9, socket.SOCK_DGRAM)
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """Return the name of the interface, such as eth0, through which this machine would reach a host; None if unknown.

    IPv4 only: netdevice(7) has no such question for IPv6, where gloo finds its interface by itself.
    """
    import fcntl

    address = address_towards(host)
    if address is None or ":" in address:
        return None
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


def _resolve(host: str, port: int, kind: int) -> Any:
    try:
        return socket.getaddrinfo(host, port, type=kind)[0]
    except UnicodeError as error:  # a name with an empty or an endless label does not even reach the resolver
        raise socket.gaierror(socket.EAI_NONAME, f"{host!r} is no host's name") from error


def why_unresolvable(host: str) -> str:
    """Return what the resolver has against a name; empty for an address, and for a name that resolves here."""
    try:
        _resolve(host, 9, socket.SOCK_STREAM)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Return a TCP socket that listens on one address of this machine, or on all where the host is not its own.

    Args:
        host: the address by which the others reach this machine; behind NAT it may not be one of this machine's.
        port: the port, 0 for any that is free.
        backlog: connections that may wait before the first accept.

    Raises:
        OSError: the port is taken (EADDRINUSE), or the name does not resolve.
    """
    family, _, _, _, address = _resolve(host, port, socket.SOCK_STREAM)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
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
