"""Probe workers that other ranks wait for, in the forkserver and without blocking it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from clusterjob.node.logs.log_files import append
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers import stacks
from clusterjob.node.workers.worker_process import RunningWorker

# Limits of a stack that is sent to the agent; the worker's log has all of it.
_MAX_LINES, _MAX_LINE = 40, 300
_PAUSE = 0.1  # seconds between two polls of the answers: faulthandler writes a stack line by line


class StatusProbe:
    """One probe of several workers: request their stacks, then collect the answers."""

    def __init__(self) -> None:
        self._asked: list[tuple[RunningWorker, stacks.StackRequest]] = []
        self._final = False
        self._note = ""
        self._end = 0.0  # time limit; after it, incomplete answers are collected too
        self._sizes: list[int | None] = []  # sizes of the answers at the last poll
        self.due: float | None = None  # time to call `ready` again; None without a probe

    def start(
        self,
        local_ranks: Sequence[int],
        running: Iterable[RunningWorker],
        *,
        final: bool,
        note: str = "",
    ) -> None:
        """Start a probe of some workers; drop a probe that is still open.

        Args:
            local_ranks: the workers to probe.
            running: the workers that run.
            final: whether the waiting ranks give up now; the worker's log then gets the whole
                stack.
            note: a line to write into the workers' logs with their stacks; the answers then go only
                into these logs. Empty for answers to the agent.
        """
        self.cancel()
        self._note = note
        self._final = final
        self._asked = [
            (worker, stacks.StackRequest(worker.pid))
            for worker in running
            if worker.local_rank in local_ranks
        ]
        now = time.monotonic()
        self.due, self._end, self._sizes = now + _PAUSE, now + stacks.ANSWER_SECONDS, []

    def ready(self) -> bool:
        """Return whether to collect the answers: all are written, or the time limit has passed."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        sizes = [request.written() for _, request in self._asked]
        if now >= self._end or (0 not in sizes and sizes == self._sizes):
            return True
        self.due, self._sizes = now + _PAUSE, sizes
        return False

    def cancel(self) -> None:
        """Drop a probe that is still open."""
        for _, request in self._asked:
            request.answer()
        self._asked, self.due = [], None

    def answers(self, *, forked: bool) -> messages.WorkersProbed | None:
        """Return the message for the agent; None if the answers go only into the workers' logs.

        Args:
            forked: whether the workers were forked; a forked worker offers its stack before it runs
                the program.
        """
        asked, self._asked, self.due = self._asked, [], None
        found = [self._answer(worker, request, forked=forked) for worker, request in asked]
        return None if self._note else messages.WorkersProbed(self._final, tuple(found))

    def _answer(
        self, worker: RunningWorker, request: stacks.StackRequest, *, forked: bool
    ) -> messages.ProbedWorker:
        lines = request.answer()
        frames = stacks.main_thread(lines)
        shown = tuple(line[:_MAX_LINE] for line in frames[:_MAX_LINES])
        doing = stacks.position_text(frames) if frames else stacks.kernel_text(worker.pid)
        if self._note:
            append(worker.err, [f"{self._note}; {doing}", *shown])
        if stacks.is_inside(lines, "bootstrap.py", name="init") or (request.offered and not forked):
            how = "is inside bootstrap.init()"
        elif lines or not (request.offered or forked):
            how = "has not reached bootstrap.init()"
        else:
            how = "has not joined the rendezvous"
        text = f"has run for {time.monotonic() - worker.started:.0f} s and {how}; {doing}"
        if self._final and lines:
            append(
                worker.err, [f"the others gave up waiting for this process, which {text}", *lines]
            )
        return messages.ProbedWorker(worker.local_rank, worker.pid, text=text[:1000], stack=shown)
