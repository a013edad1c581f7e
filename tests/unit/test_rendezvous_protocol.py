"""The connection between two agents, over real sockets: who is let in, and what becomes of everyone
and everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clusterjob.errors import GangError
from clusterjob.node.rendezvous import protocol
from clusterjob.node.rendezvous.protocol import Channel, Message, Refused, Stranger

TOKEN = b"the job's secret"
HELLO: Message = {"job": "job-1", "attempt": 0, "node_rank": 1, "host": "h", "pid": 1}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(story: Callable[[], Awaitable[Any]]) -> Any:
    """Run a story with a bound, in an event loop in which an exception that nobody catches is an
    error.
    """
    unheard: list[dict[str, Any]] = []

    async def listening() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
        return await asyncio.wait_for(story(), 30)

    result = asyncio.run(listening())
    assert not unheard, unheard
    return result


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[Streams, Streams]]:
    """Give both ends of one TCP connection over loopback."""
    accepted: asyncio.Future[Streams] = asyncio.get_running_loop().create_future()
    listener = socket.create_server(("127.0.0.1", 0))
    server = await asyncio.start_server(
        lambda *streams: accepted.set_result(streams), sock=listener, limit=protocol.LINE_BYTES
    )
    member = await asyncio.open_connection(*listener.getsockname()[:2], limit=protocol.LINE_BYTES)
    lead = await accepted
    try:
        yield member, lead
    finally:
        for _, writer in (member, lead):
            writer.transport.abort()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)


async def greet(
    member: Streams, lead: Streams, member_token: bytes = TOKEN, lead_token: bytes = TOKEN
) -> list[Any]:
    """Let both ends greet each other, the lead welcoming whoever has proved to be of the job;
    errors are returned.
    """

    async def as_lead() -> tuple[Channel, Message]:
        channel, hello = await protocol.greet_member(*lead, lead_token, "job-1")
        channel.send({"t": "welcome"})
        return channel, hello

    async def closing(task: Awaitable[Any], writer: asyncio.StreamWriter) -> Any:
        try:
            return await task
        except BaseException:
            writer.close()
            raise

    return await asyncio.gather(
        closing(protocol.greet_lead(*member, member_token, HELLO), member[1]),
        closing(as_lead(), lead[1]),
        return_exceptions=True,
    )


async def channels(member: Streams, lead: Streams) -> tuple[Channel, Channel]:
    member_channel, (lead_channel, _) = await greet(member, lead)
    return member_channel, lead_channel


# -- who is let in -----------------------------------------------------------------------------------------------------------


def test_the_right_token_lets_messages_pass_both_ways() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            member_channel, (lead_channel, hello) = await greet(member, lead)
            assert hello == HELLO
            for index in range(100):
                member_channel.send({"number": index, "text": "\n\0☃\ud800"})
                lead_channel.send({"number": -index})
            for index in range(100):
                assert await lead_channel.receive() == {"number": index, "text": "\n\0☃\ud800"}
                assert await member_channel.receive() == {"number": -index}
            await member_channel.close()
            assert await lead_channel.receive() is None

    run(story)


def test_a_wrong_token_is_refused_on_both_sides() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            member_end, lead_end = await greet(member, lead, member_token=b"guessed")
            assert isinstance(member_end, Stranger)
            assert "does not know the job's token" in str(member_end)
            assert isinstance(lead_end, Stranger)

    run(story)


def test_an_agent_of_another_job_is_refused_even_with_the_token() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            other = asyncio.create_task(
                protocol.greet_lead(*member, TOKEN, HELLO | {"job": "job-2"})
            )
            with pytest.raises(Stranger, match="not an agent of this job"):
                await protocol.greet_member(*lead, TOKEN, "job-1")
            lead[1].close()
            with pytest.raises((Stranger, OSError)):
                await other

    run(story)


def test_a_refusal_names_its_reason() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            joining = asyncio.create_task(protocol.greet_lead(*member, TOKEN, HELLO))
            channel, _ = await protocol.greet_member(*lead, TOKEN, "job-1")
            channel.send({"t": "refused", "why": "node_rank 1 is claimed twice"})
            with pytest.raises(Refused, match="node_rank 1 is claimed twice"):
                await joining

    run(story)


def test_the_token_never_travels() -> None:
    async def story() -> bytes:
        passed = bytearray()
        async with connection() as (member, proxy_member), connection() as (proxy_lead, lead):

            async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                while data := await reader.read(4096):
                    passed.extend(data)
                    writer.write(data)

            pumps = [
                asyncio.create_task(pump(proxy_member[0], proxy_lead[1])),
                asyncio.create_task(pump(proxy_lead[0], proxy_member[1])),
            ]
            member_channel, lead_channel = await channels(member, lead)
            member_channel.send({"t": "beat"})
            assert await lead_channel.receive() == {"t": "beat"}
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
        return bytes(passed)

    passed = run(story)
    assert len(passed) > 300
    assert TOKEN not in passed
    assert TOKEN.hex().encode() not in passed


def test_what_was_recorded_opens_no_second_connection() -> None:
    """A stranger replays, word for word, what a true member said."""

    async def story() -> None:
        said: list[bytes] = []
        async with connection() as (member, lead):
            write = member[1].write
            member[1].write = lambda data: (said.append(bytes(data)), write(data))[1]  # type: ignore[method-assign,assignment]
            await channels(member, lead)
        assert len(said) == 2
        async with connection() as (stranger, lead):
            stranger[1].write(b"".join(said))
            with pytest.raises(Stranger):
                await protocol.greet_member(*lead, TOKEN, "job-1")

    run(story)


def test_a_stranger_cannot_pose_as_the_lead_by_asking_the_lead() -> None:
    """The lead's challenge is bound to the member's nonce; a proof for another nonce is none."""

    async def story() -> None:
        async with connection() as (asker, lead):
            greeting = asyncio.create_task(protocol.greet_member(*lead, TOKEN, "job-1"))
            asker[1].write(
                json.dumps(
                    {"clusterjob": protocol.PROTOCOL, "job": "job-1", "nonce": "0" * 32}
                ).encode()
                + b"\n"
            )
            true_challenge = await asker[0].readline()
            async with connection() as (member, impostor):
                joining = asyncio.create_task(protocol.greet_lead(*member, TOKEN, HELLO))
                await impostor[0].readline()
                impostor[1].write(true_challenge)
                with pytest.raises(Stranger):
                    await joining
            asker[1].close()
            with pytest.raises((Stranger, OSError)):
                await greeting

    run(story)


# -- messages that are not the other end's -----------------------------------------------------------------------------------


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
def test_a_message_that_is_not_the_next_of_this_connection_is_refused(tamper: str) -> None:
    async def story() -> None:
        async with connection() as (member, lead), connection() as (other_member, other_lead):
            member_channel, lead_channel = await channels(member, lead)
            other_channel, _ = await channels(other_member, other_lead)
            lines: list[bytes] = []
            writer = member[1]
            write = writer.write
            writer.write = lambda data: lines.append(bytes(data))  # type: ignore[method-assign,assignment]
            other_member[1].write = lambda data: lines.append(bytes(data))  # type: ignore[method-assign,assignment]
            member_channel.send({"t": "first"})
            member_channel.send({"t": "second"})
            other_channel.send({"t": "first"})
            first, second, foreign = lines
            if tamper == "reflected":
                lead[1].write = lambda data: lines.append(bytes(data))  # type: ignore[method-assign,assignment]
                lead_channel.send({"t": "first"})
                write(lines[-1])
            elif tamper == "replayed":
                write(first + first)
                assert await lead_channel.receive() == {"t": "first"}
            else:
                write({
                    "payload": first.replace(b"first", b"fiRst"),
                    "signature": (b"0" if first[:1] != b"0" else b"1") + first[1:],
                    "no signature": b'{"t": "first"}\n', "reordered": second + first,
                    "another connection's": foreign,
                }[tamper])  # fmt: skip
            with pytest.raises(Stranger, match="wrong signature"):
                await lead_channel.receive()

    run(story)


@pytest.mark.parametrize("cut", [1, 40, 70, -1])
def test_a_message_that_is_cut_off_is_an_end_and_no_message(cut: int) -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            member_channel, lead_channel = await channels(member, lead)
            lines: list[bytes] = []
            write = member[1].write
            member[1].write = lambda data: lines.append(bytes(data))  # type: ignore[method-assign,assignment]
            member_channel.send({"t": "done"})
            write(lines[0][:cut])
            member[1].close()
            assert await lead_channel.receive() is None

    run(story)


def test_a_line_without_end_is_bounded_in_a_channel_too() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            _, lead_channel = await channels(member, lead)
            member[1].write(b"x" * (protocol.LINE_BYTES * 4))
            assert await lead_channel.receive() is None

    run(story)


def test_long_messages_pass_up_to_the_bound() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            member_channel, lead_channel = await channels(member, lead)
            text = "x" * (protocol.LINE_BYTES - 1000)
            member_channel.send({"text": text})
            assert await lead_channel.receive() == {"text": text}

    run(story)


def test_sending_to_and_closing_a_connection_that_is_gone_is_quiet() -> None:
    async def story() -> None:
        async with connection() as (member, lead):
            member_channel, lead_channel = await channels(member, lead)
            lead[1].transport.abort()
            assert await member_channel.receive() is None
            for _ in range(20):
                member_channel.send({"t": "beat"})
                await asyncio.sleep(0)
            await member_channel.close()
            await lead_channel.close()

    run(story)


def test_closing_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    async def story() -> float:
        async with connection() as (member, lead):
            member_channel, _ = await channels(member, lead)
            lead[1].transport.pause_reading()  # type: ignore[attr-defined]
            for _ in range(200):
                member_channel.send({"text": "x" * 100_000})
            begin = asyncio.get_running_loop().time()
            await member_channel.close()
            return asyncio.get_running_loop().time() - begin

    assert run(story) < 10


# -- whoever is no agent -----------------------------------------------------------------------------------------------------

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
said = st.lists(
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


async def listen_to(words: bytes) -> BaseException:
    async with connection() as (stranger, lead):
        stranger[1].write(words)
        if stranger[1].can_write_eof():
            stranger[1].write_eof()
        with pytest.raises((GangError, OSError, asyncio.TimeoutError)) as caught:
            await protocol.greet_member(*lead, TOKEN, "job-1")
        return caught.value


async def ask(words: bytes) -> BaseException:
    async with connection() as (member, stranger):
        stranger[1].write(words)
        stranger[1].write_eof()
        with pytest.raises((GangError, OSError, asyncio.TimeoutError)) as caught:
            await protocol.greet_lead(*member, TOKEN, HELLO)
        return caught.value


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(said)
def test_garbage_is_refused_by_the_lead_and_crashes_nothing(words: list[bytes]) -> None:
    run(lambda: listen_to(b"".join(words)))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(said)
def test_garbage_is_refused_by_a_member_and_crashes_nothing(words: list[bytes]) -> None:
    run(lambda: ask(b"".join(words)))


@pytest.mark.parametrize("listener", [listen_to, ask])
def test_a_lone_surrogate_is_refused(listener: Callable[[bytes], Awaitable[BaseException]]) -> None:
    assert isinstance(run(lambda: listener(SURROGATE)), Stranger)


@pytest.mark.parametrize("listener", [listen_to, ask])
@pytest.mark.parametrize("size", [protocol.LINE_BYTES * 8, protocol.LINE_BYTES - 100])
def test_an_endless_line_is_refused_and_bounded(
    listener: Callable[[bytes], Awaitable[BaseException]], size: int
) -> None:
    assert isinstance(run(lambda: listener(b"x" * size)), Stranger)


def test_an_endless_line_takes_no_endless_memory() -> None:
    """The reading side stops reading long before the writer has said all."""

    async def story() -> None:
        async with connection() as (stranger, lead):
            greeting = asyncio.create_task(protocol.greet_member(*lead, TOKEN, "job-1"))
            stranger[1].write(b"x" * (64 << 20))
            with pytest.raises(Stranger):
                await greeting
            assert len(lead[0]._buffer) <= 4 * protocol.LINE_BYTES  # type: ignore[attr-defined]

    run(story)


def test_silence_ends_the_handshake_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.3)

    async def story() -> None:
        async with connection() as (member, lead):
            with pytest.raises(asyncio.TimeoutError):
                await protocol.greet_lead(*member, TOKEN, HELLO)
            with pytest.raises((asyncio.TimeoutError, Stranger)):
                await protocol.greet_member(*lead, TOKEN, "other job")
        async with connection() as (_, lead):
            with pytest.raises(asyncio.TimeoutError):
                await protocol.greet_member(*lead, TOKEN, "job-1")

    run(story)


def test_one_byte_at_a_time_is_silence_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HANDSHAKE_SECONDS", 0.5)

    async def story() -> None:
        async with connection() as (stranger, lead):

            async def drip() -> None:
                while True:
                    stranger[1].write(b"x")
                    await asyncio.sleep(0.02)

            dripping = asyncio.create_task(drip())
            with pytest.raises(asyncio.TimeoutError):
                await protocol.greet_member(*lead, TOKEN, "job-1")
            dripping.cancel()

    run(story)
