"""A job over SSH whose end was guessed while a host was cut off: the true verdict comes when the
link has healed.
"""

from __future__ import annotations

import json

import pytest
from procs import kill_one_by_one, wait_until
from sshsite import PATIENCE, SLEEPER, Site, end_of, hang_up, wait_for_lines, workers_on

from clusterjob.core import jobs
from clusterjob.core.records import Record, Records
from clusterjob.node.logs import events
from clusterjob.node.verdict import JobState, Verdict

CUT_OFF = 60.0  # seconds; several times what the lease takes


@pytest.mark.slow
def test_job_that_was_lost_with_node_0_gets_its_verdict_when_the_link_heals(site: Site) -> None:
    record = site.submit(SLEEPER, set={"connect_timeout": "3"})
    wait_for_lines(record, "up 0", "up 1")
    cut = site.world.hosts["gpu1"]
    cut.link("down")
    try:
        hang_up()
        guessed = end_of(record, CUT_OFF)
        assert guessed.state is JobState.LOST
        assert "gpu1" in guessed.reason
        noted = Records().find(record.job_id)
        assert (noted.provisional, jobs.status(noted).state) == (True, JobState.LOST)
        wait_until(
            lambda: not workers_on(cut), CUT_OFF, "the end of the job on the host that is cut off"
        )
    finally:
        cut.link("up")
        kill_one_by_one(
            cut.pids()
        )  # the visit that was cut off: its sshd learns of that when TCP gives up
    hang_up()
    told = json.loads((site.remote_dir(record, "gpu1") / "result.json").read_text())
    assert told["state"] != "LOST", "node 0 knows why it ended"
    status = jobs.status(Records().find(record.job_id))
    assert status.verdict is not None
    assert status.verdict.to_json() == told
    noted = Records().find(record.job_id)
    assert (noted.end, noted.provisional) == (told, False)


def guess_lost(record: Record, at: str) -> None:
    """Note an end that nobody knows, as while all hosts are cut off."""
    end = Verdict(JobState.LOST, 1, reason="a guess", ended_at=at).to_json()
    Records().with_end(Records().find(record.job_id), end, provisional=True)


def test_cancel_tries_again_where_the_end_was_only_guessed(site: Site) -> None:
    """Also after the day in which `status` asks again."""
    record = site.submit(SLEEPER, hosts="gpu1", set={"connect_timeout": "5"})
    wait_for_lines(record, "up 0")
    host = site.world.hosts["gpu1"]
    hang_up()
    for at in (events.now(), "2020-01-01T00:00:00Z"):
        guess_lost(record, at)
        host.stop()
        refused = site.command("cancel", record.job_id)
        _, err = refused.communicate(timeout=PATIENCE)
        host.start()
        assert (refused.returncode, "had ended already" in err) == (1, False), err
        assert "gpu1" in err
        assert workers_on(host)
    done = site.command("cancel", record.job_id)
    _, err = done.communicate(timeout=PATIENCE)
    assert (done.returncode, "is cancelled" in err) == (0, True), err
    wait_until(lambda: not workers_on(host), PATIENCE, "the end of the job")
