"""How a job ended: the one failure that was the root cause, by time, and what followed from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from clusterjob.node.system.sanitize import sanitize

SCHEMA = 1
CANCELLED_EXIT_CODE = 143  # 128 + SIGTERM
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
PREEMPTED_EXIT_CODE = (
    75  # EX_TEMPFAIL of sysexits.h: of a worker that leaves to be queued again, and of its job
)


class JobState(str, Enum):
    """Where a job stands. Absence of news is never success: it is LOST or UNKNOWN."""

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
        """Whether a job in this state can change no more. PREEMPTED is not final: the job may be
        queued again.
        """
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST)

    def __str__(self) -> str:
        return self.value


# Lines of a verdict's text for ranks that failed beside the root cause, each for a reason of its
# own.
_MOST_REASONS = 5

# What a worker says when ANOTHER one is gone. Such a failure is an effect: while a failure of its
# own kind is not yet known, the lead waits a moment for it. Texts of gloo, NCCL and torch's
# TCPStore (pytorch#113546, #194871).
_PEER_LOSS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection was likely closed|Broken pipe|Socket Timeout|"
    r"remote process exited or there was a network error|NCCL communicator was aborted|application timeout caused pair closure|"
    r"failed to recv, got 0 bytes|Failed to recv|DistNetworkError|recvValue failed|sendBytes failed|recvVector failed|"
    # It has waited for a rank that never came: to its store, or to a collective.
    r"wait timeout after \d+ms|Timed out waiting \d+ms for (?:recv|send) operation",
    re.IGNORECASE,
)


def is_peer_loss(text: str) -> bool:
    """Return whether these last words of a worker only say that another worker is gone."""
    return _PEER_LOSS.search(text) is not None or _ROLL_CALL_END.search(text) is not None


# What a process says that was there when the roll was called, and gave up waiting for another.
_ROLL_CALL_END = re.compile(
    r"GangError: waiting for ranks? \d.*; gave up after|GangError: .* was at the roll-call, and rank 0 does not end it"
)


def is_roll_call_end(failure: Failure) -> bool:
    """Return whether a failure only says that another worker did not come to the roll-call."""
    return _ROLL_CALL_END.search("\n".join((failure.message, *failure.last_lines))) is not None


# What a worker says when a SIGTERM met not itself but a process that it needs: a DataLoader's
# worker, or torchrun.
_TERMINATED = re.compile(
    r"killed by signal: Terminated|DataLoader worker .* exited unexpectedly|got signal: 15\b"
)


def is_termination(failure: Failure) -> bool:
    """Return whether a failure is nothing but a SIGTERM, to the worker or to a process that it
    needs.
    """
    return (
        failure.signal == "SIGTERM"
        or _TERMINATED.search("\n".join((failure.message, *failure.last_lines))) is not None
    )


# Once there is a process group, torch marks every line of a traceback.
_RANK_MARK = re.compile(r"\[rank\d+\]: ?")


_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")


def last_exception(lines: Sequence[str]) -> str | None:
    """Return the exception of the last Python traceback in these lines: ``ValueError: boom``; None
    where there is none.

    Whoever catches it may write more: Hydra adds a line, and ends by sys.exit(1).
    """
    bare = [_RANK_MARK.sub("", line, count=1) for line in lines]
    # A DataLoader's process leaves "Original Traceback" below the one of its rank.
    begins = [number for number, line in enumerate(bare) if line.endswith(_TRACEBACK)]
    if not begins:
        return None
    return next((line for line in bare[begins[-1] + 1 :] if _EXCEPTION.fullmatch(line)), None)


# Lines of c10d's and NCCL's loggers, below errors in their severity, and the C++ frames that come
# with some of them.
_LIBRARY_LINE = re.compile(
    r"(\[rank\d+\]: ?)?(\[[WI]\d{4} \d\d:\d\d:\d\d\.\d+ \w+\.\w+:\d+\]|frame #\d+: |Exception raised from .*\(most recent call first\):)"
)


def without_library_warnings(lines: Sequence[str]) -> tuple[str, ...]:
    """Return a worker's last lines without what C++ libraries only warn of; all of them where
    nothing else is there.
    """
    own = tuple(line for line in lines if not _LIBRARY_LINE.match(line))
    return own or tuple(lines)


# What other processes and hosts wrote is checked field by field: a verdict of the wrong shape is
# none.
_LARGEST_EXIT_CODE = 255
_LARGEST_NUMBER = 2**31 - 1
_LONGEST_TEXT = 16_384  # characters; what is longer is cut
_MOST_LINES, _MOST_CONSEQUENCES = 200, 65_536


def _object(data: Any) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{type(data).__name__} where an object belongs")  # noqa: TRY004 - one exception for all that is wrong
    return data


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"{name} is no number")
    return value


def _optional_number(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _number(fields, name)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")  # noqa: TRY004
    return value[:_LONGEST_TEXT]


def _optional_text(fields: Mapping[str, Any], name: str) -> str | None:
    return None if fields.get(name) is None else _text(fields, name)


def _items(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name) or []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{name} is no list")  # noqa: TRY004
    return list(value)


@dataclass(frozen=True)
class Failure:
    """One failure, of a worker or (rank None) of a whole node.

    Attributes:
        rank, local_rank: the worker; None when the node itself failed.
        node_rank, host: where it ran.
        exit_code: the worker's own, 128 + n when signal n ended it.
        signal: name of that signal, such as SIGKILL; None for an ordinary exit.
        message: what happened, one line.
        last_lines: the end of its stderr, oldest line first.
        effect: its last words only say that another worker is gone.
        kind: ``early_exit`` of a rank that ended with exit code 0 while others were in a
            collective; None of any other failure.
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
    kind: str | None = None

    @classmethod
    def from_json(cls, data: Any) -> Failure:
        """Return the failure that `to_json` wrote; unknown keys of a newer writer are left out,
        long texts are cut.

        Raises:
            ValueError: it is none.
        """
        fields = _object(data)
        return cls(
            rank=_optional_number(fields, "rank"),
            local_rank=_optional_number(fields, "local_rank"),
            node_rank=_number(fields, "node_rank"),
            host=_text(fields, "host"),
            exit_code=_number(fields, "exit_code"),
            signal=_optional_text(fields, "signal"),
            message=_text(fields, "message"),
            last_lines=tuple(
                _text({"line": line}, "line")
                for line in _items(fields, "last_lines")[-_MOST_LINES:]
            ),
            effect=bool(fields.get("effect")),
            kind=_optional_text(fields, "kind"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the failure as plain data."""
        return asdict(self) | {"last_lines": list(self.last_lines)}

    @property
    def who(self) -> str:
        """``rank 3 (node 1, local rank 1, host gpu7)``, or the node alone."""
        if self.rank is None:
            return f"node {self.node_rank} (host {self.host})"
        return f"rank {self.rank} (node {self.node_rank}, local rank {self.local_rank}, host {self.host})"


@dataclass(frozen=True)
class Verdict:
    """The end of a job.

    Attributes:
        state: a final `JobState`.
        exit_code: what the job's command returns: 0, or the root cause's.
        reason: one line; empty for a success.
        failure: the root cause, if a worker or a node failed.
        consequences: the failures that came after it, in the order in which they were heard of.
        restarts: how often the workers were started again.
        attempt: which start of the whole job this was, from 0.
        started_at, ended_at: RFC 3339, UTC, by the lead's clock; started_at is None if the workers
            never started.
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

    @classmethod
    def from_json(cls, data: Any) -> Verdict:
        """Return the verdict that `to_json` wrote; long texts are cut.

        Raises:
            ValueError: it is none, or contradicts itself: exit code 0 means SUCCEEDED, and nothing
                else does.
        """
        fields = _object(data)
        state, exit_code = JobState(_text(fields, "state")), _number(fields, "exit_code")
        if not (state.final or state is JobState.PREEMPTED):
            raise ValueError(f"{state} is no end")
        if (exit_code == 0) != (
            state is JobState.SUCCEEDED
        ) or not 0 <= exit_code <= _LARGEST_EXIT_CODE:
            raise ValueError(f"{state} with exit code {exit_code}")
        failure = fields.get("failure")
        return cls(
            state=state,
            exit_code=exit_code,
            reason=_optional_text(fields, "reason") or "",
            failure=Failure.from_json(failure) if failure else None,
            consequences=tuple(
                Failure.from_json(item)
                for item in _items(fields, "consequences")[:_MOST_CONSEQUENCES]
            ),
            restarts=_optional_number(fields, "restarts") or 0,
            attempt=_optional_number(fields, "attempt") or 0,
            started_at=_optional_text(fields, "started_at"),
            ended_at=_optional_text(fields, "ended_at"),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data, with its schema number."""
        return {
            "schema": SCHEMA,
            "state": self.state.value,
            "exit_code": self.exit_code,
            "reason": self.reason,
            "failure": self.failure.to_json() if self.failure else None,
            "consequences": [failure.to_json() for failure in self.consequences],
            "restarts": self.restarts,
            "attempt": self.attempt,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }

    def text(self) -> str:
        """Return the verdict for people: the root cause, its last lines of stderr, and what it
        brought down.
        """
        restarted = (
            f" after {self.restarts} restart{'s' if self.restarts > 1 else ''}"
            if self.restarts
            else ""
        )
        lines = [f"{self.state}{restarted}" + (f": {self.reason}" if self.reason else "")]
        if self.failure and self.failure.last_lines:
            lines.append("  the last lines of its stderr:")
            lines += [f"  | {line}" for line in self.failure.last_lines]
        effects = [item for item in self.consequences if item.effect]
        if effects:
            lines.append(f"  failed after it, as a consequence: {_names(effects)}")
        own: dict[str, list[Failure]] = {}
        for item in self.consequences:
            if not item.effect:
                own.setdefault(item.message, []).append(item)
        lines += [
            f"  failed too, for a reason of its own: {_names(items)}: {message}"
            for message, items in list(own.items())[:_MOST_REASONS]
        ]
        if len(own) > _MOST_REASONS:
            lines.append(f"  and {len(own) - _MOST_REASONS} more reasons")
        return "\n".join(sanitize(line) for line in lines)


def _names(failures: Iterable[Failure]) -> str:
    return ", ".join(
        str(item.rank) if item.rank is not None else f"node {item.node_rank}" for item in failures
    )
