"""Find and read configuration files, and check their keys.

A configuration file is clusterjob.toml, [tool.clusterjob] of pyproject.toml, or config.toml in the
user's configuration directory::

    cluster = "lab"  # used without --cluster

    [defaults]
    max_restarts = 1

    [clusters.lab]
    backend = "local"
    gpus_per_node = 8
    setup = ["module load cuda"]
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from clusterjob.core import trust
from clusterjob.core.options import OPTIONS, check_unit
from clusterjob.errors import ConfigError, did_you_mean
from clusterjob.node.system.files import read_regular
from clusterjob.node.system.sanitize import sanitize

_TOP_KEYS = ("cluster", "defaults", "clusters")
_MAX_BYTES = 1 << 20  # maximum bytes of a configuration file


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file that was found and read.

    Attributes:
        path: path of the file.
        data: its content.
        own: whether it is the user's file, not a project's.
    """

    path: Path
    data: Mapping[str, Any]
    own: bool = False

    @property
    def clusters(self) -> Mapping[str, Mapping[str, Any]]:
        """The profiles, by name."""
        return cast(Mapping[str, Mapping[str, Any]], self.data.get("clusters", {}))


def find_files(directory: Path) -> list[ConfigFile]:
    """Return the user's and the project's configuration files that exist, in this order.

    The project's file overrides the user's. A project's file that another user could have written
    is ignored, with a warning.

    Raises:
        ConfigError: a file is broken or has an unknown key.
    """
    from platformdirs.unix import Unix  # the same directories on macOS

    found = []
    user = Unix("clusterjob").user_config_path / "config.toml"
    if user.is_file() and _is_obeyed(user):
        found.append(_check(ConfigFile(user, _read(user), own=True)))
    project = find_project(directory)
    return [*found, project] if project is not None else found


def find_project(directory: Path) -> ConfigFile | None:
    """Return the project's file in a directory or above it; None if no file is usable.

    Raises:
        ConfigError: the file is broken or has an unknown key.
    """
    for folder in (directory, *directory.parents):
        own, project = folder / "clusterjob.toml", folder / "pyproject.toml"
        if os.path.isfile(own) and _is_obeyed(own):
            return _check(ConfigFile(own, _read(own)))
        table = _pyproject_table(project) if os.path.isfile(project) else None
        if table is not None:
            return _check(ConfigFile(project, table))
    return None


def project_file(place: Path) -> ConfigFile:
    """Return the project's file at a path, or the file in or above a directory.

    Raises:
        ConfigError: no file exists, the file is broken, or another user could have written it.
    """
    place = place.expanduser().absolute()
    if place.is_dir():
        if found := find_project(place):
            return found
        raise ConfigError(
            f"there is no usable project configuration file in {place} or above it",
            "it is clusterjob.toml, or a pyproject.toml with a table [tool.clusterjob]",
        )
    if not place.is_file():
        raise ConfigError(f"{place} does not exist")
    if why := trust.why_ignored(place):
        raise ConfigError(
            f"{place} is ignored: {why}",
            "use a file and a directory that only you can write to",
        )
    data = _pyproject_table(place) if place.name == "pyproject.toml" else _read(place)
    if data is None:
        raise ConfigError(f"{place} has no table [tool.clusterjob]")
    return _check(ConfigFile(place, data))


def _is_obeyed(path: Path) -> bool:
    """Return whether only the user could have written a project's file; else log a warning."""
    why = trust.why_ignored(path)
    if why:
        logging.getLogger("clusterjob").warning(
            "clusterjob: %s", sanitize(f"{path} is ignored: {why}")
        )
    return not why


def _pyproject_table(path: Path) -> dict[str, Any] | None:
    """Return the table [tool.clusterjob] of a pyproject.toml; None if there is none.

    Raises:
        ConfigError: the file is broken and seems to have this table.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
    if "clusterjob" not in text:
        return None
    seems_ours = re.search(r"^\s*\[\s*tool\s*\.\s*clusterjob\b", text, re.MULTILINE)
    # Only a file that seems to have [tool.clusterjob] gets the warning.
    if not _is_obeyed(path) if seems_ours else trust.why_ignored(path):
        return None
    try:
        table = _read(path).get("tool", {}).get("clusterjob")
    except ConfigError:
        if seems_ours:
            raise
        return None
    return table if isinstance(table, dict) else None


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(
            read_regular(path, _MAX_BYTES).decode().replace("\r\n", "\n")
        )
        return data
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", 'a text needs quotes: partition = "main"'
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _check(file: ConfigFile) -> ConfigFile:
    _known(file, "", table=file.data, known=_TOP_KEYS)
    cluster = file.data.get("cluster", "")
    if isinstance(cluster, dict) and cluster:
        name = next(iter(cluster))
        raise ConfigError(
            f"{file.path}: [cluster.{name}] is not a profile",
            f"write it as [clusters.{name}]",
        )
    if not isinstance(cluster, str):
        raise ConfigError(f"{file.path}: cluster is not a name", 'write cluster = "NAME"')
    _known(file, "[defaults] ", table=_table(file, "defaults"), known=OPTIONS)
    for name in _table(file, "clusters"):
        profile = file.clusters[name]
        if not isinstance(profile, dict):
            raise ConfigError(f"{file.path}: [clusters] {name} is not a table")
        _known(file, f"[clusters.{name}] ", table=profile, known=["backend", *OPTIONS])
    return file


def _table(file: ConfigFile, key: str) -> Mapping[str, Any]:
    table = file.data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"{file.path}: {key} is not a table", f"write [{key}] on a line of its own"
        )
    return table


def _known(file: ConfigFile, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"{file.path}: {where}{key} is not a known key", nearest(key, known))
        if key in OPTIONS:
            check_unit(key, table[key], f"{file.path}: {where}{key}")


def nearest(name: str, known: list[str]) -> str:
    """Return a hint that suggests a similar known name, else all known names."""
    return did_you_mean(name, known, f"use one of {', '.join(known)}")
