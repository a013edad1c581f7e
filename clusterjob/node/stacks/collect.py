"""Collect the stacks of all ranks of one node at once, from any process of the same user."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterable, Mapping

from clusterjob.node.job_processes import NodeProcesses
from clusterjob.node.stacks import kernel, native_frames, py_spy
from clusterjob.node.stacks.frames import RankStack, ThreadStack
from clusterjob.node.stacks.request import POLL_SECONDS, StackRequest
from clusterjob.node.system import processes

_MAX_RANKS = 256
_PY_SPY_SECONDS = 0.5  # at the end of the timeout, for ranks that do not answer
_SHORT_POLL = 0.0005  # seconds; the pause grows up to `POLL_SECONDS`


def collect(
    found: NodeProcesses,
    node_rank: int,
    timeout: float,
    *,
    rank: int | None = None,
    native: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> list[RankStack]:
    """Return the stacks of the living ranks of a node, in the order of ranks.

    Args:
        found: the processes of the node.
        node_rank: the node's rank.
        timeout: timeout for all ranks, in seconds. A rank that does not answer in time is
            returned with its kernel state.
        rank: the only rank to ask; None for all.
        native: whether to add the frames of C and C++; this stops each thread for a moment.
        warn: called with one line if the native frames cannot be had.
    """
    asked = [each for each in living(found) if rank in (None, each[0])]
    return of_ranks(asked, node_rank, timeout, native=native, warn=warn)


def living(found: NodeProcesses) -> list[tuple[int, int]]:
    """Return the rank and the pid of each rank of a node that has not ended."""
    pids = []
    for each in found.ranks:
        fields = processes.stat_fields(each.pid)
        # The forkserver's table has workers that have ended: their pids may be used again.
        own = fields is not None and found.parent in (None, int(fields[1]))
        if each.rank is not None and own:
            pids.append((each.rank, each.pid))
    return pids[:_MAX_RANKS]


def of_ranks(
    ranks: Iterable[tuple[int, int]],
    node_rank: int,
    timeout: float,
    *,
    native: bool = False,
    warn: Callable[[str], None] = lambda _: None,
) -> list[RankStack]:
    """Return the stacks of some processes of this machine.

    Args:
        ranks: (rank, pid) of each.
        node_rank: the node's rank.
        timeout: timeout for all ranks, in seconds.
        native: as in `collect`.
        warn: as in `collect`.
    """
    end = time.monotonic() + timeout
    asked = []
    for rank, pid in ranks:
        request = _request(pid)
        state = kernel.state(request.pid)
        # A stopped process would answer when it continues, and an ended one never.
        if state.startswith((*kernel.STOPPED, kernel.ENDED)):
            request.close()
        asked.append((rank, request, state))
    _wait([request for _, request, _ in asked], end - min(_PY_SPY_SECONDS, timeout / 4))
    found = {request.pid: request.answer() for _, request, _ in asked}
    # Of a rank that does not answer, the state now.
    states = {
        request.pid: state if _is_known(found[request.pid]) else kernel.state(request.pid)
        for _, request, state in asked
    }
    silent = [pid for pid, threads in found.items() if not _is_known(threads)]
    dumps = py_spy.dump([pid for pid in silent if states[pid] != kernel.ENDED], end)
    found |= {pid: threads for pid, threads in dumps.items() if _is_known(threads)}
    if native:
        found = native_frames.add(found, warn)
    host = socket.gethostname()
    return [
        RankStack(
            rank,
            node_rank,
            host,
            request.pid,
            state=states[request.pid],
            answered=_is_known(found[request.pid]),
            threads=tuple(
                thread
                for index, thread in enumerate(found[request.pid].values())
                if thread.frames or not index
            ),
        )
        for rank, request, _ in asked
    ]


def _is_known(threads: Mapping[int, ThreadStack]) -> bool:
    """Return whether the stack of the main thread is known, which is the first one."""
    return any(thread.frames for thread in itertools.islice(threads.values(), 1))


def _request(pid: int) -> StackRequest:
    """Ask a rank's process, or the nearest process below it that offers its stacks.

    The rank may be a shell or another program that runs Python.
    """
    request = StackRequest(pid)
    if request.offered:
        return request
    for below in processes.descendants(pid):
        other = StackRequest(below)
        if other.offered:
            request.close()
            return other
        other.close()
    return request


def _wait(requests: list[StackRequest], end: float) -> None:
    """Advance the requests until all are done, or the time has passed."""
    pause = _SHORT_POLL
    while time.monotonic() < end:
        left = [request for request in requests if not request.done]
        if not left:
            return
        # Not any(): each request must advance.
        if sum(request.step() for request in left):
            pause = _SHORT_POLL
        else:
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(2 * pause, POLL_SECONDS)
