"""`cancel --stacks` of a job on two hosts, with real sshd."""

from __future__ import annotations

import json

import pytest
from procs import TEST_TIMEOUT, wait_until
from sshsite import SLEEPER, Site, wait_for_lines
from verdicts import wait_for_verdict

from clusterjob.core import polling
from clusterjob.core.records import Records

pytestmark = pytest.mark.ssh


def test_cancel_saves_stacks_of_both_hosts(site: Site) -> None:
    record = site.submit(SLEEPER, nproc_per_node=2)
    wait_for_lines(record, "up 0", "up 1", "up 2", "up 3")
    site.run("cancel", "--stacks", record.job_id, code=0)
    verdict = wait_for_verdict(Records().find(record.job_id))
    assert (verdict.evidence, verdict.evidence_ranks) == ("logs/node0/stacks.txt", 4)
    path = record.job_dir / "logs" / "node0" / "stacks.json"
    wait_until(lambda: (polling.collect(record), path.exists())[1], TEST_TIMEOUT, "the file")
    data = json.loads(path.read_text())
    assert [(each["rank"], each["node_rank"]) for each in data["ranks"]] == [
        (0, 0), (1, 0), (2, 1), (3, 1),
    ]  # fmt: skip
