"""Hosts before there is a job, looked at for `doctor`: the survey of them, their interpreters, and
whether they reach each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from clusterjob.backends.ssh.coordinator_address import meet
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import Finding, Look, failed, listed, of_hosts, ok, unknown, warning
from clusterjob.errors import HostError
from clusterjob.node.environments import candidate_ports
from clusterjob.remote.host_probe import HostReport, survey
from clusterjob.remote.pool import for_each
from clusterjob.remote.sessions import Place, Visits

_SLOW = 600.0  # seconds for setup lines and the import of torch
_MOST_AHEAD = 30.0  # seconds that clocks may differ


class Hosts:
    """The hosts of a job.

    Args:
        visits: the sessions.
        place: where the job's nodes are.
        spec: the job.
        need_torch: whether it makes no sense without torch.
    """

    def __init__(self, visits: Visits, place: Place, spec: JobSpec, *, need_torch: bool) -> None:
        self._visits = visits
        # A setup line that does nothing: the visit then takes any Python that is new enough, so
        # that the job's can be asked after.
        self._place = replace(place, setup=(":", *place.setup))
        self._spec = spec
        self._need_torch = need_torch
        self._all: list[HostReport] = []
        self._reached: dict[int, HostReport] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def looks(self) -> list[Look]:
        """Return the looks at them."""
        spec = self._spec
        return [
            Look("reached", self._survey),
            Look("machines", self._machines),
            Look("interpreter", self._interpreter),
            Look(
                "torch",
                lambda: self._judged(
                    lambda answer, _: fitness.torch(answer, needed=self._need_torch)
                ),
            ),
            Look("versions", self._versions),
            Look(
                "start",
                lambda: self._judged(lambda answer, _: fitness.start(answer, spec.start), "torch"),
            ),
            Look("GPUs", lambda: self._judged(self._gpus, "torch")),
            Look(
                "disks",
                lambda: self._of_reached(
                    lambda report: fitness.space(report.free or 0, report.home)
                ),
            ),
            Look("clock", lambda: self._of_reached(_clock)),
            Look("rendezvous", self._meet),
        ]

    def _survey(self) -> Iterator[Finding]:
        self._all = survey(self._visits, self._place, own=False)
        self._reached = {node: report for node, report in enumerate(self._all) if report.machine}
        for report in self._all:
            if report.error:
                yield failed(
                    f"{report.host}: {report.error}",
                    report.hint or f"`ssh {report.host}` has to work, without a password",
                )
        fit = [report for report in self._all if not report.error]
        if fit:
            yield ok(listed(f"{report.host} ({report.address})" for report in fit))

    def _of_reached(self, judge: Callable[[HostReport], Finding]) -> Iterator[Finding]:
        yield from of_hosts(
            {report.host: judge(report) for report in self._reached.values()}, len(self._all)
        )
        yield from self._absent(node for node in range(len(self._all)) if node not in self._reached)

    def _absent(
        self, nodes: Iterable[int], why: str = "not checked: it needs 'reached'"
    ) -> Iterator[Finding]:
        hosts = [self._all[node].host for node in nodes]
        if hosts:
            yield unknown(f"{listed(hosts)}: {why}")

    def _machines(self) -> Iterator[Finding]:
        first: dict[str, HostReport] = {}
        for report in self._reached.values():
            other = first.setdefault(report.machine, report)
            if other is not report:
                yield failed(
                    f"{report.host}: it is the same machine as {other.host}",
                    "a host can be one node of a job alone",
                )
        if len(first) == len(self._reached) > 0:
            yield ok(listed(f"{report.host} is {report.name}" for report in self._reached.values()))
        yield from self._absent(node for node in range(len(self._all)) if node not in self._reached)

    # -- their interpreters --------------------------------------------------------------------------------------------

    def _interpreter(self) -> Iterator[Finding]:
        spec = self._spec
        workdir = "~" if spec.sync else str(spec.workdir)
        request: dict[str, Any] = {
            "python": spec.python,
            "setup": list(spec.setup),
            "env": dict(spec.env),
            "workdir": workdir,
        }

        def ask(node: int) -> Mapping[str, Any]:
            answer, _ = self._visits.session(self._place, node).ask(
                "facts", timeout=_SLOW, **request
            )
            found: Mapping[str, Any] = answer
            return found

        outcome = for_each(list(self._reached), ask)
        found = {
            self._all[node].host: failed(error.why, error.hint)
            for node, error in outcome.errors.items()
        }
        for node, answer in outcome.results.items():
            finding = fitness.interpreter(answer)
            if answer["setup"] and spec.sync:  # which may need the code: a job has it there by then
                finding = unknown(
                    f"{finding.words}; a job's setup lines find its code, which is not there yet",
                    finding.hint,
                )
            elif not answer["unfit"]:
                self._answers[node] = answer
            found[self._all[node].host] = finding
        yield from of_hosts(found, len(self._all))
        yield from self._absent(node for node in range(len(self._all)) if node not in self._reached)

    def _judged(
        self, judge: Callable[[Mapping[str, Any], HostReport], Finding], needs: str = "interpreter"
    ) -> Iterator[Finding]:
        """Judge every host whose interpreter has answered, and found torch if that is needed."""
        found: dict[str, Finding] = {}
        absent = []
        for node, report in enumerate(self._all):
            answer = self._answers.get(node)
            if answer is None or (needs == "torch" and not fitness.has_torch(answer)):
                absent.append(node)
            else:
                found[report.host] = judge(answer, report)
        yield from of_hosts(found, len(self._all))
        yield from self._absent(absent, f"not checked: it needs {needs!r}")

    def _gpus(self, answer: Mapping[str, Any], report: HostReport) -> Finding:
        wanted = self._spec.resources.gpus_per_node
        return fitness.gpus(
            len(report.gpus),
            answer,
            wanted=wanted,
            required=self._spec.require_gpus or bool(self._spec.gpus),
        )

    def _versions(self) -> Iterator[Finding]:
        """Compare what has to be alike: one process group of several builds of torch hangs, or
        answers wrongly.
        """
        alike = True
        for what, of in (("torch", _torch_of), ("Python", _python_of)):
            versions: dict[str, list[str]] = {}
            for node, answer in self._answers.items():
                if version := of(answer):
                    versions.setdefault(version, []).append(self._all[node].host)
            if len(versions) > 1:
                alike = False
                words = "; ".join(
                    f"{version} on {listed(hosts)}" for version, hosts in versions.items()
                )
                judge = (
                    failed
                    if what == "torch"
                    and len({version.partition("+")[0] for version in versions}) > 1
                    else warning
                )
                yield judge(
                    f"{what} differs: {words}",
                    "the same environment on every host: --python names it",
                )
        if not self._answers:
            yield unknown("not checked: it needs 'interpreter'")
        elif alike:
            yield ok(
                "the same on all hosts" if len(self._answers) > 1 else "there is one host alone"
            )

    # -- the way between them ------------------------------------------------------------------------------------------

    def _meet(self) -> Iterator[Finding]:
        distinct: dict[str, int] = {}
        for node, report in self._reached.items():
            distinct.setdefault(report.machine, node)
        nodes = sorted(distinct.values())
        if len(self._place.hosts) == 1:
            yield ok("one host needs none")
            return
        if len(nodes) < 2:
            yield unknown("not checked: it needs two hosts that are reached")
            return
        lead = self._reached[nodes[0]]
        place = replace(self._place, hosts=tuple(self._place.hosts[node] for node in nodes))
        try:
            address = meet(
                self._visits,
                place,
                ports=candidate_ports.candidates("doctor", 0),
                likely=lead.reached_at,
            )
        except HostError as error:
            yield failed(error.message, error.hint)
            return
        yield ok(
            f"{lead.host} is reached at {address} by {listed(self._reached[node].host for node in nodes[1:])}"
        )
        yield from self._absent(node for node in range(len(self._all)) if node not in self._reached)


def _torch_of(answer: Mapping[str, Any]) -> str:
    return str(answer["facts"]["torch"]) if fitness.has_torch(answer) else ""


def _python_of(answer: Mapping[str, Any]) -> str:
    return ".".join(map(str, answer["version"][:2]))


def _clock(report: HostReport) -> Finding:
    ahead = report.ahead or 0.0
    if abs(ahead) < _MOST_AHEAD:
        return ok("as here")
    much = (
        f"{round(abs(ahead) / 60)} min" if abs(ahead) >= 120 else f"{round(abs(ahead), -1):.0f} s"
    )  # hosts that are alike are one line
    words = f"about {much} {'ahead of' if ahead > 0 else 'behind'} this machine's"
    return warning(
        words, "logs and results carry these times: chrony or ntpd keeps clocks together"
    )
