"""Commands inside a job: other users of the node, and a node that sends anything."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inside_job import running
from procs import TEST_TIMEOUT, below

from clusterjob.core.inside import connection
from clusterjob.core.records import Record
from clusterjob.errors import InsideError
from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import Stream
from clusterjob.node.workers import worker_table

# The interpreter may be in a directory of root: modules are imported before the change of user.
AS_NOBODY = """
import os, sys
from clusterjob.node.inside import program
os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir("/")
"""
READ = """
for name in ("environ", *(f"fd/{number}" for number in range(64))):
    try:
        print(open(f"/proc/{sys.argv[1]}/{name}", "rb").read()[:10])
    except OSError:
        pass
"""


def as_nobody(code: str, *args: str, given: bytes = b"") -> bytes:
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY + code, *args],
        input=given,
        stdout=subprocess.PIPE,
        timeout=TEST_TIMEOUT,
        check=True,
    )
    return done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_other_user_finds_neither_environment_nor_job(tmp_path: Path, plain_python: str) -> None:
    with running(tmp_path, "--cluster", "local", ranks=1) as job:
        [forkserver] = [pid for pid in below(1) if has_table(pid, job.id)]
        assert as_nobody(READ, str(forkserver)) == b""
        request = {"job": job.id, "node": 0, "rank": None, "argv": ["id"], "stdin": False}
        sent = as_nobody("program.main()", given=json.dumps(request).encode() + b"\n")
        answer = json.loads(sent.removeprefix(connection.MARKER))
        assert answer == {"error": {"why": "absent"}}


def has_table(pid: int, job_id: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        if f"CLUSTERJOB_JOB_ID={job_id}".encode() not in environ.split(b"\0"):
            return False
        return worker_table.of_process(pid) is not None
    except OSError:
        return False


class Link:
    """A link to a node that has sent some bytes and ended."""

    def __init__(self, sent: bytes) -> None:
        self.reader, end = os.pipe()
        self._requests, self.writer = os.pipe()
        os.write(end, sent)
        os.close(end)

    def error(self) -> str:
        return ""

    def close(self) -> None:
        for each in (self.reader, self._requests, self.writer):
            os.close(each)


frames = st.builds(
    lambda kind, number, payload: (
        bytes([kind])
        + number.to_bytes(4, "big")
        + len(payload).to_bytes(4, "big")
        + payload
        + b"\n"
    ),
    st.integers(0, 10),
    st.integers(0, 5),
    st.binary(max_size=50) | st.sampled_from([b'{"code": 3, "ended": false}', b'{"code": []}']),
)


@settings(max_examples=200)
@given(sent=st.binary(max_size=200) | st.lists(frames, max_size=20).map(b"".join))
def test_any_bytes_of_node_end_with_one_error(sent: bytes) -> None:
    record = Record(
        "t-1", "t", cluster="none", backend="none", job_dir=Path("/nonexistent"), nodes=1,
        submitted_at="", spec={},
    )  # fmt: skip
    link = Link(sent)
    received: list[bytes] = []
    entered = connection.InsideConnection(record, 0, link, connection._Answer())
    with contextlib.closing(entered):
        for number in (1, 2):
            entered.streams.add(Stream(number, sink=received.append))
        with contextlib.suppress(InsideError):
            while not entered.finished:
                entered.handle(streams.wait_for_any([entered.streams], [], 0.1))
            assert entered.exit_code() in range(256)
    assert sum(map(len, received)) <= len(sent)
