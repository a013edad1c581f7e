"""Main loop of the host server: read requests from stdin, write answers to stdout."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from clusterjob.node.host_server import code_store, commands, host_check, jobs, requests
from clusterjob.node.system.codec import MalformedMessageError, UnknownMessageError

_IDLE_TIMEOUT = 600  # seconds without a request after which the session ends
Answer = tuple[dict[str, Any], bytes]
# The function for each request except `Facts`; it gets clusterjob's directory on this host and the
# request. Bytes follow the requests of `WITH_BODY`: these functions also get one that reads them.
HANDLERS: dict[type[Any], Callable[[Path, Any], dict[str, Any] | Answer]] = {
    requests.Check: host_check.check,
    requests.Fit: host_check.interpreter,
    requests.FindStored: code_store.find,
    requests.PollNode: jobs.poll_node,
    requests.PollJobs: jobs.poll_jobs,
    requests.Tree: jobs.tree,
    requests.Digests: jobs.digests,
    requests.Get: jobs.get,
    requests.RunCommand: commands.run,
    requests.ReapCommand: commands.reap,
    requests.DropCommand: commands.drop,
    requests.EnterJob: lambda *_: {},
    requests.ExecCommand: lambda *_: {},
    requests.Reserve: jobs.reserve,
    requests.Start: jobs.start,
    requests.Up: jobs.up,
    requests.Cancel: jobs.cancel,
    requests.RequestStop: jobs.request_stop,
    requests.Remove: jobs.remove,
    requests.Clean: jobs.clean,
}
WITH_BODY: dict[type[Any], Callable[[Path, Any, Callable[[int], bytes]], dict[str, Any]]] = {
    requests.Put: jobs.put,
    requests.Install: lambda home, request, read: code_store.install(home, request, read(-1)),
    requests.ReceiveFiles: code_store.receive,
}


class RequestBody:
    """The bytes that follow a request.

    Args:
        stream: the stream that they come from.
        size: their number.

    Attributes:
        left: the number of bytes that are not read yet.
    """

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream = stream
        self.left = size

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all remaining ones.

        Raises:
            EOFError: the submitter closed the connection.
        """
        wanted = self.left if size < 0 else min(size, self.left)
        data = self._stream.read(wanted)
        self.left -= len(data)
        if len(data) < wanted:
            raise EOFError
        return data


def main(home: str, node_zip: str) -> None:
    """Answer requests until stdin ends.

    Args:
        home: clusterjob's directory on this host.
        node_zip: path of the node zip.
    """
    while True:
        # After a network failure stdin never ends: SIGALRM, which has no handler, ends the process.
        signal.alarm(_IDLE_TIMEOUT)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        received = json.loads(line)
        body = RequestBody(sys.stdin.buffer, received.get("size", 0))
        request, data = None, b""
        try:
            request = requests.REQUESTS.decode(received)
            answer, data = _answer(Path(home), node_zip, request, body)
        except EOFError:
            return
        except UnknownMessageError as error:
            answer = {"error": f"unknown request {error.shown}"}
        except MalformedMessageError as error:
            answer = {"error": f"malformed request: {error}"}
        except OSError as error:
            path = f": {error.filename}" if error.filename else ""
            answer = {"error": f"{error.strerror or error}{path}"}
        except Exception:
            trace = traceback.format_exc().strip().replace("\n", " | ")
            answer = {"error": f"internal error of clusterjob: {trace}"}
        while body.left:
            body.read(1 << 20)
        sys.stdout.buffer.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()
        if isinstance(request, requests.EnterJob):
            from clusterjob.node.inside.program import main as enter

            enter()
            return
        if isinstance(request, requests.ExecCommand):
            commands.replace_process(request)
            return


def _answer(home: Path, node_zip: str, request: Any, body: RequestBody) -> Answer:
    if isinstance(request, requests.Facts):
        return host_check.facts(request, node_zip), b""
    if type(request) in WITH_BODY:
        return WITH_BODY[type(request)](home, request, body.read), b""
    answer = HANDLERS[type(request)](home, request)
    return answer if isinstance(answer, tuple) else (answer, b"")
