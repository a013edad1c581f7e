"""`clusterjob doctor` with a real Slurm, from a login node and from a laptop."""

from __future__ import annotations

import re

import pytest
from doctoring import Diagnosis
from login_user import Laptop
from slurm_user import User

from clusterjob.backends.slurm.checks import partitions_of

CHECKS = [
    "directory",
    "disk",
    "commands",
    "controller",
    "version",
    "partitions",
    "GPUs",
    "accounting",
    "nodes",
    "job",
]


def diagnose(user: User, *arguments: str) -> Diagnosis:
    return Diagnosis(user("doctor", "--json", *user.target, *arguments, code=None))


def queued_ids(user: User) -> set[str]:
    """Return the ids of all jobs; Slurm may forget old ones at any moment."""
    return set(user.slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout.split())


def test_usable_cluster_passes_all_checks(user: User) -> None:
    before = queued_ids(user)
    found = diagnose(user, "--nodes", "2", "--gpus-per-node", "4", "--time", "10m")
    assert found.fit
    assert list(dict.fromkeys(check["name"] for check in found.checks)) == CHECKS
    assert {check["name"]: check["state"] for check in found.checks} == dict.fromkeys(
        CHECKS, "ok"
    ) | {"nodes": "unknown"}
    assert re.match(
        r"Slurmctld\(primary\) at \S+ is UP; it answers in \d\.\d\d s", found.message("controller")
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found.message("version"))
    main, small = found.message("partitions").splitlines()
    assert main == "main (default): up, no time limit, nodes: 4 idle, 8 GPUs a node"
    assert small == "small: up, time limit 1:00:00, nodes: 1 idle, 8 GPUs a node"
    assert found.message("GPUs") == "8 a node in main, as gres"
    assert "none here: Slurm forgets a job" in found.message("accounting")
    assert f"{user.home}/jobs" in found.message("nodes")
    assert found.message("job").splitlines()[0] == "2 nodes with 4 workers each"
    assert re.search(
        r"sbatch --test-only: Job \d+ to start at .* on nodes n\[1-2\] in partition main",
        found.message("job"),
    )
    assert queued_ids(user) <= before
    assert user.remaining_files() == []


def test_nodes_are_known_after_a_job_that_succeeded(user: User) -> None:
    user.run("pass")
    found = diagnose(user)
    assert found.state("nodes") == "ok"
    assert re.search(r"job script-\w+ has succeeded", found.message("nodes"))
    assert diagnose(user, "--setup", "true").state("nodes") == "unknown"


@pytest.mark.parametrize(
    ("options", "failed", "message", "hint"),
    [
        (
            ("--partition", "nowhere"),
            ["partitions", "job"],
            "there is no partition nowhere",
            "there is main, small",
        ),
        (
            ("--gpus-per-node", "9"),
            ["GPUs", "job"],
            "no node of main has 9 GPUs: Slurm knows of 8",
            "sinfo -o '%P %D %G'",
        ),
        (
            ("--nodes", "5"),
            ["job"],
            "Slurm refuses the job: Requested node configuration is not available",
            "sinfo",
        ),
        (
            ("--set", "partion=main"),
            ["job"],
            "sbatch has no option --partion",
            "did you mean partition?",
        ),
    ],
)
def test_job_that_slurm_would_refuse_fails_check(
    user: User, options: tuple[str, ...], failed: list[str], message: str, hint: str
) -> None:
    found = diagnose(user, *options)
    assert found.failed == failed
    assert any(
        message in check["message"] and hint in check["hint"]
        for check in found.checks
        if check["state"] == "failed"
    ), found
    assert found.state("controller") == "ok"
    assert user.remaining_files() == []


def test_directives_of_custom_template_are_checked(user: User) -> None:
    user.path("mine.sh.j2").write_text(
        '#!/bin/bash\n#SBATCH --partition=nowhere\n{% include "agent.sh.j2" %}\n'
    )
    assert "invalid partition specified: nowhere" in diagnose(
        user, "--template", "mine.sh.j2"
    ).message("job")


