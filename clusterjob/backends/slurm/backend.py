"""Slurm as a cluster: one homogeneous job, one agent a node through srun, and the queue asked for
all jobs at once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import shared
from clusterjob.backends.base import FetchLimits, Status
from clusterjob.backends.slurm import planning, status, submit
from clusterjob.backends.slurm.client import Answer, Client
from clusterjob.backends.slurm.mirror import directory_name
from clusterjob.backends.slurm.queue import Accounting, Queue, Snapshot, explained
from clusterjob.backends.slurm.status import NAME, Cluster
from clusterjob.core import arrays
from clusterjob.core.plans import Plan
from clusterjob.core.records import Handle, Record, home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import engine
from clusterjob.doctor.engine import Check
from clusterjob.errors import SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import Login, LoginHost, LoginHosts
    from clusterjob.remote.fetch import Fetched

_SCANCEL_WORDS = 1000  # ids on one command line


class SlurmBackend:
    """Runs jobs under the Slurm whose client commands this machine has, or a login host that it
    reaches over SSH.
    """

    def __init__(self) -> None:
        self._clients: dict[Cluster, tuple[Client, Queue, Accounting]] = {}
        self._logins: LoginHosts | None = None

    # -- planning ------------------------------------------------------------------------------------------------------

    def plan(self, spec: JobSpec) -> Plan:
        """Return what submitting the job would do. Only an array asks the cluster, for its
        MaxArraySize.

        Raises:
            SpecError: an option makes no sense, or is not sbatch's.
            TemplateError: the user's template cannot be rendered.
        """
        return planning.plan(spec)

    def examine(self, spec: JobSpec) -> Iterator[Check]:
        """Yield what is found of the cluster's fitness for a job.

        Raises:
            SpecError: the login host is none.
        """
        from clusterjob.backends.slurm.checks import SlurmCluster

        login = planning.login_of(spec)
        return engine.examine(
            SlurmCluster(spec, None if login is None else self._host(login)).looks()
        )

    # -- submitting ----------------------------------------------------------------------------------------------------

    def submit(self, plan: Plan) -> Handle:
        """Hand the planned script to Slurm, each piece of an array once.

        Raises:
            SubmitError: Slurm refuses it; what it had taken of it is cancelled.
            SubmitInDoubtError: Slurm did not answer, and the job may run.
        """
        login = planning.login_of(plan.spec)
        if login is not None:
            return self._submit_there(plan, login)
        client = Client(hidden={secret.name for secret in plan.spec.secret})
        _preflight(client, plan)
        ids, cluster = _submit_pieces(plan, client)
        return Handle(
            NAME,
            ids[0],
            data={
                "ids": ids,
                "cluster": cluster,
                "conf": os.environ.get("SLURM_CONF"),
                "at": time.time(),
            },
        )

    def _submit_there(self, plan: Plan, login: Login) -> Handle:
        """Bring the job to a login host, and hand it to Slurm there."""
        host = self._host(login)
        client = Client(shell=host.within(plan.job_id))
        data: dict[str, Any] = {"conf": None, "login": login.to_json()}
        asked = False
        try:
            data |= host.put(plan)
            _preflight(client, plan)
            data["code"] = host.send_code(plan)
            asked = True
            ids, cluster = _submit_pieces(plan, client, host=host)
        except SubmitInDoubtError:
            raise
        except BaseException as error:
            if not asked or isinstance(error, SubmitError):
                host.remove(plan.job_id)
            raise
        return Handle(
            NAME, ids[0], data={"ids": ids, "cluster": cluster, "at": time.time(), **data}
        )

    def detach(self, handle: Handle) -> None:
        """Nothing to let go: a job of Slurm's needs nobody."""

    # -- asking --------------------------------------------------------------------------------------------------------

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        """Return how jobs stand: from their directories, then from one squeue for all, then from
        accounting.
        """
        found, open_ = status.by_directory(records)
        distant = [record for record in open_ if record.spec.get("login")]
        if distant:
            troubles = self._login_hosts().look(distant)
            told, still = status.by_directory(distant)
            found |= told
            found |= {
                record.job_id: status.unreached(record, troubles[record.job_id])
                for record in still
                if record.job_id in troubles
            }
        clusters: dict[Cluster, list[Record]] = {}
        for record in open_:
            if record.job_id not in found:
                clusters.setdefault(status.cluster_of(record), []).append(record)
        for place, group in clusters.items():
            found |= self._ask(place, group)
        return found

    def _at(self, place: Cluster) -> tuple[Client, Queue, Accounting]:
        if place not in self._clients:
            shell = self._host(place.login) if place.login is not None else None
            client = Client(place.conf, place.cluster, shell=shell)
            self._clients[place] = (client, Queue(client, home() / "slurm"), Accounting(client))
        return self._clients[place]

    def _login_hosts(self) -> LoginHosts:
        from clusterjob.backends.slurm.login_host import LoginHosts

        self._logins = self._logins or LoginHosts()
        return self._logins

    def _host(self, login: Login) -> LoginHost:
        return self._login_hosts().host(login)

    def close(self) -> None:
        """Hang up on login hosts; jobs live on."""
        for _, queue, _ in self._clients.values():
            queue.close()
        self._clients.clear()
        if self._logins is not None:
            self._logins.close()
            self._logins = None

    def _ask(self, place: Cluster, records: Sequence[Record]) -> dict[str, Status]:
        client, queue, accounting = self._at(place)
        snapshot = queue.look(urgent=any(status.has_news(record) for record in records))
        if not snapshot.trouble:
            self._tell(client, [record for record in records if status.is_untold(record)], snapshot)
        found: dict[str, Status] = {}
        forgotten: dict[str, tuple[Record, Handle]] = {}
        wholes: dict[str, Record] = {}
        for record in records:
            handle = record.handle or status.adopt(record, snapshot, wholes=wholes)
            if handle is None:
                found[record.job_id] = status.unseen(record, snapshot)
                continue
            row = snapshot.rows.get(handle.id)
            if row is not None and status.is_of(row, record, handle=handle):
                if status.needs_explanation(record, row):
                    row = explained(client, row)
                found[record.job_id] = status.with_trouble(
                    status.from_row(record, handle, row=row), snapshot
                )
            elif snapshot.taken_at < handle.data["at"] + status.SETTLING:
                found[record.job_id] = status.not_yet(record, snapshot)
            else:
                forgotten[handle.id] = (record, handle)
        if forgotten:
            # By the cluster's clock, which may be another than this machine's.
            submitted = {
                key: (
                    handle.data["at"] + handle.data.get("ahead", 0.0),
                    status.submitted_in(record),
                )
                for key, (record, handle) in forgotten.items()
            }
            rows = accounting.ended(submitted)
            for key, (record, handle) in forgotten.items():
                found[record.job_id] = (
                    status.not_yet(record, snapshot)
                    if rows is None
                    else status.forgotten(
                        record, handle, accounted=rows.get(key), snapshot=snapshot
                    )
                )
        return found

    def _tell(self, client: Client, records: Sequence[Record], snapshot: Snapshot) -> None:
        """Have Slurm cancel what it could not be told of before; whatever it answers, it has been
        told.
        """
        keys = [
            record.handle.id
            for record in records
            if record.handle is not None
            and status.is_active(snapshot, record, handle=record.handle)
        ]
        if keys and (answer := _scancel(client, keys)) is not None and answer.silent:
            return
        for record in records:
            status.note_told(record)

    def _may_run(self, record: Record) -> bool:
        """Return whether a job whose end is guessed may run: Slurm shows it, or does not answer."""
        snapshot = self._at(status.cluster_of(record))[1].look(urgent=True)
        handle = record.handle or status.adopt(record, snapshot, wholes={})
        return bool(snapshot.trouble) or (
            handle is not None and status.is_active(snapshot, record, handle=handle)
        )

    # -- cancelling ----------------------------------------------------------------------------------------------------

    def collect(self, record: Record) -> None:
        """Bring the logs from the login host; where there is none, the job writes into
        `record.job_dir` itself.
        """
        login = status.cluster_of(record).login
        if login is not None:
            self._host(login).collect(
                record, ended=record.end is not None or not status.by_directory([record])[1]
            )

    def fetch(
        self,
        record: Record,
        paths: Sequence[str],
        target: Path,
        nodes: Sequence[int] | None,  # noqa: ARG002 - all of them share what the login host sees
        may_replace: Callable[[list[str]], bool],
        limits: FetchLimits,
    ) -> list[Fetched]:
        """Bring results from the login host; see `clusterjob.core.jobs.fetch`.

        Raises:
            ClusterJobError: the job has none; it is not reached, has nothing at a path, or it
                cannot be written here.
        """
        login = status.cluster_of(record).login
        if login is None:
            raise shared.nothing_to_fetch(record)
        request = shared.fetch_request(
            record, paths, target=target, may_replace=may_replace, limits=limits
        )
        return [self._host(login).fetch(request)]

    def interrupt(self, record: Record) -> bool:
        """Have the agents, which see the request in the job's directory, interrupt the workers and
        stop them after the job's grace.

        Returns at once; False where no worker of an agent runs, so that the job can only be
        cancelled.

        Raises:
            ClusterJobError: its login host is not reached.
        """
        runs = (
            shared.progress(record.job_dir)[0] is not None
            and ends.read_result(record.job_dir) is None
        )  # or it is queued again
        if record.spec.get("launcher") == "srun" or not runs:
            return False
        ends.cancel(record.job_dir, interrupt=True)
        if (login := status.cluster_of(record).login) is not None:
            self._host(login).wish_to_cancel([directory_name(record)], interrupt=True)
        return True

    def cancel(self, records: Sequence[Record]) -> None:
        """Have agents and Slurm stop jobs, with one command to Slurm for all of a cluster.

        The agents see the request in the job's directory. Where Slurm does not answer, it is told
        at the next look at the job.

        Raises:
            ClusterJobError: Slurm refuses, or does not answer and a job has no agents; or its login
                host is not reached.
        """
        wanted: dict[Cluster, dict[str, Record]] = {}
        wholes: dict[str, Record] = {}
        distant: dict[Login, list[Record]] = {}
        records = [record for record in records if record.end is None or self._may_run(record)]
        for record in records:
            shared.wish_to_cancel(record)
            if (login := status.cluster_of(record).login) is not None:
                distant.setdefault(login, []).append(record)
        for login, group in distant.items():
            self._host(login).wish_to_cancel([directory_name(record) for record in group])
        for record in records:
            place = status.cluster_of(record)
            snapshot = self._at(place)[1].look(urgent=True)
            handle = record.handle or status.adopt(record, snapshot, wholes=wholes)
            if handle is not None and not status.is_of_another(snapshot, record, handle=handle):
                wanted.setdefault(place, {})[handle.id] = record
        for place, keys in wanted.items():
            answer = _scancel(self._at(place)[0], list(keys))
            if answer is None:
                continue
            if not answer.silent:
                raise SubmitError(f"Slurm does not cancel the job: {answer.words}")
            for record in keys.values():
                status.note_untold(record)
            without = [record.job_id for record in keys.values() if not status.has_agents(record)]
            words = f"Slurm does not answer: {answer.words}"
            if without:
                raise SubmitError(
                    f"{words}; job {without[0]} has no agents that could stop it",
                    "the next `clusterjob status` tells Slurm",
                )
            logging.getLogger("clusterjob").warning(
                "clusterjob: %s; the job's agents stop it, and the next `clusterjob status` tells Slurm",
                words,
            )


