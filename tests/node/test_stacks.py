"""Stacks of running processes: offer, request, kernel state."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import wait_until

from clusterjob.node.stacks import collect, kernel
from clusterjob.node.stacks.frames import RankStack
from clusterjob.node.stacks.request import StackRequest

TIMEOUT = 5.0


@contextlib.contextmanager
def child(directory: Path, text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and wait until it has created the file ``up``."""
    path = directory / "child.py"
    path.write_text(
        "import os, pathlib, signal, sys, threading, time\n"
        "from clusterjob.node.stacks.offer import SIGNAL, offer\n"
        f"up = pathlib.Path('up').touch\n{textwrap.dedent(text)}"
    )
    process = subprocess.Popen([sys.executable, "-S", str(path), *arguments], cwd=directory)
    try:
        wait_until(lambda: (directory / "up").exists() or process.poll() is not None, 20)
        yield process
    finally:
        process.kill()
        process.wait()


def stack_of(process: subprocess.Popen[bytes], timeout: float = TIMEOUT) -> RankStack:
    (stack,) = collect.of_ranks([(0, process.pid)], 0, timeout)
    return stack


def functions(stack: RankStack) -> list[str]:
    return [frame.function for frame in stack.threads[0].frames]


@pytest.mark.parametrize(
    "text",
    [
        "up(); time.sleep(1000)",  # this program never calls offer()
        "offer(); signal.signal(SIGNAL, signal.SIG_DFL); up(); time.sleep(1000)",
        "signal.signal(SIGNAL, lambda *_: os._exit(9)); offer(); up(); time.sleep(1000)",
        "offer(); signal.signal(SIGNAL, lambda *_: os._exit(9)); up(); time.sleep(1000)",
        "offer(); os.execvp('sh', ['sh', '-c', 'touch up; exec sleep 1000'])",
        "offer(); os.closerange(3, 100); own = open('own', 'w'); up(); time.sleep(1000)",
    ],
)
def test_process_without_stack_handler_is_not_signalled(tmp_path: Path, text: str) -> None:
    with child(tmp_path, text) as process:
        assert not StackRequest(process.pid).offered
        stack = stack_of(process)
        assert not stack.answered
        assert stack.threads == ()
        assert stack.state.startswith(("sleeps", "runs"))
        assert process.poll() is None
        assert not (tmp_path / "own").exists() or not (tmp_path / "own").read_text()


def test_process_answers_repeatedly_and_continues_to_sleep(tmp_path: Path) -> None:
    text = """
        def inner():
            up()
            begin = time.monotonic()
            time.sleep(3)
            sys.exit(0 if time.monotonic() - begin >= 3 else 3)
        offer()
        inner()
    """
    with child(tmp_path, text) as process:
        for _ in range(20):
            stack = stack_of(process)
            assert stack.answered
            assert functions(stack) == ["inner", "<module>"]
            assert stack.threads[0].frames[0].file.endswith("child.py")
        assert process.wait(20) == 0


def test_state_describes_sleeping_stopped_and_ended_process(tmp_path: Path) -> None:
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        wait_until(lambda: kernel.state(process.pid).startswith("sleeps"), 10)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: kernel.state(process.pid).startswith("is stopped"), 10)
        begin = time.monotonic()
        stack = stack_of(process, 60)
        assert time.monotonic() - begin < 30
        assert not stack.answered
        assert stack.state.startswith("is stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: kernel.state(process.pid).startswith("sleeps"), 10)
        assert functions(stack_of(process)) == ["<module>"]
    assert kernel.state(process.pid) == "has ended"
