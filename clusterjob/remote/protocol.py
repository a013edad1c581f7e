"""Client side of the host server's protocol: calls and answers with limits and schemas.

Calls and answers have the same form: one line of JSON, followed by bytes. Length and time of an
answer are limited. `clusterjob.node.host_server.server` is the server side.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from clusterjob.errors import HostError
from clusterjob.remote.answer_schemas import (
    ANSWER_HEADER,
    ANSWERS,
    MAX_ERROR,
    NO_ANSWER,
    AnswerSchema,
    SchemaError,
    check,
)
from clusterjob.remote.transport import ByteStream

# A host makes progress if it sends or accepts this number of bytes within its timeout.
PROGRESS_BYTES = 1 << 14
_CHUNK = 1 << 16
# Time limit of an answer that has begun, as a multiple of the timeout; not for bulk answers.
_ANSWER_TIMEOUTS = 3
_MALFORMED_HINT = (
    "something prints into the protocol (a sitecustomize?), or the host is not to be trusted"
)


class Deadline:
    """Deadline of one exchange; each `PROGRESS_BYTES` bytes extend it.

    A host that sends only one byte per second cannot extend it.

    Args:
        seconds: time until the first byte.
        stride: seconds for each `PROGRESS_BYTES` bytes after that; None for `seconds`.
        total: time limit for all bytes in seconds; None for no limit.
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
        """Return the remaining seconds.

        Raises:
            TimeoutError: the deadline has passed; the message has the number of received bytes.
        """
        left = (self._end if self._last is None else min(self._end, self._last)) - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.shortfall())
        return left

    def progress(self, count: int) -> None:
        """Count bytes that were received or sent."""
        first = not self._moved_in_all
        self._moved += count
        self._moved_in_all += count
        if first or self._moved >= PROGRESS_BYTES:
            self._seconds = self._stride
            self._end = time.monotonic() + self._stride
        if self._moved >= PROGRESS_BYTES:
            self._moved = 0

    def shortfall(self) -> str:
        """Return the error message for a timeout."""
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
    """Sends requests to a host, one at a time.

    After an error it closes the stream; otherwise the rest of an answer would be read as the next
    answer.

    Args:
        label: the host, for errors.
        stream: the connection.
        timeout: seconds without progress after which a request fails; a request may set its own.
        last_stderr_line: returns the last line that the host wrote on stderr.
    """

    def __init__(
        self,
        label: str,
        stream: ByteStream,
        timeout: float,
        last_stderr_line: Callable[[], str] = lambda: "",
    ) -> None:
        self.label = label
        self._stream = stream
        self._timeout = timeout
        self._last_stderr_line = last_stderr_line
        self._heard = bytearray()

    def ask(
        self,
        call: str,
        *,
        body: bytes | Iterable[bytes] = b"",
        size: int = 0,
        timeout: float | None = None,
        max_bytes: int | None = None,
        bulk: bool = False,
        **arguments: Any,
    ) -> tuple[Any, bytes]:
        """Call a function of the host server; see `clusterjob.remote.session.Session.ask`."""
        pieces: Iterable[bytes] = [body] if isinstance(body, bytes) else body
        total = len(body) if isinstance(body, bytes) else size
        seconds = timeout or self._timeout
        with self.closed_on_error():
            deadline = Deadline(seconds)
            line = {"call": call, "arguments": arguments, "size": total}
            self.send(json.dumps(line).encode() + b"\n", deadline)
            for piece in pieces:
                self.send(piece, deadline)
            longest = None if bulk else seconds + _ANSWER_TIMEOUTS * self._timeout
            answer, data = self._receive(
                ANSWERS.get(call, NO_ANSWER),
                Deadline(seconds, min(seconds, self._timeout), total=longest),
                max_bytes=max_bytes,
            )
        if "error" in answer:
            raise HostError(self.label, answer["error"][:MAX_ERROR])
        return answer, data

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the stream after any error, and raise the error as one line.

        Raises:
            HostError: no answer came in time, it is malformed, or the connection broke.
        """
        try:
            yield
        except TimeoutError as error:
            raise self._failure(str(error)) from error
        except (SchemaError, ValueError, RecursionError) as error:
            why = f": {error}" if isinstance(error, SchemaError) else ""
            failure = self._failure(f"it sends a malformed answer{why}", hint=_MALFORMED_HINT)
            raise failure from error
        except (OSError, EOFError) as error:
            why = self._last_stderr_line()
            raise self._failure(f"the connection broke{f': {why}' if why else ''}") from error
        except BaseException:
            self._stream.close()
            raise

    def _failure(self, why: str, hint: str = "") -> HostError:
        self._stream.close()
        return HostError(self.label, why, hint=hint)

    def _receive(
        self, expected: AnswerSchema, deadline: Deadline, max_bytes: int | None
    ) -> tuple[Any, bytes]:
        most = expected.max_bytes if max_bytes is None else max_bytes
        answer = json.loads(self.line(expected.max_line, deadline))
        check(answer, ANSWER_HEADER)
        if answer["size"] > most:
            raise SchemaError(f"it announces {answer['size']} bytes, more than {most}")
        if "error" not in answer:
            check(answer, expected.schema)
        return answer, self._bytes(answer["size"], deadline)

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send bytes.

        Raises:
            TimeoutError: the host does not accept them in time.
            OSError: the connection broke.
        """
        rest = memoryview(data)
        while rest:
            self._stream.settimeout(deadline.left())
            try:
                count = self._stream.send(bytes(rest[:_CHUNK]))
            except TimeoutError as error:
                raise TimeoutError(deadline.shortfall()) from error
            if not count:
                raise EOFError
            deadline.progress(count)
            rest = rest[count:]

    def line(self, most: int, deadline: Deadline) -> bytes:
        """Return the next line without its line end.

        Raises:
            TimeoutError: the line does not arrive in time.
            EOFError: the host closed the connection.
            SchemaError: the line is longer than the given number of bytes.
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
            data = self._stream.recv(_CHUNK)
        except TimeoutError as error:
            raise TimeoutError(deadline.shortfall()) from error
        if not data:
            raise EOFError
        deadline.progress(len(data))
        self._heard += data
