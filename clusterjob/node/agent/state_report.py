"""Make the state of a node from what its parts report."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from clusterjob.node.rendezvous import messages, root_cause, stack_messages
from clusterjob.node.states import Failing, Missing, NodeState, Probed
from clusterjob.node.verdict import Failure


class StateReport:
    """The state of one node.

    Attributes:
        stopped: whether the workers of the round were stopped: a later signal is no cause.
    """

    def __init__(self) -> None:
        self._state = NodeState()
        self._failing: dict[root_cause.Key, tuple[Failure, float, bool]] = {}
        self._exits: list[tuple[Failure, float]] = []
        self._alive_at = time.monotonic()
        self.stopped = False

    def begin(self, number: int) -> None:
        """Forget the workers of the last round."""
        self._state = NodeState(
            number,
            idle=False,
            by_exec=self._state.by_exec,
            seen=self._state.seen,
            request=self._state.request,
        )
        self._failing, self._exits, self.stopped = {}, [], False
        self._alive_at = time.monotonic()

    def ask(self, number: int) -> None:
        """Begin the answer to a question about missing ranks."""
        self._state = replace(self._state, probed=Probed(number, ()))

    def note_alive(self, at: float, step: int) -> bool:
        """Record a sign of life of a worker; return whether it is worth a message."""
        if at < self._alive_at + 1.0 and step <= self._state.step:
            return False
        self._alive_at = max(at, self._alive_at)
        self._state = replace(self._state, step=max(step, self._state.step))
        return True

    def now(self) -> NodeState:
        """Return the state of this moment."""
        moment = time.monotonic()
        return replace(
            self._state,
            quiet=max(0.0, moment - self._alive_at),
            failing=tuple(
                Failing(failure, moment - at, exited=exited)
                for failure, at, exited in self._failing.values()
            ),
            exits=tuple(Failing(failure, moment - at, exited=True) for failure, at in self._exits),
        )

    def take(self, message: Any) -> bool:
        """Add a message to the state; return False if the coordinator must get the message too."""
        state, kind = self._state, type(message)
        fields: dict[str, Any] = {}
        if getattr(message, "restart", state.round) != state.round:
            return True  # of an earlier round
        if kind is stack_messages.StacksCollected:
            self._state = replace(state, collected=True)
            return False
        if kind is messages.Running:
            fields = {"started": True}
        elif kind is messages.Done:
            fields = {"ended": True}
        elif kind is messages.Stopped:
            fields = {"idle": True}
        elif kind is messages.StartedByExec:
            fields = {"by_exec": message.why[:300]}
        elif kind is messages.RoundSeen:
            fields = {"seen": message.rounds}
        elif kind is messages.Succeeded:
            fields = {"succeeded": (*state.succeeded, message.local_rank)}
        elif kind is messages.RankCounts:
            fields = {name: getattr(message, name) for name in ("joined", "formed", "importing")}
        elif kind is messages.RanksMissing:
            missing = Missing(message.local_rank, message.ranks, gave_up=message.final)
            fields = {"missing": missing}
        elif kind is messages.RanksProbed:
            known = state.probed or Probed(0, ())
            lines, failures = known.lines + message.lines, known.failures + message.failures
            fields = {"probed": Probed(known.number, lines, failures)}
        elif kind is stack_messages.ProgressReported:
            fields = {"sampled": message.number, "moved": message.moved}
            self.note_alive(time.monotonic() - message.quiet, message.step)
        elif kind is messages.Cancel:
            fields = {
                "request": replace(
                    state.request,
                    cancel=message.why[:300] or "cancelled",
                    interrupt=message.interrupt,
                    terminated=message.terminated,
                    stacks=message.stacks,
                )
            }
        elif kind is messages.KillNow:
            fields = {"request": replace(state.request, kill=True)}
        elif kind is messages.PreemptionWarning:
            fields = {"request": replace(state.request, warning=message.why[:300])}
        elif kind is messages.Failing:
            self._add_failure(message)
        elif kind is messages.FailuresReported:
            moment = time.monotonic()
            self._exits = [(each.failure, moment - each.age) for each in message.exits]
            fields = {"reported": True}
        else:
            return False
        self._state = replace(self._state, **fields)
        return True

    def _add_failure(self, message: messages.Failing) -> None:
        key, failure = root_cause.key_of(message.failure), message.failure
        known = self._failing.get(key)
        at = time.monotonic() - message.age
        if known is None:
            self._failing[key] = failure, at, message.exited
        elif message.exited and not known[2]:
            failure = root_cause.completed(known[0], failure, by_stop=self.stopped)
            self._failing[key] = failure, known[1], True
