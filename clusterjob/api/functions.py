"""Run Python functions as jobs: `clusterjob.submit` and `clusterjob.map`.

For example ``clusterjob.submit(train, lr, nodes=2)`` and ``clusterjob.map(train, rates)``.
cloudpickle writes the call into the job directory, so functions of ``__main__`` and closures work
too. Each worker creates the process group, calls the function, and writes the result into the job
directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.options import OPTIONS, read_setting
from clusterjob.core.plans import PlannedFile
from clusterjob.core.records import Record, Records
from clusterjob.core.trust import Usage
from clusterjob.errors import UsageError, did_you_mean
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import call

_DISTANT = ("ssh", "mlp")  # backends whose jobs write their results on other machines
_PROGRAM = Program("module", call.__name__)


@dataclass(frozen=True)
class FunctionJob:
    """A function that runs, or ran, as a job.

    Attributes:
        id: the job's id, which `clusterjob status`, `logs` and `cancel` accept.
    """

    id: str

    def _record(self) -> Record:
        return Records().find(self.id)

    def state(self) -> JobState:
        """Return the state of the job."""
        return polling.status(self._record()).state

    def done(self) -> bool:
        """Return whether the job has ended."""
        return polling.status(self._record()).verdict is not None

    def wait(self) -> Verdict:
        """Wait for the job to end and return its verdict."""
        return polling.wait(self._record())

    def cancel(self) -> None:
        """Cancel the job."""
        jobs.cancel([self._record()])

    def result(self) -> Any:
        """Wait for the job to end and return the result of rank 0.

        Raises:
            Exception: the function's exception on the rank that failed first, with that worker's
                traceback as its cause.
            JobFailed: the job failed in another way: a worker was killed, a node was lost, or the
                job was cancelled.
        """
        return self.results()[0]

    def results(self) -> list[Any]:
        """Wait for the job to end and return the results of all ranks, in rank order.

        Raises the same exceptions as `result`.
        """
        record = self._record()
        return call.results(
            record.job_dir,
            polling.wait(record),
            world_size=record.nodes * record.job.nproc_per_node,
            name=f"job {self.id}",
            hint=f"clusterjob logs {self.id} shows its output",
        )


def submit(
    function: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> FunctionJob:
    """Run ``function(*args, **kwargs)`` on every worker of a new job and return at once.

    When the function begins, the process group exists. In the function,
    `clusterjob.bootstrap.init()` returns the worker's context.

    Args:
        function: a function that cloudpickle can pickle, including functions of ``__main__``,
            lambdas and closures.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        settings: ``cluster``, and any setting of a job by its key in a configuration file:
            ``nodes=2, gpus_per_node=8, time="2h", partition="gpu"``.

    Raises:
        UsageError: a setting is unknown or invalid.
        ClusterJobError: the job cannot be submitted, or the call cannot be pickled.
    """
    return FunctionJob(_submit([(function, args, dict(kwargs or {}))], settings)[0].job_id)


def map(  # noqa: A001 - named like Executor.map
    function: Callable[..., Any],
    values: Iterable[Any],
    **settings: Any,
) -> list[FunctionJob]:
    """Run ``function(value)`` as a separate job for each value; Slurm runs them as one array.

    Args:
        function: as in `submit`.
        values: the arguments, one per job.
        settings: as in `submit`; ``array="%8"`` limits the number of running jobs to 8.

    Raises:
        UsageError: a setting is unknown or invalid.
        ClusterJobError: a job cannot be submitted, or a call cannot be pickled.
    """
    calls = [(function, (value,), dict[str, Any]()) for value in values]
    return (
        [FunctionJob(record.job_id) for record in _submit(calls, settings, many=True)]
        if calls
        else []
    )


def _submit(calls: list[Any], given: Mapping[str, Any], *, many: bool = False) -> list[Record]:
    if not callable(calls[0][0]):
        raise UsageError(
            f"{calls[0][0]!r} is not a function",
            "to start a script: `clusterjob submit SCRIPT`",
        )
    values = dict(given)
    cluster = values.pop("cluster", None)
    at_once = values.pop("array", "") if many else ""
    for key in values:
        if key not in OPTIONS or key in ("sweep", "array"):
            raise UsageError(
                f"a function's job has no setting {key!r}",
                did_you_mean(
                    key, OPTIONS, "`clusterjob submit --help` lists the settings as options"
                ),
            )
    flags = {
        key: read_setting(key, value, origin=f"{key}={value!r}")
        for key, value in values.items()
        if value is not None
    }
    flags.setdefault(
        "name", getattr(calls[0][0], "__name__", type(calls[0][0]).__name__).strip("<>")
    )
    settings = job_settings.resolve(
        flags, cluster, directory=Path.cwd(), use=Usage(sources=tuple(_sources(calls[0][0])))
    )
    if settings.backend in _DISTANT or settings.values.get("login"):
        # Results are pickles; loading pickles that other machines have written is unsafe.
        raise UsageError(
            f"the cluster {settings.cluster!r} cannot return a function's results",
            "submit a script instead",
        )
    payloads = [_pickled(*one) for one in calls]
    if many and settings.backend == "local":
        return [
            record for payload in payloads for record in _start({}, settings, payloads=[payload])
        ]
    return _start(
        {"array": f"0-{len(calls) - 1}{at_once}"} if many else {}, settings, payloads=payloads
    )


def _sources(function: Callable[..., Any]) -> Iterator[Path]:
    """Yield the files with the code that submits the job, for the trust check.

    They are the function's file and the running script; in an interactive session, the current
    directory replaces the script.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    yield Path(main) if main else Path.cwd()
    code = getattr(function, "__code__", None)
    if code is not None:
        yield Path(code.co_filename)


def _start(more: Mapping[str, Any], settings: Any, payloads: list[bytes]) -> list[Record]:
    settings = replace(settings, values={**settings.values, **more})
    spec = job_settings.make_spec(_PROGRAM, settings, directory=Path.cwd())
    plan = jobs.plan(spec, settings)
    files = tuple(
        PlannedFile(call.call_file(plan.job_dir, index), payload)
        for index, payload in enumerate(payloads)
    )
    plan = replace(plan, files=(*plan.files, *files))
    return Records().elements(jobs.submit(plan, settings.cluster, detach=True))


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    # Workers import from the submitting script's directory and from the directories that the script
    # has added to sys.path. The interpreter's own directories differ between hosts: leave them out.
    own = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
    entries = (os.path.abspath(entry) for entry in sys.path)
    paths = [entry for entry in entries if not entry.startswith(own)]
    return call.pickled(paths, call.FunctionCall(function, args, kwargs=kwargs))
