"""Read configuration files and merge them with options and variables into a job's settings.

Options override CLUSTERJOB_* variables, variables override the cluster's profile, and the profile
overrides the defaults of the project and of the user. A configuration file is clusterjob.toml,
[tool.clusterjob] of pyproject.toml, or config.toml in the user's configuration directory::

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
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from clusterjob.core import trust
from clusterjob.core.options import OPTIONS, read_setting
from clusterjob.core.trust import RiskySetting, Usage
from clusterjob.core.units import show_size
from clusterjob.errors import ConfigError, UnknownCluster, did_you_mean
from clusterjob.node.system.files import read_regular
from clusterjob.node.system.sanitize import sanitize

_TOP_KEYS = ("cluster", "defaults", "clusters")
_MAX_BYTES = 1 << 20  # maximum bytes of a configuration file


class ProjectSshConfig(str):
    """Path of an ssh configuration, from a setting of a project's file.

    ssh may execute commands when it reads such a configuration.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Settings:
    """The settings of one job.

    Attributes:
        cluster: name of the profile, or of the backend if there is no such profile.
        backend: name of the cluster's backend.
        values: the settings that a file, a variable or an option sets, by key.
        origins: the origin of each value, by key; for a merged value, all origins.
    """

    cluster: str
    backend: str
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


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


def resolve(
    flags: Mapping[str, Any],
    cluster: str | None,
    environ: Mapping[str, str],
    directory: Path,
    backends: Sequence[str],
    fallback: Callable[[], str] | None = None,
    use: Usage = trust.LOOK,
) -> Settings:
    """Return the settings of a job.

    Args:
        flags: options of the command line, by key of `OPTIONS`.
        cluster: value of --cluster, or None.
        environ: environment with the CLUSTERJOB_* variables.
        directory: directory in which the search for the project's file starts; the search continues
            in the directories above.
        backends: names of the backends; each is also the name of a cluster.
        fallback: returns the cluster; called only if no cluster is named. The default is the first
            backend.
        use: how the caller will use the settings; by default nothing is executed.

    Raises:
        Untrusted: the project's file would execute something, and the user has not trusted it.
        ConfigError: a file is broken or has an unknown key, or a value is invalid.
        UnknownCluster: no profile and no backend has this name.
    """
    files = find_files(directory)
    cluster, chosen_at = _choose(
        cluster, environ, files=files, fallback=fallback or (lambda: backends[0])
    )
    profiles = {name for file in files for name in file.clusters}
    if cluster not in profiles and cluster not in backends:
        raise UnknownCluster(
            f"there is no cluster {cluster!r} ({chosen_at})",
            _nearest(cluster, [*profiles, *backends]),
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    of_project: dict[str, list[RiskySetting]] = {}
    for origin, base, layer, table in _layers(
        files, cluster, environ=environ, flags=flags, directory=directory
    ):
        for key, value in layer.items():
            read = _below(base, key, value=read_setting(key, value, origin=origin(key)))
            if table:
                _check_named_files(origin(key), key, value=read)
            if table and key == "set" and "ssh_config" in read:
                read = read | {"ssh_config": ProjectSshConfig(read["ssh_config"])}
            merge = OPTIONS[key].merge and key in values
            if merge:
                before = values[key]
                read = before | read if isinstance(before, dict) else before + read
            values[key] = read
            origins[key] = f"{origins[key]}; {origin(key)}" if merge else origin(key)
            lines = of_project.get(key, []) if merge else []
            of_project[key] = lines + ([RiskySetting(table, key, value=value)] if table else [])
    backend = _backend_of(cluster, files, backends=backends)
    settings = Settings(cluster, backend, values=values, origins=origins)
    if files and not files[-1].own:
        held = [
            line for key, lines in of_project.items() if key not in trust.HARMLESS for line in lines
        ]
        held += _sent_elsewhere(files[-1], settings, chosen_at=chosen_at)
        workdirs = [
            directory / values.get("workdir", ""),
            *([directory] if of_project.get("workdir") else ()),
        ]
        trust.check(files[-1].path, files[-1].data, lines=held, workdirs=workdirs, use=use)
    return settings


def _below(base: Path, key: str, value: Any) -> Any:
    """Return a setting's value with its paths joined to a base, such as the file's directory."""
    if key == "set" and isinstance(value, dict) and "ssh_config" in value:
        place = value["ssh_config"]
        return value if place.startswith("~") else value | {"ssh_config": str(base / place)}
    if key == "secret":
        return tuple(one.beside(base) for one in value)
    return base / value if isinstance(value, Path) else value


def _check_named_files(origin: str, key: str, value: Any) -> None:
    """Refuse a setting of a project's file that names a pipe, a device or a huge file.

    Reading a pipe or a device could block forever.

    Raises:
        ConfigError: the value names such a file.
    """
    named: list[Path] = []
    if isinstance(value, Path):
        named = [value]
    elif key == "secret":
        named = [one.file for one in value if one.file is not None]
    elif key == "set" and "ssh_config" in value:
        named = [Path(value["ssh_config"])]
    for place in named:
        try:
            found = place.expanduser().stat()
        except (OSError, RuntimeError, ValueError):  # the code that reads the file reports this
            continue
        regular = stat.S_ISREG(found.st_mode) and found.st_size <= trust.LARGEST_NAMED
        if not regular and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"{origin}: {place} is no regular file of at most {show_size(trust.LARGEST_NAMED)}"
            )


