"""Run a submitted function in a worker: load the pickled call, run it, write its outcome.

The job's workers run it as ``python -m clusterjob.worker.call``. The files are in the job's
directory, which only its owner can read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node import contract
from clusterjob.node.environments import this_node
from clusterjob.node.system import files
from clusterjob.worker import outcomes
from clusterjob.worker.context import Context

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


def call_file(job_dir: Path, index: int) -> Path:
    """Return the path of the pickled call; for an array, `job_dir` is the array's directory."""
    return job_dir / f"call.{index}.pkl"


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
    _hide_own_frames()
    with contextlib.suppress(ModuleNotFoundError):  # a plain call needs no torch
        _let_form_group()
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


def _let_form_group() -> None:
    """Let a function form the process group itself, as a script does; ours then makes way.

    The group stays that of the context. It runs before the function is loaded, which may bind
    ``init_process_group``.
    """
    import torch.distributed as dist

    from clusterjob.worker.context import state

    form = dist.init_process_group

    @functools.wraps(form)
    def init_process_group(*args: Any, **options: Any) -> Any:
        context = state.context
        if context is None or not context.holds_group() or replaced:
            return form(*args, **options)
        replaced.append(True)  # a second call is an error, as in a script
        dist.destroy_process_group()
        shown = sys.excepthook
        form(*args, **options)
        sys.excepthook = shown  # torch's, which holds back what it shows, is already below it
        context.join_group(owned=True)
        return None

    replaced: list[bool] = []
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def _hide_own_frames() -> None:
    """Let an uncaught exception's traceback begin in the user's function."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error.with_traceback(_of_function(trace)), error.__traceback__)

    sys.excepthook = hook


def _of_function(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback below this module's last frame."""
    own, part = _of_function.__code__.co_filename, trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == own:
            part = trace.tb_next
        trace = trace.tb_next
    return part


def _make(function_call: Any, job_dir: Path, rank: int, world_size: int) -> None:
    """Run a call and write its outcome."""
    attempt = this_node.read_attempt(os.environ)
    try:
        value = function_call.result()
        outcomes.write_value(job_dir, rank, attempt=attempt, value=value, world_size=world_size)
    except Exception as error:
        error.__traceback__ = _of_function(error.__traceback__)
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
