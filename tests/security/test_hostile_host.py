"""A hostile host, a real sshd, does not exhaust, hang or break the submitter: each answer is
bounded and checked, and the host named.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile_host import hostile, run
from procs import PATIENCE
from sshsite import Site, end_of

from clusterjob.core import jobs
from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.verdict import JobState
from clusterjob.remote import mirror

LOOK = '{"known": True, "alive": True, "files": [], "more": False}'

# Many a play answers each question alike.
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
    "fewer bytes": f"def answer(request): say(json.dumps({{'size': 9, **{LOOK}}}).encode() + b'\\n123'); sys.exit()",
    "more for ever": "def answer(request): return {'known': True, 'alive': True, 'files': [], 'more': True}, b''",
    "wrong types": "def answer(request): return {'known': 1, 'alive': 'yes', 'files': 3, 'more': None}, b''",
    "files of a wrong type": "def answer(request): return {'known': True, 'alive': True, 'files': [3], 'more': False}, b''",
    "40,000 files": """
def answer(request):
    files = [{"path": f"logs/node0/f{number}", "offset": 0, "size": 1} for number in range(40000)]
    return {"known": True, "alive": True, "files": files, "more": False}, b"x" * 40000
""",
    "files of others": """
def answer(request):
    return {"known": True, "alive": True, "files": [{"path": "../../x", "stamp": "1", "size": 1}], "more": False}, b"x"
""",
    "sizes that do not add up": """
def answer(request):
    return {"known": True, "alive": True, "files": [{"path": "result.json", "stamp": "1", "size": 5}], "more": False}, b"x"
""",
    "error of a wrong type": "def answer(request): return {'error': 5}, b''",
    "endless error": "def answer(request): return {'error': 'x' * 900000}, b''",
    "endless line": """
def answer(request):
    while True:
        say(b"x" * 65536)
""",
    "endless noise before": """
def introduction():
    while True:
        say(b"noise\\n" * 10000)
""",
    "asks for the zip for ever": """
def introduction():
    while True:
        say(b"clusterjob-session need\\n")
""",
    "setup line that is none": "def introduction(): say(b'clusterjob-session setup x\\n')",
}

# What holds nobody up for longer than the timeout, of 2 s here.
SLOW = {
    "says nothing": "def answer(request): source.read()",
    "a byte a second": """
def answer(request):
    for byte in b'{"size": 5, "known": true, "alive": true, "files": [], "more": false}':
        say(bytes([byte]))
        time.sleep(1)
""",
    "a byte a second of the data": """
def answer(request):
    say(b'{"size": 99999, "known": true, "alive": true, "files": [{"path": "result.json", "stamp": "", "size": 99999}], "more": false}\\n')
    while True:
        say(b"x")
        time.sleep(1)
""",
    "a byte a second before": """
def introduction():
    while True:
        say(b"x")
        time.sleep(1)
