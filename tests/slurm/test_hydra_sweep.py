"""A Hydra sweep on a real Slurm: one array, which does not need the application any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from docs_commands import SESSIONS
from hydra_app import write_app
from launching import ROOT
from procs import TEST_TIMEOUT
from slurm_user import User

from clusterjob import JobGroup

COUNT = (
    'case "$*" in *--test-only*) ;; *) printf "%s\\n" "$*" >> "$NOTES" ;; esac\nexec "$REAL" "$@"\n'
)


def sweep(user: User, *overrides: str) -> tuple[str, float]:
    """Run the sweep in a session of its own, and end the session as a logout does."""
    write_app(user.directory)
    begin = time.monotonic()
    process = subprocess.Popen(
        [
            sys.executable, "app.py", "--multirun", *overrides,
            f"hydra.launcher.python={sys.executable}",
        ],
        cwd=user.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    out, _ = process.communicate(timeout=TEST_TIMEOUT)
    seconds = time.monotonic() - begin
    assert process.returncode == 0, out
    try:
        os.killpg(process.pid, signal.SIGHUP)
    except ProcessLookupError:
        pass  # nothing of it runs
    return out, seconds


def test_sweep_of_100_two_node_jobs_is_one_submission(user: User) -> None:
    notes = user.command_first_on_path("sbatch", COUNT)
    rates = ",".join(map(str, range(100)))
    launcher = ("hydra/launcher=clusterjob", "hydra.launcher.cluster=slurm")
    more = ("hydra.launcher.nodes=2", "hydra.launcher.set={begin:now+1hour}")
    out, seconds = sweep(user, *launcher, *more, f"lr={rates}")
    assert len(notes.read_text().splitlines()) == 1
    assert "--array=0-99" in notes.read_text()
    group = JobGroup.get("app")
    assert len(group) == 100
    array_id = group[0].id.rpartition("_")[0]
    assert f"100 jobs: `clusterjob status {array_id}`" in out
    assert seconds < 12, "it needs 1 s on a quiet machine; Hydra's own check of 100 jobs 3 s more"
    assert group.cancel() == 100


@pytest.mark.slow
def test_jobs_of_sweep_of_scripts_page_run_on_two_nodes_after_logout(user: User) -> None:
    [session] = [each for each in SESSIONS if "test_hydra_sweep" in each.runner]
    [shown] = session.commands
    assert shown.startswith("python app.py --multirun ")
    overrides = shown.split()[3:]
    sweep(user, *overrides, "hydra.sweep.dir=runs", "hydra.launcher.max_running=1")
    group = JobGroup.get("app")
    assert [verdict.exit_code for verdict in group.wait(timeout=120)] == [0, 0]
    for number, (job, rate) in enumerate(zip(group, (0.1, 0.01), strict=True)):
        for rank in (0, 1):
            text = (user.directory / "runs" / str(number) / f"rank{rank}.txt").read_text()
            assert text == f"{number} {2 * rate} {job.id}"
        assert f"[1] rank 1 {rate} mysql plain {number}" in job.logs().splitlines()
