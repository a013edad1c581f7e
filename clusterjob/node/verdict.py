"""The verdict of a job: its final state, the root cause, and the failures that followed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, ClassVar

from clusterjob.node.system.json_fields import items, mapping, number, optional, text
from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize

SCHEMA = 1
CANCELLED_EXIT_CODE = 143  # 128 + SIGTERM
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h; for a preempted worker and its job


class JobState(str, Enum):
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

    def __str__(self) -> str:
        return self.value


STACK_TITLE = "Its stack (most recent call first):"  # the first of a failure's last lines
_RANK_MARK = re.compile(r"^\[rank\d+\]: ?", re.ASCII)  # of torch, in each line of a traceback
_EFFECT = "failed as a consequence"
_SAME_ERROR = "failed with the same error"
_OTHER_REASON = "failed for another reason"
_SHORT = 200  # characters of a short message, such as that of a later failure
_MAX_REASONS = 5  # maximum lines about failures that are not effects


class FailureKind(str, Enum):
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

    def __str__(self) -> str:
        return self.value


_MAX_EXIT_CODE = 255
_MAX_LINES, _MAX_CONSEQUENCES = 200, 65_536
_MAX_NOTE = 4000  # characters of `Verdict.in_code`
# Rounds that are listed of a job with many: the first and the latest.
_FIRST_ROUNDS, _LATEST_ROUNDS = 10, 30


def _kind(fields: Mapping[str, Any]) -> FailureKind:
    try:
        return FailureKind(fields.get("kind"))
    except ValueError:  # a kind that a newer version has added
        return FailureKind.CODE


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
    host: str
    exit_code: int
    signal: str | None
    message: str
    last_lines: tuple[str, ...] = ()
    effect: bool = False
    kind: FailureKind = FailureKind.CODE
    where: str = ""

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
        """Return the failure that `to_json` wrote; ignore unknown keys, cut long texts.

        Raises:
            ValueError: a key is missing or has a wrong value.
        """
        fields = mapping(data)
        return cls(
            rank=optional(number, fields, "rank"),
            local_rank=optional(number, fields, "local_rank"),
            node_rank=number(fields, "node_rank"),
            host=text(fields, "host"),
            exit_code=number(fields, "exit_code"),
            signal=optional(text, fields, "signal"),
            message=text(fields, "message"),
            last_lines=tuple(
                text({"line": line}, "line") for line in items(fields, "last_lines")[-_MAX_LINES:]
            ),
            effect=bool(fields.get("effect")),
            kind=_kind(fields),
            where=optional(text, fields, "where") or "",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the failure as plain data."""
        return asdict(self) | {"last_lines": list(self.last_lines), "kind": self.kind.value}

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
        lines = [_RANK_MARK.sub("", line, count=1) for line in self.last_lines]
        return "the last lines of its stderr:", lines


