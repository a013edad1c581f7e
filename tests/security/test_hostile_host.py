"""Answers of a hostile host do not exhaust, hang or break the submitter.

The host is a real sshd. Errors name it.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hostile_host import hostile
from procs import TEST_TIMEOUT
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.node.verdict import JobState

TERABYTE = "def answer(request): return {'size': 10**12}, b''"
NOTHING = "def answer(request): say(b'{}\\n')"
ENDLESS_LINE = """
def answer(request):
    while True:
        say(b"x" * 65536)
"""
# Hosts that send no session; `test_hostile_mirror.py` has invalid answers in a session.
INTRODUCTIONS = {
    "endless data before the session": """
def introduction():
    while True:
        say(b"noise\\n" * 10000)
""",
    "endless requests for the zip": """
def introduction():
    while True:
        say(b"clusterjob-session need\\n")
""",
    "invalid setup line": "def introduction(): say(b'clusterjob-session setup x\\n')",
}

# Slow hosts. They must not delay a command much longer than the timeout.
SLOW = {
    "sends nothing": "def answer(request): source.read()",
    "one byte per second": """
def answer(request):
    for byte in b'{"size": 5, "known": true, "alive": true, "files": [], "more": false}':
        say(bytes([byte]))
        time.sleep(1)
""",
    "one byte of data per second": """
def answer(request):
    say(b'{"size": 99999, "known": true, "alive": true, "more": false, ')
    say(b'"files": [{"path": "result.json", "stamp": "", "size": 99999}]}\\n')
    while True:
        say(b"x")
        time.sleep(1)
""",
    "one byte per second before the session": """
def introduction():
    while True:
        say(b"x")
        time.sleep(1)
""",
}


@pytest.fixture
def record(site: Site) -> Record:
    """Return a job whose end has not been polled."""
    return site.submit("", hosts="gpu1", set={"connect_timeout": "2"})


def assert_unknown(record: Record, name: str, *, seconds: float) -> None:
    """Poll the status: it is UNKNOWN, names the host, and writes nothing from the host."""
    before = sorted(record.job_dir.rglob("*"))
    begin = time.monotonic()
    status = polling.status(record)
    assert time.monotonic() - begin < seconds, name
    assert status.state is JobState.UNKNOWN, name
    assert status.reason.startswith("gpu1: "), name
    assert len(status.reason) < 3000, name
    assert sorted(record.job_dir.rglob("*")) == before, name


def test_status_with_invalid_answer_is_unknown_and_names_host(site: Site, record: Record) -> None:
    with hostile(site.ssh_network.hosts["gpu1"]) as play:
        for name, code in INTRODUCTIONS.items():
            play(code)
            assert_unknown(record, name, seconds=60)


@pytest.mark.slow
def test_status_of_slow_host_is_unknown_within_a_minute(site: Site, record: Record) -> None:
    with hostile(site.ssh_network.hosts["gpu1"]) as play:
        for name, code in SLOW.items():
            play(code)
            assert_unknown(record, name, seconds=60)


def test_status_and_list_show_error_of_hostile_host_without_traceback(
    site: Site, record: Record
) -> None:
    """`list` still shows another job, on an honest host."""
    other = site.submit("", hosts="gpu2")
    wait_for_verdict(other)
    with hostile(site.ssh_network.hosts["gpu1"], TERABYTE):
        for args in (["status"], ["list"], ["status", record.job_id]):
            code, out, err = site.run(*args)
            assert (code, "Traceback" in err) == (0, False), err
            assert "gpu1: it sends a malformed answer: it announces 1000000000000 bytes" in out
            assert ("SUCCEEDED" in out) == (args == ["list"])


def test_memory_is_bounded_while_host_sends_without_end(site: Site, record: Record) -> None:
    """Compare the peak memory of two processes: for an endless line and for an empty answer."""

    def peak(why: str) -> int:
        code = (
            "import resource, sys\nfrom clusterjob.cli import main\n"
            f"sys.argv[1:] = ['status', {record.job_id!r}]\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=site.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TEST_TIMEOUT,
            check=False,
        )
        assert why in done.stdout, done.stderr
        return int(done.stderr.split()[-1]) * 1024

    with hostile(site.ssh_network.hosts["gpu1"], NOTHING) as play:
        quiet = peak("Object missing required field `size`")
        play(ENDLESS_LINE)
        grown = peak("a line of more than") - quiet
    print(f"the peak grew by {grown / 1e6:.1f} MB")
    assert grown < 64 << 20
