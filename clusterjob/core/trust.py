"""Decide whether settings of a project's configuration file may be used.

A cloned repository may contain a configuration file. Its numbers and names are harmless. Every
other setting executes something or sends a job to another cluster: a command that would use such a
setting needs the user's trust in the file. No other user may be able to write the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.core.options import read_setting
from clusterjob.errors import ConfigError, Untrusted
from clusterjob.node.system import files, private_dirs

# These settings do not execute anything and do not send a job to another cluster. Every other
# setting needs trust. A new setting needs trust until somebody adds it here.
HARMLESS = frozenset({
    "nodes", "gpus_per_node", "nproc_per_node", "cpus_per_task", "mem", "time", "name",
    "max_restarts", "retry", "start", "launcher", "require_gpus", "gpus", "sync", "snapshot",
    "account", "partition", "qos", "nodelist", "exclude", "reservation", "array", "after",
    "requeue", "signal_before", "hang_timeout", "join_timeout", "lease", "grace",
    "notify_on", "metrics", "metrics_port", "preflight", "spares", "until_done", "checkpoint_dir",
    "warn_signal",
})  # fmt: skip
HERE = ("local", "slurm")  # backends that send nothing to another machine or cluster
_NAMED_FILES = ("template", "hostfile")
LARGEST_NAMED = 4_000_000  # maximum bytes of a file that a configuration file refers to
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


def check(path: Path, data: Mapping[str, Any], lines: Sequence[RiskySetting]) -> None:
    """Refuse settings of a project's file until the user has trusted the file.

    Args:
        path: the project's file.
        data: its content.
        lines: the settings of the file that the command would use and that need trust.

    Raises:
        Untrusted: the user has to check the settings first.
    """
    if not lines or is_trusted(path, data):
        return
    count = "1 line in it" if len(lines) == 1 else f"{len(lines)} lines in it"
    error = Untrusted(
        f"{path} is not trusted, and this command would execute or follow {count}",
        f"if you know who wrote it: `clusterjob trust {path}` shows the lines and trusts the file",
        lines=[line.text() for line in lines],
    )
    error.path, error.data = path, data
    raise error


def digest(path: Path, data: Mapping[str, Any]) -> str:
    """Return a hash of a file's settings that need trust, and of the files that it names.

    Raises:
        ConfigError: a file that it names is a pipe or a device, or too large.
    """
    lines = sorted((line.table, line.key, repr(line.value)) for line in risky_settings(data))
    found = hashlib.sha256(json.dumps(lines).encode())
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
