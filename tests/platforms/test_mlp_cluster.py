"""The mlp cluster end to end, against a stand-in of the platform: real agents on nodes that share
nothing with the submitter.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import PATIENCE, Run, finish, start
from procs import wait_until
from volc_platform import Platform

TRAIN = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} sums {int(total)} {os.environ.get('WORD', '')} {sys.argv[1:]}", flush=True)
print(f"to stderr from {dist.get_rank()}", file=sys.stderr, flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SECRET = "s3cret of mine"
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(1000)\n"


class User:
    """Somebody with an account, a directory of code, and the command `clusterjob`."""

    def __init__(self, volc: Platform, directory: Path) -> None:
        self.volc = volc
        self.code = directory / "code"
        self.home = directory / "state"
        self.code.mkdir()
        self.options = {
            "image": "cr.example.com/train:1", "queue": "train", "flavor": "ml.pni3ln.8xlarge",
            "flavors": "{ml.pni3ln.8xlarge: 2}", "poll": "0.2",
        }  # fmt: skip
        self.environ = {**volc.variables, "CLUSTERJOB_HOME": str(self.home)}

    def write(self, text: str, name: str = "train.py") -> None:
        (self.code / name).write_text(text)

    def start(self, *words: object, **environ: str):
        return start(
            [sys.executable, "-m", "clusterjob", *words], self.code, self.environ | environ
        )

    def run(self, *words: object, **environ: str) -> Run:
        return finish(self.start(*words, **environ))

    def job(
        self, verb: str, *words: object, environ: Mapping[str, str] | None = None, **options: str
    ) -> Run:
        sets = [
            word
            for key, value in (self.options | options).items()
            if value
            for word in ("--set", f"{key}={value}")
        ]
        return self.run(verb, "--cluster", "mlp", *sets, *words, **(environ or {}))

    def submit(
        self, *words: object, environ: Mapping[str, str] | None = None, **options: str
    ) -> str:
        ran = self.job("submit", *words, environ=environ, **options)
        assert ran.code == 0, ran.err
        return ran.out.strip()

    def status(self, *ids: str) -> list[dict[str, object]]:
        ran = self.run("status", "--json", *ids)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["jobs"]

    def wait_for(self, job_id: str, *states: str) -> dict[str, object]:
        seen: list[dict[str, object]] = []

        def there() -> bool:
            seen[:] = self.status(job_id)
            return seen[0]["state"] in states

        wait_until(there, PATIENCE, f"{job_id}: {' or '.join(states)}")
        return seen[0]


@pytest.fixture
def user(volc: Platform, tmp_path: Path) -> User:
    return User(volc, tmp_path)


def test_two_nodes_train_together_and_all_comes_back(user: User) -> None:
    user.write(TRAIN)
    job = user.submit("--nodes", "2", "--env", 'WORD=it\'s "$HOME"', "train.py", "--lr", "a b")
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    shown = user.run("logs", job)
    for rank in range(4):
        assert f"[{rank}] rank {rank} sums 4 it's \"$HOME\" ['--lr', 'a b']" in shown.out
        assert f"[{rank}] to stderr from {rank}" in shown.err
    assert user.run("logs", job, "--rank", "3").out.splitlines() == [
        "[3] rank 3 sums 4 it's \"$HOME\" ['--lr', 'a b']"
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
    assert status["backend_id"] == task["id"]
    conf = task["conf"]
    assert (conf["TaskName"], conf["Description"], conf["TaskRoleSpecs"][0]["RoleReplicas"]) == (
        job,
        "train",
        2,
    )
    assert not (user.home / "jobs" / job / "upload").exists(), "the copy that was sent is not kept"


def test_run_follows_and_a_failing_rank_is_named(user: User) -> None:
    user.write(
        TRAIN
        + "if os.environ['RANK'] == '2':\n    raise ValueError('boom at step 7')\nimport time; time.sleep(1000)\n"
    )
    ran = user.job("run", "--nodes", "2", "train.py")
    assert ran.code == 1, ran.err
    assert "rank 0 sums 4" in ran.out
    (task,) = user.volc.tasks()
    assert "FAILED: rank 2 (node 1, local rank 0, host" in ran.err
    assert f"host {task['id']}-worker-1)" in ran.err
    assert "ValueError: boom at step 7" in ran.err
    (status,) = user.status(task["name"])
    failure = status["failure"]
    assert (failure["rank"], failure["node_rank"], failure["message"]) == (
        2,
        1,
        "ValueError: boom at step 7",
    )


@pytest.mark.slow
def test_a_running_job_is_followed_and_cancelled(user: User) -> None:
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
    assert task["status"] == "Killed"
    assert user.run("wait", job).code == 143
    assert "had ended already" in user.run("cancel", job).err


def test_secrets_are_in_no_record_and_no_argument(user: User) -> None:
    user.write(
        "import os\nprint('got', os.environ['WANDB_KEY'] == os.environ['EXPECTED'], len(os.environ.get('CLUSTERJOB_TOKEN', '')))\n"
    )
    words = ("--env", f"EXPECTED={SECRET[::-1]}", "train.py")
    dry = user.job(
        "submit", "--dry-run", *words, secrets="WANDB_KEY", environ={"WANDB_KEY": SECRET}
    )
    assert dry.code == 0, dry.err
    assert '{"Name": "WANDB_KEY", "IsPrivate": true}' in dry.out
    job = user.submit(*words, secrets="WANDB_KEY", environ={"WANDB_KEY": SECRET})
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    assert "got False" in user.run("logs", job).out
    (task,) = user.volc.tasks()
    entries = {entry["Name"]: entry for entry in task["conf"]["Envs"]}
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
    assert "the secret WANDB_KEY is not there" in missing.err
    assert len(user.volc.tasks()) == 1


def test_a_sweep_is_a_task_an_element(user: User) -> None:
    user.write(
        "import os, sys\nprint(sys.argv[1:], os.environ['CLUSTERJOB_ARRAY_INDEX'])\nsys.exit(3 if '--lr=x y' in sys.argv else 0)\n"
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
    assert sorted(task["name"] for task in user.volc.tasks()) == [f"{job}_0", f"{job}_1"]
    assert user.run("logs", f"{job}_1").out.strip() == "['--lr=x y'] 1"
    assert {status["id"]: status["state"] for status in user.status(job)} == {
        f"{job}_0": "SUCCEEDED",
        f"{job}_1": "FAILED",
    }


@pytest.mark.slow
def test_a_retried_task_has_numbered_attempts(user: User) -> None:
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
    assert first["conf"]["RetryOptions"] == {
        "EnableRetry": True,
        "MaxRetryTimes": 2,
        "IntervalSeconds": 1,
        "PolicySets": ["Failed"],
    }
    (status,) = user.status(job)
    assert (status["state"], status["restarts"], status["backend_id"]) == (
        "SUCCEEDED",
        1,
        first["id"],
    )
    assert user.run("logs", job).out.splitlines() == [f"try {first['id']}", f"try {second['id']}"]
    names = sorted(
        path.name for path in (user.home / "jobs" / job / "logs" / "node0").glob("rank0*.out")
    )
    assert names == ["rank0.attempt1.out", "rank0.out"]


@pytest.mark.slow
def test_a_reclaimed_task_is_expected_again(user: User) -> None:
    user.write(SLEEP)
    job = user.submit("train.py", preemptible="true", retry_interval="1000")
    user.wait_for(job, "RUNNING")
    (task,) = user.volc.tasks()
    assert task["conf"]["Preemptible"] is True
    assert task["conf"]["RetryOptions"]["PolicySets"] == ["InstanceReclaimed"]
    user.volc.reclaim(task["id"])
    pending = user.wait_for(job, "PENDING")
    assert "the platform starts it again (attempt 2 of 6); it was preempted" in str(
        pending["reason"]
    )
    assert user.run("cancel", job).code == 0
    assert user.run("wait", job).code == 143


@pytest.mark.slow
def test_the_workers_of_a_reclaimed_task_are_warned_and_leave(user: User) -> None:
    user.write(
        "import time\nfrom clusterjob import bootstrap\nctx = bootstrap.init()\nprint('up', flush=True)\n"
        "while not ctx.preempted:\n    time.sleep(0.05)\nprint('saved', flush=True)\nctx.requeue()\n"
    )
    user.volc.set(kill_grace=60)
    job = user.submit("train.py", preemptible="true", retry_interval="1000", kill_grace="60")
    user.wait_for(job, "RUNNING")
    (task,) = user.volc.tasks()
    user.volc.wait_for_line(task["id"], "up")
    user.volc.reclaim(task["id"])
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


@pytest.mark.slow
def test_a_reclaimed_task_runs_again(user: User) -> None:
    user.write(SLEEP)
    job = user.submit("train.py", preemptible="true", retry_interval="1")
    user.wait_for(job, "RUNNING")
    user.volc.reclaim(user.volc.tasks()[0]["id"])
    wait_until(lambda: len(user.volc.tasks(job)) == 2, PATIENCE, "the second attempt")
    second = user.volc.tasks(job)[1]
    user.volc.wait_for_line(second["id"], "up")
    assert user.wait_for(job, "RUNNING")["restarts"] == 1
    assert user.run("cancel", job).code == 0
    assert user.run("wait", job).code == 143
    assert user.volc.task(second["id"])["status"] == "Killed"


@pytest.mark.slow
def test_a_retry_that_comes_after_the_cancel_is_cancelled_too(user: User) -> None:
    user.write("import sys\nsys.exit(5)\n")
    job = user.submit("--max-restarts", "1", "train.py", retry_interval="2")
    wait_until(
        lambda: user.volc.tasks(job)[0]["status"] in ("Running", "Failed"),
        PATIENCE,
        "the first attempt",
    )
    user.volc.hold("Queue")
    wait_until(lambda: user.volc.tasks(job)[0]["status"] == "Failed", PATIENCE, "its end")
    assert user.run("cancel", job).code == 0
    wait_until(lambda: len(user.volc.tasks(job)) == 2, PATIENCE, "the second attempt")
    user.wait_for(job, "CANCELLED")
    assert [task["status"] for task in user.volc.tasks(job)] == ["Failed", "Killed"]


@pytest.mark.parametrize("how", ["after", pytest.param("hangs", marks=pytest.mark.slow)])
def test_a_submission_in_doubt_makes_one_task(user: User, how: str) -> None:
    user.write("print('trained')\n")
    user.volc.break_submit(how)
    job = user.submit("train.py", submit_timeout="5" if how == "hangs" else "")
    assert user.run("wait", job).code == 0
    assert [task["name"] for task in user.volc.tasks()] == [job]
    assert len(user.volc.calls("ml_task", "submit")) == 1


@pytest.mark.slow
def test_a_submission_that_nobody_can_see_stays_in_doubt_and_is_found_later(user: User) -> None:
    user.write("print('trained')\n")
    user.volc.set(breaks={"submit after": 1, "list": 100})
    ran = user.job("submit", "train.py")
    assert ran.code == 1
    assert "nobody knows whether the platform has taken the job" in ran.err
    user.volc.set(breaks={"list": 0})
    (task,) = user.volc.tasks()
    assert user.run("wait", task["name"]).code == 0
    assert user.status(task["name"])[0]["backend_id"] == task["id"]


def test_an_array_whose_first_element_is_in_doubt_is_no_array(user: User) -> None:
    user.write(SLEEP)
    user.volc.set(breaks={"submit after": 1, "list": 3})
    ran = user.job("submit", "--array", "0-1", "train.py")
    assert ran.code == 1
    (task,) = user.volc.tasks()
    whole = task["name"].removesuffix("_0")
    assert f"`clusterjob status {whole}`" in ran.err
    user.wait_for(task["name"], "CANCELLED")
    assert "it is being cancelled" in str(user.status(f"{whole}_1")[0]["reason"])


def test_a_submission_that_did_not_get_there_leaves_nothing(user: User) -> None:
    user.write("print('trained')\n")
    user.volc.set(queues={"q-1": "other"})
    ran = user.job("submit", "train.py")
    assert ran.code == 1
    assert "the platform does not know the queue" in ran.err
    assert "--set queue=NAME" in ran.err
    assert list((user.home / "jobs").iterdir()) == list((user.home / "records").iterdir()) == []


def test_wrong_situations_are_told_in_words(user: User, tmp_path: Path) -> None:
    user.write("print('trained')\n")
    bin_ = str(user.volc.bin)
    bare = os.environ["PATH"]

    def told(
        words: str, *more: str, environ: Mapping[str, str] | None = None, **options: str
    ) -> None:
        ran = user.job("submit", *more, "train.py", environ=environ, **options)
        assert ran.code in (1, 2), ran
        assert words in ran.err, ran.err
        assert "Traceback" not in ran.err
        assert list(user.home.glob("records/*.json")) == list(user.home.glob("jobs/*")) == []

    told("the platform's command volc is not installed", environ={"PATH": bare})
    (user.volc.home / ".volc" / "bin").symlink_to(bin_)
    told("which is not on PATH", environ={"PATH": bare})
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "volc").symlink_to(f"{bin_}/volc")
    told(
        "volc does not find its sibling mlp",
        environ={"PATH": f"{tmp_path / 'half'}{os.pathsep}{bare}"},
    )
    (user.volc.home / ".volc" / "bin").unlink()
    user.volc.logout()
    told("nobody is logged in to the platform")
    user.volc.login(sk="wrong")
    told("the platform does not accept the keys")
    user.volc.login()
    user.volc.deny("CreateJob")
    told("the account has no permission for this")
    user.volc.allow()
    told("the platform does not know the queue", queue="nowhere")
    told("the queue has no such flavor", flavor="ml.nowhere", flavors="")
    told("no flavor has 4 GPUs", "--gpus-per-node", "4", flavor="")
    told("has 2 GPUs, and --gpus-per-node asks for 8", "--gpus-per-node", "8")
    told("the platform takes no task without image", image="")
    told("did you mean flavor?", flavour="x")
    assert user.volc.tasks() == []


def test_a_task_that_is_stuck_says_why(user: User) -> None:
    user.write("print('trained')\n")
    for state in ("Queue", "Staging"):
        user.volc.hold(state, "Insufficient resources: 2 GPUs wanted, 0 available")
        job = user.submit("train.py")
        task = user.volc.tasks(job)[-1]
        user.volc.wait(task["id"], state)
        wait_until(lambda task=task: user.volc.task(task["id"])["instances"][0]["diag"], PATIENCE)
        (status,) = user.status(job)
        assert status["state"] == "PENDING"
        assert f"{state} on the platform" in status["reason"]
        assert "Insufficient resources: 2 GPUs wanted" in status["reason"]
        assert user.run("cancel", job).code == 0


@pytest.mark.slow
def test_a_platform_that_does_not_answer_is_no_end(user: User) -> None:
    user.write(SLEEP)
    job = user.submit("train.py")
    user.wait_for(job, "RUNNING")
    user.volc.break_calls("list", 1)
    (status,) = user.status(job)
    assert (status["state"], status["exit_code"]) == ("UNKNOWN", None)
    assert "does not answer" in status["reason"]
    assert user.status(job)[0]["state"] == "RUNNING"
    user.volc.break_calls("list", 1)
    waiting = user.start("wait", job)
    assert waiting.stderr is not None
    said = waiting.stderr.readline()
    assert said.startswith(f"clusterjob: job {job}: ")
    assert "does not answer" in said
    assert user.run("cancel", job).code == 0
    assert finish(waiting).code == 143


@pytest.mark.slow
def test_ctrl_c_while_a_sweep_is_submitted_cancels_what_was_taken(user: User) -> None:
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
    wait_until(lambda: len(user.volc.tasks()) == 1, PATIENCE, "the first element")
    wait_until(lambda: len(user.volc.calls("ml_task", "submit")) == 1, PATIENCE, "its submission")
    process.send_signal(signal.SIGINT)
    ran = finish(process)
    assert ran.code == 130, ran.err
    (task,) = user.volc.tasks()
    user.volc.wait(task["id"], "Killed")


@pytest.mark.slow
def test_many_jobs_are_one_question(user: User) -> None:
    user.write("print('trained')\n")
    user.volc.hold("Queue")
    first = user.submit("--array", "0-19", "train.py", submit_rate="100")
    for _ in range(4):
        user.submit("train.py")
    before = len(user.volc.calls("ml_task", "list"))
    assert len(user.status()) == 24
    assert len(user.volc.calls("ml_task", "list")) - before <= 3
    assert user.run("cancel", first).code == 0


@pytest.mark.slow
def test_code_that_lies_there_already_is_not_sent(user: User) -> None:
    job = user.submit(
        "--no-sync",
        "--nproc-per-node",
        "1",
        "--",
        "bash",
        "-c",
        "pwd; ls -A /root/code",
        workdir="/usr/share",
    )
    waited = user.run("wait", job)
    assert waited.code == 0, waited.err
    assert user.run("logs", job).out.splitlines() == ["/usr/share", "clusterjob-entry"]


@pytest.mark.slow
def test_a_long_log_that_lags_comes_back_whole(user: User) -> None:
    user.write("for number in range(3000):\n    print('line', number)\n")
    user.volc.lag_logs(1.0)
    job = user.submit("--nproc-per-node", "1", "train.py")
    assert user.run("wait", job).code == 0
    assert user.run("logs", job).out.splitlines() == [f"line {number}" for number in range(3000)]


@pytest.mark.slow
def test_a_node_that_cannot_start_is_named(user: User) -> None:
    user.write("print('trained')\n")
    job = user.submit(
        "--nodes", "2", "--setup", '[ "$MLP_ROLE_INDEX" = 0 ]', "--join-timeout", "60", "train.py"
    )
    waited = user.run("wait", job)
    assert waited.code != 0
    assert "node 1" in waited.err
    assert "a setup line failed" in waited.err
