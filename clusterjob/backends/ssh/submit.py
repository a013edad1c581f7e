"""Submit a job to its hosts in four phases: check, send, rendezvous test, start.

No agent starts while any host is unfit, and the error names every unfit host. A failed submission
leaves no files or processes behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clusterjob.backends import shared
from clusterjob.backends.ssh.coordinator_address import meet
from clusterjob.core.snapshot import Snapshot
from clusterjob.errors import HostError, SubmitError
from clusterjob.node.host_server.requests import Cancel, Check, Fit, Remove, Reserve, Start, Up
from clusterjob.remote.job_bundle import JobBundle
from clusterjob.remote.pool import TaskOutcome, complaint, for_each
from clusterjob.remote.session import Session
from clusterjob.remote.sessions import Place, Sessions

_MARGIN = 50_000_000  # free bytes required beyond the size of the sent files, for logs
_SLOW = 600.0  # maximum seconds for slow requests: setup lines, a large copy on a slow disk
_FIRST_PAUSE = 0.02
_WITHDRAW_TIMEOUT = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class HostFiles:
    """The files and settings that a job's hosts get.

    Attributes:
        job_id: the job's id.
        files: (name, mode, content) for the job's directory on each host.
        script: the name of the file in `files` that starts a node.
        environments: the variables of each node's script.
        workdir: the workers' working directory: absolute, or relative to the job's directory.
        snapshot: the code; None if the hosts have it on a shared disk.
        needs_torch: whether an interpreter without torch is unfit.
        ports: ports on which node 0 may listen, in order of preference.
        timeout: maximum seconds until the script has run the setup lines and the agent is up.
        grace: the job's grace period in seconds, used if a started agent must be stopped.
        gpus: the GPUs of each host: numbers, or ``auto``; empty for any.
        gpus_per_node: the number of GPUs; None if the job does not request GPUs.
        require_gpus: whether a host with too few GPUs is unfit when `gpus` is empty; else the
            workers on such a host run on the CPU, as a rehearsal.
    """

    job_id: str
    files: tuple[tuple[str, int, bytes], ...]
    script: str
    environments: tuple[Mapping[str, str], ...]
    workdir: str
    snapshot: Snapshot | None
    needs_torch: bool
    ports: Sequence[int]
    timeout: float
    grace: float
    gpus: str = ""
    gpus_per_node: int | None = None
    require_gpus: bool = False


class Submission:
    """The submission of one job to its hosts.

    Args:
        sessions: the sessions with the hosts.
        place: the hosts and their connection settings.
        files: the job's files and settings.
        progress: called with (node, bytes sent, total bytes) while code is sent.
        cancelled: returns whether the job has been cancelled meanwhile.
    """

    def __init__(
        self,
        sessions: Sessions,
        place: Place,
        files: HostFiles,
        progress: Callable[[int, int, int], None],
        cancelled: Callable[[], bool],
    ) -> None:
        self._sessions = sessions
        self._place = place
        self._goods = files
        self._progress = progress
        self._cancelled = cancelled
        self._nodes = range(len(place.hosts))
        self._reached_at = ""
        self._devices: dict[int, str | None] = {}
        self._stop = threading.Event()
        self._seen: set[int] = set()  # nodes whose hosts may have files of the job

    def run(self) -> str:
        """Send the job to its hosts and start it.

        Returns:
            Node 0's address, which all other nodes reach.

        Raises:
            SubmitError: some hosts are unfit; the message names each of them, and no files or
                processes of the job are left on any host.
        """
        try:
            self._check()
            self._on_all(self._send, "put")
            if self._place.setup:
                self._on_all(self._check_after_setup, "fit")
            address = self._meet()
            self._check_not_cancelled()
            self._on_all(lambda node, session: self._start(node, session, address), "start")
            self._check_not_cancelled()
        except BaseException:
            self._stop.set()
            self.withdraw()
            raise
        return address

    def withdraw(self) -> None:
        """Stop the agents and remove the files; an unreachable host keeps them."""

        def work(node: int) -> None:
            if node not in self._seen:
                return
            session = self._sessions.session(self._place, node)
            session.ask(
                Cancel(self._goods.job_id, node, grace=self._goods.grace),
                timeout=self._goods.grace + _WITHDRAW_TIMEOUT,
            )
            session.ask(Remove(self._goods.job_id), timeout=_WITHDRAW_TIMEOUT)

        for_each(self._nodes, work)

    # -- the phases --------------------------------------------------------------------------------

    def _check(self) -> None:
        files = self._goods
        need = (
            _MARGIN
            + sum(len(data) for _, _, data in files.files)
            + 2 * (files.snapshot.size if files.snapshot else 0)
        )

        def work(node: int) -> dict[str, Any]:
            session = self._sessions.session(self._place, node)
            answer, _ = session.ask(Check(need, torch=files.needs_torch, own=not self._place.setup))
            if answer["errors"]:
                raise HostError(session.connection.target.label, "; ".join(answer["errors"]))
            self._seen.add(node)
            found: dict[str, Any] = answer
            return found

        outcome = for_each(self._nodes, work, stop=self._stop)
        first: dict[str, int] = {}
        for node, answer in outcome.results.items():
            other = first.setdefault(answer["identity"], node)
            if other != node:
                why = f"it is the same machine as {self._place.hosts[other]}"
                outcome.errors[node] = HostError(
                    str(self._place.hosts[node]), why, hint="a host can be only one node of a job"
                )
        if count := self._goods.gpus_per_node:
            fit = [node for node in self._nodes if node not in outcome.errors]
            reserved = for_each(
                fit,
                lambda node: self._reserve(
                    node, self._sessions.session(self._place, node), count=count
                ),
                stop=self._stop,
            )
            outcome.errors |= reserved.errors
        self._raise_errors(outcome)
        self._reached_at = outcome.results[0]["reached_at"]

    def _reserve(self, node: int, session: Session, count: int) -> None:
        """Reserve GPUs for the node on its host until the job's last process there has ended."""
        files = self._goods
        answer, _ = session.ask(Reserve(files.job_id, files.gpus, count), timeout=_SLOW)
        if not answer["short"]:
            self._devices[node] = answer["devices"]
        elif files.gpus or files.require_gpus:
            hint = (
                ""
                if files.gpus
                else "without --require-gpus the workers run on the CPU, as a rehearsal"
            )
            raise HostError(session.connection.target.label, answer["short"], hint=hint)
        else:
            self._devices[node] = ""
            shared.warn(
                f"{session.connection.target.label}: {answer['short']}: "
                "a rehearsal, with the workers on the CPU and gloo"
            )

    def _send(self, node: int, session: Session) -> None:
        files = self._goods
        bundle = JobBundle(session, files.job_id, node=node, progress=partial(self._progress, node))
        bundle.put(files.files)
        if files.snapshot is not None:
            bundle.install(files.snapshot)

    def _check_after_setup(self, _node: int, session: Session) -> None:
        place = self._place
        files = self._goods
        request = Fit(
            files.job_id,
            place.python,
            setup=tuple(place.setup),
            workdir=files.workdir,
            torch=files.needs_torch,
        )
        answer, _ = session.ask(request, timeout=_SLOW)
        if answer["errors"]:
            raise HostError(session.connection.target.label, "; ".join(answer["errors"]))

    def _meet(self) -> str:
        """Return an address of node 0's own interfaces that every other node has just reached.

        Raises:
            SubmitError: there is no such address.
        """
        if len(self._nodes) == 1:
            return LOOPBACK
        return meet(
            self._sessions,
            self._place,
            ports=self._goods.ports,
            likely=self._reached_at,
            stop=self._stop,
        )

    def _start(self, node: int, session: Session, address: str) -> None:
        files = self._goods
        if self._stop.is_set():
            raise HostError(session.connection.target.label, "the submission was stopped")
        env = {**files.environments[node], "CLUSTERJOB_MASTER_ADDR": address}
        if (devices := self._devices.get(node)) is not None:
            env["CUDA_VISIBLE_DEVICES"] = devices
        session.ask(Start(files.job_id, node, script=files.script, env=env))
        end = time.monotonic() + files.timeout
        pause = _FIRST_PAUSE
        while True:
            answer, _ = session.ask(Up(files.job_id, node))
            if answer["up"]:
                return
            if answer["why"]:
                raise HostError(session.connection.target.label, answer["why"])
            if self._stop.is_set() or time.monotonic() > end:
                raise HostError(
                    session.connection.target.label,
                    f"its script did not start the agent within {files.timeout:g} s",
                )
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _check_not_cancelled(self) -> None:
        """Raise SubmitError if the job was cancelled; called before and after the start.

        Before the agents run, a cancel from another process does not reach them.
        """
        if self._cancelled():
            raise SubmitError("the job was cancelled while it was being submitted")

    # -- all hosts in parallel ---------------------------------------------------------------------

    def _on_all(
        self,
        work: Callable[[int, Session], None],
        what: str,  # noqa: ARG002 - names the phase in a traceback
    ) -> None:
        self._raise_errors(
            for_each(
                self._nodes,
                lambda node: work(node, self._sessions.session(self._place, node)),
                stop=self._stop,
            )
        )

    def _raise_errors(self, outcome: TaskOutcome[int, Any]) -> None:
        if outcome.errors:
            errors = [outcome.errors[node] for node in sorted(outcome.errors)]
            raise SubmitError(*complaint(errors, len(self._nodes))) from errors[0]
