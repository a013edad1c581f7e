"""The starter's look at workers that others wait for: what each does, without waiting for any of
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.logs.log_files import append
from clusterjob.node.workers import stacks

_MOST_LINES, _LONGEST_LINE = 40, 300  # of a stack that travels; all of it is in the worker's log
_PAUSE = (
    0.1  # seconds between two looks at what was written: faulthandler writes a stack line by line
)


@dataclass(frozen=True)
class _Asked:
    local_rank: int
    pid: int
    begun: float
    question: stacks.Question


class Asking:
    """Workers that were asked where they are, and what they have answered a moment later."""

    def __init__(self) -> None:
        self._asked: list[_Asked] = []
        self._final = False
        self._note = ""
        self._end = 0.0  # when the answers are collected as they are
        self._sizes: list[int | None] = []  # of the answers, at the last look
        self.due: float | None = None  # when `ready` is to be asked again

    def ask(
        self,
        local_ranks: list[int],
        live: Mapping[int, int],
        begun: Mapping[int, float],
        *,
        final: bool,
        note: str = "",
    ) -> None:
        """Ask workers. A question that is still open is given up: nobody asks twice within a
        moment.

        Args:
            local_ranks: the workers.
            live: the local rank of each worker that runs, by pid.
            begun: when each was started, by pid.
            final: whether those who wait give up now, so that the whole stack belongs into the
                worker's log.
            note: a line for the workers' logs, with their stacks; nobody else waits for the answers
                then.
        """
        self.forget()
        self._note = note
        self._final = final
        self._asked = [
            _Asked(rank, pid, begun=begun[pid], question=stacks.Question(pid))
            for pid, rank in live.items()
            if rank in local_ranks
        ]
        now = time.monotonic()
        self.due, self._end, self._sizes = now + _PAUSE, now + stacks.ANSWER_SECONDS, []

    def ready(self) -> bool:
        """Return whether the answers are to be collected: all are written, or the time for them is
        over.
        """
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        sizes = [each.question.written() for each in self._asked]
        if now >= self._end or (0 not in sizes and sizes == self._sizes):
            return True
        self.due, self._sizes = now + _PAUSE, sizes
        return False

    def forget(self) -> None:
        """Give up a question that is still open."""
        for each in self._asked:
            each.question.answer()
        self._asked, self.due = [], None

    def answers(self, logs: Mapping[int, Path], *, forked: bool) -> dict[str, Any] | None:
        """Return the message for the agent; None where the answers are for the workers' logs alone.

        Args:
            logs: the file of each worker's stderr, by local rank.
            forked: whether the workers could offer their stacks from their first line on.
        """
        if self._note:
            for each in self._asked:
                self._write(each, logs.get(each.local_rank))
            self._asked, self.due = [], None
            return None
        found = [
            self._answer(each, logs.get(each.local_rank), forked=forked) for each in self._asked
        ]
        self._asked, self.due = [], None
        return {"t": "where", "final": self._final, "answers": found}

    def _write(self, asked: _Asked, log: Path | None) -> None:
        frames = stacks.main_thread(asked.question.answer())
        doing = stacks.in_words(frames) if frames else stacks.kernel_words(asked.pid)
        if log is not None:
            append(
                log,
                [
                    f"{self._note}; {doing}",
                    *(line[:_LONGEST_LINE] for line in frames[:_MOST_LINES]),
                ],
            )

    def _answer(self, asked: _Asked, log: Path | None, *, forked: bool) -> dict[str, Any]:
        lines = asked.question.answer()
        frames = stacks.main_thread(lines)
        asks, doing = (
            asked.question.asked,
            stacks.in_words(frames) if frames else stacks.kernel_words(asked.pid),
        )
        if stacks.has_come_to(lines, "bootstrap.py", name="init") or (asks and not forked):
            how = "is inside bootstrap.init()"
        elif lines or not (asks or forked):
            how = "has not come to bootstrap.init()"
        else:
            how = "does not answer the roll-call"
        text = f"has run for {time.monotonic() - asked.begun:.0f} s and {how}; {doing}"
        if self._final and lines and log is not None:
            append(log, [f"the others gave up waiting for this process, which {text}", *lines])
        shown = [line[:_LONGEST_LINE] for line in frames[:_MOST_LINES]]
        return {
            "local_rank": asked.local_rank,
            "pid": asked.pid,
            "text": text[:1000],
            "stack": shown,
        }
