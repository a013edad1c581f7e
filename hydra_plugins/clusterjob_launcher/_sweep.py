"""Submit a list of Hydra overrides as jobs, and wait for their return values.

Hydra does not import a module whose name begins with an underscore when it looks for plug-ins.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from clusterjob.api import results, waiting
from clusterjob.api.functions import job_flags
from clusterjob.backends import base
from clusterjob.core import job_settings, jobs
from clusterjob.core.capabilities import Capability
from clusterjob.core.records import Record, Records
from clusterjob.core.trust import HERE
from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node.program import Program
from clusterjob.node.verdict import Verdict

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)
_AXIS = "overrides"
# Keys of the sweep itself, which its jobs must not get.
_OF_SWEEP = ("hydra.mode", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper",
             "hydra.sweep.dir", "hydra.run.dir")  # fmt: skip
# Returns the function's value through the job's directory.
_CALLBACK = "+hydra.callbacks.clusterjob._target_=clusterjob.worker.call.ReturnValue"


class Sweep:
    """The jobs of one sweep.

    Args:
        config: the sweep's configuration.
        cluster: the cluster; None for the default.
        max_running: number of jobs that run at a time; None for the cluster's limit.
        settings: settings of each job.

    Attributes:
        has_queue: whether the cluster runs the jobs as an array, without this process.

    Raises:
        UsageError: a setting is invalid, or the program was not started as a script or module.
    """

    def __init__(
        self,
        config: DictConfig,
        cluster: str | None,
        max_running: int | None,
        settings: Mapping[str, Any],
    ) -> None:
        if max_running is not None and max_running < 1:
            raise UsageError(f"max_running={max_running}: must be at least 1")
        self._config = config
        self._max_running = max_running
        self._program = _program(config)
        plain = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in settings.items()
        }
        flags = {"name": str(config.hydra.job.name), **job_flags(plain)}
        self._settings = job_settings.resolve(flags, cluster, directory=Path.cwd(), executes=True)
        backend = base.instance(self._settings.backend)
        self.has_queue = Capability.ARRAYS in getattr(backend, "capabilities", ())

    def run(self, job_overrides: Sequence[Sequence[str]], first: int, *, wait: bool) -> list[Any]:
        """Submit one job for each list of overrides.

        Args:
            job_overrides: the overrides of each job.
            first: the number of the first job in the sweep.
            wait: whether to wait for the jobs.

        Returns:
            The return value of each job, or its error; None for each without `wait`.

        Raises:
            UsageError: nothing would limit the number of running jobs.
        """
        if self._max_running and not wait and not self.has_queue:
            raise UsageError(
                f"max_running={self._max_running} with wait=false: the cluster"
                f" {self._settings.cluster!r} has no queue that limits the running jobs",
                "hydra.launcher.wait=true limits them",
            )
        lines = [self._arguments(each, first + index) for index, each in enumerate(job_overrides)]
        if self.has_queue:
            records = self._submit_array(lines)
            if wait:
                return self._values(records)
        elif wait:
            return self._in_turn(lines)
        else:
            for line in lines:
                self._submit(line)
        return [None] * len(lines)

    def _arguments(self, overrides: Sequence[str], number: int) -> list[str]:
        """Return the arguments of one job, which runs in the directory that Hydra's sweep names."""
        hydra = self._config.hydra
        kept = [text for text in hydra.overrides.hydra if not _is_of_sweep(str(text))]
        if self._settings.backend in HERE:
            # The defaults of the application may name another plug-in, such as submitit's. Hosts
            # need not have this one.
            kept.append("hydra/launcher=clusterjob")
        return [
            *overrides,
            *kept,
            "hydra.mode=RUN",
            f"hydra.sweep.dir={_quoted(str(hydra.sweep.dir))}",
            "hydra.run.dir='${hydra.sweep.dir}/${hydra.sweep.subdir}'",
            f"hydra.job.num={number}",
            "hydra.job.id='${oc.env:CLUSTERJOB_JOB_ID}'",
            _CALLBACK,
        ]

    def _submit_array(self, lines: Sequence[Sequence[str]]) -> list[Record]:
        # One axis, whose values are the arguments of each job: records and `rerun` know them.
        values = ",".join('"' + shlex.join(line).replace('"', '""') + '"' for line in lines)
        more = {
            "sweep": (f"{_AXIS}={values}",),
            "array": f"%{self._max_running}" if self._max_running else "",
        }
        program = replace(self._program, args=(*self._program.args, "{" + _AXIS + "...}"))
        records = Records().elements(self._start(program, more))
        _announce(records)
        return records

    def _submit(self, line: Sequence[str]) -> Record:
        record = self._start(replace(self._program, args=(*self._program.args, *line)), {})
        _announce([record])
        return record

    def _start(self, program: Program, more: Mapping[str, Any]) -> Record:
        settings = replace(self._settings, values={**self._settings.values, **more})
        spec = job_settings.make_spec(program, settings, directory=Path.cwd())
        with waiting.BACKENDS:
            return jobs.submit(jobs.plan(spec, settings), settings.cluster, detach=True)

    def _in_turn(self, lines: Sequence[Sequence[str]]) -> list[Any]:
        """Run the jobs with at most `max_running` at a time, and wait for all."""
        found: dict[int, Any] = {}
        running: dict[str, tuple[int, Record]] = {}
        left = list(enumerate(lines))
        while left or running:
            while left and len(running) < (self._max_running or 1):
                number, line = left.pop(0)
                record = self._submit(line)
                running[record.job_id] = number, record
            record, verdict = next(waiting.ends([record for _, record in running.values()], None))
            number, _ = running.pop(record.job_id)
            found[number] = _value(record, verdict)
        return [found[number] for number in range(len(lines))]

    def _values(self, records: Sequence[Record]) -> list[Any]:
        found = {record.job_id: _value(record, end) for record, end in waiting.ends(records, None)}
        return [found[record.job_id] for record in records]


