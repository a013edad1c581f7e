"""A host that answers with anything: a real sshd whose ForceCommand plays the other end of the conversation."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator

from sshsite import hang_up
from sshworld import HostOfWorld

# Reads the submitter's script up to the line with the zip's digest, then answers. A play defines `answer(request)`, which returns an
# object and bytes, or writes to `out` itself and returns None.
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
say(b"clusterjob-visit ready python3\\n")
while line := source.readline():
    request = json.loads(line)
    source.read(request["size"])
    found = answer(request)
    if found is not None:
        told, data = found
        say(json.dumps({{"size": len(data), **told}}).encode() + b"\\n" + data)
"""


@contextlib.contextmanager
def hostile(host: HostOfWorld, play: str = "") -> Iterator[Callable[[str], None]]:
    """Let a host be hostile for a while; yields a function that has it play something else.

    Args:
        host: the host.
        play: Python code with a function `answer`, and perhaps `introduction`, which comes before the conversation.
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
