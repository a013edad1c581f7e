"""Run a command of clusterjob to its end, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from procs import TEST_TIMEOUT

import clusterjob

PACKAGE = str(Path(clusterjob.__file__).parent)
CLUSTERJOB = [sys.executable, "-m", "clusterjob"]


def command(
    directory: Path, *words: str, code: int | None = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; fail the test at another exit code, or a traceback of clusterjob.

    Args:
        directory: its working directory.
        words: its arguments.
        code: its exit code; None for any.
        variables: further variables of its environment.
    """
    done = subprocess.run(
        [*CLUSTERJOB, *words],
        cwd=directory,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TEST_TIMEOUT,
        check=False,
    )
    assert code in (None, done.returncode), done.stderr
    assert PACKAGE not in done.stderr, f"a traceback of ours\n{done.stderr}"
    return done
