"""An example of a backend for a platform with a submit command, here the queue `tinyq`.

docs/backends.md explains it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.backends import shared
from clusterjob.backends.batch_command import command, upload
from clusterjob.backends.batch_command.attempts import Retries
from clusterjob.backends.batch_command.backend import Account, PlatformBackend
from clusterjob.backends.batch_command.platform import Instance, Platform, Task
from clusterjob.core import node_zip
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan, PlannedCommand, PlannedFile
from clusterjob.core.records import Handle
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.errors import ClusterJobError, SpecError, SubmitError, SubmitInDoubtError
from clusterjob.node.verdict import JobState

NAME = "tinyq"
_TASK = "task.json"
_OPTIONS = ("retries", "poll")
_STATES = {
    "queued": JobState.PENDING,
    "running": JobState.RUNNING,
    "succeeded": JobState.SUCCEEDED,
    "failed": JobState.FAILED,
    "cancelled": JobState.CANCELLED,
}
# clusterjob does not know the queue's variables, so the command copies them to clusterjob's names.
_START = (
    "export CLUSTERJOB_NNODES=$TINYQ_WORKERS CLUSTERJOB_NODE_RANK=$TINYQ_INDEX "
    "CLUSTERJOB_MASTER_ADDR=$TINYQ_FIRST; "
    f"exec bash {upload.OWN}/{upload.ENTRY}"
)


class Tinyq:
    """Manage tasks through the queue's command.

    See `clusterjob.backends.batch_command.platform.Platform` for the contract of each method.
    """

    def submit(self, conf: Path) -> str:
        """Submit a task and return its id."""
        answer = _run("submit", str(conf))
        if answer.timed_out:
            # The base class then searches for the task by its name.
            raise SubmitInDoubtError(answer.message)
        if answer.code != 0 or not answer.out.strip():
            raise SubmitError(f"tinyq refuses the task: {answer.message}")
        return answer.out.split()[-1]

    def tasks(
        self,
        names: Sequence[str],
        since: float = 0.0,  # noqa: ARG002 - the list is short
    ) -> list[Task]:
        """Return all tasks with one of these names."""
        return [
            Task(
                row["id"],
                row["name"],
                _STATES[row["state"]],
                row["state"],
                row["created"],
                row["started"],
                row["ended"],
            )
            for row in _query("list")
            if row["name"] in names
        ]

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers."""
        return [
            Instance(row["name"], row["index"], row["state"], row["code"])
            for row in _query("workers", task_id)
        ]

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        """Return the last lines of a worker's log."""
        answer = _run("logs", task_id, instance, str(count))
        if answer.code != 0:
            raise ClusterJobError(f"tinyq does not show the log: {answer.message}")
        # Not splitlines(), which also splits at other characters inside a line.
        return answer.out.split("\n")[:-1]

    def cancel(self, task_id: str) -> None:
        """Cancel a task."""
        answer = _run("cancel", task_id)
        if answer.code != 0:
            raise ClusterJobError(f"tinyq does not cancel {task_id}: {answer.message}")


class TinyqBackend(PlatformBackend):
    """Run jobs as tasks of the queue."""

    capabilities = (Capability.BACKEND_OPTIONS,)

    NAME = NAME

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job without contacting the queue."""
        for key in spec.options:
            if key not in _OPTIONS:
                raise SpecError(
                    f"unknown option {key!r} for the {NAME} cluster (--set)",
                    f"the options are {', '.join(_OPTIONS)}",
                )
        spec = replace(spec, program=shared.sent_program(spec))
        job_id, job_dir = shared.new_directory(spec.name)
        # After a failure the queue restarts the whole task, so the agents must not restart it.
        values = shared.common_values(spec, job_id, job_dir) | {
            "uploaded": True,
            "workdir": "",
            "node_zip": "",
            "start_variable": "TINYQ_TASK",
            "launch_arguments": launch_arguments(replace(spec.launch_options(), max_restarts=0)),
        }
        entry = render(spec.template or "mlp.sh.j2", values)
        task = {
            "name": job_id,
            "workers": spec.resources.nodes,
            "code": str(job_dir / upload.DIRECTORY),
            "command": ["bash", "-c", _START],
            "retries": self.retries(spec).times,
            "env": {},
        }
        path = job_dir / _TASK
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(
                *shared.common_files(spec, job_dir),
                PlannedFile(path, json.dumps(task, indent=1).encode()),
                shared.script_file(job_dir / upload.ENTRY, entry),
            ),
            commands=(PlannedCommand(("tinyq", "submit", str(path))),),
            sends_code=spec.sync,
        )

    def submit(self, plan: Plan) -> Handle:
        """Submit the planned task with the code and the node half."""
        planned = {file.path.name: file for file in plan.files}
        task = json.loads(planned[_TASK].data)
        task["env"] = shared.private_variables(plan)
        sent = upload.stage(
            plan.spec, plan.job_dir, [planned[node_zip.NAME], planned[upload.ENTRY]]
        )
        try:
            return self.submit_tasks(
                plan,
                self.platform(()),
                [(plan.job_id, json.dumps(task).encode())],
                ".json",
                rate=10.0,
            )
        finally:
            sent.remove()

    def platform(self, account: Account) -> Platform:  # noqa: ARG002 - the queue has no accounts
        """Return the queue."""
        return Tinyq()

    def account_of(self, options: Mapping[str, str]) -> Account:  # noqa: ARG002
        """Return an empty account: the queue has no accounts."""
        return ()

    def retries(self, spec: JobSpec) -> Retries:
        """Return the queue's retry policy: retries after a failure only."""
        text = str(spec.options.get("retries", spec.max_restarts))
        if not text.isdigit():
            raise SpecError(f"retries: {text!r} is not a number")
        return Retries(times=int(text), failures=True)

    def poll(self, options: Mapping[str, str]) -> float:
        """Return the seconds between two polls."""
        return float(options.get("poll", 1.0))


def _run(*arguments: str) -> command.CommandOutput:
    try:
        return command.run(["tinyq", *arguments], {})
    except OSError as error:
        raise ClusterJobError(
            "the command tinyq is not installed", "pip install ./examples/backend"
        ) from error


def _query(*arguments: str) -> Any:
    answer = _run(*arguments)
    if answer.code != 0 or answer.data is None:
        raise ClusterJobError(f"tinyq does not answer: {answer.message}")
    return answer.data
