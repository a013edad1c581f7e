"""Main loop of the host server: read requests from stdin, write answers to stdout."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from clusterjob.node.host_server import (
    cleaning,
    code_store,
    commands,
    host_check,
    poll,
    remote_process,
    requests,
    results,
)
from clusterjob.node.system.codec import MalformedMessageError, UnknownMessageError

_IDLE_TIMEOUT = 600  # seconds without a request after which the session ends
_Answer = tuple[dict[str, Any], bytes]


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
        node_zip: path of the node zip.

    Attributes:
        then: what this process does after the answer, instead of further requests.
    """

    def __init__(self, home: Path, node_zip: str) -> None:
        self._home = home
        self.then: Callable[[], None] | None = None
        self._body = RequestBody(io.BytesIO(), 0)
        work = remote_process.RemoteProcesses(home)
        scheduler = commands.Commands(home)
        self._handlers: dict[type[Any], Callable[[Any], dict[str, Any] | _Answer]] = {
            requests.Check: lambda request: host_check.check(home, request),
            requests.Fit: lambda request: host_check.interpreter(
                self._job_dir(request.job), request
            ),
            requests.Facts: lambda request: host_check.facts(request, node_zip=node_zip),
            requests.Put: lambda request: work.put(request, self._body.read),
            requests.Install: lambda request: code_store.install(
                home, request, packed=self._body.read()
            ),
            requests.FindStored: lambda request: code_store.find(home, request),
            requests.ReceiveFiles: lambda request: code_store.receive(
                home, request, read=self._body.read
            ),
            requests.PollNode: lambda request: poll.poll_node(self._job_dir(request.job), request),
            requests.PollJobs: lambda request: poll.poll_jobs(home, request),
            requests.Tree: lambda request: results.tree(self._workdir(request), request),
            requests.Digests: lambda request: results.digests(self._workdir(request), request),
            requests.Get: lambda request: results.get(self._workdir(request), request),
            requests.RunCommand: scheduler.run,
            requests.ReapCommand: scheduler.reap,
            requests.DropCommand: scheduler.drop,
            requests.EnterJob: lambda _: self._hand_over(_enter_job),
            requests.ExecCommand: lambda request: self._hand_over(
                lambda: scheduler.replace_process(request)
            ),
            requests.Reserve: work.reserve,
            requests.Start: work.start,
            requests.Up: work.up,
            requests.Cancel: work.cancel,
            requests.RequestStop: work.request_stop,
            requests.Remove: work.remove,
            requests.Clean: lambda request: cleaning.clean(home, request),
        }

    def answer(self, request: requests.HostRequest, body: RequestBody) -> _Answer:
        """Return the answer to a request: a JSON object and bytes."""
        self._body = body
        answer = self._handlers[type(request)](request)
        return answer if isinstance(answer, tuple) else (answer, b"")

    def _job_dir(self, job_id: str) -> Path:
        return self._home / "jobs" / job_id

    def _workdir(self, request: requests.WorkdirRequest) -> Path:
        return Path(os.path.normpath(self._job_dir(request.job) / request.workdir))

    def _hand_over(self, then: Callable[[], None]) -> dict[str, Any]:
        self.then = then
        return {}


def _enter_job() -> None:
    from clusterjob.node.inside.program import main as enter

    enter()


def main(home: str, node_zip: str) -> None:
    """Answer requests until stdin ends."""
    handler = RequestHandler(Path(home), node_zip)
    while True:
        # After a network failure stdin never ends: SIGALRM, which has no handler, ends the process.
        signal.alarm(_IDLE_TIMEOUT)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        received = json.loads(line)
        body = RequestBody(sys.stdin.buffer, received.get("size", 0))
        try:
            answer, data = handler.answer(requests.REQUESTS.decode(received), body)
        except EOFError:
            return
        except UnknownMessageError as error:
            answer, data = {"error": f"unknown request {error.shown}"}, b""
        except MalformedMessageError as error:
            answer, data = {"error": f"malformed request: {error}"}, b""
        except OSError as error:
            path = f": {error.filename}" if error.filename else ""
            answer, data = {"error": f"{error.strerror or error}{path}"}, b""
        except Exception:
            trace = traceback.format_exc().strip().replace("\n", " | ")
            answer, data = {"error": f"internal error of clusterjob: {trace}"}, b""
        body.drain()
        sys.stdout.buffer.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()
        if handler.then is not None:
            handler.then()
            return
