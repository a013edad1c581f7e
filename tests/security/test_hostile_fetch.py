"""`fetch` from a hostile host writes only requested files and replaces no edited file.

It writes nothing that git executes. The host is a function that answers the calls of `fetch`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hostile_host import Answer, exchange
from launching import write_tree

from clusterjob.errors import ClusterJobError, HostError
from clusterjob.remote.fetch import Fetch, Fetched, Request

IN_2100 = 4102444800 * 10**9
File = tuple[str, str, int, int, str]  # path, kind, mode, mtime, content or link target
Host = Callable[[dict[str, Any]], Answer]


def sender(*sent: File) -> Host:
    """Return a host that sends these files for every request."""

    def answer(request: dict[str, Any]) -> Answer:
        if request["call"] == "tree":
            rows = [
                (path, kind, mode, len(text), mtime, text if kind == "link" else "", digest(text))
                for path, kind, mode, mtime, text in sent
                if path in request["paths"] or not request["digests"]
            ]
            return {"absent": []}, b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        held = {path: text.encode() for path, _, _, _, text in sent}
        parts = [held[path][offset : offset + length] for path, offset, length in request["parts"]]
        return {"lengths": [len(part) for part in parts]}, b"".join(parts)

    return answer


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file(path: str, text: str = "evil", mode: int = 0o755, mtime: int = IN_2100) -> File:
    return path, "file", mode, mtime, text


def link(path: str, to: str) -> File:
    return path, "link", 0, 0, to


def fetch(
    host: Host,
    target: Path,
    *paths: str,
    sent: Mapping[str, str] | None = None,
    agree: bool = False,
    max_files: int = 1000,
    max_bytes: int = 1 << 30,
) -> Fetched:
    """Fetch into a directory; `sent` has the digests of the code that was sent from there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    request = Request(
        "x-1", "code", paths or ["."], target=target, may_replace=lambda _: agree,
        max_files=max_files, max_bytes=max_bytes, sent=sent or {},
        notes=target.with_name("notes.json"),
    )  # fmt: skip
    return Fetch(exchange(host), request).run()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Return a directory whose code was sent to the host."""
    write_tree(tmp_path / "here", **{"train.py": "mine\n"})
    return tmp_path / "here"


SENT = {"train.py": digest("mine\n")}


def tree(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*"))


@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/post-commit", ".envrc", "train.py", "runs2/a", "runs/../a", "runs//a",
        "/etc/a", "../a", "a\udfff",
    ],
)  # fmt: skip
def test_fetch_refuses_unrequested_paths_and_writes_nothing(here: Path, path: str) -> None:
    """The paths include files beside, above and inside a version control directory."""
    (here / ".git").mkdir()
    before = tree(here)
    with pytest.raises(HostError, match="gpu1: it names a file") as caught:
        fetch(sender(file("runs/good"), file(path)), here, "runs/", sent=SENT)
    assert (caught.value.exit_code, bool(caught.value.hint)) == (1, True)
    assert tree(here) == before
    assert (here / "train.py").read_text() == "mine\n"


def test_fetch_of_a_file_that_is_a_directory_too_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterJobError, match="Is a directory"):
        fetch(sender(file("runs/good"), file("runs")), tmp_path / "here", "runs/")


def test_fetch_never_writes_into_version_control_directories(tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / ".git" / "hooks").mkdir(parents=True)
    (here / "tools").symlink_to(".git/hooks")
    names = (".git/hooks/post-commit", "a/b/.GIT/config", "a/.hg/hgrc", ".svn/x", "sub/.git")
    done = fetch(sender(*map(file, names), link("l", ".git/hooks"), file("good")), here)
    assert done.written == ["good"]
    assert {text.partition(":")[0] for text in done.passed_over} == {
        ".git", "a/b/.GIT", "a/.hg", ".svn", "sub/.git", "l",
    }  # fmt: skip
    assert tree(here) == [".git", ".git/hooks", "good", "tools"]
    with pytest.raises(HostError, match="version control"):
        fetch(sender(file("tools/post-commit")), here)
    assert not list((here / ".git" / "hooks").iterdir())


def test_fetch_neither_creates_nor_changes_a_git_repository(tmp_path: Path) -> None:
    here, ran = tmp_path / "here", tmp_path / "ran"
    config = f'[core]\nbare = false\nworktree = .\nfsmonitor = "touch {ran}; false"\n'
    done = fetch(
        sender(
            file("r/HEAD", "ref: refs/heads/x\n"),
            file("r/config", config),
            file("r/objects/x"),
            file("r/refs/x"),
            link("s/Head", "refs/x"),
        ),
        here,
    )
    assert {text.partition(":")[0] for text in done.passed_over} == {"r/HEAD", "s/Head"}
    subprocess.run(["git", "status"], cwd=here / "r", check=False, capture_output=True)
    assert not ran.exists()

    own = here / "own.git"
    subprocess.run(["git", "init", "--quiet", "--bare", own], check=True)
    (here / "to").symlink_to("own.git")
    before = (own / "config").read_bytes()
    names = ("own.git/hooks/update", "own.git/new", "good", "to/config")
    done = fetch(sender(*map(file, names)), here)
    assert done.written == ["good"]
    assert done.passed_over == ["own.git: a git repository, which is never written"]
    assert (own / "config").read_bytes() == before
    assert not (own / "new").exists()


def test_newer_time_claimed_by_host_replaces_no_local_file(here: Path) -> None:
    """Sent code and local files are kept, and no file gets a time in the future."""
    (here / "notes").write_text("mine\n")
    done = fetch(sender(file("train.py"), file("notes"), file("new")), here, sent=SENT)
    assert (done.written, sorted(done.kept)) == (["new"], ["notes", "train.py"])
    assert [(here / name).read_text() for name in ("train.py", "notes")] == ["mine\n"] * 2
    assert (here / "new").stat().st_mtime <= time.time()


def test_unchanged_code_on_host_does_not_replace_a_local_edit(here: Path) -> None:
    (here / "train.py").write_text("edited\n")
    done = fetch(sender(file("train.py", "mine\n")), here, sent=SENT)
    assert (done.kept, done.written, done.unchanged) == ([], [], 1)
    assert (here / "train.py").read_text() == "edited\n"


def test_code_found_equal_by_earlier_fetch_is_not_replaced(here: Path) -> None:
    for text, kept in (("mine\n", []), ("evil", ["train.py"])):
        done = fetch(sender(file("train.py", text)), here, sent=SENT)
        assert (done.written, done.kept) == ([], kept)
        assert (here / "train.py").read_text() == "mine\n"


def test_second_fetch_writes_only_changed_files(tmp_path: Path) -> None:
    here = tmp_path / "here"
    first = [file("large", "x" * 1000, mtime=1), file("small", "0", mtime=1), link("l", "small")]
    assert fetch(sender(*first), here).written == ["large", "small", "l"]
    before = {path: path.lstat().st_ino for path in here.iterdir()}
    done = fetch(sender(*first), here)
    assert (done.written, done.unchanged) == ([], 3)
    assert {path: path.lstat().st_ino for path in here.iterdir()} == before
    changed = [file("large", "x" * 1000, mtime=2), file("small", "more", mtime=2), first[2]]
    assert fetch(sender(*changed), here).written == ["small"]
    assert (here / "small").read_text() == "more"


def test_file_changed_here_is_replaced_only_with_consent(tmp_path: Path) -> None:
    here = tmp_path / "here"
    fetch(sender(file("a")), here)
    (here / "a").write_text("mine")
    for agree, text in ((False, "mine"), (True, "evil")):
        done = fetch(sender(file("a")), here, agree=agree)
        assert (done.kept, done.written) == (([], ["a"]) if agree else (["a"], []))
        assert (here / "a").read_text() == text


def test_fetch_does_not_write_through_a_link_of_this_machine(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "runs").symlink_to(elsewhere)
    with pytest.raises(ClusterJobError, match="outside of the requested paths: 'runs/"):
        fetch(sender(file("runs/a")), here, "runs")
    assert not list(elsewhere.iterdir())


def test_modes_of_fetched_files_do_not_exceed_umask(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    given = {"a": 0o777, "b": 0o666, "c": 0o600}
    fetch(sender(*(file(name, mode=mode) for name, mode in given.items())), tmp_path / "here")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("here/*")}
    assert modes == {name: mode & ~mask for name, mode in given.items()}


def test_links_that_together_point_outside_are_not_created(tmp_path: Path) -> None:
    """Each link alone points inside the directory; together they point outside."""
    links = [
        link("p/x", "e/../../outside"), link("p/e", ".."), link("up", "p/../.."),
        link("q", "p/e/e/e"), link("ring", "ring2"), link("ring2", "ring"),
        link("abs", "/etc/passwd"), link("good", "p/file"), link("dangling", "p/absent"),
        link("nul", "a\0b"),
    ]  # fmt: skip
    root = tmp_path / "deep" / "here"
    done = fetch(sender(file("p/file"), *links), root)
    kept = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink()}
    assert {"good", "dangling"} <= kept
    assert not {"p/x", "up", "ring", "abs"} & kept
    assert all((root / name).resolve().is_relative_to(root) for name in kept)
    assert {text.partition(":")[0] for text in done.passed_over} >= {"p/x", "up", "abs", "nul"}


def test_file_is_not_written_through_a_link_from_host(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for to in ("..", "../other"):
        fetch(sender(link("d", to), file("d/f")), here)
        assert (here / "d" / "f").read_text() == "evil"
        assert not (here / "d").is_symlink()
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    ("limits", "option"),
    [({"max_files": 3}, "--max-files"), ({"max_bytes": 3000}, "--max-size"), ({}, "")],
)
def test_number_and_size_of_files_are_limited(
    tmp_path: Path, limits: dict[str, int], option: str
) -> None:
    host = sender(*(file(f"f{number}", "x" * 1000) for number in range(5)))
    if not option:
        assert len(fetch(host, tmp_path / "here").written) == 5
        return
    with pytest.raises(HostError) as caught:
        fetch(host, tmp_path / "here", **limits)
    assert option in caught.value.hint


@pytest.mark.parametrize(
    "answer",
    [({"lengths": [5]}, b"abcde"), ({"lengths": [4]}, b"ab"), ({"lengths": "4"}, b"abcd")],
)
def test_unrequested_or_malformed_answers_are_refused(tmp_path: Path, answer: Answer) -> None:
    honest = sender(file("a"))
    why = r"gpu1: it (sends bytes that were not asked for|sends a malformed answer)"
    with pytest.raises(HostError, match=why):
        fetch(lambda asked: honest(asked) if asked["call"] == "tree" else answer, tmp_path / "here")
    assert tree(tmp_path / "here") == []


def test_fetch_of_large_file_ends_at_first_short_answer(tmp_path: Path) -> None:
    """A host that sends one byte per request cannot make fetch send millions of requests."""
    row = json.dumps(["model.pt", "file", 0o644, 4 << 20, 1, "", ""]).encode() + b"\n"

    def host(request: dict[str, Any]) -> Answer:
        if request["call"] == "tree":
            return {"absent": []}, row
        [[_, offset, _]] = request["parts"]
        return ({"lengths": [1]}, b"x") if offset < 3 else ({"lengths": [0]}, b"")

    assert fetch(host, tmp_path / "here").written == ["model.pt"]
    assert (tmp_path / "here" / "model.pt").read_bytes() == b"x"
