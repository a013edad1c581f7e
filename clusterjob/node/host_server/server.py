"""Main loop of the host server: read requests from stdin, write answers to stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

from clusterjob.node.host_server import (
    code_store,
    commands,
    host_check,
    poll,
    poll_jobs,
    reachability,
    remote_process,
    results,
)

_IDLE_TIMEOUT = 600  # seconds without a request after which the session ends


class RequestBody:
    """The bytes that follow a request.

    Args:
        stream: the stream that they come from.
        size: their number.
    """

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self._left = size

    def read(self, size: int | None = None) -> bytes:
        """Return the next `size` bytes, or all remaining ones.

        Raises:
            EOFError: the submitter closed the connection.
        """
        wanted = self._left if size is None else min(size, self._left)
        data = self._stream.read(wanted)
        self._left -= len(data)
        if len(data) < wanted:
            raise EOFError
        return data

    def drain(self) -> None:
        """Skip the remaining bytes."""
        while self._left:
            self.read(1 << 20)


class RequestHandler:
    """Answers the requests of one session.

    Args:
        home: clusterjob's directory on this host.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._listener: reachability.Listener | None = None
        self._work = remote_process.RemoteProcesses(home)
        self._commands = commands.Commands(home)

    def answer(self, request: dict[str, Any], body: RequestBody) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request: a JSON object and bytes."""
        op = request["op"]
        if op in ("poll_jobs", "run", "reap", "drop"):
            return (
                poll_jobs.poll_jobs(self.home, request)
                if op == "poll_jobs"
                else self._commands.answer(request)
            )
        if op in ("poll_node", "tree", "digests", "get"):
            return self._read(op, request)
        if op in ("listen", "stop_listening", "probe"):
            return self._meet(op, request), b""
        if op == "check":
            return host_check.check(self.home, request), b""
        if op == "fit":
            return host_check.interpreter(self.home / "jobs" / request["job"], request), b""
        if op == "facts":
            # sys.path[0] is the node zip that this process runs from.
            return host_check.facts(
                os.path.expanduser(request["workdir"]), request, node_zip=sys.path[0]
            ), b""
        if op == "put":
            return self._work.put(request, body.read), b""
        if op == "install":
            return code_store.install(self.home, request, packed=body.read()), b""
        if op == "blobs":
            return code_store.receive(self.home, request, read=body.read), b""
        return self._work.answer(request), b""

    def _read(self, op: str, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        job_dir = self.home / "jobs" / request["job"]
        if op == "poll_node":
            return poll.poll_node(job_dir, request)
        root = Path(os.path.normpath(job_dir / request["workdir"]))
        if op == "get":
            return results.get(root, request)
        return (
            results.tree(root, request) if op == "tree" else (results.digests(root, request), b"")
        )

    def _meet(self, op: str, request: dict[str, Any]) -> dict[str, Any]:
        if op == "probe":
            return reachability.probe(
                request["addresses"],
                request["port"],
                nonce=request["nonce"],
                timeout=request["wait"],
            )
        if op == "listen":
            self._listener = reachability.Listener(request["ports"], request["nonce"])
            return {"port": self._listener.port, "addresses": reachability.own_addresses()}
        if self._listener is not None:
            self._listener.close()
        return {}


def main(home: str) -> None:
    """Answer requests until stdin ends."""
    handler = RequestHandler(Path(home))
    while True:
        # After a network failure stdin never ends: SIGALRM, which has no handler, ends the process.
        signal.alarm(_IDLE_TIMEOUT)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        request = json.loads(line)
        body = RequestBody(sys.stdin.buffer, request.get("size", 0))
        try:
            answer, data = handler.answer(request, body)
        except EOFError:
            return
        except OSError as error:
            path = f": {error.filename}" if error.filename else ""
            answer, data = {"error": f"{error.strerror or error}{path}"}, b""
        except Exception:
            trace = traceback.format_exc().strip().replace("\n", " | ")
            answer, data = {"error": f"internal error of clusterjob: {trace}"}, b""
        body.drain()
        sys.stdout.buffer.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()
