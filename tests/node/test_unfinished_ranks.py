"""Ranks that still run after all others have succeeded are reported, with their stack."""

from __future__ import annotations

import pytest
from procs import TEST_TIMEOUT, MakeJob, wait_until


@pytest.mark.slow
def test_rank_that_hangs_after_others_ended_is_reported_with_stack(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.script("""
        import os, pathlib, threading
        def hang():
            while not pathlib.Path("enough").exists():
                threading.Event().wait(0.2)
        if os.environ["RANK"] == "3":
            hang()
    """)
    job.start_all("--nproc-per-node", "2", script)
    log = job.dir / "logs" / "node1" / "rank3.err"
    wait_until(lambda: log.exists() and "still runs" in log.read_text(), TEST_TIMEOUT + 15)
    job.path("enough").touch()
    assert job.wait() == [0, 0]
    line, *stack = log.read_text().splitlines()
    assert line.startswith("clusterjob: rank 3 still runs; ranks 0-2 ended 10 s ago; it ")
    assert any("  hang (" in each for each in stack)
    assert log.read_text().count("still runs") == 1
