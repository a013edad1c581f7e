"""Of the processes of one machine that wait for the same, one speaks, and another takes over when
it ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

from clusterjob.worker import once_per_host

HOLD = """
import hashlib, os, sys  # before it is another user, who may not read the interpreter's directory
from clusterjob.worker import once_per_host as speaker
os.setuid(int(sys.argv[3]))
os.getuid = lambda: int(sys.argv[2])  # whose name is taken
turn = speaker.take_turn(sys.argv[1])
print(bool(turn), flush=True)
sys.stdin.read()
"""


def holder(subject: str, directory: Path, uid: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLD, subject, str(os.getuid()), str(uid)]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(directory)
    )


def test_one_speaks_of_a_subject_until_it_ends(tmp_path: Path) -> None:
    subject = os.urandom(8).hex()
    with holder(subject, tmp_path, os.getuid()) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        assert once_per_host.take_turn(subject) is None
        other = once_per_host.take_turn(subject + " too")
        assert other is not None
        other.close()
        first.kill()
        first.wait()
        mine = once_per_host.take_turn(subject)
        assert mine is not None
        mine.close()


def test_another_user_silences_nobody(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    subject = os.urandom(8).hex()
    with holder(subject, tmp_path, 65534) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "True\n"
        mine = once_per_host.take_turn(subject)
        assert mine is not None
        mine.close()
        stranger.kill()
