"""Queries of Slurm's queue: one squeue call for all jobs, at most one every 5 s.

A process that stops during its query does not block the others.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from slurm_cluster import SlurmCluster
from slurm_user import GUEST, SLEEPER, User

from clusterjob.backends.slurm import queue
from clusterjob.backends.slurm.client import Client
from clusterjob.backends.slurm.queue import INTERVAL, Queue
from clusterjob.backends.slurm.squeue import JobRow, QueueSnapshot, rows_of, split
from clusterjob.node.system import files

# -- parsing of squeue output --------------------------------------------------------------------


def test_squeue_output_is_parsed_into_rows() -> None:
    """squeue prints a mark after each field and a line break after each row.

    A name or a comment may contain any other text.
    """
    printed = [
        (
            "7",
            "N/A",
            "7",
            "RUNNING",
            "None",
            "0",
            "1795325346",
            "a",
            "/h/jobs/a-222222",
            "clusterjob:a-222222",
            "1-00:02:03",
            "n[1-2]",
        ),
        (
            "8",
            "3",
            "11",
            "PENDING",
            "JobHeldUser",
            "N/A",
            "1795325346",
            "b|\n9",
            "/h/jobs/b-222222",
            "clusterjob:b-222222 my own | words|",
            "0:00",
            "",
        ),
        (
            "8",
            "N/A",
            "8",
            "PENDING",
            "Resources",
            "N/A",
            "?",
            "",
            "/h/jobs/c-222222",
            "(null)",
            "INVALID",
            "",
        ),
    ]
    text = (
        "".join("".join(f"{field}<mark>" for field in row) + "\n" for row in printed)
        + "9<mark>N/A<mark>cut"
    )
    snapshot = QueueSnapshot.from_json({"rows": split(text, "<mark>")})
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(0))
    assert snapshot.rows == {
        "7": JobRow(
            "7",
            "RUNNING",
            reason="",
            start=start,
            comment="clusterjob:a-222222",
            name="a",
            directory="/h/jobs/a-222222",
            submitted=1795325346.0,
            ran=86523.0,
            nodes="n[1-2]",
        ),
        "8_3": JobRow(
            "8_3",
            "PENDING",
            reason="JobHeldUser",
            start="",
            comment="clusterjob:b-222222 my own | words|",
            name="b|\n9",
            directory="/h/jobs/b-222222",
            submitted=1795325346.0,
            ran=0.0,
        ),
        "8": JobRow(
            "8",
            "PENDING",
            reason="Resources",
            start="",
            comment="(null)",
            name="",
            directory="/h/jobs/c-222222",
            submitted=0.0,
        ),
    }
    assert [row.key for row in rows_of(snapshot, "b-222222")] == ["8_3"]
    assert [row.key for row in rows_of(snapshot, "c-222222")] == ["8"]  # its comment was changed
    assert rows_of(snapshot, "a-22222") == rows_of(snapshot, "-222222") == []
    assert snapshot.rows["8_3"].base == "8"
    assert snapshot.rows["8_3"].waiting
    assert snapshot.rows["7"].active
    assert not snapshot.rows["7"].waiting


# -- shared snapshot -----------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stop the clock of queues, so that slow commands of Slurm do not advance it; set its `now`."""
    stopped = SimpleNamespace(now=time.time())
    changed = vars(time) | {"time": lambda: stopped.now}
    monkeypatch.setattr(queue, "time", SimpleNamespace(**changed))
    return stopped


def test_query_interval_grows_while_nothing_changes_and_resets_after_change(
    slurm: SlurmCluster, tmp_path: Path, clock: SimpleNamespace
) -> None:
    asking = Queue(Client(), tmp_path)

    def asked(after: float = 0.0) -> bool:
        """Poll so many seconds later; return whether Slurm was asked."""
        clock.now += after
        asking.poll()
        while asking._asking is not None:
            asking.poll()
        [path] = tmp_path.glob("queue-*.json")
        return (files.read_json(path) or {})["asked_at"] == clock.now

    assert asked()
    pauses = []
    for _ in range(8):
        begin = clock.now
        clock.now += 0.5
        while not asked(0.5):
            pass
        pauses.append(clock.now - begin)
    assert pauses[0] == INTERVAL
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30
    slurm.submit("--hold", "--output=/dev/null", script="true")
    assert asked(31)
    assert asked(INTERVAL + 1)
    assert not asked(INTERVAL + 1), "one query showed no changes"


