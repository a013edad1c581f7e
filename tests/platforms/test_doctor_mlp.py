"""`clusterjob doctor` on a profile of the mlp cluster, against the simulated platform."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_user import CommandUser
from doctoring import Diagnosis
from launching import executable, new_folder
from volc_platform import DENIED, Platform

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


class Account(CommandUser):
    """A platform account with a clusterjob profile."""

    def __init__(self, platform: Platform, *more: Any) -> None:
        super().__init__(*more)
        self.platform = platform
        for name, value in platform.variables.items():
            self.patch.setenv(name, value)
        (platform.home / ".volc" / "credentials").chmod(0o600)
        self.profile()

    def profile(self, *replaced: tuple[str, str]) -> None:
        text = PROFILE
        for old, new in replaced:
            assert old in text
            text = text.replace(old, new)
        # The user's own configuration file needs no trust.
        path = Path(os.environ["XDG_CONFIG_HOME"]) / "clusterjob" / "config.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def doctor(self, *arguments: str, **env: str) -> Diagnosis:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            words = ("doctor", "--json", "--cluster", "vemlp", *arguments)
            return Diagnosis(self(*words, code=None))

    def replace_volc(self, script: str) -> dict[str, str]:
        """Return an environment in which `volc` is this script; $REAL is the real `volc`."""
        folder = new_folder(self.directory.parent / "other-bin")
        executable(folder / "volc", f"#!/bin/sh\nREAL={self.platform.bin}/volc\n{script}\n")
        return {"PATH": f"{folder}:{os.environ['PATH']}"}

    def run_task(self, workers: int = 1) -> str:
        """Submit a task by the command, wait for its end, and return its id."""
        conf = {
            "TaskName": "a task", "Entrypoint": "echo hello", "ImageUrl": "pytorch:2.0.0",
            "ResourceQueueName": "train", "Framework": "PyTorchDDP",
            "TaskRoleSpecs": [
                {"RoleName": "worker", "RoleReplicas": workers, "Flavor": "ml.hpcpni2l"}
            ],
        }  # fmt: skip
        (self.directory / "task.yaml").write_text(json.dumps(conf))
        command = ["volc", "ml_task", "submit", "--conf", "task.yaml", "--output", "json"]
        subprocess.run(command, cwd=self.directory, check=True, capture_output=True)
        task = self.platform.tasks()[-1]
        self.platform.wait(task, "Success")
        return task.id


@pytest.fixture
def account(volc: Platform, new_user: Callable[..., Account]) -> Account:
    return new_user(volc, Account)


def test_doctor_passes_for_account_without_tasks(account: Account) -> None:
    found = account.doctor("--nodes", "2", "--gpus-per-node", "8")
    assert found.fit
    states = {check["name"]: check["state"] for check in found.checks}
    assert [name for name, state in states.items() if state == "unknown"] == [
        "fields",
        "instances",
        "logs",
        "first task",
    ]
    assert [name for name, state in states.items() if state == "warning"] == [], found
    assert found.message("command") == f"{account.platform.bin}/volc, with mlp beside it"
    assert found.message("version") == "1.2.57"
    assert (
        found.message("credentials")
        == f"[default] of {account.platform.home}/.volc/credentials (mode 0600)"
    )
    assert found.message("region") == "cn-beijing"
    assert re.fullmatch(r"the platform answers in \d+\.\d s", found.message("list"))
    assert found.message("task").startswith("queue train, image vemlp-cn-beijing.cr.volces.com/")
    assert found.message("task").endswith(", 2 x ml.hpcpni2l")
    assert found.message("GPUs") == "ml.hpcpni2l has 8"
    assert not account.platform.tasks(), "none was submitted"


def test_doctor_checks_fields_instances_and_logs_of_task(account: Account) -> None:
    task_id = account.run_task(workers=2)
    found = account.doctor()
    assert found.message("fields") == (
        f"id, name, state and creation time are present (task {task_id})"
    )
    assert found.message("instances") == f"{task_id} shows worker_0, worker_1"
    assert found.message("logs") == f"{task_id} has a log"
    assert [found.state(name) for name in ("fields", "instances", "logs")] == ["ok"] * 3


# -- the command -----------------------------------------------------------------------------------


def test_volc_command_missing_or_not_on_path_fails(account: Account) -> None:
    path = os.environ["PATH"].removeprefix(f"{account.platform.bin}{os.pathsep}")
    assert shutil.which("volc", path=path) is None
    found = account.doctor(PATH=path)
    assert found.failed == ["command"]
    assert found.message("command") == "the platform's command volc is not installed"
    assert [found.state(name) for name in ("version", "list", "fields", "flags")] == ["unknown"] * 4
    installed = account.platform.home / ".volc" / "bin"
    shutil.copytree(account.platform.bin, installed)
    off_path = account.doctor(PATH=path)
    assert f"is in {installed}, which is not on PATH" in off_path.message("command")
    assert f'export PATH="{installed}:$PATH"' in off_path.hints("command")


def test_other_or_unreadable_volc_version_is_warning(account: Account) -> None:
    newer = account.doctor(
        **account.replace_volc('[ "$1" = version ] && echo volc/2.0.1 && exit\nexec "$REAL" "$@"')
    )
    assert newer.fit
    assert (newer.state("version"), newer.message("version")) == (
        "warning",
        "2.0.1, but clusterjob follows the documentation of 1.2.57",
    )
    assert newer.state("command") == "warning", "the two are of two installations"
    silent = account.doctor(
        **account.replace_volc('[ "$1" = version ] && echo nonsense && exit 3\nexec "$REAL" "$@"')
    )
    assert silent.state("version") == "warning"
    assert silent.fit


# -- the account -----------------------------------------------------------------------------------


def test_missing_login_fails_and_keys_may_come_from_variables(account: Account) -> None:
    account.platform.logout()
    found = account.doctor()
    assert found.failed == ["credentials", "region"]
    assert found.message("credentials").startswith("not logged in: ")
    assert "volc configure" in found.hints("credentials")
    assert found.state("list") == "unknown"
    keys = {
        "VOLC_AK": account.platform.ak,
        "VOLC_SK": account.platform.sk,
        "VOLC_REGION": "cn-beijing",
    }
    from_variables = account.doctor(**keys)
    assert from_variables.fit
    assert from_variables.message("credentials") == "VOLC_AK and VOLC_SK"
    del keys["VOLC_SK"]
    assert account.doctor(**keys).failed == ["credentials"]
    assert not any(
        value in str(from_variables) for value in (account.platform.ak, account.platform.sk)
    ), "keys are never shown"


def test_keys_wrong_incomplete_or_readable_by_others_are_reported(account: Account) -> None:
    path = account.platform.home / ".volc" / "credentials"
    path.chmod(0o644)
    found = account.doctor()
    assert found.fit
    assert (found.state("credentials"), found.hints("credentials")) == (
        "warning",
        f"chmod 600 {path}",
    )
    assert account.doctor(VOLC_AK=account.platform.ak).state("credentials") == "warning"
    account.platform.login(sk="another")
    wrong = account.doctor()
    assert wrong.failed == ["list"]
    assert "the platform does not accept the keys" in wrong.message("list")
    path.write_text("access_key_id = without a section\n")
    assert account.doctor().failed == ["credentials"]


def test_keys_and_region_come_from_chosen_volc_profile(account: Account) -> None:
    found = account.doctor("--set", "profile=team")
    assert found.failed == ["credentials", "region"]
    assert "has no keys in [team]" in found.message("credentials")
    keys = f"access_key_id = {account.platform.ak}\nsecret_access_key = {account.platform.sk}"
    for name, text in (("credentials", keys), ("config", "region = cn-beijing")):
        with (account.platform.home / ".volc" / name).open("a") as file:
            file.write(f"\n[team]\n{text}\n")
    assert account.doctor("--set", "profile=team").fit


def test_missing_region_fails_unless_set_by_option(account: Account) -> None:
    (account.platform.home / ".volc" / "config").unlink()
    assert account.doctor().failed == ["region"]
    assert account.doctor("--set", "region=cn-beijing").message("region") == "cn-beijing"


def test_missing_permission_is_reported_by_its_check(account: Account) -> None:
    account.run_task()
    account.platform.errors = {"list": [DENIED]}
    found = account.doctor()
    assert found.failed == ["list"]
    assert "the account has no permission for this" in found.message("list")
    assert found.state("fields") == found.state("instances") == found.state("logs") == "unknown"
    account.platform.errors = {"instance list": [DENIED]}
    assert account.doctor().failed == ["instances"]
    account.platform.errors = {"logs": [DENIED]}
    logs = account.doctor()
    assert logs.fit
    assert logs.state("logs") == "warning"


# -- another build of the command ------------------------------------------------------------------


def test_unknown_fields_and_states_in_task_list_are_reported(account: Account) -> None:
    account.run_task()
    for change, failed, state, text in (
        ("s/JobName/Title/g", ["fields"], "failed", "Title"),
        ("s/Status/Condition/g", ["fields"], "failed", "`list` has no state of a task"),
        (r's/"t-[0-9]*-/"task-/g; s/Time/Moment/g', ["instances"], "warning", ""),
        ("s/Success/Paused/g", [], "warning", "unknown task states: Paused"),
        ("s/.*/7/", ["list"], "unknown", ""),
    ):
        script = f'[ "$2" = list ] || exec "$REAL" "$@"\n"$REAL" "$@" | sed \'{change}\''
        found = account.doctor(**account.replace_volc(script))
        assert (found.failed, found.state("fields")) == (failed, state), found
        assert text in found.message("fields") + found.hints("fields")


def test_volc_without_needed_flag_fails(account: Account) -> None:
    assert (
        account.doctor().message("flags")
        == f"{', '.join(checks.FLAGS)} have all flags that clusterjob uses"
    )
    help_ = 'case "$*" in *--help) "$REAL" "$@" | {} ;; *) exec "$REAL" "$@" ;; esac'
    without = account.doctor(**account.replace_volc(help_.format("grep -v -- --limit")))
    assert without.failed == ["flags"]
    assert without.message("flags") == "this build of volc does not have list --limit"
    silent = account.doctor(**account.replace_volc(help_.format("cat > /dev/null; exit 1")))
    assert silent.fit
    assert silent.state("flags") == "warning"
    assert "cannot be read" in silent.message("flags")


def test_checked_flags_are_those_that_client_uses(
    account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in account.platform.variables.items():
        monkeypatch.setenv(name, value)
    task_id = account.run_task()
    (tmp_path / "conf.yaml").write_text("{}")
    volc = Volc()
    with pytest.raises(ClusterJobError):
        volc.submit(tmp_path / "conf.yaml")
    volc.tasks(["x"])
    volc.instances(task_id)
    volc.lines(task_id, "worker_0", 1)
    volc.cancel(task_id)  # the task has ended: its state does not change
    for operation, names in checks.FLAGS.items():
        arguments: Sequence[str] = account.platform.calls("ml_task", *operation.split())[-1]
        assert {argument for argument in arguments if argument.startswith("--")} == {
            f"--{name}" for name in names
        }, operation


# -- the job ---------------------------------------------------------------------------------------


def test_task_without_required_options_fails(account: Account) -> None:
    account.profile(('queue = "train"\n', ""), ('flavor = "ml.hpcpni2l"\n', ""))
    found = account.doctor()
    assert found.failed == ["task"]
    assert found.message("task") == "the platform takes no task without flavor and queue"
    assert 'flavor = "..."' in found.hints("task")
    assert "--gpus-per-node selects a flavor" in found.hints("task"), "there is a table of them"
    assert account.doctor("--set", "queue=train", "--gpus-per-node", "8").fit, (
        "the flavor is found by its GPUs"
    )
    assert account.doctor("--set", "queeue=train").failed == ["job", "task", "GPUs", "secrets"]


@pytest.mark.slow
def test_gpu_count_is_checked_against_flavor(account: Account) -> None:
    idle = account.doctor("--gpus-per-node", "2")
    assert (idle.state("GPUs"), idle.message("GPUs")) == (
        "warning",
        "ml.hpcpni2l has 8: 6 of them stay idle",
    )
    assert "GPUs" in account.doctor("--gpus-per-node", "9").failed
    account.profile(('flavors = { "ml.hpcpni2l" = 8 }\n', ""))
    assert account.doctor("--gpus-per-node", "8").state("GPUs") == "warning"
    assert account.doctor().state("GPUs") == "unknown"


def test_secret_that_is_not_set_fails_and_value_is_hidden(account: Account) -> None:
    account.profile(('flavor = "ml', 'secrets = "WANDB_API_KEY"\nflavor = "ml'))
    found = account.doctor()
    assert found.failed == ["secrets"]
    assert found.message("secrets") == "not set here: WANDB_API_KEY"
    with_secret = account.doctor(WANDB_API_KEY="very-secret")
    assert with_secret.fit
    assert "very-secret" not in str(with_secret)
