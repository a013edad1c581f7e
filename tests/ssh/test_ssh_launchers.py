"""`--launcher ray` and the Hydra launcher on hosts over SSH, with real sshd."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra_app import write_app
from procs import TEST_TIMEOUT
from sshsite import Site

import clusterjob
from clusterjob import Job
from clusterjob.core.records import Records

SOURCE = Path(clusterjob.__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.mark.skipif(
    importlib.util.find_spec("hydra") is None, reason="Hydra is missing: pip install hydra-core"
)
def test_hydra_sweep_over_ssh_runs_two_node_jobs(site: Site) -> None:
    write_app(site.directory)
    options = ",".join(site.flags()["set"]).replace("=", ":")
    done = subprocess.run(
        [
            sys.executable, "app.py", "-m", "hydra/launcher=clusterjob", "hydra/sweeper=mine",
            "hydra.launcher.cluster=ssh", "hydra.launcher.hosts='gpu1,gpu2'",
            "hydra.launcher.nodes=2", f"hydra.launcher.python={sys.executable}",
            f"hydra.launcher.set={{{options}}}",
        ],
        cwd=site.directory, capture_output=True, text=True, timeout=2 * TEST_TIMEOUT, check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "values [10, 30]" in done.stdout
    records = Records().all()
    assert len(records) == 2
    for number, record in enumerate(records):
        lines = Job.get(record.job_id).logs().splitlines()
        rate = 2 * number + 1
        for rank in (0, 1):
            assert f"[{rank}] rank {rank} {rate} mysql plain {number}" in lines