@pytest.mark.usefixtures("clock")
def test_next_process_reads_recent_snapshot_without_query(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    job = slurm.submit("--hold", "--output=/dev/null", "--comment=clusterjob:x", script="true")
    assert Queue(Client(), tmp_path).poll().rows[str(job)].comment == "clusterjob:x"
    slurm.stop_controller()
    begin = time.monotonic()
    assert str(job) in Queue(Client(), tmp_path).poll().rows  # still recent: no query
    assert time.monotonic() - begin < 2


def test_broken_snapshot_file_is_replaced(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = slurm.submit("--hold", "--output=/dev/null", script="true")
    Queue(Client(), tmp_path).poll()
    [path] = tmp_path.glob("queue-*.json")
    for text in (
        "",
        "[]",
        '{"rows": 3}',
        '{"rows": [["1"]], "asked_at": 0}',
        '{"asked_at": 99999999999, "taken_at": 99999999999}',
    ):
        path.write_text(text)
        assert str(job) in Queue(Client(), tmp_path).poll().rows, text


def test_name_and_comment_of_other_job_cannot_forge_rows(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    forged = "|".join(
        [
            "x\n999999",
            "N/A",
            "999999",
            "COMPLETED",
            "None",
            "N/A",
            "0",
            "x",
            "/jobs/mine",
            "clusterjob:mine",
            "0:00",
            "",
            "\n",
        ]
    )
    job = slurm.submit(
        "--hold",
        "--output=/dev/null",
        f"--job-name={forged}",
        "--comment=\udcff | \udcfe",
        script="true",
    )
    rows = Queue(Client(), tmp_path).poll().rows
    assert str(job) in rows
    assert "999999" not in rows
    assert rows_of(Queue(Client(), tmp_path).poll(), "mine") == []
    assert Queue(Client(), tmp_path).poll().rows == rows


def test_running_job_shows_slurm_id_nodes_and_time(user: User) -> None:
    job_id = user.submit(GUEST, "--nodes", "2", "--name", "a b", until=("up0", "up1"))
    user.force_new_query()
    now, number = user.wait_for_state(job_id, "RUNNING"), user.slurm_id(job_id)
    hosts = user.slurm.job(number)["NodeList"]
    assert (now["hosts"], now["backend_id"]) == (hosts, number)
    assert now["seconds"] is not None
    for command in ("status", "list"):
        assert f"job {number} on {hosts}" in user(command).stdout
    row = user("list", "--columns", "backend_id,hosts,restarts,id").stdout.splitlines()[1]
    assert row.split() == [number, hosts, "0", job_id]


# -- commands ------------------------------------------------------------------------------------


def test_variables_of_user_are_ignored_and_hidden_partitions_shown(user: User) -> None:
    notes = user.command_first_on_path("squeue", 'echo "$@" >> "$NOTES"\nexec "$REAL" "$@"\n')
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    defaults = {
        "SQUEUE_PARTITION": "small",
        "SQUEUE_STATES": "RUNNING",
        "SQUEUE_FORMAT2": "jobid",
        "SQUEUE_USERS": "nobody",
        "SCANCEL_PARTITION": "small",
        "SCANCEL_STATE": "RUNNING",
        "SCANCEL_NAME": "x",
    }
    for name, value in defaults.items():
        user.patch.setenv(name, value)
    assert "JobHeldUser" in user.job(job_id)["reason"]
    assert all("--all" in line.split() for line in notes.read_text().splitlines())
    user("cancel", job_id)
    assert user.slurm_job(job_id)["JobState"] == "CANCELLED"


def test_sbatch_variables_of_user_are_ignored_except_partition(user: User) -> None:
    for name, value in {
        "ARRAY_INX": "0-1",
        "WAIT": "1",
        "ERROR": "/dev/null",
        "JOB_NAME": "x",
        "EXPORT": "NONE",
        "REQUEUE": "1",
    }.items():
        user.patch.setenv(f"SBATCH_{name}", value)
    user.patch.setenv("SBATCH_PARTITION", "small")  # this variable is respected
    job_id = user.submit(SLEEPER, "--set", "hold=true")
    job = user.slurm_job(job_id)
    assert (job["JobName"], job["Partition"], job["Requeue"], "ArrayJobId" in job) == (
        job_id,
        "small",
        "0",
        False,
    )
