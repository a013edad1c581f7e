"""A Slurm before there is a job, looked at for `doctor`: its commands, its controller, what it has,
and what it says to the job itself.
"""

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
from clusterjob.backends.slurm.client import Answer, Client, hint
from clusterjob.core.plans import Plan
from clusterjob.core.records import home
from clusterjob.core.spec import JobSpec
from clusterjob.doctor import fitness
from clusterjob.doctor.engine import Finding, Look, failed, listed, ok, unknown, warning
from clusterjob.doctor.this_machine import directory_looks
from clusterjob.errors import SubmitError

if TYPE_CHECKING:
    from clusterjob.backends.slurm.login_host import LoginHost

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
_PATIENCE = (
    20.0  # seconds: Slurm's commands themselves give up after 10, unless the site says otherwise
)
_SLOW = 3.0  # seconds for an answer of the controller
_OLDEST = (
    20,
    11,
)  # the first whose srun gives a step what is asked for alone; 22.05 is what this was built on
_GPUS = re.compile(r"(?:^|,)gpu(?::[^:,()]+)?:(\d{1,9})")
_SHOWN = 8  # partitions that are listed where the job names none


@dataclass
class _Partition:
    """What sinfo says of one partition."""

    name: str
    is_default: bool
    availability: str
    limit: str
    nodes: dict[str, int] = field(default_factory=dict)
    gpus: int = 0

    @property
    def words(self) -> str:
        states = ", ".join(f"{count} {state}" for state, count in self.nodes.items())
        limit = "no time limit" if self.limit == "infinite" else f"time limit {self.limit}"
        gpus = f", {self.gpus} GPUs a node" if self.gpus else ""
        return f"{self.name}{' (default)' if self.is_default else ''}: {self.availability}, {limit}, nodes: {states or 'none'}{gpus}"

    @property
    def usable(self) -> int:
        return sum(
            count for state, count in self.nodes.items() if not submit.UNUSABLE.search(state)
        )


