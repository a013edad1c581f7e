"""Run Python functions as jobs: `clusterjob.submit` and `clusterjob.map`.

For example ``clusterjob.submit(train, lr, nodes=2)`` and ``clusterjob.map(train, rates)``.
cloudpickle writes the call into the job directory, so functions of ``__main__`` and closures work
too. Each worker creates the process group, calls the function, and writes the result into the job
directory.
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from clusterjob.api.jobs import Job, JobGroup
from clusterjob.api.results import PROGRAM
from clusterjob.api.waiting import BACKENDS
from clusterjob.backends import base
from clusterjob.core import job_settings, jobs
from clusterjob.core.capabilities import Capability
from clusterjob.core.options import OPTIONS, read_setting
from clusterjob.core.plans import PlannedFile
from clusterjob.core.records import Record, Records
from clusterjob.errors import UsageError, did_you_mean
from clusterjob.worker import call
from clusterjob.worker.call import FunctionCall

if TYPE_CHECKING:  # typing has them from Python 3.11 on
    from typing_extensions import Self, TypeVarTuple, Unpack

    from clusterjob.api.job_options import JobOptions
    from clusterjob.core.config import Settings

    Ts = TypeVarTuple("Ts")

_WITHOUT_RESULTS = ("mlp",)  # backends that cannot read the files of a job's directory
_DISTANT = ("ssh",)  # backends whose jobs always run on other machines

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")


def submit(
    function: Callable[[Unpack[Ts]], T],
    *args: Unpack[Ts],
    kwargs: Mapping[str, Any] | None = None,
    trust_results: bool = False,
    **settings: Unpack[JobOptions],
) -> Job[T]:
    """Run ``function(*args, **kwargs)`` on every worker of a new job and return at once.

    When the function begins, the process group exists. In the function,
    `clusterjob.bootstrap.init()` returns the worker's context. The job continues when this process
    ends.

    Args:
        function: a function that cloudpickle can pickle, including functions of ``__main__``,
            lambdas and closures.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function; `Executor.submit` has their types checked.
        trust_results: whether to unpickle results that other machines have written. Results of
            this machine, and of Slurm's commands on this machine, are always unpickled. Without
            it, numbers, texts, lists, tuples and dicts come back from other machines.
        settings: ``cluster``, and any setting of a job by its key in a configuration file:
            ``nodes=2, gpus_per_node=8, time="2h", partition="gpu"``.

    Raises:
        UsageError: a setting is unknown or invalid.
        ClusterJobError: the job cannot be submitted, or the call cannot be pickled.
    """
    records = _submit([FunctionCall(function, args, dict(kwargs or {}))], settings)
    return Job(records[0].job_id, trust_results)


@overload
def map(  # noqa: A001 - named like Executor.map
    function: Callable[[A], T],
    values: Iterable[A],
    /,
    *,
    trust_results: bool = ...,
    **settings: Unpack[JobOptions],
) -> JobGroup[T]: ...
@overload
def map(  # noqa: A001
    function: Callable[[A, B], T],
    values: Iterable[A],
    more: Iterable[B],
    /,
    *,
    trust_results: bool = ...,
    **settings: Unpack[JobOptions],
) -> JobGroup[T]: ...
@overload
def map(  # noqa: A001
    function: Callable[..., T],
    first: Iterable[Any],
    second: Iterable[Any],
    third: Iterable[Any],
    /,
    *more: Iterable[Any],
    trust_results: bool = ...,
    **settings: Unpack[JobOptions],
) -> JobGroup[T]: ...
def map(  # noqa: A001
    function: Callable[..., T],
    values: Iterable[Any],
    /,
    *more: Iterable[Any],
    trust_results: bool = False,
    **settings: Unpack[JobOptions],
) -> JobGroup[T]:
    """Run ``function(value, ...)`` as a separate job for each value.

    Slurm runs the jobs as one array. With several iterables, the function gets one value of each,
    until the shortest ends.

    Args:
        function: as in `submit`.
        values: the first argument of each job.
        *more: the further arguments of each job.
        trust_results: as in `submit`.
        settings: as in `submit`; ``array="%8"`` limits the number of running jobs to 8.

    Raises:
        UsageError: a setting is unknown or invalid.
        ClusterJobError: a job cannot be submitted, or a call cannot be pickled.
    """
    calls = [FunctionCall(function, each, {}) for each in zip(values, *more)]  # noqa: B905
    records = _submit(calls, settings, many=True) if calls else []
    return JobGroup(tuple(Job(record.job_id, trust_results) for record in records))


class Executor:
    """Submit functions as jobs with the same settings, like `concurrent.futures.Executor`.

    For example ``Executor(cluster="slurm", nodes=2).submit(train, 0.1, epochs=3)``. Type checkers
    check the arguments against the function. As a context manager, it waits for its jobs.

    Args:
        trust_results: as in `submit`.
        settings: as in `submit`.
    """

    def __init__(self, *, trust_results: bool = False, **settings: Unpack[JobOptions]) -> None:
        self._trust = trust_results
        self._settings: JobOptions = settings
        self._jobs: list[Job[Any]] = []

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Job[T]:
        """Run ``function(*args, **kwargs)`` as a job; see `clusterjob.submit`."""
        records = _submit([FunctionCall(function, args, dict(kwargs))], self._settings)
        job: Job[T] = Job(records[0].job_id, self._trust)
        self._jobs.append(job)
        return job

    def map(
        self, function: Callable[..., T], values: Iterable[Any], /, *more: Iterable[Any]
    ) -> JobGroup[T]:
        """Run the function as a job for each value; see `clusterjob.map`."""
        group = map(function, values, *more, trust_results=self._trust, **self._settings)
        self._jobs += group
        return group

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as in concurrent.futures
        """Wait for the jobs of this executor.

        Args:
            wait: False to return at once; the jobs continue.
            cancel_futures: whether to cancel the jobs.
        """
        group = JobGroup(tuple(self._jobs))
        if cancel_futures:
            group.cancel()
        if wait:
            group.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error or Ctrl-C, the jobs continue and the caller learns of the error now.
        self.shutdown(wait=kind is None)


def _submit(
    calls: Sequence[FunctionCall], given: Mapping[str, Any], *, many: bool = False
) -> list[Record]:
    """Submit calls of one function: one job, or with `many` a job for each call."""
    function = calls[0].function
    if not callable(function):
        raise UsageError(
            f"{function!r} is not a function",
            "to start a script: `clusterjob submit SCRIPT`",
        )
    values = dict(given)
    cluster = values.pop("cluster", None)
    at_once = values.pop("array", "") if many else ""
    flags = job_flags(values)
    flags.setdefault("name", getattr(function, "__name__", type(function).__name__).strip("<>"))
    settings = job_settings.resolve(flags, cluster, directory=Path.cwd(), executes=True)
    backend = base.instance(settings.backend)
    arrays = Capability.ARRAYS in getattr(backend, "capabilities", ())
    if at_once and not arrays:
        raise UsageError(
            f"array={at_once!r}: the {settings.cluster} cluster does not limit how many jobs run"
            " at a time",
            "leave it out, or use a cluster with a queue",
        )
    if settings.backend in _WITHOUT_RESULTS:
        raise UsageError(
            f"the cluster {settings.cluster!r} cannot return a function's results",
            "submit a script instead",
        )
    sent = bool(settings.values.get("sync", True)) and (
        settings.backend in _DISTANT or bool(settings.values.get("login"))
    )
    root = Path.cwd() / settings.values.get("workdir", "") if sent else None
    payloads = [_pickled(each, root) for each in calls]
    if many and arrays:
        array = {"array": f"0-{len(calls) - 1}{at_once}"}
        return _start(replace(settings, values={**settings.values, **array}), payloads)
    return [record for payload in payloads for record in _start(settings, [payload])]


def job_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a Python caller in the types that a job needs; None is left out.

    Raises:
        UsageError: a setting is unknown or invalid.
    """
    for key in given:
        if key not in OPTIONS or key in ("sweep", "array"):
            raise UsageError(
                f"a function's job has no setting {key!r}",
                did_you_mean(
                    key, OPTIONS, "`clusterjob submit --help` lists the settings as options"
                ),
            )
    return {
        key: read_setting(
            key,
            os.fspath(value) if isinstance(value, os.PathLike) else value,
            origin=f"{key}={value!r}",
        )
        for key, value in given.items()
        if value is not None
    }


