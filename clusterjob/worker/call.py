"""Run a submitted function in a worker: load the pickled call, run it, write its outcome.

The job's workers run it as ``python -m clusterjob.worker.call``. The files are in the job's
directory, which only its owner can read.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError, JobFailed, UsageError
from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker.context import Context

_FOLDER = "call"


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call on one rank.

    Attributes:
        value: the value that the function returned.
        error: the exception that it raised; None if it returned.
        trace: the worker's traceback, as text.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function.

    submitit's DelayedSubmission has the same members and is accepted too.

    Attributes:
        function, args, kwargs: the function and its arguments.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def result(self) -> Any:
        """Run the function and return its value."""
        return self.function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class PlainCall(FunctionCall):
    """A call that runs without `bootstrap.init`: the function makes the process group itself.

    Attributes:
        argv: sys.argv of the program that made the call.
    """

    argv: list[str]

    def result(self) -> Any:
        """Run the function and return its value."""
        sys.argv = self.argv
        return super().result()


class RemoteTraceback(Exception):
    """The cause of a re-raised worker exception; shows the worker's own traceback."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def call_file(job_dir: Path, index: int) -> Path:
    """Return the path of the pickled call; for an array, `job_dir` is the array's directory."""
    return job_dir / f"call.{index}.pkl"


def _outcome_file(job_dir: Path, rank: int, attempt: int) -> Path:
    return job_dir / _FOLDER / f"rank{rank}.attempt{attempt}.pkl"


def read_outcome(job_dir: Path, rank: int, attempt: int) -> CallOutcome | None:
    """Return the outcome of the call on one rank; None if that rank wrote none.

    Args:
        job_dir: the job's directory.
        rank: rank of the worker.
        attempt: number of the job's attempt.

    Raises:
        JobFailed: the outcome cannot be unpickled on this machine.
    """
    try:
        data = _outcome_file(job_dir, rank, attempt=attempt).read_bytes()
    except OSError:
        return None
    try:
        # The user's own job has written the file, in the user's own directory.
        outcome = pickle.loads(data)  # noqa: S301
    except Exception as error:  # a class's own code runs here and may raise any exception
        raise JobFailed(
            f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}"
        ) from error
    return outcome if isinstance(outcome, CallOutcome) else None


def results(
    job_dir: Path, verdict: Verdict, world_size: int, name: str, hint: str = ""
) -> list[Any]:
    """Return the values that the call returned in an ended job, in rank order.

    Args:
        job_dir: the job's directory.
        verdict: the job's verdict.
        world_size: number of workers.
        name: the job's name in error messages.
        hint: the hint of the error when the job failed.

    Raises:
        Exception: the exception of the rank that failed first, with that worker's traceback as its
            cause.
        JobFailed: the job failed for another reason, or a rank wrote no result.
    """
    if verdict.state is not JobState.SUCCEEDED:
        rank = verdict.failure.rank if verdict.failure is not None else None
        outcome = read_outcome(job_dir, rank, attempt=verdict.attempt) if rank is not None else None
        if outcome is not None and outcome.error is not None:
            raise outcome.error from RemoteTraceback(f"rank {rank}:\n{outcome.trace}")
        raise JobFailed(f"{name} {verdict.state}: {verdict.reason}", hint)
    found = [read_outcome(job_dir, rank, attempt=verdict.attempt) for rank in range(world_size)]
    missing = [str(rank) for rank, outcome in enumerate(found) if outcome is None]
    if missing:
        raise JobFailed(
            f"{name} succeeded, but rank {', '.join(missing)} wrote no result: "
            "did the function end the process?"
        )
    return [outcome.value for outcome in found if outcome is not None]


def main() -> None:
    """Run this worker's call."""
    named = os.environ.get(contract.JOB_DIR)
    if not named:
        raise UsageError(
            f"{contract.JOB_DIR} is not set: this module runs only in a function job's workers",
            "clusterjob.submit(function) starts one",
        )
    job_dir = Path(named)
    index = os.environ.get(contract.ARRAY_INDEX)
    base, number = (job_dir.parent.parent, int(index)) if index else (job_dir, 0)
    paths, function_call = _load(call_file(base, number))
    if isinstance(function_call, PlainCall):
        _make(function_call, job_dir, rank=int(os.environ["RANK"]))
        return
    from clusterjob import bootstrap

    with bootstrap.init() as context:
        _continue_later(context, function_call, paths=paths, path=call_file(base, number))
        _make(function_call, job_dir, rank=context.rank)


def _make(function_call: Any, job_dir: Path, rank: int) -> None:
    """Run a call and write its outcome."""
    outcome_file = _outcome_file(job_dir, rank, attempt=scheduler.read_attempt(os.environ))
    outcome_file.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        _write(outcome_file, CallOutcome(function_call.result()))
    except Exception as error:
        _write_error(outcome_file, error)
        raise


def _continue_later(context: Context, function_call: Any, paths: list[str], path: Path) -> None:
    """On a preemption warning, save the call of the next attempt and requeue the job.

    This is submitit's Checkpointable: the function's ``checkpoint(*args, **kwargs)`` returns the
    call that the next attempt runs. Only rank 0 calls ``checkpoint``.
    """
    function = function_call.function
    checkpoint = getattr(function, "__submitit_checkpoint__", None) or getattr(
        function, "checkpoint", None
    )
    if checkpoint is None:
        return

    def leave() -> None:
        if context.is_main:
            following = checkpoint(*function_call.args, **function_call.kwargs)
            files.write_atomic(path, pickled(paths, following))
        context.requeue()

    context.on_preempt(leave)


def pickled(paths: list[str], function_call: Any) -> bytes:
    """Pickle a call in the format that the worker reads.

    Args:
        paths: directories to search for its modules, added to sys.path.
        function_call: a `FunctionCall`, or submitit's DelayedSubmission that `checkpoint` returned.

    Raises:
        ClusterJobError: the call cannot be pickled.
    """
    import cloudpickle

    try:
        return pickle.dumps(paths) + bytes(cloudpickle.dumps(function_call))
    except Exception as error:  # the object's own code runs here and may raise any exception
        raise ClusterJobError(
            f"the call cannot be pickled: {type(error).__name__}: {error}",
            "open files, locks and sockets cannot be pickled",
        ) from error


def _load(path: Path) -> tuple[list[str], Any]:
    with path.open("rb") as stream:
        paths = pickle.load(stream)  # noqa: S301 - the user's own call and directory
        sys.path[1:1] = [entry for entry in paths if entry not in sys.path]
        try:
            return paths, pickle.load(stream)  # noqa: S301
        except ModuleNotFoundError as error:
            raise ClusterJobError(
                f"the function cannot be loaded: {error}",
                f"install the module for {sys.executable}",
            ) from error


def _write(path: Path, outcome: CallOutcome) -> None:
    import cloudpickle

    files.write_atomic(path, cloudpickle.dumps(outcome))


def _write_error(path: Path, error: BaseException) -> None:
    """Write an exception; if it cannot be pickled and unpickled, write its text."""
    import cloudpickle

    trace = "".join(traceback.format_exception(error))
    try:
        # Some exceptions can be pickled, but not unpickled.
        pickle.loads(cloudpickle.dumps(error))  # noqa: S301
    except Exception:
        error = JobFailed(f"{type(error).__name__}: {error}")
    _write(path, CallOutcome(None, error, trace=trace))


if __name__ == "__main__":
    # Classes are pickled under their module's name: run the imported module, not __main__.
    from clusterjob.worker.call import main as run

    run()
