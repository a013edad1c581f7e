"""Check an account on the platform for `clusterjob doctor`.

The backend was written from the platform's documentation. The checks therefore also test that the
installed build of the command has the flags and fields that the backend uses.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.backends.batch_command.command import CommandOutput
from clusterjob.backends.batch_command.platform import Task
from clusterjob.backends.mlp import task
from clusterjob.backends.mlp.answers import STATES, made_at
from clusterjob.backends.mlp.client import COMMAND, SIBLING, Volc, check_installed
from clusterjob.backends.mlp.task_options import MlpOptions
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import CheckFinding, CheckStep, failed, listed, ok, unknown, warning
from clusterjob.errors import ClusterJobError
from clusterjob.node.verdict import JobState

BUILT_FROM = "1.2.57"  # version of the documentation that this backend follows
# The flags of each command that the backend uses; see `clusterjob.backends.mlp.client`.
FLAGS: Mapping[str, Sequence[str]] = {
    "submit": ("conf", "output"),
    "list": ("status", "name", "limit", "offset", "output"),
    "instance list": ("id", "output"),
    "logs": ("task", "instance", "lines"),
    "cancel": ("id",),
}
_DOCS = "see the platform's documentation: https://www.volcengine.com/docs/6459"
_CONFIGURE = "run `volc configure`, or set VOLC_AK, VOLC_SK and VOLC_REGION"
_SLOW = 10.0  # seconds; a slower answer is a warning


class Account:
    """The doctor checks of an account, through the command on this machine.

    Args:
        spec: the job.
        volc: the account's tasks.
        account: the variables that select the account: VOLC_PROFILE, VOLC_REGION.
    """

    def __init__(self, spec: JobSpec, volc: Volc, account: Mapping[str, str]) -> None:
        self._spec = spec
        self._volc = volc
        self._section = account.get("VOLC_PROFILE") or "default"
        self._region = account.get("VOLC_REGION", "")
        self._newest: list[tuple[Mapping[str, Any], Task | None]] = []

    def check_steps(self) -> list[CheckStep]:
        """Return the checks in the order in which they run."""
        reads = ("list",)
        return [
            CheckStep("PyYAML", _yaml),
            CheckStep("command", _command),
            CheckStep("version", self._version, needs=("command",)),
            CheckStep("credentials", self._credentials),
            CheckStep("region", self._show_region),
            CheckStep("list", self._list, needs=("command", "credentials", "region"), hint=_DOCS),
            CheckStep("fields", self._fields, needs=reads),
            CheckStep("instances", self._instances, needs=reads, hint=_DOCS),
            CheckStep("logs", self._logs, needs=("instances",), hint=_DOCS),
            CheckStep("flags", self._flags, needs=("command",)),
            CheckStep("task", self._task),
            CheckStep("GPUs", self._gpus),
            CheckStep("secrets", self._secrets),
            CheckStep("first task", _first_task),
        ]

    # -- this machine ------------------------------------------------------------------------------

    def _version(self) -> Iterator[CheckFinding]:
        answer = self._volc.run("version")
        match = re.search(rf"{COMMAND}/(\d+(?:\.\d+)+)", answer.out)
        if answer.code != 0 or match is None:
            printed = answer.message if answer.code else repr(answer.out.strip()[:80])
            yield warning(
                f"`{COMMAND} version` prints no version: {printed}",
                f"clusterjob follows the documentation of {BUILT_FROM}",
            )
        elif match[1].split(".")[:2] != BUILT_FROM.split(".")[:2]:
            yield warning(
                f"{match[1]}, but clusterjob follows the documentation of {BUILT_FROM}", _DOCS
            )
        else:
            yield ok(match[1])

    def _file(self, name: str) -> Path:
        return Path(f"~/.volc/{name}").expanduser()

    def _value(self, name: str, key: str) -> str:
        """Return a key of the account's section in one of the command's files; empty if unset."""
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(self._file(name), encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ClusterJobError(
                f"{self._file(name)} cannot be read: {str(error).splitlines()[0]}", _CONFIGURE
            ) from error
        return parser.get(self._section, key, fallback="").strip()

    def _credentials(self) -> Iterator[CheckFinding]:
        given = [name for name in ("VOLC_AK", "VOLC_SK") if os.environ.get(name)]
        path = self._file("credentials")
        written = [
            key for key in ("access_key_id", "secret_access_key") if self._value("credentials", key)
        ]
        if len(given) == 1 and len(written) < 2:
            yield failed(f"only {given[0]} is set; VOLC_AK and VOLC_SK are both needed", _CONFIGURE)
        elif not given and len(written) < 2:
            there = (
                f"{path} has no keys in [{self._section}]"
                if path.exists()
                else f"{path} does not exist, and VOLC_AK and VOLC_SK are not set"
            )
            yield failed(f"not logged in: {there}", _CONFIGURE)
        elif len(given) == 1:
            yield warning(
                f"only {given[0]} is set, and {path} has keys too",
                "set both VOLC_AK and VOLC_SK, or neither",
            )
        elif given:
            yield ok("VOLC_AK and VOLC_SK")
        else:
            mode = stat.S_IMODE(path.stat().st_mode)
            yield (
                warning(f"other users can read {path} (mode {mode:04o})", f"chmod 600 {path}")
                if mode & 0o077
                else ok(f"[{self._section}] of {path} (mode {mode:04o})")
            )

    def _show_region(self) -> Iterator[CheckFinding]:
        region = self._region or self._value("config", "region")
        yield (
            ok(region)
            if region
            else failed(
                "no region is set",
                "set VOLC_REGION or --set region=NAME, such as cn-beijing, or run `volc configure`",
            )
        )

    # -- the platform ------------------------------------------------------------------------------

    def _list(self) -> Iterator[CheckFinding]:
        begin = time.monotonic()
        self._newest = self._volc.newest(5)
        seconds = time.monotonic() - begin
        message = f"the platform answers in {seconds:.1f} s"
        yield (
            warning(message, "submit and status will be slow: check the network and the proxy")
            if seconds > _SLOW
            else ok(message)
        )

    def _fields(self) -> Iterator[CheckFinding]:
        if not self._newest:
            yield unknown(
                "not checked: the account has no task yet",
                "run doctor again after the first task",
            )
            return
        row, read = self._newest[0]
        there = f"the answer has the fields {', '.join(sorted(map(str, row)))}"
        if read is None:
            yield failed(
                "the answer of `list` has no id or no name of a task",
                f"another build of {COMMAND}: {there}",
            )
            return
        strange = sorted(
            {
                each.state_text
                for _, each in self._newest
                if each is not None and each.state_text and each.state is JobState.UNKNOWN
            }
        )
        if not read.state_text:
            yield failed(
                "the answer of `list` has no state of a task",
                f"another build of {COMMAND}: {there}",
            )
        elif strange:
            yield warning(
                f"unknown task states: {listed(strange)}",
                f"jobs in these states show as UNKNOWN; known states are {', '.join(STATES)}",
            )
        elif not made_at(read):
            yield warning(
                f"the creation time of {read.id} is missing",
                f"clusterjob orders the attempts of a job by it; {there}",
            )
        else:
            yield ok(f"id, name, state and creation time are present (task {read.id})")

    def _instances(self) -> Iterator[CheckFinding]:
        if (read := next((each for _, each in self._newest if each is not None), None)) is None:
            yield unknown(
                "not checked: the account has no task yet",
                "run doctor again after the first task",
            )
            return
        found = self._volc.instances(read.id)
        yield (
            warning(
                f"{read.id} ({read.state_text}) shows no worker",
                "a task that never left the queue has none: run doctor again after a run",
            )
            if not found
            else ok(f"{read.id} shows {listed(instance.name for instance in found)}")
        )

    def _logs(self) -> Iterator[CheckFinding]:
        for _, read in self._newest:
            if read is None:
                continue
            try:
                lines = self._volc.lines(read.id, "worker_0", 1)
            except ClusterJobError as error:
                yield warning(
                    f"{read.id}: {error.message}",
                    "clusterjob reads output and verdict from the logs; old logs may be deleted",
                )
                return
            if lines:
                yield ok(f"{read.id} has a log")
                return
        yield unknown("not checked: no task has a log", "run doctor again after the first task")

    def _flags(self) -> Iterator[CheckFinding]:
        unread, absent = [], []
        for operation, names in FLAGS.items():
            answer = self._volc.run("ml_task", *operation.split(), "--help")
            if not _is_help(answer):
                unread.append(operation)
                continue
            absent += [
                f"{operation} --{name}"
                for name in names
                if not re.search(rf"(?<![\w-])--?{name}(?![\w-])", answer.out + answer.err)
            ]
        if absent:
            yield failed(
                f"this build of {COMMAND} does not have {listed(absent)}",
                f"clusterjob follows the documentation of {BUILT_FROM}",
            )
        if unread:
            yield warning(
                f"the help of {listed(unread)} cannot be read",
                f"check that `{COMMAND} ml_task {unread[0]} --help` lists the flags",
            )
        if not absent and not unread:
            yield ok(f"{', '.join(FLAGS)} have all flags that clusterjob uses")

    # -- the job -----------------------------------------------------------------------------------

    def _task(self) -> Iterator[CheckFinding]:
        fields = task.fields(self._spec, "doctor", upload="", entry="")
        if missing := task.missing(fields):
            yield failed(
                f"the platform takes no task without {' and '.join(missing)}",
                task.hint_for_missing(missing, self._spec.options),
            )
            return
        queue = fields.get("ResourceQueueID") or fields.get("ResourceQueueName")
        role = fields["TaskRoleSpecs"][0]
        yield ok(
            f"queue {queue}, image {fields['ImageUrl']}, {role['RoleReplicas']} x {role['Flavor']}"
        )

    def _gpus(self) -> Iterator[CheckFinding]:
        flavor, wanted, there = (
            task.flavor_of(self._spec),
            self._spec.resources.gpus_per_node,
            task.gpus_of(self._spec),
        )
        table = f'flavors = {{"{flavor or "ml.NAME"}" = 8}} in the profile\'s table set'
        if there is not None:
            idle = there - (there if wanted is None else wanted)
            message = f"{flavor} has {there}"
            yield (
                warning(
                    f"{message}: {idle} of them stay idle",
                    "use a smaller flavor or more --gpus-per-node",
                )
                if idle
                else ok(message)
            )
        elif wanted:
            yield warning(
                f"--gpus-per-node {wanted}: "
                f"the number of GPUs of {flavor or 'the flavor'} is not known",
                table,
            )
        else:
            yield unknown(
                f"the number of GPUs of {flavor or 'the flavor'} is not known here: "
                "each worker starts one process per GPU",
                table,
            )

    def _secrets(self) -> Iterator[CheckFinding]:
        names = list(MlpOptions.of(self._spec.options).secrets.values())
        absent = [name for name in names if not os.environ.get(name)]
        yield (
            failed(f"not set here: {listed(absent)}", f"export {absent[0]}=...")
            if absent
            else ok(f"{listed(names)}: set here" if names else "the job has no secrets option")
        )


def _yaml() -> Iterator[CheckFinding]:
    yield (
        failed("PyYAML is not installed", "`pip install pyyaml` where clusterjob is installed")
        if importlib.util.find_spec("yaml") is None
        else ok("installed")
    )


def _command() -> Iterator[CheckFinding]:
    check_installed()
    path = shutil.which(COMMAND) or COMMAND
    sibling = shutil.which(SIBLING)
    if sibling is None:
        beside = Path(path).resolve().parent
        yield failed(
            f"{path} does not find its sibling {SIBLING} on PATH",
            f'both must be in one directory: export PATH="{beside}:$PATH"',
        )
    elif Path(sibling).parent != Path(path).parent:
        yield warning(f"{path}, but its sibling is {sibling}", "use both from one installation")
    else:
        yield ok(f"{path}, with {SIBLING} beside it")


def _first_task() -> Iterator[CheckFinding]:
    yield unknown(
        "not checked: free capacity of the queue, start of the image, rendezvous of the nodes",
        "run a first task: `clusterjob run -- hostname`, with the same options",
    )


def _is_help(answer: CommandOutput) -> bool:
    """Return whether an answer is a help text: at least two lines begin with a flag."""
    lines = (answer.out + "\n" + answer.err).splitlines()
    return (
        not answer.timed_out
        and sum(re.match(r"\s*--?[a-z]", line) is not None for line in lines) > 1
    )
