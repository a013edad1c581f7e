"""Run each job as a task of Volcengine's ML Platform, submitted with its command `volc`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterjob.backends import job_code, shared
from clusterjob.backends.batch_command import upload
from clusterjob.backends.batch_command.attempts import Retries
from clusterjob.backends.batch_command.backend import Account, PlatformBackend
from clusterjob.backends.batch_command.platform import Platform
from clusterjob.backends.mlp import task
from clusterjob.backends.mlp.client import COMMAND, SUBMIT_TIMEOUT, Volc, check_installed
from clusterjob.backends.mlp.task_options import MlpOptions
from clusterjob.core import node_zip, snapshot
from clusterjob.core.arrays import Array
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan, PlannedCommand, PlannedFile, token_file
from clusterjob.core.records import Handle
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.core.units import parse_size
from clusterjob.doctor.engine import Check, CheckStep, run_checks
from clusterjob.errors import SubmitError

if TYPE_CHECKING:
    from clusterjob.core.proposals import Proposal

NAME = "mlp"
_SCRIPT = "mlp.sh"
_TASK = "task.yaml"
# Seconds between SIGTERM and SIGKILL of the platform; the default of Kubernetes.
_KILL_GRACE = 30.0
_POLL = 5.0  # seconds between two polls while a job is followed
_RATE = 2.0  # maximum number of array elements to submit per second
_ACCOUNT = {"profile": "VOLC_PROFILE", "region": "VOLC_REGION"}


class MlpBackend(PlatformBackend):
    """Run jobs as tasks of the platform; nodes read their rank from MLP_* variables."""

    NAME = NAME
    capabilities = (
        Capability.GPU_TYPES,
        Capability.COUNTED_WORKERS,
        Capability.SHARED_DIRECTORY,
        Capability.BACKEND_OPTIONS,
        Capability.ARRAYS,
        Capability.REQUEUE,
    )
    hints: ClassVar[Mapping[Capability, str]] = {
        Capability.GPU_LIST: ("a task gets whole machines: use --gpus N, or --set flavor=NAME"),
        Capability.CONTAINERS: "set the task's image with --set image=URL",
        Capability.ARRAY_LIMITS: "remove the % part: the queue's quota limits them",
    }

    # -- planning ----------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job: its tasks, and the entry script that every worker runs.

        Raises:
            SpecError: an option is not valid for this backend.
            TemplateError: the user's template cannot be rendered.
        """
        options = MlpOptions.of(spec.options)
        gpus = task.gpus_of(spec)
        left_open = spec.nproc_is_default  # the platform sets the number of GPUs of each worker
        if left_open and gpus and spec.nproc_word != "cpu":
            spec = replace(spec, nproc_per_node=gpus, nproc_word="", nproc_is_default=False)
        if spec.sync:
            spec = replace(spec, program=shared.sent_program(spec))
        for key, default in (
            ("poll", _POLL),
            ("submit_rate", _RATE),
            ("submit_timeout", SUBMIT_TIMEOUT),
        ):
            options.number(key, default, 1e-3)
        _sync_limit(options)
        job_id, job_dir = shared.new_directory(spec.name)
        array = spec.elements()
        tasks = {
            _task_file(job_dir, index): task.fields(
                spec,
                job_id,
                upload=str(job_dir / upload.DIRECTORY),
                entry=f"{upload.OWN}/{upload.ENTRY}",
                index=index,
            )
            for index in (array.indices if array else (None,))
        }
        missing = task.missing(next(iter(tasks.values())))
        files = [PlannedFile(path, _yaml(job_id, fields)) for path, fields in tasks.items()]
        if array is not None and array.values:
            files.append(shared.sweep_file(spec, array, job_dir=job_dir))
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(
                *shared.common_files(spec, job_dir),
                *files,
                shared.script_file(
                    job_dir / _SCRIPT,
                    render(
                        spec.template or f"{_SCRIPT}.j2",
                        _values(
                            spec,
                            job_id,
                            job_dir=job_dir,
                            array=array,
                            uploaded=not missing,
                            left_open=left_open,
                        ),
                    ),
                ),
            ),
            commands=()
            if missing
            else tuple(
                PlannedCommand(
                    (COMMAND, "ml_task", "submit", "--conf", str(path), "--output", "json")
                )
                for path in tasks
            ),
            notes=_notes(spec, missing),
            sends_code=spec.sync and not missing,
            array={"indices": list(array.indices), "pieces": [0]} if array else None,
        )

    def propose(self) -> Iterator[Proposal]:
        """Yield the profiles that `clusterjob init` offers."""
        from clusterjob.backends.mlp import proposal

        return proposal.propose()

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of the account for a job."""
        from clusterjob.backends.mlp.checks import Account as AccountOnPlatform
        from clusterjob.doctor.this_machine import directory_checks

        account = dict(self.account_of(spec.options))
        return run_checks(
            [
                *directory_checks(),
                CheckStep("job", lambda: shared.check_plan(self.plan, spec), needs=("directory",)),
                *AccountOnPlatform(spec, Volc(account), account=account).check_steps(),
            ]
        )

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Submit the planned tasks with the code and the node half.

        Raises:
            SubmitError: the platform refuses a task, or an option is missing; no task is left on
                the platform.
            SubmitInDoubtError: the platform did not answer, and a task may run.
        """
        options, given = MlpOptions.of(plan.spec.options), plan.spec.options
        if not plan.commands:
            missing = task.missing(task.fields(plan.spec, plan.job_id, upload="", entry=""))
            raise SubmitError(
                f"the platform takes no task without {' and '.join(missing)}",
                f"{task.hint_for_missing(missing, given)}; "
                f"`clusterjob render --cluster {NAME} ...` prints {_SCRIPT} for a task that you "
                "create manually",
            )
        check_installed()
        planned = {file.path: file for file in plan.files}
        confs = []
        for index in plan.array["indices"] if plan.array else (None,):
            fields = task.with_secrets(
                planned[_task_file(plan.job_dir, index)].text(),
                given,
                token=token_file(plan.job_dir).read_text(),
                environ=os.environ,
                more=plan.spec.private_values(os.environ, plan.backend),
            )
            confs.append((fields["TaskName"], _yaml(plan.job_id, fields)))
        staged = upload.stage(
            plan.spec,
            plan.job_dir,
            files=[
                *(file for file in plan.files if file.path.name in (node_zip.NAME, shared.SWEEP)),
                replace(planned[plan.job_dir / _SCRIPT], path=Path(upload.ENTRY)),
            ],
            limit=_sync_limit(options),
        )
        try:
            return self.submit_tasks(
                plan,
                Volc(
                    dict(self.account_of(given)),
                    options.number("submit_timeout", SUBMIT_TIMEOUT, 1e-3),
                ),
                tasks=confs,
                suffix=".yaml",
                rate=options.number("submit_rate", _RATE, 1e-3),
            )
        finally:
            staged.remove()

    # -- the platform ------------------------------------------------------------------------------

    def platform(self, account: Account) -> Platform:
        """Return the platform for one account."""
        return Volc(dict(account))

    def account_of(self, options: Mapping[str, str]) -> Account:
        """Return the account that a job's options select, else that of the environment."""
        return tuple(
            (name, value)
            for key, name in sorted(_ACCOUNT.items())
            if (value := options.get(key) or os.environ.get(name))
        )

    def retries(self, spec: JobSpec) -> Retries:
        """Return the platform's retry policy for a job."""
        options = spec.options
        retry = task.retry_options(options, spec.max_restarts, requeue=spec.requeue)
        preemptible = MlpOptions.of(options).preemptible
        if not retry.get("EnableRetry"):
            return Retries(preemptible=preemptible)
        policies = retry.get("PolicySets") or []
        return Retries(
            int(retry.get("MaxRetryTimes", 0)),
            float(retry.get("IntervalSeconds", 0)),
            failures="Failed" in policies,
            reclaims="InstanceReclaimed" in policies,
            preemptible=preemptible,
        )

    def poll(self, options: Mapping[str, str]) -> float:
        """Return the seconds between two polls while a job is followed."""
        return MlpOptions.of(options).number("poll", _POLL, 1e-3)