def test_partition_that_is_down_fails_and_drained_nodes_warn(user: User) -> None:
    user.slurm.run("scontrol", "update", "PartitionName=small", "State=DOWN")
    try:
        found = diagnose(user, "--partition", "small")
        assert diagnose(user).state("partitions") == "ok", "only the partition small is down"
    finally:
        user.slurm.run("scontrol", "update", "PartitionName=small", "State=UP")
    assert "partitions" in found.failed
    assert found.message("partitions").startswith("small: down, ")
    user.slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    try:
        drained = diagnose(user, "--partition", "small")
    finally:
        user.slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert drained.state("partitions") == "warning"
    assert "nodes: 1 drained" in drained.message("partitions")
    assert "sinfo -R" in drained.hints("partitions")


def test_stopped_controller_fails_and_other_checks_are_unknown(user: User) -> None:
    user.slurm.stop_controller()
    found = diagnose(user)
    assert found.failed == ["controller"]
    assert re.fullmatch(
        r"the controller does not answer: Slurmctld\(primary\) at \S+ is DOWN",
        found.message("controller"),
    )
    assert "scontrol ping" in found.hints("controller")
    others = ("version", "partitions", "GPUs", "accounting", "job", "nodes")
    assert [found.state(name) for name in others] == ["unknown"] * 6


def test_missing_configuration_and_missing_commands_fail(user: User) -> None:
    user.patch.setenv("SLURM_CONF", str(user.path("nowhere.conf")))
    found = diagnose(user)
    assert found.failed == ["controller"]
    assert "nowhere.conf is not there" in found.message("controller")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        bare = diagnose(user)
    assert bare.failed == ["commands"]
    assert bare.message("commands") == "not on PATH: sbatch, srun, squeue, scancel, scontrol, sinfo"
    assert bare.state("job") == "unknown"


@pytest.mark.slow
def test_accounting_answers_or_is_a_warning(user_accounted: User) -> None:
    assert "sacct answers" in diagnose(user_accounted).message("accounting")
    user_accounted.command_first_on_path(
        "sacct", 'echo "sacct: error: Problem talking to the database" >&2\nexit 1\n'
    )
    found = diagnose(user_accounted)
    assert found.fit
    assert (found.state("accounting"), found.message("accounting")) == (
        "warning",
        "sacct does not answer: Problem talking to the database",
    )


def test_slow_controller_is_warning(user: User) -> None:
    user.command_first_on_path(
        "squeue", '[ -s "$NOTES" ] || { echo once > "$NOTES"; sleep 3.5; }\nexec "$REAL" "$@"\n'
    )
    found = diagnose(user)
    assert found.fit
    assert found.state("controller") == "warning"
    assert re.search(r"it took \d+\.\d s to answer", found.message("controller"))


# -- from a laptop -------------------------------------------------------------------------------


def test_usable_cluster_behind_login_host_passes(laptop: Laptop) -> None:
    before = queued_ids(laptop)
    found = diagnose(laptop, "--nodes", "2", "--gpus-per-node", "4")
    assert found.fit
    assert {check["name"]: check["state"] for check in found.checks} == dict.fromkeys(
        [*CHECKS, "login"], "ok"
    ) | {"nodes": "unknown"}
    login = found.message("login").splitlines()
    assert login[0].startswith("login1 is ")
    assert f"free in {laptop.login.home}/.clusterjob there" in login[1]
    assert f"{laptop.login.home}/.clusterjob/jobs" in found.message("nodes")
    assert "on nodes n[1-2] in partition main" in found.message("job")
    assert queued_ids(laptop) == before
    assert laptop.remaining_remote_jobs() == laptop.remaining_files() == []
    assert laptop.login.connections == 1


def test_unreachable_login_host_fails_check_login(laptop: Laptop) -> None:
    laptop.login.stop()
    found = diagnose(laptop)
    assert found.failed == ["login"]
    assert "connection refused" in found.message("login")
    others = ("commands", "controller", "job", "nodes")
    assert [found.state(name) for name in others] == ["unknown"] * 4


def test_node_that_does_not_answer_starts_no_job() -> None:
    shown = "small*|up|1:00|2|idle*|(null)\nsmall*|up|1:00|1|idle|(null)"
    assert partitions_of(shown)["small"].usable == 1
