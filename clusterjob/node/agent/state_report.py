"""Keep the state of this node, which its parts change and the connection sends."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from clusterjob.node.rendezvous import root_cause
from clusterjob.node.states import Failing, NodeState, Probed
from clusterjob.node.system.codec import plain
from clusterjob.node.verdict import Failure

# A state must fit a message of 256 KiB. Bytes of its failures, and their number.
_FAILURE_BYTES, _MOST_FAILURES = 96 << 10, 128
# How many failures keep the end of their output, until they fit; characters of that, and of a
# message without it.
_WITH_OUTPUT, _TEXT, _SHORT = (16, 4, 1, 0), 4096, 200
_ANSWER_BYTES = 48 << 10  # of the failures in an answer about missing ranks
_LINE = 300  # characters of a line in it
_ALIVE_SECONDS = 1.0  # between two signs of life that are worth a message


class StateReport:
    """The state of one node.

    Attributes:
        changed: set when the state has changed.
        state: the state, without what depends on the time; see `now`.
        stopped_at: the monotonic time from which the workers of the round are stopped: what fails
            later is no failure.
    """

    def __init__(self, seen: int = 0) -> None:
        self.changed = asyncio.Event()
        self.state = NodeState(seen=seen)
        self.stopped_at = math.inf
        self._failing: dict[root_cause.Key, tuple[Failure, float, bool]] = {}
        self._exits: list[tuple[Failure, float]] = []
        self._alive_at = time.monotonic()

    def now(self) -> NodeState:
        """Return the state of this moment."""
        moment = time.monotonic()
        return replace(
            self.state,
            quiet=max(0.0, moment - self._alive_at),
            failing=self._failures(moment),
            exits=tuple(
                Failing(_bounded(failure, output=False), moment - at, exited=True)
                for failure, at in self._exits
            ),
        )

    def _failures(self, moment: float) -> tuple[Failing, ...]:
        """Return the first failures; see `_fitting`."""
        # An effect names no cause.
        first = sorted(self._failing.values(), key=lambda each: (each[0].effect, each[1]))
        fitting = _fitting([failure for failure, _, _ in first[:_MOST_FAILURES]], _FAILURE_BYTES)
        return tuple(
            Failing(failure, max(0.0, moment - at), exited)
            for failure, (_, at, exited) in zip(fitting, first, strict=False)
        )

    def begin(self, number: int) -> None:
        """Begin a round: forget the workers of the last one."""
        before = self.state
        self._failing, self._exits, self.stopped_at = {}, [], math.inf
        self._alive_at = time.monotonic()
        self.state = NodeState(
            number,
            idle=False,
            measured=before.measured,
            by_exec=before.by_exec,
            seen=before.seen,
            request=before.request,
        )
        self.changed.set()

    def set(self, **fields: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **fields)
        self.changed.set()

    def ask(self, **fields: Any) -> None:
        """Change fields of the request to the whole job."""
        self.set(request=replace(self.state.request, **fields))

    def succeed(self, local_ranks: Iterable[int]) -> None:
        """Add workers that have ended with exit code 0."""
        self.set(succeeded=(*self.state.succeeded, *local_ranks))

    def fail(self, failure: Failure, at: float, *, exited: bool) -> None:
        """Add a failure of a worker or the node, or complete it when the worker has ended.

        Args:
            failure: the failure.
            at: the monotonic time of it.
            exited: whether the worker has ended.
        """
        key = root_cause.key_of(failure)
        known = self._failing.get(key)
        if known is None:
            if at < self.stopped_at:
                self._failing[key] = failure, at, exited
        elif exited and not known[2]:
            failure = root_cause.completed(known[0], failure, by_stop=at >= self.stopped_at)
            self._failing[key] = failure, known[1], True
        self.changed.set()

    def answer(self, number: int, lines: Sequence[str], failures: Sequence[Failure]) -> None:
        """Add lines and failures to the answer to a question about missing ranks."""
        known = self.state.probed
        if known is None or known.number != number:
            known = Probed(number, ())
        cut = (line[:_LINE] for line in lines)
        fitting = _fitting([*known.failures, *failures], _ANSWER_BYTES)
        self.set(probed=Probed(number, (*known.lines, *cut), tuple(fitting)))

    def complete(self, exits: Sequence[tuple[Failure, float]]) -> None:
        """Say that all failures are known, and name workers that have ended with exit code 0.

        Args:
            exits: each with its monotonic time.
        """
        self._exits = list(exits)
        self.set(reported=True)

    def note_alive(self, at: float, step: int) -> None:
        """Record the monotonic time of a sign of life of a worker, and the step of the last one."""
        if at > self._alive_at + _ALIVE_SECONDS or step > self.state.step:
            self._alive_at = max(at, self._alive_at)
            self.set(step=max(step, self.state.step))


def _fitting(failures: Sequence[Failure], most_bytes: int) -> list[Failure]:
    """Return the first failures that fit, as many of them with their output as fit too."""
    found: list[Failure] = []
    for most in _WITH_OUTPUT:
        found = [_bounded(each, output=number < most) for number, each in enumerate(failures)]
        if _size(found) < most_bytes:
            return found
    while _size(found) > most_bytes:
        found = found[: len(found) // 2]
    return found


def _size(failures: Iterable[Failure]) -> int:
    return sum(len(json.dumps(plain(each))) for each in failures)


def _bounded(failure: Failure, *, output: bool) -> Failure:
    """Return the failure with the end of its output, at most 4 KiB, or without it."""
    if not output:
        return replace(failure, message=failure.message[:_SHORT], last_lines=())
    kept: list[str] = []
    for line in reversed(failure.last_lines):
        left = _TEXT - sum(map(len, kept))
        if left > 0:
            kept.append(line[:left])
    return replace(failure, message=failure.message[:_TEXT], last_lines=tuple(reversed(kept)))