""",
}


@pytest.fixture
def record(site: Site) -> Record:
    """Return a job whose end nobody has asked for."""
    return site.submit("", hosts="gpu1", set={"connect_timeout": "4"})


def check(record: Record, name: str, *, seconds: float) -> None:
    """Ask how the job stands: UNKNOWN, with the host's name, in one line; nothing is written that
    the host sends.
    """
    before = sorted(record.job_dir.rglob("*"))
    begin = time.monotonic()
    status = jobs.status(record)
    assert time.monotonic() - begin < seconds, name
    assert status.state is JobState.UNKNOWN, name
    assert status.reason.startswith("gpu1: "), name
    assert len(status.reason) < 3000, name
    assert sorted(record.job_dir.rglob("*")) == before, name


def test_status_names_the_host_that_answers_nonsense(site: Site, record: Record) -> None:
    with hostile(site.world.hosts["gpu1"]) as play:
        for name, code in PLAYS.items():
            play(code)
            check(record, name, seconds=60)


def test_status_does_not_wait_for_a_slow_host(site: Site, record: Record) -> None:
    with hostile(site.world.hosts["gpu1"]) as play:
        for name, code in SLOW.items():
            play(code)
            check(record, name, seconds=60)


def test_commands_end_without_a_traceback(site: Site, record: Record) -> None:
    """`list` and `status` still show the others: here the job beside it, on an honest host."""
    other = site.submit("", hosts="gpu2")
    end_of(other)
    with hostile(site.world.hosts["gpu1"], PLAYS["size of a terabyte"]):
        for words in (["status"], ["list"], ["status", record.job_id]):
            code, out, err = run(site, *words)
            assert (code, "Traceback" in err) == (0, False), err
            assert "gpu1: it sends a malformed answer: it announces 1000000000000 bytes" in out
            assert ("SUCCEEDED" in out) == (words == ["list"])


def test_logs_of_a_host_that_always_has_more_end(site: Site, record: Record) -> None:
    with hostile(site.world.hosts["gpu1"], PLAYS["more for ever"]):
        code, _, err = run(site, "logs", record.job_id)
    assert "Traceback" not in err
    assert code in (0, 1)


def test_other_hosts_are_still_shown_beside_a_hostile_one(site: Site) -> None:
    """`hosts` has one line for each; the hostile one has its own error."""
    with hostile(
        site.world.hosts["gpu1"], "def answer(request): return {'errors': 'x', 'free': '1'}, b''"
    ):
        words = [
            "hosts",
            "--hosts",
            "gpu1,gpu2",
            "--python",
            site.python,
            "--set",
            f"ssh_config={site.world.config}",
        ]
        code, out, err = run(site, *words)
    assert (code, "Traceback" in err) == (1, False)
    shown = out + err
    assert "the answer.errors is 'x', not a list" in shown
    assert "no torch" in shown  # of gpu2, which has answered


def test_submission_is_refused_with_the_hosts_name(site: Site) -> None:
    with hostile(site.world.hosts["gpu1"], "def answer(request): return {'errors': [7]}, b''"):
        code, _, err = run(site, "submit", *site.options(hosts="gpu1"), site.script(""))
    assert (code, "Traceback" in err) == (1, False)
    assert "gpu1: it sends a malformed answer: the answer.errors[0] is 7, not a text" in err


def test_memory_does_not_grow_while_a_host_sends_without_end(site: Site, record: Record) -> None:
    """Measured in a process of its own: the peak beside a host that sends an endless line, less the
    peak beside one that says nothing.
    """

    def peak(why: str) -> int:
        code = (
            "import resource, sys\nfrom clusterjob.cli import main\n"
            f"sys.argv[1:] = ['status', {record.job_id!r}]\n"
            "try:\n    main()\nexcept SystemExit:\n    pass\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=site.directory, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert why in done.stdout, done.stderr
        return int(done.stderr.split()[-1]) * 1024

    with hostile(site.world.hosts["gpu1"], PLAYS["nothing"]) as play:
        quiet = peak("the answer has no 'size'")
        play(PLAYS["endless line"])
        grown = peak("a line of more than") - quiet
    print(f"the peak grew by {grown / 1e6:.1f} MB")
    assert grown < 64 << 20


def test_events_of_a_host_do_not_grow_beyond_their_bound(tmp_path: Path) -> None:
    """They are read as a whole; the files in which logs grow may be longer."""
    at_bound = mirror.MAX_EVENTS_BYTES - 1
    mirror.keep(
        "gpu1", tmp_path, file={"path": "events.jsonl", "offset": at_bound}, content=b"x", stamps={}
    )
    with pytest.raises(HostError, match="more than"):
        mirror.keep(
            "gpu1",
            tmp_path,
            file={"path": "events.jsonl", "offset": at_bound + 1},
            content=b"x",
            stamps={},
        )
    assert (tmp_path / "events.jsonl").stat().st_size == mirror.MAX_EVENTS_BYTES
    mirror.keep(
        "gpu1",
        tmp_path,
        file={"path": "logs/node0/rank0.out", "offset": at_bound + 1},
        content=b"x",
        stamps={},
    )
