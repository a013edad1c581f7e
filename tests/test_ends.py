"""How nodes ended, and what the submitting side wishes, as files of the job's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterjob.node import ends


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    (tmp_path / "ends").mkdir()
    return tmp_path


def test_ends_come_back_in_the_order_of_their_nodes(job_dir: Path) -> None:
    for node_rank in (10, 2, 0):
        ends.write(job_dir, node_rank, {"state": "FAILED"})
    (job_dir / "ends" / "node3.json").write_text("[1, 2")
    assert [end["node_rank"] for end in ends.written(job_dir)] == [0, 2, 10]


@pytest.mark.parametrize(
    ("text", "code", "host", "why"),
    [
        ("3\ngpu7: a setup line failed: x\n", 3, "gpu7", "a setup line failed: x"),
        ("0\nh: ended early", 1, "h", "ended early"),  # a refusal is never a success
        ("x\nh: y", 1, "h", "y"),
        ("7\nh: a: b: c", 7, "h", "a: b: c"),
        ("", 1, "", ""),
    ],
)
def test_a_refusal_is_a_failure_of_its_node(job_dir: Path, text: str, code: int, host: str, why: str) -> None:
    (job_dir / "ends" / "node4.refused").write_text(text)
    (job_dir / "ends" / "nodex.refused").write_text("1\nh: no node's name")
    (job_dir / "ends" / "node5.refused.part").write_text("1\nh: not whole yet")
    log = job_dir / "logs" / "node4" / "agent.log"
    log.parent.mkdir(parents=True)
    log.write_text("module: not found\n")
    (failure,) = ends.refusals(job_dir)
    assert (failure.rank, failure.node_rank, failure.exit_code, failure.host, failure.message) == (None, 4, code, host, why)
    assert failure.last_lines == ("module: not found",)


def test_wishes_are_there_once_they_were_made(job_dir: Path) -> None:
    assert not ends.detached(job_dir)
    assert not ends.cancelled(job_dir)
    ends.detach(job_dir)
    ends.cancel(job_dir)
    assert ends.detached(job_dir)
    assert ends.cancelled(job_dir)


def test_a_directory_that_is_gone_takes_no_wish_and_has_no_ends(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    ends.cancel(gone)
    with pytest.raises(OSError, match="gone"):
        ends.detach(gone)
    assert ends.written(gone) == ends.refusals(gone) == []