def _value(record: Record, verdict: Verdict) -> Any:
    log.info("job %s %s", record.job_id, verdict.state)
    try:
        return results.returned(record, verdict)
    except ClusterJobError as error:
        return error


def _announce(records: Sequence[Record]) -> None:
    """Log the id of a job, or of an array whose elements these are."""
    whole, first = records[0].whole_id, records[0].job_id
    if len(records) == 1:
        log.info(f"job {whole}: `clusterjob logs -f {whole}` shows its output")
    else:
        log.info(
            f"{len(records)} jobs: `clusterjob status {whole}`, `clusterjob logs -f {first}`,"
            f" `clusterjob cancel {whole}`"
        )


def _quoted(text: str) -> str:
    """Return a text as a quoted value of Hydra's override grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _is_of_sweep(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return key in _OF_SWEEP or key.startswith(("hydra.launcher.", "hydra.sweeper."))


def _program(config: DictConfig) -> Program:
    """Return the running application as a program, with the options that name its configuration.

    Raises:
        UsageError: the application is neither a script nor a module.
    """
    from hydra._internal.utils import get_args_parser

    given, _ = get_args_parser().parse_known_args(sys.argv[1:])
    args: list[str] = []
    for flag in ("config_path", "config_name", "config_dir"):
        if getattr(given, flag, None) is not None:
            args += [f"--{flag.replace('_', '-')}", getattr(given, flag)]
    main = sys.modules["__main__"]
    module = getattr(main, "__spec__", None)
    if module is not None:
        name = str(module.name)
        return Program("module", name.removesuffix(".__main__"), args=tuple(args))
    file = getattr(main, "__file__", None)
    if file is None:
        raise UsageError(
            f"the application {config.hydra.job.name!r} is no script",
            "start it with `python SCRIPT --multirun ...`",
        )
    return Program("script", os.path.relpath(file), args=tuple(args))
