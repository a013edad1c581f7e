"""Make a host hostile or slow: its sshd runs a fake or a slow host server as ForceCommand."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from ssh_network import SshHost
from sshsite import close_connections

# Reads the submitter's script up to the line with the zip's digest, then answers calls. `play`
# defines `answer(request)`: it gets the arguments of a call and its name as ``call``, and returns
# an object and bytes, or writes to `out` and returns None. The object may be the part of one job in
# the answer of `poll`.
_FAKE_SERVER = """
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
    sent = json.loads(line)
    source.read(sent["size"])
    found = answer({{**sent["arguments"], "call": sent["call"]}})
    if found is not None:
        header, data = found
        if "known" in header:
            header = {{"jobs": [header]}}
        for each in header.get("jobs", ()):
            header["clock"] = 1.0
            each.setdefault("alive", False)
        say(json.dumps({{"size": len(data), **header}}).encode() + b"\\n" + data)
"""

# Runs the submitter's command and limits the rate of its output, like a slow link.
_RATE_LIMITER = """
import os, subprocess, time
command = subprocess.Popen(["sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"]], stdout=subprocess.PIPE)
while data := os.read(command.stdout.fileno(), {rate} // 10):
    os.write(1, data)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def hostile(host: SshHost, play: str = "") -> Iterator[Callable[[str], None]]:
    """Make a host hostile inside the context; yield a function that changes its code.

    Args:
        host: the host.
        play: Python code with a function `answer`, and optionally a function `introduction`, which
            runs at the start of a session.
    """
    script = host.directory / "hostile.py"

    def change(play: str) -> None:
        close_connections()
        script.write_text(_FAKE_SERVER.format(play=textwrap.dedent(play)))

    change(play)
    with _forced(host, script):
        yield change


@contextlib.contextmanager
def slow(host: SshHost, rate: int) -> Iterator[None]:
    """Limit a host's output to ``rate`` bytes per second inside the context."""
    script = host.directory / "slower.py"
    script.write_text(_RATE_LIMITER.format(rate=rate))
    with _forced(host, script):
        yield


@contextlib.contextmanager
def _forced(host: SshHost, script: Path) -> Iterator[None]:
    """Let a host run a program in the place of each command."""
    close_connections()
    host.restart(ForceCommand=f"{sys.executable} -S {script}")
    try:
        yield
    finally:
        close_connections()
        host.restart()
