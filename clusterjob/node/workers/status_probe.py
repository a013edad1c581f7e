"""Probe workers that other ranks wait for, in the forkserver and without blocking it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.logs.log_files import append
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers import stacks

# Limits of a stack that is sent to the agent; the worker's log has all of it.
_MAX_LINES, _MAX_LINE = 40, 300
_PAUSE = 0.1  # seconds between two polls of the answers: faulthandler writes a stack line by line


@dataclass(frozen=True)
class _Request:
    local_rank: int
    pid: int
    started: float
    request: stacks.StackRequest


class StatusProbe:
    """One probe of several workers: request their stacks, then collect the answers."""

    def __init__(self) -> None:
        self._asked: list[_Request] = []
        self._final = False
        self._note = ""
        self._end = 0.0  # time limit; after it, incomplete answers are collected too
        self._sizes: list[int | None] = []  # sizes of the answers at the last poll
        self.due: float | None = None  # time to call `ready` again; None without a probe

    def start(
        self,
        local_ranks: Sequence[int],
        live: Mapping[int, int],
        started: Mapping[int, float],
        *,
        final: bool,
        note: str = "",
    ) -> None:
        """Start a probe of some workers; drop a probe that is still open.

        Args:
            local_ranks: the workers to probe.
            live: the local rank of each running worker, by pid.
            started: the monotonic start time of each running worker, by pid.
            final: whether the waiting ranks give up now; the worker's log then gets the whole
                stack.
            note: a line to write into the workers' logs with their stacks; the answers then go only
                into these logs. Empty for answers to the agent.
        """
        self.cancel()
        self._note = note
        self._final = final
        self._asked = [
            _Request(rank, pid, started=started[pid], request=stacks.StackRequest(pid))
            for pid, rank in live.items()
            if rank in local_ranks
        ]
        now = time.monotonic()
        self.due, self._end, self._sizes = now + _PAUSE, now + stacks.ANSWER_SECONDS, []

    def ready(self) -> bool:
        """Return whether to collect the answers: all are written, or the time limit has passed."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        sizes = [each.request.written() for each in self._asked]
        if now >= self._end or (0 not in sizes and sizes == self._sizes):
            return True
        self.due, self._sizes = now + _PAUSE, sizes
        return False

    def cancel(self) -> None:
        """Drop a probe that is still open."""
        for each in self._asked:
            each.request.answer()
        self._asked, self.due = [], None

    def answers(self, logs: Mapping[int, Path], *, forked: bool) -> messages.WorkersProbed | None:
        """Return the message for the agent; None if the answers go only into the workers' logs.

        Args:
            logs: each worker's stderr file, by local rank.
            forked: whether the workers were forked; a forked worker offers its stack before it runs
                the program.
        """
        if self._note:
            for each in self._asked:
                self._write(each, logs.get(each.local_rank))
            self._asked, self.due = [], None
            return None
        found = tuple(
            self._answer(each, logs.get(each.local_rank), forked=forked) for each in self._asked
        )
        self._asked, self.due = [], None
        return messages.WorkersProbed(self._final, found)

    def _write(self, asked: _Request, log: Path | None) -> None:
        frames = stacks.main_thread(asked.request.answer())
        doing = stacks.position_text(frames) if frames else stacks.kernel_text(asked.pid)
        if log is not None:
            append(
                log,
                [
                    f"{self._note}; {doing}",
                    *(line[:_MAX_LINE] for line in frames[:_MAX_LINES]),
                ],
            )

    def _answer(self, asked: _Request, log: Path | None, *, forked: bool) -> messages.ProbedWorker:
        lines = asked.request.answer()
        frames = stacks.main_thread(lines)
        offered = asked.request.offered
        doing = stacks.position_text(frames) if frames else stacks.kernel_text(asked.pid)
        if stacks.is_inside(lines, "bootstrap.py", name="init") or (offered and not forked):
            how = "is inside bootstrap.init()"
        elif lines or not (offered or forked):
            how = "has not reached bootstrap.init()"
        else:
            how = "has not joined the rendezvous"
        text = f"has run for {time.monotonic() - asked.started:.0f} s and {how}; {doing}"
        if self._final and lines and log is not None:
            append(log, [f"the others gave up waiting for this process, which {text}", *lines])
        shown = tuple(line[:_MAX_LINE] for line in frames[:_MAX_LINES])
        return messages.ProbedWorker(asked.local_rank, asked.pid, text=text[:1000], stack=shown)