def _preflight(client: Client, plan: Plan) -> None:
    submit.check_time(client, plan.spec, preflight=submit.preflight(client, plan.commands[0].argv))


def _submit_pieces(
    plan: Plan, client: Client, host: LoginHost | None = None
) -> tuple[list[str], str | None]:
    """Hand each piece to Slurm; return the ids, and in a federation the cluster that took them.

    Raises:
        SubmitError: Slurm refuses one; what it had taken is cancelled.
    """
    ids: list[str] = []
    cluster: str | None = None
    for command in plan.commands:
        try:
            job, cluster = submit.submit(client, command.argv, job=plan.job_id, known=ids)
        except SubmitError:
            if ids:
                Client(cluster=cluster, shell=host).run(["scancel", *ids])
            raise
        except KeyboardInterrupt:  # sbatch heard it too, and may have been quicker
            ends.cancel(plan.job_dir)  # which the script looks for, should the job be on its way
            if host is not None:
                host.wish_to_cancel([plan.job_id])
            taken = sorted({*ids, *(submit.find(client, plan.job_id) or ())})
            if taken:
                Client(cluster=cluster, shell=host).run(["scancel", *taken])
            raise
        ids.append(job)
    return ids, cluster


def _scancel(client: Client, keys: Sequence[str]) -> Answer | None:
    """Have Slurm cancel jobs; return its answer where it did not, None where it did or they had
    ended.
    """
    words = _scancel_words(keys)
    for begin in range(0, len(words), _SCANCEL_WORDS):
        answer = client.run(["scancel", *words[begin : begin + _SCANCEL_WORDS]])
        if (
            answer.code != 0
            and "Invalid job id" not in answer.err
            and "already completing" not in answer.err
        ):
            return answer
    return None


def _scancel_words(keys: Sequence[str]) -> list[str]:
    """Return ids as scancel takes them: the elements of one array as ``12_[0-3,7]``."""
    words = [key for key in keys if "_" not in key]
    elements: dict[str, list[int]] = {}
    for key in keys:
        base, separator, index = key.partition("_")
        if separator:
            elements.setdefault(base, []).append(int(index))
    for base, indices in elements.items():
        words += [f"{base}_[{part}]" for part in arrays.ranges_text(sorted(indices)).split(",")]
    return words
