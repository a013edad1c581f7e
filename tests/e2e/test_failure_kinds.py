"""Every injected fault is classified and blamed correctly."""

from __future__ import annotations

import json
from pathlib import Path

from commands import command
from verdicts import wait_for_verdict

from clusterjob.core.records import Records
from clusterjob.node.verdict import FailureKind

TEST_TIMEOUT = 400.0  # seconds; 20 rounds need 40
# It runs on two nodes with one worker each. --retry starts the next round after each fault, so one
# job shows all faults in its ``attempts``.
SCRIPT = Path(__file__).parent.parent / "support" / "faulty_train.py"
# The faults in the order of the rounds: name, kind, and the rank to blame; None for either rank.
FAULTS: tuple[tuple[str, str, int | None], ...] = (
    ("exception", "code", 1),
    ("handled_errors", "code", 1),
    ("own_excepthook", "code", 1),
    ("syntax", "code", 1),
    ("missing_module", "import", 1),
    ("arguments", "exit_code", 1),
    ("host_memory", "oom_host", 1),
    ("tensor_memory", "oom_host", 1),
    ("device_memory", "oom_device", 1),
    ("device", "device", 1),
    ("device_abort", "device", 1),
    ("full_disk", "disk", 1),
    ("network", "network", None),
    ("missing_rank", "rendezvous", 1),
    ("missing_rank_of_torch", "rendezvous", None),
    ("early_exit", "early_exit", 1),
    ("terminated", "terminated", 1),
    ("segmentation", "signal", 1),
    ("killed", "signal", 1),
    ("exit_code", "exit_code", 1),
    ("hang", "hang", 1),
    ("lost_agent", "node_lost", None),  # of node 1; it ends the job, for no other node is left
)


OPTIONS = ("--nodes", "2", "--nproc-per-node", "1", "--hang-timeout", "6s")
RETRIES = [word for kind in FailureKind for word in ("--retry", f"{kind}:9")]
TRAIN = (*OPTIONS, *RETRIES, str(SCRIPT), ",".join(name for name, _, _ in FAULTS))


def test_faults_are_classified(tmp_path: Path) -> None:
    words = ("submit", "--cluster", "local", "--no-snapshot", *TRAIN)
    job_id = command(tmp_path, *words).stdout.strip()
    assert wait_for_verdict(Records().find(job_id), TEST_TIMEOUT).exit_code == 1
    [job] = json.loads(command(tmp_path, "status", "--json", job_id).stdout)["jobs"]
    wrong = []
    for number, (name, kind, rank) in enumerate(FAULTS):
        each = job["attempts"][number] if number < len(job["attempts"]) else {}
        blamed = rank is None or (each.get("rank"), each.get("node")) == (rank, rank)
        if each.get("kind") != kind or not blamed:
            wrong.append(f"{name}: {each}")
    assert not wrong, "\n".join(wrong)
    assert [each["restart"] for each in job["attempts"]] == list(range(len(FAULTS)))
    assert (job["failure"]["kind"], job["failure"]["node_rank"]) == ("node_lost", 1)
