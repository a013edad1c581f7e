"""Probe workers that other ranks wait for, in the forkserver and without blocking it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from clusterjob.node.logs.log_files import append
from clusterjob.node.stacks import collect
from clusterjob.node.stacks.grouping import frame_line, position_text, to_lines
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers.worker_process import RunningWorker

# Limits of a stack that is sent to the agent; the worker's log has all of it.
_MAX_LINES, _MAX_LINE = 40, 300


class StatusProbe:
    """One probe of several workers: request their stacks, then collect the answers."""

    def __init__(self) -> None:
        self._asked: list[tuple[RunningWorker, collect.StackRequest]] = []
        self._final = False
        self._note = ""
        self._end = 0.0  # time limit; after it, incomplete answers are collected too
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
            (worker, collect.StackRequest(worker.pid))
            for worker in running
            if worker.local_rank in local_ranks
        ]
        now = time.monotonic()
        self.due, self._end = now, now + collect.ANSWER_SECONDS

    def ready(self) -> bool:
        """Return whether to collect the answers: all are written, or the time limit has passed."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        for _, asked in self._asked:
            asked.step()
        self.due = now + collect.POLL_SECONDS
        return now >= self._end or all(asked.done for _, asked in self._asked)

    def cancel(self) -> None:
        """Drop a probe that is still open."""
        for _, asked in self._asked:
            asked.close()
        self._asked, self.due = [], None

    def answers(self, *, forked: bool) -> messages.WorkersProbed | None:
        """Return the message for the agent; None if the answers go only into the workers' logs.

        Args:
            forked: whether the workers were forked; a forked worker offers its stack before it runs
                the program.
        """
        asked, self._asked, self.due = self._asked, [], None
        found = [self._answer(worker, each, forked=forked) for worker, each in asked]
        return None if self._note else messages.WorkersProbed(self._final, tuple(found))

    def _answer(
        self, worker: RunningWorker, asked: collect.StackRequest, *, forked: bool
    ) -> messages.ProbedWorker:
        threads = tuple(asked.answer().values())
        frames = threads[0].frames if threads else ()
        shown = tuple(frame_line(frame)[:_MAX_LINE] for frame in frames[:_MAX_LINES])
        doing = position_text(frames) if frames else f"it {collect.state_of(worker.pid)}"
        if self._note:
            append(worker.err, [f"{self._note}; {doing}", *shown])
        if any(
            frame.function == "init" and frame.file.endswith("bootstrap.py") for frame in frames
        ):
            how = "is inside bootstrap.init()"
        elif frames or not (asked.offered or forked):
            how = "has not reached bootstrap.init()"
        else:
            how = "has not joined the rendezvous"
        text = f"has run for {time.monotonic() - worker.started:.0f} s and {how}; {doing}"
        if self._final and threads:
            lines = [f"the others gave up waiting for this process, which {text}"]
            append(worker.err, lines + to_lines(threads))
        return messages.ProbedWorker(worker.local_rank, worker.pid, text=text[:1000], stack=shown)
