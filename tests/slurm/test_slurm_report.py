"""The report of Slurm jobs and arrays, on a login node."""

from __future__ import annotations

import re

import pytest
from slurm_user import User


@pytest.mark.slow
def test_report_of_jobs_and_array_under_slurm(user: User) -> None:
    # Samples begin after 5 s.
    job_id = user.submit("import time; time.sleep(9)", "--nodes", "2", "--nproc-per-node", "2")
    user("wait", job_id)
    text = user("report", job_id, "-o", "-").stdout
    assert "✓ SUCCEEDED" in text
    assert text.count('class="hit"') == 4
    assert "SLURM_NODEID" in text  # the evidence
    assert "slurm.sh, as it was rendered" in text

    # Workers that srun starts have no agent: what can be shown is shown.
    plain = user.submit("print('hello')", "--launcher", "srun")
    user("wait", plain)
    text = user("report", plain, "-o", "-").stdout
    assert "No phases are recorded" in text
    assert "hello" in text

    array = user.submit(
        "import os, sys; sys.exit(int(os.environ['SLURM_ARRAY_TASK_ID']))", "--array", "0-1"
    )
    user("wait", array, code=1)
    text = user("report", array, "-o", "-").stdout
    assert "Array of 2 elements: 1 FAILED, 1 SUCCEEDED" in text
    rows = re.findall(r'<th scope="row">([^<]+)</th><td>([^<]*)</td><td>(. \w+)</td>', text)
    assert rows == [(f"{array}_1", "", "✕ FAILED"), (f"{array}_0", "", "✓ SUCCEEDED")]
    assert "Wall time" in text
    assert "✕ FAILED" in user("report", f"{array}_1", "-o", "-").stdout