def _sent_elsewhere(
    project: ConfigFile, settings: Settings, chosen_at: str
) -> Iterator[RiskySetting]:
    """Yield the lines of a project's file that send the job to another cluster.

    This machine and the Slurm that it submits to do not count as another cluster.
    """
    if settings.backend in trust.HERE and "login" not in settings.values:
        return
    if chosen_at == str(project.path):
        yield RiskySetting("", "cluster", value=settings.cluster)
    if backend := project.clusters.get(settings.cluster, {}).get("backend"):
        yield RiskySetting(f"[clusters.{settings.cluster}]", "backend", value=backend)


def _backend_of(cluster: str, files: list[ConfigFile], backends: Sequence[str]) -> str:
    """Return the backend of a cluster: the one that a file names, else that of the same name.

    Raises:
        ConfigError: no file names a backend, or the backend is unknown.
    """
    for file in reversed(files):
        backend = file.clusters.get(cluster, {}).get("backend")
        if backend is not None:
            if isinstance(backend, str) and backend in backends:
                return backend
            raise ConfigError(
                f"{file.path}: [clusters.{cluster}] names no known backend ({backend!r})",
                _nearest(str(backend), list(backends)),
            )
    if cluster in backends:
        return cluster
    raise ConfigError(
        f"[clusters.{cluster}] names no backend", f"write backend = one of {', '.join(backends)}"
    )


def _choose(
    cluster: str | None,
    environ: Mapping[str, str],
    files: list[ConfigFile],
    fallback: Callable[[], str],
) -> tuple[str, str]:
    if cluster is not None:
        return cluster, "--cluster"
    if environ.get("CLUSTERJOB_CLUSTER"):
        return environ["CLUSTERJOB_CLUSTER"], "CLUSTERJOB_CLUSTER"
    for file in reversed(files):
        if "cluster" in file.data:
            return file.data["cluster"], str(file.path)
    return fallback(), "default"


def _layers(
    files: list[ConfigFile],
    cluster: str,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
    directory: Path,
) -> Iterator[tuple[Callable[[str], str], Path, Mapping[str, Any], str]]:
    """Yield the sources of settings, lowest priority first.

    Each source is a tuple of four items: a function that returns the origin of a key; the directory
    in which relative paths start; the values by key; the TOML table for a project's file, else an
    empty text.
    """
    tables = [("[defaults]", file, file.data.get("defaults", {})) for file in files]
    tables += [(f"[clusters.{cluster}]", file, file.clusters.get(cluster, {})) for file in files]
    for table, file, values in tables:
        options = {key: value for key, value in values.items() if key in OPTIONS}
        origin = partial("{}: {} {}".format, file.path, table)
        yield origin, file.path.parent, options, "" if file.own else table
    variables = {
        option.key: environ[option.variable]
        for option in OPTIONS.values()
        if environ.get(option.variable)
    }
    yield lambda key: OPTIONS[key].variable, directory, variables, ""
    yield lambda key: OPTIONS[key].flag, directory, flags, ""


def find_files(directory: Path) -> list[ConfigFile]:
    """Return the user's and the project's configuration files that exist, in this order.

    The project's file overrides the user's. A project's file that another user could have written
    is ignored, with a warning.

    Raises:
        ConfigError: a file is broken or has an unknown key.
    """
    import platformdirs

    found = []
    user = platformdirs.user_config_path("clusterjob") / "config.toml"
    if user.is_file():
        found.append(_check(ConfigFile(user, _read(user), own=True)))
    project = find_project(directory)
    return [*found, project] if project is not None else found


def find_project(directory: Path) -> ConfigFile | None:
    """Return the project's file in a directory or above it; None if no file is usable.

    Raises:
        ConfigError: it is broken or has an unknown key.
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
    """Return the project's file at a path; for a directory, the one in it or above it.

    Raises:
        ConfigError: there is no file, it is broken, or another user could have written it.
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
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
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
            raise ConfigError(f"{file.path}: {where}{key} is not a known key", _nearest(key, known))


def _nearest(name: str, known: list[str]) -> str:
    return did_you_mean(name, known, f"use one of {', '.join(known)}")
