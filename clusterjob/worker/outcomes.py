"""The result of a function's call on one rank: its files, and how they are written and read.

A rank writes ``rank<r>.attempt<a>.json``. It holds a plain value, or the text of an exception. A
value that is not plain, and an exception, are also pickled into the file of the same name with
``.pkl``. Reading the JSON file is always safe; reading a pickle runs code.
"""

from __future__ import annotations

import json
import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.errors import JobFailed
from clusterjob.node import contract
from clusterjob.node.environments import this_node
from clusterjob.node.system import files

FOLDER = "call"  # in the job's directory
MAX_WORLD_SIZE = 65_536  # workers of a job, as another machine may state them
MAX_JSON = 16 << 20  # bytes; a larger value is only pickled
_MAX_TRACE = 64 << 10  # characters at the end of a traceback
_MAX_MESSAGE = 16 << 10  # characters


@dataclass(frozen=True)
class RemoteFailure:
    """An exception of the function, as text.

    Attributes:
        type: name of its class.
        message: its text.
        traceback: the worker's traceback.
    """

    type: str
    message: str
    traceback: str


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call on one rank.

    Attributes:
        value: the value that the function returned, if it is known.
        error: the exception that it raised; None if it returned, or if only its text is known.
        failure: the exception as text; None if it returned.
        pickled: the type of a value that is only in the pickle; empty if `value` is known.
        world_size: number of workers of the job; None if it is unknown.
    """

    value: Any = None
    error: BaseException | None = None
    failure: RemoteFailure | None = None
    pickled: str = ""
    world_size: int | None = None


def outcome_name(rank: int, attempt: int, suffix: str = "json") -> str:
    """Return the name of a rank's file in `FOLDER`; the suffix is ``json`` or ``pkl``."""
    return f"rank{rank}.attempt{attempt}.{suffix}"


def _encode(value: Any) -> Any:
    """Return a value as JSON data in which a list, a tuple and a dict are told apart.

    Raises:
        TypeError: the value has a part that is no number, text, list, tuple or dict; the message
            is the part's type.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # also numpy's float64
        return float(value)
    if type(value) is tuple:
        return {"tuple": [_encode(item) for item in value]}
    if type(value) is list:
        return [_encode(item) for item in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(item) for key, item in value.items()}}
    raise TypeError(type(value).__name__)


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    [(kind, inner)] = data.items()  # ValueError: an object of no type
    if kind == "dict":
        return {key: _decode(item) for key, item in inner.items()}
    return tuple(map(_decode, inner))


def write_value(
    job_dir: Path, rank: int, attempt: int, value: Any, *, world_size: int | None = None
) -> None:
    """Write the value that a rank's call returned, and the number of workers.

    Raises:
        OSError: the files cannot be written.
        Exception: the value cannot be pickled.
    """
    data, pickled, kind = b"", None, type(value).__name__
    try:
        data = json.dumps({"value": _encode(value), "world_size": world_size}).encode()
    except TypeError as error:
        kind = str(error)
    except (ValueError, RecursionError):  # such as an int of over 4,300 digits
        pass
    if not data or len(data) > MAX_JSON:
        data = json.dumps({"pickled": kind, "world_size": world_size}).encode()
        pickled = _pickle(CallOutcome(value))
    _write(job_dir, rank, attempt, data, pickled=pickled)


def write_error(job_dir: Path, rank: int, attempt: int, error: BaseException) -> None:
    """Write the exception that a rank's call raised.

    If it cannot be pickled and unpickled, the pickle has its text.
    """
    failure = RemoteFailure(
        type(error).__name__,
        str(error)[:_MAX_MESSAGE],
        traceback="".join(traceback.format_exception(error))[-_MAX_TRACE:],
    )
    try:
        pickled = _pickle(CallOutcome(error=error, failure=failure))
        pickle.loads(pickled)  # noqa: S301 - some exceptions can be pickled, but not unpickled
    except Exception:
        text = JobFailed(f"{failure.type}: {failure.message}")
        pickled = _pickle(CallOutcome(error=text, failure=failure))
    data = json.dumps({"error": vars(failure)}).encode()
    _write(job_dir, rank, attempt, data, pickled=pickled)


def _pickle(outcome: CallOutcome) -> bytes:
    try:
        import cloudpickle
    except ModuleNotFoundError:  # a host may lack it
        return pickle.dumps(outcome)
    return bytes(cloudpickle.dumps(outcome))


def _write(job_dir: Path, rank: int, attempt: int, data: bytes, pickled: bytes | None) -> None:
    folder = job_dir / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    if pickled is not None:
        files.write_atomic(folder / outcome_name(rank, attempt, "pkl"), pickled)
    files.write_atomic(folder / outcome_name(rank, attempt), data)


def from_json(data: bytes, rank: int) -> CallOutcome:
    """Return the outcome in a rank's JSON file, which an untrusted host may have written.

    Raises:
        JobFailed: the file is malformed.
    """
    try:
        if len(data) > MAX_JSON:
            raise ValueError
        found = json.loads(data)
        if "error" in found:
            texts = {key: str(found["error"][key]) for key in RemoteFailure.__annotations__}
            return CallOutcome(failure=RemoteFailure(**texts))
        size = found.get("world_size")
        if size is not None and not (type(size) is int and 0 < size <= MAX_WORLD_SIZE):
            raise ValueError
        if "pickled" in found:
            return CallOutcome(pickled=str(found["pickled"])[:200], world_size=size)
        return CallOutcome(_decode(found["value"]), world_size=size)
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


def read(job_dir: Path, rank: int, attempt: int) -> CallOutcome | None:
    """Return a rank's outcome from the user's own directory; None if that rank wrote none.

    Args:
        job_dir: the job's directory, which only its owner can write.
        rank: rank of the worker.
        attempt: number of the job's attempt.

    Raises:
        JobFailed: the outcome cannot be read.
    """
    folder = job_dir / FOLDER
    try:
        found = from_json((folder / outcome_name(rank, attempt)).read_bytes(), rank)
        if found.failure is None and not found.pickled:
            return found
        pickled = (folder / outcome_name(rank, attempt, "pkl")).read_bytes()
    except OSError:
        return None
    return from_pickle(pickled, rank)


class ReturnValue:
    """A Hydra callback that writes the value of each rank; Hydra calls `on_job_end`.

    It has no base class, so that this module does not import Hydra.
    """

    def on_job_end(self, job_return: Any, **_: Any) -> None:
        """Write the value that the function returned; an exception ends the worker anyway."""
        environ = os.environ
        if environ.get(contract.JOB_DIR) and job_return.status.name == "COMPLETED":
            write_value(
                Path(environ[contract.JOB_DIR]),
                int(environ.get("RANK", "0")),
                attempt=this_node.read_attempt(environ),
                value=job_return.return_value,
            )

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):
            return lambda **_: None
        raise AttributeError(name)
