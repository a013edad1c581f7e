"""Files in the job directory: ends of nodes, refusals, and requests of the submitter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import write_tree

from clusterjob.backends.slurm import status
from clusterjob.node.logs import ends
from clusterjob.node.system import files
from clusterjob.node.verdict import JobState, Verdict


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    (tmp_path / "ends").mkdir()
    return tmp_path


def test_ends_are_read_in_node_order(job_dir: Path) -> None:
    for node_rank in (10, 2, 0):
        ends.write(job_dir, node_rank, end={"state": "FAILED"})
    write_tree(
        job_dir,
        **{"ends/node3.json": "[1, 2", "ends/node4.json": '{"node_rank": 0, "state": "SUCCEEDED"}'},
    )
    assert [(end["node_rank"], end["state"]) for end in ends.written(job_dir)] == [
        (0, "FAILED"),
        (2, "FAILED"),
        (10, "FAILED"),
    ]


@pytest.mark.parametrize(
    ("text", "code", "host", "message"),
    [
        ("3\ngpu7: a setup line failed: x\n", 3, "gpu7", "a setup line failed: x"),
        (
            "0\nh: ended early",
            1,
            "h",
            "ended early",
        ),  # exit code 0 becomes 1: a refusal is a failure
        ("x\nh: y", 1, "h", "y"),
        ("7\nh: a: b: c", 7, "h", "a: b: c"),
        ("", 1, "", ""),
    ],
)
def test_refusal_file_is_read_as_failure_of_its_node(
    job_dir: Path, text: str, code: int, host: str, message: str
) -> None:
    write_tree(
        job_dir,
        **{
            "ends/node4.refused": text,
            "ends/nodex.refused": "1\nh: no node's name",
            "ends/node5.refused.part": "1\nh: not whole yet",
        },
    )
    log = job_dir / "logs" / "node4" / "agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("module: not found\n")
    (failure,) = ends.refusals(job_dir)
    assert (failure.rank, failure.node_rank, failure.exit_code, failure.host, failure.message) == (
        None,
        4,
        code,
        host,
        message,
    )
    assert failure.last_lines == ("module: not found",)


def test_long_texts_in_ends_and_refusals_are_truncated(job_dir: Path) -> None:
    ends.write(job_dir, 0, end={"state": "LOST"})
    write_tree(
        job_dir,
        **{
            "ends/node1.json": json.dumps(
                {"node_rank": 1, "state": "LOST", "reason": "x" * 1_000_000}
            ),
            "ends/node1.refused": f"1\n{'h' * 100_000}: {'x' * 100_000}",
        },
    )
    assert [len(end["reason"]) for end in ends.written(job_dir)] == [0, 4000]
    (refusal,) = ends.refusals(job_dir)
    assert (len(refusal.host), len(refusal.message)) == (4000, 4000)


def test_detach_and_cancel_requests_are_read_back(job_dir: Path) -> None:
    assert not ends.detached(job_dir)
    assert not ends.cancelled(job_dir)
    ends.detach(job_dir)
    ends.cancel(job_dir)
    assert ends.detached(job_dir)
    assert ends.cancelled(job_dir)
    assert not ends.interrupted(job_dir)
    ends.cancel(job_dir, interrupt=True)
    assert ends.interrupted(job_dir)


def test_missing_job_directory_has_no_ends_and_refuses_detach(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    ends.cancel(gone)  # as on a full disk
    ends.want_stacks(gone)
    with pytest.raises(OSError, match="gone"):
        ends.detach(gone)
    assert ends.written(gone) == ends.refusals(gone) == []


def test_ends_of_older_start_are_ignored(job_dir: Path) -> None:
    for state in ("LOST", "FAILED"):  # the last end counts
        ends.write(job_dir, 0, end={"state": state})
    ends.write(job_dir, 1, end={"state": "FAILED", "attempt": 2})
    ends.write(
        job_dir, 1, end={"state": "LOST", "attempt": 1}
    )  # from an agent of the first start that still runs
    assert [(end["node_rank"], end["state"]) for end in ends.written(job_dir)] == [(0, "FAILED")]
    assert [end["state"] for end in ends.written(job_dir, 2)] == ["FAILED"]
    assert ends.written(job_dir, 1) == []
    for name in ("node0.refused", "node0.attempt1.refused", "node1.attempt11.refused"):
        (job_dir / "ends" / name).write_text(f"1\nh: {name}")
    assert [failure.message for failure in ends.refusals(job_dir)] == ["node0.refused"]
    assert [failure.message for failure in ends.refusals(job_dir, 1)] == ["node0.attempt1.refused"]
    assert ends.refusals(job_dir, 2) == []


def test_verdict_of_older_start_is_put_aside(job_dir: Path) -> None:
    assert not ends.has_result(job_dir, 0)
    ends.put_aside_result(job_dir, 1)
    ends.write_result(job_dir, Verdict(JobState.PREEMPTED, 75, attempt=1))
    assert ends.has_result(job_dir, 0)
    assert ends.has_result(job_dir, 1)
    assert not ends.has_result(job_dir, 2)
    for attempt in (0, 1):
        ends.put_aside_result(job_dir, attempt)
        assert ends.has_result(job_dir, 1)
    ends.put_aside_result(job_dir, 2)
    assert not ends.has_result(job_dir, 0)
    assert '"PREEMPTED"' in (job_dir / "ends" / "result.attempt1.json").read_text()


def test_end_of_hundreds_of_ranks_fits_into_its_reserve_without_their_usage(job_dir: Path) -> None:
    ranks = {str(rank): [1000.0, 1 << 34, 1 << 34, 1 << 34] for rank in range(64)}
    ends.write(job_dir, 0, end={"usage": {"wall": 1.0, "ranks": ranks, "ran": {}}})
    assert len(ends.written(job_dir)[0]["usage"]["ranks"]) == 64
    ranks |= {str(rank): ranks["0"] for rank in range(1024)}
    ends.write(job_dir, 0, end={"usage": {"wall": 1.0, "ranks": ranks, "ran": {}}})
    assert (job_dir / "ends" / "node0.json").stat().st_size <= files.RESERVED
    assert ends.written(job_dir)[0]["usage"] == {"wall": 1.0, "ranks": {}, "ran": {}}


def test_newest_job_that_continues_is_read(job_dir: Path) -> None:
    assert status.next_job(job_dir) is None
    for attempt, text in ((2, "17\n"), (10, "4294901760\n")):
        (ends.directory(job_dir) / f"next.{attempt}").write_text(text)
    (ends.directory(job_dir) / "next.10.part").write_text("5\n")
    found = status.next_job(job_dir)
    assert found[0] == "4294901760"
    for text in ("--all\n", "x" * 100):  # not the script's
        (ends.directory(job_dir) / "next.11").write_text(text)
        assert status.next_job(job_dir) is None
