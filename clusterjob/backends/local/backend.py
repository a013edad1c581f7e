"""Run jobs on this machine: N nodes are N agents, started by the same script as on N hosts.

Each agent runs in its own session, so that a submitted job does not need the submitter. During the
submission, and as long as `clusterjob run` watches the job, each agent holds a lifeline, a pipe
from the submitter: if the submitter dies, the job ends.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterjob.backends import job_code, job_progress, shared
from clusterjob.backends.base import Leftover, Status
from clusterjob.backends.local import agents, gpu_assignment
from clusterjob.core import python_env
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Handle, Record
from clusterjob.core.render import render, sh
from clusterjob.core.spec import JobSpec, launch_arguments
from clusterjob.doctor.engine import Check, CheckStep, run_checks
from clusterjob.errors import ClusterJobError, SpecError, SubmitError, require_linux
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import AGENT_LOG
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.options import GRACE
from clusterjob.node.system import devices, private_dirs, processes
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.core.proposals import Proposal

NAME = "local"
_MASTER_ADDR = "127.0.0.1"
_SCRIPT = "node.sh"
_ENDING = 2.0  # seconds to wait for agents that have written their verdict and are about to exit
_CANCEL_TIMEOUT = 2.0  # seconds beyond the job's grace before an agent is killed


class LocalBackend:
    """Run jobs on this machine."""

    capabilities = (
        Capability.GPU_LIST,
        Capability.COUNTED_WORKERS,
        Capability.PYTHON_ENVIRONMENTS,
        Capability.SPARES,
        Capability.SCRIPT_ON_STDIN,
    )
    hints: ClassVar[Mapping[Capability, str]] = {}
    options = ("sync_limit",)

    def __init__(self) -> None:
        self._lifelines: dict[str, list[int]] = {}
        self.stdin: int | None = None

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job.

        Raises:
            SpecError: the interpreter does not exist, there are too few GPUs and `require_gpus` is
                set, or an option does not exist in this backend.
            SubmitError: --gpus auto finds too few idle GPUs.
            UsageError: this machine does not run Linux.
            TemplateError: the user's template cannot be rendered.
        """
        require_linux("--cluster local")
        _check_interpreter(spec)
        return self._plan(spec)

    def _plan(self, spec: JobSpec) -> Plan:
        spec = replace(gpu_assignment.counted(spec), nproc_is_default=False)
        job_id, job_dir = shared.new_directory(spec.name)
        code, program = job_code.source_of(spec), spec.program
        if code is not None:
            program = code.program(program, spec.workdir, job_dir=job_dir)
        options = spec.launch_options(lifeline=True, echo=False, program=program)
        env = python_env.read(spec)
        values = {
            **shared.common_values(spec, job_id, job_dir=job_dir),
            **job_code.template_values(code, job_dir),
            **python_env.values(env, spec, sh(str(job_dir)), sent=False),
            "master_addr": _MASTER_ADDR,
            "lifeline": True,
            "launch_arguments": launch_arguments(options),
        }
        of_nodes, notes = gpu_assignment.of_nodes(spec)
        if spec.resources.mem is not None:
            notes.append("--mem is not enforced on this machine")
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(
                *shared.common_files(spec, job_dir, env),
                shared.script_file(
                    job_dir / _SCRIPT, render(spec.template or f"{_SCRIPT}.j2", values)
                ),
            ),
            commands=tuple(
                PlannedCommand(
                    ("bash", str(job_dir / _SCRIPT)),
                    {"CLUSTERJOB_NODE_RANK": str(node_rank)} | of_nodes[node_rank],
                    node_rank=node_rank,
                )
                for node_rank in range(spec.resources.nodes)
            ),
            notes=(
                *notes,
                *job_code.notes(spec, sent=False),
                *(env.notes if env is not None else ()),
            ),
            code=code,
        )

    def submit(self, plan: Plan) -> Handle:
        """Start the agents.

        Raises:
            SubmitError: an agent cannot be started; the agents that already run are stopped.
        """
        started: list[dict[str, int]] = []
        of_nodes, locks = gpu_assignment.reserve(plan)
        lifelines = self._lifelines.setdefault(plan.job_id, [])
        try:
            for command in plan.commands:
                folder = node_directory(plan.job_dir, command.node_rank)
                private_dirs.make(folder)
                more = of_nodes[command.node_rank] if of_nodes else {}
                pid, lifeline = agents.start(
                    replace(command, env=dict(command.env) | more),
                    folder / AGENT_LOG,
                    hidden=plan.spec.hidden_variables,
                    stdin=None if command.node_rank else self.stdin,
                    locks=devices.descriptors(locks),
                )
                lifelines.append(lifeline)
                started.append(
                    {
                        "node_rank": command.node_rank,
                        "pid": pid,
                        "ticks": processes.start_ticks(pid) or 0,
                    }
                )
        except OSError as error:
            self._cut(plan.job_id)  # the started agents see the end of their lifeline
            processes.end_groups([agent["pid"] for agent in started], _CANCEL_TIMEOUT)
            raise SubmitError(f"an agent cannot be started: {error.strerror or error}") from error
        finally:
            devices.release(locks)  # the agents and their children hold them
        return Handle(
            NAME,
            plan.job_id,
            data={
                "agents": started,
                "boot_id": processes.boot_id(),
                "host": socket.gethostname(),
                "job_dir": str(plan.job_dir),
            },
        )

    def detach(self, handle: Handle) -> None:
        """Let the job continue after this process ends.

        Raises:
            SubmitError: the request cannot be written to the job's directory; the job ends.
        """
        try:
            ends.detach(Path(handle.data["job_dir"]))
        except OSError as error:
            raise SubmitError(
                f"the job cannot be detached: {error.strerror}: {handle.data['job_dir']}"
            ) from error
        finally:
            self._cut(handle.id)

    def _cut(self, job_id: str) -> None:
        for lifeline in self._lifelines.pop(job_id, []):
            os.close(lifeline)

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of jobs from their directories and the process table."""
        return {record.job_id: _status(record) for record in records}

    def collect(self, record: Record) -> None:
        """Do nothing: the job writes its logs into `record.job_dir` itself."""

    def cancel(self, records: Sequence[Record]) -> None:
        """Stop the workers through every agent; kill agents that outlast the job's grace period.

        Raises:
            ClusterJobError: a job runs on another host and can be cancelled only on that host.
        """
        for record in records:
            if host := agents.other_host(record):
                raise ClusterJobError(f"job {record.job_id} runs on {host}", "cancel it there")
            ends.cancel(record.job_dir)
            self._cut(record.job_id)
            saving = ends.STACKS_SECONDS if ends.stacks_wanted(record.job_dir) else 0.0
            processes.end_groups(
                [agent["pid"] for agent in agents.live(record)],
                (record.job.grace or GRACE) + saving + _CANCEL_TIMEOUT,
            )

    def clean(
        self,
        records: Sequence[Record],
        *,
        remove: bool,  # noqa: ARG002 - the jobs have no files elsewhere
    ) -> tuple[dict[str, Leftover], int]:
        """Keep the jobs whose agents still run; see `clusterjob.backends.base.Cleaner`."""
        until = time.monotonic() + _ENDING
        while any(map(agents.live, records)) and time.monotonic() < until:
            time.sleep(0.05)
        return {
            record.job_id: Leftover(kept="its agents still run" if agents.live(record) else "")
            for record in records
        }, 0

    def interrupt(self, record: Record) -> bool:
        """Interrupt the workers through every agent, as Ctrl-C does; stop them after the grace."""
        ends.cancel(record.job_dir)
        for agent in agents.live(record):
            processes.signal_group(agent["pid"], signal.SIGINT)
        return True

    def command(
        self,
        record: Record,  # noqa: ARG002
        node: int,  # noqa: ARG002 - all are here
        request: Mapping[str, Any],
        *,
        terminal: bool,  # noqa: ARG002 - it is inherited
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of a program beside workers; see `backends.base.Executor`."""
        return shared.beside(request)

    def tunnel(self, record: Record, node: int, port: int) -> list[str]:  # noqa: ARG002
        """Return nothing: a relay carries connections."""
        return []

    def close(self) -> None:
        """Do nothing: the lifelines of detached jobs are already closed."""

    def propose(self) -> Iterator[Proposal]:
        """Yield the profiles that `clusterjob init` offers."""
        from clusterjob.backends.local import proposal

        return proposal.propose()

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of this machine for a job."""
        from clusterjob.doctor.this_machine import Machine, directory_checks

        require_linux("--cluster local")
        # `_plan`, not `plan`: `Machine` checks the interpreter.
        return run_checks(
            [
                *directory_checks(),
                CheckStep("job", lambda: shared.check_plan(self._plan, spec), needs=("directory",)),
                *Machine(spec).check_steps(),
            ]
        )


def _check_interpreter(spec: JobSpec) -> None:
    """Refuse a missing interpreter, unless setup lines or the user's template may provide it.

    Raises:
        SpecError: the interpreter does not exist.
    """
    if spec.setup or spec.template is not None or python_env.travels(spec):
        return
    wanted = os.path.join(spec.workdir, spec.python) if os.sep in spec.python else spec.python
    if shutil.which(wanted, path=spec.env.get("PATH", os.environ.get("PATH"))) is None:
        raise SpecError(
            f"there is no interpreter {spec.python}",
            "set --python to a path or a command on PATH",
        )


def _status(record: Record) -> Status:
    # Check the agents before reading the result: an agent that is not alive has already written its
    # verdict.
    alive = bool(agents.live(record))
    if (verdict := ends.read_result(record.job_dir)) is not None:
        return shared.ended(verdict)
    progress = job_progress.progress(record.job_dir)
    if alive and not record.job_dir.exists():
        return Status(
            JobState.UNKNOWN, f"its directory {record.job_dir} is gone while its agents run"
        )
    if alive:
        return progress.status(
            JobState.RUNNING if progress.started_at else JobState.PENDING,
            progress.waiting,
            clock=time.monotonic(),
        )
    if host := agents.other_host(record):
        return progress.status(
            JobState.UNKNOWN, f"it runs on {host}: use `clusterjob status` there"
        )
    if record.handle is None and shared.being_submitted(record):
        return Status(JobState.PENDING, "it is being submitted")
    why = (
        "the command that submitted it died before the job had started"
        if record.handle is None
        else "its agents ended without a verdict: they were killed, or the machine was restarted"
    )
    return shared.ended(shared.verdict_without_coordinator(record.job_dir, progress, otherwise=why))
