"""The simulated platform behaves as documented for the real platform."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

from namespaces import Machine
from procs import all_pids, command_line, wait_until
from volc_platform import Platform, platform

SLEEP = "echo up; exec sleep 1000"


# -- workers ---------------------------------------------------------------------------------------


def test_worker_gets_documented_variables_and_task_variables_only(
    volc: Platform, tmp_path: Path
) -> None:
    envs = [
        {"Name": "WORD", "Value": "it's $HOME\nso"},
        {"Name": "SECRET", "Value": "s3cret", "IsPrivate": True},
    ]
    python = (
        f'{sys.executable} -S -c "import json, os, socket; '
        'print(json.dumps([dict(os.environ), os.getcwd(), socket.gethostname()]))"'
    )
    task = volc.submit(tmp_path, python, workers=2, Envs=envs)
    instances = volc.wait(task, "Success")["instances"]
    reports = [json.loads(instance["lines"][0]) for instance in instances]
    for index, (environ, cwd, hostname) in enumerate(reports):
        assert (cwd, hostname) == ("/", f"{task}-worker-{index}")
        assert (environ["MLP_TASK_ID"], environ["MLP_ROLE"], environ["MLP_ROLE_INDEX"]) == (
            task,
            "WORKER",
            str(index),
        )
        assert (environ["MLP_WORKER_NUM"], environ["MLP_WORKER_GPU"], environ["WORD"]) == (
            "2",
            "2",
            "it's $HOME\nso",
        )
        assert (environ["HOME"], environ["SECRET"]) == ("/root", "s3cret")
        assert (
            environ["MLP_WORKER_ALL_HOSTS"].split(",")[index]
            == environ["MLP_HOST"]
            == environ[f"MLP_WORKER_{index}_HOST"]
        )
        others = [name for name in environ if not name.startswith("MLP_")]
        assert sorted(others) == sorted(
            [
                "HOME",
                "HOSTNAME",
                "PATH",
                "WORD",
                "SECRET",
                *(name for name in others if name in ("_", "PWD", "SHLVL", "LC_CTYPE")),
            ]
        )
    assert reports[0][0]["MLP_WORKER_0_PORT"] == reports[1][0]["MLP_WORKER_0_PORT"]
    assert reports[0][0]["MLP_HOST"] != reports[1][0]["MLP_HOST"]


def test_workers_of_task_reach_each_other(volc: Platform, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "talk.py").write_text(
        "import os, socket, time\n"
        "place = os.environ['MLP_WORKER_0_HOST'], int(os.environ['MLP_WORKER_0_PORT'])\n"
        "if os.environ['MLP_ROLE_INDEX'] == '0':\n"
        "    with socket.create_server(place) as server:\n"
        "        print(server.accept()[0].makefile().readline().strip())\n"
        "else:\n"
        "    while True:\n"
        "        try:\n"
        "            host = os.environ['MLP_HOST'].encode()\n"
        "            socket.create_connection(place).sendall(b'from ' + host + b'\\n')\n"
        "            break\n"
        "        except ConnectionRefusedError:\n"
        "            time.sleep(0.05)\n"
    )
    entry = f"{sys.executable} -S /root/code/talk.py"
    task = volc.submit(
        tmp_path, entry, workers=2, UserCodePath="code/", RemoteMountCodePath="/root/code"
    )
    ended = volc.wait(task, "Success")
    assert ended["instances"][0]["lines"] == ["from 10.77.0.2"]


def test_entry_command_is_run_by_bash_with_arguments_appended(
    volc: Platform, tmp_path: Path
) -> None:
    task = volc.submit(
        tmp_path, "for word in", Args='a "b c" $MLP_ROLE; do echo "[$word]"; done; echo wrong >&2'
    )
    assert volc.wait(task, "Success")["instances"][0]["lines"] == [
        "[a]",
        "[b c]",
        "[WORKER]",
        "wrong",
    ]


def test_each_worker_has_its_own_files_and_shared_storage(volc: Platform, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a").write_text("as uploaded\n")
    entry = (
        'cat /root/code/a; ls -A /root /tmp; echo "mine $MLP_ROLE_INDEX" > /root/code/a; '
        "touch /tmp/left /root/left /data/$MLP_ROLE_INDEX"
    )
    mounts = [{"Type": "Vepfs", "MountPath": "/data", "VepfsId": "vepfs-1"}]
    for _ in range(2):
        task = volc.submit(
            tmp_path,
            entry,
            workers=2,
            UserCodePath="code/",
            RemoteMountCodePath="/root/code/",
            Storages=mounts,
        )
        for instance in volc.wait(task, "Success")["instances"]:
            content, _, *listed = instance["lines"]
            image = {
                part
                for place in (sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))
                for part in place.split("/")[2:3]
            }
            assert content == "as uploaded"
            assert set(listed) - image == {"code", "", "/tmp:"}, (
                "but for the interpreter, where it lies in there"
            )
        assert [(volc.code(task, worker) / "a").read_text() for worker in (0, 1)] == [
            "mine 0\n",
            "mine 1\n",
        ]
    assert (tmp_path / "code" / "a").read_text() == "as uploaded\n"
    assert not Path("/data").exists()
    task = volc.submit(tmp_path, "ls /data", Storages=mounts)
    # The storage outlives its tasks.
    assert volc.wait(task, "Success")["instances"][0]["lines"] == ["0", "1"]


def test_code_mount_path_missing_in_image_fails_task(volc: Platform, tmp_path: Path) -> None:
    task = volc.submit(
        tmp_path, "true", UserCodePath="task.yaml", RemoteMountCodePath="/usr/not/there"
    )
    ended = volc.wait(task, "Exception")
    assert "mount path /usr/not/there is not in the image" in ended["instances"][0]["diag"]
    assert not Path("/usr/not").exists()


# -- end of a task ---------------------------------------------------------------------------------


def test_failed_worker_fails_task_and_kills_other_workers(volc: Platform, tmp_path: Path) -> None:
    volc.set(failure_grace=0.2)
    task = volc.submit(
        tmp_path, 'if [ "$MLP_ROLE_INDEX" = 1 ]; then echo dying; exit 7; fi; sleep 1000', workers=2
    )
    volc.wait(task, "Failed")
    first, second = volc.rows("instance", "list", "--id", task)
    assert (second["Name"], second["State"], second["ExitCode"]) == ("worker_1", "Failed", 7)
    assert (first["Name"], first["State"]) == ("worker_0", "Killed")


def test_cancel_ends_all_processes_of_worker(volc: Platform, tmp_path: Path) -> None:
    marker = f"10{os.getpid()}"  # a duration that no other sleep has
    script = (
        f"trap 'echo terminated' TERM; setsid sleep {marker} & "
        f"(trap '' TERM; sleep {marker}) & echo up; while :; do wait; done"
    )
    task = volc.submit(tmp_path, script)
    volc.wait_for_line(task, "up")
    wait_until(
        lambda: sum(marker in command_line(pid).split() for pid in all_pids()) >= 2,
        20,
        "both sleep",
    )
    # The shell has time to print; the sleep that ignores SIGTERM is killed afterwards.
    volc.set(kill_grace=5.0)
    done = volc.volc("ml_task", "cancel", "--id", task)
    assert (done.returncode, done.stdout) == (0, "cancel success\n")
    volc.wait_for_line(task, "terminated")
    ended = volc.wait(task, "Killed")
    assert "terminated" in ended["instances"][0]["lines"]
    assert not [pid for pid in all_pids() if marker in command_line(pid).split()]
    again = volc.volc("ml_task", "cancel", "--id", task)
    assert (again.returncode, "it can not be canceled" in again.stderr) == (1, True)


def test_task_is_killed_after_active_deadline(volc: Platform, tmp_path: Path) -> None:
    task = volc.submit(tmp_path, SLEEP, ActiveDeadlineSeconds=1)
    assert "DeadlineExceeded" in volc.wait(task, "Killed")["instances"][0]["diag"]


def test_retry_is_new_task_with_same_name(volc: Platform, tmp_path: Path) -> None:
    retry = {
        "EnableRetry": True,
        "MaxRetryTimes": 2,
        "IntervalSeconds": 1,
        "PolicySets": ["Failed"],
    }
    volc.submit(tmp_path, "exit 3", RetryOptions=retry)
    wait_until(
        lambda: [task["status"] for task in volc.tasks("a task")] == ["Failed"] * 3,
        60,
        "three attempts",
    )
    attempts = volc.tasks("a task")
    assert len({task["id"] for task in attempts}) == 3
    for before, after in itertools.pairwise(attempts):
        assert after["created"] - before["finished"] >= 1


def test_cancelled_task_is_not_retried(volc: Platform, tmp_path: Path) -> None:
    retry = {
        "EnableRetry": True,
        "MaxRetryTimes": 5,
        "IntervalSeconds": 0,
        "PolicySets": ["Failed", "InstanceReclaimed"],
    }
    task = volc.submit(tmp_path, SLEEP, RetryOptions=retry)
    volc.wait_for_line(task, "up")
    volc.volc("ml_task", "cancel", "--id", task)
    volc.wait(task, "Killed")
    other = volc.submit(tmp_path, "true")  # time for the service to check all tasks
    volc.wait(other, "Success")
    assert len(volc.tasks()) == 2


def test_reclaimed_task_is_killed_and_queued_again(volc: Platform, tmp_path: Path) -> None:
    task = volc.submit(tmp_path, SLEEP, Preemptible=True)
    volc.wait_for_line(task, "up")
    volc.hold("Queue", "waiting for idle resources")
    volc.reclaim(task)
    assert "InstanceReclaimed" in volc.wait(task, "Killed")["instances"][0]["diag"]
    wait_until(lambda: len(volc.tasks("a task")) == 2, 20, "its copy")
    copy = volc.tasks("a task")[1]
    wait_until(lambda: volc.task(copy["id"])["status"] == "Queue", 20, "it is queued")
    wait_until(
        lambda: (
            volc.rows("instance", "list", "--id", copy["id"])[0]["DiagInfo"]
            == "waiting for idle resources"
        ),
        20,
    )
    volc.release()
    volc.wait_for_line(copy["id"], "up")


def test_task_waits_until_enough_machines_are_free(volc: Platform, tmp_path: Path) -> None:
    first = volc.submit(tmp_path, SLEEP, workers=3)
    second = volc.submit(tmp_path, "true", workers=2)
    volc.wait_for_line(first, "up")
    wait_until(
        lambda: "Insufficient" in volc.rows("instance", "list", "--id", second)[0]["DiagInfo"],
        20,
        "the reason",
    )
    assert volc.task(second)["status"] == "Queue"
    volc.volc("ml_task", "cancel", "--id", first)
    volc.wait(second, "Success")
    assert volc.task(first)["status"] == "Killed"


def test_no_process_mount_or_file_outlives_platform(
    tmp_path: Path, volc_machines: list[Machine]
) -> None:
    marker = f"20{os.getpid()}"
    with platform(tmp_path, volc_machines) as volc:
        task = volc.submit(
            tmp_path,
            f"trap '' TERM; echo up; setsid sleep {marker} & sleep {marker}; sleep {marker}",
            workers=2,
        )
        for worker in (0, 1):
            volc.wait_for_line(task, "up", worker)
        wait_until(
            lambda: any(marker in command_line(pid).split() for pid in all_pids()), 20, "it sleeps"
        )
    assert not [pid for pid in all_pids() if marker in command_line(pid).split()]
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert sorted(os.listdir(tmp_path)) == ["task.yaml"]


def test_workers_end_when_service_is_killed(tmp_path: Path, volc_machines: list[Machine]) -> None:
    marker = f"30{os.getpid()}"
    with platform(tmp_path, volc_machines) as volc:
        task = volc.submit(tmp_path, f"echo up; sleep {marker}")
        volc.wait_for_line(task, "up")
        volc._service.kill()
        wait_until(
            lambda: not [pid for pid in all_pids() if marker in command_line(pid)],
            20,
            "all are gone",
        )