def _values(
    spec: JobSpec,
    job_id: str,
    job_dir: Path,
    array: Array | None,
    *,
    uploaded: bool,
    left_open: bool,
) -> dict[str, Any]:
    more: dict[str, Any] = {"program": shared.element_program(spec, array)}
    options = MlpOptions.of(spec.options)
    if uploaded and (spec.requeue or options.preemptible):
        # The platform sends SIGTERM before it reclaims machines.
        more["warning"] = options.number("kill_grace", _KILL_GRACE, 1e-3)
    launch = replace(spec.launch_options(**more), max_restarts=0 if uploaded else spec.max_restarts)
    if left_open:
        launch = replace(launch, nproc_per_node=spec.nproc_word or None)
    workdir: str = spec.options.get("workdir", "" if uploaded and spec.sync else str(spec.workdir))
    return shared.common_values(spec, job_id, job_dir=job_dir) | {
        "workdir": workdir,
        "node_zip": str(job_dir / node_zip.NAME),
        "launch_arguments": launch_arguments(launch),
        "uploaded": uploaded,
        "elements": array is not None,
        "sweep": array is not None and bool(array.values),
    }


def _task_file(job_dir: Path, index: int | None) -> Path:
    return job_dir / (_TASK if index is None else f"elements/{index}/{_TASK}")


def _yaml(job_id: str, fields: Mapping[str, Any]) -> bytes:
    return render("mlp-task.yaml.j2", {"job_id": job_id, "task": fields}).encode()


def _sync_limit(options: MlpOptions) -> int:
    limit = options.values.get("sync_limit")
    return snapshot.LIMIT if limit is None else parse_size(limit)


def _notes(spec: JobSpec, missing: list[str]) -> tuple[str, ...]:
    if missing:
        return (
            (
                f"to submit it, set {' and '.join(missing)} "
                f"({task.hint_for_missing(missing, spec.options)}); "
                f"this {_SCRIPT} is for a task that you create manually"
            ),
            "the platform decides the number of nodes: MLP_WORKER_NUM",
        )
    notes = (
        ["--mem is ignored: the flavor sets the memory"] if spec.resources.mem is not None else []
    )
    notes += job_code.notes(spec, sent=True)
    gpus, wanted = task.gpus_of(spec), spec.resources.gpus_per_node
    if gpus is not None and wanted is not None and gpus > wanted:
        notes.append(
            f"the flavor {task.flavor_of(spec)} has {gpus} GPUs on each machine: "
            f"{gpus - wanted} of them stay idle"
        )
    return tuple(notes)
