"""The streams of `exec` and `forward`: flow control, ends, and what a hostile side may send."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterjob.node.inside import program, streams
from clusterjob.node.inside.streams import FrameError, Stream, Streams
from clusterjob.node.system import network


class Pair:
    """Two connected `Streams`."""

    def __init__(self) -> None:
        self.controls: list[tuple[int, int, bytes]] = []
        self.ends = socket.socketpair()
        self.near, self.far = (
            Streams(end.fileno(), end.fileno(), control=lambda *seen: self.controls.append(seen))
            for end in self.ends
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.near.step(0.0)
            self.far.step(0.0)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for end in made.ends:
        end.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Return the ends of a local stream."""
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


def feeder(received: list[bytes]) -> Streams:
    """Return streams whose connection is never used: frames are fed to them."""
    connection = Streams.__new__(Streams)
    connection.__dict__.update(
        closed=False, streams={}, _received=bytearray(), unsent=bytearray(),
        _reader=-1, _writer=-1, _control=lambda *_: None,
    )  # fmt: skip
    connection.add(Stream(1, sink=received.append))
    return connection


def frame(kind: int, number: int, payload: bytes) -> bytes:
    return struct.pack(">BII", kind, number, len(payload)) + payload + b"\n"


Ends = tuple[socket.socket, socket.socket]
HAS_IPV6 = socket.has_ipv6 and network.address_towards("::1") is not None


def test_bytes_and_end_arrive_in_order(pair: Pair, ends: Ends) -> None:
    source, writer = ends
    received: list[bytes] = []
    pair.near.add(Stream(1, source=source.fileno()))
    pair.far.add(Stream(1, sink=received.append, close_sink=lambda: received.append(b"end")))
    sent = [b"%d\n" % number * 100 for number in range(50)]
    for data in sent:
        writer.sendall(data)
        pair.step(3)
    writer.close()
    pair.step(20)
    assert b"".join(received) == b"".join([*sent, b"end"])
    assert not pair.near.streams
    assert not pair.far.streams


def test_last_frames_are_read_after_the_other_side_takes_nothing_more(pair: Pair) -> None:
    """A program that has sent its last bytes and its end does not wait for grants."""
    received: list[bytes] = []
    pair.near.add(Stream(1, sink=received.append))
    _, other = pair.ends
    other.sendall(frame(streams.DATA, 1, b"last") + frame(streams.CONTROL, 0, b"7"))
    other.shutdown(socket.SHUT_RD)
    pair.near.send(streams.ALIVE)
    other.close()
    for _ in range(3):
        pair.near.step(0.0)
    assert (received, pair.controls) == ([b"last"], [(streams.CONTROL, 0, b"7")])
    assert pair.near.closed


def test_unread_stream_stops_at_its_window_and_others_continue(pair: Pair, ends: Ends) -> None:
    source, writer = ends
    reader, blocked = os.pipe()
    os.set_blocking(blocked, False)
    received: list[bytes] = []
    unread = Stream(1, sink=blocked, close_sink=lambda: os.close(blocked))
    with open("/dev/zero", "rb") as zeros, open(reader, "rb") as output:
        pair.near.add(Stream(1, source=zeros.fileno()))
        pair.far.add(unread)
        pair.near.add(Stream(2, source=source.fileno()))
        pair.far.add(Stream(2, sink=received.append))
        pair.step(300)
        held = len(unread.waiting)
        assert 0 < held <= streams.WINDOW
        writer.sendall(b"still here")
        pair.step(5)
        assert received == [b"still here"]
        assert len(unread.waiting) == held
        output.read(1 << 16)
        pair.step(20)
        assert output.read(1 << 16) == bytes(1 << 16)
    unread.end_sink()


def test_broken_sink_stops_the_source(pair: Pair, ends: Ends) -> None:
    broken, other = ends
    other.close()
    closed: list[int] = []
    with open("/dev/zero", "rb") as zeros:
        pair.near.add(Stream(1, source=zeros.fileno(), close_source=lambda: closed.append(1)))
        pair.far.add(Stream(1, sink=broken.fileno()))
        pair.step(10)
    assert closed == [1]
    assert pair.controls == [(streams.RESET, 1, b"Broken pipe")]


@given(data=st.binary(max_size=5000), cuts=st.lists(st.integers(1, 5000), max_size=8))
def test_frames_may_arrive_in_any_pieces(data: bytes, cuts: list[int]) -> None:
    received: list[bytes] = []
    connection = feeder(received)
    text = b"".join(
        frame(streams.DATA, 1, data[begin : begin + 700]) for begin in range(0, len(data), 700)
    )
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    for begin, end in itertools.pairwise(bounds):
        connection.feed(text[begin:end])
    assert b"".join(received) == data


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.binary(max_size=40)), max_size=30)
)
def test_hostile_frames_raise_nothing_but_frame_errors(
    frames: list[tuple[int, int, bytes]],
) -> None:
    connection = feeder([])
    try:
        for each in frames:
            connection.feed(frame(*each))
    except FrameError:
        pass
    assert all(stream.credit <= streams.WINDOW for stream in connection.streams.values())


def test_more_bytes_than_the_window_are_refused() -> None:
    connection = feeder([])
    connection.add(Stream(2, sink=1 << 20))  # a descriptor that is never written
    data = frame(streams.DATA, 2, bytes(30_000)) * (1 + streams.WINDOW // 30_000)
    with pytest.raises(FrameError, match="window"):
        connection.feed(data)


def test_longer_frame_than_allowed_is_refused() -> None:
    with pytest.raises(FrameError):
        feeder([]).feed(struct.pack(">BII", streams.DATA, 1, streams.MAX_PAYLOAD + 1))


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")),
    ],
)
def test_relay_reaches_a_server_on_either_loopback_address(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    find = socket.getaddrinfo
    monkeypatch.setattr(  # as many /etc/hosts
        socket,
        "getaddrinfo",
        lambda host, *more: find("127.0.0.1" if host == "localhost" else host, *more),
    )
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        program._open_connection(pair.near, 7, server.getsockname()[1])
        server.settimeout(5)
        server.accept()[0].close()
    stream = pair.near.streams.pop(7)
    stream.end_source()
    stream.end_sink()


def test_side_that_never_reads_needs_no_memory(pair: Pair) -> None:
    """A hostile node may send data without end, and never read the grants for it."""
    pair.far.add(Stream(1, sink=lambda _: None))
    for _ in range(40):
        pair.far.feed(frame(streams.DATA, 1, b"") * 1000 + frame(streams.DATA, 1, b"x") * 1000)
        pair.far.step(0.0)
    assert len(pair.far.unsent) < 1 << 18
