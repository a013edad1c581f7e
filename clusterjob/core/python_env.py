"""Python environments that travel with a job: a uv project, or a packed environment.

This is the submit half: it reads the project or the archive, and computes the digest under which
each machine keeps the prepared environment. ``templates/python-env.sh.j2`` prepares it there.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.core.render import Quoted, sh
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.system import files, private_dirs

PYTHON = "python"  # the interpreter of a prepared environment, which is first on PATH
UNUSED_DAYS = 14  # days without a use after which a machine removes an environment
_DIGESTS = "archive-digests.json"  # in the user's cache directory
_MAX_DIGESTS = 200  # maximum number of remembered digests
_CHUNK = 1 << 20
# Formats of an archive: the first bytes, and the name that the template knows. tar has its mark at
# byte 257.
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"PK\3\4": "zip",
    b"hsqs": "squashfs",
}
_TAR_MARK = slice(257, 262)


@dataclass(frozen=True)
class PythonEnv:
    """The Python environment of a job.

    Attributes:
        kind: ``uv``, or the format of the archive.
        digest: SHA-256 of the file that the environment is made from.
        name: name of that file in the job's directory; empty if it stays where it is.
        data: content of that file; empty if it stays where it is.
        source: the archive on this machine; None for uv.
        size: bytes of the archive.
        not_installed: packages of the uv project that come from the job's code.
        imports: directories of the job's code for PYTHONPATH, relative to the working directory.
        requests: uv's requests for an interpreter.
        notes: messages for the user.
    """

    kind: str
    digest: str
    name: str = ""
    data: bytes = b""
    source: Path | None = None
    size: int = 0
    not_installed: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    requests: str = ""
    notes: tuple[str, ...] = ()


def travels(spec: JobSpec) -> bool:
    """Return whether each machine prepares the job's environment."""
    return spec.uv or spec.env_archive is not None


def interpreter(spec: JobSpec) -> str:
    """Return the interpreter that the node's script starts."""
    return PYTHON if travels(spec) else spec.python


def read(spec: JobSpec) -> PythonEnv | None:
    """Return the environment of a job; None if the job uses an interpreter of the machine.

    Raises:
        SpecError: a file of the uv project or the archive is missing or not usable.
    """
    if spec.uv:
        from clusterjob.core import uv_project

        return uv_project.read(spec.workdir, spec.python)
    if spec.env_archive is None:
        return None
    path = spec.env_archive
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise SpecError(f"--env-archive {path}: it is not a file", "pack it with conda-pack")
        kind = _format(path)
        digest = _digest(path, found)
    except OSError as error:
        raise SpecError(f"--env-archive {path}: {error.strerror}") from error
    return PythonEnv(kind, digest, source=path, size=found.st_size)


def values(env: PythonEnv | None, spec: JobSpec, job_dir: str, *, sent: bool) -> dict[str, Any]:
    """Return the template's variables of an environment; empty without one.

    Args:
        env: the environment.
        spec: the job.
        job_dir: shell code of the job's directory on the nodes, such as ``"$CLUSTERJOB_JOB_DIR"``.
        sent: whether the archive is in the store of files beside the job's directory.
    """
    if env is None:
        return {}
    if env.name:
        source: str = Quoted(f"{job_dir}/{sh(env.name)}")
    elif sent:
        source = Quoted(f"{job_dir}/../../store/{env.digest[:2]}/{env.digest}")
    else:
        source = str(env.source)
    return {
        "environment": {
            "kind": env.kind,
            "digest": env.digest,
            "source": source,
            "cache": spec.env_cache,
            "days": UNUSED_DAYS,
            "request": env.requests,
            "not_installed": [
                word for name in env.not_installed for word in ("--no-install-package", name)
            ],
            "imports": list(env.imports),
        }
    }


def _format(path: Path) -> str:
    with path.open("rb") as stream:
        head = stream.read(512)
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return name
    if head[_TAR_MARK] == b"ustar":
        return "tar"
    raise SpecError(
        f"--env-archive {path}: it is no archive of a known format",
        "use .tar.gz, .tar.zst, .zip or .squashfs, as conda-pack and venv-pack write them",
    )


def _digest(path: Path, found: os.stat_result) -> str:
    """Return the SHA-256 of a file; it is computed once for each (path, size, time, inode)."""
    from clusterjob.core.node_zip import cache_directory

    kept = (cache_directory() or Path(os.devnull)) / _DIGESTS
    key = f"{path.resolve()}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ino}"
    known = _known_digests(kept)
    if key in known:
        return str(known[key])
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(_CHUNK):
            digest.update(data)
    known = dict([*known.items(), (key, digest.hexdigest())][-_MAX_DIGESTS:])
    try:
        private_dirs.make(kept.parent)
        files.write_json(kept, known)
    except OSError:
        pass  # the next submission computes it again
    return digest.hexdigest()


def _known_digests(kept: Path) -> Mapping[str, Any]:
    """Return the remembered digests; none if another user could have written them."""
    try:
        if private_dirs.other_writers(kept) or private_dirs.other_writers(kept.parent):
            return {}
        found = json.loads(files.read_regular(kept, _CHUNK))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
