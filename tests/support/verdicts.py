"""Wait for the verdicts of jobs, on any backend."""

from __future__ import annotations

from procs import TEST_TIMEOUT, wait_until

from clusterjob.core import polling
from clusterjob.core.records import Record
from clusterjob.node.verdict import Verdict


def wait_for_verdict(record: Record, timeout: float = TEST_TIMEOUT) -> Verdict:
    """Wait for the verdict of a job and return it; fail the test at the timeout."""
    verdict = wait_until(
        lambda: polling.status(record).verdict, timeout, f"the end of {record.job_id}"
    )
    assert verdict is not None
    return verdict
