"""A Slurm cluster behind an SSH login host: run commands, mirror jobs to this machine.

A process uses one session with each login host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clusterjob.backends import job_code, shared
from clusterjob.backends.slurm.mirror import ClusterMirror
from clusterjob.backends.slurm.remote_command import RemoteCommand
from clusterjob.core import python_env
from clusterjob.core.hosts import Host, parse_hosts
from clusterjob.core.plans import Plan
from clusterjob.core.records import Record
from clusterjob.errors import HostError, SpecError, SubmitError
from clusterjob.node.logs.job_dir import COMPLETE, LOGS
from clusterjob.remote import ssh_options
from clusterjob.remote.fetch import Fetch, Fetched, Request
from clusterjob.remote.job_bundle import JobBundle
from clusterjob.remote.pool import for_each
from clusterjob.remote.progress import HostProgress
from clusterjob.remote.session import Session
from clusterjob.remote.sessions import Place, Sessions

OPTIONS = (*ssh_options.NAMES, "max_array_size")
_MAX_RETRY_PAUSE = 15.0  # maximum seconds between two tries to reach a host
_UNMOUNTABLE = ',:"'


@dataclass(frozen=True)
class Login:
    """A login host and its connection settings.

    Attributes:
        host: the host as the user wrote it.
        home: clusterjob's directory on the host.
        ssh_config: the ssh configuration to use instead of the user's; None for the user's.
        place: all settings of the session; excluded from equality.
    """

    host: Host
    home: str
    ssh_config: Path | None
    place: Place = field(compare=False)

    @classmethod
    def named(cls, text: str, given: Mapping[str, str], setup: Sequence[str]) -> Login:
        """Return the login host for the name, the options and the setup lines of a job.

        Raises:
            SpecError: the host or one of its options is invalid.
        """
        try:
            found = parse_hosts(text)
        except SpecError as error:
            raise SpecError(
                f"--login: {error.message}",
                "write it as user@login1, or as an alias of the ssh configuration",
            ) from error
        if len(found) != 1:
            raise SpecError(f"--login {text!r} names {len(found)} hosts", "name one login host")
        # The job's interpreter may exist only on the nodes. With a setup line (":" does nothing),
        # the host server runs on any Python of the host that is new enough.
        return cls._at(
            ssh_options.ConnectionSettings.of(given).place(found, "python3", (":", *setup))
        )

    @classmethod
    def _at(cls, place: Place) -> Login:
        return cls(place.hosts[0], place.home, place.ssh_config, place)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON data."""
        return self.place.to_json()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Login:
        """Return the login host from the data of `to_json`."""
        return cls._at(Place.from_json(data))


def of_record(record: Record) -> Login | None:
    """Return the login host of a job; None if Slurm's commands run on this machine."""
    job = record.job
    if not job.login:
        return None
    if record.handle is not None and "login" in record.handle.data:
        return Login.from_json(record.handle.data["login"])
    return Login.named(job.login, job.options, job.setup)


