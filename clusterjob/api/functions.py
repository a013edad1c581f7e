"""Python functions as jobs: ``clusterjob.submit(train, lr, nodes=2)``, and ``clusterjob.map(train,
rates)``.

The function travels as submitit's pickled call (its DelayedSubmission, by cloudpickle, so that
functions of ``__main__`` and closures travel too) in the job's own directory; each worker calls it
with the process group ready, and leaves its result there.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.core import jobs
from clusterjob.core.options import SETTINGS, read_setting
from clusterjob.core.plans import PlannedFile
from clusterjob.core.records import Record, Records
from clusterjob.core.trust import Use
from clusterjob.errors import UsageError
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.worker import call

_DISTANT = ("ssh", "mlp")  # backends whose jobs write into directories of other machines
_PROGRAM = Program("module", call.__name__)


@dataclass(frozen=True)
class FunctionJob:
    """A function that runs, or ran, as a job; `clusterjob status`, `logs` and `cancel` know it by
    its id.

    Attributes:
        id: the job's id.
    """

    id: str

    def _record(self) -> Record:
        return Records().find(self.id)

    def state(self) -> JobState:
        """Return how the job stands."""
        return jobs.status(self._record()).state

    def done(self) -> bool:
        """Return whether the job has ended."""
        return jobs.status(self._record()).verdict is not None

    def wait(self) -> Verdict:
        """Return how the job ended, once it has."""
        return jobs.wait(self._record())

    def cancel(self) -> None:
        """Stop the job."""
        jobs.cancel([self._record()])

    def result(self) -> Any:
        """Return what the function returned on rank 0, once the job has ended.

        Raises:
            Exception: what the function raised on the rank that failed first, with that worker's
                traceback as its cause.
            JobFailed: the job failed otherwise: a worker was killed, a node was lost, the job was
                cancelled.
        """
        return self.results()[0]

    def results(self) -> list[Any]:
        """Return what the function returned on each rank, in their order, once the job has ended;
        raises as `result` does.
        """
        record = self._record()
        verdict = jobs.wait(record)
        world_size = record.nodes * int(record.spec.get("nproc_per_node", 1))
        return call.results(
            record.job_dir,
            verdict,
            world_size=world_size,
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

    In it `clusterjob.bootstrap.init()` gives the worker's context, whose process group is ready.

    Args:
        function: what can be pickled by cloudpickle: functions of ``__main__``, lambdas and
            closures included.
        args: its arguments.
        kwargs: its arguments by name.
        settings: ``cluster``, and any setting of a job by its key in a configuration file:
            ``nodes=2, gpus_per_node=8, time="2h", partition="gpu"``.

    Raises:
        UsageError: a setting is unknown or makes no sense.
        ClusterJobError: the job cannot be submitted, or the call cannot be pickled.
    """
    return FunctionJob(_submit([(function, args, dict(kwargs or {}))], settings)[0].job_id)


def map(function: Callable[..., Any], values: Iterable[Any], **settings: Any) -> list[FunctionJob]:  # noqa: A001 - as Executor.map
    """Run ``function(value)`` for each value as a job of its own; under Slurm all are one array.

    Args:
        function: as for `submit`.
        values: one for each job.
        settings: as for `submit`; ``array="%8"`` has at most 8 run at a time.

    Raises:
        UsageError: a setting is unknown or makes no sense.
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
            "a script is started by the command `clusterjob submit SCRIPT`",
        )
    values = dict(given)
    cluster = values.pop("cluster", None)
    at_once = values.pop("array", "") if many else ""
    for key in values:
        if key not in SETTINGS or key in ("sweep", "array"):
            near = difflib.get_close_matches(key, SETTINGS, 1)
            raise UsageError(
                f"a function's job has no setting {key!r}",
                f"did you mean {near[0]}?"
                if near
                else "`clusterjob submit --help` lists them, as options",
            )
    flags = {
        key: read_setting(key, value, origin=f"{key}={value!r}")
        for key, value in values.items()
        if value is not None
    }
    flags.setdefault(
        "name", getattr(calls[0][0], "__name__", type(calls[0][0]).__name__).strip("<>")
    )
    settings = jobs.settle(
        flags, cluster, directory=Path.cwd(), use=Use(sources=tuple(_sources(calls[0][0])))
    )
    if settings.backend in _DISTANT or settings.values.get("login"):
        # Their results would be pickles that other machines have made, read here.
        raise UsageError(
            f"a function's results do not come back from the cluster {settings.cluster!r}",
            "submit a script there",
        )
    payloads = [_pickled(*one) for one in calls]
    if many and settings.backend == "local":
        return [
            record for payload in payloads for record in _start({}, settings, payloads=[payload])
        ]
    array = {"array": f"0-{len(calls) - 1}{at_once}"} if many else {}
    return _start(array, settings, payloads=payloads)


def _sources(function: Callable[..., Any]) -> Iterator[Path]:
    """Yield what asks for a job: the running script, else the directory of an interactive session;
    and the function's file.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    yield Path(main) if main else Path.cwd()
    code = getattr(function, "__code__", None)
    if code is not None:
        yield Path(code.co_filename)


def _start(more: Mapping[str, Any], settings: Any, payloads: list[bytes]) -> list[Record]:
    settings = replace(settings, values={**settings.values, **more})
    spec = jobs.make_spec(_PROGRAM, settings, directory=Path.cwd())
    plan = jobs.plan(spec, settings)
    files = tuple(
        PlannedFile(call.call_file(plan.job_dir, index), payload)
        for index, payload in enumerate(payloads)
    )
    record = jobs.submit(replace(plan, files=(*plan.files, *files)), settings.cluster, detach=True)
    return Records().elements(record)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    from submitit.core.utils import DelayedSubmission

    # Workers must find the modules beside the submitting script, and those in directories that it
    # added to sys.path. The interpreter's own directories differ between hosts and stay behind.
    own = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
    entries = (os.path.abspath(entry) for entry in sys.path)
    paths = [entry for entry in entries if not entry.startswith(own)]
    return call.pickled(paths, DelayedSubmission(function, *args, **kwargs))
