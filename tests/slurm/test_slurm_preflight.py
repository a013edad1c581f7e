"""What Slurm would refuse is refused before anything is queued, in Slurm's own words and with a
hint; and where there is no Slurm.
"""

from __future__ import annotations

import getpass

import pytest
from slurm_user import SLEEPER, User


@pytest.mark.parametrize(
    ("options", "words", "hint"),
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
def test_slurm_s_own_words_and_a_hint(
    user: User, options: tuple[str, ...], words: str, hint: str
) -> None:
    said = user.refused(*options)
    first, *rest = said.splitlines()[-2:] if hint else said.splitlines()[-1:]
    assert first.startswith("clusterjob: error: Slurm refuses the job: ")
    assert words in first
    if hint:
        assert rest[0].startswith("  hint: ")
        assert hint in rest[0]


def test_a_time_limit_above_the_partition_s(user: User) -> None:
    """Slurm would take the job and never start it."""
    said = user.refused("--partition", "small", "--time", "61m")
    assert "the time limit of 0-01:01:00 is above that of the partition small: 0-01:00:00" in said
    assert "--set qos=NAME" in said
    for options in (
        ("--partition", "small", "--time", "60m"),
        ("--partition", "small,main", "--time", "2h"),
        ("--time", "9000h"),
    ):
        user.submit(SLEEPER, *options, "--set", "hold=true")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "partion=main"), "sbatch has no option --partion"),
        (("--set", "nodes=2"), "does not go through to sbatch"),
        (("--signal-before", "90s", "--time", "2m"), "leaves no room for a warning"),
        (("--set", "comment=a\tb"), "holds a line break"),
        (("--array", "3-1"), "is an empty range"),
        (("--container", "pyxis:"), "names no image"),
    ],
)
def test_what_makes_no_sense_is_said_without_asking_slurm(
    user: User, options: tuple[str, ...], words: str
) -> None:
    notes = user.command_first_on_path("sbatch", 'echo >> "$NOTES"\nexec "$REAL" "$@"\n')
    assert words in user.refused(*options, code=2)
    assert notes.read_text() == ""


def test_a_job_whose_nodes_are_busy_is_taken(user: User) -> None:
    user.slurm.submit("--nodes=4", "--exclusive", "--output=/dev/null", script="sleep 600")
    waiting = user.submit(SLEEPER, "--nodes", "4")
    assert user.job(waiting)["state"] == "PENDING"
    user("cancel", waiting)


@pytest.mark.parametrize("state", ["DRAIN", "DOWN"])
def test_a_job_whose_nodes_are_away_just_now_is_taken_and_one_without_nodes_is_not(
    user: User, state: str
) -> None:
    with user.slurm.configured(
        ReturnToService=0
    ):  # else a node that is DOWN comes back when its slurmd registers
        user.slurm.run("scontrol", "update", "NodeName=n[2-4]", f"State={state}", "Reason=test")
        assert "node configuration is not available" in user.refused("--nodes", "5")
        named = user.submit(SLEEPER, "--nodes", "3", "--nodelist", "n[2-4]")
        assert user.job(named)["state"] == "PENDING"
        many = user.submit(SLEEPER, "--nodes", "2")
        assert user.job(many)["state"] == "PENDING"
        user("cancel", named, many)
        user.slurm.run("scontrol", "update", "NodeName=n[2-4]", "State=RESUME", check=False)


@pytest.mark.slow
def test_no_configuration_no_controller_and_no_slurm(user: User) -> None:
    user.slurm.stop_controller()
    said = user.refused_by_nobody()
    assert "Slurm does not answer: Unable to contact slurm controller" in said
    assert "`scontrol ping`" in said
    user.slurm.start_controller()

    user.patch.setenv("SLURM_CONF", str(user.path("nowhere.conf")))
    said = user.refused_by_nobody()
    assert "nowhere.conf" in said
    assert "SLURM_CONF names one" in said

    user.patch.setenv("SLURM_CONF", str(user.slurm.conf))
    with pytest.MonkeyPatch.context() as patch:  # the fixtures need the real one again
        patch.setenv("PATH", "/nowhere")
        said = user.refused_by_nobody()
    assert "sbatch cannot be run: No such file or directory" in said
    assert "on PATH" in said


def test_time_limit_of_a_partition_that_others_have_chosen_is_slurm_s_to_judge(user: User) -> None:
    """The default partition allows 30 minutes; SBATCH_PARTITION, a template's #SBATCH line or a
    plug-in choose the one with an hour.
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


@pytest.mark.slow
def test_time_limit_of_a_partition_that_a_plug_in_chooses_is_slurm_s_to_judge(user: User) -> None:
    script = user.slurm.conf.parent / "job_submit.lua"
    script.write_text(
        "function slurm_job_submit(job, parts, uid)\n  job.partition = 'small'\n  return slurm.SUCCESS\nend\n"
        "function slurm_job_modify(job, record, parts, uid)\n  return slurm.SUCCESS\nend\nreturn slurm.SUCCESS\n"
    )
    with user.slurm.configured(JobSubmitPlugins="lua"):
        user.slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=30")
        job_id = user.submit(SLEEPER, "--time", "45m", "--set", "hold=true")
        assert user.slurm_job(job_id)["Partition"] == "small"
        user.slurm.run("scontrol", "update", "PartitionName=main", "MaxTime=INFINITE")


@pytest.mark.slow
def test_time_limit_that_a_quality_of_service_may_exceed_is_slurm_s_to_judge(
    user_accounted: User,
) -> None:
    """The user's default one, and the one that SBATCH_QOS names."""
    user, name = user_accounted, getpass.getuser()
    too_long = ("--partition", "small", "--time", "61m", "--set", "hold=true")
    for words in (
        ("add", "account", "site"), ("add", "user", name, "account=site"),
        ("add", "qos", "long", "flags=PartitionTimeLimit"),
        ("modify", "user", name, "set", "qos=normal,long"),
    ):  # fmt: skip
        user.slurm.run("sacctmgr", "--immediate", *words)
    with user.slurm.configured(AccountingStorageEnforce="associations,limits,qos"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SBATCH_QOS", "long")
            user.submit(SLEEPER, *too_long)
        user.slurm.run("sacctmgr", "--immediate", "modify", "user", name, "set", "defaultqos=long")
        job_id = user.submit(SLEEPER, *too_long)
        assert (user.slurm_job(job_id)["QOS"], user.slurm_job(job_id)["Reason"]) == (
            "long",
            "JobHeldUser",
        )


def test_nodes_that_are_away_in_a_partition_that_others_have_chosen(user: User) -> None:
    user.slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    user.patch.setenv("SBATCH_PARTITION", "small")
    job_id = user.submit(SLEEPER)
    assert user.job(job_id)["state"] == "PENDING"
    user.slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME", check=False)
