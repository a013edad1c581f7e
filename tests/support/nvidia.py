"""The GPUs of this machine, independent of the package's own readers, which are under test."""

from __future__ import annotations

import shutil
import subprocess


def installed_gpus() -> int:
    """Return the number of GPUs that nvidia-smi lists; 0 without it or without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
