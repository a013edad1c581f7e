"""The Slurm cluster of the tests: four nodes with eight GPUs each, and its recovery."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from procs import MARKER, alive, marked, wait_until
from slurm_cluster import SlurmCluster


def test_four_nodes_are_idle_and_have_eight_gpus_each(slurm_cluster: SlurmCluster) -> None:
    nodes = slurm_cluster.run(
        "sinfo", "--Node", "--noheader", "--partition=main", "--format=%N %T %c %G"
    ).stdout.splitlines()
    assert nodes == [f"n{number} idle 8 gpu:a100:8" for number in (1, 2, 3, 4)]
    step = slurm_cluster.run(
        "srun",
        "--nodes=2",
        "--gres=gpu:8",
        "sh",
        "-c",
        "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES",
    )
    assert sorted(step.stdout.splitlines()) == [f"n{number} 0,1,2,3,4,5,6,7" for number in (1, 2)]


def test_ended_job_is_in_slurmctld_and_with_accounting_in_sacct(
    slurm_cluster: SlurmCluster,
) -> None:
    job = slurm_cluster.submit("--output=/dev/null", script="exit 3")
    assert slurm_cluster.wait_for_job(job)["JobState"] == "FAILED"

    def sacct() -> subprocess.CompletedProcess[str]:
        return slurm_cluster.run(
            "sacct",
            "--parsable2",
            "--noheader",
            "--allocations",
            f"--jobs={job}",
            "--format=State,ExitCode",
            check=False,
        )

    if slurm_cluster.accounting:
        wait_until(lambda: sacct().stdout == "FAILED|3:0\n", 30, "the end of the job in sacct")
    else:
        assert sacct().returncode == 1
        assert "accounting storage is disabled" in sacct().stderr


def test_processes_of_job_carry_marker_of_test_and_end_with_job(
    slurm: SlurmCluster,
) -> None:
    job = slurm.submit("--nodes=2", "--output=/dev/null", script="srun sleep 600")
    # srun and its helper process, the batch script and its child, and one sleep per node
    wait_until(lambda: len(marked(os.environ[MARKER])) >= 4, 30, "the processes of the job")
    # one for the batch script, and one for the step on each node
    wait_until(lambda: len(slurm.stepd_pids()) == 3, 30, "Slurm's own process for each of them")
    slurm.run("scancel", str(job))
    assert slurm.wait_for_job(job)["JobState"] == "CANCELLED"
    slurm.wait_idle()
    # srun ends by itself; slurmstepd waits only for the batch script
    wait_until(lambda: not marked(os.environ[MARKER]), 30, "the end of the job's processes")


@pytest.mark.slow
def test_killed_and_frozen_daemons_run_again_after_restore(slurm: SlurmCluster) -> None:
    job = slurm.submit("--nodes=4", "--output=/dev/null", script="sleep 600")
    slurm.wait_for_job(job, "RUNNING")
    slurm.kill_node(3)
    slurm.stop_controller()
    assert slurm.run("scontrol", "ping", check=False).returncode != 0
    slurm.start_controller()
    assert slurm.job(job)["JobState"] == "RUNNING"
    slurm.freeze_controller()
    with pytest.raises(subprocess.TimeoutExpired):
        slurm.run("squeue", timeout=0.5)
    slurm.restore()
    assert slurm.job(job)["JobState"] == "CANCELLED"
    slurm.stop_controller(signal.SIGKILL)
    slurm.restore()
    assert slurm.run("srun", "--nodelist=n3", "echo", "back").stdout == "back\n"


def test_changed_setting_holds_only_inside_context(slurm: SlurmCluster) -> None:
    too_large = ("sbatch", "--array=0-7", "--output=/dev/null", "--wrap=true")
    with slurm.configured(MaxArraySize=4):
        refused = slurm.run(*too_large, check=False)
        assert (refused.returncode, "Invalid job array" in refused.stderr) == (1, True)
    slurm.run(*too_large)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_cluster_ends_with_process_that_started_it(how: signal.Signals, tmp_path: Path) -> None:
    """A second cluster runs at the same time: each has its own ports."""
    directory = tmp_path / "c"
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "support" / "slurm_cluster.py"),
        "--dir",
        str(directory),
    ]
    # a parent that can be killed; its child then reads the end of its standard input
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE).wait()",
            *command,
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        exported = parent.stdout.readline()
        assert exported == f"export SLURM_CONF={directory}/etc/slurm.conf\n"
        cluster = SlurmCluster.attached(directory)
        assert cluster.run("srun", "--nodes=4", "echo", "here").stdout == "here\n" * 4
        running = cluster.processes()
        assert len(running) >= 6
        parent.send_signal(how)
        wait_until(
            lambda: not any(alive(pid) for pid in running) and not directory.exists(),
            30,
            "the end of the cluster",
        )
