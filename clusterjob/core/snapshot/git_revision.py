"""Read a directory's git revision and uncommitted changes without running git hooks.

A repository's own configuration and hooks may execute commands: filters, diff drivers, monitors,
transports. Therefore git reads the changes with an empty configuration and another .git directory,
which has the repository's objects and a copy of its index.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from clusterjob.core.snapshot.secret_files import looks_secret
from clusterjob.node.logs.job_dir import DIFF
from clusterjob.node.system import files
from clusterjob.node.system.sanitize import sanitize

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
_ELSEWHERE = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY",
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
        asked = self._run(
            "rev-parse",
            "HEAD",
            "--show-toplevel",
            "--absolute-git-dir",
            "--git-path",
            "objects",
            "--show-object-format",
        )
        found = asked.decode(errors="surrogateescape").splitlines() if asked is not None else []
        if len(found) != 5:
            return None, b""
        revision, top, git_dir, objects, object_format = found
        branch = self._run("rev-parse", "--abbrev-ref", "HEAD") or b""
        changed: list[str] = []
        complete, diff = False, b""
        with tempfile.TemporaryDirectory(prefix="clusterjob-git-") as folder:
            try:
                _make_empty(
                    Path(folder), revision, object_format=object_format, git_dir=Path(git_dir)
                )
            except OSError:
                pass  # the revision alone is known
            else:
                more = {
                    "GIT_DIR": folder, "GIT_WORK_TREE": top,
                    "GIT_OBJECT_DIRECTORY": str(self.root / objects), "GIT_CONFIG_NOSYSTEM": "1",
                    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
                    "GIT_NO_LAZY_FETCH": "1",
                }  # fmt: skip
                changed, diff, complete = self._changes(Path(top), more)
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
        self, *words: str, more: dict[str, str] | None = None, limit: int = _MAX_OUTPUT
    ) -> bytes | None:
        """Return the first `limit` bytes of a git command's output; None if it fails."""
        if self._left <= 0:
            return None
        given = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
        begin = time.monotonic()
        try:
            process = subprocess.Popen(
                ["git", "-C", str(self.root), *_SAFE, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**given, "GIT_OPTIONAL_LOCKS": "0", **(more or {})},
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
        f"[core]\n\trepositoryformatversion = {version}\n\tbare = false\n{extension}"
    )
    for path in (git_dir / "index", *git_dir.glob("sharedindex.*")):
        if path.is_file():
            shutil.copy2(path, place / path.name)
    exclude = git_dir / "info" / "exclude"
    if exclude.is_file():
        shutil.copyfile(exclude, place / "info" / "exclude")
