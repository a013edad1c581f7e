"""Keep the state of this node, which its parts change and the connection sends."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from clusterjob.node.rendezvous import root_cause
from clusterjob.node.states import Failing, NodeState, Probed
from clusterjob.node.verdict import Failure

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
            failing=tuple(
                Failing(failure, max(0.0, moment - at), exited=exited)
                for failure, at, exited in self._failing.values()
            ),
            exits=tuple(Failing(failure, moment - at, exited=True) for failure, at in self._exits),
        )

    def begin(self, number: int) -> None:
        """Begin a round: forget the workers of the last one."""
        before = self.state
        self._failing, self._exits, self.stopped_at = {}, [], math.inf
        self._alive_at = time.monotonic()
        self.state = NodeState(
            number, idle=False, by_exec=before.by_exec, seen=before.seen, request=before.request
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
        self.set(probed=Probed(number, (*known.lines, *lines), (*known.failures, *failures)))

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
