"""Answers of a hostile host do not exhaust, hang or break the submitter.

Each answer is bounded and checked, and errors name the host. The host is a real sshd.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_host import hostile
from procs import TEST_TIMEOUT
from sshsite import Site
from verdicts import wait_for_verdict

from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.verdict import JobState
from clusterjob.remote import mirror

POLL_ANSWER = '{"known": True, "alive": True, "files": [], "more": False}'

# Invalid answers, each the same for every request.
PLAYS = {
    "size of a terabyte": "def answer(request): return {'size': 10**12}, b''",
    "negative size": "def answer(request): return {'size': -1}, b''",
    "size of a wrong type": "def answer(request): return {'size': '7'}, b''",
    "no object": "def answer(request): say(b'[1, 2]\\n')",
    "nothing": "def answer(request): say(b'{}\\n')",
    "no JSON": "def answer(request): say(b'clusterjob-session ready\\n')",
    "deep JSON": "def answer(request): say(b'[' * 500000 + b'\\n')",
    "long number": "def answer(request): say(b'{\"size\": ' + b'9' * 500000 + b'}\\n')",
    "not a number": "def answer(request): say(b'{\"size\": NaN}\\n')",
    "fewer bytes": (
        f"def answer(request): say(json.dumps({{'size': 9, **{POLL_ANSWER}}}).encode() "
        "+ b'\\n123'); sys.exit()"
    ),
    "always more": (
        "def answer(request): return {'known': True, 'alive': True, 'files': [], 'more': True}, b''"
    ),
    "wrong types": (
        "def answer(request): return {'known': 1, 'alive': 'yes', 'files': 3, 'more': None}, b''"
    ),
    "files of a wrong type": (
        "def answer(request): "
        "return {'known': True, 'alive': True, 'files': [3], 'more': False}, b''"
    ),
    "40,000 files": """
def answer(request):
    files = [{"path": f"logs/node0/f{number}", "offset": 0, "size": 1} for number in range(40000)]
    return {"known": True, "alive": True, "files": files, "more": False}, b"x" * 40000
""",
    "path outside the job": """
def answer(request):
    files = [{"path": "../../x", "stamp": "1", "size": 1}]
    return {"known": True, "alive": True, "files": files, "more": False}, b"x"
""",
    "size larger than the data": """
def answer(request):
    files = [{"path": "result.json", "stamp": "1", "size": 5}]
    return {"known": True, "alive": True, "files": files, "more": False}, b"x"
""",
    "error of a wrong type": "def answer(request): return {'error': 5}, b''",
    "endless error": "def answer(request): return {'error': 'x' * 900000}, b''",
    "endless line": """
def answer(request):
    while True:
        say(b"x" * 65536)
""",
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
        for name, code in PLAYS.items():
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
    with hostile(site.ssh_network.hosts["gpu1"], PLAYS["size of a terabyte"]):
        for args in (["status"], ["list"], ["status", record.job_id]):
            code, out, err = site.run(*args)
            assert (code, "Traceback" in err) == (0, False), err
            assert "gpu1: it sends a malformed answer: it announces 1000000000000 bytes" in out
            assert ("SUCCEEDED" in out) == (args == ["list"])


def test_logs_end_when_host_always_announces_more(site: Site, record: Record) -> None:
    with hostile(site.ssh_network.hosts["gpu1"], PLAYS["always more"]):
        code, _, _ = site.run("logs", record.job_id)
    assert code in (0, 1)


def test_hosts_command_shows_honest_host_beside_hostile_one(site: Site) -> None:
    """`hosts` prints one line per host; the line of the hostile host is an error."""
    with hostile(
        site.ssh_network.hosts["gpu1"],
        "def answer(request): return {'errors': 'x', 'free': '1'}, b''",
    ):
        args = [
            "hosts",
            "--hosts",
            "gpu1,gpu2",
            "--python",
            site.python,
            "--set",
            f"ssh_config={site.ssh_network.config}",
        ]
        code, out, err = site.run(*args)
    assert (code, "Traceback" in err) == (1, False)
    shown = out + err
    assert "Expected `array`, got `str` - at `$.errors`" in shown
    assert "no torch" in shown  # the answer of gpu2, the honest host


def test_submit_with_invalid_answer_fails_and_names_host(site: Site) -> None:
    with hostile(
        site.ssh_network.hosts["gpu1"], "def answer(request): return {'errors': [7]}, b''"
    ):
        code, _, err = site.run("submit", *site.options(hosts="gpu1"), site.script(""))
    assert (code, "Traceback" in err) == (1, False)
    why = "Expected `str`, got `int` - at `$.errors[0]`"
    assert f"gpu1: it sends a malformed answer: {why}" in err


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

    with hostile(site.ssh_network.hosts["gpu1"], PLAYS["nothing"]) as play:
        quiet = peak("Object missing required field `size`")
        play(PLAYS["endless line"])
        grown = peak("a line of more than") - quiet
    print(f"the peak grew by {grown / 1e6:.1f} MB")
    assert grown < 64 << 20


def test_events_file_of_host_does_not_exceed_its_size_limit(tmp_path: Path) -> None:
    """Events are read as a whole; log files may be longer."""
    at_bound = mirror.MAX_EVENTS_BYTES - 1

    def keep(name: str, offset: int) -> None:
        mirror.keep(
            "gpu1",
            tmp_path,
            file={"path": name, "offset": offset},
            content=b"x",
            sizes={name: offset},
            stamps={},
            grown=[name],
            replaced=[],
        )

    keep("events.jsonl", at_bound)
    with pytest.raises(HostError, match="more than"):
        keep("events.jsonl", at_bound + 1)
    assert (tmp_path / "events.jsonl").stat().st_size == mirror.MAX_EVENTS_BYTES
    keep("logs/node0/rank0.out", at_bound + 1)
