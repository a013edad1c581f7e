"""A job over SSH whose end was guessed while a host was cut off: the true verdict comes when the link has healed."""

from __future__ import annotations

import json

import pytest
from procs import kill_one_by_one, wait_until
from sshsite import SLEEPER, Site, end_of, hang_up, wait_for_lines, workers_on

from clusterjob import jobs
from clusterjob.node.verdict import JobState
from clusterjob.records import Records

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
        wait_until(lambda: not workers_on(cut), CUT_OFF, "the end of the job on the host that is cut off")
    finally:
        cut.link("up")
        kill_one_by_one(cut.pids())  # the visit that was cut off: its sshd learns of that when TCP gives up
    hang_up()
    told = json.loads((site.remote_dir(record, "gpu1") / "result.json").read_text())
    assert told["state"] != "LOST", "node 0 knows why it ended"
    status = jobs.status(Records().find(record.job_id))
    assert status.verdict is not None
    assert status.verdict.to_json() == told
    noted = Records().find(record.job_id)
    assert (noted.end, noted.provisional) == (told, False)
