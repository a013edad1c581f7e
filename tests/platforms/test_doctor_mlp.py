"""`clusterjob doctor` on a profile of the mlp cluster, against the stand-in platform: an account
that is fit, and what makes one unfit.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from doctoring import Diagnosis, doctor
from volc_platform import Platform

from clusterjob.backends.mlp import checks
from clusterjob.backends.mlp.client import Volc
from clusterjob.errors import ClusterJobError

PROFILE = """
[clusters.vemlp]
backend = "mlp"
[clusters.vemlp.set]
queue = "train"
image = "vemlp-cn-beijing.cr.volces.com/preset-images/pytorch:2.0.0"
flavor = "ml.hpcpni2l"
flavors = { "ml.hpcpni2l" = 8 }
"""


class Clinic:
    """Somebody with an account, and a profile."""

    def __init__(self, platform: Platform, directory: Path) -> None:
        self.platform = platform
        self.directory = directory
        self.env = {**os.environ, **platform.variables}
        (platform.home / ".volc" / "credentials").chmod(0o600)
        self.profile()

    def profile(self, *replaced: tuple[str, str]) -> None:
        text = PROFILE
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        own = (
            Path(self.env["XDG_CONFIG_HOME"]) / "clusterjob" / "config.toml"
        )  # the user's own, which needs no trust
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(text)

    def __call__(self, *words: str, **env: str | None) -> Diagnosis:
        environ = {name: value for name, value in {**self.env, **env}.items() if value is not None}
        return doctor("--cluster", "vemlp", *words, cwd=self.directory, env=environ)

    def volc_is(self, script: str) -> dict[str, str]:
        """Return an environment whose `volc` is a script, which finds the real one as $REAL."""
        folder = self.directory.parent / "other-bin"
        folder.mkdir(exist_ok=True)
        (folder / "volc").write_text(f"#!/bin/sh\nREAL={self.platform.bin}/volc\n{script}\n")
        (folder / "volc").chmod(0o755)
        return {"PATH": f"{folder}:{self.env['PATH']}"}

    def run_a_task(self, **fields: Any) -> str:
        work = self.directory / "task"
        work.mkdir(exist_ok=True)
        task_id = self.platform.submit(work, "echo hello", **fields)
        self.platform.wait(task_id, "Success")
        return task_id


@pytest.fixture
def clinic(volc: Platform, tmp_path: Path) -> Clinic:
    directory = tmp_path / "work"
    directory.mkdir()
    return Clinic(volc, directory)


def test_an_account_without_a_task(clinic: Clinic) -> None:
    found = clinic("--nodes", "2", "--gpus-per-node", "8")
    assert found.fit
    states = {check["name"]: check["state"] for check in found.checks}
    assert [name for name, state in states.items() if state == "unknown"] == [
        "fields",
        "instances",
        "logs",
        "first task",
    ]
    assert [name for name, state in states.items() if state == "warning"] == [], found
    assert found.words("command") == f"{clinic.platform.bin}/volc, with mlp beside it"
    assert found.words("version") == "1.2.57"
    assert (
        found.words("credentials")
        == f"[default] of {clinic.platform.home}/.volc/credentials (mode 0600)"
    )
    assert found.words("region") == "cn-beijing"
    assert re.fullmatch(r"the platform answers, in \d+\.\d s", found.words("list"))
    assert found.words("task").startswith("queue train, image vemlp-cn-beijing.cr.volces.com/")
    assert found.words("task").endswith(", 2 x ml.hpcpni2l")
    assert found.words("GPUs") == "ml.hpcpni2l has 8"
    assert not clinic.platform.tasks(), "none was submitted"


@pytest.mark.parametrize("build", [{}, {"spelling": "Id", "long_names": True, "banner": ""}])
def test_an_account_with_a_task(clinic: Clinic, build: dict[str, Any]) -> None:
    clinic.platform.set(**build)
    task_id = clinic.run_a_task(workers=2)
    found = clinic()
    assert found.words("fields") == f"id, name, state and age are read, as of {task_id}"
    assert found.words("instances") == f"{task_id} shows worker_0, worker_1"
    assert found.words("logs") == f"{task_id} has a log"
    assert [found.state(name) for name in ("fields", "instances", "logs")] == ["ok"] * 3


# -- the command -------------------------------------------------------------------------------------------------------------


def test_a_command_that_is_missing_or_not_on_path(clinic: Clinic) -> None:
    path = os.environ["PATH"]
    assert shutil.which("volc", path=path) is None
    found = clinic(PATH=path)
    assert found.failed == ["command"]
    assert found.words("command") == "the platform's command volc is not installed"
    assert [found.state(name) for name in ("version", "list", "fields", "flags")] == ["unknown"] * 4
    installed = clinic.platform.home / ".volc" / "bin"
    shutil.copytree(clinic.platform.bin, installed)
    beside = clinic(PATH=path)
    assert f"lies in {installed}, which is not on PATH" in beside.words("command")
    assert f'export PATH="{installed}:$PATH"' in beside.hints("command")


def test_a_command_without_its_sibling(clinic: Clinic) -> None:
    (clinic.platform.bin / "mlp").unlink()
    found = clinic()
    assert found.failed == ["command"]
    assert "does not find its sibling mlp" in found.words("command")


def test_versions(clinic: Clinic) -> None:
    newer = clinic(
        **clinic.volc_is('[ "$1" = version ] && echo volc/2.0.1 && exit\nexec "$REAL" "$@"')
    )
    assert newer.fit
    assert (newer.state("version"), newer.words("version")) == (
        "warning",
        "2.0.1, and this was built from the documentation of 1.2.57",
    )
    assert newer.state("command") == "warning", "the two are of two installations"
    silent = clinic(
        **clinic.volc_is('[ "$1" = version ] && echo nonsense && exit 3\nexec "$REAL" "$@"')
    )
    assert silent.state("version") == "warning"
    assert silent.fit


# -- the account -------------------------------------------------------------------------------------------------------------


def test_nobody_is_logged_in(clinic: Clinic) -> None:
    clinic.platform.logout()
    found = clinic()
    assert found.failed == ["credentials", "region"]
    assert found.words("credentials").startswith("nobody is logged in: ")
    assert "volc configure" in found.hints("credentials")
    assert found.state("list") == "unknown"
    keys = {
        "VOLC_AK": clinic.platform.ak,
        "VOLC_SK": clinic.platform.sk,
        "VOLC_REGION": "cn-beijing",
    }
    by_variables = clinic(**keys)
    assert by_variables.fit
    assert by_variables.words("credentials") == "VOLC_AK and VOLC_SK"
    assert clinic(**{**keys, "VOLC_SK": None}).failed == ["credentials"]
    assert not any(
        value in str(by_variables) for value in (clinic.platform.ak, clinic.platform.sk)
    ), "keys are never shown"


def test_keys_that_are_wrong_half_or_readable_by_others(clinic: Clinic) -> None:
    path = clinic.platform.home / ".volc" / "credentials"
    path.chmod(0o644)
    found = clinic()
    assert found.fit
    assert (found.state("credentials"), found.hints("credentials")) == (
        "warning",
        f"chmod 600 {path}",
    )
    assert clinic(VOLC_AK=clinic.platform.ak).state("credentials") == "warning"
    clinic.platform.login(sk="another")
    wrong = clinic()
    assert wrong.failed == ["list"]
    assert "the platform does not accept the keys" in wrong.words("list")
    path.write_text("access_key_id = without a section\n")
    assert clinic().failed == ["credentials"]


def test_another_profile_of_the_command(clinic: Clinic) -> None:
    found = clinic("--set", "profile=team")
    assert found.failed == ["credentials", "region"]
    assert "has no keys in [team]" in found.words("credentials")
    for name, text in (("credentials", f"access_key_id = {clinic.platform.ak}\nsecret_access_key = {clinic.platform.sk}"),
                       ("config", "region = cn-beijing")):  # fmt: skip
        with (clinic.platform.home / ".volc" / name).open("a") as file:
            file.write(f"\n[team]\n{text}\n")
    assert clinic("--set", "profile=team").fit


def test_no_region(clinic: Clinic) -> None:
    (clinic.platform.home / ".volc" / "config").unlink()
    assert clinic().failed == ["region"]
    assert clinic("--set", "region=cn-beijing").words("region") == "cn-beijing"


def test_permissions(clinic: Clinic) -> None:
    clinic.run_a_task()
    clinic.platform.deny("ListJobs")
    found = clinic()
    assert found.failed == ["list"]
    assert "the account has no permission for this" in found.words("list")
    assert found.state("fields") == found.state("instances") == found.state("logs") == "unknown"
    clinic.platform.deny("ListJobInstances")
    assert clinic().failed == ["instances"]
    clinic.platform.deny("GetJobLog")
    logs = clinic()
    assert logs.fit
    assert logs.state("logs") == "warning"


def test_a_network_that_fails(clinic: Clinic) -> None:
    clinic.platform.break_calls("list")
    found = clinic()
    assert found.failed == ["list"]
    assert "the platform does not answer" in found.words("list") or "is not reached" in found.words(
        "list"
    )


# -- another build of the command --------------------------------------------------------------------------------------------


def test_fields_that_are_called_otherwise(clinic: Clinic) -> None:
    clinic.run_a_task()
    renamed = clinic(
        **clinic.volc_is(
            '[ "$2" = list ] || exec "$REAL" "$@"\n"$REAL" "$@" | sed s/JobName/Title/g'
        )
    )
    assert renamed.failed == ["fields"]
    assert "Title" in renamed.hints("fields")
    assert renamed.state("instances") == "unknown"
    stateless = clinic(
        **clinic.volc_is(
            '[ "$2" = list ] || exec "$REAL" "$@"\n"$REAL" "$@" | sed s/Status/Condition/g'
        )
    )
    assert stateless.failed == ["fields"]
    assert stateless.words("fields") == "a task's state is not found in the answer of `list`"
    ageless = clinic(
        **clinic.volc_is(
            '[ "$2" = list ] || exec "$REAL" "$@"\n"$REAL" "$@" | sed "s/\\"t-[0-9]*-/\\"task-/g; s/Time/Moment/g"'
        )
    )
    assert ageless.state("fields") == "warning", ageless
    strange = clinic(
        **clinic.volc_is(
            '[ "$2" = list ] || exec "$REAL" "$@"\n"$REAL" "$@" | sed s/Success/Paused/g'
        )
    )
    assert strange.fit
    assert (strange.state("fields"), strange.words("fields")) == (
        "warning",
        "states that are not known: Paused",
    )
    noise = clinic(**clinic.volc_is('[ "$2" = list ] || exec "$REAL" "$@"\necho 7'))
    assert noise.failed == ["list"]


def test_flags(clinic: Clinic) -> None:
    assert clinic().words("flags") == f"{', '.join(checks.FLAGS)} know the flags that are used"
    help_ = 'case "$*" in *--help) "$REAL" "$@" | {} ;; *) exec "$REAL" "$@" ;; esac'
    without = clinic(**clinic.volc_is(help_.format("grep -v -- --limit")))
    assert without.failed == ["flags"]
    assert without.words("flags") == "this build of volc does not know list --limit"
    silent = clinic(**clinic.volc_is(help_.format("cat > /dev/null; exit 1")))
    assert silent.fit
    assert silent.state("flags") == "warning"
    assert "cannot be read" in silent.words("flags")


def test_the_flags_that_are_looked_for_are_those_that_are_used(
    clinic: Clinic, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in clinic.platform.variables.items():
        monkeypatch.setenv(name, value)
    task_id = clinic.run_a_task()
    (tmp_path / "conf.yaml").write_text("{}")
    volc = Volc()
    with pytest.raises(ClusterJobError):
        volc.submit(tmp_path / "conf.yaml")
    volc.tasks(["x"])
    volc.instances(task_id)
    volc.lines(task_id, "worker_0", 1)
    volc.cancel(task_id)  # which has ended, and stays as it is
    for operation, names in checks.FLAGS.items():
        words: Sequence[str] = clinic.platform.calls("ml_task", *operation.split())[-1]
        assert {word for word in words if word.startswith("--")} == {
            f"--{name}" for name in names
        }, operation


# -- the job -----------------------------------------------------------------------------------------------------------------


def test_what_a_task_has_to_have(clinic: Clinic) -> None:
    clinic.profile(('queue = "train"\n', ""), ('flavor = "ml.hpcpni2l"\n', ""))
    found = clinic()
    assert found.failed == ["task"]
    assert found.words("task") == "the platform takes no task without flavor and queue"
    assert 'flavor = "..."' in found.hints("task")
    assert "--gpus-per-node finds a flavor" in found.hints("task"), "there is a table of them"
    assert clinic("--set", "queue=train", "--gpus-per-node", "8").fit, (
        "the flavor is found by its GPUs"
    )
    assert clinic("--set", "queeue=train").failed == ["job", "task", "GPUs", "secrets"]


def test_gpus_of_a_flavor(clinic: Clinic) -> None:
    idle = clinic("--gpus-per-node", "2")
    assert (idle.state("GPUs"), idle.words("GPUs")) == (
        "warning",
        "ml.hpcpni2l has 8: 6 of them stay idle",
    )
    assert "GPUs" in clinic("--gpus-per-node", "9").failed
    clinic.profile(('flavors = { "ml.hpcpni2l" = 8 }\n', ""))
    assert clinic("--gpus-per-node", "8").state("GPUs") == "warning"
    assert clinic().state("GPUs") == "unknown"


def test_secrets(clinic: Clinic) -> None:
    clinic.profile(('flavor = "ml', 'secrets = "WANDB_API_KEY"\nflavor = "ml'))
    found = clinic(WANDB_API_KEY=None)
    assert found.failed == ["secrets"]
    assert found.words("secrets") == "not set here: WANDB_API_KEY"
    there = clinic(WANDB_API_KEY="very-secret")
    assert there.fit
    assert "very-secret" not in str(there)
