"""Doctor checks of a Slurm cluster: its commands, controller, resources, and the job itself."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clusterjob.backends import shared
from clusterjob.backends.slurm import planning, submit
from clusterjob.backends.slurm.client import Client, SlurmOutput, hint
from clusterjob.backends.slurm.status import NAME
from clusterjob.core.plans import Plan
from clusterjob.core.records import Records, home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import CheckFinding, CheckStep, failed, listed, ok, unknown, warning
from clusterjob.doctor.this_machine import directory_checks
from clusterjob.errors import SubmitError
from clusterjob.node.verdict import JobState

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_TIMEOUT = 20.0  # seconds; Slurm's own timeout is 10 s by default
_SLOW = 3.0  # seconds; a slower answer of the controller is a warning
# First release whose srun gives a step only its own resources; clusterjob was built on 22.05.
_OLDEST = (20, 11)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d{1,9})")
_SHOWN = 8  # maximum number of partitions to list if the job names no partition


@dataclass
class Partition:
    """A partition in the output of sinfo."""

    name: str
    is_default: bool
    availability: str
    limit: str
    nodes: dict[str, int] = field(default_factory=dict)
    gpus: int = 0

    @property
    def summary(self) -> str:
        """One line with its state, limits and nodes."""
        states = ", ".join(f"{count} {state}" for state, count in self.nodes.items())
        gpus = f", {self.gpus} GPUs a node" if self.gpus else ""
        return (
            f"{self.name}{' (default)' if self.is_default else ''}: {self.availability},"
            f" {self.describe_limit()}, nodes: {states or 'none'}{gpus}"
        )

    def describe_limit(self) -> str:
        """Return the time limit in words."""
        return "no time limit" if self.limit == "infinite" else f"time limit {self.limit}"

    @property
    def usable(self) -> int:
        """Number of nodes on which jobs can start."""
        return sum(
            count
            for state, count in self.nodes.items()
            if not submit.UNUSABLE.search(state) and not state.endswith("*")  # does not answer
        )


class SlurmCluster:
    """The doctor checks of a Slurm cluster.

    Args:
        spec: the job to check the cluster for.
        host: the login host; None if this machine runs Slurm's commands.
    """

    def __init__(self, spec: JobSpec, host: LoginHost | None) -> None:
        self._spec = spec
        self._host = host
        self._client = Client(host=host)
        self._remote_home = ""
        self._partitions: dict[str, Partition] = {}
        self._config: dict[str, str] = {}

    def check_steps(self) -> list[CheckStep]:
        """Return the checks."""
        login = []
        if self._host is not None:
            login = [
                CheckStep(
                    "login",
                    self._login,
                    hint=f"`ssh {self._host.label}` has to work, without a password",
                )
            ]
        there = tuple(step.name for step in login)
        return [
            *directory_checks(),
            *login,
            CheckStep("commands", self._commands, needs=there),
            CheckStep("controller", self._controller, needs=(*there, "commands")),
            CheckStep("version", self._version, needs=("controller",)),
            CheckStep("partitions", self._show_partitions, needs=("controller",)),
            CheckStep("GPUs", self._gpus, needs=("partitions",)),
            CheckStep("accounting", self._accounting, needs=("controller",)),
            CheckStep("nodes", self._nodes, needs=("directory", *there)),
            CheckStep("job", self._job, needs=("directory", "controller")),
        ]

    # -- access ------------------------------------------------------------------------------------

    def _login(self) -> Iterator[CheckFinding]:
        assert self._host is not None
        answer, _ = self._host.ask("check", need=0, torch=False, own=False)
        self._remote_home = answer["home"]
        for error in answer["errors"]:
            yield failed(
                f"{self._host.label}: {error}",
                "set another directory there with --set remote_home=DIR",
            )
        yield ok(f"{self._host.label} is {answer['host']}, Python {answer['python']}")
        space = fitness.space(answer["free"], f"{answer['home']} there")
        yield CheckFinding(
            space.state,
            space.message,
            hint=space.hint and "set another directory there with --set remote_home=DIR",
        )

    def _commands(self) -> Iterator[CheckFinding]:
        where = " there" if self._host is not None else ""
        absent = [name for name in _COMMANDS if not self._has(name)]
        yield (
            failed(
                f"not on PATH{where}: {', '.join(absent)}",
                "install Slurm's client commands, or load their module",
            )
            if absent
            else ok(f"{', '.join(_COMMANDS)} are on PATH{where}")
        )

    def _has(self, name: str) -> bool:
        if self._host is None:
            return shutil.which(name) is not None
        try:
            self._ask(name, "--version")  # without a configuration it fails, but it is there
            return True
        except SubmitError as error:
            if "configuration" in error.message:
                raise
            return False

    def _controller(self) -> Iterator[CheckFinding]:
        submit.check_configuration(self._client)
        ping = self._ask("scontrol", "ping")
        lines = [line.strip() for line in ping.out.splitlines() if line.startswith("Slurmctld")]
        if not any(line.endswith("UP") for line in lines):
            message = "; ".join(lines) or ping.message
            yield failed(
                f"the controller does not answer: {message}",
                hint(ping.message) or "`scontrol ping` shows whether it answers",
            )
            return
        begin = time.monotonic()
        queue = self._ask("squeue", "--me", "--noheader")
        seconds = time.monotonic() - begin
        if queue.code != 0:
            yield failed(
                f"the controller does not answer squeue: {queue.message}", hint(queue.message)
            )
        elif seconds > _SLOW:
            yield warning(
                f"{'; '.join(lines)}; it took {seconds:.1f} s to answer",
                "the controller is busy: submit and status will be slow",
            )
        elif any(not line.endswith("UP") for line in lines):
            yield warning(
                "; ".join(lines),
                "one of the controllers is down: report it to the site's administrators",
            )
        else:
            yield ok(f"{'; '.join(lines)}; it answers in {seconds:.2f} s")

    def _ask(self, *argv: str) -> SlurmOutput:
        return self._client.run(argv, timeout=_TIMEOUT)

    # -- resources ---------------------------------------------------------------------------------

    def _version(self) -> Iterator[CheckFinding]:
        shown = self._ask("scontrol", "show", "config")
        self._config = submit.parse_config(shown.out)
        here = self._ask("sbatch", "--version").out.rpartition(" ")[2].strip()
        there = self._config.get("SLURM_VERSION", "")
        if not there or not here:
            yield unknown(
                f"the version of Slurm is unknown: {shown.message}",
                "`scontrol show config` shows it",
            )
        elif _number(there) < _OLDEST:
            yield warning(
                f"{there} is old",
                "clusterjob was built on 22.05; srun created steps differently before 20.11",
            )
        elif _number(here) != _number(there):
            yield warning(
                f"the commands are {here}, the controller is {there}",
                "Slurm's commands must not be newer than the controller",
            )
        else:
            yield ok(there)

    def _show_partitions(self) -> Iterator[CheckFinding]:
        named = self._named()
        hidden = ["--all"] if named else []  # the named partition may be hidden
        shown = self._ask("sinfo", *hidden, "--noheader", "--format=%P|%a|%l|%D|%T|%G")
        if shown.code != 0:
            raise SubmitError(f"sinfo: {shown.message}", hint(shown.message))
        self._partitions = partitions_of(shown.out)
        wanted = self._wanted()
        there = listed(self._partitions) or "no partition"
        if not wanted:
            yield failed(
                "there is no default partition, and the job names none",
                f"choose one with --partition; there is {there}",
            )
        for name in wanted:
            partition = self._partitions.get(name)
            if partition is None:
                yield failed(
                    f"there is no partition {name}, or you may not use it", f"there is {there}"
                )
            elif partition.availability != "up":
                yield failed(
                    partition.summary, f"it accepts or starts no jobs now; there is {there}"
                )
            elif partition.usable < self._spec.resources.nodes or any(
                state.endswith("*") for state in partition.nodes
            ):
                yield warning(
                    partition.summary,
                    "a job may wait for its nodes: `sinfo -R` shows why they are down, and a state"
                    " with * is that of a node that does not answer",
                )
            else:
                yield ok(partition.summary)
        others = [] if named else [name for name in self._partitions if name not in wanted]
        for name in others[:_SHOWN]:
            yield ok(self._partitions[name].summary)
        if others[_SHOWN:]:
            yield ok(f"and {len(others) - _SHOWN} more: {listed(others[_SHOWN:])}")

    def _named(self) -> list[str]:
        return [name for name in self._spec.options.get("partition", "").split(",") if name]

    def _wanted(self) -> list[str]:
        return self._named() or [
            partition.name for partition in self._partitions.values() if partition.is_default
        ]

    def _gpus(self) -> Iterator[CheckFinding]:
        wanted = self._spec.resources.gpus_per_node
        chosen = [self._partitions[name] for name in self._wanted() if name in self._partitions]
        most = max((partition.gpus for partition in chosen), default=0)
        where = " and ".join(partition.name for partition in chosen)
        if wanted and most < wanted:
            yield failed(
                f"no node of {where} has {wanted} GPUs: Slurm knows of {most or 'none'}",
                "`sinfo -o '%P %D %G'` shows the GPUs of each partition;"
                " only GPUs of a gres can be requested",
            )
        elif most:
            yield ok(f"{most} a node in {where}, as gres")
        else:
            yield ok(f"none in {where}: a job finds only GPUs that a node shows to all processes")

    def _accounting(self) -> Iterator[CheckFinding]:
        remembered = self._config.get("MinJobAge", "300 sec").removesuffix(" sec")
        if not self._config:
            yield unknown(
                "it is unknown whether Slurm has accounting",
                "`scontrol show config` shows AccountingStorageType",
            )
        elif "slurmdbd" not in self._config.get("AccountingStorageType", ""):
            yield ok(
                f"none here: Slurm forgets a job {remembered} s after its end;"
                " a job that wrote no result by then is LOST"
            )
        else:
            asked = self._ask(
                "sacct", "--allocations", "--noheader", "--format=JobID", "--starttime=now"
            )
            yield (
                ok("sacct answers: it knows the ends of jobs that the controller has forgotten")
                if asked.code == 0
                else warning(
                    f"sacct does not answer: {asked.message}",
                    f"a job that wrote no result within {remembered} s of its end is LOST"
                    " until slurmdbd is back",
                )
            )

    # -- the job itself ----------------------------------------------------------------------------

    def _nodes(self) -> Iterator[CheckFinding]:
        place, option = str(home()), "CLUSTERJOB_HOME"
        if self._host is not None:
            place, option = self._remote_home, "--set remote_home=DIR"
        python = (
            "the image's Python and torch"
            if self._spec.container
            else "uv"
            if self._spec.uv
            else "room for the environment"
            if self._spec.env_archive is not None
            else f"{self._spec.python} with torch"
        )
        if job_id := self._succeeded():
            yield ok(f"job {job_id} has succeeded on such nodes: they see {place}/jobs")
            return
        yield unknown(
            f"only a job can check that the nodes see {place}/jobs and have {python}",
            f"check with a short `clusterjob run`; {option} sets another directory,"
            " which must be on a shared disk",
        )

    def _succeeded(self) -> str:
        """Return the id of the last job that succeeded with these settings; empty if none has."""
        for record in reversed(Records().all()):
            verdict = record.verdict if record.backend == NAME else None
            if verdict is None or verdict.state is not JobState.SUCCEEDED:
                continue
            job = record.job
            if job.program.kind != "command" and _on_nodes(job) == _on_nodes(self._spec):
                return record.job_id
        return ""

    def _job(self) -> Iterator[CheckFinding]:
        yield from shared.check_plan(planning.plan, self._spec)
        with _script_of(planning.plan(self._spec), local=self._host is None) as argv:
            answer = submit.preflight(self._client, self._spec, argv)
        message = f"sbatch --test-only: {answer.message}"
        yield (
            warning(message, "Slurm would accept the job, and the job would wait")
            if answer.code != 0
            else ok(message)
        )


def _on_nodes(spec: JobSpec) -> tuple[object, ...]:
    """Return the settings that decide what the nodes must have."""
    home = spec.options.get("remote_home")
    return spec.login, home, spec.python, spec.setup, spec.uv, spec.env_archive, spec.container


@contextmanager
def _script_of(plan: Plan, *, local: bool) -> Iterator[Sequence[str]]:
    """Yield sbatch's command line with a temporary script: no job directory exists yet."""
    argv = plan.commands[0].argv
    name = next(word for word in argv if word.endswith(".sh") and not word.startswith("-"))
    words = list(argv[: argv.index(name)])
    if not local:  # only a user's own template can contain #SBATCH lines; the plain script has none
        yield [*words, "--wrap=:"]
        return
    with tempfile.TemporaryDirectory(prefix="clusterjob-doctor-") as folder:
        script = Path(folder) / Path(name).name
        script.write_bytes(next(file.data for file in plan.files if file.path.name == script.name))
        yield [*words, str(script)]


def partitions_of(text: str) -> dict[str, Partition]:
    """Return the partitions by name; sinfo prints several lines for a partition."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != 6 or not re.fullmatch(r"\d{1,9}", cells[3], re.ASCII):
            continue
        name, availability, limit, count, state, gres = cells
        partition = found.setdefault(
            name.rstrip("*"),
            Partition(name.rstrip("*"), name.endswith("*"), availability=availability, limit=limit),
        )
        if int(count):
            partition.nodes[state] = partition.nodes.get(state, 0) + int(count)
        partition.gpus = max(partition.gpus, sum(map(int, _GPUS.findall(gres))))
    return found


def _number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; they identify a Slurm release."""
    return tuple(map(int, re.findall(r"\d{1,9}", version)[:2]))