class LoginHost:
    """A login host, on which a `clusterjob.backends.slurm.client.Client` runs its commands.

    Args:
        sessions: the sessions of this process.
        login: the host and its connection settings.

    Attributes:
        label: the host, as the user wrote it.
        timeout: timeout of a request in seconds.
        name: a name that no other login host has, for the snapshot of its queue.
        followed: ids of the jobs whose logs each poll also fetches.
    """

    def __init__(self, sessions: Sessions, login: Login) -> None:
        self.label = str(login.host)
        self.timeout = login.place.timeout
        self.name = "\0".join((self.label, login.home, str(login.ssh_config or "")))
        self.followed: set[str] = set()
        self._sessions = sessions
        self._place = login.place
        self._mirror = ClusterMirror(self.label)
        self._error: HostError | None = None
        self._failures = 0
        self._next_try = 0.0

    def session(self) -> Session:
        """Return the session with the host.

        Raises:
            HostError: the host cannot be used.
        """
        return self._sessions.session(self._place, 0)

    def ask(
        self, call: str, *, bulk: bool = False, **arguments: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Call a function of the host server; see `clusterjob.remote.session.Session.ask`.

        Raises:
            HostError: there is no answer, or the call failed on the host.
        """
        return self.session().ask(call, bulk=bulk, **arguments)

    def supervised(self, request: Mapping[str, Any], *, terminal: bool) -> dict[str, Any]:
        """Return the request to supervise srun on the host; see `clusterjob.node.inside.main`.

        Args:
            request: the request with srun.
            terminal: whether srun gets a terminal.

        Raises:
            HostError: the host cannot be used.
        """
        session = self._sessions.openssh(self._place, 0)
        return session.command(shared.SUPERVISE, request, terminal=terminal)

    # -- commands ----------------------------------------------------------------------------------

    def start(self, argv: Sequence[str], more: Mapping[str, str], job_id: str) -> RemoteCommand:
        """Start a Slurm command on the host, in a clean environment with the variables `more`.

        If `job_id` is not empty, the command runs in the directory of that job.

        Raises:
            SubmitError: the command is not installed on the host.
        """
        return RemoteCommand(self, argv, more=more, job_id=job_id)

    # -- jobs --------------------------------------------------------------------------------------

    def poll(self, records: Sequence[Record]) -> dict[str, bool]:
        """Fetch new data of jobs; return for each job id whether more data is waiting.

        For some seconds after an error, the host gets no request and the same error is raised.

        Raises:
            HostError: the host does not answer.
        """
        if self._error is not None and time.monotonic() < self._next_try:
            raise self._error
        try:
            more = self._mirror.poll(
                self.ask, [(record, record.job_id in self.followed) for record in records]
            )
        except HostError as error:
            self._failures += 1
            self._next_try = time.monotonic() + min(_MAX_RETRY_PAUSE, 0.25 * 2**self._failures)
            self._error = error
            raise
        self._error, self._failures = None, 0
        return more

    def collect(self, record: Record, *, ended: bool) -> None:
        """Fetch the logs of a job; every later `poll` also fetches new logs."""
        whole = record.job_dir / LOGS / COMPLETE  # exists when all logs of an ended job are copied
        if (
            whole.exists()
            or not record.job_dir.is_dir()
            or (record.job_id in self.followed and not ended)
        ):
            return
        self.followed.add(record.job_id)
        try:
            while self.poll([record])[record.job_id]:
                pass
        except HostError as error:
            if ended:
                shared.warn(f"some logs could not be fetched: {error.message}")
            return
        if record.end is not None:
            # There is no logs directory, or the disk is full: the next call fetches the logs again.
            with contextlib.suppress(OSError):
                whole.touch()

    def fetch(self, request: Request) -> Fetched:
        """Fetch results; see `clusterjob.remote.fetch.Fetch`."""
        return Fetch(self.session(), request).run()

    def request_cancel(
        self, names: Sequence[str], *, interrupt: bool = False, stacks: bool = False
    ) -> None:
        """Write cancel requests into job directories on the cluster.

        Args:
            names: the names of the directories.
            interrupt: whether the workers get SIGINT first.
            stacks: whether their stacks are saved before.

        Raises:
            HostError: the host does not answer.
        """
        self.ask("request_stop", jobs=list(names), interrupt=interrupt, stacks=stacks)

    # -- submitting --------------------------------------------------------------------------------

    def put(self, plan: Plan) -> dict[str, Any]:
        """Create the job's directory on the host and send the files of the plan.

        Returns:
            ``directory``, the path on the host, and ``ahead``, the seconds its clock is ahead.

        Raises:
            HostError: the host cannot be used, or has too little free space.
            SpecError: the archive of the Python environment cannot be read any more.
            SubmitError: the directory cannot be mounted into the container.
        """
        size = sum(len(file.data) for file in plan.files)
        if plan.spec.sync and (env := python_env.read(plan.spec)) is not None:
            size += env.size
        answer, _ = self.ask("check", need=shared.LOG_SPACE + size, torch=False, own=False)
        if answer["errors"]:
            raise HostError(self.label, "; ".join(answer["errors"]))
        directory = f"{answer['home']}/jobs/{plan.job_id}"
        if plan.spec.container and any(character in directory for character in _UNMOUNTABLE):
            raise SubmitError(
                f"{directory} contains a comma, a colon or a quote:"
                " it cannot be mounted into a container",
                "choose another directory with --set remote_home=DIR",
            )
        JobBundle(self.session(), plan.job_id, node=0, progress=lambda *_: None).put(
            shared.sent_files(plan)
        )
        return {"directory": directory, "ahead": answer["time"] - time.time()}

    def send_code(self, plan: Plan) -> dict[str, Any] | None:
        """Send the working directory into the job's directory on the host.

        Returns:
            The data for the record: digest, files, bytes, git. None if the spec sends no code.

        Raises:
            HostError: the files cannot be written on the host.
            SubmitError: the directory is too large, or cannot be read.
        """
        spec = plan.spec
        if not spec.sync:
            return None
        code, facts = job_code.to_send(
            plan, ssh_options.ConnectionSettings.of(spec.options).sync_limit
        )
        env = python_env.read(spec)
        with HostProgress([self.label]) as progress:
            session = self.session()
            progress.reached()
            bundle = JobBundle(session, plan.job_id, node=0, progress=partial(progress, 0))
            bundle.install(code)
            if env is not None and env.source is not None:
                bundle.send_archive(env.source, env.digest, size=env.size)
        return facts

    def remove(self, job_id: str) -> None:
        """Delete the job's directory on the host, if the host is reachable."""
        with contextlib.suppress(HostError):
            self.ask("remove", job=job_id)


class LoginHosts:
    """All login hosts of this process; each connects at its first request."""

    def __init__(self) -> None:
        self._sessions = shared.new_sessions()
        self._hosts: dict[Login, LoginHost] = {}

    def host(self, login: Login) -> LoginHost:
        """Return the only `LoginHost` of a login."""
        if login not in self._hosts:
            self._hosts[login] = LoginHost(self._sessions, login)
        return self._hosts[login]

    def poll(self, records: Sequence[Record]) -> dict[str, str]:
        """Fetch new data of jobs with one request to each login host.

        Returns:
            The error message for the id of each job whose host is not reachable.
        """
        groups: dict[Login, list[Record]] = {}
        for record in records:
            if (login := of_record(record)) is not None:
                groups.setdefault(login, []).append(record)
        hosts = {login: self.host(login) for login in groups}
        errors: dict[Login, HostError] = {}
        if len(groups) == 1:  # without a thread, Ctrl-C interrupts the request itself
            [(login, group)] = groups.items()
            try:
                hosts[login].poll(group)
            except HostError as error:
                errors[login] = error
        else:
            errors = for_each(list(groups), lambda login: hosts[login].poll(groups[login])).errors
        return {
            record.job_id: error.message
            for login, error in errors.items()
            for record in groups[login]
        }

    def close(self) -> None:
        """Close all sessions; the jobs continue."""
        self._sessions.close()
