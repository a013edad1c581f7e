"""Read a directory's git revision and uncommitted changes without running git hooks.

A repository's own configuration and hooks may execute commands: filters, diff drivers, monitors,
transports. Therefore git reads the changes with an empty configuration and another .git directory,
which has the repository's objects and a copy of its index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

from clusterjob.core.snapshot.secret_files import looks_secret
from clusterjob.node.logs.job_dir import DIFF
from clusterjob.node.system import files

_MAX_DIFF = 4 << 20  # maximum bytes of uncommitted changes to keep
_MAX_CHANGED = 1000  # maximum number of names of changed files to keep
_MAX_OUTPUT = 64 << 20  # maximum bytes of the output of other commands
_TIMEOUT = 30.0  # maximum seconds for one command
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


def git_state(root: Path) -> dict[str, Any] | None:
    """Return a directory's revision, branch, changed files and uncommitted changes (``diff``).

    The changes leave out files that look like secrets, and end after 4 MiB; ``complete`` is then
    False.

    Returns None if the directory is not in a git repository, or if git does not trust the
    repository.
    """
    asked = _git(
        root,
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
        return None
    revision, top, git_dir, objects, object_format = found
    branch = (
        (_git(root, "rev-parse", "--abbrev-ref", "HEAD") or b"").decode(errors="replace").strip()
    )
    with tempfile.TemporaryDirectory(prefix="clusterjob-git-") as folder:
        try:
            _make_empty(Path(folder), revision, object_format=object_format, git_dir=Path(git_dir))
        except OSError:
            return {
                "revision": revision,
                "branch": branch,
                "changed": [],
                "diff": b"",
                "complete": False,
            }
        more = {
            "GIT_DIR": folder, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": str(root / objects),
            "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }  # fmt: skip
        common = ("--ignore-submodules=dirty", "--", ".")
        status = _git(root, "status", "--porcelain", "-z", *common, more=more) or b""
        changed = _changed(os.fsdecode(status))
        secret = [path for path in changed if _is_secret(Path(top), path)]
        diff: bytes | None = b""
        if len(secret) <= _MAX_CHANGED:
            safe = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
            without = [f":(top,exclude,literal){path}" for path in secret]
            diff = _git(root, *safe, *common, *without, more=more, limit=_MAX_DIFF + 1)
    return {
        "revision": revision,
        "branch": branch,
        "changed": [
            path.encode(errors="surrogateescape").decode(errors="replace")
            for path in changed[:_MAX_CHANGED]
        ],
        "diff": (diff or b"")[:_MAX_DIFF],
        "complete": diff is not None and len(diff) <= _MAX_DIFF and not secret,
    }


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


def keep_git(root: Path, folder: Path) -> dict[str, Any] | None:
    """Return the code's git state for a job's record; write its diff into the job's directory.

    Returns None if the code is not in a git repository.
    """
    state = git_state(root)
    if state is None:
        return None
    diff = state.pop("diff")
    if diff:
        write_diff(diff, folder)
        state["diff"] = DIFF
    return state


def write_diff(diff: bytes, folder: Path) -> None:
    """Write the uncommitted changes into a job's directory; no file if there are none."""
    if diff:
        files.write_atomic(folder / DIFF, diff)


def excludes_file(root: Path) -> Path | None:
    """Return the user's own git ignore file (core.excludesFile); None if there is none."""
    named = _git(root, "config", "--get", "--type=path", "core.excludesFile")
    if named:
        path = root / named.decode(errors="surrogateescape").rstrip("\n")
    else:
        path = (
            Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "git" / "ignore"
        )
    return path if path.is_file() else None


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


def _git(
    root: Path, *words: str, more: dict[str, str] | None = None, limit: int = _MAX_OUTPUT
) -> bytes | None:
    """Return the first `limit` bytes of a git command's output; None if it fails."""
    given = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(root), *_SAFE, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**given, "GIT_OPTIONAL_LOCKS": "0", **(more or {})},
        )
    except OSError:
        return None
    timer = threading.Timer(_TIMEOUT, process.kill)
    timer.start()
    with process:
        assert process.stdout is not None
        output = process.stdout.read(limit)
        if len(output) == limit:
            process.kill()
    timer.cancel()
    return output if process.returncode == 0 or len(output) == limit else None
