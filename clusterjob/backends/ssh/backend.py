"""Bare hosts as a cluster: an agent a host, started over SSH, that needs neither the submitter nor
a shared disk afterwards.

What the hosts write of a job is mirrored into its directory here whenever somebody asks
(`clusterjob.remote.mirror`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import shared
from clusterjob.backends.base import FetchLimits, Status
from clusterjob.backends.ssh import planning, status
from clusterjob.backends.ssh.planning import CODE, NAME, SCRIPT, Options
from clusterjob.backends.ssh.status import Job, Node
from clusterjob.core import node_zip, plans
from clusterjob.core.hosts import Host
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import engine
from clusterjob.doctor.engine import Check
from clusterjob.errors import ClusterJobError, HostError
from clusterjob.node.environments import candidate_ports
from clusterjob.node.logs import ends
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize

if TYPE_CHECKING:
    from clusterjob.remote.fetch import Fetched

_LOOK_PATIENCE = 1.0  # seconds that hosts which answer wait for one that does not
_LONGEST_SILENCE = 15.0  # seconds between two tries at a host that is not reached
_CANCEL_PATIENCE = 12.0  # seconds beyond the job's grace for a host to say that a job has stopped


class SshBackend:
    """Runs jobs on hosts that are reached over SSH."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._visits_held: Any = None

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return what submitting the job would do. No host is asked.

        Raises:
            SpecError: there are no hosts, or fewer than nodes; or an option makes no sense here.
            TemplateError: the user's template cannot be rendered.
        """
        return planning.plan(spec)

    # -- submitting ----------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Bring the job to its hosts and start it; from then on it needs nobody.

        Raises:
            SubmitError: hosts are unfit, each of which is named; nothing is left on any of them.
        """
        from clusterjob.backends.ssh.submit import Consignment, Submission
        from clusterjob.core import snapshot
        from clusterjob.remote.progress import Sending

        spec, options = plan.spec, Options.of(plan.spec.options)
        place = options.ssh.place(spec.hosts, spec.python, spec.setup)
        code = (
            snapshot.take(
                spec.workdir, options.ssh.sync_limit, include_secrets=spec.include_secrets
            )
            if spec.sync
            else None
        )
        goods = Consignment(
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
            patience=spec.join_timeout,
            grace=spec.grace,
            gpus=spec.gpus,
            gpus_per_node=spec.resources.gpus_per_node,
            require_gpus=spec.require_gpus,
        )
        data: dict[str, Any] = place.to_json()
        if code is not None:
            code.keep(plan.job_dir)
            data["code"] = {
                "digest": code.digest,
                "files": code.files,
                "bytes": code.size,
                "git": snapshot.keep_git(spec.workdir, plan.job_dir),
            }
        with Sending([str(host) for host in spec.hosts]) as progress:
            submission = Submission(
                self._visits(),
                place,
                goods=goods,
                progress=progress,
                warn=_warn,
                unwanted=partial(ends.cancelled, plan.job_dir),
            )
            try:
                data["address"] = submission.run()
            except BaseException:
                ends.cancel(plan.job_dir)  # for whoever asks after a job that was broken off here
                raise
        return Handle(NAME, plan.job_id, data=data)

    def detach(self, handle: Handle) -> None:
        """Do nothing: the agents never needed this process."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand: every host of theirs is asked, all at once."""
        for record in records:
            self._look(record)
        self._hear([self._job(record) for record in records])
        return {record.job_id: status.status(record, self._job(record)) for record in records}

    def collect(self, record: Record) -> None:
        """Bring the logs as far as they are written; from then on every look at the job brings
        them.
        """
        job = self._job(record)
        ended = (
            record.end is not None or files.read_json(record.job_dir / "result.json") is not None
        )
        if job.followed and not ended:
            return
        job.followed = True
        whole = (
            record.job_dir / "logs" / "whole"
        )  # there when the logs of a job that has ended are all here
        if whole.exists() or not record.job_dir.is_dir():
            return
        while True:
            self._look(record, at_once=True)
            self._hear([job], patient=True)
            if not any(
                node.look is not None and node.look["more"] and node.error is None
                for node in job.nodes
            ):
                break
        absent = [node.error.message for node in job.nodes if node.error is not None]
        if not ended:
            return
        if absent:
            _warn(f"some logs are not here: {'; '.join(absent)}")
        else:
            with contextlib.suppress(
                OSError
            ):  # no logs have come, or the disk is full: they are asked for again
                whole.touch()

    def cancel(self, records: Sequence[Record]) -> None:
        """Have every agent stop its workers; kill the agents that do not within the job's grace.

        Raises:
            ClusterJobError: hosts are not reached; what runs there ends when its agents miss the
                others.
        """
        for record in records:
            self._end(record, interrupt=False)

    def interrupt(self, record: Record) -> bool:
        """Have every agent interrupt its workers and stop them after the job's grace.

        Returns at once; False where no worker runs yet, so that the job can only be cancelled.

        Raises:
            ClusterJobError: hosts are not reached; what runs there ends when its agents miss the
                others.
        """
        if shared.progress(record.job_dir)[0] is None:
            return False
        self._end(record, interrupt=True)
        return True

    def _end(self, record: Record, *, interrupt: bool) -> None:
        from clusterjob.remote.pool import complaint, for_each

        ends.cancel(record.job_dir)
        place, grace = self._job(record).place, float(record.spec.get("grace", 3.0))

        def work(node: int) -> None:
            session = self._visits().session(place, node)
            session.ask(
                "cancel",
                job=record.job_id,
                node=node,
                grace=grace,
                interrupt=interrupt,
                timeout=grace + _CANCEL_PATIENCE,
            )

        outcome = for_each(range(len(place.hosts)), work)
        if outcome.errors:
            message, hint = complaint(outcome.errors, len(place.hosts))
            raise ClusterJobError(
                f"{message} (job {record.job_id})",
                hint or "its agents end there when they miss the others",
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
        """Bring results from hosts; see `clusterjob.core.jobs.fetch`.

        Raises:
            ClusterJobError: a host is not reached, has nothing at a path, or it cannot be written
                here.
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
            return Fetch(self._visits().session(place, node), request).run()

        outcome = for_each(asked, work)
        if outcome.errors:
            raise ClusterJobError(*complaint(outcome.errors, len(asked)))
        return [outcome.results[node] for node in asked]

    def examine(self, spec: JobSpec) -> Iterator[Check]:
        """Yield what is found of the hosts' fitness for a job.

        Raises:
            SpecError: there are no hosts, or an option makes no sense here.
        """
        from clusterjob.backends.ssh.checks import Hosts
        from clusterjob.doctor.this_machine import directory_looks

        spec, options = planning.settled(spec), Options.of(spec.options)
        hosts = Hosts(
            self._visits(),
            options.ssh.place(spec.hosts, spec.python, spec.setup),
            spec=spec,
            need_torch=options.need_torch,
        )
        job = engine.Look("job", lambda: shared.plannable(self.plan, spec))
        return engine.examine([job, *directory_looks(), *hosts.looks()])

    def close(self) -> None:
        """Hang up on all hosts; jobs live on."""
        if self._visits_held is not None:
            self._visits_held.close()
            self._visits_held = None
        self._jobs.clear()

    # -- looks ---------------------------------------------------------------------------------------------------------

    def _visits(self) -> Any:
        from clusterjob.remote.sessions import Visits

        if self._visits_held is None:
            self._visits_held = Visits(_warn, lambda: node_zip.node_zip(node_zip.cache_directory()))
        return self._visits_held

    def _job(self, record: Record) -> Job:
        from clusterjob.remote import ssh_options
        from clusterjob.remote.mirror import Mirror
        from clusterjob.remote.sessions import Place

        if record.job_id not in self._jobs:
            if record.handle is not None:
                place = Place.from_json(record.handle.data)
            else:
                options = ssh_options.Options.of(record.spec.get("options") or {}, must_exist=False)
                hosts = tuple(Host(**host) for host in record.spec["hosts"])
                place = options.place(hosts, str(record.spec["python"]), record.spec["setup"])
            nodes = [
                Node(Mirror(record.job_id, record.job_dir, node=node))
                for node in range(len(place.hosts))
            ]
            self._jobs[record.job_id] = Job(place, nodes)
        return self._jobs[record.job_id]

    def _look(self, record: Record, *, at_once: bool = False) -> None:
        """Begin to ask every host of a job that is not being asked already, and was not a moment
        ago.
        """
        from clusterjob.remote.pool import in_background

        job = self._job(record)
        for index, node in enumerate(job.nodes):
            if node.asking is None and (at_once or time.monotonic() >= node.next_try):
                node.asking = in_background(partial(self._ask, job, index))

    def _ask(self, job: Job, index: int) -> Mapping[str, Any]:
        session = self._visits().session(job.place, index)
        look: Mapping[str, Any] = job.nodes[index].mirror.look(session, logs=job.followed)
        return look

    def _hear(self, asked: Sequence[Job], *, patient: bool = False) -> None:
        """Take in the answers: all of them the first time, later those that come soon."""
        waiting = [node.asking for job in asked for node in job.nodes if node.asking is not None]
        wait(waiting, None if patient or not all(job.looked for job in asked) else _LOOK_PATIENCE)
        for job in asked:
            job.looked = True
            for node in job.nodes:
                if node.asking is None or not node.asking.done():
                    continue
                asking, node.asking = node.asking, None
                try:
                    node.look, node.error, node.failures = asking.result(), None, 0
                    # Many hosts are asked less often, so that following a job costs the same.
                    node.next_try = time.monotonic() + min(2.0, 0.02 * len(job.nodes))
                except HostError as error:
                    node.error = error
                    node.failures += 1
                    node.next_try = time.monotonic() + min(
                        _LONGEST_SILENCE, 0.25 * 2**node.failures
                    )


def _warn(text: str) -> None:
    """Say a line to the user: the library's own logger shows warnings on stderr unless a program
    wants them elsewhere.
    """
    logging.getLogger("clusterjob").warning("clusterjob: %s", sanitize(text))
