"""The snapshots of submitted code: content, cost of unchanged files, removal."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launching import new_folder, write_tree

from clusterjob.core.snapshot import source, stat_cache, store
from clusterjob.core.snapshot.source import CodeSource
from clusterjob.errors import SubmitError
from clusterjob.node.host_server import code_store
from clusterjob.node.program import Program

SCRIPT = Program("script", "train.py")


class Project:
    """A directory with code, and a store of snapshots."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "project"
        self.home = tmp_path / "home"
        (self.home / "jobs").mkdir(parents=True)
        self.jobs = 0
        self.write(**{"train.py": "1", "pkg/a.py": "a", "run.sh": "#!/bin/sh\n", "data.txt": "d"})
        (self.root / "run.sh").chmod(0o755)

    def write(self, **files: str) -> None:
        self.root.mkdir(exist_ok=True)
        write_tree(self.root, **files)

    def source(self, below: str = "", limit: int = 1 << 20) -> CodeSource:
        code = CodeSource.of(self.root / below, SCRIPT, limit)
        assert code is not None
        return code

    def take(self, below: str = "", limit: int = 1 << 20) -> Path:
        """Submit a job; return its copy of the project's top directory."""
        self.jobs += 1
        code = self.source(below, limit)
        job_dir = new_folder(self.home / "jobs" / f"job-{self.jobs}")
        store.place(self.home, code.top.name, store.take(self.home, code), job_dir)
        return (job_dir / "code").resolve()

    def stored(self) -> list[str]:
        """Return the contents of all files in the store."""
        return sorted(path.read_text() for path in (self.home / "store").glob("*/*"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr(stat_cache, "_RACY_NS", 0)  # the tests change files at once
    return Project(tmp_path)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    add = code_store.add

    def counted(home: Path, content: Any) -> tuple[str, int]:
        read.append(os.path.basename(content.__self__.name))
        return add(home, content)

    monkeypatch.setattr(code_store, "add", counted)
    return read


# -- content ---------------------------------------------------------------------------------------


def test_code_has_ordinary_modes_and_links_to_left_out_files(project: Project) -> None:
    project.write(
        **{".gitignore": "data\n*.bin\n", "data/x": "x", "w.bin": "w", ".env": "KEY=1",
           "pkg/__pycache__/a.pyc": "old", "large": ""}
    )  # fmt: skip
    os.truncate(project.root / "large", (32 << 20) + 1)
    (project.root / "inner").symlink_to("pkg/a.py")
    (project.root / "outer").symlink_to("../elsewhere")
    tree = project.take()
    links = {path.name: os.readlink(path) for path in tree.rglob("*") if path.is_symlink()}
    assert links == {
        **{name: str(project.root / name) for name in ("data", "w.bin", ".env", "large")},
        "inner": "pkg/a.py",
        "outer": str(project.root.parent / "elsewhere"),
    }
    modes = {
        path.name: stat.S_IMODE(path.lstat().st_mode)
        for path in (tree, *tree.rglob("*"))
        if not path.is_symlink()
    }
    assert modes == {
        "project": 0o755, "pkg": 0o755, ".gitignore": 0o644, "train.py": 0o644, "a.py": 0o644,
        "data.txt": 0o644, "run.sh": 0o755,
    }  # fmt: skip


def test_jobs_with_equal_code_share_no_file(project: Project) -> None:
    first, second = project.take(), project.take()
    (first / "train.py").write_text("changed by the job")
    (first / "checkpoint.pt").touch()
    third = project.take()
    assert [(tree / "train.py").read_text() for tree in (second, third)] == ["1", "1"]
    assert not (third / "checkpoint.pt").exists()
    assert project.stored() == ["#!/bin/sh\n", "1", "a", "d"]


def test_mode_and_directory_name_are_those_of_the_project(project: Project) -> None:
    project.take()
    (project.root / "train.py").chmod(0o755)
    project.root = project.root.rename(project.root.with_name("renamed"))
    tree = project.take()
    assert (tree.name, os.access(tree / "train.py", os.X_OK)) == ("renamed", True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(
        st.binary(min_size=1, max_size=12).filter(
            lambda name: not set(name) & {0, 47} and name not in (b".", b"..")
        ),
        max_size=6,
        unique=True,
    )
)
def test_file_of_any_name_is_in_snapshot(project: Project, names: list[bytes]) -> None:
    shutil.rmtree(project.root)
    project.root.mkdir()
    for name in names:
        (project.root / os.fsdecode(name)).write_bytes(name)
    listed = {entry.path for entry in source.listed(project.source()).entries}
    for _ in range(2):  # the second time from the cache
        tree = project.take()
        assert {(tree / name).read_bytes() for name in listed} == {*map(os.fsencode, listed)}
    assert all(os.fsdecode(name) in listed for name in names if not name.startswith(b"."))


# -- unchanged files -------------------------------------------------------------------------------


def test_unchanged_files_are_not_read_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.take()
    read = count_reads(monkeypatch)
    project.take()
    assert read == []
    project.write(**{"pkg/a.py": "b"})
    project.take()
    assert read == ["a.py"]


def test_change_that_keeps_size_and_modification_time_is_noticed(project: Project) -> None:
    path = project.root / "train.py"
    before = path.stat()
    project.take()
    path.write_text("2")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (project.take() / "train.py").read_text() == "2"


def test_new_file_is_not_cached_before_clock_has_moved_on(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stat_cache, "_RACY_NS", 60_000_000_000)
    project.take()
    read = count_reads(monkeypatch)
    project.take()
    assert sorted(read) == ["a.py", "data.txt", "run.sh", "train.py"]


def test_file_that_grows_while_it_is_read_is_no_error(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(**{"train.log": "line\n"})
    add = code_store.add

    def grow(home: Path, content: Any) -> tuple[str, int]:
        with (project.root / "train.log").open("a") as out:
            out.write("line\n")
        return add(home, content)

    monkeypatch.setattr(code_store, "add", grow)
    kept = (project.take() / "train.log").read_text()
    assert kept == "line\n" * (kept.count("\n") or 1)


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"schema": 1, "files": {"train.py": [1]}}'])
def test_damaged_cache_is_ignored(project: Project, damage: bytes) -> None:
    project.take()
    [cache] = (project.home / "stat").iterdir()
    cache.write_bytes(damage)
    assert (project.take() / "train.py").read_text() == "1"


def test_file_missing_in_store_is_copied_again(project: Project) -> None:
    project.take()
    shutil.rmtree(project.home / "store")
    assert (project.take() / "pkg/a.py").read_text() == "a"


# -- repositories ----------------------------------------------------------------------------------


def test_repository_around_working_directory_is_copied(project: Project) -> None:
    project.write(**{".git/HEAD": "x", "tools/train.py": "1"})
    code = project.source("tools")
    assert (code.root, code.top, code.below) == (project.root / "tools", project.root, "tools")
    tree = project.take("tools")
    assert not (tree / "pkg").is_symlink()
    assert (tree / "tools" / "train.py").read_text() == "1"
    assert not (tree / ".git").exists()


def test_only_working_directory_of_large_repository_is_copied(project: Project) -> None:
    project.write(**{".git/HEAD": "x", "a/tools/train.py": "1", "a/other": "o", "big": "b" * 99})
    tree = project.take("a/tools", limit=50)
    assert (tree / "a/tools/train.py").read_text() == "1"
    assert not (tree / "a").is_symlink()
    for name in ("pkg", "big", "a/other"):
        assert os.readlink(tree / name) == str(project.root / name)


@pytest.mark.parametrize("pattern", ["scratch/", "scratch/*", "scratch", "**/run", "*"])
def test_working_directory_that_repository_ignores_is_copied(
    project: Project, pattern: str
) -> None:
    project.write(**{".git/HEAD": "x", "scratch/run/train.py": "1", "scratch/run/b.py": "b"})
    project.write(**{".gitignore": f"{pattern}\n"})
    tree = project.take("scratch/run")
    for name in ("scratch", "scratch/run", "scratch/run/train.py"):
        assert not (tree / name).is_symlink(), name


def test_repository_of_home_directory_does_not_count(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(**{".git/HEAD": "x", "tools/train.py": "1"})
    monkeypatch.setenv("HOME", str(project.root))
    assert project.source("tools").top == project.root / "tools"


def test_home_directory_has_no_snapshot_but_script_below_it_has(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project.root))
    for workdir in (project.root, project.root.parent, Path("/")):
        for program in (Program("command", "true"), Program("module", "pkg.a")):
            assert CodeSource.of(workdir, program, 100) is None
        script = Program("script", str(project.root / "pkg/a.py"))
        code = CodeSource.of(workdir, script, 100)
        assert code.root == project.root / "pkg"
    assert CodeSource.of(project.root, SCRIPT, 100) is None


def test_code_over_limit_is_refused_with_largest_entries(project: Project) -> None:
    project.write(**{"pkg/large": "x" * 200})
    with pytest.raises(SubmitError, match=r"more than the limit of 100 .*: pkg \(201 ") as error:
        project.take(limit=100)
    assert "--no-snapshot runs the current files" in str(error.value.hint)
    assert ".clusterjobignore" in str(error.value.hint)


# -- faults ----------------------------------------------------------------------------------------


def test_full_disk_is_error_and_leaves_no_part(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "link").symlink_to("train.py")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "symlink", full)
    with pytest.raises(SubmitError, match="No space left on device"):
        project.take()
    assert list((project.home / "jobs" / "job-1" / "tree").iterdir()) == []


def test_code_that_no_job_has_is_removed_after_an_hour(project: Project) -> None:
    project.take()
    project.write(**{"train.py": "22"})
    project.take()
    for blob in (project.home / "store").glob("*/*"):
        os.utime(blob, (0, 0))
    code_store.clean(project.home, (), remove=True)
    assert project.stored() == ["#!/bin/sh\n", "1", "22", "a", "d"]
    code_store.clean(project.home, {"job-1"}, remove=True)
    assert project.stored() == ["#!/bin/sh\n", "22", "a", "d"]


def test_code_removed_from_the_store_is_error(project: Project) -> None:
    found = store.take(project.home, project.source())
    shutil.rmtree(project.home / "store")
    (project.home / "jobs/job-1").mkdir()
    with pytest.raises(SubmitError, match="not kept any more"):
        store.place(project.home, "project", found, project.home / "jobs/job-1")


# -- which words of a command come from the snapshot -----------------------------------------------


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (Program("script", "train.py", ("train.py",)), ["CODE/train.py", "train.py"]),
        (Program("script", "./pkg/../train.py"), ["CODE/train.py"]),
        (Program("script", "link.py"), ["CODE/train.py"]),
        (Program("module", "pkg.a", ("x",)), ["pkg.a", "x"]),
        (Program("command", "./run.sh", ("a",)), ["CODE/run.sh", "a"]),
        (Program("command", "run.sh"), ["run.sh"]),
        (Program("command", "bash", ("-ex", "run.sh", "data.txt")),
         ["bash", "-ex", "CODE/run.sh", "data.txt"]),
        (Program("command", "/bin/sh", ("-c", "run.sh x")), ["/bin/sh", "-c", "run.sh x"]),
        (Program("command", "bash"), ["bash"]),
        (Program("command", "cat", ("data.txt",)), ["cat", "data.txt"]),
    ],
    ids=str,
)  # fmt: skip
def test_script_comes_from_snapshot_and_arguments_do_not(
    project: Project, program: Program, expected: list[str]
) -> None:
    (project.root / "link.py").symlink_to("train.py")
    job_dir = Path("/jobs/x")
    found = project.source().program(program, project.root, job_dir=job_dir)
    assert [found.target, *found.args] == [
        word.replace("CODE", str(job_dir / "code")) for word in expected
    ]


@pytest.mark.parametrize("target", ["../project/train.py", "{root}/train.py"])
def test_script_outside_working_directory_brings_its_own(
    project: Project, tmp_path: Path, target: str
) -> None:
    elsewhere = new_folder(tmp_path / "run")
    program = Program("script", target.format(root=project.root))
    code = CodeSource.of(elsewhere, program, 100)
    assert code.root == project.root
    mapped = code.program(program, elsewhere, job_dir=Path("/j"))
    assert mapped.target == "/j/code/train.py"


def test_python_function_has_no_snapshot(project: Project) -> None:
    program = Program("module", "clusterjob.worker.call")
    assert CodeSource.of(project.root, program, 100) is None
