"""The verdict of a job: its final state, the root cause, and the failures that followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

from clusterjob.node.system import codec
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize

SCHEMA = 1
CANCELLED_EXIT_CODE = 143  # 128 + SIGTERM
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h; for a preempted worker and its job


class Word(str, Enum):
    """A word of a fixed list; str() gives its value, as of StrEnum in Python 3.11."""

    def __str__(self) -> str:
        return str(self.value)


class JobState(Word):
    """The state of a job. A job without a recorded end is LOST or UNKNOWN, never SUCCEEDED."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    LOST = "LOST"
    UNKNOWN = "UNKNOWN"

    @property
    def final(self) -> bool:
        """Whether the state cannot change. A PREEMPTED job may be queued again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST)


STACK_TITLE = "Its stack (most recent call first):"  # the first of a failure's last lines
RANK_MARK = re.compile(r"^(?:\[rank\d+\]: ?)+", re.ASCII)  # of torch, in each line of a traceback
_EFFECT = "failed as a consequence"
_SAME_ERROR = "failed with the same error"
_OTHER_REASON = "failed for another reason"
_SHORT = 200  # characters of a short message, such as that of a later failure
_MAX_GROUPS = 6  # maximum lines about later failures


class FailureKind(Word):
    """The kind of a failure."""

    CODE = "code"  # an exception of the script
    IMPORT = "import"  # a module cannot be imported
    OOM_HOST = "oom_host"  # the host's memory is used up
    OOM_DEVICE = "oom_device"  # a GPU's memory is used up
    DISK = "disk"  # a disk of the host is full or broken
    DEVICE = "device"  # a CUDA, ECC or XID error
    NETWORK = "network"  # the connection to another worker is gone
    RENDEZVOUS = "rendezvous"  # other ranks did not join
    EARLY_EXIT = "early_exit"  # exit code 0 while other ranks were in a collective
    TERMINATED = "terminated"  # SIGTERM ended the worker, or a process that it needs
    PREEMPTED = "preempted"  # the worker left after a preemption warning
    SIGNAL = "signal"  # another signal ended the worker
    EXIT_CODE = "exit_code"  # the worker chose a non-zero exit code
    HANG = "hang"  # no worker showed a sign of life for the time of --hang-timeout
    NODE_LOST = "node_lost"  # the agent of a node is gone or silent
    PROCESS_LOST = "process_lost"  # the forkserver of a node, or torch's store, was killed
    LAUNCH = "launch"  # a node cannot start or run its workers


# The kinds of rounds without a failure, with their ends.
_KINDS = {
    "": (JobState.SUCCEEDED, 0),
    "cancelled": (JobState.CANCELLED, CANCELLED_EXIT_CODE),
    "preempted": (JobState.PREEMPTED, PREEMPTED_EXIT_CODE),
    "time_limit": (JobState.FAILED, TIMEOUT_EXIT_CODE),
}
_MAX_ROUNDS = 65_536  # that are read
# Rounds that are listed of a job with many: the first and the latest.
_FIRST_ROUNDS, _LATEST_ROUNDS = 10, 30
_Text = Annotated[str, Limit(16_384, cuts=True)]
_Short = Annotated[str, Limit(_SHORT, cuts=True)]


@dataclass(frozen=True)
class Failure:
    """The failure of a worker or, without a rank, of a node.

    Attributes:
        rank, local_rank: the worker; None for a failure of the node.
        node_rank, host: the node.
        exit_code: the worker's exit code, 128 + n for signal n.
        signal: the name of that signal, such as SIGKILL; None for an ordinary exit.
        message: the error, one line.
        last_lines: the end of stderr, oldest line first.
        effect: whether it failed only because another worker is gone or missing.
        kind: the kind of the failure.
        where: the file and line that raised the exception, as ``train.py:12``; empty if unknown.
    """

    rank: int | None
    local_rank: int | None
    node_rank: int
    host: _Text
    exit_code: Annotated[int, Limit(255)]
    signal: _Text | None
    message: _Text
    last_lines: Annotated[tuple[_Text, ...], Limit(200, cuts=True)] = ()
    effect: bool = False
    kind: FailureKind = FailureKind.CODE
    where: _Text = ""

    @classmethod
    def of_node(
        cls,
        node_rank: int,
        host: str,
        *,
        message: str,
        kind: FailureKind = FailureKind.NODE_LOST,
        exit_code: int = 1,
        last_lines: tuple[str, ...] = (),
    ) -> Failure:
        """Return the failure of a node."""
        return cls(
            None,
            None,
            node_rank=node_rank,
            host=host,
            exit_code=exit_code,
            signal=None,
            message=message,
            last_lines=last_lines,
            kind=kind,
        )

    @classmethod
    def from_json(cls, data: Any) -> Failure:
        """Return the failure of a record or a message; a kind of a newer version is CODE.

        Raises:
            ValueError: a key is missing or has a wrong value.
        """
        if isinstance(data, dict) and data.get("kind") not in list(FailureKind):
            data = {**data, "kind": FailureKind.CODE}
        return codec.read(cls, data)

    @property
    def who(self) -> str:
        """The worker, as ``rank 3 (node 1, local rank 1, host gpu7)``, or the node."""
        if self.rank is None:
            return f"node {self.node_rank} (host {self.host})"
        node = f"node {self.node_rank}, local rank {self.local_rank}, host {self.host}"
        return f"rank {self.rank} ({node})"

    def output(self) -> tuple[str, list[str]]:
        """Return a title, and the end of the worker's stderr or its stack."""
        if self.last_lines[:1] == (STACK_TITLE,):
            return "its stack (most recent call first):", list(self.last_lines[1:])
        lines = [RANK_MARK.sub("", line, count=1) for line in self.last_lines]
        return "the last lines of its stderr:", lines


