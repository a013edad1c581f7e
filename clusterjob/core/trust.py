"""Decide whether settings of a project's configuration file may be used.

The decision depends on the users who could have written the file, on the program that the user
runs, and on the files that the user has trusted. A cloned repository may contain a configuration
file. Its numbers and names are harmless. Every other setting executes something or sends a job to
another cluster. A job of the same project may use such a setting. A job of another program may use
it only after ``clusterjob trust``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.core.options import read_setting
from clusterjob.errors import ConfigError, Untrusted
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs

# These settings do not execute anything and do not send a job to another cluster. Every other
# setting needs trust. A new setting needs trust until somebody adds it here.
HARMLESS = frozenset({
    "nodes", "gpus_per_node", "nproc_per_node", "cpus_per_task", "mem", "time", "name",
    "max_restarts", "retry", "start", "launcher", "require_gpus", "gpus", "sync", "snapshot",
    "account", "partition", "qos", "nodelist", "exclude", "reservation", "array", "after",
    "requeue", "signal_before", "hang_timeout", "join_timeout", "heartbeat", "lease", "grace",
    "notify_on", "metrics", "metrics_port", "preflight", "spares", "until_done", "checkpoint_dir",
    "warn_signal",
})  # fmt: skip
HERE = ("local", "slurm")  # backends that send nothing to another machine or cluster
_NAMED_FILES = ("template", "hostfile")
LARGEST_NAMED = 4_000_000  # maximum bytes of a file that a configuration file refers to
_SCRIPTS = (".py", ".sh")
_INTERPRETERS = re.compile(
    r"(?:python[0-9.]*|pypy[0-9.]*|bash|sh|dash|ksh|zsh|env|torchrun|accelerate|deepspeed)",
    re.ASCII,
)
_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)  # modules that are run with python -m
_MARKS = (".git", ".hg", ".svn")


@dataclass(frozen=True)
class RiskySetting:
    """One setting in a configuration file.

    Attributes:
        table: TOML table, such as ``[clusters.lab]``; empty at the top of the file.
        key: name of the setting.
        value: value as read from TOML.
    """

    table: str
    key: str
    value: Any

    def text(self) -> str:
        """Return the setting as one line without terminal control characters and passwords."""
        if self.key == "notify":  # a URL contains a password
            return f"{self.table} {self.key} = ...".lstrip()
        return f"{self.table} {self.key} = {json.dumps(self.value, default=str)}".lstrip()


@dataclass(frozen=True)
class Usage:
    """What a command does with the settings.

    Attributes:
        executes: whether the command executes anything or contacts a host; a dry run does neither.
        program: the program that a job will run.
        sources: files with the code that submits the job.
    """

    executes: bool = True
    program: Program | None = None
    sources: tuple[Path, ...] = ()


LOOK = Usage(executes=False)


def why_ignored(path: Path) -> str:
    """Return why a project's file is ignored; empty if no other user could have written it.

    The check includes its directory and the directories above, up to the top of its repository.
    """
    top = next(
        (
            number
            for number, folder in enumerate(path.parents)
            if any(os.path.exists(folder / mark) for mark in _MARKS)
        ),
        0,
    )
    try:
        if why := private_dirs.other_writers(path):
            return why
        for folder in list(path.parents)[: top + 1]:
            if why := private_dirs.other_writers(folder):
                return f"{folder}: {why}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def risky_settings(data: Mapping[str, Any]) -> list[RiskySetting]:
    """Return all settings of a file that execute something or send a job to another cluster."""
    found = (
        [RiskySetting("", "cluster", value=data["cluster"])]
        if data.get("cluster", HERE[0]) not in HERE
        else []
    )
    tables = {"[defaults]": data.get("defaults", {})} | {
        f"[clusters.{name}]": table for name, table in data.get("clusters", {}).items()
    }
    for table, values in tables.items():
        for key, value in values.items():
            if key not in HARMLESS and not (key == "backend" and value in HERE):
                found.append(RiskySetting(table, key, value=value))
    return found


def check(
    path: Path,
    data: Mapping[str, Any],
    lines: Iterable[RiskySetting],
    workdirs: Sequence[Path],
    use: Usage,
) -> None:
    """Refuse settings of a project's file that the user has not allowed.

    The user allows them by running a program of the project, or by trusting the file.

    Args:
        path: the project's file.
        data: its content.
        lines: the settings of the file that the command would use and that need trust.
        workdirs: the directory in which the program starts. If the project's file sets it, also the
            user's current directory: relative to each of the two, the program's path must lead
            into the project. Otherwise a file could set `workdir` to make another project's program
            look like its own.
        use: how the command will use the settings.

    Raises:
        Untrusted: the user has to check the settings first.
    """
    lines = list(lines)
    if not lines or not use.executes or is_trusted(path, data):
        return
    begun = _begun(use.program, workdirs) if use.program is not None else None
    if begun is not None and all(_is_below(workdir / begun, path.parent) for workdir in workdirs):
        return
    if any(_is_below(source, path.parent) for source in use.sources):
        return
    count = "1 line in it" if len(lines) == 1 else f"{len(lines)} lines in it"
    raise Untrusted(
        f"{path} is not trusted, and this command would execute or follow {count}",
        f"if you know who wrote it: `clusterjob trust {path}` shows the lines and trusts the file",
        lines=[line.text() for line in lines],
    )


def _begun(program: Program, workdirs: Sequence[Path]) -> str | None:
    """Return the path that a program starts from; None if it is unknown.

    It is a script, or the file or directory of a module.
    """
    if program.kind == "module":
        return _script_of(("-m", program.target, *program.args), workdirs)
    if program.kind == "script":
        return program.target
    if not _INTERPRETERS.fullmatch(Path(program.target).name):
        return program.target if os.sep in program.target else None
    if os.sep in program.target and not os.path.isabs(program.target):
        return program.target
    return _script_of(program.args, workdirs)


def _script_of(words: Sequence[str], workdirs: Sequence[Path]) -> str | None:
    """Return the script or module that an interpreter or launcher runs; None if it is unclear.

    Example: ``train.py`` in ``torchrun --nproc-per-node 2 train.py``.
    """
    before = ""
    for word in words:
        after_option, is_module = (
            before.startswith("-") and "=" not in before,
            before in ("-m", "--module"),
        )
        before = word
        if is_module:
            module = word.replace(".", os.sep)
            if any((at / module).is_dir() or (at / f"{module}.py").is_file() for at in workdirs):
                return module
            if word not in _LAUNCHERS:
                return _installed_at(word)
        elif word == "-" or re.fullmatch("-[A-Za-z]*c", word):  # the program is not a file
            return None
        elif (
            word.startswith("-")
            or re.match(r"\w+=", word)
            or word == "launch"
            or _INTERPRETERS.fullmatch(Path(word).name)
        ):
            continue
        # A word after an option may be the option's value, unless it is a script.
        elif not after_option or word.endswith(_SCRIPTS):
            return word if any((at / word).is_file() for at in workdirs) else None
    return None


def _installed_at(module: str) -> str | None:
    """Return the path where a module's package is installed.

    For a package that is not installed, return its name, as a path in the working directory.
    """
    try:
        # Only the top-level name: with a submodule, find_spec would import the package.
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        return module
    return (
        found.origin
        if found.has_location
        else next(iter(found.submodule_search_locations or ()), None)
    )


def _is_below(place: Path, root: Path) -> bool:
    """Return whether a path is inside a directory, either as written or with links resolved."""
    return Path(os.path.abspath(place)).is_relative_to(root) or place.resolve().is_relative_to(
        root.resolve()
    )


def digest(path: Path, data: Mapping[str, Any]) -> str:
    """Return a hash of a file's settings and of the content of the files that it names.

    Raises:
        ConfigError: a file that it names is a pipe or a device, or too large.
    """
    found = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode())
    for table in (data.get("defaults", {}), *data.get("clusters", {}).values()):
        names = [*(table.get(key) for key in _NAMED_FILES), _ssh_config_of(table)]
        for name in names:
            if isinstance(name, str):
                try:
                    content = files.read_regular(
                        path.parent / Path(name).expanduser(), LARGEST_NAMED
                    )
                except (OSError, RuntimeError):
                    content = b""
                except ValueError as error:
                    raise ConfigError(f"{path} cannot be trusted: {error}") from error
                found.update(hashlib.sha256(content).digest())
    return found.hexdigest()


def _ssh_config_of(table: Mapping[str, Any]) -> str | None:
    """Return the ssh configuration that a table names, in any form that ``set`` accepts."""
    try:
        named = read_setting("set", table.get("set", {}), origin="").get("ssh_config")
    except ConfigError:  # the code that uses the table reports the error
        return None
    return named if isinstance(named, str) else None


def is_trusted(path: Path, data: Mapping[str, Any]) -> bool:
    """Return whether the user has trusted a file with exactly this content.

    Raises:
        ConfigError: see `digest`.
    """
    known = _recorded().get(str(path.resolve()))
    return known is not None and known == digest(path, data)


def record(path: Path, data: Mapping[str, Any]) -> None:
    """Record that the user trusts a file with its current content.

    Raises:
        ConfigError: the record cannot be written, or see `digest`.
    """
    place = _place()
    try:
        private_dirs.make(place.parent)
        files.write_json(
            place,
            {"schema": 1, "trusted": {**_recorded(), str(path.resolve()): digest(path, data)}},
        )
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written: {error.strerror}",
            "set XDG_CONFIG_HOME to another directory",
        ) from error


def _recorded() -> dict[str, Any]:
    place = _place()
    try:
        found = (
            {}
            if private_dirs.other_writers(place) or private_dirs.other_writers(place.parent)
            else files.read_json(place)
        )
    except OSError:
        return {}
    trusted = found.get("trusted") if isinstance(found, dict) else None
    return trusted if isinstance(trusted, dict) else {}


def _place() -> Path:
    from platformdirs.unix import Unix  # the same directories on macOS

    return Unix("clusterjob").user_config_path / "trusted.json"
