"""Merge options, variables and configuration files into a job's settings.

Options override CLUSTERJOB_* variables, variables override the cluster's profile, and the profile
overrides the defaults. In each table, the project's file overrides the user's file.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clusterjob.core import trust
from clusterjob.core.config_files import ConfigFile, find_files, nearest
from clusterjob.core.gpu_request import IDLE
from clusterjob.core.options import OPTIONS, read_setting
from clusterjob.core.trust import RiskySetting
from clusterjob.core.units import show_size
from clusterjob.errors import ConfigError, UnknownCluster


class ProjectSshConfig(str):
    """Path of an ssh configuration from a project's file; it can make ssh run commands."""

    __slots__ = ()


@dataclass(frozen=True)
class Settings:
    """The settings of one job.

    Attributes:
        cluster: name of the profile, or of the backend if there is no such profile.
        backend: name of the cluster's backend.
        values: the settings that a file, a variable or an option sets, by key.
        origins: the file, variable or option that sets each value, by key; a merged value has
            several, joined with semicolons.
    """

    cluster: str
    backend: str
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


def resolve(
    flags: Mapping[str, Any],
    cluster: str | None,
    environ: Mapping[str, str],
    directory: Path,
    backends: Sequence[str],
    fallback: Callable[[], str] | None = None,
    *,
    executes: bool = False,
) -> Settings:
    """Return the settings of a job.

    Args:
        flags: options of the command line, by key of `OPTIONS`.
        cluster: value of --cluster, or None.
        environ: environment with the CLUSTERJOB_* variables.
        directory: the project's file is searched in this directory and in those above.
        backends: names of the backends; each is also the name of a cluster.
        fallback: returns the cluster; called only if no cluster is named. The default is the first
            backend.
        executes: whether the caller will execute anything or contact a host; a dry run does
            neither.

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
            nearest(cluster, [*profiles, *backends]),
        )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    of_project: dict[str, list[RiskySetting]] = {}
    for origin, base, layer, table in _layers(
        files, cluster, environ=environ, flags=flags, directory=directory
    ):
        for key in layer:
            other = OPTIONS[key].excludes
            # `auto` says which GPUs, and leaves their number to the other option.
            if other and other not in layer and IDLE not in (layer[key], values.get(other)):
                values.pop(other, None)
                origins.pop(other, None)
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
    settings = Settings(
        cluster, _backend_of(cluster, files, backends=backends), values=values, origins=origins
    )
    if executes and files and not files[-1].own:
        held = [
            line for key, lines in of_project.items() if key not in trust.HARMLESS for line in lines
        ]
        held += _sent_elsewhere(files[-1], settings, chosen_at=chosen_at)
        trust.check(files[-1].path, files[-1].data, held)
    return settings


def _below(base: Path, key: str, value: Any) -> Any:
    """Return a setting's value with its relative paths below a base directory."""
    if key == "set" and isinstance(value, dict) and "ssh_config" in value:
        place = value["ssh_config"]
        return value if place.startswith("~") else value | {"ssh_config": str(base / place)}
    if key in ("secret", "notify"):
        return tuple(one.beside(base) for one in value)
    return base / value if isinstance(value, Path) else value


def _check_named_files(origin: str, key: str, value: Any) -> None:
    """Refuse a setting of a project's file that names a pipe, a device or a huge file.

    Reading a pipe or a device could block forever.

    Raises:
        ConfigError: the value names such a file.
    """
    named: list[Path] = []
    if isinstance(value, Path) and key != "env_archive":  # it is large, and only its bytes are read
        named = [value]
    elif key in ("secret", "notify"):
        named = [one.file for one in value if one.file is not None]
    elif key == "set" and "ssh_config" in value:
        named = [Path(value["ssh_config"])]
    for place in named:
        try:
            found = place.expanduser().stat()
        except (OSError, RuntimeError, ValueError):
            continue  # the code that reads the file reports the error
        regular = stat.S_ISREG(found.st_mode) and found.st_size <= trust.LARGEST_NAMED
        if not regular and not stat.S_ISDIR(found.st_mode):
            raise ConfigError(
                f"{origin}: {place} is no regular file of at most {show_size(trust.LARGEST_NAMED)}"
            )


def _sent_elsewhere(
    project: ConfigFile, settings: Settings, chosen_at: str
) -> Iterator[RiskySetting]:
    """Yield the lines of a project's file that send the job to another cluster.

    This machine and its own Slurm are not another cluster.
    """
    if settings.backend in trust.HERE and "login" not in settings.values:
        return
    if chosen_at == str(project.path):
        yield RiskySetting("", "cluster", value=settings.cluster)
    if backend := project.clusters.get(settings.cluster, {}).get("backend"):
        yield RiskySetting(f"[clusters.{settings.cluster}]", "backend", value=backend)


def _backend_of(cluster: str, files: list[ConfigFile], backends: Sequence[str]) -> str:
    """Return the backend that a file names for a cluster, else the backend of the same name.

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
                nearest(str(backend), list(backends)),
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
