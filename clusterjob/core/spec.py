"""Define `JobSpec`, the description of a job, and validate it before anything runs.

The validation reads only the program's source and checks that other files exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from clusterjob.core import arrays, notifications, option_conflicts, program_check, variable_names
from clusterjob.core.arrays import Array
from clusterjob.core.earlier_code import EarlierCode
from clusterjob.core.hosts import Host
from clusterjob.core.job_secrets import Secret
from clusterjob.core.notifications import NotifyPlace
from clusterjob.core.option import Target
from clusterjob.core.options import OPTIONS
from clusterjob.core.resources import MOST_WORKERS, Resources, at_least
from clusterjob.errors import SpecError
from clusterjob.node import contract
from clusterjob.node.options import (
    LAUNCHERS,
    PREFLIGHT_MODES,
    START_MODES,
    LaunchOptions,
    Retry,
)
from clusterjob.node.program import Program

MAX_NAME = 128


@dataclass(frozen=True)
class JobSpec:
    """A job as the user requests it, independent of any cluster.

    Attributes:
        program: the program of each worker; a script's path is relative to workdir.
        workdir: absolute path of the directory that the workers start in.
        name: name that users see; the job's id is made from it.
        python: the interpreter that runs the agent and the workers; with `uv`, the interpreter of
            the environment.
        uv: whether each machine makes the environment of the uv project in `workdir`.
        env_archive: a packed Python environment that each machine unpacks or mounts.
        env_cache: directory of the machines for these environments; empty for TMPDIR or /tmp.
        env: variables added to the workers' environment.
        secret: variables whose values are never shown or recorded; they are read when the job is
            submitted.
        setup: shell lines run on every node before the interpreter starts (modules, conda, venv).
        resources: the requested resources.
        nproc_per_node: workers on each node; 1 if `nproc_word` is set.
        nproc_word: ``gpu``, ``cpu`` or ``auto`` if each node counts its workers; else empty.
        nproc_is_default: whether nproc_per_node is a default, which a platform may replace by a
            node's number of GPUs; in a plan: whether the platform will replace it.
        spares: the nodes of `resources` that have no workers until one takes a lost node's place.
        min_nodes: the smallest number of nodes with workers; None for all but the spares.
        max_restarts: maximum number of restarts of the workers after a failure.
        retry: kinds of failures with their own number of restarts; see
            `clusterjob.node.options.Retry`.
        start: start method of the workers: ``fork``, ``exec`` or ``auto``.
        launcher: ``agent``, ``ray`` for a Ray cluster whose driver is the program, or ``srun`` for
            one Slurm task per worker.
        require_gpus: end the job if its workers see too few GPUs, instead of using the CPU.
        template: the user's template that replaces the backend's.
        options: backend options by name, such as Slurm flags (``--set``).
        hosts: the hosts of the nodes, in order, for backends without a queue.
        gpus: GPUs of each host: their numbers, or ``auto`` for idle GPUs; empty for all.
        login: login host of the cluster; empty if this machine has the cluster's commands.
        earlier_code: the code of an earlier job, to run instead of the current files; not recorded.
        include_secrets: also send files that look like secrets.
        sync: whether to send the working directory to the hosts or the login host; if not, it must
            exist there under the same path.
        snapshot: whether the job runs the code as it was when it was submitted, if the nodes share
            this machine's disk; if not, the files as they are when it starts.
        container: container image in which a node runs the job.
        array, sweep: the elements of the job, if it is an array; see
            `clusterjob.core.arrays.parse`.
        only: indices of the elements to run again; empty for all elements.
        after: jobs that this one waits for, each as ``ID`` or ``KIND:ID``.
        requeue: queue the job again after a preemption or after the time limit.
        signal_before: seconds before the time limit at which the workers are warned; None for no
            warning.
        until_done: queue the job again until its script is done; see docs/slurm.md.
        checkpoint_dir: directory of the script's checkpoints, relative to workdir, for until_done;
            empty if it is unknown.
        warn_signal: signal that the workers get at the warning, such as SIGUSR1; empty for none.
        notify: where the job sends notifications: URLs of apprise, which are never recorded.
        notify_cmd: shell commands that the job runs for each notification.
        notify_on: events to notify about; see `clusterjob.node.notifications`.
        preflight: measure the hosts before the workers start: ``off``, ``warn`` or ``refuse``.
        hang_timeout: seconds without progress after which the job hangs; None for no detection.
        metrics, metrics_port: samples of the nodes; see `clusterjob.node.options.LaunchOptions`.
        join_timeout, lease, grace: seconds; see `clusterjob.node.options.LaunchOptions`.

    Raises:
        SpecError: a field is invalid; the message names it.
    """

    program: Program
    workdir: Path
    name: str = ""
    python: str = "python3"
    uv: bool = False
    env_archive: Path | None = None
    env_cache: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secret: tuple[Secret, ...] = ()
    setup: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)
    nproc_per_node: int = 1
    nproc_word: str = ""
    nproc_is_default: bool = False
    spares: int = 0
    min_nodes: int | None = None
    max_restarts: int = 0
    retry: tuple[str, ...] = ()
    start: str = "auto"
    launcher: str = "agent"
    require_gpus: bool = True
    template: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[Host, ...] = ()
    gpus: str = ""
    login: str = ""
    sync: bool = True
    snapshot: bool = True
    earlier_code: EarlierCode | None = None
    include_secrets: bool = False
    container: str = ""
    array: str = ""
    sweep: tuple[str, ...] = ()
    only: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    requeue: bool = False
    signal_before: int | None = None
    until_done: bool = False
    checkpoint_dir: str = ""
    warn_signal: str = ""
    notify: tuple[NotifyPlace, ...] = ()
    notify_cmd: tuple[str, ...] = ()
    notify_on: tuple[str, ...] = contract.NOTIFY_KINDS[1:]
    preflight: str = LaunchOptions.preflight
    hang_timeout: int | None = None
    metrics: bool = True
    metrics_port: int = 0
    join_timeout: float = LaunchOptions.join_timeout
    lease: float = LaunchOptions.lease
    grace: float | None = LaunchOptions.grace

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or default_name(self.program))
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise SpecError(
                f"{self.name[:MAX_NAME]!r} is not a valid job name",
                f"use up to {MAX_NAME} printable characters on one line",
            )
        at_least("--nproc-per-node", self.nproc_per_node, least=1, most=MOST_WORKERS)
        at_least("--spares", self.spares, least=0)
        at_least("--max-restarts", self.max_restarts, least=0)
        _one_of("start", self.start, known=START_MODES)
        _one_of("launcher", self.launcher, known=(*LAUNCHERS, "srun"))
        _one_of("preflight", self.preflight, known=PREFLIGHT_MODES)
        for label in ("join_timeout", "lease", "grace"):
            value = getattr(self, label)
            if value is not None and not 0 < value < 1e9:
                raise SpecError(
                    f"{label.replace('_', ' ')} is {value}: "
                    "must be more than 0 and less than 1e9 seconds"
                )
        for name, value in self.env.items():
            variable_names.check(name, value)
        for secret in self.secret:
            variable_names.check(secret.name, "", flag="--secret")
            if secret.name in self.env or [one.name for one in self.secret].count(secret.name) > 1:
                raise SpecError(
                    f"{secret.name} has two values",
                    "give it once: --env for a public value, --secret for a hidden one",
                )
        twice = next((host for host in self.hosts if self.hosts.count(host) > 1), None)
        if twice is not None:
            raise SpecError(
                f"the host {twice} is named twice",
                "name it once; --nproc-per-node 2 starts two workers on each host",
            )
        option_conflicts.check(self)
        program = (
            self.python,
            self.env_cache,
            self.checkpoint_dir,
            self.program.target,
            *self.program.args,
        )
        for text in (*self.setup, *self.notify_cmd, *program, str(self.workdir)):
            if "\0" in text:
                raise SpecError(
                    f"{text!r} contains a NUL byte, which a command line cannot contain"
                )
        self.elements()
        if self.template is not None and not self.template.is_file():
            raise SpecError(f"the template {str(self.template)!r} does not exist")
        program_check.check(self)

    @property
    def grows_memory(self) -> bool:
        """Whether --retry queues the job again with more memory."""
        return any(Retry.parse(text).memory for text in self.retry)

    @property
    def working_nodes(self) -> int:
        """The largest number of nodes that have workers at the same time."""
        return self.resources.nodes - self.spares

    @property
    def promised_gpus(self) -> int | None:
        """The number of GPUs that the workers of a node must see; None: the node decides."""
        return self.resources.gpus_per_node if self.require_gpus else 0

    @property
    def notifies(self) -> bool:
        """Whether the job sends notifications."""
        return bool(self.notify or self.notify_cmd)

    def private_values(self, environ: Mapping[str, str], cluster: str) -> dict[str, bytes]:
        """Return the variables of each node whose values are secrets.

        Args:
            environ: the variables of this process.
            cluster: the cluster's name, for the notifications.

        Raises:
            SpecError: a secret has no value.
        """
        values = {secret.name: secret.value(environ) for secret in self.secret}
        if self.notifies:
            array = self.elements()
            values[contract.NOTIFICATIONS] = notifications.packed(
                self.notify,
                self.notify_cmd,
                self.notify_on,
                environ,
                name=self.name,
                cluster=cluster,
                elements=len(array.indices) if array else 0,
            )
        return values

    @property
    def private_names(self) -> tuple[str, ...]:
        """The names of `private_values`."""
        names = tuple(secret.name for secret in self.secret)
        return (*names, contract.NOTIFICATIONS) if self.notifies else names

    @property
    def hidden_variables(self) -> frozenset[str]:
        """Variables of this process that hold secrets; no command of a cluster inherits them."""
        holders = {place.variable for place in self.notify if place.variable}
        return frozenset({secret.name for secret in self.secret} | holders)

    def elements(self) -> Array | None:
        """Return the elements of the job; None if it is not an array.

        Raises:
            SpecError: array or sweep is invalid, or `only` names an element that does not exist.
        """
        array = arrays.parse(self.array, self.sweep)
        return array if array is None or not self.only else arrays.subset(array, self.only)

    def launch_options(self, **more: Any) -> LaunchOptions:
        """Return the options of each node's agent, with `more` options of the backend."""
        limit = self.resources.time_limit
        values = {
            option.node: getattr(
                self.resources if option.target is Target.RESOURCES else self, option.key
            )
            for option in OPTIONS.values()
            if option.node
        }
        if self.nproc_word:
            values["nproc_per_node"] = self.nproc_word
        values |= {"program": self.program, "time_limit": float(limit) if limit else None}
        values["min_nodes"] = self.min_nodes
        values["require_gpus"] = self.promised_gpus
        return LaunchOptions(**(values | more))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        """Return the spec that `to_json` wrote, without the files of secrets.

        An unknown key is ignored, and a missing key has its default. The values are not validated
        again: the script or the working directory may have been removed meanwhile.

        Raises:
            ValueError: a value has a wrong type; the message names the field.
        """
        spec = object.__new__(cls)
        data = {"program": {"kind": "command", "target": "", "args": ()}, "workdir": "", **data}
        for each in fields(cls):
            try:
                if each.name in data:
                    value = _FROM_JSON.get(each.name, _check_type(each))(data[each.name])
                else:
                    value = _default(each)
            except (TypeError, KeyError, ValueError, SpecError) as error:
                raise ValueError(f"{each.name}: {error}") from error
            object.__setattr__(spec, each.name, value)
        return spec

    def to_json(self) -> dict[str, Any]:
        """Return the spec as plain data, for the record and for spec.json."""
        data = asdict(self)
        del data["earlier_code"]
        if not self.only:
            del data["only"]
        return data | {
            "secret": [secret.name for secret in self.secret],
            "notify": [str(place) for place in self.notify],
            "workdir": str(self.workdir),
            "template": str(self.template) if self.template else None,
            "env_archive": str(self.env_archive) if self.env_archive else None,
        }


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "program": lambda data: Program(
        str(data["kind"]), str(data["target"]), args=tuple(map(str, data["args"]))
    ),
    "workdir": Path,
    **dict.fromkeys(("template", "env_archive"), lambda text: None if text is None else Path(text)),
    "resources": lambda data: Resources(**data),
    "hosts": lambda hosts: tuple(Host(**host) for host in hosts),
    "secret": lambda names: tuple(Secret(str(name)) for name in names),
    "grace": lambda seconds: None if seconds is None else 0.0 + seconds,  # no text
    "only": lambda numbers: tuple(map(int, numbers)),
    "notify": lambda texts: tuple(NotifyPlace(str(text)) for text in texts),
    **dict.fromkeys(
        ("signal_before", "hang_timeout", "min_nodes"),
        lambda number: None if number is None else int(number),
    ),
    **dict.fromkeys(("env", "options"), dict),
    **dict.fromkeys(
        ("setup", "sweep", "after", "notify_cmd", "notify_on", "retry"),
        lambda lines: tuple(map(str, lines)),
    ),
}


