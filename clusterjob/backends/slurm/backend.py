"""The Slurm backend: one homogeneous job, one agent per node, one squeue for all jobs."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from clusterjob.backends import job_progress, shared
from clusterjob.backends.base import FetchLimits, Leftover, Status
from clusterjob.backends.slurm import planning, scancel, status, submit
from clusterjob.backends.slurm.accounting import Accounting, explained
from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.queue import Queue
from clusterjob.backends.slurm.squeue import has_id
from clusterjob.backends.slurm.status import NAME, Cluster
from clusterjob.core.capabilities import Capability
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record, Records, home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import Check, run_checks
from clusterjob.errors import SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import ELEMENTS, OUTCOMES

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import Login, LoginHosts
    from clusterjob.core.proposals import Proposal
    from clusterjob.remote.fetch import Fetched

_IN_QUEUE = "it is in Slurm's queue"
_COMPLETING = 5.0  # seconds to wait for ended jobs that Slurm still completes


class SlurmBackend:
    """Run jobs under Slurm, with the client commands of this machine or of an SSH login host."""

    capabilities = tuple(
        set(Capability)
        - {
            Capability.HOSTS,
            Capability.GPU_LIST,
            Capability.COUNTED_WORKERS,
            Capability.SHARED_DIRECTORY,
        }
    )
    hints: ClassVar[Mapping[Capability, str]] = {}

    def __init__(self) -> None:
        self._clients: dict[Cluster, tuple[Client, Queue, Accounting]] = {}

    # -- planning ----------------------------------------------------------------------------------

    plan = staticmethod(planning.plan)

    def propose(self) -> Iterator[Proposal]:
        """Yield the profiles that `clusterjob init` offers."""
        from clusterjob.backends.slurm import proposal

        return proposal.propose()

    def doctor_checks(self, spec: JobSpec) -> Iterator[Check]:
        """Yield the doctor checks of the cluster for a job.

        Raises:
            SpecError: the login host is invalid.
        """
        from clusterjob.backends.slurm.checks import SlurmCluster

        login = planning.login_of(spec)
        return run_checks(
            SlurmCluster(spec, None if login is None else self._logins.host(login)).check_steps()
        )

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Submit the planned script to Slurm, once for each piece of an array.

        Raises:
            SubmitError: Slurm refuses a piece; the pieces submitted before are cancelled.
            SubmitInDoubtError: Slurm did not answer, and the job may run.
        """
        if (login := planning.login_of(plan.spec)) is not None:
            return self._submit_there(plan, login)
        client = Client(hidden=plan.spec.hidden_variables)
        submit.check_pyxis(client, plan)
        submit.check_torch(plan.spec)
        submit.preflight(client, plan.spec, plan.commands[0].argv)
        ids, cluster = submit.submit_pieces(client, submit.without_bad_nodes(client, plan))
        return _handle(ids, cluster, conf=os.environ.get("SLURM_CONF"))

    def _submit_there(self, plan: Plan, login: Login) -> Handle:
        """Copy the job to a login host, and submit it to Slurm on that host."""
        host = self._logins.host(login)
        client = Client(host=host, job_id=plan.job_id)
        asked = False
        try:
            data = host.put(plan)
            submit.check_pyxis(client, plan)
            submit.preflight(client, plan.spec, plan.commands[0].argv)
            data["code"] = host.send_code(plan)
            plan = submit.without_bad_nodes(client, plan)
            asked = True
            ids, cluster = submit.submit_pieces(client, plan, host=host)
        except SubmitInDoubtError:
            raise
        except BaseException as error:
            if not asked or isinstance(error, SubmitError):
                host.remove(plan.job_id)
            raise
        return _handle(ids, cluster, conf=None, login=login.to_json(), **data)

    def detach(self, handle: Handle) -> None:
        """Do nothing: a Slurm job does not depend on this process."""

    # -- status ------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of jobs: read their directories, then squeue once, then accounting."""
        found, open_ = status.by_directory(records)
        if distant := [record for record in open_ if record.job.login]:
            errors = self._logins.poll(distant)
            ended, still = status.by_directory(distant)
            found |= ended
            found |= {
                record.job_id: status.unreached(record, errors[record.job_id])
                for record in still
                if record.job_id in errors
            }
        clusters: dict[Cluster, list[Record]] = {}
        for record in open_:
            if record.job_id not in found:
                clusters.setdefault(status.cluster_of(record), []).append(record)
        for cluster, group in clusters.items():
            found |= self._ask(cluster, group)
        return found

    def _refresh(self, records: Sequence[Record]) -> None:
        """Fetch new data of the jobs that are behind a login host."""
        if distant := [record for record in records if record.job.login]:
            self._logins.poll(distant)

    def _at(self, cluster: Cluster) -> tuple[Client, Queue, Accounting]:
        if cluster not in self._clients:
            client = Client(
                cluster.conf,
                cluster.cluster,
                host=None if cluster.login is None else self._logins.host(cluster.login),
            )
            self._clients[cluster] = (client, Queue(client, home() / "slurm"), Accounting(client))
        return self._clients[cluster]

    @functools.cached_property
    def _logins(self) -> LoginHosts:
        from clusterjob.backends.slurm.login_host import LoginHosts

        return LoginHosts()

    def close(self) -> None:
        """Close the sessions with login hosts; the jobs continue."""
        for _, queue, _ in self._clients.values():
            queue.close()
        self._clients.clear()
        if "_logins" in vars(self):
            self._logins.close()
            del self._logins

    def _ask(self, cluster: Cluster, records: Sequence[Record]) -> dict[str, Status]:
        """Return the status of jobs of one cluster from squeue, then from accounting."""
        client, queue, accounting = self._at(cluster)
        records = [status.at_newest_job(record) for record in records]
        snapshot = queue.poll(urgent=any(status.has_news(record) for record in records))
        if not snapshot.error:
            scancel.repeat_pending(client, records, snapshot)
        found: dict[str, Status] = {}
        forgotten: dict[str, tuple[Record, Handle]] = {}
        wholes: dict[str, Record] = {}
        for record in records:
            handle = record.handle or status.adopt(record, snapshot, wholes=wholes)
            row = snapshot.rows.get(handle.id) if handle is not None else None
            if handle is None:
                found[record.job_id] = status.unseen(record, snapshot)
            elif row is not None and has_id(row, record.whole_id):
                if status.needs_explanation(record, row):
                    row = explained(client, row)
                found[record.job_id] = status.with_error(
                    status.from_row(record, handle, row=row), snapshot
                )
            elif snapshot.taken_at < handle.data["at"] + status.SETTLING:
                found[record.job_id] = status.not_yet(record, snapshot)
            else:
                forgotten[handle.id] = (record, handle)
        rows = accounting.ended(
            {
                key: (status.accepted_at(handle), status.submitted_in(record))
                for key, (record, handle) in forgotten.items()
            }
        )
        for key, (record, handle) in forgotten.items():
            found[record.job_id] = (
                status.not_yet(record, snapshot)
                if rows is None
                else status.forgotten(record, handle, accounted=rows.get(key), snapshot=snapshot)
            )
        return found

    def _may_run(self, record: Record) -> bool:
        """Return whether a job may run: Slurm shows it as active, or does not answer."""
        record = status.at_newest_job(record)
        snapshot = self._at(status.cluster_of(record))[1].poll(urgent=True)
        handle = record.handle or status.adopt(record, snapshot, wholes={})
        return bool(snapshot.error) or (
            handle is not None and status.is_active(snapshot, record, handle=handle)
        )

    def clean(self, records: Sequence[Record], *, remove: bool) -> tuple[dict[str, Leftover], int]:
        """Measure or remove ended jobs on login hosts; see `clusterjob.backends.base.Cleaner`.

        A job that its owner has queued again, or whose cluster does not answer, is kept.
        """
        found: dict[str, Leftover] = {}
        until = time.monotonic() + _COMPLETING
        wanted: dict[Login, list[str]] = {}
        for record in records:
            login = status.cluster_of(record).login
            elements = Records().elements(record)
            why = self._why_kept(elements)
            while why == _IN_QUEUE and time.monotonic() < until:
                time.sleep(0.2)
                why = self._why_kept(elements)
            if why:
                found[record.job_id] = Leftover(kept=why)
            elif login is None:
                found[record.job_id] = Leftover()
            else:
                wanted.setdefault(login, []).append(record.job_id)
        if not wanted:
            return found, 0
        from clusterjob.remote.cleaning import JobsOnHost

        there, code = shared.clean_hosts(
            [JobsOnHost(self._logins.host(login).session, jobs) for login, jobs in wanted.items()],
            remove=remove,
        )
        return found | there, code

    def _why_kept(self, elements: Sequence[Record]) -> str:
        """Return why an ended job must not be removed; empty if it can be."""
        for record in elements:
            if self._may_run(record):
                snapshot = self._at(status.cluster_of(record))[1].poll()
                return f"Slurm does not answer: {snapshot.error}" if snapshot.error else _IN_QUEUE
        return ""

    # -- logs, results, cancelling -----------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Copy the logs from the login host, if there is one.

        Without a login host the job writes into `record.job_dir` itself.
        """
        if (login := status.cluster_of(record).login) is not None:
            self._logins.host(login).collect(
                record, ended=record.end is not None or not status.by_directory([record])[1]
            )

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,  # noqa: ARG002 - all nodes share the login host's file system
        may_replace: Callable[[list[str]], bool],
        limits: FetchLimits,
    ) -> list[Fetched]:
        """Copy results from the login host; see `clusterjob.core.jobs.fetch`.

        Raises:
            ClusterJobError: the job has no login host, the host is not reachable, a path does not
                exist on the host, or a file cannot be written on this machine.
        """
        if (login := status.cluster_of(record).login) is None:
            raise shared.nothing_to_fetch(record)
        return [
            self._logins.host(login).fetch(
                shared.fetch_request(
                    record, paths, target=target, may_replace=may_replace, limits=limits
                )
            )
        ]

    def outcomes(
        self, record: Record, names: Mapping[int, Collection[str]], most: int
    ) -> dict[str, bytes] | None:
        """Read result files from the login host; see `clusterjob.backends.base.OutcomeReader`.

        Raises:
            ClusterJobError: the login host is unreachable, or sends too much.
        """
        if (login := status.cluster_of(record).login) is None:
            return None
        from clusterjob.remote import outcome_files

        return outcome_files.read(
            self._logins.host(login).session(),
            record.whole_id,
            folder=OUTCOMES if record.index is None else f"{ELEMENTS}/{record.index}/{OUTCOMES}",
            names=[name for of_node in names.values() for name in of_node],
            most=most,
        )

    def command(
        self, record: Record, node: int, request: Mapping[str, Any], *, terminal: bool
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of a program in an overlapping step; see `base.Executor`.

        Raises:
            ClusterJobError: Slurm does not show the job, or the login host cannot be used.
        """
        from clusterjob.backends.slurm import step

        record, cluster = status.at_newest_job(record), status.cluster_of(record)
        host = None if cluster.login is None else self._logins.host(cluster.login)
        client = self._at(cluster)[0]
        return step.command(record, node, request, client, host, terminal=terminal)

    def tunnel(self, record: Record, node: int, port: int) -> list[str]:  # noqa: ARG002
        """Return nothing: a relay carries connections."""
        return []

    def interrupt(self, record: Record) -> bool:
        """Interrupt the workers through a request in the job's directory, which the agents read.

        The agents stop the workers after the job's grace.

        Returns:
            False if no agent runs workers, so that the job can only be cancelled; else True,
            without waiting for the end of the job.

        Raises:
            ClusterJobError: the login host is not reachable.
        """
        if (
            record.job.launcher == "srun"
            or job_progress.progress(record.job_dir).started_at is None
            # With a result, the attempt has ended, and the job is queued again.
            or ends.read_result(record.job_dir) is not None
        ):
            return False
        ends.cancel(record.job_dir, interrupt=True)
        if (login := status.cluster_of(record).login) is not None:
            self._logins.host(login).request_cancel([record.directory_name], interrupt=True)
        return True

    def cancel(self, records: Sequence[Record]) -> None:
        """Cancel jobs through their agents and Slurm, with one scancel per cluster.

        The agents read the request in the job's directory. If Slurm does not answer, the next
        status call repeats the cancel.

        Raises:
            ClusterJobError: Slurm refuses; Slurm does not answer and a job has no agents; or the
                login host is not reachable.
        """
        wanted: dict[Cluster, dict[str, Record]] = {}
        wholes: dict[str, Record] = {}
        distant: dict[Login, list[Record]] = {}
        records = [record for record in records if record.end is None or self._may_run(record)]
        for record in records:
            shared.request_cancel(record)
            if (login := status.cluster_of(record).login) is not None:
                distant.setdefault(login, []).append(record)
        for login, group in distant.items():
            for stacks in (False, True):
                names = [
                    record.directory_name
                    for record in group
                    if ends.stacks_wanted(record.job_dir) is stacks
                ]
                if names:
                    self._logins.host(login).request_cancel(names, stacks=stacks)
        scancel.wait_for_stacks(records, self._refresh)
        for record in map(status.at_newest_job, records):
            cluster = status.cluster_of(record)
            snapshot = self._at(cluster)[1].poll(urgent=True)
            for number in status.jobs_in_queue(record, snapshot):
                wanted.setdefault(cluster, {})[number] = record
            handle = record.handle or status.adopt(record, snapshot, wholes=wholes)
            if handle is not None and not status.is_of_another(snapshot, record, handle=handle):
                wanted.setdefault(cluster, {})[handle.id] = record
        for cluster, of_ids in wanted.items():
            scancel.cancel(self._at(cluster)[0], of_ids)


def _handle(ids: Sequence[str], cluster: str | None, **more: Any) -> Handle:
    return Handle(NAME, ids[0], data={"ids": ids, "cluster": cluster, "at": time.time(), **more})
