"""`fetch` from a hostile host writes only requested files and replaces no edited file.

It writes nothing that git executes. The host is a real sshd.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
from hostile_host import hostile
from sshsite import Site, close_connections
from verdicts import wait_for_verdict

from clusterjob.backends.base import FetchLimits
from clusterjob.core import jobs
from clusterjob.core.records import Record, Records
from clusterjob.errors import ClusterJobError

IN_2100 = 4102444800 * 10**9

# Sends FILES for every request. Each is (path, kind, mode, mtime, content or link target).
SENDER = """
import hashlib
FILES = {files!r}
def answer(request):
    if request["call"] == "tree":
        rows = [
            (path, kind, mode, len(text), mtime, text if kind == "link" else "",
             hashlib.sha256(text.encode()).hexdigest() if request["digests"] else "")
            for path, kind, mode, mtime, text in FILES
            if path in request["paths"] or not request["digests"]
        ]
        return {{"absent": []}}, b"".join(json.dumps(row).encode() + b"\\n" for row in rows)
    held = {{row[0]: row[4].encode() for row in FILES}}
    parts = [held[path][offset:offset + length] for path, offset, length in request["parts"]]
    return {{"lengths": [len(part) for part in parts]}}, b"".join(parts)
"""


def sender(*files: tuple[str, str, int, int, str]) -> str:
    return SENDER.format(files=list(files))


def file(
    path: str, text: str = "evil", mode: int = 0o755, mtime: int = IN_2100
) -> tuple[str, str, int, int, str]:
    return path, "file", mode, mtime, text


def link(path: str, to: str) -> tuple[str, str, int, int, str]:
    return path, "link", 0, 0, to


@pytest.fixture
def record(site: Site) -> Record:
    site.path("train.py").write_text("mine\n")
    record = site.submit("", hosts="gpu1")
    wait_for_verdict(record)
    return record


def fetch(
    record: Record, target: Path, *paths: str, limits: FetchLimits | None = None
) -> jobs.Fetched:
    more = {} if limits is None else {"limits": limits}
    [done] = jobs.fetch(
        record, paths or ["."], target=target, nodes=(0,), may_replace=lambda _: False, **more
    )
    return done


def tree(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


def test_fetch_refuses_unrequested_paths_and_writes_nothing(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """The paths include files beside, above and inside a version control directory."""
    site.path(".git").mkdir()
    before = tree(site.directory)
    for path in (
        ".git/hooks/post-commit",
        ".envrc",
        "train.py",
        "runs2/a",
        "runs/../a",
        "runs//a",
        "/etc/a",
        "../a",
        "runs",
        "a\udfff",
    ):
        with hostile(site.ssh_network.hosts["gpu1"], sender(file("runs/good"), file(path))):
            if path == "runs":  # a host may send the file `runs`, or files below it
                with pytest.raises(ClusterJobError):
                    fetch(Records().find(record.job_id), tmp_path / "as-file", "runs/")
                continue
            with pytest.raises(ClusterJobError, match="gpu1: it names a file") as caught:
                fetch(Records().find(record.job_id), site.directory, "runs/")
            assert caught.value.exit_code == 1
            assert caught.value.hint
    assert tree(site.directory) == before
    assert site.path("train.py").read_text() == "mine\n"


def test_fetch_never_writes_into_version_control_directories(
    site: Site, record: Record, tmp_path: Path
) -> None:
    (tmp_path / "here" / ".git" / "hooks").mkdir(parents=True)
    (tmp_path / "here" / "tools").symlink_to(".git/hooks")
    names = (".git/hooks/post-commit", "a/b/.GIT/config", "a/.hg/hgrc", ".svn/x", "sub/.git")
    with hostile(
        site.ssh_network.hosts["gpu1"],
        sender(*map(file, names), link("l", ".git/hooks"), file("good")),
    ):
        done = fetch(record, tmp_path / "here")
    assert done.written == ["good"]
    assert {text.partition(":")[0] for text in done.passed_over} == {
        ".git",
        "a/b/.GIT",
        "a/.hg",
        ".svn",
        "sub/.git",
        "l",
    }
    assert tree(tmp_path / "here") == [".git", ".git/hooks", "good", "tools"]
    with (
        hostile(site.ssh_network.hosts["gpu1"], sender(file("tools/post-commit"))),
        pytest.raises(ClusterJobError, match="version control"),
    ):
        fetch(record, tmp_path / "here")
    assert not list((tmp_path / "here" / ".git" / "hooks").iterdir())


def test_fetch_neither_creates_nor_changes_a_git_repository(
    site: Site, record: Record, tmp_path: Path
) -> None:
    config = f'[core]\nbare = false\nworktree = .\nfsmonitor = "touch {tmp_path}/ran; false"\n'
    files = [
        file("r/HEAD", "ref: refs/heads/x\n"),
        file("r/config", config),
        file("r/objects/x"),
        file("r/refs/x"),
        link("s/Head", "refs/x"),
    ]
    with hostile(site.ssh_network.hosts["gpu1"], sender(*files)):
        done = fetch(record, tmp_path / "here")
    assert {text.partition(":")[0] for text in done.passed_over} == {"r/HEAD", "s/Head"}
    subprocess.run(["git", "status"], cwd=tmp_path / "here" / "r", check=False, capture_output=True)
    assert not (tmp_path / "ran").exists()

    own = tmp_path / "here" / "own.git"
    subprocess.run(["git", "init", "--quiet", "--bare", own], check=True)
    (tmp_path / "here" / "to").symlink_to("own.git")
    before = (own / "config").read_bytes()
    with hostile(
        site.ssh_network.hosts["gpu1"],
        sender(file("own.git/hooks/update"), file("own.git/new"), file("good"), file("to/config")),
    ):
        done = fetch(record, tmp_path / "here")
    assert done.written == ["good"]
    assert done.passed_over == ["own.git: a git repository, which is never written"]
    assert (own / "config").read_bytes() == before
    assert not (own / "new").exists()


def test_newer_time_claimed_by_host_replaces_no_local_file(site: Site, record: Record) -> None:
    """Sent code and local files are kept, and no file gets a time in the future."""
    site.path("notes").write_text("mine\n")
    with hostile(
        site.ssh_network.hosts["gpu1"], sender(file("train.py"), file("notes"), file("new"))
    ):
        done = fetch(record, site.directory)
    assert (done.written, sorted(done.kept)) == (["new"], ["notes", "train.py"])
    assert (site.path("train.py").read_text(), site.path("notes").read_text()) == (
        "mine\n",
        "mine\n",
    )
    assert site.path("new").stat().st_mtime <= time.time()


def test_unchanged_code_on_host_does_not_replace_a_local_edit(site: Site, record: Record) -> None:
    site.path("train.py").write_text("edited\n")
    done = fetch(record, site.directory)
    assert (done.kept, done.written, done.unchanged) == ([], [], 2)
    assert site.path("train.py").read_text() == "edited\n"


def test_code_found_equal_by_earlier_fetch_is_not_replaced(site: Site, record: Record) -> None:
    for text, kept in (("mine\n", []), ("evil", ["train.py"])):
        with hostile(site.ssh_network.hosts["gpu1"], sender(file("train.py", text))):
            done = fetch(record, site.directory)
        assert (done.written, done.kept) == ([], kept)
        assert site.path("train.py").read_text() == "mine\n"


def test_modes_of_fetched_files_do_not_exceed_umask(
    site: Site, record: Record, tmp_path: Path
) -> None:
    with hostile(
        site.ssh_network.hosts["gpu1"],
        sender(file("a", mode=0o777), file("b", mode=0o666), file("c", mode=0o600)),
    ):
        fetch(record, tmp_path / "here")
    mask = os.umask(0o022)
    os.umask(mask)
    modes = [stat.S_IMODE((tmp_path / "here" / name).stat().st_mode) for name in "abc"]
    assert modes == [0o777 & ~mask, 0o666 & ~mask, 0o600]


def test_links_that_together_point_outside_are_not_created(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """Each link alone points inside the directory; together they point outside."""
    links = [
        link("p/x", "e/../../outside"), link("p/e", ".."), link("up", "p/../.."),
        link("q", "p/e/e/e"), link("ring", "ring2"), link("ring2", "ring"),
        link("abs", "/etc/passwd"), link("good", "p/file"), link("dangling", "p/absent"),
        link("nul", "a\0b"),
    ]  # fmt: skip
    with hostile(site.ssh_network.hosts["gpu1"], sender(file("p/file"), *links)):
        done = fetch(record, tmp_path / "deep" / "here")
    root = tmp_path / "deep" / "here"
    kept = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink()}
    assert {"good", "dangling"} <= kept
    assert not {"p/x", "up", "ring", "abs"} & kept
    for name in kept:
        assert (root / name).resolve().is_relative_to(root)
    assert {text.partition(":")[0] for text in done.passed_over} >= {"p/x", "up", "abs", "nul"}


def test_file_is_not_written_through_a_link_from_host(
    site: Site, record: Record, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    for files in ([link("d", ".."), file("d/f")], [link("d", "../other"), file("d/f")]):
        with hostile(site.ssh_network.hosts["gpu1"], sender(*files)):
            fetch(record, tmp_path / "here")
        assert (tmp_path / "here" / "d" / "f").read_text() == "evil"
        assert not (tmp_path / "here" / "d").is_symlink()
    assert not (tmp_path / "f").exists()


def test_fetch_options_set_file_count_and_size_limits(
    site: Site, record: Record, tmp_path: Path
) -> None:
    code = site.remote_dir(record, "gpu1") / "code"
    for number in range(5):
        (code / f"f{number}").write_text("x" * 1_000_000)
    close_connections()
    for options, expected in (
        (["--max-files", "3"], 1),
        (["--max-size", "3M"], 1),
        (["--max-size", "10M", "--max-files", "100"], 0),
    ):
        _, _, err = site.run(
            "fetch", record.job_id, "--to", str(tmp_path / "here"), *options, code=expected
        )
        assert ("--max" in err) == bool(expected)


@pytest.mark.parametrize(
    "answer",
    [
        '{"lengths": [5]}, b"abcde"',
        '{"lengths": [4]}, b"ab"',
        '{"lengths": "4"}, b"abcd"',
    ],
)
def test_unrequested_or_malformed_answers_are_refused(
    site: Site, record: Record, tmp_path: Path, answer: str
) -> None:
    row = json.dumps(["a", "file", 0o644, 4, 1, "", ""])
    play = f"""
        def answer(request):
            if request["call"] == "tree":
                return {{"absent": []}}, {row.encode()!r}
            return {answer}
    """
    with (
        hostile(site.ssh_network.hosts["gpu1"], play),
        pytest.raises(
            ClusterJobError,
            match=r"gpu1: it (sends bytes that were not asked for|sends a malformed answer)",
        ),
    ):
        fetch(record, tmp_path / "here")
    assert tree(tmp_path / "here") == []


def test_fetch_of_large_file_ends_at_first_short_answer(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """A host that sends one byte per request cannot make fetch send millions of requests."""
    size = 4 << 20
    row = json.dumps(["model.pt", "file", 0o644, size, 1, "", ""])
    play = f"""
        def answer(request):
            if request["call"] == "tree":
                return {{"absent": []}}, {row.encode()!r} + b"\\n"
            (_, offset, _), = request["parts"]
            return ({{"lengths": [1]}}, b"x") if offset < 3 else ({{"lengths": [0]}}, b"")
    """
    with hostile(site.ssh_network.hosts["gpu1"], play):
        assert fetch(record, tmp_path / "here").written == ["model.pt"]
    assert (tmp_path / "here" / "model.pt").read_bytes() == b"x"
