"""Send the stacks of this node's ranks to `clusterjob stacks`."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from clusterjob.node import job_processes
from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import STDOUT, Stream, Streams
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.offer import anonymous_file

_MAX_SECONDS = 30.0  # for the stacks, and for sending them


def send(request: dict[str, Any]) -> None:
    """Collect the stacks and send them as one JSON object on stream `STDOUT`.

    Args:
        request: the submitter's request; ``stacks`` has ``timeout`` and ``native``.
    """
    warnings: list[str] = []
    stacks = collect(
        job_processes.on_node(request["job"], request["node"]),
        request["node"],
        min(request["stacks"]["timeout"], _MAX_SECONDS),
        rank=request["rank"],
        native=request["stacks"]["native"],
        warn=warnings.append,
    )
    answer = {"ranks": [each.to_json() for each in stacks], "warnings": warnings}
    file = anonymous_file("clusterjob-answer")
    with open(file, "wb", closefd=False) as stream:
        stream.write(json.dumps(answer, separators=(",", ":")).encode())
    os.lseek(file, 0, os.SEEK_SET)
    connection = Streams(0, 1, control=lambda *_: None)
    connection.add(Stream(STDOUT, source=file, close_source=lambda: os.close(file)))
    end = time.monotonic() + _MAX_SECONDS
    ending = False
    while not connection.closed and time.monotonic() < end and not (ending and connection.sent):
        connection.step(0.1)
        if not (connection.reading or ending):
            connection.send(streams.EXIT, payload=json.dumps({"code": 0, "ended": False}).encode())
            ending = True
