"""Metrics and efficiency of a job on two hosts over SSH, with real sshd."""

from __future__ import annotations

import json
from typing import Any

import pytest
from procs import TEST_TIMEOUT, wait_until
from sshsite import SLEEPER, Site, close_connections


def metrics(site: Site, job_id: str) -> tuple[dict[str, Any], str]:
    """Return the answer of a new process, and its messages."""
    _, out, err = site.run("metrics", job_id, "--json")
    return json.loads(out) if out else {"nodes": []}, err


@pytest.mark.slow
def test_metrics_come_from_each_host_and_unreachable_host_is_one_line(site: Site) -> None:
    record = site.submit(SLEEPER, nproc_per_node=2)

    def workers() -> list[set[int]]:
        nodes = metrics(site, record.job_id)[0]["nodes"]
        return [{one["rank"] for one in node["samples"][-1]["workers"]} for node in nodes]

    wait_until(lambda: workers() == [{0, 1}, {2, 3}], TEST_TIMEOUT, "samples of both hosts")
    host = site.ssh_network.hosts["gpu2"]
    host.stop()
    try:
        found, messages = metrics(site, record.job_id)
        assert [node["node_rank"] for node in found["nodes"]] == [0, 1]  # what was copied before
        assert "gpu2" in messages
        assert len(messages.splitlines()) == 1
    finally:
        host.start()
    close_connections()
    site.run("cancel", record.job_id, code=0)
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end on both hosts")
    _, out, _ = site.run("status", record.job_id, "--json")
    used = json.loads(out)["jobs"][0]["efficiency"]
    assert [node["host"] for node in used["nodes"]] == ["gpu1", "gpu2"]
    assert all(node["memory_peak"] > 1 << 20 for node in used["nodes"])
