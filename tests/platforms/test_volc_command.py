"""The simulated platform's command `volc`: arguments, answers, uploads, refusals and faults."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from namespaces import Machine
from procs import wait_until
from volc_platform import Platform, conf, parsed, platform

SLEEP = "echo up; exec sleep 1000"


@pytest.fixture(scope="module")
def idle(
    tmp_path_factory: pytest.TempPathFactory, volc_machines: list[Machine]
) -> Iterator[Platform]:
    """A platform shared by tests that leave no task on it."""
    with platform(tmp_path_factory.mktemp("idle"), volc_machines) as made:
        yield made


def error_of(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    assert done.returncode == code, done
    return done.stderr


# -- command line ----------------------------------------------------------------------------------


def test_volc_fails_when_mlp_is_not_on_path(volc: Platform) -> None:
    done = subprocess.run(
        [volc.bin / "volc", "version"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert error_of(done) == 'exec: "mlp": executable file not found in $PATH\n'
    assert volc.volc("version").stdout == "volc/1.2.57\n"
    assert volc.calls() == [["version"]]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--version"], "No help topic for '--version'"),
        (["ml_task", "stop", "--id", "t-1"], "No help topic for 'stop'"),
        (["ml_task", "list", "--outpu", "json"], "flag provided but not defined: -outpu"),
        (["ml_task", "logs", "--task", "t-1"], 'Required flags "instance" not set'),
        (["ml_task", "list", "--limit", "5"], 'Required flags "output" not set'),
        (["ml_task", "cancel", "--id"], "flag needs an argument: -id"),
        (["ml_task", "list", "--output", "Json"], "only json is supported"),
        (["ml_task", "list", "--limit", "ten", "--output", "json"], "parse error"),
        (
            ["ml_task", "submit", "--conf", "missing.yaml", "--output", "json"],
            "load config file failed: open missing.yaml: no such file or directory",
        ),
        (["ml_task", "cancel", "--id", "t-1"], "task t-1 not found"),
        (
            ["ml_task", "list", "--status", "Waiting", "--output", "json"],
            "status 'Waiting' is not one of",
        ),
    ],
)
def test_undocumented_command_line_is_refused(
    idle: Platform, arguments: list[str], reason: str
) -> None:
    assert reason in error_of(idle.volc(*arguments))


def test_command_checks_keys_region_profile_and_permission(volc: Platform) -> None:
    listing = ("ml_task", "list", "--output", "json")
    volc.login(sk="wrong")
    assert "SignatureDoesNotMatch" in error_of(volc.volc(*listing))
    assert volc.volc(*listing, env={"VOLC_SK": volc.sk}).returncode == 0
    volc.logout()
    assert "AccessKeyId or SecretAccessKey is empty" in error_of(volc.volc(*listing))
    keys = {"VOLC_AK": volc.ak, "VOLC_SK": volc.sk}
    assert "Region is empty" in error_of(volc.volc(*listing, env=keys))
    assert volc.volc(*listing, env=keys | {"VOLC_REGION": volc.region}).returncode == 0
    volc.login()
    assert volc.volc(*listing).returncode == 0
    assert "is empty" in error_of(volc.volc(*listing, env={"VOLC_PROFILE": "other"}))
    volc.deny("CreateJob")
    assert volc.volc(*listing).returncode == 0
    volc.deny()
    assert "AccessDenied: User is not authorized to perform: ml_platform:ListJobs" in error_of(
        volc.volc(*listing)
    )
    volc.allow()
    assert volc.volc(*listing).returncode == 0


def test_list_shows_ten_unfinished_tasks_unless_options_say_otherwise(
    volc: Platform, tmp_path: Path
) -> None:
    volc.hold("Queue")
    tasks = [volc.submit(tmp_path, SLEEP, TaskName=f"task {number % 3}") for number in range(12)]
    wait_until(lambda: all(task["status"] == "Queue" for task in volc.tasks()), 20, "all queue")
    assert [row["JobId"] for row in volc.rows("list")] == tasks[:1:-1]
    assert [row["JobId"] for row in volc.rows("list", "--limit", "3", "--offset", "10")] == [
        tasks[1],
        tasks[0],
    ]
    assert [row["JobId"] for row in volc.rows("list", "--name", "sk 1")] == tasks[10::-3]
    volc.volc("ml_task", "cancel", "--id", tasks[0])
    assert len(volc.rows("list", "--limit", "100")) == 11
    (killed,) = volc.rows("list", "--status", "Killed,Failed")
    assert killed["End"].endswith("Z")
    assert (killed["JobId"], killed["JobName"], killed["Start"]) == (tasks[0], "task 0", "")


def test_task_fields_have_either_spelling_and_banner_may_come_first(
    volc: Platform, tmp_path: Path
) -> None:
    task = volc.submit(tmp_path, "true", Description="words")
    volc.wait(task, "Success")
    listing = ("ml_task", "list", "--status", "Success", "--output", "json")
    done = volc.volc(*listing)
    assert done.stdout.splitlines()[0] == "A new version of volc is available: volc/1.2.58"
    (row,) = parsed(done.stdout)
    shown = (row["JobId"], row["JobName"], row["Status"], row["Description"])
    assert shown == (task, "a task", "Success", "words")
    assert row["TaskRoleSpecs"][0]["RoleReplicas"] == 1
    volc.set(spelling="Id", banner="", long_names=True)
    (row,) = json.loads(volc.volc(*listing).stdout)
    shown = (row["Id"], row["Name"], row["Status"], row["ExitCode"])
    assert shown == (task, "a task", "Success", 0)
    assert volc.rows("instance", "list", "--id", task)[0]["Name"] == f"{task}-worker-0"


def test_logs_returns_newest_lines(volc: Platform, tmp_path: Path) -> None:
    task = volc.submit(tmp_path, "seq 1000; echo Some error; echo last >&2")
    volc.wait(task, "Success")
    whole = [str(number) for number in range(1, 1001)] + ["Some error", "last"]

    def logs(*arguments: str) -> list[str]:
        done = volc.volc("ml_task", "logs", "--task", task, "--instance", "worker_0", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert logs() == whole[-500:]
    assert logs("--lines", "3") == ["1000", "Some error", "last"]
    assert logs("--lines", "5000") == whole
    refused = volc.volc("ml_task", "logs", "--task", task, "--instance", "worker_7")
    assert "instance worker_7" in error_of(refused)


def test_log_lines_appear_after_configured_delay(volc: Platform, tmp_path: Path) -> None:
    volc.lag_logs(2.0)
    begin = time.time()
    task = volc.submit(tmp_path, "echo late")
    volc.wait(task, "Success")
    wait_until(
        lambda: (
            volc.volc("ml_task", "logs", "--task", task, "--instance", "worker_0").stdout
            == "late\n"
        ),
        60,
        "the line",
    )
    assert time.time() - begin >= 2.0


# -- submission ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"ResourceQueueID": "q-none"}, "resource queue q-none not found"),
        ({"ResourceQueueName": "nothing"}, "resource queue nothing not found"),
        ({"ResourceQueueID": None}, "ResourceQueueID is required"),
        (
            {"TaskRoleSpecs": [{"RoleName": "worker", "RoleReplicas": 1, "Flavor": "ml.none"}]},
            "flavor ml.none not found",
        ),
        (
            {
                "TaskRoleSpecs": [
                    {"RoleName": "worker", "RoleReplicas": "2", "Flavor": "ml.hpcpni2l"}
                ]
            },
            "cannot unmarshal RoleReplicas '2'",
        ),
        (
            {"TaskRoleSpecs": [{"RoleName": "worker", "RoleReplicas": 0, "Flavor": "ml.hpcpni2l"}]},
            "RoleReplicas must be at least 1",
        ),
        ({"Framework": "Horovod"}, "Framework 'Horovod' is not one of"),
        ({"ImageUrl": None}, "ImageUrl is required"),
        ({"Entrypoint": ""}, "Entrypoint is required"),
        ({"Priority": 5}, "Priority 5 is not one of [2, 4, 6]"),
        ({"Nodes": 2}, "field Nodes not found"),
        ({"Envs": [{"Name": "A", "Value": 1}]}, "cannot unmarshal Value 1"),
        ({"Tags": "one"}, "cannot unmarshal Tags 'one'"),
        ({"AccessType": "Nobody"}, "AccessType 'Nobody' is not one of"),
        (
            {"RetryOptions": {"EnableRetry": True, "PolicySets": ["Always"]}},
            "PolicySets 'Always' is not one of",
        ),
        ({"RetryOptions": {"Times": 3}}, "field Times not found in type RetryOptions"),
        (
            {"Storages": [{"Type": "Disk", "MountPath": "/data"}]},
            "Storages Type 'Disk' is not one of",
        ),
        (
            {"UserCodePath": "code", "RemoteMountCodePath": "/root/code"},
            "upload code failed: stat code: no such file or directory",
        ),
    ],
)
def test_invalid_task_is_refused_with_reason(
    idle: Platform, tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(
        yaml.safe_dump(
            {key: value for key, value in (conf(SLEEP) | fields).items() if value is not None}
        )
    )
    assert reason in error_of(
        idle.volc("ml_task", "submit", "--conf", str(path), "--output", "json", cwd=tmp_path)
    )
    assert not idle.tasks()


def test_conf_file_with_invalid_yaml_is_refused(idle: Platform, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("TaskName: 'a\n  b: [")
    assert "load config file failed: yaml" in error_of(
        idle.volc("ml_task", "submit", "--conf", "task.yaml", "--output", "json", cwd=tmp_path)
    )


def tree(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    )


def test_upload_honors_gitignore_and_leaves_out_links(volc: Platform, tmp_path: Path) -> None:
    volc.hold("Queue")
    code = tmp_path / "code"
    for name in ("a.py", "skip.log", "kept/keep.log", "kept/b.tmp", "build/out", "kept/build.py"):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_text(name)
    (code / ".gitignore").write_text("*.log\nbuild/\n")
    (code / "kept" / ".gitignore").write_text("!keep.log\n*.tmp\n")
    (code / "link").symlink_to("a.py")
    (code / "folder").symlink_to(tmp_path)
    plain = [".gitignore", "a.py", "kept/.gitignore", "kept/build.py", "kept/keep.log"]

    def uploaded(path: str) -> Path:
        task = volc.submit(tmp_path, SLEEP, UserCodePath=path, RemoteMountCodePath="/root/code")
        return Path(volc.task(task)["code"])

    assert tree(uploaded("code/")) == tree(uploaded("./code/")) == plain
    assert tree(uploaded("code")) == tree(uploaded(str(code))) == [f"code/{name}" for name in plain]
    assert tree(uploaded("code/a.py")) == ["a.py"]


# -- faults ----------------------------------------------------------------------------------------


def test_submit_with_network_failure_may_create_task(volc: Platform, tmp_path: Path) -> None:
    volc.hold("Queue")
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(conf(SLEEP)))
    arguments = ("ml_task", "submit", "--conf", "task.yaml", "--output", "json")
    for how, created in (("before", 0), ("after", 1)):
        volc.break_submit(how)
        assert "Client.Timeout exceeded" in error_of(volc.volc(*arguments, cwd=tmp_path))
        assert len(volc.tasks()) == created
    volc.break_submit("hangs")
    with subprocess.Popen(
        ["volc", *arguments], env=volc.variables, cwd=tmp_path, stdout=subprocess.PIPE
    ) as hanging:
        wait_until(lambda: len(volc.tasks()) == 2, 20, "the task")
        assert hanging.poll() is None
        hanging.kill()
        assert hanging.communicate()[0] == b""
    assert volc.volc(*arguments, cwd=tmp_path).returncode == 0
    assert len(volc.calls("ml_task", "submit")) == 4


def test_broken_calls_fail_given_number_of_times(volc: Platform) -> None:
    volc.break_calls("list", 2)
    codes = [volc.volc("ml_task", "list", "--output", "json").returncode for _ in range(3)]
    assert codes == [1, 1, 0]


def test_held_task_shows_given_reason(volc: Platform, tmp_path: Path) -> None:
    volc.hold("Staging", "ImagePullBackOff: pull access denied")
    task = volc.submit(tmp_path, "true")
    volc.wait(task, "Staging")
    wait_until(lambda: volc.rows("instance", "list", "--id", task)[0]["DiagInfo"], 20, "the reason")
    assert (
        volc.rows("instance", "list", "--id", task)[0]["DiagInfo"]
        == "ImagePullBackOff: pull access denied"
    )
    volc.release()
    volc.wait(task, "Success")