@dataclass(frozen=True)
class RoundEnd:
    """The end of one round of workers: an entry of ``attempts``.

    Attributes:
        attempt: the number of the job's attempt, from 0; a requeue begins the next one.
        restart: the number of the round in this attempt, from 0.
        kind: a `FailureKind`, ``cancelled`` or ``time_limit``; empty for a success.
        host, node, rank: where the root cause was; None if it has no such place.
        started_at, ended_at: RFC 3339, UTC, by the coordinator's clock.
        message: the error, one short line.
        where: the file and line that raised the exception; empty if unknown.
    """

    attempt: int
    restart: int
    kind: str
    host: str | None
    node: int | None
    rank: int | None
    started_at: str | None
    ended_at: str | None
    message: str = ""
    where: str = ""
    MAX_MESSAGE: ClassVar[int] = _SHORT

    @classmethod
    def from_json(cls, data: Any) -> RoundEnd:
        """Return the entry that `vars` wrote.

        Raises:
            ValueError: a key is missing or has a wrong value.
        """
        fields = mapping(data)
        return cls(
            attempt=number(fields, "attempt"),
            restart=number(fields, "restart"),
            kind=text(fields, "kind")[:_SHORT],
            host=optional(text, fields, "host"),
            node=optional(number, fields, "node"),
            rank=optional(number, fields, "rank"),
            started_at=optional(text, fields, "started_at"),
            ended_at=optional(text, fields, "ended_at"),
            message=(optional(text, fields, "message") or "")[:_SHORT],
            where=(optional(text, fields, "where") or "")[:_SHORT],
        )


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
    exit_code: int
    reason: str = ""
    failure: Failure | None = None
    consequences: tuple[Failure, ...] = field(default=())
    restarts: int = 0
    attempt: int = 0
    started_at: str | None = None
    ended_at: str | None = None
    evidence: str = ""
    evidence_ranks: int = 0
    attempts: tuple[RoundEnd, ...] = ()
    in_code: str = ""

    @classmethod
    def from_json(cls, data: Any) -> Verdict:
        """Return the verdict that `to_json` wrote; cut long texts.

        Raises:
            ValueError: a key is missing or wrong, or the exit code contradicts the state: 0 means
                SUCCEEDED.
        """
        fields = mapping(data)
        state, exit_code = JobState(text(fields, "state")), number(fields, "exit_code")
        if not (state.final or state is JobState.PREEMPTED):
            raise ValueError(f"{state} is not a final state")
        if (exit_code == 0) != (
            state is JobState.SUCCEEDED
        ) or not 0 <= exit_code <= _MAX_EXIT_CODE:
            raise ValueError(f"{state} with exit code {exit_code}")
        failure = fields.get("failure")
        return cls(
            state=state,
            exit_code=exit_code,
            reason=optional(text, fields, "reason") or "",
            failure=Failure.from_json(failure) if failure else None,
            consequences=tuple(
                Failure.from_json(item)
                for item in items(fields, "consequences")[:_MAX_CONSEQUENCES]
            ),
            restarts=optional(number, fields, "restarts") or 0,
            attempt=optional(number, fields, "attempt") or 0,
            started_at=optional(text, fields, "started_at"),
            ended_at=optional(text, fields, "ended_at"),
            evidence=optional(text, fields, "evidence") or "",
            evidence_ranks=optional(number, fields, "evidence_ranks") or 0,
            in_code=(optional(text, fields, "in_code") or "")[:_MAX_NOTE],
            attempts=bounded([RoundEnd.from_json(item) for item in items(fields, "attempts")]),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data, with its schema number."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "state": self.state.value,
            "failure": self.failure.to_json() if self.failure else None,
            "consequences": [failure.to_json() for failure in self.consequences],
            "attempts": [vars(each) for each in self.attempts],
        }

    def later_failures(self) -> list[tuple[str, list[Failure]]]:
        """Return the failures after the root cause in groups, each with how it failed."""
        same = self.failure.message[:_SHORT] if self.failure is not None else None
        groups: dict[str, list[Failure]] = {_EFFECT: [], _SAME_ERROR: [], _OTHER_REASON: []}
        for item in self.consequences:
            own = _SAME_ERROR if item.message[:_SHORT] == same else _OTHER_REASON
            groups[_EFFECT if item.effect else own].append(item)
        return [(how, failures) for how, failures in groups.items() if failures]

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
        for how, failures in self.later_failures():
            reasons: dict[str, list[Failure]] = {}
            for item in failures:
                reason = f": {item.message}" if how == _OTHER_REASON else ""
                reasons.setdefault(reason, []).append(item)
            lines += [
                f"  {count_text(items)} {how}: {names_text(items)}{reason}"
                for reason, items in list(reasons.items())[:_MAX_REASONS]
            ]
            if len(reasons) > _MAX_REASONS:
                lines.append(f"  and {len(reasons) - _MAX_REASONS} more reasons")
        if self.evidence:
            ranks = f"{self.evidence_ranks} rank{'' if self.evidence_ranks == 1 else 's'}"
            lines.append(f"  stacks of {ranks}: {self.evidence}")
        if self.in_code:
            lines.append(f"  {self.in_code}")
        return "\n".join(sanitize(line) for line in lines)


def count_text(failures: Sequence[Failure]) -> str:
    """Return the number of failures, as ``7 ranks`` or ``7 ranks and 1 node``."""
    ranks = sum(item.rank is not None for item in failures)
    counts = [(ranks, "rank"), (len(failures) - ranks, "node")]
    return " and ".join(f"{n} {name}{'' if n == 1 else 's'}" for n, name in counts if n)


def names_text(failures: Iterable[Failure]) -> str:
    """Return the ranks as ranges, then the nodes: ``0-2, 4-7, node 3``."""
    numbers = sorted({item.rank for item in failures if item.rank is not None})
    nodes = [f"node {item.node_rank}" for item in failures if item.rank is None]
    return ", ".join((*ranges(numbers), *nodes))
