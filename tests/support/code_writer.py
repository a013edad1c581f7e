"""A script that writes beside itself and asks git about its code; and the project around it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launching import executable, write_tree

SCRIPT = """
import os, shutil, subprocess
here = os.path.dirname(os.path.abspath(__file__))
for words in (["rev-parse", "HEAD"], ["status", "--porcelain"], ["diff"], ["remote", "-v"]):
    subprocess.run(["git", "-C", here, *words], check=True)
subprocess.run(["grep", "-r", "passw0rd", here + "/.git"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    assert not os.path.exists(here + "/last.pt"), "a file of another submission"
for _ in range(2):
    shutil.copy(__file__, here + "/last.pt")
"""


def make(root: Path) -> list[str]:
    """Create a repository with changes, a hook and a password; return what git says in it."""
    tree = {"train.py": SCRIPT, "changed.py": "1\n", "gone.py": "x\n", ".env": "A=1\n"}
    write_tree(root, **tree, **{".gitignore": "data/\n", "sub/a.py": "a\n"})
    _git(root, "init", "-q", "-b", "work")
    _git(root, "config", "remote.origin.url", "https://me:passw0rd@host/x.git")
    _git(root, "add", "-A")
    for message in ("1", "2"):
        _git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", message, *_EMPTY)
    hook = root / ".git" / "hooks" / "post-index-change"
    write_tree(root, **{"changed.py": "2\n", "new.py": "", "data/x": ""})
    (root / "gone.py").unlink()
    said = [_git(root, *words) for words in (("rev-parse", "HEAD"), _STATUS, ("diff",))]
    executable(hook, "#!/bin/sh\necho passw0rd ran\n")
    return "".join(said).splitlines()


_EMPTY = ("--allow-empty",)
_STATUS = ("status", "--porcelain")


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
