"""The verdict of a job: its final state, the root cause, and the failures that followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeVar

from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize

_T = TypeVar("_T")

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
_SAME = 200  # characters that are compared: the messages of later failures are cut there
_MAX_REASONS = 5  # maximum lines about failures that are not effects


class FailureKind(str, Enum):
    """The kind of a failure."""

    CODE = "code"  # an exception of the script
    IMPORT = "import"  # a module cannot be imported
    OOM_HOST = "oom_host"  # the host's memory is used up
    OOM_DEVICE = "oom_device"  # a GPU's memory is used up
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
    LAUNCH = "launch"  # a node cannot start or run its workers

    def __str__(self) -> str:
        return self.value


# Other processes and hosts write verdicts: each field is checked.
_MAX_EXIT_CODE = 255
_MAX_NUMBER = 2**31 - 1
_MAX_TEXT = 16_384  # characters; a longer text is cut
_MAX_LINES, _MAX_CONSEQUENCES = 200, 65_536


def _object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{type(data).__name__} instead of an object")  # noqa: TRY004 - one exception type
    return data


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or abs(value) > _MAX_NUMBER:
        raise ValueError(f"{name} is not a number")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a text")  # noqa: TRY004
    return value[:_MAX_TEXT]


def _optional(
    read: Callable[[Mapping[str, Any], str], _T], fields: Mapping[str, Any], name: str
) -> _T | None:
    return None if fields.get(name) is None else read(fields, name)


def _items(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is not a list")  # noqa: TRY004
    return list(value)


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
        fields = _object(data)
        return cls(
            rank=_optional(_number, fields, "rank"),
            local_rank=_optional(_number, fields, "local_rank"),
            node_rank=_number(fields, "node_rank"),
            host=_text(fields, "host"),
            exit_code=_number(fields, "exit_code"),
            signal=_optional(_text, fields, "signal"),
            message=_text(fields, "message"),
            last_lines=tuple(
                _text({"line": line}, "line") for line in _items(fields, "last_lines")[-_MAX_LINES:]
            ),
            effect=bool(fields.get("effect")),
            kind=_kind(fields),
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

    @classmethod
    def from_json(cls, data: Any) -> Verdict:
        """Return the verdict that `to_json` wrote; cut long texts.

        Raises:
            ValueError: a key is missing or wrong, or the exit code contradicts the state: 0 means
                SUCCEEDED.
        """
        fields = _object(data)
        state, exit_code = JobState(_text(fields, "state")), _number(fields, "exit_code")
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
            reason=_optional(_text, fields, "reason") or "",
            failure=Failure.from_json(failure) if failure else None,
            consequences=tuple(
                Failure.from_json(item)
                for item in _items(fields, "consequences")[:_MAX_CONSEQUENCES]
            ),
            restarts=_optional(_number, fields, "restarts") or 0,
            attempt=_optional(_number, fields, "attempt") or 0,
            started_at=_optional(_text, fields, "started_at"),
            ended_at=_optional(_text, fields, "ended_at"),
            evidence=_optional(_text, fields, "evidence") or "",
            evidence_ranks=_optional(_number, fields, "evidence_ranks") or 0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data, with its schema number."""
        return {
            "schema": SCHEMA,
            **vars(self),
            "state": self.state.value,
            "failure": self.failure.to_json() if self.failure else None,
            "consequences": [failure.to_json() for failure in self.consequences],
        }

    def later_failures(self) -> list[tuple[str, list[Failure]]]:
        """Return the failures after the root cause in groups, each with how it failed."""
        same = self.failure.message[:_SAME] if self.failure is not None else None
        groups: dict[str, list[Failure]] = {_EFFECT: [], _SAME_ERROR: [], _OTHER_REASON: []}
        for item in self.consequences:
            own = _SAME_ERROR if item.message[:_SAME] == same else _OTHER_REASON
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
