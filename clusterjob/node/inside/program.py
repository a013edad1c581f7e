"""Entry point of the program that runs commands, relays and stack requests inside a job.

It reads one line of JSON, the request, from stdin and answers with one line: `streams.MARKER` and
a JSON object. Then stdin and stdout carry the frames of `streams`. It ends, with all processes
below it, when its command ends, when the submitter's side closes stdin or is silent, or when the
job ends.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from clusterjob.node.inside import command, relay, search, stacks, streams
from clusterjob.node.inside.streams import FrameError, Streams
from clusterjob.node.system import processes

_MAX_REQUEST = 16 << 20  # bytes; execve(2) takes less
_SILENCE = 120.0  # seconds without a frame after which the submitter counts as dead
_START_TIMEOUT = 10.0  # seconds for workers that are being started
_TICK = 0.2  # seconds between two checks of the command and the job
_SHORT_TICK = 0.01  # the same while the command ends
_LAST_OUTPUT = 1.0  # seconds for the output of a command that was stopped
_FLUSH = 10.0  # seconds for the last frames


def main() -> None:
    """Serve one request."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)  # the submitter sends nothing after the line before the answer
        line += data
        if not data or len(line) > _MAX_REQUEST:
            return
    request = json.loads(line)
    processes.adopt_orphans()
    try:
        place = _find(request)
    except search.NotHereError as error:
        _answer({"error": error.facts})
        return
    if request.get("stacks"):
        _answer({"rank": place.rank, "host": socket.gethostname(), "stacks": True})
        stacks.send(request)
        return
    enter = command.enter_container(place)
    _answer({"rank": place.rank, "host": socket.gethostname(), "outside": enter is None})
    try:
        _Session(place, request, enter or []).serve()
    except FrameError as error:
        print(f"clusterjob: {error}", file=sys.stderr)


def _find(request: dict[str, Any]) -> search.WorkerPlace:
    """Return the worker; wait a moment for workers that are being started."""
    end = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            return search.find(request["job"], request["node"], request["rank"])
        except search.NotHereError as error:
            starting = error.facts["why"] == "starting" and not request.get("stacks")
            if not starting or time.monotonic() > end:
                raise
        time.sleep(_TICK)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.flush()
    data = streams.MARKER + json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data) :]


class _Session:
    """The command or the relay of one request."""

    def __init__(
        self, place: search.WorkerPlace, request: dict[str, Any], enter: Sequence[str]
    ) -> None:
        self._place = place
        self._stopped = False
        self._connection = Streams(0, 1, control=self._control)
        self._command: command.Command | None = None  # None for a relay
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if not request.get("relay"):
            terminal = request["terminal"]
            self._command = command.Command(
                self._connection,
                place,
                argv=request["argv"],
                enter=enter,
                terminal=None if terminal is None else (terminal[0], terminal[1], terminal[2]),
                title=f"{request['job']} rank {place.rank}",
                stdin=request["stdin"],
            )

    def serve(self) -> None:
        """Carry the streams until the end; leave no process behind."""
        job_ended = False
        try:
            while not (self._connection.closed or self._stopped):
                self._connection.step(
                    _SHORT_TICK if self._command is not None and self._command.closing else _TICK
                )
                if self._command is not None and self._command.poll():
                    break
                if self._connection.silence > _SILENCE:
                    break
                if self._place.ended():
                    job_ended = True
                    break
        finally:
            if self._command is not None:
                self._command.stop()
        self._last_frames(ended=job_ended or self._stopped)

    def _last_frames(self, *, ended: bool) -> None:
        """Send the rest of the command's output, then its exit code."""
        end = time.monotonic() + (_LAST_OUTPUT if self._command is not None else 0.0)
        while self._connection.reading and not self._connection.closed and time.monotonic() < end:
            self._connection.step(_SHORT_TICK)
        code = None if self._command is None else self._command.code
        self._connection.send(
            streams.EXIT, payload=json.dumps({"code": code, "ended": ended}).encode()
        )
        end = time.monotonic() + _FLUSH
        while not (self._connection.sent or self._connection.closed) and time.monotonic() < end:
            self._connection.step(_SHORT_TICK)

    def _on_signal(self, *_: Any) -> None:
        self._stopped = True

    def _control(self, kind: int, number: int, payload: bytes) -> None:
        running = self._command
        if kind == streams.OPEN and running is None:
            relay.open_connection(self._connection, number, payload)
        elif kind == streams.SIZE and running and len(payload) == streams.TERMINAL_SIZE.size:
            running.resize(*streams.TERMINAL_SIZE.unpack(payload))
        elif kind == streams.SIGNAL and running and len(payload) == 1 and payload[0] < signal.NSIG:
            running.signal(payload[0])
        elif kind != streams.RESET:  # the reason of the submitter's side interests nobody here
            raise FrameError(f"a frame of kind {kind}")


if __name__ == "__main__":
    main()
