"""The report of a job on two hosts over SSH, with real sshd; one host becomes unreachable."""

from __future__ import annotations

import pytest
from procs import TEST_TIMEOUT, wait_until
from sshsite import SLEEPER, Site, close_connections


def report(site: Site, job_id: str) -> str:
    """Return the page that a new process writes."""
    process = site.command("report", job_id, "-o", "-")
    out, err = process.communicate(timeout=TEST_TIMEOUT)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out


@pytest.mark.slow
def test_report_has_all_hosts_and_names_the_one_that_does_not_answer(site: Site) -> None:
    record = site.submit(SLEEPER, nproc_per_node=2)
    logs = record.job_dir / "logs"

    def arrived() -> bool:
        report(site, record.job_id)
        return all((logs / f"node{node}/metrics.jsonl").exists() for node in (0, 1))

    wait_until(arrived, TEST_TIMEOUT, "samples of both hosts")
    text = report(site, record.job_id)
    assert text.count('class="hit"') == 4
    assert text.count("script.py:") >= 1  # the stacks of this moment
    assert "Nodes 0-1: " in text or ("Node 0: " in text and "Node 1: " in text)
    host = site.ssh_network.hosts["gpu2"]
    host.stop()
    try:
        text = report(site, record.job_id)
        notes = text[text.index('aria-label="Notes"') : text.index('id="timeline"')]
        assert "gpu2" in notes or "node 1" in notes
        assert text.count('class="hit"') == 4  # what was copied before
    finally:
        host.start()
    close_connections()
    cancel = site.command("cancel", record.job_id)
    cancel.communicate(timeout=TEST_TIMEOUT)
    wait_until(lambda: not site.running(), TEST_TIMEOUT, "the end on both hosts")
    text = report(site, record.job_id)
    assert "■ CANCELLED" in text
    assert "Memory per node" in text
    assert "The job has not ended" not in text
