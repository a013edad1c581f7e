"""A small disk for the checkpoints, which a fault fills."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

_BYTES = 8 << 20


class Disk:
    """A mounted file system of 8 MB.

    Args:
        directory: where it is mounted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def fill(self) -> None:
        """Fill it to the last byte."""
        with contextlib.suppress(OSError), (self.directory / "full").open("wb", 0) as stream:
            while True:
                stream.write(bytes(4096))

    def free(self) -> None:
        """Remove what filled it."""
        (self.directory / "full").unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Disk]:
    """Mount a disk; unmount it at the end."""
    directory.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_BYTES}", "none", str(directory)], check=True
    )
    try:
        yield Disk(directory)
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
