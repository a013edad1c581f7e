"""Answer the coordinator's questions about the stacks and the progress of a node's workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node import job_processes
from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.rendezvous import stack_messages
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.stacks.progress import Progress
from clusterjob.node.states import Order
from clusterjob.node.system import files
from clusterjob.node.workers.flight_recorder import Dumps

_SAMPLE_SECONDS = 1.5  # maximum time for one sample
_DUMP_SECONDS = 0.5  # seconds for torch's flight recorders
_SAVE_SECONDS = 1.9  # maximum time until the stacks are saved
_MAX_BYTES = 200_000  # of the stacks of one rank in a message, which has at most 256 KiB
# Numbers of threads, and of frames of each, until the stacks of a rank fit.
_SIZES = ((250, 250), (64, 100), (32, 50), (8, 25))
# No descriptor or thread is free, or a process has ended meanwhile.
_ERRORS = (OSError, ValueError, RuntimeError)


class StackReports:
    """The stacks and the progress of one node's workers.

    Args:
        forkserver: pid of the forkserver. Another process of the job may offer a false table.
        node_rank: this node.
        dumps: returns the dumps of torch's flight recorder in a round.
        signs: returns the monotonic time of the last output or heartbeat of a worker, and the
            step of the last heartbeat.
        send: sends a message to the coordinator.
        report: the state of this node.
        watch: reports the error of a background task.
    """

    def __init__(
        self,
        forkserver: int,
        node_rank: int,
        dumps: Callable[[int], Dumps],
        signs: Callable[[], tuple[float, int]],
        send: Callable[[Any], object],
        report: StateReport,
        watch: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self._forkserver = forkserver
        self._node_rank = node_rank
        self._dumps = dumps
        self._signs = signs
        self._send = send
        self._report = report
        self._watch = watch
        self._progress = Progress()
        self._tasks: set[asyncio.Task[None]] = set()

    def follow(self, order: Order, done: Order) -> None:
        """Answer new questions: take a sample of the stacks, send those of all living ranks.

        Args:
            order: what the coordinator wants.
            done: what it wanted of this round before.
        """
        if order.sample not in (0, done.sample):
            self._start(self._take_sample(order))
        if order.collect and not done.collect:
            self._start(self._collect(order))

    async def stacks(self, seconds: float) -> list[RankStack]:
        """Return the stacks of all living ranks of this node."""
        return await asyncio.to_thread(self._collect_now, seconds)

    async def save(self, job_dir: Path, round_: grouping.Round, why: str) -> tuple[str, int]:
        """Write the stacks of this node's ranks into its logs before they are stopped.

        Return the path of the text and the number of ranks; ("", 0) if there is no file.
        """
        with contextlib.suppress(asyncio.TimeoutError, *_ERRORS):
            found = await asyncio.wait_for(self.stacks(_SAMPLE_SECONDS), _SAVE_SECONDS)
            if found:
                dumps = self._dumps(round_.restart).request([each.rank for each in found], 0.0)
                write = functools.partial(grouping.write_evidence, why=why, dumps=dumps)
                loop = asyncio.get_running_loop()
                path = await loop.run_in_executor(files.disk, write, job_dir, round_, found)
                return path, len(found)
        return "", 0

    async def _collect(self, order: Order) -> None:
        dumps: tuple[str, ...] = ()
        with contextlib.suppress(*_ERRORS):
            found = await self.stacks(_SAMPLE_SECONDS)
            for stack in found:
                self._send(stack_messages.StackFound(order.round, bounded(stack)))
            dumps = await asyncio.to_thread(
                self._dumps(order.round).request,
                [each.rank for each in found],
                _DUMP_SECONDS if order.dumps else 0.0,
            )
        self._send(stack_messages.StacksCollected(order.round, dumps))
        if self._report.state.round == order.round:
            self._report.set(collected=True)

    async def _take_sample(self, order: Order) -> None:
        try:
            moved = await asyncio.to_thread(self._sample, first=order.first)
        except _ERRORS:  # without a sample, nothing shows that the workers stand still
            moved = True
        self._report.note_alive(*self._signs())
        if self._report.state.round == order.round:
            self._report.set(sampled=order.sample, moved=moved)

    def _sample(self, *, first: bool) -> bool:
        self._progress.begin()
        return self._progress.moved(self._collect_now(_SAMPLE_SECONDS), first=first)

    def _collect_now(self, seconds: float) -> list[RankStack]:
        found = job_processes.of_forkserver(self._forkserver)
        return collect(found, self._node_rank, seconds)

    def _start(self, answer: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(answer)
        self._watch(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def bounded(stack: RankStack) -> RankStack:
    """Return the stacks of a rank, with fewer threads and frames if they are too long to send."""
    for threads, frames in _SIZES:
        stack = replace(
            stack,
            threads=tuple(
                replace(thread, frames=thread.frames[:frames]) for thread in stack.threads[:threads]
            ),
        )
        if len(json.dumps(stack.to_json())) <= _MAX_BYTES:
            return stack
    return replace(stack, threads=())
