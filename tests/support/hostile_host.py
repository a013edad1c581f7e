"""Hosts that answer as a test wants: in this process, or as ForceCommand of a real sshd."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ssh_network import SshHost
from sshsite import close_connections

from clusterjob.backends.slurm.mirror import ClusterMirror
from clusterjob.core.records import Record
from clusterjob.remote.mirror import JobMirror
from clusterjob.remote.protocol import Exchange

# An object and the bytes after it, or all bytes of an answer.
Answer = tuple[dict[str, Any], bytes] | bytes


class _Stream:
    """The connection with a host that is a function; after the function's answer it hangs up."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self._answer = answer
        self._asked, self._sent = b"", bytearray()

    def send(self, data: bytes) -> int:
        self._asked += data
        line, _, body = self._asked.partition(b"\n")
        call = json.loads(line)
        if len(body) == call["size"]:
            self._asked = b""
            answer = self._answer({**call["arguments"], "call": call["call"]})
            self._sent += answer if isinstance(answer, bytes) else packed(*answer)
        return len(data)

    def recv(self, size: int) -> bytes:
        data = bytes(self._sent[:size])
        del self._sent[:size]
        return data

    def settimeout(self, _seconds: float | None) -> None:
        pass

    def close(self) -> None:
        self._answer = lambda _: b""
        self._sent.clear()


def packed(header: Any, data: bytes) -> bytes:
    """Return an answer as the host server sends it; the size may be a false one."""
    header = {"size": len(data), **header} if isinstance(header, dict) else header
    return json.dumps(header).encode() + b"\n" + data


def exchange(answer: Callable[[dict[str, Any]], Answer]) -> Exchange:
    """Return the client's end of a connection with a host in this process.

    Args:
        answer: gets the arguments of a call, and its name as ``call``; returns the answer.
    """
    return Exchange("gpu1", _Stream(answer), timeout=20.0)


def polled(*files: Any, **changes: Any) -> dict[str, Any]:
    """Return the object of an answer to `poll` about one job, with descriptions of files."""
    job = {"known": True, "alive": True, "files": list(files), "more": False}
    return {"jobs": [job | changes], "clock": 1.0}


def mirror_host(answer: Callable[..., Answer], job_dir: Path, *, logs: bool = True) -> None:
    """Poll node 0 of a job as `logs` does, until the host announces nothing more."""
    mirror, session = JobMirror("x-1", job_dir, node=0), exchange(answer)
    while mirror.poll(session, logs=logs)["more"]:
        pass


def mirror_login_host(answer: Callable[..., Answer], job_dir: Path, *, logs: bool = True) -> None:
    """Poll a job of Slurm as `logs` does, until the login host announces nothing more."""
    record = Record(
        "x-1", "x", cluster="hpc", backend="slurm", job_dir=job_dir, nodes=1,
        submitted_at="2026-01-01T00:00:00Z", spec={},
    )  # fmt: skip
    mirror, session = ClusterMirror("gpu1"), exchange(answer)
    while mirror.poll(session.ask, [(record, logs)])["x-1"]:
        pass


MIRRORS = (mirror_host, mirror_login_host)


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
