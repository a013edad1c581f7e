"""Which failure of a round was the first: the root cause, as against what it brought down.

Times of different hosts are never compared. An agent says how long ago, by its own monotonic clock,
a worker began to fail; the lead takes that from its own clock at arrival. What remains is the
network's latency, and two rules for what time alone cannot tell: a failure that only says "my peer
is gone" cannot be the first while one of another kind is known, and what failed after the order to
stop was stopped by us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clusterjob.node.rendezvous import early_exits
from clusterjob.node.verdict import Failure

# A failure that only tells of a lost peer is no root cause; how long the lead waits for the one
# that is.
EFFECT_PATIENCE = 0.3
# A worker that said "ValueError" may still be in its atexit handlers; how long its exit is waited
# for, with its last lines.
EXIT_PATIENCE = 5.0
# An exit counts from when its agent saw it, which is later than the failures that it brought about
# where cores are short.
_LATE_EXIT = 2.0


@dataclass
class _Trouble:
    at: float  # the lead's monotonic clock
    failure: Failure
    exited: bool


class Judge:
    """Collects the failures of one round of workers and names the first."""

    def __init__(self) -> None:
        self._troubles: dict[tuple[int, int | None], _Trouble] = {}
        self._exits: dict[
            tuple[int, int | None], _Trouble
        ] = {}  # of ranks that left with exit code 0
        self._stopped_at = float("inf")
        self._cause_until: dict[str, float] = {}

    def await_cause(self, until: float, asked: str) -> None:
        """Have the effects wait for their cause, as somebody is being asked for it.

        Args:
            until: a moment of the lead's monotonic clock; 0.0 once there is nothing more to be
                waited for.
            asked: who is being asked; each has a wait of its own.
        """
        self._cause_until[asked] = until

    def note_exit(self, failure: Failure, at: float) -> None:
        """Take in a rank that ended with exit code 0: the cause, where others have failed only
        because a peer was gone.

        Args:
            failure: the rank, without words.
            at: when it ended, by the lead's monotonic clock.
        """
        self._exits.setdefault(
            (failure.node_rank, failure.local_rank), _Trouble(at, failure, exited=True)
        )

    def hear(self, failure: Failure, at: float, *, exited: bool) -> None:
        """Take in a failure.

        Args:
            failure: what the agent knows of it.
            at: when it began, by the lead's monotonic clock.
            exited: whether the worker has ended; a worker that is about to end may be heard of
                twice.
        """
        key = (failure.node_rank, failure.local_rank)
        known = self._troubles.get(key)
        if known is None:
            if at < self._stopped_at:
                self._troubles[key] = _Trouble(at, failure, exited=exited)
            return
        if exited and not known.exited:
            known.failure = _completed(known.failure, failure, by_us=at >= self._stopped_at)
            known.exited = True

    def stopped(self, at: float) -> None:
        """Note when the order to stop went out: later failures are its work."""
        self._stopped_at = min(at, self._stopped_at)

    def pardon_effects(self) -> None:
        """Forget the failures that only tell of a lost peer: it has left on purpose."""
        self._troubles = {
            key: trouble for key, trouble in self._troubles.items() if not trouble.failure.effect
        }

    def stop_due(self) -> float:
        """Return when everything is to be stopped, by the lead's monotonic clock; infinity while
        nothing has failed.
        """
        if not self._troubles:
            return float("inf")
        causes = [trouble for trouble in self._troubles.values() if not trouble.failure.effect]
        if any(trouble.exited for trouble in causes):
            return 0.0
        if causes:
            return min(trouble.at for trouble in causes) + EXIT_PATIENCE
        exited = [trouble.at for trouble in self._troubles.values() if trouble.exited]
        due = (
            min(exited) + EFFECT_PATIENCE
            if exited
            else min(t.at for t in self._troubles.values()) + EXIT_PATIENCE
        )
        return max(due, *self._cause_until.values(), 0.0)

    def root(self) -> Failure | None:
        """Return the first failure that is no mere effect of another; where all are effects the
        rank that left, or the first.
        """
        ranked = self._ranked()
        if not ranked:
            return None
        return self._early_exit() or ranked[0].failure

    def consequences(self) -> tuple[Failure, ...]:
        """Return the other failures, in the order of time."""
        ranked = self._ranked()
        others = ranked if self._early_exit() else ranked[1:]
        return tuple(trouble.failure for trouble in sorted(others, key=lambda trouble: trouble.at))

    def _early_exit(self) -> Failure | None:
        """Return the rank that ended with exit code 0 while others needed it, if nothing else
        explains their failures.
        """
        if not self._exits or not all(
            trouble.failure.effect for trouble in self._troubles.values()
        ):
            return None
        effects = sorted(self._troubles.values(), key=lambda trouble: trouble.at)
        exits = sorted(
            (each for each in self._exits.values() if each.at <= effects[0].at + _LATE_EXIT),
            key=lambda each: each.at,
        )
        if not exits or not any(early_exits.in_torch(each.failure) for each in effects):
            return None
        before = effects[0].at - exits[0].at
        return early_exits.failure(
            [each.failure for each in exits], before, effects=[each.failure for each in effects]
        )

    def _ranked(self) -> list[_Trouble]:
        return sorted(
            self._troubles.values(), key=lambda trouble: (trouble.failure.effect, trouble.at)
        )


def _completed(announced: Failure, end: Failure, *, by_us: bool) -> Failure:
    """Return what a worker announced, completed by how it ended.

    A signal that came after the announcement is not the cause: it is ours, or that of an
    interpreter that aborts while it exits (gloo's threads: "terminate called without an active
    exception").
    """
    if end.signal is None:
        return replace(end, message=announced.message, effect=announced.effect or end.effect)
    after = "" if by_us else f" (then {end.message})"
    return replace(announced, message=f"{announced.message}{after}", last_lines=end.last_lines)
