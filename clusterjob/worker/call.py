"""Run a submitted function in a worker: load the pickled call, run it, write its outcome.

The job's workers run it as ``python -m clusterjob.worker.call``. The files are in the job's
directory, which only its owner can read.

A rank writes its outcome into ``rank<r>.attempt<a>.json``: a plain value, or the text of an
exception. A value that is not plain, and an exception, are also pickled into the file of the same
name with ``.pkl``. Reading the JSON file is always safe; reading a pickle runs code.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from clusterjob.errors import ClusterJobError, JobFailed
from clusterjob.node import contract, program
from clusterjob.node.environments import this_node
from clusterjob.node.logs.job_dir import OUTCOMES
from clusterjob.node.system import files

if TYPE_CHECKING:
    from clusterjob.worker.context import Context

MODULES = "call.modules.zip"  # modules that a remote host may lack, next to the call
MAX_JSON = 16 << 20  # bytes; a larger value is only pickled
_MAX_TRACE = 64 << 10  # characters at the end of a traceback
_MAX_MESSAGE = 16 << 10  # characters


# -- the call --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function.

    submitit's DelayedSubmission has the same members without `argv`, and is accepted too.

    Attributes:
        function, args, kwargs: the function and its arguments.
        argv: sys.argv of the program that made the call, for a call without `bootstrap.init`: the
            function makes the process group itself. None for a call in the process group.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argv: list[str] | None = None

    def result(self) -> Any:
        """Run the function and return its value."""
        return self.function(*self.args, **self.kwargs)


def call_file(job_dir: Path, index: int) -> Path:
    """Return the path of the pickled call; for an array, `job_dir` is the array's directory."""
    return job_dir / f"call.{index}.pkl"


def main() -> None:
    """Run this worker's call."""
    job_dir = Path(os.environ[contract.JOB_DIR])
    index = os.environ.get(contract.ARRAY_INDEX)
    path = call_file(job_dir.parent.parent, int(index)) if index else call_file(job_dir, 0)
    _hide_own_frames()
    with contextlib.suppress(ModuleNotFoundError):  # a call without the group needs no torch
        _let_form_group()
    paths, function_call = _load(path)
    argv = getattr(function_call, "argv", None)
    if argv is not None:
        sys.argv = argv
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _make(function_call, job_dir, rank=rank, world_size=world_size)
        return
    from clusterjob import bootstrap

    with bootstrap.init() as context:
        _continue_later(context, function_call, paths=paths, path=path)
        _make(function_call, job_dir, rank=context.rank, world_size=context.world_size)


def _hide_own_frames() -> None:
    """Let an uncaught exception's traceback begin in the user's function."""
    program.launcher_files.add(main.__code__.co_filename)
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        program.strip(error)
        show(kind, error, error.__traceback__)

    sys.excepthook = hook


def _let_form_group() -> None:
    """Let a function form the process group itself, as a script does; ours then makes way.

    It runs before the function is loaded, which may bind ``init_process_group``.
    """
    import torch.distributed as dist

    from clusterjob import bootstrap
    from clusterjob.worker.context import state

    form = dist.init_process_group

    @functools.wraps(form)
    def init_process_group(*args: Any, **options: Any) -> None:
        if state.context is not None and state.context.holds_group():
            bootstrap.shutdown()
        form(*args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group


def _make(function_call: Any, job_dir: Path, rank: int, world_size: int) -> None:
    """Run a call and write its outcome."""
    attempt = this_node.read_attempt(os.environ)
    try:
        value = function_call.result()
        write_value(job_dir, rank, attempt=attempt, value=value, world_size=world_size)
    except Exception as error:
        program.strip(error)
        write_error(job_dir, rank, attempt=attempt, error=error)
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
    # The submitter's cloudpickle, if it was sent; this machine's own comes first.
    sys.path.append(str(path.with_name(MODULES)))
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


# -- the outcome -----------------------------------------------------------------------------------


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
    """Return the name of a rank's file in `OUTCOMES`; the suffix is ``json`` or ``pkl``."""
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
    if type(value) in (list, tuple):
        items = [_encode(item) for item in value]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [(key, _encode(item)) for key, item in value.items()]}
    raise TypeError(type(value).__name__)


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
        program.text_of(error)[:_MAX_MESSAGE],
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
    folder = job_dir / OUTCOMES
    folder.mkdir(mode=0o700, exist_ok=True)
    if pickled is not None:
        files.write_atomic(folder / outcome_name(rank, attempt, "pkl"), pickled)
    files.write_atomic(folder / outcome_name(rank, attempt), data)


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


if __name__ == "__main__":
    # Classes are pickled under their module's name: run the imported module, not __main__.
    from clusterjob.worker.call import main as run

    run()
