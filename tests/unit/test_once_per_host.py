"""One process per host prints a waiting notice, and another takes over when it ends."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

from clusterjob.worker import once_per_host

HOLDER_SCRIPT = """
# import before setuid: the other user may not read the interpreter's directory
import hashlib, os, sys
from clusterjob.worker import once_per_host
os.setuid(int(sys.argv[3]))
os.getuid = lambda: int(sys.argv[2])  # user id in the name of the lock
lock = once_per_host.lock_subject(sys.argv[1])
print(bool(lock), flush=True)
sys.stdin.read()
"""


def start_holder(subject: str, directory: Path, uid: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLDER_SCRIPT, subject, str(os.getuid()), str(uid)]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(directory)
    )


def test_one_process_locks_subject_until_it_ends(tmp_path: Path) -> None:
    subject = os.urandom(8).hex()
    with start_holder(subject, tmp_path, os.getuid()) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "True\n"
        assert once_per_host.lock_subject(subject) is None
        other = once_per_host.lock_subject(subject + " too")
        assert other is not None
        other.close()
        first.kill()
        first.wait()
        mine = once_per_host.lock_subject(subject)
        assert mine is not None
        mine.close()


def test_notices_come_after_4_s_and_then_every_30_s() -> None:
    assert list(itertools.islice(once_per_host.notice_times(), 4)) == [4.0, 30.0, 60.0, 90.0]


def test_lock_of_other_user_has_no_effect(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    subject = os.urandom(8).hex()
    with start_holder(subject, tmp_path, 65534) as other_user:
        assert other_user.stdout is not None
        assert other_user.stdout.readline() == "True\n"
        mine = once_per_host.lock_subject(subject)
        assert mine is not None
        mine.close()
        other_user.kill()
