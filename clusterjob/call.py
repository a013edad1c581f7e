"""The worker's side of a function as a job: load the call, make it with the process group ready, leave what came of it.

Run as ``python -m clusterjob.call`` by the job's workers. The files lie in the job's directory, which its owner alone can read.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError, JobFailed, UsageError
from clusterjob.node import contract, files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterjob.context import Context

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
        data = _outcome_file(job_dir, rank, attempt).read_bytes()
    except OSError:
        return None
    try:
        outcome = pickle.loads(data)  # noqa: S301 - a file in the user's own directory, written by the user's own job
    except Exception as error:  # a class that is not to be found here raises what it likes
        raise JobFailed(f"what rank {rank} left cannot be read here: {type(error).__name__}: {error}") from error
    return outcome if isinstance(outcome, Outcome) else None


def main() -> None:
    """Make this worker's call."""
    named = os.environ.get(contract.JOB_DIR)
    if not named:
        raise UsageError("this is the worker's side of a function's job", "clusterjob.submit(function) starts one")
    job_dir = Path(named)
    index = os.environ.get(contract.ARRAY_INDEX)
    base, number = (job_dir.parent.parent, int(index)) if index else (job_dir, 0)
    paths, delayed = _load(call_file(base, number))
    from clusterjob import bootstrap

    with bootstrap.init() as context:
        _continue_later(context, delayed, paths, call_file(base, number))
        outcome_file = _outcome_file(job_dir, context.rank, contract.read_attempt(os.environ))
        outcome_file.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            _leave(outcome_file, Outcome(delayed.result()))
        except Exception as error:
            _leave_error(outcome_file, error)
            raise


def _continue_later(context: Context, delayed: Any, paths: list[str], path: Path) -> None:
    """Have a function that says how it is to be continued do so when the job is warned of its end.

    That is submitit's Checkpointable: ``checkpoint(*args, **kwargs)`` returns the call that the next attempt is to make. Rank 0 is asked.
    """
    checkpoint = getattr(delayed.function, "__submitit_checkpoint__", None) or getattr(delayed.function, "checkpoint", None)
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
        delayed: submitit's DelayedSubmission.
    """
    import cloudpickle

    return pickle.dumps(paths) + bytes(cloudpickle.dumps(delayed))


def _load(path: Path) -> tuple[list[str], Any]:
    with path.open("rb") as stream:
        paths = pickle.load(stream)  # noqa: S301 - the user's own call, from the user's own directory
        sys.path[1:1] = [entry for entry in paths if entry not in sys.path]
        try:
            return paths, pickle.load(stream)  # noqa: S301
        except ModuleNotFoundError as error:
            raise ClusterJobError(f"the function cannot be loaded: {error}", f"{sys.executable} has to have what it needs") from error


def _leave(path: Path, outcome: Outcome) -> None:
    import cloudpickle

    files.write_atomic(path, cloudpickle.dumps(outcome))


def _leave_error(path: Path, error: BaseException) -> None:
    """Leave an exception; one that cannot be pickled, or read back, leaves its text."""
    trace = "".join(traceback.format_exception(error))
    bare = error.with_traceback(None)
    try:
        import cloudpickle

        pickle.loads(cloudpickle.dumps(bare))  # noqa: S301 - some exceptions can be written and not read
        _leave(path, Outcome(None, bare, trace))
    except Exception:
        _leave(path, Outcome(None, JobFailed(f"{type(error).__name__}: {error}"), trace))


if __name__ == "__main__":
    # The classes of this module are pickled by its name, not as __main__'s.
    from clusterjob.call import main as run

    run()
