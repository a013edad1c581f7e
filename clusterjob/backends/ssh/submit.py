"""A job brought to its hosts: all are checked, then all are given what they need, then they find
each other, then all start.

Nothing is started while a host is unfit, and every host that is unfit is named. What fails on the
way leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clusterjob.backends.ssh.coordinator_address import meet
from clusterjob.core.snapshot import Snapshot
from clusterjob.errors import HostError, SubmitError
from clusterjob.remote.job_bundle import JobBundle
from clusterjob.remote.pool import Outcome, complaint, for_each
from clusterjob.remote.session import Session
from clusterjob.remote.sessions import Place, Visits

_MARGIN = 50_000_000  # bytes that are to be free beyond what is sent: logs have to go somewhere
_SLOW = 600.0  # seconds for answers that may take long: setup lines, a large copy on a slow disk
_UP_PAUSE = 0.02
_FAREWELL_TIMEOUT = 10.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Consignment:
    """What the hosts get.

    Attributes:
        job_id: the job's id.
        files: (name, mode, content) for the job's directory on each host.
        script: the name of the one that starts a node.
        environments: for each node the variables that its script is started with.
        workdir: where the workers start: relative to the job's directory, or absolute.
        snapshot: the code; None where a shared disk has it.
        needs_torch: whether an interpreter without torch is unfit.
        ports: where node 0 may listen, in order.
        patience: seconds that setup lines may take until the agents are up.
        grace: the job's own, for an agent that has to be stopped again.
        gpus: which cards of each host: numbers, or ``auto``; empty for any.
        gpus_per_node: how many; None if the job does not ask for GPUs.
        require_gpus: whether a host with too few is unfit, where any would do; else the job is a
            rehearsal on the CPU there.
    """

    job_id: str
    files: tuple[tuple[str, int, bytes], ...]
    script: str
    environments: tuple[Mapping[str, str], ...]
    workdir: str
    snapshot: Snapshot | None
    needs_torch: bool
    ports: Sequence[int]
    patience: float
    grace: float
    gpus: str = ""
    gpus_per_node: int | None = None
    require_gpus: bool = False


class Submission:
    """One job on its way to its hosts.

    Args:
        visits: the sessions with the hosts.
        place: where they are.
        goods: what they get.
        progress: told (node, bytes sent, bytes to be sent) as code is sent.
        warn: told lines that the user should see.
        unwanted: whether somebody has wished meanwhile that the job end.
    """

    def __init__(
        self,
        visits: Visits,
        place: Place,
        goods: Consignment,
        progress: Callable[[int, int, int], None],
        warn: Callable[[str], None],
        unwanted: Callable[[], bool],
    ) -> None:
        self._visits = visits
        self._place = place
        self._goods = goods
        self._progress = progress
        self._warn = warn
        self._unwanted = unwanted
        self._nodes = range(len(place.hosts))
        self._reached_at = ""
        self._devices: dict[int, str | None] = {}
        self._stop = threading.Event()
        self._seen: set[int] = set()  # nodes whose hosts may have something of the job

    def run(self) -> str:
        """Bring the job to its hosts and start it; return node 0's address as the other nodes reach
        it.

        Raises:
            SubmitError: hosts are unfit, each of which is named; nothing is left on any of them.
        """
        try:
            self._check()
            self._everywhere(self._send, "put")
            if self._place.setup:
                self._everywhere(self._check_after_setup, "fit")
            address = self._meet()
            self._ask_whether_wanted()
            self._everywhere(lambda node, session: self._start(node, session, address), "start")
            self._ask_whether_wanted()
        except BaseException:
            self._stop.set()
            self.withdraw()
            raise
        return address

    def withdraw(self) -> None:
        """Stop what was started, and take away what was put; a host that is not reached keeps it."""

        def work(node: int) -> None:
            if node not in self._seen:
                return
            session = self._visits.session(self._place, node)
            self._ask(
                session,
                node,
                "cancel",
                grace=self._goods.grace,
                timeout=self._goods.grace + _FAREWELL_TIMEOUT,
            )
            self._ask(session, node, "remove", timeout=_FAREWELL_TIMEOUT)

        for_each(self._nodes, work)

    # -- the phases ----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        goods = self._goods
        need = (
            _MARGIN
            + sum(len(data) for _, _, data in goods.files)
            + 2 * (goods.snapshot.size if goods.snapshot else 0)
        )

        def work(node: int) -> dict[str, Any]:
            session = self._visits.session(self._place, node)
            answer, _ = session.ask(
                "check", need=need, torch=goods.needs_torch, own=not self._place.setup
            )
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
                    str(self._place.hosts[node]), why, hint="a host can be one node of a job alone"
                )
        if self._goods.gpus_per_node:
            fit = [node for node in self._nodes if node not in outcome.errors]
            reserved = for_each(
                fit,
                lambda node: self._reserve(node, self._visits.session(self._place, node)),
                stop=self._stop,
            )
            outcome.errors |= reserved.errors
        self._insist(outcome)
        self._reached_at = outcome.results[0]["reached_at"]

    def _reserve(self, node: int, session: Session) -> None:
        """Have the host choose the node's cards; they are the job's until its last process there is
        gone.
        """
        goods = self._goods
        answer = self._ask(
            session, node, "reserve", gpus=goods.gpus, count=goods.gpus_per_node, timeout=_SLOW
        )
        if not answer["short"]:
            self._devices[node] = answer["devices"]
        elif goods.gpus or goods.require_gpus:
            hint = (
                ""
                if goods.gpus
                else "without --require-gpus the workers run on the CPU, as a rehearsal"
            )
            raise HostError(session.connection.target.label, answer["short"], hint=hint)
        else:
            self._devices[node] = ""
            self._warn(
                f"{session.connection.target.label}: {answer['short']}: a rehearsal, with the workers on the CPU and gloo"
            )

    def _send(self, node: int, session: Session) -> None:
        goods = self._goods
        delivery = JobBundle(
            session, goods.job_id, node=node, progress=partial(self._progress, node)
        )
        delivery.put(goods.files)
        if goods.snapshot is not None:
            delivery.land(goods.snapshot)

    def _check_after_setup(self, node: int, session: Session) -> None:
        place = self._place
        answer = self._ask(
            session, node, "fit", python=place.python, setup=list(place.setup),
            workdir=self._goods.workdir, torch=self._goods.needs_torch, timeout=_SLOW,
        )  # fmt: skip
        if answer["errors"]:
            raise HostError(session.connection.target.label, "; ".join(answer["errors"]))

    def _meet(self) -> str:
        """Return node 0's address: one of its own, by its kernel's word, at which every other node
        has just reached it.

        Raises:
            SubmitError: there is none.
        """
        if len(self._nodes) == 1:
            return LOOPBACK
        return meet(
            self._visits,
            self._place,
            ports=self._goods.ports,
            likely=self._reached_at,
            stop=self._stop,
        )

    def _start(self, node: int, session: Session, address: str) -> None:
        goods = self._goods
        if self._stop.is_set():
            raise HostError(session.connection.target.label, "given up")
        env = {**goods.environments[node], "CLUSTERJOB_MASTER_ADDR": address}
        if (devices := self._devices.get(node)) is not None:
            env["CUDA_VISIBLE_DEVICES"] = devices
        self._ask(session, node, "start", script=goods.script, env=env)
        end = time.monotonic() + goods.patience
        pause = _UP_PAUSE
        while not (answer := self._ask(session, node, "up"))["up"]:
            if answer["why"]:
                raise HostError(session.connection.target.label, answer["why"])
            if self._stop.is_set() or time.monotonic() > end:
                raise HostError(
                    session.connection.target.label,
                    f"its script has not come to the agent within {goods.patience:g} s",
                )
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _ask_whether_wanted(self) -> None:
        """Before the start and after it: a wish from elsewhere finds no agent that it could tell
        while there is none.
        """
        if self._unwanted():
            raise SubmitError("the job was cancelled while it was being submitted")

    # -- all at once ---------------------------------------------------------------------------------------------------

    def _ask(self, session: Session, node: int, op: str, **more: Any) -> dict[str, Any]:
        answer, _ = session.ask(op, job=self._goods.job_id, node=node, **more)
        found: dict[str, Any] = answer
        return found

    def _everywhere(self, work: Callable[[int, Session], None], what: str) -> None:  # noqa: ARG002 - names the phase in a traceback
        self._insist(
            for_each(
                self._nodes,
                lambda node: work(node, self._visits.session(self._place, node)),
                stop=self._stop,
            )
        )

    def _insist(self, outcome: Outcome[int, Any]) -> None:
        if outcome.errors:
            errors = [outcome.errors[node] for node in sorted(outcome.errors)]
            raise SubmitError(*complaint(errors, len(self._nodes))) from errors[0]
