"""Accept connections at node 0, whatever strangers open: few wait unauthenticated, and no error of
accept(2) ends the job.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from clusterjob.node.rendezvous import protocol

MOST_WAITING = 128  # unauthenticated connections beyond the agents that are still to come
_PAUSE = 0.1  # seconds after an accept that failed, as for want of descriptors

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Acceptor:
    """Accepts connections one by one, and hands each to a task of its own.

    asyncio.start_server cannot do it: it sets the backlog to 100, and accepts all that wait before
    the first handler runs, so that a thousand idle connections take every descriptor of this
    process.

    Args:
        listener: a socket that listens.
        handle: serves a connection until its end.
        most_waiting: returns how many connections may be unauthenticated now; beyond it the oldest
            one is closed. An agent authenticates in milliseconds, and tries again.
        dropped: is told the reason for each connection that is closed so.
    """

    def __init__(
        self,
        listener: socket.socket,
        handle: Handler,
        most_waiting: Callable[[], int],
        dropped: Callable[[str, str], None],
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._handle = handle
        self._most_waiting = most_waiting
        self._dropped = dropped
        self._waiting: dict[
            asyncio.Task[None], str
        ] = {}  # unauthenticated, oldest first; the peer's address
        self._all: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
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
            if len(self._waiting) > max(1, self._most_waiting()):
                self._drop_oldest("too many connections wait unauthenticated")
            await asyncio.sleep(0)  # sock_accept does not yield while connections wait

    def admit(self) -> None:
        """Count the current task's connection as authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._waiting.pop(task, None)

    async def close(self, patience: float) -> None:
        """Close the listener, give the peers some seconds (patience) to hang up, then hang up."""
        self._listener.close()
        for task in list(self._waiting):
            task.cancel()
        if self._all:
            await asyncio.wait(self._all, timeout=patience)
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
            pass  # closed here; nobody waits for this task, so nobody is told
        except Exception as error:  # whatever a stranger sends harms his connection alone
            self._dropped(str(self._waiting.get(task, "")), f"{type(error).__name__}: {error}")
        finally:
            if writer is None:
                connection.close()
            else:
                writer.transport.abort()
            self._waiting.pop(task, None)
            self._all.discard(task)
