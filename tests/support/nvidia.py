"""The GPUs of this machine without the package's own readers, and a fake nvidia-smi command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SMI_SCRIPT = """#!/bin/sh
case "$1" in
  --query-gpu=*) cat "$(dirname "$0")/gpus" ;;
  --query-compute-apps=*) cat "$(dirname "$0")/apps" ;;
esac
"""


def installed_gpus() -> int:
    """Return the number of GPUs that nvidia-smi lists; 0 without it or without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


class FakeSmi:
    """A fake nvidia-smi command on a host.

    Args:
        directory: a new directory for the command.
        prefix: the beginning of the GPUs' UUIDs.
    """

    def __init__(self, directory: Path, prefix: str = "GPU-000") -> None:
        self.directory = directory
        self.prefix = prefix
        directory.mkdir(parents=True)
        (directory / "nvidia-smi").write_text(SMI_SCRIPT)
        (directory / "nvidia-smi").chmod(0o755)
        self.set_gpus([3, 3, 3, 3])

    def set_gpus(
        self, used: list[int], apps: dict[int, list[tuple[int, str]]] | None = None
    ) -> None:
        """Set the used memory of each GPU (MiB) and the processes on each GPU."""
        rows = [
            f"{index}, {self.prefix}{index}, {mib}, 81559, NVIDIA H100, 80GB\n"
            for index, mib in enumerate(used)
        ]
        (self.directory / "gpus").write_text("".join(rows))
        lines = [
            f"{self.prefix}{index}, {pid}, {name}\n"
            for index, users in (apps or {}).items()
            for pid, name in users
        ]
        (self.directory / "apps").write_text("".join(lines))
