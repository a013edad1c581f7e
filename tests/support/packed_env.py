"""Small Python environments for tests: packed archives, uv projects without a network."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launching import executable, new_folder, write_tree

from clusterjob.core import python_env
from clusterjob.core.render import render, sh
from clusterjob.core.spec import JobSpec
from clusterjob.node.program import Program

MODULE = "travelled"  # the module of every environment; its VALUE tells them apart
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
FORMS = ("tar.gz", "tar.zst", "tar", "zip", "squashfs")

# What the node's script defines before the environment, and what a test looks at after it.
_PRELUDE = """
refuse() { trap - EXIT; printf 'REFUSED %s\n' "$2" >&2; exit 3; }
CLUSTERJOB_TOKEN_FILE=$PWD/token
trap 'refuse 1 "$CLUSTERJOB_DOING"' EXIT
"""
_EPILOGUE = f"""
trap - EXIT
command -v python
exec python -c 'import {MODULE}, sys; print({MODULE}.VALUE, flush=True); sys.stdin.read()'
"""


def directory_env(directory: Path, value: str = "1") -> Path:
    """Return the directory of a virtual environment with the module."""
    env = directory / "plain"
    subprocess.run([BASE_PYTHON, "-m", "venv", "--without-pip", env], check=True)
    [packages] = env.glob("lib/python*/site-packages")
    (packages / f"{MODULE}.py").write_text(f"VALUE = {value!r}\n")
    return env


def archive(directory: Path, form: str = "tar.gz", value: str = "1") -> Path:
    """Return an archive of a virtual environment, as venv-pack writes it where it can."""
    import venv_pack

    env = directory_env(directory, value)
    path = directory / f"env.{form}"
    if form == "squashfs":
        subprocess.run(["mksquashfs", env, path, "-quiet", "-no-progress", "-noappend"], check=True)
    elif form == "tar.zst":
        tar = directory / "env.tar"
        venv_pack.pack(str(env), str(tar))
        subprocess.run(["zstd", "-q", "-f", tar, "-o", path], check=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zipfile warns of pyvenv.cfg, which is there twice
            venv_pack.pack(str(env), str(path), zip_symlinks=True)
    shutil.rmtree(env)
    return path


def conda_archive(directory: Path) -> Path:
    """Return an archive that conda-pack writes, of a hand-made prefix with a script in bin."""
    import conda_pack

    prefix = directory_env(directory)
    package = directory / "package"
    (package / "info").mkdir(parents=True)
    version = f"{sys.version_info[0]}.{sys.version_info[1]}.0"
    record = {"name": "python", "version": version, "files": ["bin/tool"], "url": "", "link": {}}
    write_tree(prefix, **{"conda-meta/history": ""})
    (prefix / "conda-meta" / f"python-{version}-0.json").write_text(json.dumps(record))
    executable(prefix / "bin" / "tool", f"#!{prefix}/bin/python\nprint('tool')\n")
    path = directory / "conda.tar.gz"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        conda_pack.pack(prefix=str(prefix), output=str(path))
    shutil.rmtree(prefix)
    return path


def tar_of(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    """Write a tar with these entries, whatever their names."""
    with tarfile.open(path, "w") as archive_:
        for entry, data in entries:
            entry.size = len(data)
            archive_.addfile(entry, io.BytesIO(data))
    return path


def wheel(directory: Path, name: str = MODULE, value: str = "1", version: str = "1.0") -> Path:
    """Write a wheel of one module."""
    info = f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": f"VALUE = {value!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}\n")
    members[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as packed:
        for path, text in members.items():
            packed.writestr(path, text)
    return file


def uv_project(directory: Path, value: str = "1") -> Path:
    """Write a uv project with a package of its own, which needs one wheel; lock it."""
    file = wheel(directory / "wheels", value=value)
    (directory / "src" / "own").mkdir(parents=True, exist_ok=True)
    write_tree(
        directory,
        **{
            "src/own/__init__.py": "VALUE = 'own'\n",
            "pyproject.toml": textwrap.dedent(f"""
        [project]
        name = "own"
        version = "0.1"
        requires-python = ">=3.10"
        dependencies = ["{MODULE}"]
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"
        [tool.uv.sources]
        {MODULE} = {{ path = "wheels/{file.name}" }}
        """),
        },
    )
    subprocess.run(
        ["uv", "lock", "-q", "--offline", "--python", BASE_PYTHON], cwd=directory, check=True
    )
    return directory


@dataclass(frozen=True)
class Preparation:
    """The part of a node's script that prepares an environment.

    Attributes:
        spec: the job.
        directory: where the script and the cache are.
        variables: added to the environment of the script.
    """

    spec: JobSpec
    directory: Path
    variables: Mapping[str, str]

    @classmethod
    def of(cls, directory: Path, **fields: object) -> Preparation:
        base = new_folder(directory / "disk")
        program = Program("command", "true")
        values = {"env_cache": str(base), "python": "python3"} | fields
        return cls(JobSpec(program, directory, **values), directory, {})  # type: ignore[arg-type]

    def with_variables(self, **variables: str) -> Preparation:
        return replace(self, variables={**self.variables, **variables})

    @property
    def cache(self) -> Path:
        [found] = Path(self.spec.env_cache).glob("clusterjob-env-*")
        return found

    def entries(self) -> list[Path]:
        return [
            path.with_suffix("") for path in self.cache.glob("*.lock") if path.stem != "uv-cache"
        ]

    def script(self) -> Path:
        env = python_env.read(self.spec)
        if env.name:
            (self.directory / env.name).write_bytes(env.data)
        values = python_env.values(env, self.spec, sh(str(self.directory)), sent=False)
        handle, name = tempfile.mkstemp(suffix=".sh", dir=self.directory)
        os.close(handle)
        path = Path(name)
        path.write_text(_PRELUDE + render("python-env.sh.j2", values) + _EPILOGUE)
        return path

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """Start the script; its process uses the environment until stdin ends."""
        return subprocess.Popen(
            ["bash", str(self.script())],
            cwd=self.directory,
            env={**os.environ, "HOME": str(self.directory), **self.variables, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, **variables: str) -> tuple[str, str, str]:
        """Prepare and use the environment; return interpreter, the module's value and stderr."""
        out, err = self.start(**variables).communicate(timeout=60)
        lines = [*out.splitlines(), "", ""]
        return lines[0], lines[1], err

    def refused(self, **variables: str) -> str:
        """Fail to prepare the environment; return the reason."""
        python, _, err = self.run(**variables)
        assert not python
        last = err.splitlines()[-1]
        assert last.startswith("REFUSED the Python environment cannot be prepared: "), err
        return last.partition("prepared: ")[2]
