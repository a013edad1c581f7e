"""Commands give up a host that is too slow, and wait for an honest host behind a slow link."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hostile_host import slow
from sshsite import Site, close_connections, output_lines
from verdicts import wait_for_verdict

from clusterjob.core import jobs

TIMEOUT = 2  # seconds, the connect_timeout of these tests


@pytest.mark.slow
def test_logs_and_fetch_wait_for_honest_host_behind_slow_link(site: Site, tmp_path: Path) -> None:
    """At 40 KB/s the logs take 6 s, and so does the fetched file."""
    script = """
        import pathlib
        pathlib.Path("result").write_bytes(bytes(240_000))
        for number in range(240):
            print(number, "x" * 1000)
    """
    record = site.submit(script, hosts="gpu1", set={"connect_timeout": str(TIMEOUT)})
    wait_for_verdict(record)
    close_connections()
    with slow(site.ssh_network.hosts["gpu1"], 40_000):
        begin = time.monotonic()
        assert len(output_lines(record)) == 240
        took = time.monotonic() - begin
        jobs.fetch(record, ["result"], target=tmp_path, nodes=None, may_replace=lambda _: True)
    assert (tmp_path / "result").stat().st_size == 240_000
    assert took > 2 * TIMEOUT, "the link is slow"
