"""The agent's end of its starter: orders to it, what it says, and a round of workers that waits
until it can take it.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from clusterjob.node.system import processes
from clusterjob.node.workers import forkserver


@dataclass
class StarterProcess:
    """A starter that was forked.

    Attributes:
        pid: its process.
        control: this end of the socket between the two; its end is the starter's.
        early: the signals that came while there was no event loop to hear them.
        ready: it has imported what it imports, and takes orders.
        gone: it is gone, and was waited for.
        trouble: why it cannot start workers; empty while it can.
    """

    pid: int
    control: socket.socket
    early: list[int] = field(default_factory=list)
    ready: bool = False
    gone: bool = False
    trouble: str = ""
    _pending: tuple[bytes, socket.socket | None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether there is a round of which the starter was not yet told."""
        return self._pending is not None

    def begin(self, message: bytes, store: socket.socket | None) -> bool:
        """Have it start a round of workers as soon as it is ready; return whether it is.

        Args:
            message: of `starter.world_message`.
            store: the socket that torch's store is to serve, or None; it is the starter's from now
                on.
        """
        self._pending = (message, store)
        return self.ready and self.serve()

    def serve(self) -> bool:
        """Note that it is ready, and hand it the round that waits, if any; one that was called off
        while it imported never begins.
        """
        self.ready = True
        if self._pending is None:
            return False
        (message, store), self._pending = self._pending, None
        if store is None:
            self.control.send(message)
        else:
            socket.send_fds(self.control, [message], [store.fileno()])
            store.close()
        return True

    def call_off(self) -> None:
        """Forget the round that waits."""
        if self._pending is not None and self._pending[1] is not None:
            self._pending[1].close()
        self._pending = None

    def tell(self, message: dict[str, Any]) -> None:
        """Send it an order; one that is gone is heard of by itself."""
        try:
            self.control.send(json.dumps(message).encode())
        except OSError:
            pass

    def hear(self) -> dict[str, Any] | None:
        """Return what it says, once there is something to be read; None when it has ended."""
        try:
            data = self.control.recv(forkserver.MESSAGE_BYTES)
        except OSError:
            return None
        return json.loads(data) if data else None

    def reap(self) -> tuple[int, str | None]:
        """Wait for it, which has ended; return its exit code and the signal that ended it, if any."""
        _, status = os.waitpid(self.pid, 0)
        self.gone = True
        return processes.exit_code_of(status)
