"""Carry several byte streams with flow control over one pair of descriptors.

Both sides use it. A frame is a header (kind, stream, length), the payload, and a newline. The
newline is for Slurm, which buffers a task's output by lines. Each side may send `WINDOW` bytes of a
stream before the other side grants more, so a slow reader of one stream delays no other stream.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 1 << 19  # bytes of a stream that the receiver stores
MAX_PAYLOAD = 1 << 15  # bytes of one frame
MAX_STREAMS = 4096
# poll(2) promises that a pipe takes this number of bytes. Descriptors that other processes share
# stay in blocking mode.
_SAFE_WRITE = 4096
_MAX_UNSENT = 1 << 18  # bytes for the other side; above it, no stream is read
_ALIVE_INTERVAL = 10.0  # seconds between two signs of life
_HEADER = struct.Struct(">BII")
# macOS's poll(2) does not know terminals.
_Selector = selectors.SelectSelector if sys.platform == "darwin" else selectors.PollSelector

# Kinds of frames.
CONTROL = 1  # a JSON object, which belongs to the users of `Streams`
DATA = 2
END = 3  # the sender sends no more data of the stream
GRANT = 4  # the sender accepts this number of further bytes (4 bytes)
RESET = 5  # the sender accepts no more data of the stream; the payload is the reason
ALIVE = 6  # the sender is alive

MARKER = b"clusterjob-inside-2 "  # begins the line before the first frame; a login may print more
STDIN, STDOUT, STDERR = 0, 1, 2  # streams of a command; a terminal uses the first two

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE  # flags of `wait_for_any`


class FrameError(ValueError):
    """The other side sent something that is not a frame, or more than it may send."""


@dataclass(eq=False)
class Stream:
    """One stream of a `Streams`.

    Attributes:
        number: identifies the stream on both sides.
        source: the descriptor whose bytes are sent; None after its end.
        sink: the descriptor, or the function, for received bytes; None after its end.
        close_source, close_sink: called once, at the end of each.
        credit: number of bytes that the other side accepts.
        waiting: received bytes that are not written yet.
        ending: whether the other side has sent its last byte.
        granted: further bytes that this side accepts, and that it has not granted yet.
        error: why the sink could not be written.
    """

    number: int
    source: int | None = None
    sink: int | Callable[[bytes], None] | None = None
    close_source: Callable[[], None] = lambda: None
    close_sink: Callable[[], None] = lambda: None
    credit: int = WINDOW
    waiting: bytearray = field(default_factory=bytearray)
    ending: bool = False
    granted: int = 0
    error: OSError | None = None

    def end_source(self) -> None:
        """Send nothing more."""
        if self.source is not None:
            self.source = None
            self.close_source()

    def end_sink(self) -> None:
        """Accept nothing more."""
        self.waiting.clear()
        if self.sink is not None:
            self.sink = None
            self.close_sink()


class Streams:
    """Streams over one connection.

    Args:
        reader, writer: descriptors of the connection.
        control: called with (kind, stream number, payload) of each `CONTROL` frame, each frame of
            an unknown kind, and each `RESET` with a reason.

    Attributes:
        closed: whether the other side has closed the connection.
        streams: the streams that have not ended.
        unsent: the frames that are queued.
    """

    def __init__(
        self, reader: int, writer: int, control: Callable[[int, int, bytes], None]
    ) -> None:
        self._reader, self._writer, self._control = reader, writer, control
        self.closed = False
        self.streams: dict[int, Stream] = {}
        self._received = bytearray()
        self.unsent = bytearray()
        self._alive_due = self._heard = time.monotonic()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)

    def add(self, stream: Stream) -> None:
        """Add a stream; the other side adds one with the same number."""
        self.streams[stream.number] = stream

    def send(self, kind: int, number: int = 0, payload: bytes = b"") -> None:
        """Queue a frame."""
        self.unsent += _HEADER.pack(kind, number, len(payload)) + payload + b"\n"

    def tell(self, message: Mapping[str, Any], number: int = 0) -> None:
        """Queue a `CONTROL` frame."""
        self.send(CONTROL, number, payload=json.dumps(message).encode())

    @property
    def written(self) -> bool:
        """Whether all received bytes are written."""
        return not any(stream.waiting for stream in self.streams.values())

    @property
    def reading(self) -> bool:
        """Whether any stream has a source that has not ended."""
        return any(stream.source is not None for stream in self.streams.values())

    @property
    def silence(self) -> float:
        """Seconds since the other side has sent anything; it sends a sign of life every 10 s."""
        return time.monotonic() - self._heard

    def interest(self) -> dict[int, int]:
        """Return the descriptors to wait for, with the flags of each."""
        wanted: defaultdict[int, int] = defaultdict(int)
        if not self.closed:
            wanted[self._reader] |= READ
            if self.unsent:
                wanted[self._writer] |= WRITE
        full = self.closed or len(self.unsent) > _MAX_UNSENT
        for stream in self.streams.values():
            if stream.source is not None and stream.credit and not full:
                wanted[stream.source] |= READ
            if isinstance(stream.sink, int) and stream.waiting:
                wanted[stream.sink] |= WRITE
        return wanted

    def handle(self, ready: Mapping[int, int]) -> None:
        """Read and write the descriptors that are ready, and send a sign of life when it is due.

        Raises:
            FrameError: the other side breaks the protocol.
        """
        if time.monotonic() >= self._alive_due:
            self._alive_due = time.monotonic() + _ALIVE_INTERVAL
            self.send(ALIVE)
        for stream in list(self.streams.values()):
            if isinstance(stream.sink, int) and ready.get(stream.sink, 0) & WRITE:
                self._write(stream, stream.sink)
            if stream.source is not None and ready.get(stream.source, 0) & READ:
                self._read(stream, stream.source)
            self._settle(stream)
        if ready.get(self._reader, 0) & READ and not self.closed:
            self._receive()
        # Grants wait while the other side does not read, so they need no memory.
        for stream in self.streams.values():
            if stream.granted and len(self.unsent) < _MAX_UNSENT:
                self.send(GRANT, stream.number, payload=stream.granted.to_bytes(4, "big"))
                stream.granted = 0
        if self.unsent and not self.closed:
            self._flush()

    def step(self, timeout: float) -> None:
        """Wait for any descriptor, at most `timeout` seconds, and handle it."""
        self.handle(wait_for_any([self], [], timeout))

    def feed(self, data: bytes) -> None:
        """Handle bytes that were already read from the connection.

        Raises:
            FrameError: they are not frames.
        """
        self._received += data
        begin = 0
        while len(self._received) - begin >= _HEADER.size:
            kind, number, size = _HEADER.unpack_from(self._received, begin)
            if size > MAX_PAYLOAD:
                raise FrameError(f"a frame of kind {kind} with {size} bytes")
            payload = begin + _HEADER.size
            if len(self._received) <= payload + size:
                break
            begin = payload + size + 1
            self._dispatch(kind, number, bytes(self._received[payload : begin - 1]))
        del self._received[:begin]

    def _receive(self) -> None:
        data = _some(self._reader, 1 << 17)
        if data is None:
            return
        self.closed = not data
        self._heard = time.monotonic()
        self.feed(data)

    def _flush(self) -> None:
        try:
            sent = os.write(self._writer, self.unsent[: 1 << 17])
        except BlockingIOError:
            return
        except OSError:  # it takes nothing more, but may have sent its last frames
            sent = len(self.unsent)
        del self.unsent[:sent]

    def _dispatch(self, kind: int, number: int, payload: bytes) -> None:
        if kind not in (DATA, END, GRANT, RESET):
            if kind != ALIVE:
                self._control(kind, number, payload)
            return
        stream = self.streams.get(number)
        if stream is None:
            return  # it has ended here
        if kind == DATA:
            self._take(stream, payload)
        elif kind == GRANT:
            stream.credit = min(WINDOW, stream.credit + int.from_bytes(payload, "big"))
        else:
            stream.ending = True
        if kind == RESET:
            if payload:
                self._control(RESET, number, payload)
            stream.end_source()
            stream.end_sink()
        self._settle(stream)

    def _take(self, stream: Stream, data: bytes) -> None:
        if len(stream.waiting) + len(data) > WINDOW or stream.ending:
            raise FrameError(f"more bytes of stream {stream.number} than its window allows")
        if callable(stream.sink):
            stream.sink(data)
            stream.granted = min(WINDOW, stream.granted + len(data))
        elif stream.sink is not None:
            stream.waiting += data

    def _write(self, stream: Stream, sink: int) -> None:
        try:
            count = os.write(sink, stream.waiting[:_SAFE_WRITE])
        except BlockingIOError:
            return
        except OSError as error:
            stream.error = error
            stream.end_sink()
            self.send(RESET, stream.number, payload=(error.strerror or "").encode()[:200])
            return
        del stream.waiting[:count]
        stream.granted = min(WINDOW, stream.granted + count)

    def _read(self, stream: Stream, source: int) -> None:
        data = _some(source, min(stream.credit, MAX_PAYLOAD))
        if data:
            stream.credit -= len(data)
            self.send(DATA, stream.number, payload=data)
        elif data is not None:
            self.send(END, stream.number)
            stream.end_source()

    def _settle(self, stream: Stream) -> None:
        """Close the sink after the last byte, and forget a stream that has ended."""
        if stream.ending and not stream.waiting:
            stream.end_sink()
        if stream.source is None and stream.sink is None:
            self.streams.pop(stream.number, None)


def _some(descriptor: int, most: int) -> bytes | None:
    """Return the bytes that can be read now; empty at the end, None if there are none yet."""
    try:
        return os.read(descriptor, most)
    except BlockingIOError:
        return None
    except OSError:  # EIO: no process has the terminal open any more
        return b""


def add_socket(connection: Streams, number: int, sock: socket.socket) -> None:
    """Add a stream whose ends are a connected socket; the socket is closed after both ends."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):  # the peer has closed it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = Stream(number, source=sock.fileno(), sink=sock.fileno())

    def ended() -> None:
        if stream.source is None and stream.sink is None:
            sock.close()
        elif stream.sink is None:
            with contextlib.suppress(OSError):  # the peer has closed it
                sock.shutdown(socket.SHUT_WR)

    stream.close_source = stream.close_sink = ended
    connection.add(stream)


def wait_for_any(
    connections: Iterable[Streams], more: Iterable[int], timeout: float
) -> dict[int, int]:
    """Wait for several connections, and for further descriptors that are read.

    Returns:
        The descriptors that are ready, with `READ` and `WRITE` flags.
    """
    wanted = defaultdict(int, dict.fromkeys(more, READ))
    for connection in connections:
        for each, flags in connection.interest().items():
            wanted[each] |= flags
    with _Selector() as selector:
        for each, flags in wanted.items():
            selector.register(each, flags)
        return {key.fd: flags for key, flags in selector.select(timeout)}