@dataclass(frozen=True)
class RoundEnd:
    """The end of one round of workers: an entry of ``attempts``.

    Attributes:
        attempt: the number of the job's attempt, from 0; a requeue begins the next one.
        restart: the number of the round in this attempt, from 0.
        kind: a `FailureKind`, ``cancelled``, ``preempted`` or ``time_limit``; empty for a success.
        host, node, rank: where the root cause was; None if it has no such place.
        started_at, ended_at: RFC 3339, UTC, by the coordinator's clock.
        message: the error, one short line.
        where: the file and line that raised the exception; empty if unknown.
    """

    attempt: int
    restart: int
    kind: _Short
    host: _Text | None = None
    node: int | None = None
    rank: int | None = None
    started_at: _Text | None = None
    ended_at: _Text | None = None
    message: _Short = ""
    where: _Short = ""
    MAX_MESSAGE: ClassVar[int] = _SHORT

    @classmethod
    def of(
        cls,
        end: Verdict,
        attempt: int,
        restart: int,
        *,
        started_at: str | None = None,
        ended_at: str | None = None,
    ) -> RoundEnd:
        """Return the entry of a round that has ended like this."""
        times: dict[str, Any] = {"started_at": started_at, "ended_at": ended_at}
        if (failure := end.failure) is None:
            made_by = (end.state, end.exit_code)
            kind = next((kind for kind, each in _KINDS.items() if each == made_by), "")
            return cls(attempt, restart, kind, message=end.reason[:_SHORT], **times)
        return cls(
            attempt,
            restart,
            failure.kind.value,
            host=failure.host,
            node=failure.node_rank,
            rank=failure.rank,
            message=failure.message[:_SHORT],
            where=failure.where[:_SHORT],
            **times,
        )

    def verdict(self) -> Verdict:
        """Return how the round has ended; the failure names the node alone."""
        if self.node is None and self.kind in _KINDS:
            return Verdict(*_KINDS[self.kind], reason=self.message)
        kind = next((each for each in FailureKind if each.value == self.kind), FailureKind.CODE)
        host = self.host or "unknown"
        failure = Failure.of_node(self.node or 0, host, message=self.message, kind=kind)
        return Verdict.of_failure(replace(failure, where=self.where))


def bounded(rounds: Sequence[RoundEnd]) -> tuple[RoundEnd, ...]:
    """Return the first 10 and the latest 30 rounds."""
    if len(rounds) <= _FIRST_ROUNDS + _LATEST_ROUNDS:
        return tuple(rounds)
    return (*rounds[:_FIRST_ROUNDS], *rounds[-_LATEST_ROUNDS:])


