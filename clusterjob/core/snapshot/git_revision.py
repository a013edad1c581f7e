"""Read a directory's git revision and changes, and copy its .git directory, without hooks.

A repository's own configuration and hooks may execute commands: filters, diff drivers, monitors,
transports. Therefore git reads the changes with an empty configuration and another .git directory,
which has the repository's objects and a copy of its index.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.snapshot.secret_files import looks_secret
from clusterjob.node.logs.job_dir import DIFF
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize

if TYPE_CHECKING:
    from clusterjob.core.snapshot import Snapshot, SnapshotEntry

_MAX_DIFF = 4 << 20  # maximum bytes of uncommitted changes to keep
_MAX_CHANGED = 1000  # maximum number of names of changed files to keep
_MAX_OUTPUT = 64 << 20  # maximum bytes of the output of other commands
_TIMEOUT = 15.0  # maximum seconds for all commands of a submission
_SAFE = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "protocol.allow=never",
)
_BRANCH = re.compile(r"(?!.*\.\.)\w[\w./+@#-]*")
_OBJECTS = "GIT_OBJECT_DIRECTORY"
_ELSEWHERE = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", _OBJECTS,
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_EXTERNAL_DIFF", "GIT_NAMESPACE",
)  # fmt: skip


class Git:
    """Ask git about a directory, for at most 15 s in all.

    After the first command that takes too long, no command runs: it would wait for the same file.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._left = _TIMEOUT

    @functools.cached_property
    def excludes_file(self) -> Path | None:
        """The user's own git ignore file (core.excludesFile); None if there is none."""
        named = self._run("config", "--get", "--type=path", "core.excludesFile")
        if named:
            path = self.root / named.decode(errors="surrogateescape").rstrip("\n")
        else:
            config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()
            path = config / "git" / "ignore"
        return path if path.is_file() else None

    def state(self) -> tuple[dict[str, Any] | None, bytes]:
        """Return the revision, branch and changed files for a record, and the uncommitted changes.

        The changes leave out files that look like secrets, and end after 4 MiB; ``complete`` is
        then False. ``diff`` names the file in the job's directory that `write_diff` writes.

        The state is None if the directory is not in a git repository, or if git does not trust the
        repository.
        """
        if len(self._found) != 5:
            return None, b""
        revision, top = self._found[:2]
        branch = self._run("rev-parse", "--abbrev-ref", "HEAD") or b""
        changed: list[str] = []
        complete, diff = False, b""
        with (
            tempfile.TemporaryDirectory(prefix="clusterjob-git-") as folder,
            contextlib.suppress(OSError),  # the revision alone is known
        ):
            changed, diff, complete = self._changes(Path(top), self._make(Path(folder)))
        state = {
            "revision": revision,
            "branch": branch.decode(errors="replace").strip(),
            "changed": [
                path.encode(errors="surrogateescape").decode(errors="replace")
                for path in changed[:_MAX_CHANGED]
            ],
            "complete": complete,
        }
        return (state | {"diff": DIFF} if diff else state), diff

    @functools.cached_property
    def _found(self) -> list[str]:
        """Revision, top directory, git directory, objects and their format; shorter without one."""
        asked = self._run(
            "rev-parse",
            "HEAD",
            "--show-toplevel",
            "--absolute-git-dir",
            "--git-path",
            "objects",
            "--show-object-format",
        )
        return asked.decode(errors="surrogateescape").splitlines() if asked is not None else []

    def _make(self, place: Path) -> dict[str, str]:
        """Create another .git directory; return the variables with which git uses it.

        Raises:
            OSError: it cannot be created.
        """
        revision, top, git_dir, objects, object_format = self._found
        _make_empty(place, revision, object_format=object_format, git_dir=Path(git_dir))
        return {
            "GIT_DIR": str(place), "GIT_WORK_TREE": top,
            _OBJECTS: str(self.root / objects), "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }  # fmt: skip

    def with_repository(
        self, found: Snapshot, place: Path, state: Mapping[str, Any] | None, *, shared: bool
    ) -> Snapshot:
        """Return a snapshot with a .git directory, in which git answers as in the original.

        It has the revision, the index and the objects: no remote, hook or setting. Of a part of a
        repository, only the revision is known.

        Args:
            found: the snapshot.
            place: the directory to create.
            state: the result of `state`.
            shared: whether the original's objects are used. Otherwise those of the files in the
                snapshot are copied, without other revisions; if they exceed 64 MB, only the
                revision is known.
        """
        from clusterjob.core.snapshot import SnapshotEntry

        if state is None:
            return found
        objects = place / "objects"
        try:
            place.mkdir(mode=0o700)
            more = self._make(place)
            for folder in ("info", "pack"):
                (objects / folder).mkdir(parents=True)
            wanted: list[str] = []
            if os.path.realpath(self._found[1]) == os.path.realpath(found.root):
                wanted = self._fit(found, place, more=more, changed=state["changed"])
            if wanted and shared:
                (objects / "info" / "alternates").write_text(f"{more[_OBJECTS]}\n")
            elif wanted:
                more["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = more[_OBJECTS]
                more[_OBJECTS] = str(objects)
                done = self._run(
                    "pack-objects", "-q", "--window=0", "--threads=1", str(objects / "pack/pack"),
                    more=more, given="\n".join(wanted).encode(),
                )  # fmt: skip
                packs = sum(path.stat().st_size for path in objects.rglob("*.pack"))
                if done is None or packs > _MAX_OUTPUT:
                    shutil.rmtree(objects / "pack")
                    wanted = []
                (place / "shallow").write_text(f"{state['revision']}\n")
            if not wanted:
                (place / "index").unlink(missing_ok=True)
            if state["branch"] != "HEAD" and _BRANCH.fullmatch(state["branch"]):
                branch = place / "refs" / "heads" / state["branch"]
                branch.parent.mkdir(parents=True)
                (place / "HEAD").rename(branch)
                (place / "HEAD").write_text(f"ref: refs/heads/{state['branch']}\n")
            entries = [SnapshotEntry(".git", "dir", mode=0o755, size=0, value="")]
            for path in sorted(place.rglob("*")):
                kind, size, value = "dir", 0, ""
                if path.is_file():
                    kind, size, value = "file", path.stat().st_size, files.sha256(path)
                name = f".git/{path.relative_to(place).as_posix()}"
                mode = 0o755 if kind == "dir" else 0o644
                entries.append(SnapshotEntry(name, kind, mode=mode, size=size, value=value))
        except OSError:
            return found
        return replace(found, entries=(*found.entries, *entries), git=place)

    def _fit(
        self, found: Snapshot, place: Path, more: dict[str, str], changed: list[str]
    ) -> list[str]:
        """Fit a .git directory to a snapshot; return the objects that it needs.

        There are none after an error.

        Tracked files that the snapshot leaves out or links, such as secrets, count as unchanged.
        """
        index = self._run("ls-files", "-s", "-z", more=more)
        tree = self._run("ls-tree", "-r", "-t", "-z", "--full-tree", "HEAD", more=more)
        root = self._run("rev-parse", "HEAD^{tree}", more=more)
        if index is None or tree is None or root is None:
            return []
        kept = {entry.path for entry in found.entries if _is_original(found.root, entry)}
        objects, hidden = [self._found[0], root.decode().strip()], []
        for row in os.fsdecode(tree + index).split("\0")[:-1]:
            fields, _, path = row.partition("\t")
            words = fields.split()  # mode, type, object; or mode, object, stage
            if words[0] == "160000":  # a submodule
                continue
            if words[1] == "tree":
                objects.append(words[2])
            elif path in kept or not (
                os.path.lexists(found.root / path) or _is_secret(found.root, path)
            ):
                objects.append(words[2] if words[1] == "blob" else words[1])
            elif words[1] != "blob":
                hidden.append(path)
        if hidden:
            names = os.fsencode("\0".join(hidden))
            self._run("update-index", "--skip-worktree", "-z", "--stdin", more=more, given=names)
        with (place / "info" / "exclude").open("ab") as exclude:
            exclude.write(b"\n__pycache__/")
            for entry in found.entries:
                if entry.kind == "link" and entry.path not in kept and entry.path not in changed:
                    exclude.write(
                        os.fsencode("\n/" + re.sub(r"([][*?\\ !#])", r"\\\1", entry.path))
                    )
        return list(dict.fromkeys(objects))

    def _changes(self, top: Path, more: dict[str, str]) -> tuple[list[str], bytes, bool]:
        """Return the changed files, the uncommitted changes, and whether these are complete."""
        common = ("--ignore-submodules=dirty", "--", ".")
        status = self._run("status", "--porcelain", "-z", *common, more=more)
        if status is None:  # without the names, the changes could show a secret
            return [], b"", False
        changed = _changed(os.fsdecode(status))
        secret = [path for path in changed if _is_secret(top, path)]
        if len(secret) > _MAX_CHANGED:
            return changed, b"", False
        safe = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
        without = [f":(top,exclude,literal){path}" for path in secret]
        diff = self._run(*safe, *common, *without, more=more, limit=_MAX_DIFF + 1)
        complete = diff is not None and len(diff) <= _MAX_DIFF and not secret
        return changed, (diff or b"")[:_MAX_DIFF], complete

    def _run(
        self,
        *words: str,
        more: dict[str, str] | None = None,
        limit: int = _MAX_OUTPUT,
        given: bytes = b"",
    ) -> bytes | None:
        """Return the first `limit` bytes of a git command's output; None if it fails."""
        if self._left <= 0:
            return None
        environ = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        begin = time.monotonic()
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given)
                stdin.seek(0)
                process = subprocess.Popen(
                    ["git", "-C", str(self.root), *_SAFE, *words],
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**environ, "GIT_OPTIONAL_LOCKS": "0", **(more or {})},
                )
        except OSError:
            return None
        timer = threading.Timer(self._left, process.kill)
        timer.start()
        with process:
            assert process.stdout is not None
            output = process.stdout.read(limit)
            if len(output) == limit:
                process.kill()
        timer.cancel()
        left, self._left = self._left, self._left - (time.monotonic() - begin)
        if left > 0 >= self._left:
            logging.getLogger("clusterjob").warning(
                "clusterjob: `git %s` in %s did not end within %g s: the record lacks git's data",
                words[0],
                sanitize(str(self.root)),
                _TIMEOUT,
            )
        return output if process.returncode == 0 or len(output) == limit else None


