"""One host of several says that the job has ended: it decides nothing that node 0 or the other
hosts know better.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hostile_host import hostile
from procs import wait_until
from sshsite import PATIENCE, SLEEPER, Site, end_of, hang_up, wait_for_lines, workers_on

from clusterjob.backends.ssh import status
from clusterjob.core import jobs
from clusterjob.core.records import Handle, Record, Records
from clusterjob.errors import HostError
from clusterjob.node.verdict import JobState

# Node 1 claims a success that node 0 has never declared, at a time after which nobody would ask
# again.
CLAIMS = """
def answer(request):
    if request["op"] != "look":
        return {"running": False}, b""
    end = {"schema": 1, "state": "SUCCEEDED", "exit_code": 0, "restarts": 0, "node_rank": 1, "ended_at": "2000-01-01T00:00:00Z"}
    data = json.dumps(end).encode()
    files = [{"path": "ends/node1.json", "stamp": "1", "size": len(data)}]
    return {"known": True, "alive": False, "files": files, "more": False}, data
"""


def test_member_that_claims_a_success_ends_no_job(site: Site) -> None:
    record = site.submit(SLEEPER, set={"connect_timeout": "5"})
    wait_for_lines(record, "up 0", "up 1")
    lead = site.world.hosts["gpu1"]
    with hostile(site.world.hosts["gpu2"], CLAIMS):
        assert jobs.status(Records().find(record.job_id)).state is JobState.RUNNING
        assert (record.job_dir / "ends" / "node1.json").exists(), "the claim has come"
        lead.stop()
        hang_up()
        jobs.status(Records().find(record.job_id))
        noted = Records().find(record.job_id)
        assert (noted.end is None) or noted.may_be_corrected, "nobody has asked node 0"
        lead.start()
        hang_up()
        assert jobs.status(Records().find(record.job_id)).state is JobState.RUNNING
        for pid in workers_on(lead):
            with contextlib.suppress(ProcessLookupError):  # it ends with the first
                os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not workers_on(lead), PATIENCE, "the end on gpu1")
        assert end_of(record).state is not JobState.SUCCEEDED


def ends_of(job_dir: Path, states: dict[int, str]) -> None:
    (job_dir / "ends").mkdir()
    for node, state in states.items():
        code = {"SUCCEEDED": 0, "FAILED": 7}.get(state, 1)
        end = {
            "state": state,
            "exit_code": code,
            "restarts": 0,
            "node_rank": node,
            "reason": "" if code == 0 else f"node {node} says so",
        }
        (job_dir / "ends" / f"node{node}.json").write_text(json.dumps(end))


GONE = "gone"  # a host that is not reached


@pytest.mark.parametrize(
    ("states", "hosts", "state", "provisional"),
    [
        ({1: "SUCCEEDED"}, [True, False, False], "PENDING", False),  # node 0 lives
        ({1: "SUCCEEDED"}, [False, False, True], "RUNNING", False),  # node 2 may know better
        ({1: "SUCCEEDED", 2: "LOST"}, [False, False, False], "LOST", False),
        ({1: "SUCCEEDED", 2: "LOST"}, [GONE, False, False], "LOST", True),
        ({1: "SUCCEEDED"}, [GONE, False, True], "UNKNOWN", False),
        ({1: "SUCCEEDED", 2: "SUCCEEDED"}, [GONE, False, False], "SUCCEEDED", True),
        (
            {1: "SUCCEEDED", 2: "SUCCEEDED"},
            [False, False, False],
            "SUCCEEDED",
            False,
        ),  # node 0's disk was full
        ({1: "FAILED", 2: "LOST"}, [False, False, False], "FAILED", False),
        ({1: "SUCCEEDED", 2: "FAILED"}, [False, False, False], "FAILED", False),
        ({1: "FAILED"}, [GONE, False, GONE], "FAILED", True),
        ({0: "SUCCEEDED", 1: "LOST"}, [GONE, GONE, GONE], "SUCCEEDED", False),  # node 0's own word
    ],
)
def test_words_of_members_count_where_node_0_has_none(
    tmp_path: Path, states: dict[int, str], hosts: list[Any], state: str, provisional: bool
) -> None:
    """Hosts: whether each one's agent is alive."""
    ends_of(tmp_path, states)
    record = Record(
        "x-1",
        "x",
        cluster="ssh",
        backend="ssh",
        job_dir=tmp_path,
        nodes=3,
        submitted_at="2026-01-01T00:00:00Z",
        spec={},
        handle=Handle("ssh", "x-1", data={}),
    )
    nodes = [
        status.Node(None, None, error=HostError("gpu1", "no answer"))
        if alive is GONE
        else status.Node(None, {"alive": alive, "known": True, "more": False})
        for alive in hosts
    ]
    found = status.status(record, status.Job(None, nodes))
    assert (str(found.state), found.provisional) == (state, provisional)
