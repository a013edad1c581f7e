"""A host that answers with anything, or slowly: a real sshd whose ForceCommand plays, or slows, the
other end of the conversation.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

from procs import PATIENCE
from sshsite import Site, hang_up
from sshworld import HostOfWorld

# Reads the submitter's script up to the line with the zip's digest, then answers. A play defines
# `answer(request)`, which returns an object and bytes, or writes to `out` itself and returns None.
_PLAYER = """
import json, re, sys, time
source, out = sys.stdin.buffer, sys.stdout.buffer
{play}
def say(data):
    out.write(data)
    out.flush()
if "introduction" in globals():
    introduction()
while not re.match(rb"[0-9a-f]{{64}} [0-9]+ ", source.readline()):
    pass
say(b"clusterjob-session ready python3\\n")
while line := source.readline():
    request = json.loads(line)
    source.read(request["size"])
    found = answer(request)
    if found is not None:
        told, data = found
        say(json.dumps({{"size": len(data), **told}}).encode() + b"\\n" + data)
"""

# Runs what the submitter asks for, and passes on what it says as a slow link would.
_SLOWER = """
import os, subprocess, time
asked = subprocess.Popen(["sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdout=subprocess.PIPE)
while data := os.read(asked.stdout.fileno(), {rate} // 10):
    os.write(1, data)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def hostile(host: HostOfWorld, play: str = "") -> Iterator[Callable[[str], None]]:
    """Let a host be hostile for a while; yields a function that has it play something else.

    Args:
        host: the host.
        play: Python code with a function `answer`, and perhaps `introduction`, which comes before
            the conversation.
    """
    script = host.directory / "hostile.py"

    def change(play: str) -> None:
        hang_up()
        script.write_text(_PLAYER.format(play=textwrap.dedent(play)))

    change(play)
    host.stop()
    host.start(ForceCommand=f"{sys.executable} -S {script}")
    try:
        yield change
    finally:
        hang_up()
        host.stop()
        host.start()


@contextlib.contextmanager
def slow(host: HostOfWorld, rate: int) -> Iterator[None]:
    """Let an honest host answer at some bytes a second for a while."""
    script = host.directory / "slower.py"
    script.write_text(_SLOWER.format(rate=rate))
    hang_up()
    host.stop()
    host.start(ForceCommand=f"{sys.executable} -S {script}")
    try:
        yield
    finally:
        hang_up()
        host.stop()
        host.start()


def run(site: Site, *words: str) -> tuple[int, str, str]:
    """Run a command of clusterjob to its end; return its exit code and what it has written to
    stdout and stderr.
    """
    process = site.command(*words, stdin=subprocess.DEVNULL)
    try:
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err
