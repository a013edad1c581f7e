"""Run a submitted function in a worker: load the pickled call, run it, write its outcome.

The job's workers run it as ``python -m clusterjob.worker.call``. The files are in the job's
directory, which only its owner can read.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError, JobFailed, RemoteError, UsageError
from clusterjob.node import contract
from clusterjob.node.environments import scheduler
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import outcomes
from clusterjob.worker.context import Context
from clusterjob.worker.outcomes import CallOutcome

MODULES = "call.modules.zip"  # modules that a remote host may lack, next to the call


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


def read_local(job_dir: Path, rank: int, attempt: int) -> CallOutcome | None:
    """Return a rank's outcome from the user's own directory; None if that rank wrote none.

    Args:
        job_dir: the job's directory, which only its owner can write.
        rank: rank of the worker.
        attempt: number of the job's attempt.

    Raises:
        JobFailed: the outcome cannot be read.
    """
    folder = job_dir / outcomes.FOLDER
    try:
        found = outcomes.from_json(
            (folder / outcomes.outcome_name(rank, attempt)).read_bytes(), rank
        )
        if found.failure is None and found.exact:
            return found
        pickled = (folder / outcomes.outcome_name(rank, attempt, "pkl")).read_bytes()
    except OSError:
        return None
    return outcomes.from_pickle(pickled, rank)


def raise_failure(verdict: Verdict, outcome: CallOutcome | None, name: str, hint: str = "") -> None:
    """Raise the error of a job that did not succeed.

    Args:
        verdict: the job's verdict.
        outcome: the outcome of the rank that failed first; None if it wrote none.
        name: the job's name in error messages.
        hint: the hint of the error.

    Raises:
        Exception: the function's exception, with that worker's traceback as its cause.
        RemoteError: the function raised; only the text of its exception is trusted.
        JobFailed: the job failed for another reason.
    """
    rank = verdict.failure.rank if verdict.failure is not None else None
    if outcome is not None and outcome.failure is not None:
        failure = outcome.failure
        if outcome.error is not None:
            raise outcome.error from RemoteTraceback(f"rank {rank}:\n{failure.traceback}")
        raise RemoteError(
            sanitize(failure.type),
            sanitize(failure.message, lines=True),
            rank=rank or 0,
            traceback=sanitize(failure.traceback, lines=True),
        )
    raise JobFailed(f"{name} {verdict.state}: {verdict.reason}", hint)


def results(job_dir: Path, verdict: Verdict, world_size: int, name: str) -> list[Any]:
    """Return the values that the call returned in an ended job, in rank order.

    Args:
        job_dir: the job's directory.
        verdict: the job's verdict.
        world_size: number of workers.
        name: the job's name in error messages.

    Raises:
        Exception: the exception of the rank that failed first, with that worker's traceback as its
            cause.
        JobFailed: the job failed for another reason, or a rank wrote no result.
    """
    if verdict.state is not JobState.SUCCEEDED:
        rank = verdict.failure.rank if verdict.failure is not None else None
        raise_failure(
            verdict,
            None if rank is None else read_local(job_dir, rank, attempt=verdict.attempt),
            name=name,
        )
    found = {rank: read_local(job_dir, rank, attempt=verdict.attempt) for rank in range(world_size)}
    return complete(found, name)


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
        _make(
            function_call, job_dir, rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )  # fmt: skip
        return
    from clusterjob import bootstrap

    with bootstrap.init() as context:
        _continue_later(context, function_call, paths=paths, path=call_file(base, number))
        _make(function_call, job_dir, rank=context.rank, world_size=context.world_size)


def _make(function_call: Any, job_dir: Path, rank: int, world_size: int) -> None:
    """Run a call and write its outcome."""
    attempt = scheduler.read_attempt(os.environ)
    try:
        value = function_call.result()
        outcomes.write_value(job_dir, rank, attempt=attempt, value=value, world_size=world_size)
    except Exception as error:
        outcomes.write_error(job_dir, rank, attempt=attempt, error=error)
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
        paths: directories to search for its modules, added to sys.path; relative ones are below
            the worker's working directory.
        function_call: a `FunctionCall`, or submitit's DelayedSubmission that `checkpoint` returned.

    Raises:
        ClusterJobError: the call cannot be pickled.
    """
    import cloudpickle

    try:
        body = bytes(cloudpickle.dumps(function_call))
    except Exception as error:  # the object's own code runs here and may raise any exception
        raise ClusterJobError(
            f"the call cannot be pickled: {type(error).__name__}: {error}",
            "open files, locks and sockets cannot be pickled",
        ) from error
    # The bytecode of a function that is pickled by value runs only in the same Python.
    return pickle.dumps((paths, _version() if b"cloudpickle" in body else "")) + body


def _load(path: Path) -> tuple[list[str], Any]:
    carried = path.with_name(MODULES)
    if carried.exists():  # the submitter's cloudpickle; this machine's own comes first
        sys.path.append(str(carried))
    with path.open("rb") as stream:
        paths, version = pickle.load(stream)  # noqa: S301 - the user's own call and directory
        if version not in ("", _version()):
            raise ClusterJobError(
                f"Python {version} pickled the function, and {sys.executable} is {_version()}",
                "choose an equal interpreter with python=",
            )
        paths = [os.path.abspath(entry) for entry in paths]
        sys.path[1:1] = [entry for entry in paths if entry not in sys.path]
        try:
            return paths, pickle.load(stream)  # noqa: S301
        except ModuleNotFoundError as error:
            raise ClusterJobError(
                f"the function cannot be loaded: {error}",
                f"install the module for {sys.executable}",
            ) from error


def _version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


if __name__ == "__main__":
    # Classes are pickled under their module's name: run the imported module, not __main__.
    from clusterjob.worker.call import main as run

    run()
