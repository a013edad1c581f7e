"""Start Python processes with the worker hook, and read the output of several ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from launching import new_folder, write_tree

from clusterjob.node.workers import hook


def lines_by_rank(text: str) -> list[str]:
    """Return sorted output lines with one rank each; folded lines become one line per rank."""
    found = []
    for line in text.splitlines():
        ranks, _, rest = line.removeprefix("[").partition("] ")
        for part in ranks.split(","):
            first, _, last = part.partition("-")
            found += [f"[{rank}] {rest}" for rank in range(int(first), int(last or first) + 1)]
    return sorted(found)


def hooked_path(directory: Path) -> str:
    """Return a worker's PYTHONPATH, with a sitecustomize and a usercustomize of the user."""
    own = new_folder(directory / "own")
    write_tree(
        own,
        **{
            "sitecustomize.py": "import sys; sys.from_site = True\n",
            "usercustomize.py": "import sys; sys.from_user = True\n",
        },
    )
    return hook.write(directory, {"PYTHONPATH": str(own)})["PYTHONPATH"]


def python(
    path: str, code: str, *flags: str, interpreter: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | (
        {"PYTHONPATH": path} if path else {}
    )
    return subprocess.run(
        [interpreter, *flags, "-c", textwrap.dedent(code)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
