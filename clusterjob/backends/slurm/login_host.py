"""A cluster that is reached through its login host: Slurm's commands run there, over one visit of a
process, and its jobs mirrored here.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clusterjob.backends.slurm.client import UNREACHED
from clusterjob.backends.slurm.mirror import Mirror
from clusterjob.core import node_zip, plans, snapshot
from clusterjob.core.hosts import Host, parse_hosts
from clusterjob.core.plans import Plan
from clusterjob.core.records import Record
from clusterjob.core.spec import JobSpec
from clusterjob.errors import HostError, SpecError, SubmitError
from clusterjob.node.system.sanitize import sanitize
from clusterjob.remote import ssh_options
from clusterjob.remote.fetch import Fetch, Fetched, Request
from clusterjob.remote.job_bundle import JobBundle
from clusterjob.remote.pool import for_each
from clusterjob.remote.progress import Sending
from clusterjob.remote.session import Session
from clusterjob.remote.sessions import Place, Visits

OPTIONS = (*ssh_options.NAMES, "max_array_size")
CODE = "code"
_AT_ONCE = (
    0.3  # seconds that a command's end is waited for with its start: most need no second question
)
_MARGIN = 50_000_000  # bytes that are to be free beyond what is sent: logs have to go somewhere
_LONGEST_SILENCE = 15.0  # seconds between two tries at a host that is not reached
_UNMOUNTABLE = ',:"'


@dataclass(frozen=True)
class Login:
    """A login host, and how it is reached.

    Attributes:
        host: as it was written.
        home: where all of ours lies there.
        ssh_config: a configuration in the place of the user's.
        place: the same with what else a visit needs, which makes no other host of it.
    """

    host: Host
    home: str
    ssh_config: Path | None
    place: Place = field(compare=False)

    @classmethod
    def of(cls, spec: JobSpec) -> Login:
        """Return the login host that a job names.

        Raises:
            SpecError: it is no host, or one of its options makes no sense.
        """
        return cls.named(spec.login, spec.options, setup=spec.setup)

    @classmethod
    def named(cls, text: str, given: Mapping[str, str], setup: Sequence[str]) -> Login:
        """Return a login host by its name and the options of a job; see `of`."""
        try:
            found = parse_hosts(text)
        except SpecError as error:
            raise SpecError(
                f"--login: {error.message}",
                "write it as user@login1, or as an alias of the ssh configuration",
            ) from error
        if len(found) != 1:
            raise SpecError(
                f"--login {text!r} names {len(found)} hosts",
                "a cluster is submitted to from one of its login hosts",
            )
        set_ = ssh_options.Options.of(given)
        # The visit needs some Python there, not the job's, which may be on the nodes alone. With
        # setup lines, any that is new enough is taken before those are run; so there is always one,
        # which does nothing.
        place = Place(
            found,
            "python3",
            setup=(":", *setup),
            home=set_.remote_home,
            ssh_config=set_.ssh_config,
            timeout=set_.connect_timeout,
        )
        return cls(found[0], set_.remote_home, set_.ssh_config, place)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return self.place.to_json()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Login:
        """Return what `to_json` wrote."""
        place = Place.from_json(data)
        return cls(place.hosts[0], place.home, place.ssh_config, place)


def of_record(record: Record) -> Login | None:
    """Return the login host of a job; None where Slurm's commands are this machine's own."""
    if not record.spec.get("login"):
        return None
    if record.handle is not None and "login" in record.handle.data:
        return Login.from_json(record.handle.data["login"])
    return Login.named(
        record.spec["login"], record.spec.get("options") or {}, record.spec.get("setup") or ()
    )


class LoginHost:
    """One login host, as this process reaches it: the shell of a
    `clusterjob.backends.slurm.client.Client`.

    Args:
        visits: the sessions of this process.
        login: which host, and how it is reached.
    """

    def __init__(self, visits: Visits, login: Login) -> None:
        self._visits = visits
        self._login = login
        self._mirror = Mirror(self.label)
        self._trouble: HostError | None = None
        self._failures = 0
        self._next_try = 0.0
        self.followed: set[str] = set()

    @property
    def label(self) -> str:
        """The host, as the user wrote it."""
        return str(self._login.host)

    @property
    def timeout(self) -> float:
        """Seconds that it may take to answer."""
        return self._login.place.timeout

    @property
    def name(self) -> str:
        """What tells it from other hosts, for the snapshot of its queue."""
        return "\0".join((self.label, self._login.home, str(self._login.ssh_config or "")))

    def session(self) -> Session:
        """Return the visit.

        Raises:
            HostError: the host cannot be used.
        """
        return self._visits.session(self._login.place, 0)

    def ask(self, op: str, **more: Any) -> tuple[Any, bytes]:
        """Ask the host; see `clusterjob.remote.session.Session.ask`.

        Raises:
            HostError: there is no answer, or what was asked for failed there.
        """
        return self.session().ask(op, **more)

    # -- commands ------------------------------------------------------------------------------------------------------

    def start(self, argv: Sequence[str], more: Mapping[str, str]) -> Errand:
        """Start a command of Slurm's there.

        Raises:
            SubmitError: it is not installed there.
        """
        return Errand(self, argv, more=more, job_id="")

    def within(self, job_id: str) -> Within:
        """Return this host as a shell whose commands run in a job's directory."""
        return Within(self, job_id)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def look(self, records: Sequence[Record]) -> dict[str, bool]:
        """Bring what is new of jobs; return for each whether there is more. A host that was not
        reached is let alone for a while.

        Raises:
            HostError: the host does not answer.
        """
        if self._trouble is not None and time.monotonic() < self._next_try:
            raise self._trouble
        try:
            more = self._mirror.look(
                self.ask, [(record, record.job_id in self.followed) for record in records]
            )
        except HostError as error:
            self._failures += 1
            self._next_try = time.monotonic() + min(_LONGEST_SILENCE, 0.25 * 2**self._failures)
            self._trouble = error
            raise
        self._trouble, self._failures = None, 0
        return more

    def collect(self, record: Record, *, ended: bool) -> None:
        """Bring a job's logs as far as they are written; from then on every look at the job brings
        them.
        """
        whole = (
            record.job_dir / "logs" / "whole"
        )  # there when the logs of a job that has ended are all here
        if (
            whole.exists()
            or not record.job_dir.is_dir()
            or (record.job_id in self.followed and not ended)
        ):
            return
        self.followed.add(record.job_id)
        try:
            while self.look([record])[record.job_id]:
                pass
        except HostError as error:
            if ended:
                logging.getLogger("clusterjob").warning(
                    "clusterjob: some logs are not here: %s", sanitize(error.message)
                )
            return
        if record.end is not None:
            with contextlib.suppress(
                OSError
            ):  # no logs have come, or the disk is full: they are asked for again
                whole.touch()

    def fetch(self, request: Request) -> Fetched:
        """Bring results; see `clusterjob.remote.fetch.Fetch`."""
        return Fetch(self.session(), request).run()

    def wish_to_cancel(self, names: Sequence[str], *, interrupt: bool = False) -> None:
        """Note on the cluster that jobs are to end, by the names of their directories.

        Args:
            names: the directories' names.
            interrupt: whether the workers are to get SIGINT first.

        Raises:
            HostError: the host does not answer.
        """
        self.ask("wish", jobs=list(names), interrupt=interrupt)

    # -- submitting ----------------------------------------------------------------------------------------------------

    def put(self, plan: Plan) -> dict[str, Any]:
        """Make the job's directory there; return what is to be known of it: ``directory``, and
        ``ahead``, seconds of its clock.

        Raises:
            HostError: the host cannot be used, or has no room.
            SubmitError: the directory cannot be used.
        """
        size = sum(len(file.data) for file in plan.files)
        answer, _ = self.ask("check", need=_MARGIN + size, torch=False, own=False)
        if answer["errors"]:
            raise HostError(self.label, "; ".join(answer["errors"]))
        directory = f"{answer['home']}/jobs/{plan.job_id}"
        if plan.spec.container and any(character in directory for character in _UNMOUNTABLE):
            raise SubmitError(
                f"{directory} holds a comma or a quote, and cannot be mounted into a container",
                "--set remote_home=DIR",
            )
        files = [
            *((file.path.name, file.mode, file.data) for file in plan.files),
            *plans.carried_elsewhere(plan.job_dir),
        ]
        JobBundle(self.session(), plan.job_id, node=0, progress=lambda *_: None).put(files)
        return {"directory": directory, "ahead": answer["time"] - time.time()}

    def send_code(self, plan: Plan) -> dict[str, Any] | None:
        """Have the working directory in the job's directory there; return what is noted of it, None
        where it is not sent.

        Raises:
            HostError: it cannot be written there.
            SubmitError: it is too large, or cannot be read.
        """
        spec = plan.spec
        if not spec.sync:
            return None
        code = snapshot.take(
            spec.workdir,
            ssh_options.Options.of(spec.options).sync_limit,
            include_secrets=spec.include_secrets,
        )
        with Sending([self.label]) as progress:
            JobBundle(self.session(), plan.job_id, node=0, progress=partial(progress, 0)).land(code)
        code.keep(plan.job_dir)
        git = snapshot.keep_git(spec.workdir, plan.job_dir)
        return {"digest": code.digest, "files": code.files, "bytes": code.size, "git": git}

    def remove(self, job_id: str) -> None:
        """Take away what was put there; a host that is not reached keeps it."""
        try:
            self.ask("remove", job=job_id, node=0)
        except HostError:
            pass


