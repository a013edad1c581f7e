"""The mlp cluster end to end: real agents against a simulated platform.

The nodes share no files with the submitter.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from command_user import CommandUser
from launching import TEST_TIMEOUT
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
OPTIONS = {
    "image": "cr.example.com/train:1", "queue": "train", "flavor": "ml.pni3ln.8xlarge",
    "flavors": "{ml.pni3ln.8xlarge: 2}", "poll": "0.2",
}  # fmt: skip
# By exec, nothing imports torch.
EXEC = ("--start", "exec")
ONE_GPU = {"flavor": "ml.pni3ln.4xlarge", "flavors": "{ml.pni3ln.4xlarge: 1}"}


class User(CommandUser):
    """A user with an account; `options` are those of the cluster."""

    def __init__(self, volc: Platform, *more: Any) -> None:
        super().__init__(*more)
        self.volc = volc
        self.options = OPTIONS
        # The machines have no GPUs.
        for name, value in (volc.variables | {"CLUSTERJOB_REQUIRE_GPUS": "0"}).items():
            self.patch.setenv(name, value)

    @property
    def target(self) -> tuple[str, ...]:
        sets = [("--set", f"{key}={value}") for key, value in self.options.items() if value]
        return ("--cluster", "mlp", *(word for words in sets for word in words))


@pytest.fixture
def user(volc: Platform, new_user: Callable[..., User]) -> User:
    return new_user(volc, User)


def test_two_node_job_returns_output_status_and_exit_code(user: User) -> None:
    text = (
        TRAIN + "if os.environ['RANK'] == '3':\n"
        "    print('x' * 20_000)\n    sys.stdout.write('é ☃, no end of line')\n"
    )
    options = ("--nodes", "2", "--env", 'WORD=it\'s "$HOME"')
    job = user.submit(text, *options, args=("--lr", "a b"))
    user("wait", job)
    shown = user("logs", job)
    for rank in range(4):
        assert f"[{rank}] rank {rank} sums 4 it's \"$HOME\" ['--lr', 'a b']" in shown.stdout
        assert f"[{rank}] to stderr from {rank}" in shown.stderr
    assert user.output(job, "--rank", "3").splitlines() == [
        "[3] rank 3 sums 4 it's \"$HOME\" ['--lr', 'a b']",
        f"[3] {'x' * 20_000}",
        "[3] é ☃, no end of line",
    ]
    assert {line[:3] for line in user.output(job, "--node", "1").splitlines()} == {"[2]", "[3]"}
    status, [task] = user.job(job), user.volc.tasks()
    assert (status["state"], status["exit_code"], status["nodes"], status["backend"]) == (
        "SUCCEEDED",
        0,
        2,
        "mlp",
    )
    assert status["backend_id"] == task.id
    conf = task.conf
    assert (conf["TaskName"], conf["Description"], conf["TaskRoleSpecs"][0]["RoleReplicas"]) == (
        job,
        "script",
        2,
    )
    assert not (user.directory_of(job) / "upload").exists(), "the copy that was sent is not kept"


def test_run_shows_output_and_names_failed_rank(user: User) -> None:
    text = (
        TRAIN + "if os.environ['RANK'] == '2':\n    raise ValueError('boom at step 7')\n"
        "import time; time.sleep(1000)\n"
    )
    ran = user.run(text, "--nodes", "2", code=1)
    assert "rank 0 sums 4" in ran.stdout
    [task] = user.volc.tasks()
    assert "FAILED: rank 2 (node 1, local rank 0, host" in ran.stderr
    assert f"host {task.id}-worker-1)" in ran.stderr
    assert "ValueError: boom at step 7" in ran.stderr
    failure = user.job(task.name)["failure"]
    assert (failure["rank"], failure["node_rank"], failure["message"]) == (
        2,
        1,
        "ValueError: boom at step 7",
    )


def test_secrets_appear_in_no_record_and_no_argument(user: User) -> None:
    text = (
        "import os\n"
        "print('got', os.environ['WANDB_KEY'] == os.environ['EXPECTED'], "
        "len(os.environ.get('CLUSTERJOB_TOKEN', '')))\n"
    )
    user.options = OPTIONS | {"secrets": "WANDB_KEY"}
    words = ("submit", *user.target, *EXEC, "--env", f"EXPECTED={SECRET[::-1]}", user.script(text))
    assert "the secret WANDB_KEY is missing" in user(*words, code=1).stderr
    user.patch.setenv("WANDB_KEY", SECRET)
    dry = user(*words[:1], "--dry-run", *words[1:])
    assert '{"Name": "WANDB_KEY", "IsPrivate": true}' in dry.stdout
    job = user(*words).stdout.strip()
    user("wait", job)
    assert "got False" in user.output(job)
    [task] = user.volc.tasks()
    entries = {entry["Name"]: entry for entry in task.conf["Envs"]}
    assert entries["WANDB_KEY"] == {"Name": "WANDB_KEY", "IsPrivate": True, "Value": SECRET}
    token = entries["CLUSTERJOB_TOKEN"]["Value"]
    assert entries["CLUSTERJOB_TOKEN"]["IsPrivate"]
    assert len(token) == 64
    kept = [path for path in user.home.rglob("*") if path.is_file()]
    assert kept
    for secret in (SECRET, token):
        assert secret not in dry.stdout + dry.stderr + json.dumps(user.volc.calls())
        assert [path for path in kept if secret.encode() in path.read_bytes()] == []


def test_sweep_submits_one_task_per_element(user: User) -> None:
    text = (
        "import os, sys\nprint(sys.argv[1:], os.environ['CLUSTERJOB_ARRAY_INDEX'])\n"
        "sys.exit(3 if '--lr=x y' in sys.argv else 0)\n"
    )
    user.options = OPTIONS | ONE_GPU | {"submit_rate": "20"}
    job = user.submit(text, *EXEC, "--sweep", "lr=0.1,x y")
    user("wait", job, code=3)
    assert sorted(task.name for task in user.volc.tasks()) == [f"{job}_0", f"{job}_1"]
    assert user.output(f"{job}_1").strip() == "['--lr=x y'] 1"
    assert {status["id"]: status["state"] for status in user.jobs(job)} == {
        f"{job}_0": "SUCCEEDED",
        f"{job}_1": "FAILED",
    }


@pytest.mark.slow
def test_retried_task_keeps_log_of_each_attempt(user: User) -> None:
    text = (
        "import os, sys, time\n"
        "print('try', os.environ['MLP_TASK_ID'], flush=True)\n"
        "marker = '/data/tries'\n"
        "count = len(open(marker).read()) if os.path.exists(marker) else 0\n"
        "open(marker, 'a').write('x') if os.environ['RANK'] == '0' else None\n"
        "time.sleep(1)\n"
        "sys.exit(5 if count == 0 else 0)\n"
    )
    storages = "[{Type: Vepfs, MountPath: /data, VepfsId: vepfs-1}]"
    user.options = OPTIONS | ONE_GPU | {"storages": storages, "retry_interval": "1"}
    job = user.submit(text, "--max-restarts", "2")
    user("wait", job)
    first, second = user.volc.tasks(job)
    assert first.conf["RetryOptions"] == {
        "EnableRetry": True,
        "MaxRetryTimes": 2,
        "IntervalSeconds": 1,
        "PolicySets": ["Failed"],
    }
    status = user.job(job)
    assert (status["state"], status["restarts"], status["backend_id"]) == (
        "SUCCEEDED",
        1,
        first.id,
    )
    assert user.output(job).splitlines() == [f"try {first.id}", f"try {second.id}"]
    names = sorted(path.name for path in user.directory_of(job).glob("logs/node0/rank0*.out"))
    assert names == ["rank0.attempt1.out", "rank0.out"]


@pytest.mark.slow
def test_workers_of_reclaimed_task_are_warned_and_requeue(user: User) -> None:
    text = (
        "import time\nfrom clusterjob import bootstrap\n"
        "ctx = bootstrap.init()\nprint('up', flush=True)\n"
        "while not ctx.preempted:\n    time.sleep(0.05)\n"
        "print('saved', flush=True)\nctx.requeue()\n"
    )
    user.volc.kill_grace = 60.0
    more = {"preemptible": "true", "retry_interval": "1000", "kill_grace": "60"}
    user.options = OPTIONS | more
    job = user.submit(text)
    user.wait_for_state(job, "RUNNING")
    [task] = user.volc.tasks()
    user.volc.wait_for_line(task, "up")
    user.volc.reclaim(task)
    pending = user.wait_for_state(job, "PENDING")
    assert "the platform starts it again (attempt 2 of 6); it was preempted" in pending["reason"]
    assert sorted(line for line in user.output(job).splitlines() if "saved" in line) in (
        ["[0-1] saved"],
        ["[0] saved", "[1] saved"],
    )
    user("cancel", job)
    user("wait", job, code=143)


def test_submission_without_answer_makes_one_task(user: User) -> None:
    user.volc.errors = {"submit after": [NO_ANSWER]}
    job = user.submit("print('trained')", *EXEC)
    user("wait", job)
    assert [task.name for task in user.volc.tasks()] == [job]
    assert len(user.volc.calls("ml_task", "submit")) == 1


def test_array_with_unconfirmed_first_element_is_cancelled(user: User) -> None:
    user.volc.errors = {"submit after": [NO_ANSWER], "list": [NO_ANSWER] * 3}
    said = user("submit", *user.target, "--array", "0-1", user.script(SLEEP), code=1).stderr
    assert "it is unknown whether the platform accepted the job" in said
    [task] = user.volc.tasks()
    whole = task.name.removesuffix("_0")
    assert f"`clusterjob status {whole}`" in said
    user.wait_for_state(task.name, "CANCELLED")
    assert "it is being cancelled" in user.job(f"{whole}_1")["reason"]


def test_refused_submission_names_cause_and_leaves_no_files(user: User) -> None:
    user.volc.errors = {"submit": [DENIED]}
    refused = user("submit", *user.target, user.script("pass"), code=1).stderr
    assert "the account has no permission for this" in refused
    assert (user.remaining_files(), user.volc.tasks()) == ([], [])


def test_pending_job_shows_reason_from_platform(user: User) -> None:
    user.volc.held = {"Staging": "Insufficient resources: 2 GPUs wanted, 0 available"}
    job = user.submit("print('trained')")
    [task] = user.volc.tasks(job)
    wait_until(lambda: task.workers[0].diag, TEST_TIMEOUT)
    status = user.job(job)
    assert status["state"] == "PENDING"
    assert "Staging on the platform" in status["reason"]
    assert "Insufficient resources: 2 GPUs wanted" in status["reason"]
    user("cancel", job)


@pytest.mark.slow
def test_ctrl_c_during_array_submission_cancels_submitted_tasks(user: User) -> None:
    user.options = OPTIONS | {"submit_rate": "0.01"}
    process = user.start("submit", *user.target, "--array", "0-5", user.script(SLEEP))
    wait_until(lambda: len(user.volc.tasks()) == 1, TEST_TIMEOUT, "the first element")
    wait_until(
        lambda: len(user.volc.calls("ml_task", "submit")) == 1, TEST_TIMEOUT, "its submission"
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(TEST_TIMEOUT) == 130, user.output_of(process)
    [task] = user.volc.tasks()
    user.volc.wait(task, "Killed")
