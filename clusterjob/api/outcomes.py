"""What ranks of a function's job returned or raised: read the files, raise the error."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterjob.errors import JobFailed, RemoteError
from clusterjob.node.logs.job_dir import OUTCOMES
from clusterjob.node.system import codec
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Verdict
from clusterjob.worker.call import (
    MAX_JSON,
    CallOutcome,
    RemoteFailure,
    outcome_name,
)

MAX_WORLD_SIZE = 65_536  # workers of a job, as another machine may state them


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


# -- the files, which `clusterjob.worker.call` writes ----------------------------------------------


def _decoded(data: dict[str, Any]) -> Any:
    """Return what a JSON object stands for."""
    if data.keys() == {"dict"}:
        return dict(data["dict"])
    return tuple(data["tuple"]) if data.keys() == {"tuple"} else data


def from_json(data: bytes, rank: int) -> CallOutcome:
    """Return the outcome in a rank's JSON file, which an untrusted host may have written.

    Raises:
        JobFailed: the file is malformed.
    """
    try:
        if len(data) > MAX_JSON:
            raise ValueError
        found = json.loads(data, object_hook=_decoded)
        if "error" in found:
            return CallOutcome(failure=codec.read(RemoteFailure, found["error"]))
        size = found.get("world_size")
        if size is not None and not (type(size) is int and 0 < size <= MAX_WORLD_SIZE):
            raise ValueError
        if "pickled" in found:
            return CallOutcome(pickled=str(found["pickled"])[:200], world_size=size)
        return CallOutcome(found["value"], world_size=size)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise JobFailed(f"the result of rank {rank} is malformed") from error


def from_pickle(data: bytes, rank: int) -> CallOutcome:
    """Return the outcome in a rank's pickle; this runs code that the pickle names.

    Raises:
        JobFailed: the outcome cannot be unpickled on this machine.
    """
    try:
        outcome = pickle.loads(data)  # noqa: S301 - the caller trusts the writer
    except Exception as error:  # a class's own code runs here and may raise any exception
        raise JobFailed(
            f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(outcome, CallOutcome):
        raise JobFailed(f"the result of rank {rank} is malformed")
    return outcome


def read_outcome(job_dir: Path, rank: int, attempt: int) -> CallOutcome | None:
    """Return a rank's outcome from the user's own directory; None if that rank wrote none.

    Args:
        job_dir: the job's directory, which only its owner can write.
        rank: rank of the worker.
        attempt: number of the job's attempt.

    Raises:
        JobFailed: the outcome cannot be read.
    """
    folder = job_dir / OUTCOMES
    try:
        found = from_json((folder / outcome_name(rank, attempt)).read_bytes(), rank)
        if found.failure is None and not found.pickled:
            return found
        pickled = (folder / outcome_name(rank, attempt, "pkl")).read_bytes()
    except OSError:
        return None
    return from_pickle(pickled, rank)