@dataclass(frozen=True)
class Verdict:
    """The end of a job.

    Attributes:
        state: a final `JobState`.
        exit_code: the exit code of the job's command: 0, or that of the root cause.
        reason: one line; empty for a success.
        failure: the root cause, if a worker or a node failed.
        consequences: the later failures, in the order in which the coordinator received them.
        restarts: the number of restarts of the workers.
        attempt: the number of the job's attempt, from 0.
        started_at, ended_at: RFC 3339, UTC, by the coordinator's clock; started_at is None if the
            workers never started.
        evidence: the file with the stacks that were saved before the stop, relative to the job
            directory; empty if there is none.
        evidence_ranks: the number of ranks in it.
        attempts: the rounds of workers that have ended, of all attempts of the job; of many, the
            first and the latest.
        in_code: a line with the files that were written into the copy of the code on the
            coordinator's host; empty without such files.
    """

    state: JobState
    exit_code: Annotated[int, Limit(255)]
    reason: _Text = ""
    failure: Failure | None = None
    consequences: Annotated[tuple[Failure, ...], Limit(65_536, cuts=True)] = ()
    restarts: int = 0
    attempt: int = 0
    started_at: _Text | None = None
    ended_at: _Text | None = None
    evidence: _Text = ""
    evidence_ranks: int = 0
    attempts: Annotated[tuple[RoundEnd, ...], Limit(_MAX_ROUNDS, cuts=True)] = ()
    in_code: Annotated[str, Limit(4000, cuts=True)] = ""

    @classmethod
    def of_failure(cls, failure: Failure) -> Verdict:
        """Return the end of a job, or of a round, with this root cause."""
        reason = f"{failure.who}: {failure.message}"
        return cls(JobState.FAILED, failure.exit_code or 1, reason=reason, failure=failure)

    @classmethod
    def from_json(cls, data: Any) -> Verdict:
        """Return the verdict that `to_json` wrote; cut long texts.

        Raises:
            ValueError: a key is missing or wrong, or the exit code contradicts the state: 0 means
                SUCCEEDED.
        """
        verdict = codec.read(cls, data)
        state, exit_code = verdict.state, verdict.exit_code
        if not (state.final or state is JobState.PREEMPTED):
            raise ValueError(f"{state} is not a final state")
        if (exit_code == 0) != (state is JobState.SUCCEEDED):
            raise ValueError(f"{state} with exit code {exit_code}")
        return replace(verdict, attempts=bounded(verdict.attempts))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data, with its schema number."""
        return {"schema": SCHEMA, **codec.plain(self)}

    def later_failures(self) -> list[tuple[str, list[Failure]]]:
        """Return the failures after the root cause in groups, each after a line about it."""
        same = self.failure.message[:_SHORT] if self.failure is not None else None
        groups: dict[tuple[str, str], list[Failure]] = {(_EFFECT, ""): [], (_SAME_ERROR, ""): []}
        for item in self.consequences:
            own = _SAME_ERROR if item.message[:_SHORT] == same else _OTHER_REASON
            how = _EFFECT if item.effect else own
            reason = f": {item.message}" if how == _OTHER_REASON else ""
            groups.setdefault((how, reason), []).append(item)
        return [
            (f"{_count_text(failures)} {how}: {_names_text(failures)}{reason}", failures)
            for (how, reason), failures in groups.items()
            if failures
        ]

    def text(self) -> str:
        """Return the verdict as text: the root cause, the end of its stderr, the other failures."""
        restarted = (
            f" after {self.restarts} restart{'s' if self.restarts > 1 else ''}"
            if self.restarts
            else ""
        )
        says_more = self.reason and self.reason.upper() != self.state.value  # "cancelled"
        lines = [f"{self.state}{restarted}" + (f": {self.reason}" if says_more else "")]
        if self.failure and self.failure.last_lines:
            title, shown = self.failure.output()
            lines += [f"  {title}", *(f"  | {line}" for line in shown)]
        later = self.later_failures()
        lines += [f"  {line}" for line, _ in later[:_MAX_GROUPS]]
        if len(later) > _MAX_GROUPS:
            lines.append(f"  and {len(later) - _MAX_GROUPS} more reasons")
        if self.evidence:
            ranks = f"{self.evidence_ranks} rank{'' if self.evidence_ranks == 1 else 's'}"
            lines.append(f"  stacks of {ranks}: {self.evidence}")
        if self.in_code:
            lines.append(f"  {self.in_code}")
        return "\n".join(sanitize(line) for line in lines)


def _count_text(failures: Sequence[Failure]) -> str:
    """Return the number of failures, as ``7 ranks`` or ``7 ranks and 1 node``."""
    ranks = sum(item.rank is not None for item in failures)
    counts = [(ranks, "rank"), (len(failures) - ranks, "node")]
    return " and ".join(f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts if n)


def _names_text(failures: Iterable[Failure]) -> str:
    """Return the ranks as ranges, then the nodes: ``0-2, 4-7, node 3``."""
    numbers = sorted({item.rank for item in failures if item.rank is not None})
    nodes = [f"node {item.node_rank}" for item in failures if item.rank is None]
    return ", ".join((*ranges(numbers), *nodes))
