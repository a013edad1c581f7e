"""The mlp cluster end to end: real agents against a simulated platform.

The nodes share no files with the submitter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import TEST_TIMEOUT, Run, finish, start
from procs import wait_until
from volc_platform import DENIED, NO_ANSWER, Platform

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
word = os.environ.get("WORD", "")
print(f"rank {dist.get_rank()} sums {int(total)} {word} {sys.argv[1:]}", flush=True)
print(f"to stderr from {dist.get_rank()}", file=sys.stderr, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SECRET = "s3cret of mine"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"


class User:
    """A user with an account, a code directory and the command `clusterjob`."""

    def __init__(self, volc: Platform, directory: Path) -> None:
        self.volc = volc
        self.code = directory / "code"
        self.home = directory / "state"
        self.code.mkdir()
        self.options = {
            "image": "cr.example.com/train:1", "queue": "train", "flavor": "ml.pni3ln.8xlarge",
            "flavors": "{ml.pni3ln.8xlarge: 2}", "poll": "0.2",
        }  # fmt: skip
        self.environ = {
            **volc.variables,
            "CLUSTERJOB_HOME": str(self.home),
            "CLUSTERJOB_REQUIRE_GPUS": "0",  # the machines have none
        }

    def write(self, text: str, name: str = "train.py") -> None:
        (self.code / name).write_text(text)

    def start(self, *arguments: object, **environ: str):
        return start(
            [sys.executable, "-m", "clusterjob", *arguments], self.code, self.environ | environ
        )

    def run(self, *arguments: object, **environ: str) -> Run:
        return finish(self.start(*arguments, **environ))

    def job(
        self,
        verb: str,
        *arguments: object,
        environ: Mapping[str, str] | None = None,
        **options: str,
    ) -> Run:
        sets = [
            argument
            for key, value in (self.options | options).items()
            if value
            for argument in ("--set", f"{key}={value}")
        ]
        return self.run(verb, "--cluster", "mlp", *sets, *arguments, **(environ or {}))

    def submit(
        self, *arguments: object, environ: Mapping[str, str] | None = None, **options: str
    ) -> str:
        ran = self.job("submit", *arguments, environ=environ, **options)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    def status(self, *ids: str) -> list[dict[str, object]]:
        ran = self.run("status", "--json", *ids)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["jobs"]

    def wait_for(self, job_id: str, *states: str) -> dict[str, object]:
        seen: list[dict[str, object]] = []

        def reached() -> bool:
            seen[:] = self.status(job_id)
            return seen[0]["state"] in states

        wait_until(reached, TEST_TIMEOUT, f"{job_id}: {' or '.join(states)}")
        return seen[0]


@pytest.fixture
def user(volc: Platform, tmp_path: Path) -> User:
    return User(volc, tmp_path)


def test_two_node_job_returns_output_status_and_exit_code(user: User) -> None:
    user.write(
        TRAIN + "if os.environ['RANK'] == '3':\n"
        "    print('x' * 20_000)\n    sys.stdout.write('é ☃, no end of line')\n"
    )
    job = user.submit("--nodes", "2", "--env", 'WORD=it\'s "$HOME"', "train.py", "--lr", "a b")
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    shown = user.run("logs", job)
    for rank in range(4):
        assert f"[{rank}] rank {rank} sums 4 it's \"$HOME\" ['--lr', 'a b']" in shown.out
        assert f"[{rank}] to stderr from {rank}" in shown.err
    assert user.run("logs", job, "--rank", "3").out.splitlines() == [
        "[3] rank 3 sums 4 it's \"$HOME\" ['--lr', 'a b']",
        f"[3] {'x' * 20_000}",
        "[3] é ☃, no end of line",
    ]
    assert {line[:3] for line in user.run("logs", job, "--node", "1").out.splitlines()} == {
        "[2]",
        "[3]",
    }
    (status,) = user.status(job)
    assert (status["state"], status["exit_code"], status["nodes"], status["backend"]) == (
        "SUCCEEDED",
        0,
        2,
        "mlp",
    )
    (task,) = user.volc.tasks()
    assert status["backend_id"] == task.id
    conf = task.conf
    assert (conf["TaskName"], conf["Description"], conf["TaskRoleSpecs"][0]["RoleReplicas"]) == (
        job,
        "train",
        2,
    )
    assert not (user.home / "jobs" / job / "upload").exists(), "the copy that was sent is not kept"


def test_run_shows_output_and_names_failed_rank(user: User) -> None:
    user.write(
        TRAIN + "if os.environ['RANK'] == '2':\n    raise ValueError('boom at step 7')\n"
        "import time; time.sleep(1000)\n"
    )
    ran = user.job("run", "--nodes", "2", "train.py")
    assert ran.code == 1, ran.err
    assert "rank 0 sums 4" in ran.out
    (task,) = user.volc.tasks()
    assert "FAILED: rank 2 (node 1, local rank 0, host" in ran.err
    assert f"host {task.id}-worker-1)" in ran.err
    assert "ValueError: boom at step 7" in ran.err
    (status,) = user.status(task.name)
    failure = status["failure"]
    assert (failure["rank"], failure["node_rank"], failure["message"]) == (
        2,
        1,
        "ValueError: boom at step 7",
    )


@pytest.mark.slow
def test_running_job_can_be_followed_and_cancelled(user: User) -> None:
    user.write(SLEEP)
    job = user.submit("--nodes", "2", "train.py")
    assert user.wait_for(job, "RUNNING")["started_at"] is not None
    following = user.start("logs", "-f", job)
    assert following.stdout is not None
    line = following.stdout.readline()
    assert "up" in line
    cancelled = user.run("cancel", job)
    assert cancelled.code == 0, cancelled.err
    followed = finish(following)
    assert followed.code == 143, followed.err
    assert "CANCELLED" in followed.err
    (task,) = user.volc.tasks()
    assert task.status == "Killed"
    assert user.run("wait", job).code == 143
    assert "had ended already" in user.run("cancel", job).err


def test_secrets_appear_in_no_record_and_no_argument(user: User) -> None:
    user.write(
        "import os\n"
        "print('got', os.environ['WANDB_KEY'] == os.environ['EXPECTED'], "
        "len(os.environ.get('CLUSTERJOB_TOKEN', '')))\n"
    )
    arguments = ("--env", f"EXPECTED={SECRET[::-1]}", "train.py")
    dry = user.job(
        "submit", "--dry-run", *arguments, secrets="WANDB_KEY", environ={"WANDB_KEY": SECRET}
    )
    assert dry.code == 0, dry.err
    assert '{"Name": "WANDB_KEY", "IsPrivate": true}' in dry.out
    job = user.submit(*arguments, secrets="WANDB_KEY", environ={"WANDB_KEY": SECRET})
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    assert "got False" in user.run("logs", job).out
    (task,) = user.volc.tasks()
    entries = {entry["Name"]: entry for entry in task.conf["Envs"]}
    assert entries["WANDB_KEY"] == {"Name": "WANDB_KEY", "IsPrivate": True, "Value": SECRET}
    token = entries["CLUSTERJOB_TOKEN"]["Value"]
    assert entries["CLUSTERJOB_TOKEN"]["IsPrivate"]
    assert len(token) == 64
    kept = [path for path in user.home.rglob("*") if path.is_file()]
    assert kept
    for secret in (SECRET, token):
        assert secret not in dry.out + dry.err + json.dumps(user.volc.calls())
        assert [path for path in kept if secret.encode() in path.read_bytes()] == []
    missing = user.job("submit", "train.py", secrets="WANDB_KEY")
    assert missing.code == 1
    assert "the secret WANDB_KEY is missing" in missing.err
    assert len(user.volc.tasks()) == 1


def test_sweep_submits_one_task_per_element(user: User) -> None:
    user.write(
        "import os, sys\nprint(sys.argv[1:], os.environ['CLUSTERJOB_ARRAY_INDEX'])\n"
        "sys.exit(3 if '--lr=x y' in sys.argv else 0)\n"
    )
    job = user.submit(
        "--sweep",
        "lr=0.1,x y",
        "train.py",
        submit_rate="20",
        flavor="ml.pni3ln.4xlarge",
        flavors="{ml.pni3ln.4xlarge: 1}",
    )
    waited = user.run("wait", job)
    assert waited.code == 3, waited.err
    assert sorted(task.name for task in user.volc.tasks()) == [f"{job}_0", f"{job}_1"]
    assert user.run("logs", f"{job}_1").out.strip() == "['--lr=x y'] 1"
    assert {status["id"]: status["state"] for status in user.status(job)} == {
        f"{job}_0": "SUCCEEDED",
        f"{job}_1": "FAILED",
    }


@pytest.mark.slow
def test_retried_task_keeps_log_of_each_attempt(user: User) -> None:
    user.write(
        "import os, sys, time\n"
        "print('try', os.environ['MLP_TASK_ID'], flush=True)\n"
        "marker = '/data/tries'\n"
        "count = len(open(marker).read()) if os.path.exists(marker) else 0\n"
        "open(marker, 'a').write('x') if os.environ['RANK'] == '0' else None\n"
        "time.sleep(1)\n"
        "sys.exit(5 if count == 0 else 0)\n"
    )
    storages = "[{Type: Vepfs, MountPath: /data, VepfsId: vepfs-1}]"
    one = {"flavor": "ml.pni3ln.4xlarge", "flavors": "{ml.pni3ln.4xlarge: 1}"}
    job = user.submit(
        "--max-restarts", "2", "train.py", storages=storages, retry_interval="1", **one
    )
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    first, second = user.volc.tasks(job)
    assert first.conf["RetryOptions"] == {
        "EnableRetry": True,
        "MaxRetryTimes": 2,
        "IntervalSeconds": 1,
        "PolicySets": ["Failed"],
    }
    (status,) = user.status(job)
    assert (status["state"], status["restarts"], status["backend_id"]) == (
        "SUCCEEDED",
        1,
        first.id,
    )
    assert user.run("logs", job).out.splitlines() == [f"try {first.id}", f"try {second.id}"]
    names = sorted(
        path.name for path in (user.home / "jobs" / job / "logs" / "node0").glob("rank0*.out")
    )
    assert names == ["rank0.attempt1.out", "rank0.out"]


@pytest.mark.slow
def test_workers_of_reclaimed_task_are_warned_and_requeue(user: User) -> None:
    user.write(
        "import time\nfrom clusterjob import bootstrap\n"
        "ctx = bootstrap.init()\nprint('up', flush=True)\n"
        "while not ctx.preempted:\n    time.sleep(0.05)\n"
        "print('saved', flush=True)\nctx.requeue()\n"
    )
    user.volc.kill_grace = 60.0
    job = user.submit("train.py", preemptible="true", retry_interval="1000", kill_grace="60")
    user.wait_for(job, "RUNNING")
    (task,) = user.volc.tasks()
    user.volc.wait_for_line(task, "up")
    user.volc.reclaim(task)
    pending = user.wait_for(job, "PENDING")
    assert "the platform starts it again (attempt 2 of 6); it was preempted" in str(
        pending["reason"]
    )
    out = user.run("logs", job).out.splitlines()
    assert sorted(line for line in out if "saved" in line) in (
        ["[0-1] saved"],
        ["[0] saved", "[1] saved"],
    )
    assert user.run("cancel", job).code == 0
    assert user.run("wait", job).code == 143


def test_submission_without_answer_makes_one_task(user: User) -> None:
    user.write("print('trained')\n")
    user.volc.errors = {"submit after": [NO_ANSWER]}
    job = user.submit("train.py")
    assert user.run("wait", job).code == 0
    assert [task.name for task in user.volc.tasks()] == [job]
    assert len(user.volc.calls("ml_task", "submit")) == 1


def test_array_with_unconfirmed_first_element_is_cancelled(user: User) -> None:
    user.write(SLEEP)
    user.volc.errors = {"submit after": [NO_ANSWER], "list": [NO_ANSWER] * 3}
    ran = user.job("submit", "--array", "0-1", "train.py")
    assert ran.code == 1
    assert "it is unknown whether the platform accepted the job" in ran.err
    (task,) = user.volc.tasks()
    whole = task.name.removesuffix("_0")
    assert f"`clusterjob status {whole}`" in ran.err
    user.wait_for(task.name, "CANCELLED")
    assert "it is being cancelled" in str(user.status(f"{whole}_1")[0]["reason"])


def test_submission_errors_name_cause_and_leave_no_files(user: User, tmp_path: Path) -> None:
    user.write("print('trained')\n")
    bin_ = str(user.volc.bin)
    bare = os.environ["PATH"]

    def expect_error(
        message: str, *arguments: str, environ: Mapping[str, str] | None = None, **options: str
    ) -> None:
        ran = user.job("submit", *arguments, "train.py", environ=environ, **options)
        assert ran.code in (1, 2), ran
        assert message in ran.err, ran.err
        assert "Traceback" not in ran.err
        assert list(user.home.glob("records/*.json")) == list(user.home.glob("jobs/*")) == []

    expect_error("the platform's command volc is not installed", environ={"PATH": bare})
    (user.volc.home / ".volc" / "bin").symlink_to(bin_)
    expect_error("which is not on PATH", environ={"PATH": bare})
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "volc").symlink_to(f"{bin_}/volc")
    expect_error(
        "volc does not find its sibling mlp",
        environ={"PATH": f"{tmp_path / 'half'}{os.pathsep}{bare}"},
    )
    (user.volc.home / ".volc" / "bin").unlink()
    user.volc.logout()
    expect_error("not logged in to the platform")
    user.volc.login(sk="wrong")
    expect_error("the platform does not accept the keys")
    user.volc.login()
    user.volc.errors = {"submit": [DENIED]}
    expect_error("the account has no permission for this")
    expect_error("the platform does not know the queue", queue="nowhere")
    expect_error("the queue has no such flavor", flavor="ml.nowhere", flavors="")
    expect_error("no flavor has 4 GPUs", "--gpus-per-node", "4", flavor="")
    expect_error("has 2 GPUs, and --gpus-per-node asks for 8", "--gpus-per-node", "8")
    expect_error("the platform takes no task without image", image="")
    expect_error("did you mean flavor?", flavour="x")
    assert user.volc.tasks() == []


def test_pending_job_shows_reason_from_platform(user: User) -> None:
    user.write("print('trained')\n")
    user.volc.held = {"Staging": "Insufficient resources: 2 GPUs wanted, 0 available"}
    job = user.submit("train.py")
    (task,) = user.volc.tasks(job)
    wait_until(lambda: task.workers[0].diag, TEST_TIMEOUT)
    (status,) = user.status(job)
    assert status["state"] == "PENDING"
    assert "Staging on the platform" in status["reason"]
    assert "Insufficient resources: 2 GPUs wanted" in status["reason"]
    assert user.run("cancel", job).code == 0


def test_node_with_failed_setup_line_is_named(user: User) -> None:
    user.write("print('trained')\n")
    job = user.submit(
        "--nodes", "2", "--setup", '[ "$MLP_ROLE_INDEX" = 0 ]', "--join-timeout", "60", "train.py"
    )
    waited = user.run("wait", job)
    assert waited.code != 0
    assert "node 1" in waited.err
    assert "a setup line failed" in waited.err


@pytest.mark.slow
def test_ctrl_c_during_array_submission_cancels_submitted_tasks(user: User) -> None:
    user.write(SLEEP)
    sets = [word for key, value in user.options.items() for word in ("--set", f"{key}={value}")]
    process = user.start(
        "submit",
        "--cluster",
        "mlp",
        *sets,
        "--set",
        "submit_rate=0.01",
        "--array",
        "0-5",
        "train.py",
    )
    wait_until(lambda: len(user.volc.tasks()) == 1, TEST_TIMEOUT, "the first element")
    wait_until(
        lambda: len(user.volc.calls("ml_task", "submit")) == 1, TEST_TIMEOUT, "its submission"
    )
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert ran.code == 130, ran.err
    (task,) = user.volc.tasks()
    user.volc.wait(task, "Killed")
