"""`clusterjob init`: what it finds, what it asks, and that its file loads and passes doctor."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctoring import CLUSTERJOB, PACKAGE, doctor, light_torch
from hypothesis import given
from hypothesis import strategies as st
from launching import executable, write_tree
from procs import TEST_TIMEOUT
from ssh_network import python_without_torch

from clusterjob.core import config_files, interpreters
from clusterjob.core.proposals import Proposal, profile_lines, toml_value
from clusterjob.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "clusterjob.toml"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project whose .venv has a torch that imports fast; the home is empty."""
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".ssh").mkdir(parents=True)
    (work / ".venv/bin").mkdir(parents=True)
    plain = python_without_torch(tmp_path)
    python = work / ".venv/bin/python"
    library = light_torch(tmp_path / "lib")
    executable(python, f'#!/bin/sh\nPYTHONPATH={library}:$PYTHONPATH exec {plain} "$@"\n')
    (work / ".venv/lib/python3.11/site-packages").mkdir(parents=True)
    (work / ".venv/lib/python3.11/site-packages/torch").symlink_to(library / "torch")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{tmp_path}")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(work)
    return work


def init(
    *options: str, answers: str = "", code: int = 0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run init; with answers, its stdin is a terminal on which they are typed."""
    master, slave = pty.openpty()
    try:
        os.write(master, answers.encode())
        done = subprocess.run(
            [*CLUSTERJOB, "init", *options],
            stdin=slave if answers else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
            cwd=cwd,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == code, done.stderr
    assert PACKAGE not in done.stderr, "no traceback"
    return done


def written(directory: Path) -> dict[str, Any]:
    """Return the file's content; fail if clusterjob refuses it."""
    data = config_files.project_file(directory / FILE).data
    assert tomllib.loads((directory / FILE).read_text()) == data
    return dict(data)


# -- what it finds ---------------------------------------------------------------------------------


def test_bare_machine_gets_a_profile_that_passes_doctor(place: Path) -> None:
    done = init("--yes")
    assert done.stdout == ""
    assert "clusterjob: clusterjob.toml is written: jobs run on local" in done.stderr
    assert "check it with `clusterjob doctor`" in done.stderr
    data = written(place)
    assert data["cluster"] == "local"
    profile = data["clusters"]["local"]
    assert profile["python"] == str(place / ".venv/bin/python"), "the one with torch"
    text = (place / FILE).read_text()
    assert "the project's .venv" in text
    assert re.search("; /.*/python3?: .+", text), "the other interpreters"
    assert "`clusterjob trust` trusts the file" in done.stderr, "a program of the project"
    subprocess.run([*CLUSTERJOB, "trust", "--yes"], check=True)
    found = doctor(cwd=place)
    assert found.fit, found
    assert "2.9.0" in found.message("torch")


def test_hosts_of_ssh_configuration_are_offered_as_comments(place: Path) -> None:
    hostile = "Host gpu9]\nHost gpu7\x1b[2J\nHost $(touch${IFS}p)\n"
    (place.parent / "home/.ssh/config").write_text(f"Host gpu1 gpu2 *.org\n{hostile}")
    done = init("--yes")
    assert "found hosts of the SSH configuration: gpu1, gpu2" in done.stderr
    text = (place / FILE).read_text()
    assert '# hosts = "gpu1,gpu2' in text
    assert ("touch" in text, "\x1b" in text) == (False, False)
    assert set(written(place)["clusters"]) == {"local"}
    # A user who removes the marks gets a file that loads.
    lines = [line.removeprefix("# ") for line in text.splitlines()[5:] if re.search(r"= |\[", line)]
    (place / FILE).write_text("\n".join(line for line in lines if not line.startswith("this")))
    assert set(written(place)["clusters"]) == {"local", "hpc", "ssh", "mlp"}


PLATFORM = {
    "MLP_WORKER_NUM": "2", "MLP_ROLE_INDEX": "0", "MLP_WORKER_0_HOST": "127.0.0.1",
    "MLP_WORKER_0_PORT": "2222", "MLP_WORKER_GPU": "8", "MLP_ROLE": "WORKER",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "messages", "cluster"),
    [
        (
            PLATFORM,
            [
                "found a task of the platform with 2 workers: `clusterjob launch SCRIPT`",
                "check it with `clusterjob doctor --cluster local`",
            ],
            "local",
        ),
        ({"MLP_MPI_HOSTFILE": "../hosts"}, ["MLP_MPI_HOSTFILE lists 2 hosts"], "ssh"),
    ],
    ids=["workers", "hosts of an MPI task"],
)
def test_variables_of_a_platform_are_found(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    messages: list[str],
    cluster: str,
) -> None:
    write_tree(place.parent, hosts="10.0.0.1 slots=8\n10.0.0.2 slots=8\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = init("--yes").stderr
    assert [message for message in messages if message not in said] == []
    assert written(place)["cluster"] == cluster


def test_interpreters_of_uv_venv_and_conda_are_found(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = place.parent / "home"
    python = "#!/bin/sh\nexit 1\n"
    conda = {".conda/environments.txt": f"{home}/listed\n{home}/gone\n"}
    write_tree(home, **{"active/bin/python": python, "listed/bin/python": python}, **conda)
    for name in ("active", "listed"):
        (home / name / "bin/python").chmod(0o755)
    monkeypatch.setenv("CONDA_PREFIX", str(home / "active"))
    found = interpreters.find(place, os.environ)
    assert (found[0].path, found[0].has_torch) == (str(place / ".venv/bin/python"), True)
    shown = {one.path: one.describe() for one in found}
    assert shown[f"{home}/active/bin/python"] == "active conda environment, without torch"
    assert shown[f"{home}/listed/bin/python"] == "conda environment, without torch"


# -- what it asks ----------------------------------------------------------------------------------


def test_uv_is_offered_as_a_comment_that_can_be_uncommented(place: Path) -> None:
    init("--yes")
    assert "uv = true" not in (place / FILE).read_text(), "there is no uv.lock"
    (place / "uv.lock").write_text("version = 1\n")
    init("--yes", "--force")
    assert "uv" not in written(place).get("defaults", {})
    text = (place / FILE).read_text()
    (place / FILE).write_text(text.replace("# uv = true", "uv = true"))
    assert written(place)["defaults"] == {"uv": True}


def test_answers_are_checked_and_written(place: Path) -> None:
    done = init(answers="nowhere\nmlp\n\nq-1\nimage\"with'quotes\nml.8\n")
    assert "'nowhere' is none of local" in done.stderr
    assert "this needs an answer" in done.stderr
    data = written(place)
    assert data["cluster"] == "mlp"
    assert data["clusters"]["mlp"]["set"] == {
        "queue": "q-1", "image": "image\"with'quotes", "flavor": "ml.8",
    }  # fmt: skip
    assert data["clusters"]["local"] == {"backend": "local"}


def test_ctrl_c_writes_nothing(place: Path) -> None:
    init(answers="\x04", code=130)
    assert not (place / FILE).exists()


@pytest.mark.parametrize("exists", ["file", "link"])
def test_existing_file_is_replaced_only_with_force(place: Path, exists: str) -> None:
    if exists == "file":
        (place / FILE).write_text("# mine\n")
    else:
        (place / FILE).symlink_to(place.parent / "nowhere")
    done = init("--yes", code=2)
    assert "clusterjob.toml exists" in done.stderr
    assert "hint: --force replaces it" in done.stderr
    assert exists == "link" or (place / FILE).read_text() == "# mine\n"
    init("--yes", "--force")
    assert written(place)["cluster"] == "local"
    assert not (place.parent / "nowhere").exists()


# -- TOML ------------------------------------------------------------------------------------------


@given(st.text() | st.integers() | st.booleans() | st.lists(st.text()))
def test_any_value_is_read_back_from_the_file(value: Any) -> None:
    assert tomllib.loads(f"key = {toml_value(value)}")["key"] == value


@given(st.text(st.characters()), st.text(st.characters()))
def test_foreign_text_in_comments_and_values_stays_there(found: str, value: str) -> None:
    try:
        text = "\n".join(
            profile_lines(
                Proposal(
                    "a", "local", found=found, values={"name": value}, comments={"name": found}
                ),
                active=True,
            )
        )
    except ConfigError:
        assert any("\ud800" <= char <= "\udfff" for char in value)
        return
    assert tomllib.loads(text) == {"clusters": {"a": {"backend": "local", "name": value}}}
    other = profile_lines(Proposal("a", "local", found=found), active=False)
    assert tomllib.loads("\n".join(other)) == {}
