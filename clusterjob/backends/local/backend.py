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
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from clusterjob.backends import shared
from clusterjob.backends.base import Status
from clusterjob.core import gpus
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan, PlannedCommand
from clusterjob.core.records import Handle, Record
from clusterjob.core.render import render
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import engine
from clusterjob.doctor.engine import Check
from clusterjob.errors import ClusterJobError, SpecError, SubmitError
from clusterjob.node import contract
from clusterjob.node.environments import worker_endpoints
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import AGENT_LOG
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.system import private_dirs, process_groups, processes
from clusterjob.node.verdict import JobState

NAME = "local"
_MASTER_ADDR = "127.0.0.1"
_SCRIPT = "node.sh"
# Passed to the workers: a job that submits another job on this machine then records that job in the
# user's own directory.
_HOME = "CLUSTERJOB_HOME"
_CANCEL_TIMEOUT = 2.0  # seconds beyond the job's grace before an agent is killed


class LocalBackend:
    """Run jobs on this machine."""

    capabilities = ()
    hints: ClassVar[Mapping[Capability, str]] = {}

    def __init__(self) -> None:
        self._lifelines: dict[str, list[int]] = {}
        self.stdin: int | None = None

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job.

        Raises:
            SpecError: the interpreter does not exist, there are too few GPUs and `require_gpus` is
                set, or an option does not exist in this backend.
            TemplateError: the user's template cannot be rendered.
        """
        _check_interpreter(spec)
        return self._plan(spec)

    def _plan(self, spec: JobSpec) -> Plan:
        spec = replace(spec, nproc_is_default=False)
        job_id, job_dir = shared.new_directory(spec.name)
        script = render(
            spec.template or f"{_SCRIPT}.j2", self._values(spec, job_id, job_dir=job_dir)
        )
        devices, notes = _devices(spec)
        return Plan(
            job_id=job_id,
            backend=NAME,
            job_dir=job_dir,
            spec=spec,
            files=(
                *shared.common_files(spec, job_dir),
                shared.script_file(job_dir / _SCRIPT, script),
            ),
            commands=tuple(
                PlannedCommand(
                    ("bash", str(job_dir / _SCRIPT)),
                    {"CLUSTERJOB_NODE_RANK": str(node_rank)} | devices[node_rank],
                    node_rank=node_rank,
                )
                for node_rank in range(spec.resources.nodes)
            ),
            notes=tuple(notes),
        )

    def _values(self, spec: JobSpec, job_id: str, job_dir: Path) -> dict[str, Any]:
        return {
            **shared.common_values(spec, job_id, job_dir=job_dir),
            "master_addr": _MASTER_ADDR,
            "lifeline": True,
            "launch_arguments": spec.launch_options(lifeline=True, echo=False).arguments(),
        }

    def submit(self, plan: Plan) -> Handle:
        """Start the agents.

        Raises:
            SubmitError: an agent cannot be started; the agents that already run are stopped.
        """
        agents: list[dict[str, int]] = []
        lifelines = self._lifelines.setdefault(plan.job_id, [])
        try:
            for command in plan.commands:
                folder = node_directory(plan.job_dir, command.node_rank)
                private_dirs.make(folder)
                pid, lifeline = _start(
                    command,
                    folder / AGENT_LOG,
                    hidden={secret.name for secret in plan.spec.secret},
                    stdin=None if command.node_rank else self.stdin,
                )
                lifelines.append(lifeline)
                agents.append(
                    {
                        "node_rank": command.node_rank,
                        "pid": pid,
                        "ticks": processes.start_ticks(pid) or 0,
                    }
                )
        except OSError as error:
            self._cut(plan.job_id)  # the started agents see the end of their lifeline
            process_groups.end([agent["pid"] for agent in agents], _CANCEL_TIMEOUT)
            raise SubmitError(f"an agent cannot be started: {error.strerror or error}") from error
        here = {
            "boot_id": processes.boot_id(),
            "host": socket.gethostname(),
            "job_dir": str(plan.job_dir),
        }
        return Handle(NAME, plan.job_id, data={"agents": agents, **here})

    def detach(self, handle: Handle) -> None:
        """Release the job from this process; the job then runs without it.

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
            self._cancel(record)

    def _cancel(self, record: Record) -> None:
        if _is_elsewhere(record):
            raise ClusterJobError(f"job {record.job_id} runs on {_host(record)}", "cancel it there")
        ends.cancel(record.job_dir)
        self._cut(record.job_id)
        process_groups.end(
            [agent["pid"] for agent in _live_agents(record)],
            record.job.grace + _CANCEL_TIMEOUT,
        )

    def interrupt_prompt(self, record: Record) -> bool:
        """Interrupt the worker that reads this process's terminal; return False if none does."""
        readers = [
            reader
            for agent in _live_agents(record)
            if (reader := processes.terminal_reader(agent["pid"])) is not None
        ]
        return any(processes.send_signal(reader, signal.SIGINT) for reader in readers)

    def interrupt(self, record: Record) -> bool:
        """Interrupt the workers through every agent, as Ctrl-C does; stop them after the grace."""
        ends.cancel(record.job_dir)
        for agent in _live_agents(record):
            process_groups.signal_group(agent["pid"], signal.SIGINT)
        return True

    def close(self) -> None:
        """Do nothing: the lifelines of detached jobs are already closed."""

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of this machine for a job."""
        from clusterjob.doctor.this_machine import Machine

        # `_plan`, not `plan`: `Machine` checks the interpreter.
        job = engine.CheckStep("job", lambda: shared.check_plan(self._plan, spec))
        return engine.run_checks([job, *Machine(spec).check_steps()])


def _check_interpreter(spec: JobSpec) -> None:
    """Refuse a missing interpreter, unless setup lines or the user's template may provide it.

    Raises:
        SpecError: the script would not find the interpreter.
    """
    if spec.setup or spec.template is not None:
        return
    path = spec.env.get("PATH", os.environ.get("PATH"))
    wanted = os.path.join(spec.workdir, spec.python) if os.sep in spec.python else spec.python
    if shutil.which(wanted, path=path) is None:
        raise SpecError(
            f"there is no interpreter {spec.python}",
            "set --python to a path or a command on PATH",
        )


def _devices(spec: JobSpec) -> tuple[list[dict[str, str]], list[str]]:
    """Return each node's device variables, and notes for the user."""
    nodes, per_node = spec.resources.nodes, spec.resources.gpus_per_node
    notes = ["--mem is not enforced on this machine"] if spec.resources.mem is not None else []
    if per_node is None:
        return [{}] * nodes, notes
    if per_node == 0:
        return [{"CUDA_VISIBLE_DEVICES": ""}] * nodes, notes
    available = gpus.visible_gpus(os.environ)
    shares = gpus.shares(available, nodes, per_node=per_node)
    if shares is not None:
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares], notes
    missing = f"this machine has {len(available)} of the {nodes * per_node} GPUs asked for"
    if spec.require_gpus:
        raise SpecError(
            missing, "without --require-gpus the workers run on the CPU, as a rehearsal"
        )
    return [{"CUDA_VISIBLE_DEVICES": ""}] * nodes, [
        f"{missing}: a rehearsal, with the workers on the CPU and gloo",
        *notes,
    ]


