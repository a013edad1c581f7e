"""Authenticated connections between agents, and the secret with which they prove their job.

The token never travels. Each side answers the other's random challenge with an HMAC. A session key
made of both challenges then signs every message together with its number, so that no message can be
forged, replayed or reordered. Messages are JSON objects, one on a line. They are not encrypted:
they carry no secret.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from clusterjob.errors import RendezvousError
from clusterjob.node.rendezvous import messages
from clusterjob.node.system.codec import Codec
from clusterjob.node.system.sanitize import sanitize

_T = TypeVar("_T")

PROTOCOL = 1
LINE_BYTES = 1 << 18  # maximum bytes of a message
_UNAUTHENTICATED_LINE_BYTES = 4096
HANDSHAKE_SECONDS = 5.0  # seconds for an agent to prove the token
# Seconds for the coordinator to prove the token, and to answer the first message. It may be busy
# with thousands of agents, or stopped; an agent that it has counted must not leave.
PROOF_SECONDS, WELCOME_SECONDS = 20.0, 60.0
_MAX_REFUSAL = 1000  # characters of a reason from a peer that has not proved the token
_TURNS = 10  # parts of such a wait; see `answer_of`


class UnauthenticatedError(RendezvousError):
    """The peer does not prove this job's token, or does not speak this protocol."""


class RefusedError(RendezvousError):
    """The coordinator refuses an agent of this job.

    Its node_rank is taken, it counts another number of nodes, or it belongs to another attempt.
    """


