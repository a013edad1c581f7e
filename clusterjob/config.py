"""Where a job's settings come from: flags > CLUSTERJOB_* > the cluster's profile > the project's and the user's defaults.

# clusterjob.toml, [tool.clusterjob] of pyproject.toml, or config.toml in the user's configuration directory
cluster = "lab"                  # used without --cluster
[defaults]
max_restarts = 1
[clusters.lab]
backend = "local"
gpus_per_node = 8
setup = ["module load cuda"]
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from clusterjob.errors import ConfigError, UnknownCluster
from clusterjob.settings import SETTINGS, read_setting

_TOP_KEYS = ("cluster", "defaults", "clusters")
_VARIABLE_PREFIX = "CLUSTERJOB_"


@dataclass(frozen=True)
class Settings:
    """What holds for one job.

    Attributes:
        cluster: the profile's, or else the backend's, name.
        backend: which backend serves it.
        values: the settings that were given anywhere, by key.
        origins: for each of them, where the value was written; a merged one names all places.
    """

    cluster: str
    backend: str
    values: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file that was found and read."""

    path: Path
    data: Mapping[str, Any]

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
    fallback: str = "",
) -> Settings:
    """Return the settings of a job.

    Args:
        flags: what the command line gave, by key of `SETTINGS`.
        cluster: what --cluster named, or None.
        environ: where CLUSTERJOB_* variables are read from.
        directory: where the search for the project's file begins; it goes upwards.
        backends: names of the backends, each of which is a cluster's name too.
        fallback: the cluster where nobody names one; by default the first of the backends.

    Raises:
        ConfigError: a file is broken or holds an unknown key, or a value makes no sense.
        UnknownCluster: no profile and no backend has the name.
    """
    files = find_files(directory)
    cluster, chosen_at = _choose(cluster, environ, files, fallback or backends[0])
    profiles = {name for file in files for name in file.clusters}
    if cluster not in profiles and cluster not in backends:
        raise UnknownCluster(f"there is no cluster {cluster!r} ({chosen_at})", _nearest(cluster, [*profiles, *backends]))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, base, layer in _layers(files, cluster, environ, flags, directory):
        for key, value in layer.items():
            read = read_setting(key, value, origin(key))
            read = base / read if isinstance(read, Path) else read
            merge = SETTINGS[key].merge and key in values
            values[key] = _merged(values[key], read) if merge else read
            origins[key] = f"{origins[key]}; {origin(key)}" if merge else origin(key)
    backend = cluster
    if cluster in profiles:
        backend = _backend_of(cluster, files, backends)
    return Settings(cluster, backend, values, origins)


def _backend_of(cluster: str, files: list[ConfigFile], backends: Sequence[str]) -> str:
    """Return the backend of a profile: one file may say how the cluster is reached, another what is needed there."""
    for file in reversed(files):
        backend = file.clusters.get(cluster, {}).get("backend")
        if backend is not None:
            if isinstance(backend, str) and backend in backends:
                return backend
            message = f"{file.path}: [clusters.{cluster}] names no known backend ({backend!r})"
            raise ConfigError(message, _nearest(str(backend), list(backends)))
    if cluster in backends:
        return cluster
    raise ConfigError(f"[clusters.{cluster}] names no backend", f"write backend = one of {', '.join(backends)}")


def _choose(cluster: str | None, environ: Mapping[str, str], files: list[ConfigFile], fallback: str) -> tuple[str, str]:
    if cluster is not None:
        return cluster, "--cluster"
    if environ.get("CLUSTERJOB_CLUSTER"):
        return environ["CLUSTERJOB_CLUSTER"], "CLUSTERJOB_CLUSTER"
    for file in reversed(files):
        if "cluster" in file.data:
            return file.data["cluster"], str(file.path)
    return fallback, "default"


def _layers(
    files: list[ConfigFile], cluster: str, environ: Mapping[str, str], flags: Mapping[str, Any], directory: Path
) -> Iterator[tuple[Callable[[str], str], Path, Mapping[str, Any]]]:
    """Yield (origin of a key, what its paths are relative to, values), the weakest first."""
    for file in files:
        yield partial("{}: [defaults] {}".format, file.path), file.path.parent, file.data.get("defaults", {})
    for file in files:
        profile = {key: value for key, value in file.clusters.get(cluster, {}).items() if key != "backend"}
        yield partial("{}: [clusters.{}] {}".format, file.path, cluster), file.path.parent, profile
    variables = {key: environ[_variable(key)] for key, setting in SETTINGS.items() if not setting.merge and environ.get(_variable(key))}
    yield _variable, directory, variables
    yield lambda key: f"--{key.replace('_', '-')}", directory, flags


def _variable(key: str) -> str:
    return _VARIABLE_PREFIX + key.upper()


def _merged(before: Any, added: Any) -> Any:
    return before | added if isinstance(before, dict) else before + added


def find_files(directory: Path) -> list[ConfigFile]:
    """Return the user's file and the project's, as far as they exist, the weaker one first.

    Raises:
        ConfigError: one of them is broken or holds an unknown key.
    """
    import platformdirs

    found = []
    user = platformdirs.user_config_path("clusterjob") / "config.toml"
    if user.is_file():
        found.append(_check(ConfigFile(user, _read(user))))
    for folder in (directory, *directory.parents):
        own, project = folder / "clusterjob.toml", folder / "pyproject.toml"
        if own.is_file():
            return [*found, _check(ConfigFile(own, _read(own)))]
        table = _pyproject_table(project) if project.is_file() else None
        if table is not None:
            return [*found, _check(ConfigFile(project, table))]
    return found


def _pyproject_table(path: Path) -> dict[str, Any] | None:
    """Return our table of a pyproject.toml; a file that is broken matters only if it seems to have one."""
    text = path.read_text(errors="replace")
    if "clusterjob" not in text:
        return None
    try:
        table = _read(path).get("tool", {}).get("clusterjob")
    except ConfigError:
        if re.search(r"^\s*\[\s*tool\s*\.\s*clusterjob\b", text, re.MULTILINE):
            raise
        return None
    return table if isinstance(table, dict) else None


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return data
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _check(file: ConfigFile) -> ConfigFile:
    _known(file, "", file.data, _TOP_KEYS)
    if not isinstance(file.data.get("cluster", ""), str):
        raise ConfigError(f"{file.path}: cluster is not a name")
    _known(file, "[defaults] ", _table(file, "defaults"), SETTINGS)
    for name in _table(file, "clusters"):
        profile = file.clusters[name]
        if not isinstance(profile, dict):
            raise ConfigError(f"{file.path}: [clusters] {name} is not a table")
        _known(file, f"[clusters.{name}] ", profile, ["backend", *SETTINGS])
    return file


def _table(file: ConfigFile, key: str) -> Mapping[str, Any]:
    table = file.data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{file.path}: {key} is not a table", f"write [{key}] on a line of its own")
    return table


def _known(file: ConfigFile, where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"{file.path}: {where}{key} means nothing here", _nearest(key, known))


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}"
