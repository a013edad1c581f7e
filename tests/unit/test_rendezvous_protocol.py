"""Authenticated connection between two agents, over real sockets.

The tests cover wrong tokens, changed and replayed messages, garbage, and silent peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterjob.errors import RendezvousError
from clusterjob.node.agent.connection import Link
from clusterjob.node.options import parse
from clusterjob.node.rendezvous import messages, protocol
from clusterjob.node.rendezvous.messages import Heartbeat, Hello, Welcome
from clusterjob.node.rendezvous.protocol import Channel, UnauthenticatedError
from clusterjob.node.states import NodeState, Order, Request

TOKEN = b"the job's secret"
HELLO = Hello(node_rank=1, host="h", pid=1, attempt=0, nnodes=2, nproc=1)
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def cancelled(why: str) -> NodeState:
    return NodeState(request=Request(cancel=why))


def run(scenario: Callable[[], Awaitable[Any]]) -> Any:
    """Run a scenario with a time limit; fail on any unhandled exception in the event loop."""
    unhandled: list[dict[str, Any]] = []

    async def run_with_limit() -> Any:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: unhandled.append(context)
        )
        return await asyncio.wait_for(scenario(), 30)

    result = asyncio.run(run_with_limit())
    assert not unhandled, unhandled
    return result


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[Streams, Streams]]:
    """Yield both ends of one TCP connection over loopback."""
    accepted: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(
        lambda *streams: accepted.set_result(streams), sock=listener, limit=protocol.LINE_BYTES
    )
    agent = await asyncio.open_connection(*listener.getsockname()[:2], limit=protocol.LINE_BYTES)
    coordinator = await accepted
    try:
        yield agent, coordinator
    finally:
        for _, writer in (agent, coordinator):
            writer.transport.abort()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)


async def handshake(
    agent: Streams,
    coordinator: Streams,
    agent_token: bytes = TOKEN,
    coordinator_token: bytes = TOKEN,
) -> list[Any]:
    """Run the handshake of both ends and return their results or errors.

    The coordinator sends Welcome to an agent that has proved that it knows the token.
    """

    async def as_coordinator() -> tuple[Channel, Hello]:
        channel, hello = await protocol.accept(*coordinator, coordinator_token, "job-1")
        channel.send(Welcome())
        return channel, hello

    async def closing(task: Awaitable[Any], writer: asyncio.StreamWriter) -> Any:
        try:
            return await task
        except BaseException:
            writer.close()
            raise

    return await asyncio.gather(
        closing(protocol.join(*agent, agent_token, "job-1", HELLO, asyncio.Lock()), agent[1]),
        closing(as_coordinator(), coordinator[1]),
        return_exceptions=True,
    )


async def channels(agent: Streams, coordinator: Streams) -> tuple[Channel, Channel]:
    agent_channel, (coordinator_channel, _) = await handshake(agent, coordinator)
    return agent_channel, coordinator_channel


def connected(scenario: Callable[[Streams, Streams], Awaitable[None]]) -> Callable[[], None]:
    """Make a test of a scenario with both ends of one connection."""

    async def connect() -> None:
        async with connection() as (agent, coordinator):
            await scenario(agent, coordinator)

    def test() -> None:
        run(connect)

    return test


def record(streams: Streams, *, deliver: bool = True) -> list[bytes]:
    """Return what an end writes from now on, each write as one item."""
    lines: list[bytes] = []
    write = streams[1].write

    def note(data: bytes) -> None:
        lines.append(bytes(data))
        if deliver:
            write(data)

    streams[1].write = note  # type: ignore[method-assign,assignment]
    return lines


@pytest.fixture
def short_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.5)


# -- authentication --------------------------------------------------------------------------------


@connected
async def test_agents_with_same_token_exchange_messages_both_ways(
    agent: Streams, coordinator: Streams
) -> None:
    agent_channel, (coordinator_channel, hello) = await handshake(agent, coordinator)
    assert hello == HELLO
    for index in range(100):
        agent_channel.send(cancelled(f"{index} \n\0☃\ud800"))
        coordinator_channel.send(Order(index))
    for index in range(100):
        assert await coordinator_channel.receive() == cancelled(f"{index} \n\0☃\ud800")
        assert await agent_channel.receive() == Order(index)
    await agent_channel.close()
    assert await coordinator_channel.receive() is None


@connected
async def test_wrong_token_is_refused_by_both_ends(agent: Streams, coordinator: Streams) -> None:
    agent_result, coordinator_result = await handshake(agent, coordinator, agent_token=b"guessed")
    assert isinstance(agent_result, UnauthenticatedError)
    assert "does not know the job's token" in str(agent_result)
    assert isinstance(coordinator_result, UnauthenticatedError)


@connected
async def test_agent_of_another_job_with_same_token_is_refused(
    agent: Streams, coordinator: Streams
) -> None:
    other = asyncio.create_task(protocol.join(*agent, TOKEN, "job-2", HELLO, asyncio.Lock()))
    with pytest.raises(UnauthenticatedError, match="not an agent of this job"):
        await protocol.accept(*coordinator, TOKEN, "job-1")
    coordinator[1].close()
    with pytest.raises((UnauthenticatedError, OSError)):
        await other


@connected
async def test_lease_begins_when_the_answered_heartbeat_was_sent(
    agent: Streams, coordinator: Streams
) -> None:
    """A message that waited for a frozen agent says nothing of the coordinator of now."""
    agent_channel, coordinator_channel = await channels(agent, coordinator)
    link = Link(agent_channel, parse(["x.py"]), orders := asyncio.Queue(), asyncio.create_task)
    joined_at = link.heard_at
    for message in (Order(), Heartbeat(joined_at - 1)):
        coordinator_channel.send(message)
        assert await orders.get() == message
        assert link.heard_at == joined_at
    coordinator_channel.send(Heartbeat(joined_at + 1e-6))
    await orders.get()
    assert link.heard_at == joined_at + 1e-6
    coordinator_channel.send(Heartbeat(joined_at + 60))
    await orders.get()
    assert link.heard_at <= time.monotonic()
    await link.close()


@connected
async def test_token_is_never_sent(agent: Streams, coordinator: Streams) -> None:
    sent = [record(agent), record(coordinator)]
    agent_channel, coordinator_channel = await channels(agent, coordinator)
    agent_channel.send(Heartbeat())
    assert await coordinator_channel.receive() == Heartbeat()
    passed = b"".join(map(b"".join, sent))
    assert len(passed) > 300
    assert TOKEN not in passed
    assert TOKEN.hex().encode() not in passed


@connected
async def test_replayed_handshake_is_refused(agent: Streams, coordinator: Streams) -> None:
    """The peer sends exactly the recorded bytes of a real agent."""
    sent = record(agent)
    await channels(agent, coordinator)
    assert len(sent) == 2
    async with connection() as (peer, other):
        peer[1].write(b"".join(sent))
        with pytest.raises(UnauthenticatedError):
            await protocol.accept(*other, TOKEN, "job-1")


@connected
async def test_relayed_challenge_of_coordinator_is_refused_by_agent(
    attacker: Streams, coordinator: Streams
) -> None:
    """The coordinator's challenge is bound to the agent's nonce and fails for another nonce."""
    accepting = asyncio.create_task(protocol.accept(*coordinator, TOKEN, "job-1"))
    attacker[1].write(
        json.dumps({"clusterjob": protocol.PROTOCOL, "job": "job-1", "nonce": "0" * 32}).encode()
        + b"\n"
    )
    true_challenge = await attacker[0].readline()
    async with connection() as (agent, impostor):
        joining = asyncio.create_task(protocol.join(*agent, TOKEN, "job-1", HELLO, asyncio.Lock()))
        await impostor[0].readline()
        impostor[1].write(true_challenge)
        with pytest.raises(UnauthenticatedError):
            await joining
    attacker[1].close()
    with pytest.raises((UnauthenticatedError, OSError)):
        await accepting


# -- changed, replayed and cut messages ------------------------------------------------------------


@pytest.mark.parametrize(
    "tamper",
    [
        "payload",
        "signature",
        "no signature",
        "replayed",
        "reordered",
        "reflected",
        "another connection's",
    ],
)
def test_changed_replayed_or_foreign_message_is_refused(tamper: str) -> None:
    async def scenario() -> None:
        async with (
            connection() as (agent, coordinator),
            connection() as (other_agent, other_coordinator),
        ):
            agent_channel, coordinator_channel = await channels(agent, coordinator)
            other_channel, _ = await channels(other_agent, other_coordinator)
            write = agent[1].write
            lines = record(agent, deliver=False)
            others = record(other_agent, deliver=False)
            reflected = record(coordinator, deliver=False)
            agent_channel.send(cancelled("first"))
            agent_channel.send(cancelled("second"))
            other_channel.send(cancelled("first"))
            coordinator_channel.send(Order())
            first, second = lines
            write(
                {
                    "payload": first.replace(b"first", b"fiRst"),
                    "signature": (b"0" if first[:1] != b"0" else b"1") + first[1:],
                    "no signature": b'{"type": "Heartbeat"}\n',
                    "replayed": first + first,
                    "reordered": second + first,
                    "reflected": reflected[0],
                    "another connection's": others[0],
                }[tamper]
            )
            if tamper == "replayed":
                assert await coordinator_channel.receive() == cancelled("first")
            with pytest.raises(UnauthenticatedError, match="wrong signature"):
                await coordinator_channel.receive()

    run(scenario)


@pytest.mark.parametrize("cut", [1, 40, 70, -1])
def test_cut_off_message_is_end_of_connection(cut: int) -> None:
    async def scenario() -> None:
        async with connection() as (agent, coordinator):
            agent_channel, coordinator_channel = await channels(agent, coordinator)
            write = agent[1].write
            lines = record(agent, deliver=False)
            agent_channel.send(NodeState(3))
            write(lines[0][:cut])
            agent[1].close()
            assert await coordinator_channel.receive() is None

    run(scenario)


@connected
async def test_endless_line_in_channel_ends_connection(
    agent: Streams, coordinator: Streams
) -> None:
    _, coordinator_channel = await channels(agent, coordinator)
    agent[1].write(b"x" * (protocol.LINE_BYTES * 4))
    with pytest.raises(UnauthenticatedError, match="more than 262144 bytes"):
        await coordinator_channel.receive()


@connected
async def test_long_message_below_limit_is_received(agent: Streams, coordinator: Streams) -> None:
    agent_channel, coordinator_channel = await channels(agent, coordinator)
    reason = "x" * (1 << 17)
    coordinator_channel.send(messages.Refused(reason))
    assert await agent_channel.receive() == messages.Refused(reason)


@connected
async def test_send_and_close_after_lost_connection_raise_no_error(
    agent: Streams, coordinator: Streams
) -> None:
    agent_channel, coordinator_channel = await channels(agent, coordinator)
    coordinator[1].transport.abort()
    assert await agent_channel.receive() is None
    for _ in range(20):
        agent_channel.send(Heartbeat())
        await asyncio.sleep(0)
    await agent_channel.close()
    await coordinator_channel.close()


@connected
async def test_close_does_not_wait_for_peer_that_reads_nothing(
    agent: Streams, coordinator: Streams
) -> None:
    agent_channel, _ = await channels(agent, coordinator)
    coordinator[1].transport.pause_reading()  # type: ignore[attr-defined]
    for _ in range(200):
        agent_channel.send(Hello(1, "h" * 100_000, 1, 0, 2, 1))
    begin = asyncio.get_running_loop().time()
    await agent_channel.close()
    assert asyncio.get_running_loop().time() - begin < 10


# -- peers that are not agents ---------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
almost = st.builds(
    lambda entries: json.dumps(entries).encode() + b"\n",
    st.fixed_dictionaries(
        {},
        optional={
            "clusterjob": st.just(protocol.PROTOCOL) | json_values,
            "job": st.just("job-1") | json_values,
            "nonce": json_values,
            "proof": json_values,
        },
    ),
)
garbage = st.lists(
    st.binary(max_size=200)
    | almost
    | st.sampled_from(
        [
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"[" * 3000 + b"\n",
            b"9" * 4000 + b"\n",
            b"\n",
        ]
    ),
    max_size=3,
)
SURROGATE = (
    json.dumps(
        {"clusterjob": protocol.PROTOCOL, "job": "job-1", "nonce": "\ud800", "proof": "\ud800"}
    ).encode()
    + b"\n"
)


async def send_to_coordinator(data: bytes) -> BaseException:
    async with connection() as (peer, coordinator):
        peer[1].write(data)
        if peer[1].can_write_eof():
            peer[1].write_eof()
        with pytest.raises((RendezvousError, OSError, asyncio.TimeoutError)) as caught:
            await protocol.accept(*coordinator, TOKEN, "job-1")
        return caught.value


async def send_to_agent(data: bytes) -> BaseException:
    async with connection() as (agent, peer):
        peer[1].write(data)
        peer[1].write_eof()
        with pytest.raises((RendezvousError, OSError, asyncio.TimeoutError)) as caught:
            await protocol.join(*agent, TOKEN, "job-1", HELLO, asyncio.Lock())
        return caught.value


@pytest.mark.parametrize("send_to", [send_to_coordinator, send_to_agent])
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(chunks=garbage)
def test_garbage_is_refused(
    send_to: Callable[[bytes], Awaitable[BaseException]], chunks: list[bytes]
) -> None:
    assert run(lambda: send_to(b"".join(chunks)))


@pytest.mark.parametrize("send_to", [send_to_coordinator, send_to_agent])
@pytest.mark.parametrize(
    "data",
    [SURROGATE, b"x" * (protocol.LINE_BYTES * 8), b"x" * (protocol.LINE_BYTES - 100)],
    ids=["lone surrogate", "endless line", "line without end"],
)
def test_peer_that_sends_no_handshake_is_refused(
    send_to: Callable[[bytes], Awaitable[BaseException]], data: bytes
) -> None:
    assert isinstance(run(lambda: send_to(data)), UnauthenticatedError)


@connected
async def test_endless_line_is_not_buffered_without_limit(
    peer: Streams, coordinator: Streams
) -> None:
    """The coordinator stops reading long before the peer has sent everything."""
    accepting = asyncio.create_task(protocol.accept(*coordinator, TOKEN, "job-1"))
    peer[1].write(b"x" * (64 << 20))
    with pytest.raises(UnauthenticatedError):
        await accepting
    assert (
        len(coordinator[0]._buffer)  # type: ignore[attr-defined]
        <= 4 * protocol.LINE_BYTES
    )


def test_handshake_with_silent_peer_times_out_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.3)

    async def scenario() -> None:
        async with connection() as (agent, coordinator):
            with pytest.raises(asyncio.TimeoutError):
                await protocol.join(*agent, TOKEN, "job-1", HELLO, asyncio.Lock())
            with pytest.raises((asyncio.TimeoutError, UnauthenticatedError)):
                await protocol.accept(*coordinator, TOKEN, "other job")
        async with connection() as (_, coordinator):
            with pytest.raises(asyncio.TimeoutError):
                await protocol.accept(*coordinator, TOKEN, "job-1")

    run(scenario)


@pytest.mark.usefixtures("short_handshake")
@connected
async def test_handshake_with_slow_peer_times_out(peer: Streams, coordinator: Streams) -> None:

    async def drip() -> None:
        while True:
            peer[1].write(b"x")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    with pytest.raises(asyncio.TimeoutError):
        await protocol.accept(*coordinator, TOKEN, "job-1")
    dripping.cancel()


@pytest.mark.usefixtures("short_handshake")
@connected
async def test_handshake_survives_stop_of_process(agent: Streams, coordinator: Streams) -> None:
    """The process does not run for longer than the limit, after the first line was sent."""
    exchange = asyncio.create_task(handshake(agent, coordinator))
    for _ in range(3):
        await asyncio.sleep(0)
    time.sleep(1.5)
    channel, (_, hello) = await exchange
    assert isinstance(channel, Channel)
    assert hello == HELLO


@pytest.mark.usefixtures("short_handshake")
@connected
async def test_agent_waits_for_busy_coordinator_that_has_its_hello(
    agent: Streams, coordinator: Streams
) -> None:
    joining = asyncio.create_task(protocol.join(*agent, TOKEN, "job-1", HELLO, asyncio.Lock()))
    channel, _ = await protocol.accept(*coordinator, TOKEN, "job-1")
    await asyncio.sleep(1.0)
    channel.send(Welcome())
    assert isinstance(await joining, Channel)


# -- invalid messages with a valid token -----------------------------------------------------------


@connected
async def test_first_message_other_than_hello_ends_the_connection(
    agent: Streams, coordinator: Streams
) -> None:
    accepting = asyncio.create_task(protocol.accept(*coordinator, TOKEN, "job-1"))
    channel = await protocol.authenticate_to_coordinator(*agent, TOKEN, "job-1")
    channel.send(NodeState(3))
    with pytest.raises(UnauthenticatedError, match="no Hello"):
        await accepting
