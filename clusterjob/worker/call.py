"""The worker's side of a function as a job: load the call, make it, leave what came of it for
whoever asked.

Run as ``python -m clusterjob.worker.call`` by the job's workers. The files lie in the job's
directory, which its owner alone can read.
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
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterjob.worker.context import Context

_FOLDER = "call"


@dataclass(frozen=True)
class Outcome:
    """What came of a call on one rank.

    Attributes:
        value: what the function returned.
        error: what it raised; None if it returned.
        trace: the worker's traceback, as text.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


@dataclass(frozen=True)
class PlainCall:
    """A call in a process of the very program that asks for it: the process group is left to the
    function.

    Attributes:
        function, args, kwargs: what is called.
        argv: the program's own sys.argv.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argv: list[str]

    def result(self) -> Any:
        """Make the call."""
        sys.argv = self.argv
        return self.function(*self.args, **self.kwargs)


class RemoteTraceback(Exception):
    """Stands as the cause of a worker's exception, and shows where in the worker it was raised."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f'\n"""\n{self.trace}"""'


def call_file(job_dir: Path, index: int) -> Path:
    """Return where the pickled call lies: of an array's element, in the directory of the array."""
    return job_dir / f"call.{index}.pkl"


def _outcome_file(job_dir: Path, rank: int, attempt: int) -> Path:
    return job_dir / _FOLDER / f"rank{rank}.attempt{attempt}.pkl"


def read_outcome(job_dir: Path, rank: int, attempt: int) -> Outcome | None:
    """Return what came of the call on one rank; None if it left nothing.

    Args:
        job_dir: the job's directory.
        rank: the worker.
        attempt: which start of the job.
    """
    try:
        data = _outcome_file(job_dir, rank, attempt=attempt).read_bytes()
    except OSError:
        return None
    try:
        outcome = pickle.loads(data)  # noqa: S301 - a file in the user's own directory, written by the user's own job
    except Exception as error:  # a class that is not to be found here raises what it likes
        raise JobFailed(
            f"what rank {rank} left cannot be read here: {type(error).__name__}: {error}"
        ) from error
    return outcome if isinstance(outcome, Outcome) else None


def results(
    job_dir: Path, verdict: Verdict, world_size: int, name: str, hint: str = ""
) -> list[Any]:
    """Return what the call returned on each rank of a job that has ended, in their order.

    Args:
        job_dir: the job's directory.
        verdict: how the job ended.
        world_size: its workers.
        name: what the job is called in an error.
        hint: what helps when it failed.

    Raises:
        Exception: what the call raised on the rank that failed first, with that worker's traceback
            as its cause.
        JobFailed: the job failed otherwise, or a rank left nothing.
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
            f"{name} succeeded, but rank {', '.join(missing)} left no result: did the function end the process?"
        )
    return [outcome.value for outcome in found if outcome is not None]


def main() -> None:
    """Make this worker's call."""
    named = os.environ.get(contract.JOB_DIR)
    if not named:
        raise UsageError(
            "this is the worker's side of a function's job",
            "clusterjob.submit(function) starts one",
        )
    job_dir = Path(named)
    index = os.environ.get(contract.ARRAY_INDEX)
    base, number = (job_dir.parent.parent, int(index)) if index else (job_dir, 0)
    paths, delayed = _load(call_file(base, number))
    if isinstance(delayed, PlainCall):
        _make(delayed, job_dir, rank=int(os.environ["RANK"]))
        return
    from clusterjob import bootstrap

    with bootstrap.init() as context:
        _continue_later(context, delayed, paths=paths, path=call_file(base, number))
        _make(delayed, job_dir, rank=context.rank)


def _make(delayed: Any, job_dir: Path, rank: int) -> None:
    """Make a call and leave what came of it."""
    outcome_file = _outcome_file(job_dir, rank, attempt=contract.read_attempt(os.environ))
    outcome_file.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        _leave(outcome_file, Outcome(delayed.result()))
    except Exception as error:
        _leave_error(outcome_file, error)
        raise


def _continue_later(context: Context, delayed: Any, paths: list[str], path: Path) -> None:
    """Have a function that says how it is to be continued do so when the job is warned of its end.

    That is submitit's Checkpointable: ``checkpoint(*args, **kwargs)`` returns the call that the
    next attempt is to make. Rank 0 is asked.
    """
    checkpoint = getattr(delayed.function, "__submitit_checkpoint__", None) or getattr(
        delayed.function, "checkpoint", None
    )
    if checkpoint is None:
        return

    def leave() -> None:
        if context.is_main:
            files.write_atomic(path, pickled(paths, checkpoint(*delayed.args, **delayed.kwargs)))
        context.requeue()

    context.on_preempt(leave)


def pickled(paths: list[str], delayed: Any) -> bytes:
    """Return a call as the worker reads it.

    Args:
        paths: where its modules may lie.
        delayed: submitit's DelayedSubmission, or a `PlainCall`.

    Raises:
        ClusterJobError: it cannot be pickled.
    """
    import cloudpickle

    try:
        return pickle.dumps(paths) + bytes(cloudpickle.dumps(delayed))
    except Exception as error:  # whatever the object's own code raises
        raise ClusterJobError(
            f"the call cannot be pickled: {type(error).__name__}: {error}",
            "open files, locks and sockets cannot travel",
        ) from error


def _load(path: Path) -> tuple[list[str], Any]:
    with path.open("rb") as stream:
        paths = pickle.load(stream)  # noqa: S301 - the user's own call, from the user's own directory
        sys.path[1:1] = [entry for entry in paths if entry not in sys.path]
        try:
            return paths, pickle.load(stream)  # noqa: S301
        except ModuleNotFoundError as error:
            raise ClusterJobError(
                f"the function cannot be loaded: {error}",
                f"{sys.executable} has to have what it needs",
            ) from error


def _leave(path: Path, outcome: Outcome) -> None:
    import cloudpickle

    files.write_atomic(path, cloudpickle.dumps(outcome))


def _leave_error(path: Path, error: BaseException) -> None:
    """Leave an exception; one that cannot be pickled, or read back, leaves its text."""
    trace = "".join(traceback.format_exception(error))
    try:
        import cloudpickle

        pickle.loads(cloudpickle.dumps(error))  # noqa: S301 - some exceptions can be written and not read
        _leave(path, Outcome(None, error, trace=trace))
    except Exception:
        _leave(path, Outcome(None, JobFailed(f"{type(error).__name__}: {error}"), trace=trace))


if __name__ == "__main__":
    # The classes of this module are pickled by its name, not as __main__'s.
    from clusterjob.worker.call import main as run

    run()
