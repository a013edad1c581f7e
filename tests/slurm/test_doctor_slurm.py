"""`clusterjob doctor` on a real Slurm, from a login node and from a laptop: fit ones, and each of
what makes one unfit.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from doctoring import Diagnosis, doctor
from login_user import Laptop
from slurm_user import SLEEPER, User

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


def at(user: User, *words: str, **more: Any) -> Diagnosis:
    return doctor(
        "--cluster",
        "hpc" if isinstance(user, Laptop) else "slurm",
        *words,
        cwd=user.directory,
        **more,
    )


def queue(user: User) -> set[str]:
    """Return the ids of all jobs; Slurm may forget old ones at any moment."""
    return set(user.slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout.split())


def test_a_cluster_that_is_fit(user_of_either: User) -> None:
    user = user_of_either
    before = queue(user)
    found = at(user, "--nodes", "2", "--gpus-per-node", "4", "--time", "10m")
    assert found.fit
    assert list(dict.fromkeys(check["name"] for check in found.checks)) == CHECKS
    assert {check["name"]: check["state"] for check in found.checks} == dict.fromkeys(
        CHECKS, "ok"
    ) | {"nodes": "unknown"}
    assert re.match(
        r"Slurmctld\(primary\) at \S+ is UP; it answers in \d\.\d\d s", found.words("controller")
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found.words("version"))
    main, small = found.words("partitions").splitlines()
    assert main == "main (default): up, no time limit, nodes: 4 idle, 8 GPUs a node"
    assert small == "small: up, time limit 1:00:00, nodes: 1 idle, 8 GPUs a node"
    assert found.words("GPUs") == "8 a node in main, as gres"
    accounted = "sacct answers" in found.words("accounting")
    assert (
        accounted
        == ("slurmdbd" in user.slurm.conf.read_text())
        != ("none here: Slurm forgets a job" in found.words("accounting"))
    )
    assert f"{user.home}/jobs" in found.words("nodes")
    assert found.words("job").splitlines()[0] == "2 nodes with 4 workers each"
    assert re.search(
        r"sbatch --test-only: Job \d+ to start at .* on nodes n\[1-2\] in partition main",
        found.words("job"),
    )
    assert queue(user) <= before
    assert user.left_behind() == []


@pytest.mark.parametrize(
    ("options", "failed", "words", "hint"),
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
            ("--partition", "small", "--time", "2h"),
            ["job"],
            "is above that of the partition small",
            "--set qos=NAME",
        ),
        (
            ("--set", "partion=main"),
            ["job"],
            "sbatch has no option --partion",
            "did you mean partition?",
        ),
        (("--hosts", "gpu1"), ["job"], "the slurm cluster takes no hosts", "--cluster ssh"),
    ],
)
def test_a_job_that_slurm_would_refuse(
    user: User, options: tuple[str, ...], failed: list[str], words: str, hint: str
) -> None:
    found = at(user, *options)
    assert found.failed == failed
    assert any(
        words in check["words"] and hint in check["hint"]
        for check in found.checks
        if check["state"] == "failed"
    ), found
    assert found.state("controller") == "ok"
    assert user.left_behind() == []


def test_the_lines_of_a_template_of_one_s_own_are_asked_about_too(user: User) -> None:
    user.path("mine.sh.j2").write_text(
        '#!/bin/bash\n#SBATCH --partition=nowhere\n{% include "agent.sh.j2" %}\n'
    )
    assert "invalid partition specified: nowhere" in at(user, "--template", "mine.sh.j2").words(
        "job"
    )


def test_partitions_that_are_down_or_have_no_nodes(user: User) -> None:
    user.slurm.run("scontrol", "update", "PartitionName=small", "State=DOWN")
    try:
        found = at(user, "--partition", "small")
        assert at(user).state("partitions") == "ok", "another partition's matter"
    finally:
        user.slurm.run("scontrol", "update", "PartitionName=small", "State=UP")
    assert "partitions" in found.failed
    assert found.words("partitions").startswith("small: down, ")
    user.slurm.run("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
    try:
        drained = at(user, "--partition", "small")
    finally:
        user.slurm.run("scontrol", "update", "NodeName=n1", "State=RESUME")
    assert drained.state("partitions") == "warning"
    assert "nodes: 1 drained" in drained.words("partitions")
    assert "sinfo -R" in drained.hints("partitions")


def test_an_array_and_a_job_that_waits_for_another(user: User) -> None:
    first = user.submit(SLEEPER)
    found = at(user, "--array", "0-3%2", "--after", f"afterany:{first}")
    assert found.fit, found
    user("cancel", first)


def test_a_controller_that_is_down(user: User) -> None:
    user.slurm.stop_controller()
    found = at(user)
    assert found.failed == ["controller"]
    assert "is DOWN" in found.words(
        "controller"
    ) or "Unable to contact slurm controller" in found.words("controller")
    assert "scontrol ping" in found.hints("controller")
    assert [
        found.state(name) for name in ("version", "partitions", "GPUs", "accounting", "job")
    ] == ["unknown"] * 5
    assert found.state("nodes") == "unknown"


@pytest.mark.slow
def test_a_controller_that_is_frozen(user: User) -> None:
    """Slurm's own commands wait for it; the examination ends all the same."""
    user.slurm.freeze_controller()
    found = at(user)
    assert found.failed == ["controller"]
    assert found.state("job") == "unknown"


