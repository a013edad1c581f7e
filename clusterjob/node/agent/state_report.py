"""Keep the state of this node, which its parts change and the agent sends."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from clusterjob.node.rendezvous import root_cause
from clusterjob.node.states import Failing, NodeState, Probe, Probed
from clusterjob.node.system.codec import plain
from clusterjob.node.verdict import Failure

# A state must fit a message of 256 KiB. Bytes of its failures, and their number.
_FAILURE_BYTES, _MOST_FAILURES = 96 << 10, 128
_ANSWER_BYTES = 48 << 10  # of the failures in an answer about missing ranks
# Characters of a message and of the output after it; of a message without its output.
_TEXT, _SHORT = 4096, 200
_LINE = 300  # characters of a line in an answer
_ALIVE_SECONDS = 1.0  # between two signs of life that are worth a message


class StateReport:
    """The state of one node.

    Args:
        seen: the newest round that this node's last agent has seen, plus 1.
        tells_life: whether the coordinator needs the signs of life, because it looks for a hang.

    Attributes:
        changed: set when the state has changed.
        state: the state, without what depends on the time; see `now`.
        stopped_at: the monotonic time from which the workers of the round are stopped: what fails
            later is no failure.
        alive_at: the monotonic time of the last sign of life of a worker.
    """

    def __init__(self, seen: int = 0, *, tells_life: bool = True) -> None:
        self.changed = asyncio.Event()
        self.state = NodeState(seen=seen)
        self.stopped_at = math.inf
        self.alive_at = self._told_at = time.monotonic()
        self._tells_life = tells_life
        self._failing: dict[root_cause.Key, tuple[Failure, float, bool]] = {}
        self._exits: Sequence[tuple[Failure, float]] = ()

    def now(self) -> NodeState:
        """Return the state of this moment."""
        moment = time.monotonic()
        # An effect names no cause.
        first = sorted(self._failing.values(), key=lambda each: (each[0].effect, each[1]))
        fitting = _fitting([failure for failure, _, _ in first[:_MOST_FAILURES]], _FAILURE_BYTES)
        return replace(
            self.state,
            quiet=max(0.0, moment - self.alive_at),
            failing=tuple(
                Failing(failure, max(0.0, moment - at), exited)
                for failure, (_, at, exited) in zip(fitting, first, strict=False)
            ),
            exits=tuple(
                Failing(_bounded(failure, 0), moment - at, exited=True)
                for failure, at in self._exits
            ),
        )

    def begin(self, number: int) -> None:
        """Begin a round: forget the workers of the last one."""
        before = self.state
        self._failing, self._exits, self.stopped_at = {}, (), math.inf
        self.alive_at = self._told_at = time.monotonic()
        self.state = NodeState(number, idle=False, seen=before.seen, request=before.request)
        self.set(measured=before.measured, by_exec=before.by_exec)

    def set(self, **fields: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **fields)
        self.changed.set()

    def ask(self, **fields: Any) -> None:
        """Change fields of the request to the whole job."""
        self.set(request=replace(self.state.request, **fields))

    def stop(self) -> None:
        """Note that the workers are being stopped."""
        self.stopped_at = min(self.stopped_at, time.monotonic())

    @property
    def stops(self) -> bool:
        """Whether the workers stop, or will when the coordinator knows of a cancellation."""
        return self.stopped_at < math.inf or bool(self.state.request.cancel)

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
        if known is None and at < self.stopped_at:
            self._failing[key] = failure, at, exited
        elif known is not None and exited and not known[2]:
            failure = root_cause.completed(known[0], failure, by_stop=at >= self.stopped_at)
            self._failing[key] = failure, known[1], True
        self.changed.set()

    def answer(self, probe: Probe, lines: Iterable[str], failures: Sequence[Failure]) -> None:
        """Answer a question about missing ranks."""
        cut = tuple(line[:_LINE] for line in lines)
        self.set(probed=Probed(probe, cut, tuple(_fitting(failures, _ANSWER_BYTES))))

    def complete(self, exits: Sequence[tuple[Failure, float]]) -> None:
        """Say that all failures are known, and name workers that have ended with exit code 0.

        Args:
            exits: each with its monotonic time.
        """
        self._exits = exits
        self.set(reported=True)

    def note_alive(self, at: float, step: int = -1) -> None:
        """Record the monotonic time of a sign of life of a worker, and its step."""
        self.alive_at = max(at, self.alive_at)
        if self._tells_life and (at > self._told_at + _ALIVE_SECONDS or step > self.state.step):
            self._told_at = self.alive_at
            self.set(step=max(step, self.state.step))


def _fitting(failures: Sequence[Failure], most_bytes: int) -> list[Failure]:
    """Return the first failures that fit; of many, each has less output, but for the first."""
    found: list[Failure] = []
    for most in (_TEXT, 1024, 256, 0):
        found = [_bounded(each, most if n else _TEXT) for n, each in enumerate(failures)]
        if _size(found) <= most_bytes:
            return found
    while _size(found) > most_bytes:
        found.pop()
    return found


def _size(failures: Iterable[Failure]) -> int:
    return sum(len(json.dumps(plain(each))) for each in failures)


def _bounded(failure: Failure, most: int) -> Failure:
    """Return the failure with at most so many characters of the end of its output."""
    last = "\n".join(failure.last_lines)[-most:] if most else ""
    return replace(
        failure,
        message=failure.message[: max(_SHORT, most)],
        last_lines=tuple(last.split("\n")) if last else (),
    )