class Channel:
    """An authenticated connection: messages in order, each signed.

    Args:
        reader: the reading side of the connection.
        writer: the writing side of the connection.
        sends: the messages that this side sends.
        receives: the messages that this side accepts.
        send_key: signs sent messages; each direction has its own, so no message can be reflected.
        receive_key: verifies received messages.

    Attributes:
        joined_at: the monotonic time at which an agent has sent its first message.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        sends: Codec,
        receives: Codec,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sends = sends
        self._receives = receives
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0
        self.joined_at = time.monotonic()

    def send(self, message: Any) -> None:
        """Send a message; do nothing if the connection is closed, which the receiver notices."""
        if self._writer.is_closing():
            return
        payload = self._sends.encode(message)
        signature = _sign(self._send_key, str(self._sent).encode(), payload)
        self._sent += 1
        self._writer.write(signature + b" " + payload + b"\n")

    async def receive(self) -> Any:
        """Return the next message, or None when the connection has ended.

        Raises:
            UnauthenticatedError: a message is too long, or not signed by the other end of this
                connection.
            MalformedMessageError: a signed message is unknown or has a wrong field.
        """
        try:
            line = await self._reader.readline()
        except OSError:
            return None
        except ValueError as error:
            raise UnauthenticatedError(f"a message of more than {LINE_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            return None
        signature, _, payload = line[:-1].partition(b" ")
        expected = _sign(self._receive_key, str(self._received).encode(), payload)
        if not hmac.compare_digest(signature, expected):
            raise UnauthenticatedError("a message between agents has a wrong signature")
        self._received += 1
        return self._receives.decode(_object(payload))

    async def close(self) -> None:
        """Send waiting messages and close the connection, within 2 s."""
        try:
            await asyncio.wait_for(self._writer.drain(), 1.0)
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()


async def authenticate_to_coordinator(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, job_id: str
) -> Channel:
    """Authenticate the coordinator at the other end of a connection; return the channel.

    So far, only the coordinator has proved that it has the token. This agent proves it with the
    signature of its first message on the channel.

    Args:
        reader: the reading side of the connection.
        writer: the writing side of the connection.
        token: the job's secret.
        job_id: the job's id.

    Raises:
        UnauthenticatedError: the peer is not this job's coordinator.
        OSError: the connection broke.
    """
    nonce = secrets.token_hex(16)
    _write(writer, {"clusterjob": PROTOCOL, "job": job_id, "nonce": nonce})
    challenge = await _read(reader)
    if "refused" in challenge:
        raise UnauthenticatedError(sanitize(str(challenge["refused"])[:_MAX_REFUSAL]))
    session = _sign(token, b"session", nonce.encode(), _bytes(challenge.get("nonce")))
    if not hmac.compare_digest(_bytes(challenge.get("proof")), _sign(session, b"coordinator")):
        raise UnauthenticatedError("it does not know the job's token")
    return Channel(
        reader,
        writer,
        sends=messages.FROM_AGENT,
        receives=messages.FROM_COORDINATOR,
        send_key=_sign(session, b"to coordinator"),
        receive_key=_sign(session, b"from coordinator"),
    )


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    token: bytes,
    job_id: str,
    hello: messages.Hello,
    turn: asyncio.Lock,
) -> Channel:
    """Join the job through a new connection; return the channel to the coordinator.

    Args:
        reader: the reading side of the connection.
        writer: the writing side of the connection.
        token: the job's secret.
        job_id: the job's id.
        hello: the first message of this agent.
        turn: held while the coordinator answers `hello`, and after it has admitted this agent: two
            connections that reach it must not both join, since the second one would end the first.

    Raises:
        UnauthenticatedError: the peer is not this job's coordinator.
        RefusedError: the coordinator refuses this agent.
        OSError, asyncio.TimeoutError: the connection broke, or had no answer in time.
    """
    proof = authenticate_to_coordinator(reader, writer, token=token, job_id=job_id)
    channel = await answer_of(proof, PROOF_SECONDS)
    await turn.acquire()
    try:
        channel.joined_at = time.monotonic()
        channel.send(hello)
        answer = await answer_of(channel.receive(), WELCOME_SECONDS)
        if isinstance(answer, messages.Refused):
            raise RefusedError(answer.why)
        if not isinstance(answer, messages.Welcome):
            raise UnauthenticatedError("it closed the connection")
    except BaseException:
        turn.release()
        raise
    return channel


async def accept(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, job_id: str
) -> tuple[Channel, messages.Hello]:
    """Authenticate an agent; return the channel and its `Hello`, which the caller answers.

    The signature of `Hello` proves that the agent has the token.

    Raises:
        UnauthenticatedError: the peer does not prove the token, or belongs to another job.
        MalformedMessageError: its first message has a wrong field.
        OSError, asyncio.TimeoutError: the connection broke, or no message came in time.
    """

    async def exchange() -> tuple[Channel, Any]:
        opening = await _read(reader)
        if opening.get("clusterjob") != PROTOCOL or opening.get("job") != job_id:
            raise UnauthenticatedError("it is not an agent of this job")
        nonce = secrets.token_hex(16)
        session = _sign(token, b"session", _bytes(opening.get("nonce")), nonce.encode())
        _write(writer, {"nonce": nonce, "proof": _sign(session, b"coordinator").decode()})
        channel = Channel(
            reader,
            writer,
            sends=messages.FROM_COORDINATOR,
            receives=messages.FROM_AGENT,
            send_key=_sign(session, b"from coordinator"),
            receive_key=_sign(session, b"to coordinator"),
        )
        return channel, await channel.receive()

    channel, hello = await answer_of(exchange(), HANDSHAKE_SECONDS)
    if not isinstance(hello, messages.Hello):
        raise UnauthenticatedError("it has sent no Hello")
    return channel, hello


async def refuse_address(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, why: str
) -> None:
    """Send a peer the reason why its address may not join, and close the connection."""
    await asyncio.wait_for(reader.readline(), HANDSHAKE_SECONDS)  # unread, it would reset that
    _write(writer, {"refused": why})
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), HANDSHAKE_SECONDS)


async def answer_of(exchange: Coroutine[Any, Any, _T], seconds: float) -> _T:
    """Return the result of an exchange with a peer; limit the time in which this process runs.

    The wait has several turns, and the event loop reads what has arrived before a turn ends. So a
    process that was stopped, or is busy with other peers, loses one turn and not the peer.

    Raises:
        asyncio.TimeoutError: the exchange has not ended in time.
    """
    task = asyncio.ensure_future(exchange)
    try:
        for _ in range(_TURNS):
            if (await asyncio.wait({task}, timeout=seconds / _TURNS))[0]:
                return task.result()
        raise asyncio.TimeoutError
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # its error may come after the wait


def _bytes(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")  # a peer's JSON may hold lone surrogates


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"\0".join(parts), "sha256").hex().encode()


def _write(writer: asyncio.StreamWriter, fields: Mapping[str, object]) -> None:
    writer.write(json.dumps(fields).encode() + b"\n")


async def _read(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise UnauthenticatedError("its line is too long") from error
    if not line.endswith(b"\n") or len(line) > _UNAUTHENTICATED_LINE_BYTES:
        raise UnauthenticatedError("it does not speak the agents' protocol")
    return _object(line)


def _object(line: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise UnauthenticatedError("it does not speak the agents' protocol")
    return fields