def test_no_configuration_and_no_commands(user: User) -> None:
    found = at(user, env={**os.environ, "SLURM_CONF": str(user.path("nowhere.conf"))})
    assert found.failed == ["controller"]
    assert "nowhere.conf is not there" in found.words("controller")
    bare = at(user, env={**os.environ, "PATH": "/nowhere"})
    assert bare.failed == ["commands"]
    assert bare.words("commands") == "not on PATH: sbatch, srun, squeue, scancel, scontrol, sinfo"
    assert bare.state("job") == "unknown"


def test_accounting_that_does_not_answer(user_accounted: User) -> None:
    user_accounted.command_first_on_path(
        "sacct", 'echo "sacct: error: Problem talking to the database" >&2\nexit 1\n'
    )
    found = at(user_accounted)
    assert found.fit
    assert (found.state("accounting"), found.words("accounting")) == (
        "warning", "sacct does not answer: Problem talking to the database",
    )  # fmt: skip


def test_a_controller_that_is_slow(user: User) -> None:
    user.command_first_on_path(
        "squeue", '[ -s "$NOTES" ] || { echo once > "$NOTES"; sleep 3.5; }\nexec "$REAL" "$@"\n'
    )
    found = at(user)
    assert found.fit
    assert found.state("controller") == "warning"
    assert re.search(r"it took \d+\.\d s to answer", found.words("controller"))


def test_a_home_that_cannot_be_written(user: User) -> None:
    user.path("file").touch()
    found = at(user, env={**os.environ, "CLUSTERJOB_HOME": str(user.path("file") / "below")})
    assert "directory" in found.failed
    assert found.state("controller") == "ok"


# -- from a laptop ---------------------------------------------------------------------------------------------------------


def test_a_cluster_behind_a_login_host(laptop: Laptop) -> None:
    before = queue(laptop)
    found = at(laptop, "--nodes", "2", "--gpus-per-node", "4")
    assert found.fit
    assert {check["name"]: check["state"] for check in found.checks} == dict.fromkeys(
        [*CHECKS, "login"], "ok"
    ) | {"nodes": "unknown"}
    login = found.words("login").splitlines()
    assert login[0].startswith("login1 is ")
    assert f"free in {laptop.login.home}/.clusterjob there" in login[1]
    assert f"{laptop.login.home}/.clusterjob/jobs" in found.words("nodes")
    assert "on nodes n[1-2] in partition main" in found.words("job")
    assert queue(laptop) == before
    assert laptop.left_there() == laptop.left_behind() == []
    assert laptop.login.connections == 1


def test_what_slurm_refuses_behind_a_login_host(laptop: Laptop) -> None:
    found = at(laptop, "--partition", "nowhere")
    assert found.failed == ["partitions", "job"]
    assert "invalid partition specified: nowhere" in found.words("job")


def test_a_login_host_that_is_not_reached_or_not_trusted(laptop: Laptop) -> None:
    keys = laptop.login.known_hosts.read_text()
    laptop.login.known_hosts.write_text("")
    strange = at(laptop)
    assert strange.failed == ["login"]
    assert "login1: its key is unknown" in strange.words("login")
    assert "hosts trust" in strange.hints("login")
    laptop.login.known_hosts.write_text(keys)
    laptop.login.stop()
    away = at(laptop)
    assert away.failed == ["login"]
    assert "connection refused" in away.words("login")
    assert [away.state(name) for name in ("commands", "controller", "job", "nodes")] == [
        "unknown"
    ] * 4


def test_a_login_host_without_slurm_or_without_its_configuration(laptop: Laptop) -> None:
    laptop.login.stop()
    laptop.login.environment["SLURM_CONF"] = "/nowhere/slurm.conf"
    laptop.login.start()
    found = at(laptop)
    assert found.failed == ["commands"]
    assert "Slurm's configuration /nowhere/slurm.conf is not there" in found.words("commands")
    laptop.login.stop()
    bin_ = laptop.login.directory / "bin"
    bin_.mkdir()
    for name in ("bash", "python3"):
        real = os.path.realpath(f"/usr/bin/{name}")
        (bin_ / name).symlink_to(real if os.path.exists(real) else f"/bin/{name}")
    del laptop.login.environment["SLURM_CONF"]
    laptop.login.environment["PATH"] = str(bin_)
    laptop.login.start()
    bare = at(laptop)
    assert bare.failed == ["commands"]
    assert bare.words("commands").startswith("not on PATH there: sbatch, ")


def test_two_login_hosts_are_wrong_use(laptop: Laptop) -> None:
    said = laptop("doctor", "--cluster", "hpc", "--login", "a,b", code=2)
    assert said.stdout == ""
    assert "names 2 hosts" in said.stderr


def test_the_text_for_people(user: User) -> None:
    said = user("doctor", "--cluster", "slurm", "--partition", "nowhere", code=1)
    assert said.stderr == ""
    assert "failed   partitions    there is no partition nowhere, or none for you\n" in said.stdout
    assert f"{'':23}hint: there is main, small\n" in said.stdout
    shown = json.loads(user("doctor", "--cluster", "slurm", "--json").stdout)
    assert shown["backend"] == "slurm"
