"""A shown plan has exactly the files and commands of the submission.

The files of a job are written all or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import write_tree

from clusterjob.core.plans import Plan, PlannedCommand, PlannedFile, new_id, token_file, write_files
from clusterjob.core.spec import JobSpec
from clusterjob.errors import RecordError
from clusterjob.node.program import Program


def plan_in(job_dir: Path, *files: PlannedFile, commands: tuple[PlannedCommand, ...] = ()) -> Plan:
    return Plan(
        "x-abc234",
        "local",
        job_dir=job_dir,
        spec=JobSpec(Program("command", "true"), Path("/")),
        files=files,
        commands=commands,
        notes=("a note",),
    )


@given(st.text())
def test_id_of_any_name_is_valid_file_name_and_shell_word(name: str) -> None:
    job_id = new_id(name)
    assert job_id != new_id(name)
    stem, _, random = job_id.rpartition("-")
    assert re.fullmatch("[abcdefghjkmnpqrstuvwxyz23456789]{6}", random)
    assert 0 < len(stem) <= 24
    assert all(letter == "-" or unicodedata.category(letter)[0] in "LMN" for letter in job_id), (
        "one word in any shell, and no underscore"
    )
    assert len(os.fsencode(job_id)) < 200
    assert not job_id.startswith("-")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("train", "train"),
        ("My Job_1", "my-job-1"),
        ("", "job"),
        ("☃", "job"),
        ("тест", "тест"),
        ("Größe 2", "größe-2"),
        ("हिन्दी", "हिन्दी"),
        ("a\u202eb", "a-b"),
        ("e\u0301te\u0301", "\xe9t\xe9"),
        ("--x--", "x"),
        ("a" * 23 + "-bcd", "a" * 23),
        ("../../etc", "etc"),
    ],
)
def test_id_begins_with_name_of_job(name: str, stem: str) -> None:
    assert new_id(name).rpartition("-")[0] == stem


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("é\n".encode(), "é\n"),
        (b"\xff\x00", f"(2 bytes, sha256 {hashlib.sha256(bytes([255, 0])).hexdigest()})\n"),
    ],
)
def test_planned_file_is_shown_as_text_or_as_digest_of_bytes(
    tmp_path: Path, data: bytes, text: str
) -> None:
    assert PlannedFile(tmp_path / "a", data).text() == text


shell_words = st.text(st.characters(exclude_characters="\0", codec="utf-8"))


@given(st.lists(shell_words, min_size=1), shell_words)
def test_planned_command_is_shown_quoted_for_shell(argv: list[str], value: str) -> None:
    command = PlannedCommand(tuple(argv), {"NAME": value})
    assert shlex.split(command.text()) == [f"NAME={value}", *argv]


def test_plan_is_written_as_shown(tmp_path: Path) -> None:
    job_dir = tmp_path / "deep" / "er" / "job"
    files = (
        PlannedFile(job_dir / "a.txt", b"text\n"),
        PlannedFile(job_dir / "b.sh", b"#!/bin/sh\n", mode=0o700),
        PlannedFile(job_dir / "c", b"\xff"),
    )
    plan = plan_in(job_dir, *files, commands=(PlannedCommand(("bash", "b c"), {"A": "1 2"}),))
    old = os.umask(0o002)
    try:
        write_files(plan)
    finally:
        os.umask(old)
    assert [file.path.read_bytes() for file in files] == [file.data for file in files]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in job_dir.iterdir()}
    assert modes == {"logs": 0o700, "ends": 0o700, "token": 0o600} | {
        file.path.name: file.mode for file in files
    }
    assert plan.text() == (
        f"### {job_dir}/a.txt (0600)\ntext\n\n### {job_dir}/b.sh (0700)\n#!/bin/sh\n\n"
        f"### {job_dir}/c (0600)\n{files[2].text()}\n### commands\nA='1 2' bash 'b c'"
    )
    data = plan.to_json()
    shown = {"path": f"{job_dir}/b.sh", "mode": "0700", "text": "#!/bin/sh\n"}
    command = {"argv": ["bash", "b c"], "env": {"A": "1 2"}, "node_rank": 0}
    assert data["files"][1] == shown
    assert (data["commands"], data["notes"]) == ([command], ["a note"])


def test_each_job_has_its_own_token(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_files(plan_in(tmp_path / name))
    tokens = [token_file(tmp_path / name).read_text() for name in ("a", "b")]
    assert len(set(tokens)) == 2
    assert [len(token) for token in tokens] == [64, 64]


def test_existing_directory_is_refused_and_unchanged(tmp_path: Path) -> None:
    write_tree(tmp_path, **{"job/mine": ""})
    with pytest.raises(RecordError, match="cannot be made: File exists") as caught:
        write_files(plan_in(tmp_path / "job"))
    assert "CLUSTERJOB_HOME" in caught.value.hint
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["mine"]


def test_failed_write_of_file_removes_job_directory(tmp_path: Path) -> None:
    job_dir = tmp_path / "job"
    files = [PlannedFile(job_dir / name, b"") for name in ("a", "nowhere/b")]
    with pytest.raises(RecordError, match=r"cannot be written: .*No such file or directory"):
        write_files(plan_in(job_dir, *files))
    assert list(tmp_path.iterdir()) == []
