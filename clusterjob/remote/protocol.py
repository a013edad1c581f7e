"""Questions to a host and its answers over a byte stream, bounded in length and time and checked
against a schema.

A question is a line of JSON and some bytes; so is its answer. `clusterjob.node.host_server.server`
is the other end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from clusterjob.core.schema import SchemaError
from clusterjob.errors import HostError
from clusterjob.remote.answer_schemas import HEADER, MOST_ERROR, answer_to

STRIDE = 1 << 14  # bytes: a host that brings (or takes) fewer within its timeout makes no progress
_PIECE = 1 << 16
_MORE_TIME = (
    3  # times the timeout that an answer which has begun may take, where it is not of any size
)
_NONSENSE = (
    "something prints into the conversation (a sitecustomize?), or the host is not to be trusted"
)


class Stream(Protocol):
    """A connection: a socket, or a channel of paramiko's."""

    def recv(self, size: int, /) -> bytes:
        """Return some bytes; none at the end."""
        ...

    def send(self, data: bytes, /) -> int:
        """Send some of the bytes and return how many."""
        ...

    def settimeout(self, seconds: float, /) -> None:
        """Bound the next call."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class Deadline:
    """The time that a host has: it moves on with every `STRIDE` bytes, so one byte a second does
    not hold anybody.

    Args:
        seconds: until the first byte.
        stride: seconds for each `STRIDE` bytes after that; None for `seconds`.
        total: seconds in all; None for no such bound.
    """

    def __init__(
        self, seconds: float, stride: float | None = None, total: float | None = None
    ) -> None:
        self._seconds = seconds
        self._stride = seconds if stride is None else stride
        self._total = total
        begin = time.monotonic()
        self._end = begin + seconds
        self._last = None if total is None else begin + total
        self._moved = self._moved_in_all = 0

    def left(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: there are none; its text says how much has come.
        """
        left = (self._end if self._last is None else min(self._end, self._last)) - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.shortfall())
        return left

    def progress(self, count: int) -> None:
        """Note that bytes have come, or have gone."""
        first = not self._moved_in_all
        self._moved += count
        self._moved_in_all += count
        if first or self._moved >= STRIDE:
            self._seconds = self._stride
            self._end = time.monotonic() + self._stride
        if self._moved >= STRIDE:
            self._moved = 0

    def shortfall(self) -> str:
        """Return what there was in the time that is over."""
        if self._last is not None and self._total is not None and self._last <= self._end:
            seconds, moved = self._total, self._moved_in_all
        else:
            seconds, moved = self._seconds, self._moved
        if moved:
            return f"only {moved} bytes in {seconds:.3g} s"
        return (
            f"no more for {seconds:.3g} s"
            if self._moved_in_all
            else f"no answer for {seconds:.3g} s"
        )


class Exchange:
    """Asks one question at a time; after an error the stream is closed, as the rest of an answer
    would be taken for another.

    Args:
        label: the host, for errors.
        stream: the connection.
        timeout: seconds without progress after which a host is given up, where a question does not
            say.
        last_words: returns what the host wrote on stderr last.
    """

    def __init__(
        self, label: str, stream: Stream, timeout: float, last_words: Callable[[], str] = lambda: ""
    ) -> None:
        self.label = label
        self._stream = stream
        self._timeout = timeout
        self._last_words = last_words
        self._heard = bytearray()

    def ask(
        self,
        op: str,
        *,
        body: bytes | Iterable[bytes] = b"",
        size: int = 0,
        timeout: float | None = None,
        most_bytes: int | None = None,
        bulk: bool = False,
        **fields: Any,
    ) -> tuple[Any, bytes]:
        """Ask the host and return its answer: an object and bytes; see
        `clusterjob.remote.session.Session.ask`.
        """
        pieces: Iterable[bytes] = [body] if isinstance(body, bytes) else body
        total = len(body) if isinstance(body, bytes) else size
        seconds = timeout or self._timeout
        try:
            deadline = Deadline(seconds)
            self.send(json.dumps({"op": op, "size": total, **fields}).encode() + b"\n", deadline)
            for piece in pieces:
                self.send(piece, deadline)
            longest = None if bulk else seconds + _MORE_TIME * self._timeout
            answer, data = self._receive(
                op,
                Deadline(seconds, min(seconds, self._timeout), total=longest),
                most_bytes=most_bytes,
            )
        except TimeoutError as error:
            self._stream.close()
            raise HostError(self.label, str(error)) from error
        except (SchemaError, ValueError, RecursionError) as error:
            self._stream.close()
            why = f": {error}" if isinstance(error, SchemaError) else ""
            raise HostError(self.label, f"it answers nonsense{why}", hint=_NONSENSE) from error
        except (OSError, EOFError) as error:
            why = self._last_words()
            self._stream.close()
            raise HostError(
                self.label, f"the connection broke{f': {why}' if why else ''}"
            ) from error
        except BaseException:
            self._stream.close()
            raise
        if "error" in answer:
            raise HostError(self.label, answer["error"][:MOST_ERROR])
        return answer, data

    def _receive(self, op: str, deadline: Deadline, most_bytes: int | None) -> tuple[Any, bytes]:
        expected = answer_to(op)
        most = expected.most_bytes if most_bytes is None else most_bytes
        answer = json.loads(self.line(expected.most_line, deadline))
        HEADER.check(answer, "the answer")
        if answer["size"] > most:
            raise SchemaError(f"it announces {answer['size']} bytes, more than {most}")
        if "error" not in answer:
            expected.schema.check(answer, "the answer")
        return answer, self._bytes(answer["size"], deadline)

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send bytes.

        Raises:
            TimeoutError: the host does not take them.
            OSError: the connection broke.
        """
        rest = memoryview(data)
        while rest:
            self._stream.settimeout(deadline.left())
            try:
                count = self._stream.send(bytes(rest[:_PIECE]))
            except TimeoutError as error:
                raise TimeoutError(deadline.shortfall()) from error
            if not count:
                raise EOFError
            deadline.progress(count)
            rest = rest[count:]

    def line(self, most: int, deadline: Deadline) -> bytes:
        """Return the next line without its end.

        Raises:
            TimeoutError: it does not come.
            EOFError: the host hung up.
            SchemaError: it is longer than `most` bytes.
        """
        searched = 0
        while (end := self._heard.find(b"\n", searched)) < 0 and len(self._heard) <= most:
            searched = len(self._heard)
            self._hear(deadline)
        if end < 0 or end > most:
            raise SchemaError(f"a line of more than {most} bytes")
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    def _bytes(self, size: int, deadline: Deadline) -> bytes:
        while len(self._heard) < size:
            self._hear(deadline)
        data = bytes(self._heard[:size])
        del self._heard[:size]
        return data

    def _hear(self, deadline: Deadline) -> None:
        self._stream.settimeout(deadline.left())
        try:
            data = self._stream.recv(_PIECE)
        except TimeoutError as error:
            raise TimeoutError(deadline.shortfall()) from error
        if not data:
            raise EOFError
        deadline.progress(len(data))
        self._heard += data
