"""Accept connections at node 0, with a bound on those that have not authenticated."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from clusterjob.node.rendezvous import protocol

MAX_WAITING = 128  # unauthenticated connections, besides one for each agent that has not joined
_PAUSE = 0.1  # seconds after a failed accept(2), for example without free descriptors

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Acceptor:
    """Accept connections and serve each in its own task.

    It replaces asyncio.start_server, which sets the backlog to 100 and accepts all waiting
    connections before the first handler runs: a thousand idle connections would take every
    descriptor of this process. No error of accept(2) ends the job.

    Args:
        listener: a listening socket.
        handle: serves a connection until its end.
        max_waiting: returns how many connections may be unauthenticated now. If there are more,
            the oldest is closed: an agent authenticates in milliseconds, and retries.
        dropped: called with the address and the reason when a connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        handle: Handler,
        max_waiting: Callable[[], int],
        dropped: Callable[[str, str], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._handle = handle
        self._max_waiting = max_waiting
        self._dropped = dropped
        # The addresses of unauthenticated peers, oldest first.
        self._waiting: dict[asyncio.Task[None], str] = {}
        self._all: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        loop = asyncio.get_running_loop()
        accepted = 0  # since other tasks ran
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno != errno.ECONNABORTED:
                    self._drop_oldest(f"accept: {error.strerror or error}")
                    await asyncio.sleep(_PAUSE)
                continue
            task = asyncio.create_task(self._serve_one(connection))
            self._waiting[task] = str(address)
            self._all.add(task)
            if len(self._waiting) > max(1, self._max_waiting()):
                self._drop_oldest("too many unauthenticated connections")
            accepted += 1
            # sock_accept does not yield while connections wait. With one at a time, thousands of
            # agents that connect at once would fill the backlog, and the kernel drops the others.
            # But a connection must be read before enough others come to drop it as the oldest.
            if accepted >= self._max_waiting() // 2:
                accepted = 0
                await asyncio.sleep(0)

    def admit(self) -> None:
        """Count the current task's connection as authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._waiting.pop(task, None)

    async def close(self, timeout: float) -> None:
        """Close the listener, and after `timeout` seconds all connections that are still open."""
        self._listener.close()
        for task in list(self._waiting):
            task.cancel()
        if self._all:
            await asyncio.wait(self._all, timeout=timeout)
        for task in self._all:
            task.cancel()
        if self._all:
            await asyncio.wait(self._all)

    def _drop_oldest(self, why: str) -> None:
        oldest = next(iter(self._waiting), None)
        if oldest is not None:
            self._dropped(self._waiting.pop(oldest), why)
            oldest.cancel()

    async def _serve_one(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(
                sock=connection, limit=protocol.LINE_BYTES
            )
            await self._handle(reader, writer)
        except asyncio.CancelledError:
            pass  # the connection is closed below, and no task awaits this one
        except Exception as error:  # wrong input closes only this connection
            self._dropped(str(self._waiting.get(task, "")), f"{type(error).__name__}: {error}")
        finally:
            if writer is None:
                connection.close()
            else:
                writer.transport.abort()
            self._waiting.pop(task, None)
            self._all.discard(task)
