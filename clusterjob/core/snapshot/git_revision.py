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
from pathlib import Path
from typing import Any

from clusterjob.node.system import files

_MAX_DIFF = 4 << 20  # maximum bytes of uncommitted changes to keep
_MAX_CHANGED = 1000  # maximum number of names of changed files to keep
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
            return {"revision": revision, "branch": branch, "changed": [], "diff": b""}
        more = {
            "GIT_DIR": folder, "GIT_WORK_TREE": top, "GIT_OBJECT_DIRECTORY": str(root / objects),
            "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1",
            "GIT_NO_LAZY_FETCH": "1",
        }  # fmt: skip
        common = ("--ignore-submodules=dirty", "--", ".")
        diff = (
            _git(
                root,
                "diff",
                "HEAD",
                "--binary",
                "--no-ext-diff",
                "--no-textconv",
                *common,
                more=more,
            )
            or b""
        )
        status = _git(root, "status", "--porcelain", *common, more=more) or b""
    return {
        "revision": revision,
        "branch": branch,
        "changed": [line[3:] for line in status.decode(errors="replace").splitlines()][
            :_MAX_CHANGED
        ],
        "diff": diff[:_MAX_DIFF],
    }


def keep_git(root: Path, folder: Path) -> dict[str, Any] | None:
    """Return the code's git state for a job's record; write its diff into the job's directory.

    Returns None if the code is not in a git repository.
    """
    state = git_state(root)
    if state is None:
        return None
    diff = state.pop("diff")
    if diff:
        files.write_atomic(folder / "code.diff", diff)
        state["diff"] = "code.diff"
    return state


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


def _git(root: Path, *words: str, more: dict[str, str] | None = None) -> bytes | None:
    given = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *_SAFE, *words],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT,
            env={**given, "GIT_OPTIONAL_LOCKS": "0", **(more or {})},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
