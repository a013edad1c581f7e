"""A small program whose stacks are read."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from procs import wait_until

from clusterjob.node.stacks import collect
from clusterjob.node.stacks.grouping import RankStack

TIMEOUT = 20.0


@contextlib.contextmanager
def child(
    directory: Path, text: str, *arguments: str, interpreter: str = sys.executable
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and wait until it has created the file ``up``."""
    path = directory / "child.py"
    path.write_text(
        "import functools, os, pathlib, signal, subprocess, sys, threading, time\n"
        "from clusterjob.node.stacks.offer import SIGNAL, offer\n"
        # No Python function, which could still be on the stack.
        f"up = functools.partial(os.mknod, 'up')\n{textwrap.dedent(text)}"
    )
    with running([interpreter, "-S", str(path), *arguments], directory) as process:
        yield process


@contextlib.contextmanager
def running(
    argv: list[str], directory: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a directory, and wait for the file ``up``."""
    process = subprocess.Popen(argv, cwd=directory, env=environment)
    try:
        wait_until(lambda: (directory / "up").exists() or process.poll() is not None, TIMEOUT)
        yield process
    finally:
        process.kill()
        process.wait()


def stack_of(process: subprocess.Popen[bytes], timeout: float = TIMEOUT) -> RankStack:
    (stack,) = collect.of_ranks([(0, process.pid)], 0, timeout)
    return stack


def functions(stack: RankStack, thread: int = 0) -> list[str]:
    return [frame.function for frame in stack.threads[thread].frames]
