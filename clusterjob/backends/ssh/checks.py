"""Check hosts for `clusterjob doctor`: connection, machine and interpreter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from clusterjob.core import python_env
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import (
    CheckFinding,
    CheckStep,
    failed,
    listed,
    of_hosts,
    ok,
    unknown,
    warning,
)
from clusterjob.remote.host_probe import HostReport, probe_hosts
from clusterjob.remote.pool import for_each
from clusterjob.remote.sessions import Place, Sessions

_SLOW = 600.0  # maximum seconds for setup lines and the import of torch
_MAX_AHEAD = 30.0  # maximum seconds between the clocks of two machines


class Hosts:
    """The doctor checks of a job's hosts.

    Args:
        sessions: the sessions with the hosts.
        place: the hosts of the job.
        spec: the job.
        need_torch: whether the job needs torch.
    """

    def __init__(
        self, sessions: Sessions, place: Place, spec: JobSpec, *, need_torch: bool
    ) -> None:
        self._sessions = sessions
        # With a setup line (":" does nothing), the host server runs on any Python that is new
        # enough; it then checks the job's own interpreter.
        self._place = replace(place, setup=(":", *place.setup))
        self._spec = spec
        self._need_torch = need_torch
        self._all: list[HostReport] = []
        self._reached: dict[int, HostReport] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def check_steps(self) -> list[CheckStep]:
        """Return the checks in the order in which they run."""
        own = [
            CheckStep("interpreter", self._interpreter),
            CheckStep(
                "torch",
                lambda: self._of_answered(
                    lambda answer, _: fitness.torch(answer, needed=self._need_torch)
                ),
            ),
            CheckStep("versions", self._versions),
            CheckStep(
                "start",
                lambda: self._of_answered(
                    lambda answer, _: fitness.start(answer, self._spec.start), "torch"
                ),
            ),
            CheckStep("GPUs", lambda: self._of_answered(self._gpus, "torch")),
        ]
        if python_env.travels(self._spec):
            own = [CheckStep("interpreter", lambda: [fitness.prepared(self._spec)])]
        return [
            CheckStep("reached", self._probe),
            CheckStep("machines", self._machines),
            *own,
            CheckStep(
                "disks",
                lambda: self._of_reached(
                    lambda report: fitness.space(report.free or 0, report.home)
                ),
            ),
            CheckStep("clock", lambda: self._of_reached(_clock)),
        ]

    def _probe(self) -> Iterator[CheckFinding]:
        self._all = probe_hosts(self._sessions, self._place, own=False)
        self._reached = {node: report for node, report in enumerate(self._all) if report.machine}
        for report in self._all:
            if report.error:
                yield failed(
                    f"{report.host}: {report.error}",
                    report.hint or f"`ssh {report.host}` has to work, without a password",
                )
        if fit := [report for report in self._all if not report.error]:
            yield ok(listed(f"{report.host} ({report.address})" for report in fit))

    def _of_reached(self, check: Callable[[HostReport], CheckFinding]) -> Iterator[CheckFinding]:
        yield from of_hosts(
            {report.host: check(report) for report in self._reached.values()}, len(self._all)
        )
        yield from self._unchecked(self._reached)

    def _unchecked(
        self, checked: Collection[int], needs: str = "reached"
    ) -> Iterator[CheckFinding]:
        """Yield one finding that names all hosts that were not checked."""
        if hosts := [report.host for node, report in enumerate(self._all) if node not in checked]:
            yield unknown(f"{listed(hosts)}: not checked: it needs {needs!r}")

    def _machines(self) -> Iterator[CheckFinding]:
        first: dict[str, HostReport] = {}
        for report in self._reached.values():
            if (other := first.setdefault(report.machine, report)) is not report:
                yield failed(
                    f"{report.host}: it is the same machine as {other.host}",
                    "a host can be only one node of a job",
                )
        if len(first) == len(self._reached) > 0:
            yield ok(listed(f"{report.host} is {report.name}" for report in self._reached.values()))
        yield from self._unchecked(self._reached)

    # -- interpreters ------------------------------------------------------------------------------

    def _interpreter(self) -> Iterator[CheckFinding]:
        spec = self._spec
        request: dict[str, Any] = {
            "job": "",
            "python": spec.python,
            "setup": list(spec.setup),
            "env": dict(spec.env),
            "workdir": "~" if spec.sync else str(spec.workdir),
        }
        outcome = for_each(
            list(self._reached),
            lambda node: self._sessions.session(self._place, node).ask(
                "interpreter", imports=True, timeout=_SLOW, **request
            )[0],
        )
        found = {
            self._all[node].host: failed(error.why, error.hint)
            for node, error in outcome.errors.items()
        }
        for node, answer in outcome.results.items():
            finding = fitness.interpreter(answer)
            if answer["setup"] and spec.sync:
                finding = unknown(
                    f"{finding.message}; "
                    "the setup lines may need the job's code, which is not sent yet",
                    finding.hint,
                )
            elif not answer["unfit"]:
                self._answers[node] = answer
            found[self._all[node].host] = finding
        yield from of_hosts(found, len(self._all))
        yield from self._unchecked(self._reached)

    def _of_answered(
        self,
        check: Callable[[Mapping[str, Any], HostReport], CheckFinding],
        needs: str = "interpreter",
    ) -> Iterator[CheckFinding]:
        """Check each host whose interpreter has answered, and has torch if `needs` is "torch"."""
        found = {
            node: check(answer, self._all[node])
            for node, answer in sorted(self._answers.items())
            if needs != "torch" or fitness.has_torch(answer)
        }
        yield from of_hosts(
            {self._all[node].host: finding for node, finding in found.items()}, len(self._all)
        )
        yield from self._unchecked(found, needs)

    def _gpus(self, answer: Mapping[str, Any], report: HostReport) -> CheckFinding:
        return fitness.gpus(
            len(report.gpus),
            answer,
            wanted=self._spec.resources.gpus_per_node,
            required=self._spec.require_gpus or bool(self._spec.gpus),
        )

    def _versions(self) -> Iterator[CheckFinding]:
        """Compare the versions of torch and Python on all hosts.

        A process group with different builds of torch hangs or returns wrong results.
        """
        alike = True
        for what in ("torch", "Python"):
            versions: dict[str, list[str]] = {}
            for node, answer in self._answers.items():
                version = ".".join(map(str, answer["version"][:2]))
                if what == "torch":
                    version = str(answer["facts"]["torch"]) if fitness.has_torch(answer) else ""
                if version:
                    versions.setdefault(version, []).append(self._all[node].host)
            if len(versions) > 1:
                alike = False
                finding = (
                    failed
                    if what == "torch"
                    and len({version.partition("+")[0] for version in versions}) > 1
                    else warning
                )
                yield finding(
                    f"{what} differs: "
                    + "; ".join(f"{version} on {listed(on)}" for version, on in versions.items()),
                    "use the same environment on every host; --python selects it",
                )
        if not self._answers:
            yield unknown("not checked: it needs 'interpreter'")
        elif alike:
            yield ok(
                "the same on all hosts" if len(self._answers) > 1 else "there is only one host"
            )


def _clock(report: HostReport) -> CheckFinding:
    ahead = report.ahead or 0.0
    if abs(ahead) < _MAX_AHEAD:
        return ok("agrees with this machine's")
    # Rounded, because hosts with equal text share one line.
    much = (
        f"{round(abs(ahead) / 60)} min" if abs(ahead) >= 120 else f"{round(abs(ahead), -1):.0f} s"
    )
    return warning(
        f"about {much} {'ahead of' if ahead > 0 else 'behind'} this machine's",
        "logs and results carry these times; run chrony or ntpd on the hosts",
    )
