"""Environments on the submit side: uv projects, archives, digests, refused combinations."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import write_tree

from clusterjob.backends import job_progress
from clusterjob.core import python_env, uv_project
from clusterjob.core.spec import JobSpec
from clusterjob.errors import SpecError
from clusterjob.node.logs.events import EventLog
from clusterjob.node.program import Program

PYPROJECT = """
[project]
name = "own"
requires-python = ">=3.10"
dependencies = ["six>=1", "Some_Package[extra]; python_version > '3'"]
"""
LOCK = """
version = 1
[[package]]
name = "own"
source = { editable = "." }
[[package]]
name = "six"
source = { registry = "https://index.invalid/simple" }
[[package]]
name = "some-package"
source = { path = "wheels/some_package-1.whl" }
[[package]]
name = "member"
source = { editable = "packages/member" }
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": PYPROJECT,
        "uv.lock": LOCK,
        "wheels/some_package-1.whl": "wheel",
        "packages/member/pyproject.toml": "[project]\nname='member'\n",
    }
    write_tree(tmp_path / "project", **files)
    (tmp_path / "project" / "src").mkdir()
    return tmp_path / "project"


@pytest.mark.parametrize(
    ("lock", "message"),
    [
        ("", r"uv\.lock has no version"),
        ('version = "1"\n', r"uv\.lock has no version"),
        (LOCK.replace("packages/member", "../member"), "outside of the working directory"),
    ],
)
def test_wrong_lock_is_refused(project: Path, lock: str, message: str) -> None:
    (project / "uv.lock").write_text(lock)
    with pytest.raises(SpecError, match=message) as refused:
        uv_project.read(project, "python3")
    assert ("no version" in message) == (refused.value.hint == "`uv lock` writes uv.lock")


def spec(directory: Path, **fields: Any) -> JobSpec:
    return JobSpec(Program("command", "true"), directory, **fields)


def test_uv_project_has_what_sync_needs_and_imports_from_the_code(project: Path) -> None:
    env = uv_project.read(project, "python3")
    with tarfile.open(fileobj=io.BytesIO(env.data)) as packed:
        assert packed.getnames() == [
            "packages/member/pyproject.toml",
            "pyproject.toml",
            "uv.lock",
            "wheels/some_package-1.whl",
        ]
    assert env.not_installed == ("own", "member")
    assert env.imports == ("src", "packages/member")
    assert (env.requests, env.notes) == (">=3.10", ())
    assert uv_project.read(project, "python3") == env


def test_python_of_the_user_precedes_python_version_file(project: Path) -> None:
    (project / ".python-version").write_text("# pinned\n3.12\n")
    assert uv_project.read(project, "python3").requests == "3.12"
    assert uv_project.read(project, "3.13").requests == "3.13"


def test_dependency_that_the_lock_lacks_is_noted(project: Path) -> None:
    (project / "pyproject.toml").write_text(PYPROJECT.replace("six>=1", "numpy>=1"))
    assert uv_project.read(project, "python3").notes == (
        "uv.lock lacks numpy of pyproject.toml: `uv lock` updates it",
    )


@pytest.mark.parametrize("name", ["pyproject.toml", "uv.lock"])
def test_missing_or_broken_file_of_a_uv_project_is_named(project: Path, name: str) -> None:
    (project / name).write_text("[broken")
    with pytest.raises(SpecError, match=f"{name} is not valid TOML"):
        uv_project.read(project, "python3")
    (project / name).unlink()
    with pytest.raises(SpecError, match=f"--uv: there is no {name}"):
        uv_project.read(project, "python3")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=200))
def test_hostile_lock_is_read_or_refused(project: Path, text: str) -> None:
    (project / "uv.lock").write_bytes(text.encode(errors="surrogatepass"))
    with contextlib.suppress(SpecError):
        assert uv_project.read(project, "python3").data


def test_digest_of_an_archive_is_computed_once(tmp_path: Path) -> None:
    path = tmp_path / "env.tar.gz"

    def digest(content: bytes, *, at: int) -> str:
        path.write_bytes(b"\x1f\x8b" + content * 100)
        os.utime(path, (at, at))
        env = python_env.read(spec(tmp_path, env_archive=path))
        return env.digest

    first = digest(b"1", at=1000)
    assert digest(b"2", at=1000) == first
    assert digest(b"2", at=2000) != first


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (content, "no archive of a known format")
            for content in (b"", b"#!/bin/sh", b"\0" * 600)
        ),
        (None, "No such file or directory"),
    ],
)
def test_file_that_is_no_archive_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "env.tar.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=message):
        python_env.read(spec(tmp_path, env_archive=path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uv": True, "env_archive": Path("x")}, "--uv and --env-archive exclude each other"),
        ({"uv": True, "container": "x"}, "--container and --uv exclude each other"),
        ({"env_archive": Path("x"), "container": "x"}, "--container and --env-archive exclude"),
        ({"uv": True, "env_cache": "relative"}, "is not an absolute path"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        spec(tmp_path, **fields)


@pytest.mark.parametrize("log", ["node0/agent.log", "slurm.out"])
def test_progress_before_the_start_shows_the_preparation_of_node_0(
    tmp_path: Path, log: str
) -> None:
    line = "preparing the Python environment: 10 s so far"
    own = f"clusterjob: preparing the Python environment\nclusterjob: {line}\n"
    for text, shown in (
        (own, line),
        (f"clusterjob: {line}\nclusterjob: {line} \x1b[31m\n", ""),
        (own, line),
    ):
        write_tree(tmp_path / "logs", **{log: text})
        assert job_progress.progress(tmp_path).waiting == shown
    EventLog(tmp_path / "events.jsonl").add("joined")
    assert job_progress.progress(tmp_path).waiting == ""