def _start(settings: Settings, payloads: Sequence[bytes]) -> list[Record]:
    """Submit one job, or the array of the settings, with the pickled call of each element."""
    spec = job_settings.make_spec(PROGRAM, settings, directory=Path.cwd())
    plan = jobs.plan(spec, settings)
    files = [
        PlannedFile(call.call_file(plan.job_dir, index), payload)
        for index, payload in enumerate(payloads)
    ]
    if spec.hosts or spec.login:
        files.append(PlannedFile(plan.job_dir / call.MODULES, _cloudpickle()))
    plan = replace(plan, files=(*plan.files, *files))
    with BACKENDS:
        return Records().elements(jobs.submit(plan, settings.cluster, detach=True))


def _cloudpickle() -> bytes:
    """Return the installed cloudpickle as a zip: the hosts may lack it, or have another version."""
    import cloudpickle

    folder = Path(cloudpickle.__file__).parent
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.glob("*.py")):
            archive.write(path, f"cloudpickle/{path.name}")
    return content.getvalue()


def _pickled(function_call: FunctionCall, root: Path | None) -> bytes:
    """Return a pickled call; with a root, paths below it are relative, and others are left out."""
    # Workers import from the submitting script's directory and from the directories that the script
    # has added to sys.path. The interpreter's own directories differ between hosts: leave them out.
    own = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
    entries = [os.path.abspath(entry) for entry in sys.path]
    paths = [entry for entry in entries if not entry.startswith(own)]
    if root is not None:
        below = [os.path.relpath(entry, os.path.abspath(root)) for entry in paths]
        paths = [entry for entry in below if entry.split(os.sep)[0] != os.pardir]
    return call.pickled(paths, function_call)
