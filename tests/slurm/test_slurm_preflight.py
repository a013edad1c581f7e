"""Jobs that Slurm would refuse are refused before submission, with its error and a hint.

The same holds where Slurm is missing.
"""

from __future__ import annotations

import pytest
from slurm_user import SLEEPER, User


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (
            ("--partition", "nowhere"),
            "invalid partition specified: nowhere",
            "`sinfo -s` lists the partitions",
        ),
        (("--nodes", "5"), "Requested node configuration is not available", "`sinfo"),
        (("--gpus-per-node", "9"), "Requested node configuration is not available", "`sinfo"),
        (("--nproc-per-node", "9"), "Requested node configuration is not available", "`sinfo"),
        (("--mem", "100G"), "Requested node configuration is not available", "`sinfo"),
        (("--set", "constraint=h100"), "Invalid feature specification", "--set constraint=NAME"),
        (("--set", "gres=tpu:1"), "Invalid generic resource", "shows the GPUs of each partition"),
        (("--nodelist", "n9"), "Invalid node name", "`sinfo -N` lists the nodes"),
        (("--set", "begin=sometime"), "Invalid time specification", ""),
        (
            ("--set", "of-no-plugin=x"),
            "unrecognized option '--of-no-plugin=x'",
            "`sbatch --help` lists",
        ),
        (("--array", "0-3", "--partition", "nowhere"), "invalid partition", "`sinfo -s`"),
    ],
)
def test_refusal_shows_slurm_error_and_hint(
    user: User, options: tuple[str, ...], error: str, hint: str
) -> None:
    message = user.refused(*options)
    first, *rest = message.splitlines()[-2:] if hint else message.splitlines()[-1:]
    assert first.startswith("clusterjob: error: Slurm refuses the job: ")
    assert error in first
    if hint:
        assert rest[0].startswith("  hint: ")
        assert hint in rest[0]


def test_time_limit_above_limit_of_partition_is_refused(user: User) -> None:
    """Slurm would accept the job and never start it."""
    message = user.refused("--partition", "small", "--time", "61m")
    assert (
        "the time limit of 0-01:01:00 is above that of the partition small: 0-01:00:00" in message
    )
    assert "--qos NAME" in message
    for options in (
        ("--partition", "small", "--time", "60m"),
        ("--partition", "small,main", "--time", "2h"),
        ("--time", "9000h"),
    ):
        user.submit(SLEEPER, *options, "--set", "hold=true")


def test_job_for_unavailable_nodes_is_accepted_but_for_missing_nodes_refused(user: User) -> None:
    """The nodes are busy, drained or down."""
    busy = user.slurm.submit("--nodes=4", "--exclusive", "--output=/dev/null", script="sleep 600")
    waiting = [user.submit(SLEEPER, "--nodes", "4")]
    assert user.job(waiting[0])["state"] == "PENDING"
    user.slurm.run("scancel", str(busy), user.slurm_id(waiting.pop()))
    # otherwise a node that is DOWN returns to service when its slurmd registers
    with user.slurm.configured(ReturnToService=0):
        for state in ("DRAIN", "DOWN"):
            user.slurm.run("scontrol", "update", "NodeName=n[2-4]", f"State={state}", "Reason=test")
            assert "node configuration is not available" in user.refused("--nodes", "5")
            waiting.append(user.submit(SLEEPER, "--nodes", "3", "--nodelist", "n[2-4]"))
        assert {job["state"] for job in user.jobs(*waiting)} == {"PENDING"}
        user("cancel", *waiting)
        user.slurm.run("scontrol", "update", "NodeName=n[2-4]", "State=RESUME", check=False)


def test_time_limit_is_left_to_slurm_if_template_or_variable_sets_partition(user: User) -> None:
    """The default partition allows 30 minutes, the partition ``small`` an hour.

    A #SBATCH line of a template or SBATCH_PARTITION chooses ``small``.
    """
    user.slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=30")
    try:
        for options in ((), ("--partition", "main")):
            assert "above that of the partition main: 0-00:30:00" in user.refused(
                "--time", "45m", *options
            )
        template = user.path("own.sh.j2")
        template.write_text('#!/bin/bash\n#SBATCH --partition=small\n{% include "slurm.sh.j2" %}\n')
        routed = [
            user.submit(SLEEPER, "--time", "45m", "--set", "hold=true", "--template", template.name)
        ]
        user.patch.setenv("SBATCH_PARTITION", "small")
        routed.append(user.submit(SLEEPER, "--time", "45m", "--set", "hold=true"))
        assert [user.slurm_job(job_id)["Partition"] for job_id in routed] == ["small", "small"]
    finally:
        user.slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")
