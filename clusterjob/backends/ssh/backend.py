"""Run jobs on bare hosts: one agent per host, started over SSH.

After the start the agents need neither the submitter nor a shared disk. Each status or logs
request mirrors the files of a job from its hosts into the job directory on this machine
(`clusterjob.remote.mirror`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterjob.backends import job_code, job_progress, shared
from clusterjob.backends.base import FetchLimits, Leftover, Status
from clusterjob.backends.ssh import planning, status
from clusterjob.backends.ssh.status import Job, Node
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import Check, CheckStep, run_checks
from clusterjob.errors import ClusterJobError, HostError
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import COMPLETE, LOGS, OUTCOMES, RESULT
from clusterjob.node.options import GRACE
from clusterjob.node.system import files

if TYPE_CHECKING:
    from clusterjob.core.proposals import Proposal
    from clusterjob.remote.fetch import Fetched
    from clusterjob.remote.sessions import Sessions

_POLL_TIMEOUT = 1.0  # maximum seconds to wait for slow hosts after the first poll of each host
_MAX_RETRY_DELAY = 15.0  # maximum seconds between two polls of an unreachable host
_CANCEL_TIMEOUT = 12.0  # seconds beyond the job's grace for a host to confirm a cancel


class SshBackend:
    """Run jobs on hosts that are reached over SSH."""

    capabilities = (
        Capability.HOSTS,
        Capability.GPU_LIST,
        Capability.COUNTED_WORKERS,
        Capability.SHARED_DIRECTORY,
        Capability.PYTHON_ENVIRONMENTS,
        Capability.SPARES,
        Capability.SCRIPT_ON_STDIN,
        Capability.BACKEND_OPTIONS,
    )
    hints: ClassVar[Mapping[Capability, str]] = {}

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}

    # -- planning ----------------------------------------------------------------------------------

    plan = staticmethod(planning.plan)

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Send the job to its hosts and start it; it then runs without this process.

        Raises:
            SubmitError: some hosts are unfit; the message names each of them, and no files or
                processes of the job are left on any host.
        """
        from clusterjob.backends.ssh.submit import Submission
        from clusterjob.remote.progress import HostProgress

        spec, settings = plan.spec, planning.SshOptions.of(plan.spec.options).ssh
        place = planning.place_of(spec, settings)
        data: dict[str, Any] = {}
        code = None
        if spec.sync:
            code, data["code"] = job_code.to_send(plan, settings.sync_limit)
        with HostProgress([str(host) for host in place.hosts]) as progress:
            submission = Submission(self._sessions, place, plan=plan, code=code, progress=progress)
            try:
                data["address"] = submission.run()
            except BaseException:
                ends.cancel(plan.job_dir)  # later status requests then show CANCELLED
                raise
        return Handle(planning.NAME, plan.job_id, data=submission.place.to_json() | data)

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
        if ended:
            # Polls that run now may have read the logs before the last lines.
            self._store_polls([job], patient=True)
        while True:
            self._start_polls(record, at_once=True)
            self._store_polls([job], patient=True)
            if not any(
                node.answer is not None and node.answer["more"] and node.error is None
                for node in job.nodes
            ):
                break
        if not ended:
            return
        if errors := [node.error.message for node in job.nodes if node.error is not None]:
            shared.warn(f"some logs could not be fetched: {'; '.join(errors)}")
        else:
            # There is no logs directory, or the disk is full: the next call polls again.
            with contextlib.suppress(OSError):
                whole.touch()

    def cancel(self, records: Sequence[Record]) -> None:
        """Stop the workers through every agent; kill agents that outlast the job's grace period.

        Raises:
            ClusterJobError: some hosts are unreachable; the agents there end when they lose the
                heartbeat of the other agents.
        """
        for record in records:
            self._end(record, interrupt=False)

    def interrupt(self, record: Record) -> bool:
        """Interrupt the workers through every agent; stop them after the job's grace period.

        Returns:
            False if no worker runs yet, so that the job can only be cancelled; else True, without
            waiting for the end of the job.

        Raises:
            ClusterJobError: some hosts are unreachable; the agents there end when they lose the
                heartbeat of the other agents.
        """
        if job_progress.progress(record.job_dir).started_at is None:
            return False
        self._end(record, interrupt=True)
        return True

    def _end(self, record: Record, *, interrupt: bool) -> None:
        from clusterjob.remote.pool import complaint, for_each

        ends.cancel(record.job_dir)
        place, grace = self._job(record).place, record.job.grace or GRACE
        stacks = ends.stacks_wanted(record.job_dir)
        outcome = for_each(
            range(len(place.hosts)),
            lambda node: self._sessions.session(place, node).ask(
                "cancel",
                job=record.job_id,
                node=node,
                grace=grace,
                interrupt=interrupt,
                stacks=stacks,
                timeout=grace + _CANCEL_TIMEOUT,
            ),
        )
        if outcome.errors:
            message, hint = complaint(outcome.errors.values(), len(place.hosts))
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
        prompt = threading.Lock()  # `may_replace` may ask the user: one question at a time

        def one_at_a_time(names: list[str]) -> bool:
            with prompt:
                return may_replace(names)

        def fetch(node: int) -> Fetched:
            request = shared.fetch_request(
                record,
                paths,
                target=target if len(asked) == 1 else target / f"node{node}",
                may_replace=one_at_a_time,
                limits=limits,
            )
            return Fetch(self._sessions.session(place, node), request).run()

        outcome = for_each(asked, fetch)
        if outcome.errors:
            raise ClusterJobError(*complaint(outcome.errors.values(), len(asked)))
        return [outcome.results[node] for node in asked]

    def clean(self, records: Sequence[Record], *, remove: bool) -> tuple[dict[str, Leftover], int]:
        """Measure or remove ended jobs on all their hosts; see `clusterjob.backends.base.Cleaner`.

        A host is asked once for all its jobs. A job is kept if one of its hosts is not reachable.
        """
        from clusterjob.remote.cleaning import JobsOnHost

        hosts: dict[Any, JobsOnHost] = {}
        for record in records:
            place = self._job(record).place
            for node, host in enumerate(place.hosts):
                key = (host, place.home, place.ssh_config)
                on_host = hosts.setdefault(
                    key, JobsOnHost(functools.partial(self._sessions.session, place, node))
                )
                on_host.jobs.append(record.job_id)
        return shared.clean_hosts(list(hosts.values()), remove=remove)

    def propose(self) -> Iterator[Proposal]:
        """Yield the profiles that `clusterjob init` offers."""
        from clusterjob.backends.ssh import proposal

        return proposal.propose()

    def outcomes(
        self, record: Record, names: Mapping[int, Collection[str]], most: int
    ) -> dict[str, bytes] | None:
        """Read result files from the hosts; see `clusterjob.backends.base.OutcomeReader`.

        Raises:
            ClusterJobError: a host is unreachable, or sends too much.
        """
        from clusterjob.remote import outcome_files
        from clusterjob.remote.pool import complaint, for_each

        place = self._job(record).place
        outcome = for_each(
            [node for node in names if node < len(place.hosts)],
            lambda node: outcome_files.read(
                self._sessions.session(place, node),
                record.job_id,
                folder=OUTCOMES,
                names=names[node],
                most=most,
            ),
        )
        if outcome.errors:
            raise ClusterJobError(*complaint(outcome.errors.values(), len(names)))
        return {name: data for found in outcome.results.values() for name, data in found.items()}

    def command(
        self, record: Record, node: int, request: Mapping[str, Any], *, terminal: bool
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of a program beside workers; see `clusterjob.backends.base.Executor`.

        Raises:
            HostError: the host cannot be used.
        """
        session = self._sessions.openssh(self._job(record).place, node)
        return shared.beside(session.command(shared.START_INSIDE, request, terminal=terminal))

    def tunnel(self, record: Record, node: int, port: int) -> list[str]:
        """Return a command for one connection, as sshd limits commands and not connections.

        Raises:
            HostError: the host cannot be used.
        """
        return self._sessions.openssh(self._job(record).place, node).tunnel(port)

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of the hosts for a job.

        Raises:
            SpecError: there are no hosts, or an option is not valid for this backend.
        """
        from clusterjob.backends.ssh.checks import Hosts
        from clusterjob.doctor.this_machine import directory_checks

        spec, options = planning.settled(spec), planning.SshOptions.of(spec.options)
        return run_checks(
            [
                *directory_checks(),
                CheckStep("job", lambda: shared.check_plan(self.plan, spec), needs=("directory",)),
                *Hosts(
                    self._sessions,
                    planning.place_of(spec, options.ssh),
                    spec=spec,
                    need_torch=options.need_torch,
                ).check_steps(),
            ]
        )

    def close(self) -> None:
        """Close all connections; jobs keep running."""
        if "_sessions" in vars(self):
            self._sessions.close()
            del self._sessions
        self._jobs.clear()

    # -- polls -------------------------------------------------------------------------------------

    @functools.cached_property
    def _sessions(self) -> Sessions:
        return shared.new_sessions()

    def _job(self, record: Record) -> Job:
        from clusterjob.remote import ssh_options
        from clusterjob.remote.mirror import JobMirror
        from clusterjob.remote.sessions import Place

        if record.job_id not in self._jobs:
            if record.handle is not None:
                place = Place.from_json(record.handle.data)
            else:
                job = record.job
                place = planning.place_of(
                    job, ssh_options.ConnectionSettings.of(job.options, must_exist=False)
                )
            self._jobs[record.job_id] = Job(
                place,
                [
                    Node(JobMirror(record.job_id, record.job_dir, node=node))
                    for node in range(len(place.hosts))
                ],
            )
        return self._jobs[record.job_id]

    def _start_polls(self, record: Record, *, at_once: bool = False) -> None:
        """Poll each host in the background, unless a poll runs or the last poll is too recent.

        Args:
            record: the job.
            at_once: whether to poll however recent the last poll is.
        """
        from clusterjob.remote.pool import in_background

        job = self._job(record)
        for index, node in enumerate(job.nodes):
            if node.polling is None and (at_once or time.monotonic() >= node.next_try):
                node.polling = in_background(functools.partial(self._poll, job, index))

    def _poll(self, job: Job, index: int) -> dict[str, Any]:
        return job.nodes[index].mirror.poll(
            self._sessions.session(job.place, index), logs=job.followed
        )

    def _store_polls(self, asked: Sequence[Job], *, patient: bool = False) -> None:
        """Store the answers to the running polls.

        The first poll of a job waits for all its hosts, a later poll at most `_POLL_TIMEOUT`.

        Args:
            asked: the jobs that are polled.
            patient: whether to wait for all hosts in any case.
        """
        wait(
            [node.polling for job in asked for node in job.nodes if node.polling is not None],
            None if patient or not all(job.polled for job in asked) else _POLL_TIMEOUT,
        )
        for job in asked:
            job.polled = True
            for node in job.nodes:
                if node.polling is None or not node.polling.done():
                    continue
                poll, node.polling = node.polling, None
                try:
                    node.answer, node.error, node.failures = poll.result(), None, 0
                    # A job with many hosts is polled less often, to keep the load constant.
                    node.next_try = time.monotonic() + min(2.0, 0.02 * len(job.nodes))
                except HostError as error:
                    node.error = error
                    node.failures += 1
                    node.next_try = time.monotonic() + min(
                        _MAX_RETRY_DELAY, 0.25 * 2**node.failures
                    )