def _is_original(root: Path, entry: SnapshotEntry) -> bool:
    """Return whether a snapshot has the file or link itself, instead of a link to it."""
    if entry.kind != "link":
        return entry.kind == "file"
    with contextlib.suppress(OSError):
        return os.readlink(root / entry.path) == entry.value
    return False


def _changed(status: str) -> list[str]:
    """Return the paths in the output of ``git status --porcelain -z``, old names included."""
    fields = iter(status.split("\0"))
    found = []
    for field in fields:
        found += [field[3:]] if field else []
        if field[:1] in ("R", "C"):  # the next field is the old name
            found.append(next(fields, ""))
    return found


def _is_secret(top: Path, path: str) -> bool:
    try:
        return looks_secret(top, path.rstrip("/"), is_directory=path.endswith("/"))
    except OSError:
        return True  # a removed file: only its name is known


def write_diff(diff: bytes, folder: Path) -> None:
    """Write the uncommitted changes into a job's directory; no file if there are none."""
    if diff:
        files.write_atomic(folder / DIFF, diff)


def _make_empty(place: Path, revision: str, object_format: str, git_dir: Path) -> None:
    """Create a .git directory with a revision as HEAD and a copy of the repository's index.

    Its configuration contains only the format of the objects.
    """
    (place / "refs").mkdir()
    (place / "info").mkdir()
    (place / "HEAD").write_text(f"{revision}\n")
    version = 0 if object_format == "sha1" else 1
    extension = "" if version == 0 else f"[extensions]\n\tobjectFormat = {object_format}\n"
    (place / "config").write_text(
        f"[core]\n\trepositoryformatversion = {version}\n\tbare = false\n"
        f"[gc]\n\tauto = 0\n{extension}"
    )
    for path in (git_dir / "index", *git_dir.glob("sharedindex.*")):
        if path.is_file():
            shutil.copy2(path, place / path.name)
    exclude = git_dir / "info" / "exclude"
    if exclude.is_file():
        shutil.copyfile(exclude, place / "info" / "exclude")
