"""Run the scripts of `tests/gpu/scripts` as jobs of this machine, and count its GPUs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nvidia import installed_gpus
from procs import TEST_TIMEOUT

SCRIPTS = Path(__file__).parent.parent / "gpu" / "scripts"
_FOUND = """
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.device_count())
"""


@functools.cache
def usable_gpus() -> tuple[int, str]:
    """Return the number of GPUs that torch can use, and why there are none."""
    if not installed_gpus():
        return 0, "nvidia-smi lists no GPU on this machine"
    done = subprocess.run(
        [sys.executable, "-c", _FOUND],
        capture_output=True,
        text=True,
        check=False,
        timeout=TEST_TIMEOUT,
    )
    if done.returncode:
        return 0, f"{sys.executable} cannot import torch: {done.stderr.strip()[-200:]}"
    version, cuda, count = done.stdout.split()
    if int(count):
        return int(count), ""
    if cuda == "None":
        return 0, f"torch {version} was built without CUDA: PYTHON=/path/to/python names another"
    return 0, f"torch {version} for CUDA {cuda} sees no GPU: the driver may be too old"


def clusterjob(
    *words: str, cwd: Path, code: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command; fail the test if its exit code is another one."""
    done = subprocess.run(
        [sys.executable, "-m", "clusterjob", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | (env or {}),
        timeout=10 * TEST_TIMEOUT,
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done


def run_script(name: str, cwd: Path, gpus: int, *options: str, args: Sequence[str] = ()) -> str:
    """Run a script of this folder as a job with this many GPUs; return its output."""
    words = ("--cluster", "local", "--gpus-per-node", str(gpus), *options)
    return clusterjob("run", *words, str(SCRIPTS / name), *args, cwd=cwd).stdout
