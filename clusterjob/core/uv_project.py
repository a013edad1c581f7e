"""Read a uv project for a job: pack what `uv sync --frozen` needs into one small archive."""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clusterjob.core.python_env import PYTHON, PythonEnv
from clusterjob.core.snapshot.secret_files import looks_secret
from clusterjob.core.units import show_size
from clusterjob.errors import SpecError
from clusterjob.node.system import files

NAME = "uv-project.tar"
_MAX_FILE = 16 << 20  # bytes of one file of text
_MAX_ALL = 64 << 20  # bytes of all files together; wheels in the project count
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # of a package (PEP 508)
_HINTS = {"uv.lock": "`uv lock` writes uv.lock"}
_REQUESTS = ("python3", PYTHON)  # interpreters that were not chosen by the user


def read(workdir: Path, python: str) -> PythonEnv:
    """Return the environment of the uv project in a working directory.

    The project itself and the other packages whose source is in the working directory are not part
    of the environment: the job imports them from its own copy of the code.

    Args:
        workdir: the working directory, with pyproject.toml and uv.lock.
        python: the interpreter that the user chose for the environment; ``python`` or ``python3``
            for the choice of uv.

    Raises:
        SpecError: a file is missing, too large, or not valid.
    """
    members = {"pyproject.toml": _text(workdir, "pyproject.toml", needed=True)}
    members["uv.lock"] = _text(workdir, "uv.lock", needed=True)
    for name in (".python-version", "uv.toml"):
        if content := _text(workdir, name):
            members[name] = content
    project = _parse(workdir, "pyproject.toml", content=members["pyproject.toml"])
    lock = _parse(workdir, "uv.lock", content=members["uv.lock"])
    if not isinstance(lock.get("version"), int):
        raise SpecError(f"--uv: {workdir / 'uv.lock'} has no version", _HINTS["uv.lock"])
    packages = [each for each in lock.get("package", []) if isinstance(each, dict)]
    not_installed, imports = [], []
    for package in packages:
        source = package.get("source", {})
        directory = next(
            (source[key] for key in ("editable", "directory", "virtual") if key in source), None
        )
        if isinstance(directory, str):
            below = _below(workdir, directory)
            name = str(package.get("name", ""))
            if not _NAME.fullmatch(name):
                raise SpecError(f"uv.lock has a package with the name {name!r}")
            not_installed.append(name)
            if "virtual" not in source:
                has_src = (workdir / below / "src").is_dir()
                imports.append(os.path.normpath(f"{below}/src" if has_src else below))
            if below != ".":
                path = f"{below}/pyproject.toml"
                members[path] = _text(workdir, path, needed=True)
        for path in _local_files(package):
            below = _below(workdir, path)
            members[below] = _text(workdir, below, needed=True, limit=_MAX_ALL)
    if (size := sum(map(len, members.values()))) > _MAX_ALL:
        raise SpecError(
            f"the files of the uv project have {show_size(size)}, more than {show_size(_MAX_ALL)}",
            "put its wheels on an index, or use --env-archive",
        )
    data = _pack(members)
    return PythonEnv(
        "uv",
        hashlib.sha256(data).hexdigest(),
        name=NAME,
        data=data,
        not_installed=tuple(not_installed),
        imports=tuple(imports),
        requests=_request(members, project, python),
        notes=tuple(_outdated(packages, project)),
    )


def _text(workdir: Path, name: str, *, needed: bool = False, limit: int = _MAX_FILE) -> bytes:
    """Return a file of the project; links may not lead out of it, or to a secret.

    Raises:
        SpecError: the file is missing, too large, or not one that may be sent.
    """
    top = workdir.resolve()
    place = Path(os.path.realpath(top / name))
    if not place.is_relative_to(top):
        raise SpecError(f"--uv: {workdir / name} leads out of {workdir}", "copy the file into it")
    try:
        content = files.read_regular(place, limit)
        real = place.relative_to(top)
        if looks_secret(top, str(real), is_directory=False) or any(
            looks_secret(top, str(folder), is_directory=True) for folder in real.parents
        ):
            raise SpecError(f"--uv: {workdir / name} looks like a secret, and is not sent")
        return content
    except FileNotFoundError as error:
        if not needed:
            return b""
        raise SpecError(
            f"--uv: there is no {name} in {workdir}",
            _HINTS.get(name, "--workdir names the project"),
        ) from error
    except OSError as error:
        raise SpecError(
            f"--uv: {workdir / name} cannot be read: {error.strerror}", _HINTS.get(name, "")
        ) from error
    except ValueError as error:
        raise SpecError(f"--uv: {error}", _HINTS.get(name, "")) from error


def _parse(workdir: Path, name: str, content: bytes) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found: dict[str, Any] = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(
            f"--uv: {workdir / name} is not valid TOML: {error}", _HINTS.get(name, "")
        ) from error
    return found


def _below(workdir: Path, path: str) -> str:
    """Return a path of the lock, relative to the working directory.

    Raises:
        SpecError: it leads out of the working directory.
    """
    found = os.path.relpath(os.path.join(workdir, path), workdir)
    if found == ".." or found.startswith("../") or "\0" in found:
        raise SpecError(
            f"uv.lock has a package at {path}, outside of the working directory {workdir}",
            "--workdir names the directory that has all of the project",
        )
    return found


def _local_files(package: Mapping[str, Any]) -> Iterator[str]:
    """Yield the wheels and source archives of a package that are files of the project."""
    source = package.get("source", {})
    if isinstance(source.get("path"), str):
        yield source["path"]
    registry = source.get("registry")
    if isinstance(registry, str) and "://" not in registry:
        for each in (package.get("sdist"), *package.get("wheels", ())):
            if isinstance(each, dict) and isinstance(each.get("path"), str):
                yield f"{registry}/{each['path']}"


def _request(members: Mapping[str, bytes], project: Mapping[str, Any], python: str) -> str:
    """Return uv's request for an interpreter, in the order in which uv looks for one."""
    if python not in _REQUESTS:
        return python
    for line in members.get(".python-version", b"").decode(errors="replace").splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    table = project.get("project")
    wanted = table.get("requires-python") if isinstance(table, dict) else None
    return wanted if isinstance(wanted, str) else ""


def _outdated(packages: list[dict[str, Any]], project: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note if pyproject.toml requires a package that uv.lock does not have."""
    table = project.get("project")
    required = table.get("dependencies", ()) if isinstance(table, dict) else ()
    locked = {_normal(str(package.get("name", ""))) for package in packages}
    missing = [
        found[0]
        for each in required
        if isinstance(each, str)
        and (found := _NAME.match(each.strip()))
        and _normal(found[0]) not in locked
    ]
    if missing:
        yield f"uv.lock lacks {', '.join(missing)} of pyproject.toml: `uv lock` updates it"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pack(members: Mapping[str, bytes]) -> bytes:
    """Return a tar of the files; equal files give equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(members):
            entry = tarfile.TarInfo(name)
            entry.size = len(members[name])
            entry.mode = 0o600
            archive.addfile(entry, io.BytesIO(members[name]))
    return buffer.getvalue()