@dataclass(frozen=True)
class Within:
    """A login host as a shell whose commands run in a job's directory.

    Attributes:
        host: the host.
        job_id: the job.
    """

    host: LoginHost
    job_id: str

    @property
    def name(self) -> str:
        """As the host's."""
        return self.host.name

    def start(self, argv: Sequence[str], more: Mapping[str, str]) -> Errand:
        """As the host's."""
        return Errand(self.host, argv, more=more, job_id=self.job_id)


class Errand:
    """A command that runs on a login host, as `subprocess.Popen` has it; where the connection
    breaks its code is UNREACHED.

    Args:
        host: the host.
        argv: the command line.
        more: variables added to its environment.
        job_id: in whose directory it runs; empty for none.

    Raises:
        SubmitError: it is not installed there.
    """

    def __init__(
        self, host: LoginHost, argv: Sequence[str], more: Mapping[str, str], job_id: str
    ) -> None:
        self._host = host
        self._session: Session | None = None
        self._number = 0
        self._said = ("", "")
        self._ended = False
        self.args = list(argv)
        self.returncode: int = 0
        answer = self._ask(0.0, "run", argv=list(argv), env=dict(more), job=job_id, wait=_AT_ONCE)
        if "absent" in answer:
            raise SubmitError(
                f"{host.label}: {argv[0]} cannot be run: {answer['absent']}",
                "Slurm's commands have to be on PATH there",
            )

    def communicate(self, *, timeout: float | None = None) -> tuple[str, str]:
        """Return stdout and stderr once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, within timeout (seconds).
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ended:
            begin = time.monotonic()
            left = 60.0 if end is None else max(0.0, end - begin)
            self._ask(left, "reap", number=self._number, wait=left)
            if (
                not self._ended and left > 1.0 and time.monotonic() - begin < left / 2
            ):  # else it would be asked again at once
                self._end(
                    UNREACHED,
                    "",
                    f"ssh: {self._host.label}: it does not wait for the end of {self.args[0]}",
                )
            if not self._ended and end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._said

    def kill(self) -> None:
        """End it, as far as the host is reached."""
        if not self._ended:
            self._ask(0.0, "drop", number=self._number)
            self._end(-9, "", "")

    def _ask(self, more: float, op: str, **fields: Any) -> dict[str, Any]:
        try:
            session = self._host.session()
            if op != "run" and session is not self._session:
                self._end(UNREACHED, "", f"ssh: {self._host.label}: the connection broke")
                return {}
            self._session = session
            answer, data = session.ask(op, timeout=self._host.timeout + more, **fields)
        except HostError as error:
            self._end(UNREACHED, "", f"ssh: {error.message}")
            return {}
        if "number" in answer:
            self._number = answer["number"]
        elif "code" in answer and "out" in answer:
            out, err = data[: answer["out"]], data[answer["out"] :]
            self._end(
                answer["code"], *(text.decode("utf-8", "surrogateescape") for text in (out, err))
            )
        elif op != "drop" and "absent" not in answer:
            self._end(
                UNREACHED,
                "",
                f"ssh: {self._host.label}: it answers nonsense: neither an end of {self.args[0]} nor that it runs",
            )
        found: dict[str, Any] = answer
        return found

    def _end(self, code: int, out: str, err: str) -> None:
        self._ended, self.returncode, self._said = True, code, (out, err)


class LoginHosts:
    """All login hosts of this process; each is reached when it is first asked."""

    def __init__(self) -> None:
        self._visits: Visits | None = None
        self._hosts: dict[Login, LoginHost] = {}

    def host(self, login: Login) -> LoginHost:
        """Return the one object for a login host."""
        if self._visits is None:
            self._visits = Visits(_warn, lambda: node_zip.node_zip(node_zip.cache_directory()))
        if login not in self._hosts:
            self._hosts[login] = LoginHost(self._visits, login)
        return self._hosts[login]

    def look(self, records: Sequence[Record]) -> dict[str, str]:
        """Bring what is new of jobs, with one question to each login host; return why by the ids of
        jobs whose host was not reached.
        """
        groups: dict[Login, list[Record]] = {}
        for record in records:
            login = of_record(record)
            if login is not None:
                groups.setdefault(login, []).append(record)
        hosts = {login: self.host(login) for login in groups}
        if len(groups) == 1:  # as almost always: Ctrl-C then meets the question itself
            for login, group in groups.items():
                try:
                    hosts[login].look(group)
                except HostError as error:
                    return {record.job_id: error.message for record in group}
            return {}
        outcome = for_each(list(groups), lambda login: hosts[login].look(groups[login]))
        return {
            record.job_id: error.message
            for login, error in outcome.errors.items()
            for record in groups[login]
        }

    def close(self) -> None:
        """Hang up on all hosts; jobs live on."""
        if self._visits is not None:
            self._visits.close()
            self._visits = None
        self._hosts.clear()


def _warn(text: str) -> None:
    logging.getLogger("clusterjob").warning("clusterjob: %s", sanitize(text))