class SlurmCluster:
    """A cluster under Slurm.

    Args:
        spec: the job that it is looked at for.
        host: the login host; None where Slurm's commands are this machine's own.
    """

    def __init__(self, spec: JobSpec, host: LoginHost | None) -> None:
        self._spec = spec
        self._host = host
        self._client = Client(shell=host)
        self._remote_home = ""
        self._partitions: dict[str, _Partition] = {}
        self._config: dict[str, str] = {}

    def looks(self) -> list[Look]:
        """Return the looks at it."""
        there: tuple[str, ...] = ()
        login: list[Look] = []
        if self._host is not None:
            login = [
                Look(
                    "login",
                    self._login,
                    hint=f"`ssh {self._host.label}` has to work, without a password",
                )
            ]
            there = ("login",)
        commands, controller = (*there, "commands"), ("controller",)
        return [
            *directory_looks(),
            *login,
            Look("commands", self._commands, needs=there),
            Look("controller", self._controller, needs=commands),
            Look("version", self._version, needs=controller),
            Look("partitions", self._show_partitions, needs=controller),
            Look("GPUs", self._gpus, needs=("partitions",)),
            Look("accounting", self._accounting, needs=controller),
            Look("nodes", self._nodes, needs=there),
            Look("job", self._job, needs=controller),
        ]

    # -- whether anybody answers ---------------------------------------------------------------------------------------

    def _login(self) -> Iterator[Finding]:
        assert self._host is not None
        answer, _ = self._host.ask("check", need=0, torch=False, own=False)
        self._remote_home = answer["home"]
        for trouble in answer["errors"]:
            yield failed(
                f"{self._host.label}: {trouble}", "--set remote_home=DIR names another place there"
            )
        yield ok(f"{self._host.label} is {answer['host']}, Python {answer['python']}")
        space = fitness.space(answer["free"], f"{answer['home']} there")
        yield Finding(
            space.state,
            space.words,
            hint=space.hint and "--set remote_home=DIR names another place there",
        )

    def _commands(self) -> Iterator[Finding]:
        where = " there" if self._host is not None else ""
        absent = [name for name in _COMMANDS if not self._has(name)]
        if absent:
            yield failed(
                f"not on PATH{where}: {', '.join(absent)}",
                "Slurm's client commands have to be installed, or a module loaded",
            )
        else:
            yield ok(f"{', '.join(_COMMANDS)} are on PATH{where}")

    def _has(self, name: str) -> bool:
        if self._client.is_local:
            return shutil.which(name) is not None
        try:
            answer = self._client.run([name, "--version"], patience=_PATIENCE)
        except SubmitError as error:
            if "configuration" in error.message:
                raise
            return False
        return answer.code == 0

    def _controller(self) -> Iterator[Finding]:
        submit.check_configuration(self._client)
        ping = self._ask("scontrol", "ping")
        lines = [line.strip() for line in ping.out.splitlines() if line.startswith("Slurmctld")]
        if not any(line.endswith("UP") for line in lines):
            words = "; ".join(lines) or ping.words
            yield failed(
                f"the controller does not answer: {words}",
                hint(ping.words) or "`scontrol ping` shows whether it answers",
            )
            return
        begin = time.monotonic()
        queue = self._ask("squeue", "--me", "--noheader")
        seconds = time.monotonic() - begin
        if queue.code != 0:
            yield failed(
                f"the controller gives no answer to squeue: {queue.words}", hint(queue.words)
            )
        elif seconds > _SLOW:
            words = f"{'; '.join(lines)}; it took {seconds:.1f} s to answer"
            yield warning(words, "it is busy: submitting and asking after jobs will be slow")
        elif any(not line.endswith("UP") for line in lines):
            yield warning(
                "; ".join(lines),
                "one of its controllers is down: the site's administrators will want to know",
            )
        else:
            yield ok(f"{'; '.join(lines)}; it answers in {seconds:.2f} s")

    def _ask(self, *argv: str) -> Answer:
        return self._client.run(argv, patience=_PATIENCE)

    # -- what it has ---------------------------------------------------------------------------------------------------

    def _version(self) -> Iterator[Finding]:
        shown = self._ask("scontrol", "show", "config")
        self._config = {
            key: value.strip()
            for key, value in re.findall(r"^(\w+)\s*= (.*)$", shown.out, re.MULTILINE)
        }
        own = self._ask("sbatch", "--version").out.split()[-1:]
        here, there = own[0] if own else "", self._config.get("SLURM_VERSION", "")
        if not there or not here:
            yield unknown(
                f"Slurm does not tell its version: {shown.words}", "`scontrol show config` shows it"
            )
        elif _number(there) < _OLDEST:
            yield warning(
                f"{there} is old", "this was built on 22.05; steps of srun were others before 20.11"
            )
        elif _number(here) != _number(there):
            yield warning(
                f"the commands are {here}, the controller is {there}",
                "Slurm wants the commands no newer than the controller",
            )
        else:
            yield ok(there)

    def _show_partitions(self) -> Iterator[Finding]:
        hidden = ["--all"] if self._named() else []  # a hidden partition may be named
        shown = self._ask("sinfo", *hidden, "--noheader", "--format=%P|%a|%l|%D|%T|%G")
        if shown.code != 0:
            raise SubmitError(f"sinfo: {shown.words}", hint(shown.words))
        self._partitions = _partitions(shown.out)
        wanted = self._wanted()
        there = listed(self._partitions) or "no partition"
        if not wanted:
            yield failed(
                "no partition is the default one, and the job names none",
                f"--partition names one; there is {there}",
            )
        for name in wanted:
            partition = self._partitions.get(name)
            if partition is None:
                yield failed(f"there is no partition {name}, or none for you", f"there is {there}")
            elif partition.availability != "up":
                yield failed(partition.words, f"it takes or starts no job now; there is {there}")
            elif partition.usable == 0:
                yield warning(
                    partition.words,
                    "a job would wait until nodes are back: `sinfo -R` says why they are away",
                )
            else:
                yield ok(partition.words)
        others = [partition for name, partition in self._partitions.items() if name not in wanted]
        if not self._named():
            for partition in others[:_SHOWN]:
                yield ok(partition.words)
            if others[_SHOWN:]:
                yield ok(
                    f"and {len(others) - _SHOWN} more: {listed(partition.name for partition in others[_SHOWN:])}"
                )

    def _named(self) -> list[str]:
        text = self._spec.options.get("partition", "")
        return [name for name in text.split(",") if name]

    def _wanted(self) -> list[str]:
        return self._named() or [
            partition.name for partition in self._partitions.values() if partition.is_default
        ]

    def _gpus(self) -> Iterator[Finding]:
        wanted = self._spec.resources.gpus_per_node
        chosen = [self._partitions[name] for name in self._wanted() if name in self._partitions]
        most = max((partition.gpus for partition in chosen), default=0)
        where = " and ".join(partition.name for partition in chosen)
        if wanted and most < wanted:
            words = f"no node of {where} has {wanted} GPUs: Slurm knows of {most or 'none'}"
            yield failed(
                words,
                "`sinfo -o '%P %D %G'` shows the GPUs of each partition; only those of a gres can be asked for",
            )
        elif most:
            yield ok(f"{most} a node in {where}, as gres")
        else:
            yield ok(
                f"none in {where}: a job finds those that a node shows to everybody, if it has any"
            )

    def _accounting(self) -> Iterator[Finding]:
        kind = self._config.get("AccountingStorageType", "")
        remembered = self._config.get("MinJobAge", "300 sec").removesuffix(" sec")
        if not self._config:
            yield unknown(
                "Slurm does not tell whether it has accounting",
                "`scontrol show config` shows AccountingStorageType",
            )
        elif "slurmdbd" not in kind:
            yield ok(
                f"none here: Slurm forgets a job {remembered} s after its end; one that left no word of its end by then is LOST"
            )
        else:
            asked = self._ask(
                "sacct", "--allocations", "--noheader", "--format=JobID", "--starttime=now"
            )
            if asked.code == 0:
                yield ok(
                    "sacct answers: it knows the ends of jobs that the controller has forgotten"
                )
            else:
                words = f"sacct does not answer: {asked.words}"
                yield warning(
                    words,
                    f"a job that left no word of its end within {remembered} s of it is LOST until slurmdbd is back",
                )

    # -- the job itself ------------------------------------------------------------------------------------------------

    def _nodes(self) -> Iterator[Finding]:
        place = f"{self._remote_home if self._host is not None else home()}/jobs"
        python = (
            "the image's Python and torch"
            if self._spec.container
            else f"{self._spec.python} with torch"
        )
        option = "--set remote_home=DIR" if self._host is not None else "CLUSTERJOB_HOME"
        yield unknown(
            f"whether the nodes see {place} and have {python}, only a job can tell",
            f"a short `clusterjob run` tells; {option} names another place, which has to be on a shared disk",
        )

    def _job(self) -> Iterator[Finding]:
        yield from shared.plannable(planning.plan, self._spec)
        plan = planning.plan(self._spec)
        with _script_of(plan, local=self._client.is_local) as argv:
            answer = submit.preflight(self._client, argv)
        submit.check_time(self._client, self._spec, preflight=answer)
        if answer.code != 0:
            yield warning(f"sbatch --test-only: {answer.words}", "the job would be taken, and wait")
        else:
            yield ok(f"sbatch --test-only: {answer.words}")


