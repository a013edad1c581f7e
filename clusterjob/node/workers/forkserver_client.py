"""The agent's connection to its forkserver: messages, and the pending round."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from dataclasses import dataclass, field
from typing import Any

from clusterjob.node.system import processes
from clusterjob.node.workers import forkserver_messages as messages

_QUIT_TIMEOUT = 3.0  # seconds for the forkserver to exit


@dataclass
class ForkserverClient:
    """The agent's side of a forkserver process.

    Attributes:
        pid: the process id.
        control: the agent's end of the socket pair; EOF means that the forkserver has ended.
        early: the signals that arrived before the agent's event loop ran.
        ready: whether the forkserver has finished its imports and accepts messages.
        gone: whether the forkserver has ended and was reaped.
        error: the reason why it cannot start workers; empty while it can.
        pending: the round that waits until the forkserver is ready, with the store's socket.
    """

    pid: int
    control: socket.socket
    early: list[int] = field(default_factory=list)
    ready: bool = False
    gone: bool = False
    error: str = ""
    pending: tuple[messages.StartRound, socket.socket | None] | None = None
    _reaped: asyncio.Event = field(default_factory=asyncio.Event)

    def start_round(self, message: messages.StartRound, store: socket.socket | None) -> bool:
        """Start a round of workers as soon as the forkserver is ready; return whether it is ready.

        Args:
            message: the round.
            store: the listening socket for torch's store, or None; it is sent to the forkserver and
                closed in the agent.
        """
        self.pending = (message, store)
        return self.ready and self.mark_ready()

    def mark_ready(self) -> bool:
        """Send the pending round, if there is one; return whether a round was sent.

        A round that was dropped during the imports is never sent.
        """
        self.ready = True
        if self.pending is None:
            return False
        (message, store), self.pending = self.pending, None
        self.send(message, store)
        return True

    def drop_round(self) -> None:
        """Drop the pending round."""
        if self.pending is not None and self.pending[1] is not None:
            self.pending[1].close()
        self.pending = None

    def send(self, message: Any, sent: socket.socket | None = None) -> None:
        """Send a message; ignore an error, because the agent also sees EOF on the socket.

        Until the forkserver is ready, the kernel keeps the message.

        Args:
            message: the message.
            sent: a socket for the forkserver, which is closed here; None without one.
        """
        with contextlib.suppress(OSError):
            descriptors = [] if sent is None else [sent.fileno()]
            socket.send_fds(self.control, [messages.FROM_AGENT.encode(message)], descriptors)
        if sent is not None:
            sent.close()

    def receive(self) -> Any:
        """Return one message of the forkserver when the socket is readable; None at EOF."""
        try:
            data = self.control.recv(messages.MESSAGE_BYTES)
        except OSError:
            return None
        return messages.FROM_FORKSERVER.decode(json.loads(data)) if data else None

    def reap(self) -> tuple[int, str | None]:
        """Reap the ended forkserver; return its exit code and the name of its signal or None."""
        _, status = os.waitpid(self.pid, 0)
        self.gone = True
        self._reaped.set()
        return processes.exit_code_of(status)

    async def quit(self) -> None:
        """Let the forkserver stop everything and exit; kill it after 3 s. Wait for `reap`."""
        self.send(messages.Quit())  # which it reads after its imports
        seconds = _QUIT_TIMEOUT if self.ready else 0.0
        kill = asyncio.get_running_loop().call_later(
            seconds, processes.send_signal, self.pid, signal.SIGKILL
        )
        await self._reaped.wait()
        kill.cancel()
