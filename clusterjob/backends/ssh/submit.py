"""Submit a job to its hosts in three phases: check, send, start.

No agent starts while any host is unfit, and the error names every unfit host. If the user has named
more hosts than nodes, another host takes the place of an unfit one. A failed submission leaves no
files or processes behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from clusterjob.backends import shared
from clusterjob.backends.ssh.planning import SCRIPT, SshOptions
from clusterjob.core import python_env
from clusterjob.core.plans import Plan
from clusterjob.core.snapshot import Snapshot
from clusterjob.errors import HostError, SubmitError
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import CODE
from clusterjob.node.options import GRACE
from clusterjob.remote.job_bundle import JobBundle
from clusterjob.remote.pool import TaskOutcome, complaint, for_each
from clusterjob.remote.progress import HostProgress
from clusterjob.remote.session import Session
from clusterjob.remote.sessions import Place, Sessions

_SLOW = 600.0  # maximum seconds for slow requests: setup lines, a large copy on a slow disk
_FIRST_PAUSE = 0.02  # seconds between the first two requests for the state of a started script
_WITHDRAW_TIMEOUT = 10.0  # seconds for a host to stop or remove a job that failed to start
_LOOPBACK = "127.0.0.1"
_MAX_ADDRESSES = 6  # of node 0; their text fits into a host name


class Submission:
    """The submission of one job to its hosts.

    Args:
        sessions: the sessions with the hosts.
        place: the hosts and their connection settings.
        plan: the job.
        code: the code to send; None if the hosts have it on a shared disk.
        progress: shows the hosts that were reached, and the code that was sent.

    Attributes:
        place: the hosts, after the replacement of those that cannot be used.
    """

    def __init__(
        self,
        sessions: Sessions,
        place: Place,
        plan: Plan,
        code: Snapshot | None,
        progress: HostProgress,
    ) -> None:
        self._sessions = sessions
        self.place = place
        self._plan = plan
        self._others = list(plan.spec.hosts[len(place.hosts) :])
        self._code = code
        self._progress = progress
        self._files = shared.sent_files(plan)
        self._prepares = python_env.travels(plan.spec)  # after the start, by the node's script
        self._needs_torch = (
            SshOptions.of(plan.spec.options).need_torch
            and plan.spec.program.is_python
            and not self._prepares
        )
        self._archive = python_env.read(plan.spec) if plan.spec.sync else None
        self._nodes = range(len(place.hosts))
        self._devices: dict[int, str] = {}  # CUDA_VISIBLE_DEVICES of nodes with reserved GPUs
        self._stop = threading.Event()
        self._seen: set[int] = set()  # nodes whose hosts may have files of the job

    def run(self) -> str:
        """Send the job to its hosts and start it.

        Returns:
            Node 0's addresses, with commas between them; the agents try each.

        Raises:
            SubmitError: some hosts are unfit; the message names each of them, and no files or
                processes of the job are left on any host.
        """
        try:
            addresses = self._check()
            self._on_all(self._send)
            if self.place.setup and not self._prepares:
                self._on_all(self._check_after_setup)
            address = ",".join(addresses) if len(self._nodes) > 1 else _LOOPBACK
            self._check_not_cancelled()
            self._on_all(partial(self._start, address=address))
            self._check_not_cancelled()
        except BaseException:
            self._stop.set()
            for_each(self._nodes, self._withdraw)
            raise
        return address

    def _withdraw(self, node: int) -> None:
        """Stop the agent and remove the files; an unreachable host keeps them."""
        if node in self._seen:
            session = self._sessions.session(self.place, node)
            job, grace = self._plan.job_id, self._plan.spec.grace or GRACE
            session.ask(
                "cancel", job=job, node=node, grace=grace, timeout=grace + _WITHDRAW_TIMEOUT
            )
            session.ask("remove", job=job, timeout=_WITHDRAW_TIMEOUT)

    # -- the phases --------------------------------------------------------------------------------

    def _check(self) -> list[str]:
        """Check all hosts and reserve their GPUs; return node 0's addresses.

        Raises:
            SubmitError: some hosts are unfit.
        """
        need = shared.LOG_SPACE + sum(len(data) for _, _, data in self._files)
        if self._code is not None:
            need += 2 * self._code.size
        if self._archive is not None:
            need += self._archive.size

        def check(node: int) -> dict[str, Any]:
            session = self._sessions.session(self.place, node)
            answer, _ = session.ask(
                "check", need=need, torch=self._needs_torch, own=not self.place.setup
            )
            if answer["errors"]:
                raise HostError(session.label, "; ".join(answer["errors"]))
            if node == 0 and len(self._nodes) > 1 and not answer["addresses"]:
                raise HostError(session.label, "it has no address for the other hosts")
            self._seen.add(node)
            self._progress.reached()
            return answer

        nodes: Sequence[int] = self._nodes
        found: dict[int, dict[str, Any]] = {}
        while nodes:
            outcome = for_each(nodes, check, stop=self._stop)
            found |= outcome.results
            outcome.errors |= self._same_machines(found, nodes)
            if self._plan.spec.resources.gpus_per_node or self._plan.spec.gpus:
                good = [node for node in nodes if node not in outcome.errors]
                outcome.errors |= for_each(good, self._reserve, stop=self._stop).errors
            for node in outcome.errors:
                found.pop(node, None)
            nodes = self._replace(outcome.errors)
            if not nodes:
                _raise_errors(outcome, len(self._nodes))
        return list(found[0]["addresses"][:_MAX_ADDRESSES])

    def _same_machines(
        self, found: Mapping[int, Mapping[str, Any]], nodes: Sequence[int]
    ) -> dict[int, HostError]:
        """Return an error for each of these nodes whose machine another node has."""
        first: dict[str, int] = {}
        errors = {}
        for node in sorted(found, key=lambda node: (node in nodes, node)):
            other = first.setdefault(found[node]["identity"], node)
            if other != node:
                errors[node] = HostError(
                    str(self.place.hosts[node]),
                    f"it is the same machine as {self.place.hosts[other]}",
                    hint="a host can be only one node of a job",
                )
        return errors

    def _replace(self, errors: Mapping[int, HostError]) -> list[int]:
        """Give other hosts to the nodes with errors; return these nodes.

        Another host must have the same number of slots. Without one for each, return no node.
        """
        hosts, others = list(self.place.hosts), list(self._others)
        lines = []
        for node, error in sorted(errors.items()):
            other = next((one for one in others if one.slots == hosts[node].slots), None)
            if other is None or self._stop.is_set():
                return []
            others.remove(other)
            lines.append(f"{error.message}; {other} takes its place")
            hosts[node] = other
        for_each(list(errors), self._withdraw)
        self._seen.difference_update(errors)
        self.place, self._others = replace(self.place, hosts=tuple(hosts)), others
        for line in lines:
            shared.warn(line)
        return sorted(errors)

    def _reserve(self, node: int) -> None:
        """Reserve GPUs on a node's host until the last process of the job on that host has ended.

        Raises:
            HostError: the host has too few GPUs, and the job requires them.
        """
        spec, session = self._plan.spec, self._sessions.session(self.place, node)
        answer, _ = session.ask(
            "reserve",
            job=self._plan.job_id,
            wanted=spec.gpus,
            count=spec.resources.gpus_per_node or 0,
            timeout=_SLOW,
        )
        if not answer["short"]:
            if answer["devices"] is not None:
                self._devices[node] = answer["devices"]
        elif spec.gpus:
            raise HostError(session.label, answer["short"])
        elif spec.require_gpus:
            raise HostError(
                session.label,
                answer["short"],
                hint="--no-require-gpus runs the workers on the CPU, as a rehearsal",
            )
        else:
            self._devices[node] = ""
            shared.warn(
                f"{session.label}: {answer['short']}: "
                "a rehearsal, with the workers on the CPU and gloo"
            )

    def _send(self, node: int, session: Session) -> None:
        bundle = JobBundle(
            session, self._plan.job_id, node=node, progress=partial(self._progress, node)
        )
        bundle.put(self._files)
        if self._code is not None:
            bundle.install(self._code)
        env = self._archive
        if env is not None and env.source is not None:
            bundle.send_archive(env.source, env.digest, size=env.size)

    def _check_after_setup(self, _node: int, session: Session) -> None:
        """Check the job's interpreter after its setup lines, which may need the job's code."""
        spec = self._plan.spec
        answer, _ = session.ask(
            "interpreter",
            job=self._plan.job_id,
            python=self.place.python,
            setup=list(self.place.setup),
            env={},
            workdir=CODE if spec.sync else str(spec.workdir),
            timeout=_SLOW,
        )
        why = answer["unfit"]
        if not why and self._needs_torch and not answer["torch"]:
            why = f"no torch: {answer['executable']} does not find it"
        if why:
            raise HostError(session.label, why)

    def _start(self, node: int, session: Session, address: str) -> None:
        """Start the script of a node, and wait until its agent runs."""
        if self._stop.is_set():
            raise HostError(session.label, "the submission was stopped")
        job, timeout = self._plan.job_id, self._plan.spec.join_timeout
        env = {
            **self._plan.commands[node].env,
            "CLUSTERJOB_HOST": str(self.place.hosts[node]),
            "CLUSTERJOB_MASTER_ADDR": address,
        }
        if node in self._devices:
            env["CUDA_VISIBLE_DEVICES"] = self._devices[node]
        session.ask("start", job=job, node=node, script=SCRIPT, env=env)
        end = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while True:
            answer, _ = session.ask("up", job=job, node=node)
            if answer["up"]:
                return
            if answer["why"]:
                raise HostError(session.label, answer["why"])
            if self._stop.is_set() or time.monotonic() > end:
                raise HostError(
                    session.label, f"its script did not start the agent within {timeout:g} s"
                )
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)

    def _check_not_cancelled(self) -> None:
        """Raise SubmitError if the job was cancelled; called before and after the start.

        Before the agents run, a cancel from another process does not reach them.
        """
        if ends.cancelled(self._plan.job_dir):
            raise SubmitError("the job was cancelled while it was being submitted")

    def _on_all(self, work: Callable[[int, Session], None]) -> None:
        """Run one phase on all hosts in parallel.

        Raises:
            SubmitError: the phase fails on some hosts.
        """
        _raise_errors(
            for_each(
                self._nodes,
                lambda node: work(node, self._sessions.session(self.place, node)),
                stop=self._stop,
            ),
            len(self._nodes),
        )


def _raise_errors(outcome: TaskOutcome[int, Any], total: int) -> None:
    """Raise one SubmitError that names all hosts with errors, out of `total` hosts."""
    if outcome.errors:
        errors = [outcome.errors[node] for node in sorted(outcome.errors)]
        raise SubmitError(*complaint(errors, total)) from errors[0]
