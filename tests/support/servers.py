"""A real HTTP server that answers as a test wants, and a place that never answers."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any


class Hook(http.server.ThreadingHTTPServer):
    """A webhook on a free port of loopback.

    Attributes:
        received: the messages that were answered with 200.
        codes: the HTTP codes of the next answers; afterwards each answer is 200.
        requests: the method and path of every request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.received: list[dict[str, Any]] = []
        self.codes: list[int] = []
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"json://127.0.0.1:{self.server_port}/pa55word"

    @property
    def states(self) -> list[str]:
        """The states that the titles of the received messages name."""
        return [message["title"].partition(" ")[2] for message in self.received]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200 and body:
            self.server.received.append(json.loads(body))
        self.send_response(code)
        if code in (301, 302, 307):
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def webhook() -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Yield the URL of a server that accepts connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(50)
        yield f"json://127.0.0.1:{listener.getsockname()[1]}/pa55word"