@contextmanager
def _script_of(plan: Plan, *, local: bool) -> Iterator[Sequence[str]]:
    """Lend sbatch's command line with a script that is there: the job's directory is not."""
    argv = plan.commands[0].argv
    name = next(word for word in argv if word.endswith(".sh") and not word.startswith("-"))
    words = list(argv[: argv.index(name)])
    if (
        not local
    ):  # only a template of the user's own can say more to sbatch than its command line does
        yield [*words, "--wrap=:"]
        return
    with tempfile.TemporaryDirectory(prefix="clusterjob-doctor-") as folder:
        script = Path(folder) / Path(name).name
        script.write_bytes(next(file.data for file in plan.files if file.path.name == script.name))
        yield [*words, str(script)]


def _partitions(text: str) -> dict[str, _Partition]:
    """Return the partitions by name, from sinfo's lines: one for each state and kind of node."""
    found: dict[str, _Partition] = {}
    for line in text.splitlines():
        cells = line.split("|")
        if len(cells) != 6 or not re.fullmatch(r"\d{1,9}", cells[3], re.ASCII):
            continue
        name, availability, limit, count, state, gres = cells
        partition = found.setdefault(
            name.rstrip("*"),
            _Partition(
                name.rstrip("*"), name.endswith("*"), availability=availability, limit=limit
            ),
        )
        if int(count):
            partition.nodes[state] = partition.nodes.get(state, 0) + int(count)
        partition.gpus = max(partition.gpus, sum(map(int, _GPUS.findall(gres))))
    return found


def _number(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers, which tell Slurm's releases apart."""
    return tuple(map(int, re.findall(r"\d{1,9}", version)[:2]))
