"""A host that claims the end of a job does not override node 0 or running nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterjob.backends.ssh import status
from clusterjob.core.records import Handle, Record
from clusterjob.errors import HostError


def write_end_files(job_dir: Path, states: dict[int, str]) -> None:
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


UNREACHABLE = "gone"  # an unreachable host


@pytest.mark.parametrize(
    ("states", "hosts", "state", "provisional"),
    [
        ({1: "SUCCEEDED"}, [True, False, False], "PENDING", False),  # node 0 runs
        ({1: "SUCCEEDED"}, [False, False, True], "RUNNING", False),  # node 2 runs
        ({1: "SUCCEEDED", 2: "LOST"}, [False, False, False], "LOST", False),
        ({1: "SUCCEEDED", 2: "LOST"}, [UNREACHABLE, False, False], "LOST", True),
        ({1: "SUCCEEDED"}, [UNREACHABLE, False, True], "UNKNOWN", False),
        ({1: "SUCCEEDED", 2: "SUCCEEDED"}, [UNREACHABLE, False, False], "SUCCEEDED", True),
        (
            {1: "SUCCEEDED", 2: "SUCCEEDED"},
            [False, False, False],
            "SUCCEEDED",
            False,
        ),  # node 0's disk was full
        ({1: "FAILED", 2: "LOST"}, [False, False, False], "FAILED", False),
        ({1: "SUCCEEDED", 2: "FAILED"}, [False, False, False], "FAILED", False),
        ({1: "FAILED"}, [UNREACHABLE, False, UNREACHABLE], "FAILED", True),
        (
            {0: "SUCCEEDED", 1: "LOST"},
            [UNREACHABLE, UNREACHABLE, UNREACHABLE],
            "SUCCEEDED",
            False,
        ),  # reported by node 0
    ],
)
def test_end_files_of_other_nodes_decide_status_when_node_0_has_none(
    tmp_path: Path, states: dict[int, str], hosts: list[Any], state: str, provisional: bool
) -> None:
    """Each case lists the nodes' end files, whether each agent is alive, and the status."""
    write_end_files(tmp_path, states)
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
        if alive is UNREACHABLE
        else status.Node(None, {"alive": alive, "known": True, "more": False})
        for alive in hosts
    ]
    found = status.status(record, status.Job(None, nodes))
    assert (str(found.state), found.provisional) == (state, provisional)
