"""The working directory as a snapshot: which files belong to it, what each of them is, and what git says of them."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.errors import SubmitError
from clusterjob.node import files
from clusterjob.units import show_size

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

LIMIT = 512 * 1024**2  # bytes; a directory that holds data by mistake would else be sent to every host
MOST_ENTRIES = 100_000  # a home directory is not meant to be sent
OWN_IGNORE = ".clusterjobignore"
_NEVER = frozenset({".git", ".hg", ".svn"})
_CHUNK = 1 << 18
_DIRECTORY = "ps_d"  # pathspec's name for the slash at which a pattern has found a directory
_MOST_DIFF = 4 << 20  # bytes of uncommitted changes that are kept


@dataclass(frozen=True)
class Entry:
    """One thing in a snapshot.

    Attributes:
        path: relative to the directory, with slashes.
        kind: ``file``, ``dir`` or ``link``.
        mode: permission bits.
        size: bytes of a file.
        value: a file's digest (SHA-256), a link's target.
    """

    path: str
    kind: str
    mode: int
    size: int
    value: str


@dataclass(frozen=True)
class Snapshot:
    """A directory at one moment.

    Attributes:
        root: the directory.
        entries: all that belongs to it; a directory stands before what is in it.
    """

    root: Path
    entries: tuple[Entry, ...]

    @property
    def files(self) -> int:
        """Return the number of files."""
        return sum(entry.kind == "file" for entry in self.entries)

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(entry.size for entry in self.entries)

    @property
    def digest(self) -> str:
        """Return what names this content."""
        return hashlib.sha256(json.dumps([vars(entry) for entry in self.entries]).encode()).hexdigest()

    def packed(self) -> bytes:
        """Return the list of entries as it travels."""
        rows = [(entry.path, entry.kind, entry.mode, entry.size, entry.value) for entry in self.entries]
        return zlib.compress(json.dumps(rows).encode(), 1)

    def of_digests(self, wanted: set[str]) -> list[Entry]:
        """Return one file for each of the digests."""
        found = {entry.value: entry for entry in self.entries if entry.kind == "file" and entry.value in wanted}
        return list(found.values())

    def content(self, entries: list[Entry]) -> Iterator[bytes]:
        """Yield the bytes of files, one after the other, in pieces.

        Raises:
            SubmitError: one of them is no longer what it was.
        """
        for entry in entries:
            left = entry.size
            try:
                with (self.root / entry.path).open("rb") as stream:
                    while left and (data := stream.read(min(left, _CHUNK))):
                        left -= len(data)
                        yield data
            except OSError as error:
                raise SubmitError(f"{entry.path!r} cannot be read any more: {error.strerror}") from error
            if left:
                raise changed(entry)


def changed(entry: Entry) -> SubmitError:
    """Return what is to be said of a file that changes while it is sent."""
    return SubmitError(f"{entry.path!r} changed while it was being sent", f"submit again, or leave it out in {OWN_IGNORE}")


def take(root: Path, limit: int = LIMIT) -> Snapshot:
    """Return what a directory holds, without what .gitignore and .clusterjobignore leave out.

    Args:
        root: the directory.
        limit: the bytes that it may hold.

    Raises:
        SubmitError: it holds more, or something in it cannot be read.
    """
    try:
        found = list(itertools.islice(_walk(root, "", _rules_above(root)), MOST_ENTRIES + 1))
        if len(found) > MOST_ENTRIES:
            raise SubmitError(
                f"{root} holds more than {MOST_ENTRIES:,} files", f"leave data out in {OWN_IGNORE}, or name another --workdir"
            )
        if sum(entry.size for entry in found) > limit:
            raise _too_large(root, found, limit)
        entries = tuple(_hashed(root, entry) if entry.kind == "file" else entry for entry in found)
    except OSError as error:
        raise SubmitError(f"{error.filename} cannot be read: {error.strerror}", f"leave it out in {OWN_IGNORE}") from error
    return Snapshot(root, entries)


@dataclass(frozen=True)
class _Rules:
    """The patterns of one directory, for what lies below it."""

    base: str
    spec: GitIgnoreSpec

    def verdict(self, path: str) -> bool | None:
        """Return whether a path is left out; None if nothing is said of it."""
        return _last_word(self.spec, path[len(self.base) :])


def _last_word(spec: GitIgnoreSpec, path: str) -> bool | None:
    """Return what the last pattern that names this very path says of it.

    The library also takes a pattern for what lies below a directory that it names. git does not: it looks no further into a
    directory that is left out, and asks anew for what is in one that is not. Nor does ``e/**`` name ``e/`` itself to git.
    """
    for pattern in reversed(list(spec.patterns)):
        all_below = pattern.regex is not None and pattern.regex.pattern.endswith("/")
        found = pattern.match_file(path.removesuffix("/") if all_below else path) if pattern.include is not None else None
        if found is None:
            continue
        match: re.Match[str] = found.match
        if match.groupdict().get(_DIRECTORY) is None or match.end(_DIRECTORY) == len(path):
            return bool(pattern.include)
    return None


def _walk(root: Path, below: str, rules: list[_Rules]) -> Iterator[Entry]:
    directory = root / below
    rules = [*rules, *_rules_of(directory, below)]
    for item in sorted(os.scandir(directory), key=lambda item: item.name):
        path = below + item.name
        status = item.stat(follow_symlinks=False)
        is_directory = stat.S_ISDIR(status.st_mode)
        if (item.name in _NEVER and not below) or _left_out(path + "/" * is_directory, rules):
            continue
        mode = stat.S_IMODE(status.st_mode) & 0o777
        if is_directory:
            yield Entry(path, "dir", mode, 0, "")
            yield from _walk(root, f"{path}/", rules)
        elif stat.S_ISLNK(status.st_mode):
            yield Entry(path, "link", 0, 0, os.readlink(item.path))
        elif stat.S_ISREG(status.st_mode):
            yield Entry(path, "file", mode, status.st_size, "")


def _left_out(path: str, rules: list[_Rules]) -> bool:
    for rule in reversed(rules):  # the nearest directory's word counts first
        verdict = rule.verdict(path)
        if verdict is not None:
            return verdict
    return False


def _hashed(root: Path, entry: Entry) -> Entry:
    found, size = hashlib.sha256(), 0
    with (root / entry.path).open("rb") as stream:
        while data := stream.read(_CHUNK):
            found.update(data)
            size += len(data)
    return replace(entry, size=size, value=found.hexdigest())


def _rules_of(directory: Path, base: str) -> list[_Rules]:
    from pathspec import GitIgnoreSpec

    found = []
    for name in (".gitignore", OWN_IGNORE):
        path = directory / name
        if path.is_file():
            try:
                lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
                found.append(_Rules(base, GitIgnoreSpec.from_lines(lines)))
            except ValueError as error:
                raise SubmitError(f"{path}: {error}") from error
    return found


def _rules_above(root: Path) -> list[_Rules]:
    """Return the patterns of the repository that the directory is a part of, from its top down."""
    top = next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), None)
    if top is None:
        return []
    from pathspec import GitIgnoreSpec

    found: list[_Rules] = []
    exclude = top / ".git" / "info" / "exclude"
    below = root.relative_to(top).parts
    if exclude.is_file():
        found.append(_Above("", GitIgnoreSpec.from_lines(exclude.read_text(errors="surrogateescape").splitlines()), "/".join(below)))
    for depth in range(len(below)):
        folder = top.joinpath(*below[:depth])
        found += [_Above("", rules.spec, "/".join(below[depth:])) for rules in _rules_of(folder, "")]
    return found


@dataclass(frozen=True)
class _Above(_Rules):
    """The patterns of a directory above the root."""

    prefix: str = ""

    def verdict(self, path: str) -> bool | None:
        return _last_word(self.spec, f"{self.prefix}/{path}" if self.prefix else path)


def _too_large(root: Path, entries: Iterable[Entry], limit: int) -> SubmitError:
    sizes: dict[str, int] = {}
    for entry in entries:
        top = entry.path.partition("/")[0]
        sizes[top] = sizes.get(top, 0) + entry.size
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    what = ", ".join(f"{name} ({show_size(sizes[name])})" for name in largest)
    message = f"{root} holds {show_size(sum(sizes.values()))}, more than the {show_size(limit)} that are sent: {what}"
    return SubmitError(message, f"leave data out in {OWN_IGNORE}, or raise the limit: --set sync_limit=2G")


def git_state(root: Path) -> dict[str, Any] | None:
    """Return the revision of a directory and its uncommitted changes (``diff``); None if git knows nothing of it."""
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return None
    diff = _git(root, "diff", "HEAD", "--binary", "--", ".") or b""
    branch = (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b"").decode(errors="replace").strip()
    status = _git(root, "status", "--porcelain", "--", ".") or b""
    return {
        "revision": revision.decode().strip(),
        "branch": branch,
        "changed": [line[3:] for line in status.decode(errors="replace").splitlines()][:1000],
        "diff": diff[:_MOST_DIFF],
    }


def keep_git(root: Path, folder: Path) -> dict[str, Any] | None:
    """Return what git says of the code, for a job's record; the uncommitted changes go into a file of the job's directory."""
    state = git_state(root)
    if state is None:
        return None
    diff = state.pop("diff")
    if diff:
        files.write_atomic(folder / "code.diff", diff)
        state["diff"] = "code.diff"
    return state


def _git(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "-c", "core.fsmonitor=false", *words], capture_output=True, stdin=subprocess.DEVNULL, timeout=30,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
