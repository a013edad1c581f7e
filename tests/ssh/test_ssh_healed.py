"""SSH jobs whose end was guessed during a network failure get their real verdict later."""

from __future__ import annotations

import json

import pytest
from procs import kill_all, wait_until
from sshsite import SLEEPER, TEST_TIMEOUT, Site, close_connections, workers_on
from verdicts import wait_for_verdict

from clusterjob.core import polling
from clusterjob.core.records import Record, Records
from clusterjob.node.logs import events
from clusterjob.node.verdict import JobState, Verdict

CUT_OFF = 60.0  # seconds; several times the lease


@pytest.mark.slow
def test_job_lost_with_node_0_gets_real_verdict_after_link_heals(site: Site) -> None:
    record = site.submit(SLEEPER, set={"connect_timeout": "3"}, until=("up 0", "up 1"))
    cut = site.ssh_network.hosts["gpu1"]
    cut.link("down")
    try:
        close_connections()
        guessed = wait_for_verdict(record, CUT_OFF)
        assert guessed.state is JobState.LOST
        assert "gpu1" in guessed.reason
        other = site.ssh_network.hosts["gpu2"]
        wait_until(lambda: not workers_on(other), CUT_OFF, "the end of the job on the other host")
        recorded = Records().find(record.job_id)
        assert (recorded.provisional, polling.status(recorded).state) == (True, JobState.LOST)
        wait_until(
            lambda: not workers_on(cut), CUT_OFF, "the end of the job on the host that is cut off"
        )
    finally:
        cut.link("up")
        # The sshd of the session that was cut off ends only when TCP gives up.
        kill_all(cut.pids())
    close_connections()
    reported = json.loads((site.remote_dir(record, "gpu1") / "result.json").read_text())
    assert reported["state"] != "LOST", "node 0 knows why it ended"
    status = polling.status(Records().find(record.job_id))
    assert status.verdict.to_json() == reported
    recorded = Records().find(record.job_id)
    assert (recorded.end, recorded.provisional) == (reported, False)


def guess_lost(record: Record, at: str) -> None:
    """Record a guessed end, as if all hosts were cut off."""
    end = Verdict(JobState.LOST, 1, reason="a guess", ended_at=at).to_json()
    Records().with_end(Records().find(record.job_id), end, provisional=True)


def test_cancel_retries_job_whose_end_was_only_guessed(site: Site) -> None:
    """One day after the guess, `status` no longer asks the hosts, but `cancel` does."""
    record = site.submit(SLEEPER, hosts="gpu1", set={"connect_timeout": "5"}, until=("up 0",))
    host = site.ssh_network.hosts["gpu1"]
    close_connections()
    for at in (events.now(), "2020-01-01T00:00:00Z"):
        guess_lost(record, at)
        host.stop()
        code, _, err = site.run("cancel", record.job_id)
        host.start()
        assert (code, "had ended already" in err) == (1, False), err
        assert "gpu1" in err
        assert workers_on(host)
    code, _, err = site.run("cancel", record.job_id)
    assert (code, "is cancelled" in err) == (0, True), err
    wait_until(lambda: not workers_on(host), TEST_TIMEOUT, "the end of the job")
