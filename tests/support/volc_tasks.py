"""Tasks of the simulated platform: their states, workers and retries.

The states, RetryOptions and preemption follow the documentation page "命令行工具" (command line
tool). The variables of a worker follow the page "环境变量列表" (list of environment variables).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import shutil
import signal
import string
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTIVE = ("Initialized", "Queue", "Staging", "Running", "Killing")
ENDED = ("Success", "Failed", "Killed", "Exception")
STATUSES = ACTIVE + ENDED
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/root"
CPUS, MEMORY = 4, 16  # the same for all flavors
HERE = Path(__file__).resolve().parent


def when(moment: float | None) -> str:
    """Return a time as the command prints it, such as `2026-09-17T08:13:43Z`; empty for None.

    The format is from users' notes.
    """
    return (
        dt.datetime.fromtimestamp(moment, dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        if moment
        else ""
    )


@dataclass
class Instance:
    """One worker: its state and its output, stdout and stderr together."""

    index: int
    state: str = "Initialized"
    exit_code: int | None = None
    launched: float | None = None
    finished: float | None = None
    diag: str = ""
    lines: list[tuple[float, str]] = field(default_factory=list)
    machine: dict[str, str] | None = None
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None

    @property
    def name(self) -> str:
        return f"worker_{self.index}"


@dataclass
class Task:
    """One attempt to run a task; a retry is another Task with the same name."""

    id: str
    conf: dict[str, Any]
    queue: str
    creator: str
    gpus: int
    code: Path | None
    directory: Path
    retries: int
    instances: list[Instance]
    status: str = "Initialized"
    created: float = field(default_factory=time.time)
    launched: float | None = None
    finished: float | None = None
    ends_as: str = ""  # the status after all workers have ended
    policy: str = ""  # the policy of RetryOptions that matches the end
    exit_code: int | None = None
    kill_at: float | None = None  # when to send the next signal of the kill sequence
    again_at: float | None = None  # when to submit the next attempt

    @property
    def name(self) -> str:
        return str(self.conf["TaskName"])

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        for instance in self.instances:
            if instance.state not in ENDED:
                instance.state = status


class Scheduler:
    """Moves tasks from state to state.

    The service calls `step` in a loop, with `lock` held, from its main thread: workers die with the
    thread that started them.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.directory = directory
        self.settings = settings
        self.lock = threading.RLock()
        self.tasks: dict[str, Task] = {}
        self.free: list[dict[str, str]] = list(settings["machines"])

    # -- requests ----------------------------------------------------------------------------------

    def new_id(self) -> str:
        tail = "".join(random.choices(string.ascii_lowercase + string.digits, k=5))
        return f"t-{dt.datetime.now(dt.timezone.utc):%Y%m%d%H%M%S}-{tail}"

    def submit(
        self,
        task_id: str,
        conf: dict[str, Any],
        queue: str,
        creator: str,
        code: Path | None,
        retries: int = 0,
    ) -> Task:
        role = conf["TaskRoleSpecs"][0]
        instances = [Instance(index) for index in range(role["RoleReplicas"])]
        directory = self.directory / "tasks" / task_id
        directory.mkdir(parents=True, exist_ok=True)
        gpus = self.settings["flavors"][role["Flavor"]]
        task = Task(task_id, conf, queue, creator, gpus, code, directory, retries, instances)
        self.tasks[task_id] = task
        return task

    def cancel(self, task: Task) -> None:
        self._kill(task, "Killed")

    def reclaim(self, task: Task) -> None:
        """Preempt a task: stop it and queue a copy of it.

        The documentation: "may be stopped, and is copied and queued again".
        """
        for instance in task.instances:
            instance.diag = "InstanceReclaimed: the idle resources of this queue were reclaimed"
        self._kill(task, "Killed", "InstanceReclaimed")

    # -- state changes -----------------------------------------------------------------------------

    def step(self) -> None:
        for task in list(self.tasks.values()):
            if task.again_at is not None and time.time() >= task.again_at:
                task.again_at = None
                self._submit_again(task)
            if task.ended:
                continue
            if task.status == "Initialized" and not self._held(task):
                task.enter("Queue")
            elif task.status == "Queue" and not self._held(task):
                self._take_machines(task)
            elif task.status == "Staging" and not self._held(task):
                self._start(task)
            elif task.status in ("Running", "Killing"):
                self._check_workers(task)

    def _held(self, task: Task) -> bool:
        held = self.settings["held"].get(task.status)
        for instance in task.instances:
            instance.diag = held or ""
        return held is not None

    def _take_machines(self, task: Task) -> None:
        if len(task.instances) > len(self.free):
            for instance in task.instances:
                instance.diag = (
                    f"Insufficient resources: {len(task.instances)} instances wanted,"
                    f" {len(self.free)} available"
                )
            return
        for instance in task.instances:
            instance.machine = self.free.pop(0)
        task.enter("Staging")

    def _start(self, task: Task) -> None:
        task.launched = time.time()
        port = random.randint(20000, 30000)  # the machines' network has no other users
        for instance in task.instances:
            instance.launched = task.launched
            self._launch(task, instance, port)
        task.enter("Running")

    def _launch(self, task: Task, instance: Instance, port: int) -> None:
        folder = task.directory / instance.name
        root = folder / "root"
        root.mkdir(parents=True)
        hostname = f"{task.id}-worker-{instance.index}"
        hosts = folder / "hosts"
        hosts.write_text(
            f"127.0.0.1 localhost\n::1 localhost\n{instance.machine['address']} {hostname}\n"
        )
        mounts = []
        if task.code is not None:
            code = folder / "code"
            shutil.copytree(task.code, code, symlinks=True)
            mounts.append((str(code), task.conf["RemoteMountCodePath"].rstrip("/")))
        for storage in task.conf.get("Storages") or []:
            shared = (
                self.directory
                / "storages"
                / str(
                    storage.get("VepfsId")
                    or storage.get("NasId")
                    or storage.get("Bucket")
                    or "default"
                )
            )
            shared = shared / str(storage.get("SubPath") or storage.get("Prefix") or "").strip("/")
            shared.mkdir(parents=True, exist_ok=True)
            mounts.append((str(shared), storage["MountPath"].rstrip("/")))
        conf = task.conf
        environ = self._environ(task, instance, port, hostname)
        container = {
            "network": instance.machine["name"],
            "hostname": hostname,
            "hosts": str(hosts),
            "root": str(root),
            "error": str(folder / "error"),
            "visible": self.settings["visible"],
            "mounts": mounts,
            # The documentation: "Args is put behind Entrypoint, with a space between them, and run
            # as the container's entry point".
            "command": " ".join(filter(None, [conf["Entrypoint"], conf.get("Args")])),
            "environ": environ,
        }
        start = folder / "start.json"
        with open(os.open(start, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            json.dump(container, file)
        # --pdeathsig follows the thread that calls Popen: here the service's main thread.
        argv = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            sys.executable,
            "-I",
            "-S",
            str(HERE / "volc_worker.py"),
            str(start),
        ]
        instance.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": PATH},
            cwd="/",
        )
        instance.reader = threading.Thread(target=self._read, args=(instance,), daemon=True)
        instance.reader.start()

    def _environ(self, task: Task, instance: Instance, port: int, hostname: str) -> dict[str, str]:
        addresses = [each.machine["address"] for each in task.instances]
        own = addresses[instance.index]
        variables: dict[str, object] = {
            "PATH": PATH,
            "HOME": HOME,
            "HOSTNAME": hostname,
            "MLP_TASK_ID": task.id,
            "MLP_REGION": self.settings["region"],
            "MLP_ROLE": "WORKER",
            "MLP_ROLE_INDEX": instance.index,
            "MLP_HOST": own,
            "MLP_PRIMARY_HOST": own,
            "MLP_PORT": port + instance.index,
            "MLP_IFNAME": "eth0",
            "MLP_SSH_PORT": 22,
            "MLP_WORKER_NUM": len(addresses),
            "MLP_WORKER_GPU": task.gpus,
            "MLP_WORKER_CPU": CPUS,
            "MLP_WORKER_MEM": MEMORY,
            "MLP_WORKER_ALL_HOSTS": ",".join(addresses),
            "MLP_WORKER_ALL_PRIMARY_HOSTS": ",".join(addresses),
            "MLP_WORKER_ALL_ADDRS": ",".join(
                f"{address}:{port + index}" for index, address in enumerate(addresses)
            ),
        }
        for index, address in enumerate(addresses):
            variables |= {
                f"MLP_WORKER_{index}_HOST": address,
                f"MLP_WORKER_{index}_PRIMARY_HOST": address,
                f"MLP_WORKER_{index}_PORT": port + index,
            }
        user_variables = {env["Name"]: env["Value"] for env in task.conf.get("Envs") or []}
        return {name: str(value) for name, value in variables.items()} | user_variables

    def _read(self, instance: Instance) -> None:
        assert instance.process is not None
        assert instance.process.stdout is not None
        with instance.process.stdout as stream:
            for line in stream:
                instance.lines.append(
                    (time.time(), line.decode(errors="replace").removesuffix("\n"))
                )

    def _check_workers(self, task: Task) -> None:
        for instance in task.instances:
            if (
                instance.process is not None
                and instance.finished is None
                and instance.process.poll() is not None
            ):
                self._record_end(task, instance)
        now = time.time()
        limit = task.conf.get("ActiveDeadlineSeconds")
        if task.status == "Running" and limit and now > task.launched + limit and not task.ends_as:
            for instance in task.instances:
                instance.diag = f"DeadlineExceeded: the task was active longer than {limit} seconds"
            self._kill(task, "Killed")
        if task.kill_at is not None and now > task.kill_at:
            self._signal(task, signal.SIGUSR1 if task.status == "Killing" else signal.SIGTERM)
            if task.status != "Killing":
                task.enter("Killing")
            task.kill_at = now + self.settings["kill_grace"]
        if all(
            instance.finished is not None
            for instance in task.instances
            if instance.process is not None
        ):
            self._end(task, task.ends_as or "Success")

    def _record_end(self, task: Task, instance: Instance) -> None:
        """Set the state of a worker that has ended."""
        instance.reader.join()
        instance.finished = time.time()
        error = task.directory / instance.name / "error"
        if error.exists():
            instance.state, instance.diag = "Exception", f"ContainerCannotRun: {error.read_text()}"
            self._fail(task, "Exception", "MachineFailure")
            return
        instance.exit_code = instance.process.returncode
        if task.status == "Killing":
            instance.state = "Killed"
        elif instance.exit_code == 0:
            instance.state = "Success"
        else:
            instance.state = "Failed"
            instance.diag = f"Error: container exited with code {instance.exit_code}"
            if task.exit_code is None:
                task.exit_code = instance.exit_code
            self._fail(task, "Failed", "Failed")

    def _fail(self, task: Task, status: str, policy: str) -> None:
        """Set the task's final status; kill the other workers after `failure_grace` seconds."""
        if not task.ends_as:
            task.ends_as, task.policy = status, policy
            task.kill_at = time.time() + self.settings["failure_grace"]

    def _kill(self, task: Task, status: str, policy: str = "") -> None:
        task.ends_as, task.policy = status, policy
        if task.status in ("Running", "Killing"):
            task.enter("Killing")
            self._signal(task, signal.SIGTERM)
            task.kill_at = time.time() + self.settings["kill_grace"]
        else:
            self._end(task, status)

    def _signal(self, task: Task, number: int) -> None:
        for instance in task.instances:
            if instance.process is not None and instance.process.poll() is None:
                instance.process.send_signal(number)

    def _end(self, task: Task, status: str) -> None:
        task.kill_at, task.finished = None, time.time()
        for instance in task.instances:
            if instance.machine is not None:
                self.free.append(instance.machine)
            instance.finished = instance.finished or task.finished
        task.enter(status)
        if status == "Success":
            task.exit_code = 0
        retry = task.conf.get("RetryOptions") or {}
        wanted = retry.get("EnableRetry") and task.policy in (retry.get("PolicySets") or [])
        if wanted and task.retries < retry.get("MaxRetryTimes", 0):
            # The documentation: "interval = the moment when the new task is submitted - the moment
            # when the last one ended".
            task.again_at = task.finished + retry.get("IntervalSeconds", 0)
        elif task.policy == "InstanceReclaimed" and task.conf.get("Preemptible") and not wanted:
            task.again_at = task.finished

    def _submit_again(self, task: Task) -> None:
        retries = task.retries + (
            task.policy in ((task.conf.get("RetryOptions") or {}).get("PolicySets") or [])
        )
        self.submit(self.new_id(), task.conf, task.queue, task.creator, task.code, retries)

    def close(self) -> None:
        """Kill all workers."""
        running = [
            each
            for task in self.tasks.values()
            for each in task.instances
            if each.process is not None
        ]
        for instance in running:
            if instance.process.poll() is None:
                instance.process.send_signal(signal.SIGUSR1)
        for instance in running:
            try:
                instance.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                instance.process.kill()
                instance.process.wait()
            instance.reader.join(timeout=10)
