"""How long a host may take to answer: one that drips is ended by name, and an honest one behind a
slow link is waited for.
"""

from __future__ import annotations

import time
from pathlib import Path

from hostile_host import hostile, slow
from sshsite import Site, end_of, hang_up, lines_of

from clusterjob.core import jobs
from clusterjob.node.verdict import JobState

TIMEOUT = 3  # seconds, of the tests' hosts

# Above the least rate, so that nothing but the bound in all ends it; the whole answer would take
# 100 s.
DRIPS = """
def answer(request):
    say(b'{"size": 12000000, "known": true, "alive": true, "more": false, "files": ')
    say(b'[{"path": "result.json", "stamp": "1", "size": 12000000}]}\\n')
    while True:
        say(b"x" * 60000)
        time.sleep(0.5)
"""
STALLS = """
def answer(request):
    say(b'{"size": 12000000, "known": true, ')
    source.read()
"""


def test_status_is_not_held_by_a_host_that_drips(site: Site) -> None:
    record = site.submit("", hosts="gpu1", set={"connect_timeout": str(TIMEOUT)})
    with hostile(site.world.hosts["gpu1"], DRIPS) as play:
        begin = time.monotonic()
        status = jobs.status(record)
        assert time.monotonic() - begin < 60
        assert status.state is JobState.UNKNOWN
        assert status.reason.startswith("gpu1: only ")
        assert status.reason.endswith(" bytes in 12 s")
        play(STALLS)
        assert jobs.status(record).reason == "gpu1: only 34 bytes in 3 s"


def test_honest_host_behind_a_slow_link_is_waited_for(site: Site, tmp_path: Path) -> None:
    """40 KB/s: 10 s for the logs, and for the file that is fetched."""
    script = """
        import pathlib
        pathlib.Path("result").write_bytes(bytes(400_000))
        for number in range(400):
            print(number, "x" * 1000)
    """
    record = site.submit(script, hosts="gpu1", set={"connect_timeout": str(TIMEOUT)})
    end_of(record)
    hang_up()
    with slow(site.world.hosts["gpu1"], 40_000):
        begin = time.monotonic()
        assert len(lines_of(record)) == 400
        took = time.monotonic() - begin
        jobs.fetch(record, ["result"], target=tmp_path, nodes=None, may_replace=lambda _: True)
    assert (tmp_path / "result").stat().st_size == 400_000
    assert took > 2 * TIMEOUT, "the link is slow"
