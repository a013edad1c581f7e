"""Names of hosts in the user's ssh configuration, for completion and `clusterjob init`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

_LARGEST = 1_000_000  # maximum bytes of a file that is read
_MOST_FILES = 32  # maximum number of files of the ssh configuration
# Characters of a name: a configuration may contain anything, and these names are shown and typed.
_NAME = re.compile(r"[\w@%+./][\w@%+:./,\[\]-]{0,254}", re.ASCII)


def configured_hosts() -> list[str]:
    """Return the names of Host lines, also of included files; a pattern is not a name.

    Source: ssh_config(5), "Host" and "Include".
    """
    return [
        name
        for name in dict.fromkeys(_hosts([Path("~/.ssh/config").expanduser()]))
        if _NAME.fullmatch(name)
    ]


def _hosts(files: list[Path]) -> Iterator[str]:
    for count, path in enumerate(files):
        if count == _MOST_FILES:
            return
        for line in read_lines(path):
            key, *words = re.split(r"[\s=]+", line.replace('"', " ").strip()) or [""]
            if key.lower() == "host":
                yield from (word for word in words if not re.search(r"[*?!]", word))
            elif key.lower() == "include":
                for word in words:
                    pattern = os.path.join(Path("~/.ssh").expanduser(), os.path.expanduser(word))
                    files += map(Path, sorted(glob.glob(pattern)))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a regular file; nothing if it cannot be read."""
    try:
        if not path.is_file():
            return []  # a pipe would block
        with path.open("rb") as stream:
            return stream.read(_LARGEST).decode(errors="replace").splitlines()
    except OSError:
        return []
