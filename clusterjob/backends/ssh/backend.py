"""Run jobs on bare hosts: one agent per host, started over SSH.

After the start the agents need neither the submitter nor a shared disk. Each status or logs
request mirrors the files of a job from its hosts into the job directory on this machine
(`clusterjob.remote.mirror`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterjob.backends import shared
from clusterjob.backends.base import FetchLimits, Status
from clusterjob.backends.ssh import planning, status
from clusterjob.backends.ssh.planning import CODE, NAME, SCRIPT, SshOptions
from clusterjob.backends.ssh.status import Job, Node
from clusterjob.core import plans
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import engine
from clusterjob.doctor.engine import Check
from clusterjob.errors import ClusterJobError, HostError
from clusterjob.node.environments import candidate_ports
from clusterjob.node.host_server.requests import Cancel
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import COMPLETE, LOGS, RESULT
from clusterjob.node.system import files

if TYPE_CHECKING:
    from clusterjob.remote.fetch import Fetched

_POLL_TIMEOUT = 1.0  # maximum seconds to wait for slow hosts after the first poll of each host
_MAX_RETRY_DELAY = 15.0  # maximum seconds between two polls of an unreachable host
_CANCEL_TIMEOUT = 12.0  # seconds beyond the job's grace for a host to confirm a cancel


class SshBackend:
    """Run jobs on hosts that are reached over SSH."""

    capabilities = (
        Capability.HOSTS,
        Capability.GPU_LIST,
        Capability.SHARED_DIRECTORY,
        Capability.BACKEND_OPTIONS,
    )
    hints: ClassVar[Mapping[Capability, str]] = {}

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._open_sessions: Any = None

    # -- planning ----------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return the plan of a job without contacting a host.

        Raises:
            SpecError: there are fewer hosts than nodes, no hosts, or an option is not valid.
            TemplateError: the user's template cannot be rendered.
        """
        return planning.plan(spec)

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Send the job to its hosts and start it; it then runs without this process.

        Raises:
            SubmitError: some hosts are unfit; the message names each of them, and no files or
                processes of the job are left on any host.
        """
        from clusterjob.backends.ssh.submit import HostFiles, Submission
        from clusterjob.core import snapshot
        from clusterjob.remote.progress import Sending

        spec, options = plan.spec, SshOptions.of(plan.spec.options)
        place = options.ssh.place(spec.hosts, spec.python, spec.setup)
        code = (
            snapshot.take(
                spec.workdir, options.ssh.sync_limit, include_secrets=spec.include_secrets
            )
            if spec.sync
            else None
        )
        files = HostFiles(
            job_id=plan.job_id,
            files=(
                *((file.path.name, file.mode, file.data) for file in plan.files),
                *plans.carried_elsewhere(plan.job_dir),
            ),
            script=SCRIPT,
            environments=tuple(dict(command.env) for command in plan.commands),
            workdir=CODE if spec.sync else str(spec.workdir),
            snapshot=code,
            needs_torch=options.need_torch and spec.program.is_python,
            ports=candidate_ports.candidates(plan.job_id, 0),
            timeout=spec.join_timeout,
            grace=spec.grace,
            gpus=spec.gpus,
            gpus_per_node=spec.resources.gpus_per_node,
            require_gpus=spec.require_gpus,
        )
        data: dict[str, Any] = place.to_json()
        if code is not None:
            data["code"] = shared.keep_code(code, spec.workdir, job_dir=plan.job_dir)
        with Sending([str(host) for host in spec.hosts]) as progress:
            submission = Submission(
                self._sessions(),
                place,
                files=files,
                progress=progress,
                cancelled=partial(ends.cancelled, plan.job_dir),
            )
            try:
                data["address"] = submission.run()
            except BaseException:
                ends.cancel(plan.job_dir)  # later status requests then show CANCELLED
                raise
        return Handle(NAME, plan.job_id, data=data)

    def detach(self, handle: Handle) -> None:
        """Do nothing: the agents do not depend on this process."""

    # -- requests ----------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of each job; poll all their hosts in parallel."""
        for record in records:
            self._start_polls(record)
        self._store_polls([self._job(record) for record in records])
        return {record.job_id: status.status(record, self._job(record)) for record in records}

    def collect(self, record: Record) -> None:
        """Copy the logs written so far; every later poll of the job also copies new logs."""
        job = self._job(record)
        ended = record.end is not None or files.read_json(record.job_dir / RESULT) is not None
        if job.followed and not ended:
            return
        job.followed = True
        # This marker exists once all logs of an ended job have been copied.
        whole = record.job_dir / LOGS / COMPLETE
        if whole.exists() or not record.job_dir.is_dir():
            return
        while True:
            self._start_polls(record, at_once=True)
            self._store_polls([job], patient=True)
            if not any(
                node.answer is not None and node.answer["more"] and node.error is None
                for node in job.nodes
            ):
                break
        absent = [node.error.message for node in job.nodes if node.error is not None]
        if not ended:
            return
        if absent:
            shared.warn(f"some logs are not here: {'; '.join(absent)}")
        else:
            # No logs directory, or the disk is full: the next call polls again.
            with contextlib.suppress(OSError):
                whole.touch()

    def cancel(self, records: Sequence[Record]) -> None:
        """Stop the workers through every agent; kill agents that outlast the job's grace period.

        Raises:
            ClusterJobError: some hosts are unreachable; the processes there end when their agents
                lose the heartbeat of the other agents.
        """
        for record in records:
            self._end(record, interrupt=False)

    def interrupt(self, record: Record) -> bool:
        """Interrupt the workers through every agent; stop them after the job's grace period.

        Returns:
            False if no worker runs yet, so that the job can only be cancelled; else True, without
            waiting for the end of the job.

        Raises:
            ClusterJobError: some hosts are unreachable; the processes there end when their agents
                lose the heartbeat of the other agents.
        """
        if shared.progress(record.job_dir)[0] is None:
            return False
        self._end(record, interrupt=True)
        return True

    def _end(self, record: Record, *, interrupt: bool) -> None:
        from clusterjob.remote.pool import complaint, for_each

        ends.cancel(record.job_dir)
        place, grace = self._job(record).place, record.job.grace

        def work(node: int) -> None:
            session = self._sessions().session(place, node)
            session.ask(
                Cancel(record.job_id, node, grace=grace, interrupt=interrupt),
                timeout=grace + _CANCEL_TIMEOUT,
            )

        outcome = for_each(range(len(place.hosts)), work)
        if outcome.errors:
            message, hint = complaint(outcome.errors, len(place.hosts))
            raise ClusterJobError(
                f"{message} (job {record.job_id})",
                hint or "its agents there end when they lose the other agents",
            )

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,
        may_replace: Callable[[list[str]], bool],
        limits: FetchLimits,
    ) -> list[Fetched]:
        """Copy results from the hosts; see `clusterjob.core.jobs.fetch`.

        Raises:
            ClusterJobError: a host is unreachable or has no file at a path, or a file cannot be
                written on this machine.
        """
        from clusterjob.remote.fetch import Fetch
        from clusterjob.remote.pool import complaint, for_each

        place = self._job(record).place
        asked = range(len(place.hosts)) if nodes is None else nodes
        alone = threading.Lock()

        def one_at_a_time(names: list[str]) -> bool:
            with alone:
                return may_replace(names)

        def work(node: int) -> Fetched:
            folder = target if len(asked) == 1 else target / f"node{node}"
            request = shared.fetch_request(
                record, paths, target=folder, may_replace=one_at_a_time, limits=limits
            )
            return Fetch(self._sessions().session(place, node), request).run()

        outcome = for_each(asked, work)
        if outcome.errors:
            raise ClusterJobError(*complaint(outcome.errors, len(asked)))
        return [outcome.results[node] for node in asked]

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of the hosts for a job.

        Raises:
            SpecError: there are no hosts, or an option is not valid for this backend.
        """
        from clusterjob.backends.ssh.checks import Hosts
        from clusterjob.doctor.this_machine import directory_checks

        spec, options = planning.settled(spec), SshOptions.of(spec.options)
        hosts = Hosts(
            self._sessions(),
            options.ssh.place(spec.hosts, spec.python, spec.setup),
            spec=spec,
            need_torch=options.need_torch,
        )
        job = engine.CheckStep("job", lambda: shared.check_plan(self.plan, spec))
        return engine.run_checks([job, *directory_checks(), *hosts.check_steps()])

    def close(self) -> None:
        """Close all connections; jobs keep running."""
        if self._open_sessions is not None:
            self._open_sessions.close()
            self._open_sessions = None
        self._jobs.clear()

    # -- polls -------------------------------------------------------------------------------------

    def _sessions(self) -> Any:
        if self._open_sessions is None:
            self._open_sessions = shared.new_sessions()
        return self._open_sessions

    def _job(self, record: Record) -> Job:
        from clusterjob.remote import ssh_options
        from clusterjob.remote.mirror import JobMirror
        from clusterjob.remote.sessions import Place

        if record.job_id not in self._jobs:
            if record.handle is not None:
                place = Place.from_json(record.handle.data)
            else:
                options = ssh_options.ConnectionSettings.of(record.job.options, must_exist=False)
                job = record.job
                place = options.place(job.hosts, job.python, job.setup)
            nodes = [
                Node(JobMirror(record.job_id, record.job_dir, node=node))
                for node in range(len(place.hosts))
            ]
            self._jobs[record.job_id] = Job(place, nodes)
        return self._jobs[record.job_id]

    def _start_polls(self, record: Record, *, at_once: bool = False) -> None:
        """Start a poll of each host without a running poll if its delay between polls is over.

        Args:
            record: the job.
            at_once: whether to ignore the delay between two polls of a host.
        """
        from clusterjob.remote.pool import in_background

        job = self._job(record)
        for index, node in enumerate(job.nodes):
            if node.polling is None and (at_once or time.monotonic() >= node.next_try):
                node.polling = in_background(partial(self._poll, job, index))

    def _poll(self, job: Job, index: int) -> Mapping[str, Any]:
        session = self._sessions().session(job.place, index)
        answer: Mapping[str, Any] = job.nodes[index].mirror.poll(session, logs=job.followed)
        return answer

    def _store_polls(self, asked: Sequence[Job], *, patient: bool = False) -> None:
        """Store the answers to the running polls.

        The first time all answers are awaited, later only those within `_POLL_TIMEOUT`.

        Args:
            asked: the jobs that are polled.
            patient: whether to wait for all answers.
        """
        waiting = [node.polling for job in asked for node in job.nodes if node.polling is not None]
        wait(waiting, None if patient or not all(job.looked for job in asked) else _POLL_TIMEOUT)
        for job in asked:
            job.looked = True
            for node in job.nodes:
                if node.polling is None or not node.polling.done():
                    continue
                asking, node.polling = node.polling, None
                try:
                    node.answer, node.error, node.failures = asking.result(), None, 0
                    # A job with many hosts is polled less often, to keep the load constant.
                    node.next_try = time.monotonic() + min(2.0, 0.02 * len(job.nodes))
                except HostError as error:
                    node.error = error
                    node.failures += 1
                    node.next_try = time.monotonic() + min(
                        _MAX_RETRY_DELAY, 0.25 * 2**node.failures
                    )
