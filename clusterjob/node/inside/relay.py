"""Connect streams of the submitter to TCP ports of this node."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct

from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import FrameError, Stream, Streams

PORT = struct.Struct(">H")  # the payload of `streams.OPEN`
_ADDRESSES = ("127.0.0.1", "::1")  # a server on "localhost" may listen on either
_CONNECT_TIMEOUT = 2.0  # seconds; loopback answers at once, unless the server's backlog is full


def add_socket(connection: Streams, number: int, sock: socket.socket) -> None:
    """Add a stream whose ends are a connected socket; the socket is closed after both ends."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # the peer has closed it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = Stream(number, source=sock.fileno(), sink=sock.fileno())

    def ended(how: int) -> None:
        with contextlib.suppress(OSError):  # the peer has closed it
            if stream.done:
                sock.close()
            else:
                sock.shutdown(how)

    stream.close_source = lambda: ended(socket.SHUT_RD)
    stream.close_sink = lambda: ended(socket.SHUT_WR)
    connection.add(stream)


def open_connection(connection: Streams, number: int, payload: bytes) -> None:
    """Connect to the port that the payload names, and add the stream; reset it on an error.

    Raises:
        FrameError: the payload names no port.
    """
    if len(payload) != PORT.size:
        raise FrameError("a malformed port")
    (port,) = PORT.unpack(payload)
    code = 0
    for address in _ADDRESSES:
        try:
            sock = socket.create_connection((address, port), _CONNECT_TIMEOUT)
        except OSError as error:
            code = code or error.errno or errno.ETIMEDOUT
            continue
        add_socket(connection, number, sock)
        return
    connection.send(streams.RESET, number, payload=f"{port}: {os.strerror(code)}".encode())
