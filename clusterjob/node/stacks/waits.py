"""Recognize functions in which a thread waits: collectives, locks, queues, sockets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusterjob.node.stacks.frames import Frame, is_of_program

# Functions that wait, by the end of their file. "*": each function with a public name.
_TORCH = {
    "torch/distributed/distributed_c10d.py": {"*"},
    "torch/distributed/rendezvous.py": {"*"},
    "clusterjob/bootstrap.py": {"init"},
    "torch/distributed/nn/functional.py": {"*"},
    "torch/cuda/__init__.py": {"synchronize"},
    "torch/cuda/streams.py": {"synchronize", "wait"},
    "torch/utils/data/dataloader.py": {"__next__"},
}
_STANDARD_LIBRARY = {
    "concurrent/futures/_base.py": {"exception", "result", "wait"},
    "multiprocessing/connection.py": {"accept", "poll", "recv", "recv_bytes", "wait"},
    "multiprocessing/pool.py": {"get", "join", "wait"},
    "multiprocessing/popen_fork.py": {"poll", "wait"},
    "multiprocessing/process.py": {"join"},
    "multiprocessing/queues.py": {"get", "put"},
    "multiprocessing/synchronize.py": {"__enter__", "acquire", "wait"},
    "/queue.py": {"get", "join", "put"},
    "/selectors.py": {"select"},
    "/socket.py": {"accept", "create_connection", "readinto"},
    "/ssl.py": {"do_handshake", "read", "recv"},
    "/subprocess.py": {"_try_wait", "_wait", "call", "communicate", "run", "wait"},
    "/threading.py": {"__enter__", "acquire", "join", "wait", "wait_for"},
}
_WAITS = _TORCH | _STANDARD_LIBRARY
_FILES = tuple(_WAITS)
# Files that lie between a waiting function and the function that it waits in.
_PEERS = re.compile(r"torch/(?:distributed|cuda)/")
_BETWEEN = re.compile(r"/clusterjob/worker/|torch/distributed/c10d_logger\.py$")


@dataclass(frozen=True)
class Wait:
    """A function that waits.

    Attributes:
        function: its name, such as ``all_reduce`` or ``queue.get``.
        depth: the index of its frame.
    """

    function: str
    depth: int


def find(frames: Sequence[Frame]) -> Wait | None:
    """Return the outermost waiting function that all innermost frames belong to, or None.

    Args:
        frames: the frames of a thread, the innermost first.
    """
    found = None
    for depth, frame in enumerate(frames):
        if frame.line is None:  # C and C++
            continue
        file = next(filter(frame.file.endswith, _FILES), None)
        if file is None and found is not None and _BETWEEN.search(frame.file):
            continue
        if file is None or is_of_program(frame):
            break
        name, waits = short_name(frame), _WAITS[file]
        if name in waits or ("*" in waits and not name.startswith("_")):
            found = Wait(_label(file, name), depth)
    return found


def for_peers(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits in a collective, or for the GPU that runs it."""
    wait = find(frames)
    return wait is not None and bool(_PEERS.search(frames[wait.depth].file))


def short_name(frame: Frame) -> str:
    """Return a function's name without that of its class, which only py-spy knows."""
    return frame.function.rpartition(".")[2]


def _label(file: str, function: str) -> str:
    if file in _STANDARD_LIBRARY:
        return f"{os.path.basename(file).removesuffix('.py')}.{function}"
    return {"__next__": "DataLoader", "init": "bootstrap.init"}.get(function, function)
