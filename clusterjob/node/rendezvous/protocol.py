"""One connection between two agents: who the other is, proved by the job's token, and messages that
nobody else can send.

The token never travels. Both sides answer the other's random challenge with an HMAC; a session key
made of both challenges then signs every message together with its number, so that nothing can be
forged, replayed or reordered. Messages are JSON, one a line. They are not encrypted: they carry no
secret.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
from typing import Any

from clusterjob.errors import GangError

PROTOCOL = 1
LINE_BYTES = 1 << 18  # the longest message
_HELLO_BYTES = 4096  # the longest line from someone who has proved nothing yet
HANDSHAKE_SECONDS = 5.0

Message = dict[str, Any]


class Stranger(GangError):
    """Whoever is at the other end does not know this job's token, or does not speak this protocol."""


class Refused(GangError):
    """The lead knows the token and does not want this agent: a rank that is taken, an old attempt,
    another world size.
    """


class Channel:
    """An authenticated connection: messages in order, each signed.

    Args:
        reader, writer: the connection.
        send_key, receive_key: one key for each direction, so that no message can be reflected.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        send_key: bytes,
        receive_key: bytes,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._send_key = send_key
        self._receive_key = receive_key
        self._sent = 0
        self._received = 0

    def send(self, message: Message) -> None:
        """Send a message; a connection that is gone shows at the receiving side."""
        if self._writer.is_closing():
            return
        payload = json.dumps(message).encode()
        signature = _sign(self._send_key, str(self._sent).encode(), payload)
        self._sent += 1
        self._writer.write(signature + b" " + payload + b"\n")

    async def receive(self) -> Message | None:
        """Return the next message, or None when the connection has ended.

        Raises:
            Stranger: a message is not signed by the other end of this connection.
        """
        try:
            line = await self._reader.readline()
        except (ConnectionError, OSError, ValueError):
            return None
        if not line.endswith(b"\n"):
            return None
        signature, _, payload = line[:-1].partition(b" ")
        if not hmac.compare_digest(
            signature, _sign(self._receive_key, str(self._received).encode(), payload)
        ):
            raise Stranger("a message between agents carries a wrong signature")
        self._received += 1
        return _object(payload)

    async def close(self) -> None:
        """Send what is waiting and close; never takes longer than a second."""
        try:
            await asyncio.wait_for(self._writer.drain(), 1.0)
            self._writer.close()
            await asyncio.wait_for(self._writer.wait_closed(), 1.0)
        except (OSError, asyncio.TimeoutError):
            self._writer.transport.abort()


async def greet_lead(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, hello: Message
) -> Channel:
    """Introduce this agent to what may be the lead; return the channel once the lead has taken it
    in.

    Args:
        reader: the fresh connection, the reading side.
        writer: the writing side.
        token: the job's secret.
        hello: job, attempt, node_rank and what else the lead wants to know.

    Raises:
        Stranger: it is not this job's lead.
        Refused: it is, and it refuses this agent.
        OSError, asyncio.TimeoutError: the connection broke, or nothing was said in time.
    """

    async def talk() -> tuple[Channel, Message | None]:
        nonce = secrets.token_hex(16)
        _write(writer, {"clusterjob": PROTOCOL, "job": hello["job"], "nonce": nonce})
        challenge = await _read(reader)
        session = _sign(token, b"session", nonce.encode(), _bytes(challenge.get("nonce")))
        if not hmac.compare_digest(_bytes(challenge.get("proof")), _sign(session, b"lead")):
            raise Stranger("it does not know the job's token")
        channel = Channel(
            reader,
            writer,
            send_key=_sign(session, b"to lead"),
            receive_key=_sign(session, b"from lead"),
        )
        channel.send(hello)
        return channel, await channel.receive()

    channel, welcome = await asyncio.wait_for(talk(), HANDSHAKE_SECONDS)
    if welcome is None:
        raise Stranger("it closed the connection")
    if welcome.get("t") == "refused":
        raise Refused(str(welcome.get("why")))
    return channel


async def greet_member(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: bytes, job: str
) -> tuple[Channel, Message]:
    """Let an agent prove that it belongs to the job; return the channel and its hello. The caller
    answers that.

    Raises:
        Stranger: it does not know the token, or is of another job.
        OSError, asyncio.TimeoutError: the connection broke, or nothing was said in time.
    """

    async def talk() -> tuple[Channel, Message | None]:
        opening = await _read(reader)
        if opening.get("clusterjob") != PROTOCOL or opening.get("job") != job:
            raise Stranger("it is not an agent of this job")
        nonce = secrets.token_hex(16)
        session = _sign(token, b"session", _bytes(opening.get("nonce")), nonce.encode())
        _write(writer, {"nonce": nonce, "proof": _sign(session, b"lead").decode()})
        channel = Channel(
            reader,
            writer,
            send_key=_sign(session, b"from lead"),
            receive_key=_sign(session, b"to lead"),
        )
        return channel, await channel.receive()  # its signature is the agent's proof

    channel, hello = await asyncio.wait_for(talk(), HANDSHAKE_SECONDS)
    if hello is None:
        raise Stranger("it closed the connection")
    return channel, hello


def _bytes(value: object) -> bytes:
    return str(value).encode(errors="surrogatepass")  # a stranger's JSON may hold what UTF-8 cannot


def _sign(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"\0".join(parts), hashlib.sha256).hexdigest().encode()


def _write(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(json.dumps(message).encode() + b"\n")


async def _read(reader: asyncio.StreamReader) -> Message:
    try:
        line = await reader.readline()
    except ValueError as error:
        raise Stranger("it sent an endless line") from error
    if not line.endswith(b"\n") or len(line) > _HELLO_BYTES:
        raise Stranger("it does not speak the agents' protocol")
    return _object(line)


def _object(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Stranger("it does not speak the agents' protocol") from error
    if not isinstance(message, dict):
        raise Stranger("it does not speak the agents' protocol")
    return message
