"""The data of `top` for a job on two hosts over SSH, while one of them cannot be reached."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest
from procs import TEST_TIMEOUT, command_line, wait_until
from sshsite import Site, close_connections

from clusterjob.insight.live_jobs import JobNow, JobPoller

COUNTER = """
    import itertools, os, time
    for number in itertools.count():
        print(f"line {number} of rank {os.environ['RANK']}", flush=True)
        time.sleep(0.3)
"""


@pytest.mark.slow
def test_unreachable_host_is_shown_while_the_other_goes_on(site: Site) -> None:
    record = site.submit(COUNTER, nproc_per_node=2)
    changes: list[float] = []
    poller = JobPoller([record], lambda: changes.append(time.monotonic()))

    def now() -> JobNow | None:
        return poller.snapshot.chosen

    def number(node: int) -> int:
        job = now()
        words = "" if job is None else job.nodes[node].line
        return int(words.split()[1]) if words.startswith("line ") else -1

    host = site.ssh_network.hosts["gpu2"]
    poller.start()
    try:
        wait_until(
            lambda: (job := now()) and all(node.cpu is not None for node in job.nodes),
            TEST_TIMEOUT,
            "metrics of both hosts",
        )
        job = now()
        assert job is not None
        assert [node.host for node in job.nodes] == ["gpu1", "gpu2"]
        assert [rank.rank for rank in job.ranks] == [0, 1, 2, 3]
        assert min(number(0), number(1)) >= 0
        host.stop()
        for pid in host.pids():  # the agent goes on: only this machine cannot reach the host
            if "sshd" in command_line(pid):
                os.kill(pid, signal.SIGKILL)
        stopped, before = len(changes), number(0)
        wait_until(lambda: now().nodes[1].no_data > 20, 2 * TEST_TIMEOUT, "a silent node")
        job = now()
        assert job.nodes[0].no_data == 0
        assert number(0) > before + 10
        assert "gpu2" in job.status.reason
        seen = changes[stopped:]
        assert max(b - a for a, b in itertools.pairwise(seen)) < 10  # it never blocks
        host.start()
        wait_until(lambda: now().nodes[1].no_data == 0, 2 * TEST_TIMEOUT, "its data")
    finally:
        if not host.sshd:
            host.start()
        poller.close()
        for thread in (poller._thread, *poller._lanes.values()):
            thread.join(TEST_TIMEOUT)
        close_connections()
        site.command("cancel", record.job_id).communicate(timeout=TEST_TIMEOUT)
        wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end on both hosts")
