"""How a job ended: the one failure that was the root cause, by time, and what followed from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

SCHEMA = 1
CANCELLED_EXIT_CODE = 143  # 128 + SIGTERM
TIMEOUT_EXIT_CODE = 124  # as timeout(1)
PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: of a worker that leaves to be queued again, and of its job


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
        """Whether a job in this state can change no more. PREEMPTED is not final: the job may be queued again."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.LOST)

    def __str__(self) -> str:
        return self.value


# What a worker says when ANOTHER one is gone. Such a failure is an effect: while a failure of its own kind is not yet
# known, the lead waits a moment for it. Texts of gloo, NCCL and torch's TCPStore (pytorch#113546, #194871).
_PEER_LOSS = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection was likely closed|Broken pipe|Socket Timeout|"
    r"remote process exited or there was a network error|NCCL communicator was aborted|application timeout caused pair closure|"
    r"failed to recv, got 0 bytes|Failed to recv|DistNetworkError|recvValue failed|sendBytes failed|recvVector failed",
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


# What a worker says when a SIGTERM met not itself but a process that it needs: a DataLoader's worker, or torchrun.
_TERMINATED = re.compile(r"killed by signal: Terminated|DataLoader worker .* exited unexpectedly|got signal: 15\b")


def is_termination(failure: Failure) -> bool:
    """Return whether a failure is nothing but a SIGTERM, to the worker or to a process that it needs."""
    return failure.signal == "SIGTERM" or _TERMINATED.search("\n".join((failure.message, *failure.last_lines))) is not None


# Once there is a process group, torch marks every line of a traceback.
_RANK_MARK = re.compile(r"\[rank\d+\]: ?")


def last_exception(lines: Sequence[str]) -> str | None:
    """Return the last line of a worker's stderr if that is the end of a Python traceback: ``ValueError: boom``."""
    bare = [_RANK_MARK.sub("", line, count=1) for line in lines]
    while bare and bare[-1].startswith("hint: "):  # of an error of ours
        bare.pop()
    return bare[-1] if "Traceback (most recent call last):" in bare[:-1] else None


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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Failure:
        """Return the failure that `to_json` wrote; unknown keys of a newer writer are left out."""
        known = {name: data.get(name) for name in cls.__dataclass_fields__}
        known["last_lines"] = tuple(data.get("last_lines") or ())
        known["effect"] = bool(data.get("effect"))
        return cls(**known)  # type: ignore[arg-type]

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
        started_at, ended_at: RFC 3339, UTC, by the lead's clock; started_at is None if the workers never started.
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
    def from_json(cls, data: Mapping[str, Any]) -> Verdict:
        """Return the verdict that `to_json` wrote."""
        failure = data.get("failure")
        return cls(
            state=JobState(data["state"]),
            exit_code=int(data["exit_code"]),
            reason=str(data.get("reason") or ""),
            failure=Failure.from_json(failure) if failure else None,
            consequences=tuple(Failure.from_json(item) for item in data.get("consequences") or ()),
            restarts=int(data.get("restarts") or 0),
            attempt=int(data.get("attempt") or 0),
            started_at=data.get("started_at"),
            ended_at=data.get("ended_at"),
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
        """Return the verdict for people: the root cause, its last lines of stderr, and what it brought down."""
        restarted = f" after {self.restarts} restart{'s' if self.restarts > 1 else ''}" if self.restarts else ""
        lines = [f"{self.state}{restarted}" + (f": {self.reason}" if self.reason else "")]
        if self.failure and self.failure.last_lines:
            lines.append("  the last lines of its stderr:")
            lines += [f"  | {line}" for line in self.failure.last_lines]
        if self.consequences:
            ranks = ", ".join(str(item.rank) if item.rank is not None else f"node {item.node_rank}" for item in self.consequences)
            lines.append(f"  failed after it, as a consequence: {ranks}")
        return "\n".join(lines)