def _start(
    command: PlannedCommand, log: Path, hidden: Collection[str], stdin: int | None
) -> tuple[int, int]:
    """Start one agent in its own session; return its pid and the write end of its lifeline.

    Args:
        command: the command line and variables of the agent.
        log: the file for the agent's output.
        hidden: variables of this process that the script does not get; the agent reads them from a
            file.
        stdin: the descriptor that becomes rank 0's stdin; the agent's own stdin is its lifeline.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in worker_endpoints.LAUNCH_VARIABLES
        and name not in hidden
        and (name == _HOME or not name.startswith("CLUSTERJOB_"))
    }
    # A copy: in the agent, descriptor 0 is the lifeline.
    lent = [] if stdin is None else [os.dup(stdin)]
    handed = {contract.STDIN_FD: str(lent[0])} if lent else {}
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command.argv,
                stdin=read_end,
                stdout=output,
                stderr=output,
                env=inherited | dict(command.env) | handed,
                pass_fds=lent,
                start_new_session=True,
            )
    except BaseException:
        os.close(write_end)
        raise
    finally:
        for descriptor in (read_end, *lent):
            os.close(descriptor)
    # The agent may outlive this process: stop Popen from warning that nothing waits for it.
    process.returncode = 0
    return process.pid, write_end


def _live_agents(record: Record) -> list[dict[str, int]]:
    if record.handle is None or not _is_here(record.handle):
        return []
    agents: list[dict[str, int]] = record.handle.data["agents"]
    process_groups.reap([agent["pid"] for agent in agents])
    return [agent for agent in agents if processes.start_ticks(agent["pid"]) == agent["ticks"] != 0]


def _is_here(handle: Handle) -> bool:
    return bool(
        handle.data.get("boot_id") == processes.boot_id()
        and handle.data.get("host") == socket.gethostname()
    )


def _is_elsewhere(record: Record) -> bool:
    return record.handle is not None and record.handle.data.get("host") != socket.gethostname()


def _host(record: Record) -> str:
    return str(record.handle.data.get("host")) if record.handle is not None else "unknown"


def _status(record: Record) -> Status:
    # Check the agents before reading the result: an agent that is not alive has already written its
    # verdict.
    alive = bool(_live_agents(record))
    verdict = ends.read_result(record.job_dir)
    if verdict is not None:
        return shared.ended(verdict)
    started_at, restarts, waiting = shared.progress(record.job_dir)
    if alive and not record.job_dir.exists():
        return Status(
            JobState.UNKNOWN, f"its directory {record.job_dir} is gone while its agents run"
        )
    if alive:
        state = JobState.RUNNING if started_at else JobState.PENDING
        return Status(state, waiting, verdict=None, started_at=started_at, restarts=restarts)
    if _is_elsewhere(record):
        return Status(
            JobState.UNKNOWN,
            f"it runs on {_host(record)}: ask there",
            verdict=None,
            started_at=started_at,
            restarts=restarts,
        )
    if record.handle is None and record.submitter is not None and record.submitter.alive():
        return Status(JobState.PENDING, "it is being submitted")
    if record.handle is None:
        why = "the command that submitted it died before the job had started"
    else:
        why = "its agents ended without a verdict: they were killed, or the machine was restarted"
    return shared.ended(
        shared.verdict_without_coordinator(
            record.job_dir, started_at, restarts=restarts, otherwise=why
        )
    )
