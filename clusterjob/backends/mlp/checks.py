"""What a user with an account on the platform should check first, looked at for `doctor`.

This was built from documentation: so it also looks whether this build of the command has the flags
and the fields that it is asked for.
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

from clusterjob.backends.batch_command.command import Answer
from clusterjob.backends.batch_command.platform import Task
from clusterjob.backends.mlp import task
from clusterjob.backends.mlp.client import COMMAND, SIBLING, STATES, Volc, check_installed, made_at
from clusterjob.core.spec import JobSpec
from clusterjob.doctor.engine import Finding, Look, failed, listed, ok, unknown, warning
from clusterjob.errors import ClusterJobError
from clusterjob.node.verdict import JobState

BUILT_FROM = "1.2.57"  # the version whose documentation this was built from
# The flags that are used of each command; see `clusterjob.backends.mlp.client`.
FLAGS: Mapping[str, Sequence[str]] = {
    "submit": ("conf", "output"),
    "list": ("status", "name", "limit", "offset", "output"),
    "instance list": ("id", "output"),
    "logs": ("task", "instance", "lines"),
    "cancel": ("id",),
}
_DOCS = "https://www.volcengine.com/docs/6459 is the platform's documentation"
_CONFIGURE = "`volc configure` asks for keys and region; so do VOLC_AK, VOLC_SK and VOLC_REGION"
_SLOW = 10.0  # seconds for an answer


class Account:
    """An account on the platform, as this machine's command reaches it.

    Args:
        spec: the job that it is looked at for.
        volc: the account's tasks.
        account: the variables that choose it: VOLC_PROFILE, VOLC_REGION.
    """

    def __init__(self, spec: JobSpec, volc: Volc, account: Mapping[str, str]) -> None:
        self._spec = spec
        self._volc = volc
        self._section = account.get("VOLC_PROFILE") or "default"
        self._region = account.get("VOLC_REGION", "")
        self._newest: list[tuple[Mapping[str, Any], Task | None]] = []

    def looks(self) -> list[Look]:
        """Return the looks at it."""
        reads = ("list",)
        return [
            Look("PyYAML", _yaml),
            Look("command", _command),
            Look("version", self._version, needs=("command",)),
            Look("credentials", self._credentials),
            Look("region", self._show_region),
            Look("list", self._list, needs=("command", "credentials", "region"), hint=_DOCS),
            Look("fields", self._fields, needs=reads),
            Look("instances", self._instances, needs=reads, hint=_DOCS),
            Look("logs", self._logs, needs=("instances",), hint=_DOCS),
            Look("flags", self._flags, needs=("command",)),
            Look("task", self._task),
            Look("GPUs", self._gpus),
            Look("secrets", self._secrets),
            Look("first task", _first_task),
        ]

    # -- what is on this machine ---------------------------------------------------------------------------------------

    def _version(self) -> Iterator[Finding]:
        answer = self._volc.run("version")
        match = re.search(rf"{COMMAND}/(\d+(?:\.\d+)+)", answer.out)
        if answer.code != 0 or match is None:
            said = answer.words if answer.code else repr(answer.out.strip()[:80])
            yield warning(
                f"`{COMMAND} version` does not say it: {said}",
                f"this was built from the documentation of {BUILT_FROM}",
            )
        elif match[1].split(".")[:2] != BUILT_FROM.split(".")[:2]:
            yield warning(
                f"{match[1]}, and this was built from the documentation of {BUILT_FROM}", _DOCS
            )
        else:
            yield ok(match[1])

    def _file(self, name: str) -> Path:
        return Path(f"~/.volc/{name}").expanduser()

    def _value(self, name: str, key: str) -> str:
        """Return a key of the account's section in one of the command's files; empty where it is
        not there.
        """
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(self._file(name), encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ClusterJobError(
                f"{self._file(name)} cannot be read: {str(error).splitlines()[0]}", _CONFIGURE
            ) from error
        return parser.get(self._section, key, fallback="").strip()

    def _credentials(self) -> Iterator[Finding]:
        given = [name for name in ("VOLC_AK", "VOLC_SK") if os.environ.get(name)]
        path = self._file("credentials")
        written = [
            key for key in ("access_key_id", "secret_access_key") if self._value("credentials", key)
        ]
        if len(given) == 1 and len(written) < 2:
            yield failed(
                f"{given[0]} is set, and the other of VOLC_AK and VOLC_SK is not", _CONFIGURE
            )
        elif not given and len(written) < 2:
            there = (
                f"{path} has no keys in [{self._section}]"
                if path.exists()
                else f"{path} is not there, nor are VOLC_AK and VOLC_SK"
            )
            yield failed(f"nobody is logged in: {there}", _CONFIGURE)
        elif len(given) == 1:
            yield warning(
                f"{given[0]} alone is set, beside the keys of {path}",
                "set both of VOLC_AK and VOLC_SK, or none",
            )
        elif given:
            yield ok("VOLC_AK and VOLC_SK")
        else:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                yield warning(
                    f"{path} may be read by others (mode {mode:04o})", f"chmod 600 {path}"
                )
            else:
                yield ok(f"[{self._section}] of {path} (mode {mode:04o})")

    def _show_region(self) -> Iterator[Finding]:
        region = self._region or self._value("config", "region")
        if region:
            yield ok(region)
        else:
            yield failed(
                "no region is named",
                "VOLC_REGION or --set region=NAME, such as cn-beijing, or `volc configure`",
            )

    # -- what the platform says ----------------------------------------------------------------------------------------

    def _list(self) -> Iterator[Finding]:
        begin = time.monotonic()
        self._newest = self._volc.newest(5)
        seconds = time.monotonic() - begin
        words = f"the platform answers, in {seconds:.1f} s"
        if seconds > _SLOW:
            yield warning(
                words, "submitting and asking after jobs will be slow: the network, or a proxy"
            )
        else:
            yield ok(words)

    def _fields(self) -> Iterator[Finding]:
        if not self._newest:
            yield unknown(
                "the account has no task yet, whose fields could be looked at",
                "look again after the first one",
            )
            return
        row, read = self._newest[0]
        there = f"the answer has {', '.join(sorted(map(str, row)))}"
        if read is None:
            yield failed(
                "a task's id, or its name, is not found in the answer of `list`",
                f"another build of {COMMAND}: {there}",
            )
            return
        strange = sorted(
            {
                each.words
                for _, each in self._newest
                if each is not None and each.words and each.state is JobState.UNKNOWN
            }
        )
        if not read.words:
            yield failed(
                "a task's state is not found in the answer of `list`",
                f"another build of {COMMAND}: {there}",
            )
        elif strange:
            yield warning(
                f"states that are not known: {listed(strange)}",
                f"known are {', '.join(STATES)}: jobs in others are UNKNOWN",
            )
        elif not made_at(read):
            yield warning(
                f"when {read.id} was made cannot be told",
                f"the attempts of a job are told apart by it; {there}",
            )
        else:
            yield ok(f"id, name, state and age are read, as of {read.id}")

    def _instances(self) -> Iterator[Finding]:
        read = next((each for _, each in self._newest if each is not None), None)
        if read is None:
            yield unknown(
                "the account has no task yet, whose workers could be asked after",
                "look again after the first one",
            )
            return
        found = self._volc.instances(read.id)
        if not found:
            yield warning(
                f"{read.id} ({read.words}) shows no worker",
                "a task that never left the queue has none: look again after a run",
            )
        else:
            yield ok(f"{read.id} shows {listed(instance.name for instance in found)}")

    def _logs(self) -> Iterator[Finding]:
        for _, read in self._newest:
            if read is None:
                continue
            try:
                lines = self._volc.lines(read.id, "worker_0", 1)
            except ClusterJobError as error:
                yield warning(
                    f"{read.id}: {error.message}",
                    "logs are how output and verdict come back; those of an old task may be gone",
                )
                return
            if lines:
                yield ok(f"{read.id} has a log")
                return
        yield unknown("no task has a log that could be looked at", "look again after the first one")

    def _flags(self) -> Iterator[Finding]:
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
                f"this build of {COMMAND} does not know {listed(absent)}",
                f"this was built from the documentation of {BUILT_FROM}",
            )
        if unread:
            yield warning(
                f"the help of {listed(unread)} cannot be read",
                f"`{COMMAND} ml_task {unread[0]} --help` should list its flags",
            )
        if not absent and not unread:
            yield ok(f"{', '.join(FLAGS)} know the flags that are used")

    # -- what the job says ---------------------------------------------------------------------------------------------

    def _task(self) -> Iterator[Finding]:
        fields = task.fields(self._spec, "doctor", upload="", entry="")
        missing = task.missing(fields)
        if missing:
            hint = task.how_to_name(missing, self._spec.options)
            yield failed(f"the platform takes no task without {' and '.join(missing)}", hint)
            return
        queue = fields.get("ResourceQueueID") or fields.get("ResourceQueueName")
        role = fields["TaskRoleSpecs"][0]
        yield ok(
            f"queue {queue}, image {fields['ImageUrl']}, {role['RoleReplicas']} x {role['Flavor']}"
        )

    def _gpus(self) -> Iterator[Finding]:
        flavor, wanted, there = (
            task.flavor_of(self._spec),
            self._spec.resources.gpus_per_node,
            task.gpus_of(self._spec),
        )
        table = f'flavors = {{"{flavor or "ml.NAME"}" = 8}} in the profile\'s table set'
        if there is not None:
            idle = there - (there if wanted is None else wanted)
            words = f"{flavor} has {there}"
            yield (
                warning(
                    f"{words}: {idle} of them stay idle", "a smaller flavor, or --gpus-per-node"
                )
                if idle
                else ok(words)
            )
        elif wanted:
            yield warning(
                f"{wanted} are asked for, and how many {flavor or 'a flavor'} has is not told",
                table,
            )
        else:
            yield unknown(
                f"how many {flavor or 'a flavor'} has, the platform alone knows: a worker gets one process for each",
                table,
            )

    def _secrets(self) -> Iterator[Finding]:
        names = task.names_of_secrets(self._spec.options)
        absent = [name for name in names if not os.environ.get(name)]
        if absent:
            yield failed(f"not set here: {listed(absent)}", f"export {absent[0]}=...")
        else:
            yield ok(f"{listed(names)}: set here" if names else "the job names none")


def _yaml() -> Iterator[Finding]:
    if importlib.util.find_spec("yaml") is None:
        yield failed(
            "PyYAML is not installed", "`pip install pyyaml` where clusterjob is installed"
        )
    else:
        yield ok("installed")


def _command() -> Iterator[Finding]:
    check_installed()
    path = shutil.which(COMMAND) or COMMAND
    sibling = shutil.which(SIBLING)
    if sibling is None:
        beside = Path(path).resolve().parent
        yield failed(
            f"{path} does not find its sibling {SIBLING} on PATH",
            f'export PATH="{beside}:$PATH", where both have to lie',
        )
    elif Path(sibling).parent != Path(path).parent:
        yield warning(
            f"{path}, and its sibling is {sibling}", "the two should be of one installation"
        )
    else:
        yield ok(f"{path}, with {SIBLING} beside it")


def _first_task() -> Iterator[Finding]:
    yield unknown(
        "whether the queue has room, the image starts and its nodes meet, only a task can tell",
        "a first one: `clusterjob run -- hostname`, with the same options",
    )


def _is_help(answer: Answer) -> bool:
    """Return whether an answer lists flags: several lines, each of which begins with one."""
    lines = (answer.out + "\n" + answer.err).splitlines()
    return (
        not answer.timed_out
        and sum(re.match(r"\s*--?[a-z]", line) is not None for line in lines) > 1
    )