def _default(each: Field[Any]) -> Any:
    return each.default_factory() if each.default is MISSING else each.default  # type: ignore[operator]


def _check_type(each: Field[Any]) -> Callable[[Any], Any]:
    """Return a function that checks a value against the type of the field's default."""
    kinds = (int, float) if isinstance(each.default, float) else (type(each.default),)

    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"{value!r:.80}")
        return value

    return check


def launch_arguments(options: LaunchOptions) -> list[str]:
    """Return the arguments that `options.parse` of a node turns into these options.

    Defaults are left out.
    """
    words: list[str] = []
    for each in fields(options):
        name, value = each.name.replace("_", "-"), getattr(options, each.name)
        if each.metadata and isinstance(value, bool) and value != each.default:
            words.append(f"--{name}" if value else f"--no-{name}")
        elif each.metadata and value != each.default:
            words.append(f"--{name}={','.join(value) if isinstance(value, tuple) else value}")
    return words + program_arguments(options.program)


def program_arguments(program: Program) -> list[str]:
    """Return the arguments of `clusterjob launch` for a program."""
    prefix = {"script": [], "module": ["-m"], "command": ["--"]}[program.kind]
    if program.kind == "script" and program.target.startswith("-") and not program.on_stdin:
        return [f"./{program.target}", *program.args]
    return [*prefix, program.target, *program.args]


def default_name(program: Program) -> str:
    """Return the default name of a job: that of its script, module or command."""
    stem = Path(program.target).stem if program.kind == "script" else Path(program.target).name
    cleaned = re.sub(r"[^\w.-]+", "-", stem).strip("-.")
    return cleaned[:MAX_NAME] or "job"


def _one_of(label: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SpecError(f"{label} is {value!r}", f"use one of {', '.join(known)}")
