"""Decide by its kind whether workers are started again after a failure, and where."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from clusterjob.node.options import LaunchOptions, Retry
from clusterjob.node.rendezvous.outcome import Outcome
from clusterjob.node.verdict import Failure, FailureKind, RoundEnd


@dataclass(frozen=True)
class Rule:
    """What follows a failure of one kind, unless --retry names the kind.

    Attributes:
        restarts: whether the workers are started again, as often as --max-restarts.
        avoid: whether it is a failure of a machine: the next round leaves out that node. Spare
            nodes and an elastic size allow such restarts without --max-restarts.
        charged: whether the restart counts for --max-restarts.
        once: whether the same error in a second round ends the job.
        pause: whether restarts in a row are delayed more and more, up to 60 s.
        requeue: whether --until-done queues the job again after the last restart.
        why: why there is no restart; empty for a kind with restarts.
    """

    restarts: bool = True
    avoid: bool = False
    charged: bool = True
    once: bool = False
    pause: bool = False
    requeue: bool = True
    why: str = ""


_AGAIN = "it would fail again"


def _never(why: str) -> Rule:
    return Rule(restarts=False, requeue=False, why=why)


# docs/reference.md shows this table; a test compares them.
RULES: dict[FailureKind, Rule] = {
    FailureKind.CODE: Rule(once=True, requeue=False),
    FailureKind.IMPORT: _never(f"a module cannot be imported: {_AGAIN}"),
    FailureKind.OOM_HOST: _never("the memory is too small for this job"),
    FailureKind.OOM_DEVICE: _never("the GPU's memory is too small for this job"),
    FailureKind.DEVICE: Rule(avoid=True),
    FailureKind.DISK: Rule(avoid=True, pause=True),
    FailureKind.NETWORK: Rule(avoid=True),
    FailureKind.NODE_LOST: Rule(avoid=True),
    FailureKind.PROCESS_LOST: Rule(),
    FailureKind.LAUNCH: Rule(avoid=True, once=True, requeue=False),
    FailureKind.RENDEZVOUS: Rule(),
    FailureKind.EARLY_EXIT: Rule(requeue=False),
    FailureKind.TERMINATED: Rule(),
    FailureKind.SIGNAL: Rule(),
    FailureKind.EXIT_CODE: Rule(requeue=False),
    FailureKind.HANG: Rule(),
    FailureKind.PREEMPTED: Rule(charged=False),
}

_LONGEST_PAUSE = 60.0  # seconds
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError)\b")
_WRONG_ARGUMENTS = 2  # the exit code of argparse and click
_USAGE = re.compile(r"usage: ", re.IGNORECASE)
_END = re.compile(r" \((?:exited with code \d+|killed by SIG\w+)\)")
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, steps, ranks, pids


@dataclass(frozen=True)
class Decision:
    """What follows the end of a round.

    Attributes:
        retry: whether the workers are started again.
        avoid: whether the next round must leave out the node of the root cause.
        charged: whether the restart counts for --max-restarts.
        why: why there is no restart although some are left; empty if that is obvious.
        pause: seconds to wait before the next round.
        more_memory: the factor of memory with which the scheduler must queue the job again; 0.0
            if it must not.
    """

    retry: bool
    avoid: bool = False
    charged: bool = False
    why: str = ""
    pause: float = 0.0
    more_memory: float = 0.0


class Policy:
    """The restarts of one attempt of a job.

    Args:
        options: --max-restarts, whose count begins again with each attempt, and --retry, whose
            counts hold for the whole job.
        earlier: the rounds that have ended.
        attempt: the number of this attempt.
        free: how many failures of machines are restarted without being charged.

    Attributes:
        most: the largest number of restarts that these options allow.
    """

    def __init__(
        self,
        options: LaunchOptions,
        earlier: Sequence[RoundEnd] = (),
        attempt: int = 0,
        *,
        free: int = 0,
    ) -> None:
        self._max_restarts = options.max_restarts
        chosen = [Retry.parse(text) for text in options.retry]
        self._retries = {each.kind: each for each in chosen}
        self._kinds = Counter(each.kind for each in earlier)  # of the whole job
        self._in_a_row = 0  # rounds that ended with a failure whose restarts are delayed
        self._charged, self._free = 0, free  # used, and left
        self._uncharged: Counter[FailureKind] = Counter()
        self._errors = {error_of(each.kind, each.message, where=each.where) for each in earlier}
        for each in earlier:
            if each.attempt == attempt and each.kind in set(FailureKind):
                self._count(FailureKind(each.kind))
        self.most = options.max_restarts + free + sum(map(self._limit, self._retries.values()))

    def decide(self, end: Outcome) -> Decision:
        """Decide what follows a round, and count it."""
        failure = end.failure
        if failure is None:  # success, cancel, time limit, or preemption
            return Decision(retry=False)
        decision = self._decide(failure)
        self._kinds[failure.kind] += 1
        self._errors.add(error_of(failure.kind, failure.message, where=failure.where))
        if not decision.retry:
            return decision
        self._count(failure.kind)
        return replace(decision, pause=self._pause())

    def _pause(self) -> float:
        """Return the seconds before the next round: a full disk would soon use all restarts."""
        return min(2.0 ** (self._in_a_row - 2), _LONGEST_PAUSE) if self._in_a_row > 1 else 0.0

    def _count(self, kind: FailureKind) -> None:
        """Count a restart after a failure of this kind in this attempt."""
        self._in_a_row = self._in_a_row + 1 if RULES[kind].pause else 0
        if kind in self._retries:
            self._uncharged[kind] += 1
        elif RULES[kind].avoid and self._free:
            self._free -= 1
        elif RULES[kind].charged:
            self._charged += 1
        else:
            self._uncharged[kind] += 1

    def _decide(self, failure: Failure) -> Decision:
        rule = RULES[failure.kind]
        # A failure that only names a lost peer does not show whose node is at fault.
        avoid = rule.avoid and not failure.effect
        own = self._retries.get(failure.kind)
        if own is not None:
            retry = self._kinds[failure.kind] < self._limit(own)
            if retry and own.memory:
                return Decision(retry=False, more_memory=own.memory)
            return Decision(retry, avoid=retry and avoid)
        count = self._charged if rule.charged else self._uncharged[failure.kind]
        free = rule.avoid and self._free > 0
        if count >= self._max_restarts and not free:
            return Decision(retry=False)
        why = self._why_not(failure, rule)
        return Decision(
            not why, avoid=avoid and not why, charged=rule.charged and not free, why=why
        )

    def _limit(self, own: Retry) -> int:
        return max(1, self._max_restarts) if own.times is None else own.times

    def _why_not(self, failure: Failure, rule: Rule) -> str:
        """Return why the same failure would follow a restart; empty if it is not proven."""
        if not rule.restarts:
            return rule.why
        if failure.kind is FailureKind.CODE and _SYNTAX.match(failure.message):
            return f"{failure.message.partition(':')[0]}: {_AGAIN}"
        if (
            failure.kind is FailureKind.EXIT_CODE
            and failure.exit_code == _WRONG_ARGUMENTS
            and any(map(_USAGE.match, failure.last_lines))
        ):
            return f"its arguments are wrong: {_AGAIN}"
        error = error_of(failure.kind, failure.message, where=failure.where)
        # Without a rank, it is the loss of a forkserver or a store, which any node may suffer.
        unstartable = failure.kind is FailureKind.LAUNCH and failure.rank is not None
        if rule.once and (failure.where or unstartable) and error in self._errors:
            place = f" at {failure.where}" if failure.where else ""
            return f"the same error{place} in two attempts: {_AGAIN}"
        return ""


def error_of(kind: str, message: str, where: str) -> tuple[str, str, str]:
    """Return what is equal for two failures by the same error; numbers in the text may differ."""
    text = _END.sub("", message[: RoundEnd.MAX_MESSAGE])
    return str(kind), _NUMBERS.sub("0", text), where
