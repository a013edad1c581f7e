"""The error of a function's job that failed, and the values of one that succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from clusterjob.errors import JobFailed, RemoteError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict
from clusterjob.worker.call import CallOutcome


class RemoteTraceback(Exception):
    """The cause of a re-raised worker exception; shows the worker's own traceback."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def error_of(
    verdict: Verdict, outcome: CallOutcome | None, name: str, hint: str = ""
) -> BaseException:
    """Return the error of a job that did not succeed.

    It is the function's exception, with that worker's traceback as its cause; RemoteError if only
    the exception's text is trusted; JobFailed if the job failed for another reason.

    Args:
        verdict: the job's verdict.
        outcome: the outcome of the rank that failed first; None if it wrote none.
        name: the job's name in error messages.
        hint: the hint of the error.
    """
    if outcome is None or outcome.failure is None:
        return JobFailed(f"{name} {verdict.state}: {sanitize(verdict.reason, lines=True)}", hint)
    rank = verdict.failure.rank if verdict.failure is not None else None
    failure = outcome.failure
    if outcome.error is None:
        return RemoteError(
            sanitize(failure.type),
            sanitize(failure.message, lines=True),
            rank=rank or 0,
            traceback=sanitize(failure.traceback, lines=True),
        )
    outcome.error.__cause__ = RemoteTraceback(f"rank {rank}:\n{failure.traceback}")
    return outcome.error


def complete(found: Mapping[int, CallOutcome | None], name: str) -> list[Any]:
    """Return the values of all ranks of a job that succeeded.

    Raises:
        JobFailed: a rank wrote no result.
    """
    missing = [str(rank) for rank, outcome in found.items() if outcome is None]
    if missing:
        raise JobFailed(
            f"{name} succeeded, but rank {', '.join(missing)} wrote no result: "
            "did the function end the process?"
        )
    return [outcome.value for outcome in found.values() if outcome is not None]
