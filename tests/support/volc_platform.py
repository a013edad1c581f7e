"""A stand-in for Volcengine's ML Platform, with its command `volc`.

It follows the platform's documentation and knows nothing of clusterjob. Facts without another
source are from the page "命令行工具" (command line tool). The service runs in the test's process.
Each worker of a task has a machine of its own (`namespaces.machines`), with the uploaded code, an
empty /tmp and /root, and the variables of the page "环境变量列表" (list of environment variables).
"""

from __future__ import annotations

import configparser
import contextlib
import datetime as dt
import json
import math
import os
import random
import shlex
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import namespaces
import pytest
import yaml
from launching import executable, new_folder, write_tree
from namespaces import Machine
from procs import below, children, missing_programs, wait_until

TEST_TIMEOUT = 60.0  # seconds; a change of state takes much less
STEP = 0.02  # seconds between two looks at the tasks
FLAVORS = {"ml.pni3ln.4xlarge": 1, "ml.pni3ln.8xlarge": 2, "ml.hpcpni2l": 8}  # name to GPUs
QUEUES = {"q-20260101000000-train": "train"}  # id to name
ENDED = ("Success", "Failed", "Killed")
STATUSES = ("Initialized", "Queue", "Staging", "Running", "Killing", *ENDED, "Exception")
# The flags that clusterjob uses, each with a value; the real command has more. --limit and --offset
# are from users' notes of `list --help`.
FLAGS = {
    "submit": ["conf", "output"],
    "list": ["status", "name", "limit", "offset", "output"],
    "instance list": ["id", "output"],
    "cancel": ["id"],
    "logs": ["task", "instance", "lines"],
}
# The fields of a task in the page's sample file that clusterjob may set, with their types.
FIELDS: dict[str, type] = {
    "TaskName": str, "Description": str, "Entrypoint": str, "Tags": list, "UserCodePath": str,
    "RemoteMountCodePath": str, "Envs": list, "ImageUrl": str, "ResourceQueueID": str,
    "ResourceQueueName": str, "Framework": str, "TaskRoleSpecs": list,
    "ActiveDeadlineSeconds": int, "AccessType": str, "Preemptible": bool, "Priority": int,
    "RetryOptions": dict, "Storages": list,
}  # fmt: skip
BANNER = "A new version of volc is available: volc/1.2.58\n"
NO_ANSWER = 'Post "https://open.volcengineapi.com/": net/http: request canceled'
DENIED = "AccessDenied: User is not authorized to perform this on resource: trn:ml_platform:::*"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_CLIENT = """
import json, os, socket, sys
environ = {{name: value for name, value in os.environ.items() if name[:5] in ("HOME", "VOLC_")}}
with socket.create_connection(("127.0.0.1", {port})) as connection:
    connection.sendall(json.dumps([sys.argv[1:], os.getcwd(), environ]).encode() + b"\\n")
    code, out, err = json.loads(connection.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
# The first process of a worker. It mounts pairs SOURCE:TARGET, and hides the tests' files.
_CONTAINER = """
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
hidden=$3 command=$4
shift 4
mount -t tmpfs tmpfs /mnt
number=0
for pair; do
  mkdir "/mnt/$((++number))"
  mount --rbind "${pair%%:*}" "/mnt/$number"
done
for place in "$hidden" /tmp /root; do
  mount -t tmpfs tmpfs "$place"
done
number=0
for pair; do
  mkdir -p "${pair#*:}"
  mount --rbind "/mnt/$((++number))" "${pair#*:}"
done
code=0
bash -c "$command" || code=$?
exit $code
"""


class Refused(Exception):
    """The command fails; the text is its error message."""


@dataclass
class Worker:
    """One worker: its state and its output, stdout and stderr together."""

    index: int
    state: str = "Initialized"
    exit_code: int | None = None
    diag: str = ""
    lines: list[str] = field(default_factory=list)
    machine: Machine | None = None
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").removesuffix("\n"))
        self.process.stdout.close()


@dataclass
class Task:
    """One attempt to run a task; a retry is another Task with the same name."""

    id: str
    conf: dict[str, Any]
    code: Path | None
    retries: int
    workers: list[Worker]
    status: str = "Initialized"
    launched: float = 0.0
    finished: float = 0.0
    ends_as: str = ""  # the status after all workers have ended
    policy: str = ""  # the policy of RetryOptions that matches the end
    kill_at: float = math.inf  # when to send the next signal of the kill sequence
    again_at: float = math.inf  # when to submit the next attempt

    @property
    def name(self) -> str:
        return str(self.conf["TaskName"])

    def enter(self, status: str) -> None:
        self.status = status
        for worker in self.workers:
            if worker.exit_code is None:
                worker.state = status


class Platform:
    """One platform, and an account with access to it.

    Attributes:
        bin: the folder of the command, to be put on PATH.
        home: a home directory with the account's credentials.
        errors: the texts with which the next calls of an operation fail. A failed "submit after"
            has made the task.
        held: statuses (Initialized, Queue or Staging) that tasks do not leave, with their DiagInfo.
        queues, flavors: as `QUEUES` and `FLAVORS`.
        kill_grace: seconds between SIGTERM and SIGKILL.
    """

    ak, sk, region = "AKLTstandin0access0key", "c3RhbmRpbi1zZWNyZXQta2V5", "cn-beijing"
    failure_grace = 15.0  # seconds from a worker's failure until the other workers are killed

    def __init__(self, directory: Path, machines: Sequence[Machine]) -> None:
        self.directory = directory / "volc"
        self.bin, self.home = self.directory / "bin", self.directory / "home"
        self.errors: dict[str, list[str]] = {}
        self.held: dict[str, str] = {}
        self.queues, self.flavors = QUEUES, FLAVORS
        self.kill_grace = 2.0
        self._free = list(machines)
        self._tasks: dict[str, Task] = {}
        self._calls: list[list[str]] = []
        self._lock = threading.RLock()
        for folder in (self.bin, self.home):
            folder.mkdir(parents=True)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.platform = self
        self._write_commands(self._server.server_address[1])
        self.login()
        # Workers die with the thread that starts them.
        self._thread = threading.Thread(target=self._server.serve_forever, args=(STEP,))
        self._thread.start()

    def _write_commands(self, port: int) -> None:
        """Write the commands `volc` and `mlp`; `volc` finds `mlp` on PATH and runs it."""
        client = self.directory / "client.py"
        client.write_text(_CLIENT.format(port=port))
        find_mlp = (
            "command -v mlp > /dev/null || "
            """{ echo 'exec: "mlp": executable file not found in $PATH' >&2; exit 1; }"""
        )
        run = shlex.join([sys.executable, "-I", "-S", str(client)])
        for name, text in (("volc", f'{find_mlp}\nexec mlp "$@"\n'), ("mlp", f'exec {run} "$@"\n')):
            executable(self.bin / name, f"#!/bin/sh\n{text}")

    def close(self) -> None:
        """Stop the service and all workers, and remove their files."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for task in self._tasks.values():
            for worker in task.workers:
                if worker.process is not None:
                    worker.process.kill()
                    worker.process.wait()
                    worker.reader.join()
        shutil.rmtree(self.directory)

    # -- the account, and what tests see -----------------------------------------------------------

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that `volc` needs: PATH, and HOME with the credentials."""
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.home)}

    def login(self, sk: str = sk) -> None:
        """Write the credentials like `volc configure`."""
        folder = new_folder(self.home / ".volc")
        write_tree(
            folder,
            credentials=f"[default]\naccess_key_id = {self.ak}\nsecret_access_key = {sk}\n",
            config=f"[default]\nregion = {self.region}\n",
        )

    def logout(self) -> None:
        shutil.rmtree(self.home / ".volc")

    def calls(self, *begin: str) -> list[list[str]]:
        """Return the arguments of all calls of the command that begin with ``begin``."""
        return [words for words in self._calls if words[: len(begin)] == list(begin)]

    def tasks(self, name: str | None = None) -> list[Task]:
        """Return the tasks, oldest first."""
        return [task for task in list(self._tasks.values()) if name in (None, task.name)]

    def wait(self, task: Task, *statuses: str) -> None:
        wait_until(
            lambda: task.status in statuses, TEST_TIMEOUT, f"{' or '.join(statuses)} of {task}"
        )

    def wait_for_line(self, task: Task, text: str) -> None:
        """Wait until the first worker has printed a line that holds this text."""
        wait_until(
            lambda: any(text in line for line in task.workers[0].lines), TEST_TIMEOUT, repr(text)
        )

    def reclaim(self, task: Task) -> None:
        """Preempt a task."""
        with self._lock:
            for worker in task.workers:
                worker.diag = "InstanceReclaimed: the idle resources of this queue were reclaimed"
            self._kill(task, "InstanceReclaimed")

    # -- operations of the command -----------------------------------------------------------------

    def run(self, words: list[str], cwd: Path, environ: Mapping[str, str]) -> tuple[int, str, str]:
        """Run the command; return its exit code, stdout and stderr."""
        with self._lock:
            self._calls.append(words)
            try:
                return 0, self._answer(words, cwd, environ), ""
            except Refused as refused:
                return 1, "", f"{refused}\n"

    def _answer(self, words: list[str], cwd: Path, environ: Mapping[str, str]) -> str:
        if words == ["version"]:
            return "volc/1.2.57\n"
        count = 3 if words[1:2] == ["instance"] else 2
        operation, rest = " ".join(words[1:count]), words[count:]
        if words[:1] != ["ml_task"] or operation not in FLAGS:
            raise Refused(f"No help topic for {words}")
        if rest == ["--help"]:
            names = [*FLAGS[operation], "help"]
            return "OPTIONS:\n" + "".join(f"   --{name} value\n" for name in names)
        flags = dict(zip(rest[::2], rest[1::2], strict=True))
        if unknown := flags.keys() - {f"--{name}" for name in FLAGS[operation]}:
            raise Refused(f"Incorrect Usage: flag provided but not defined: {unknown}")
        self._authenticate(environ)
        self._fail_if_wanted(operation)
        if operation == "submit":
            return BANNER + self._submit(cwd, flags["--conf"])
        if operation == "list":
            return BANNER + self._list(flags)
        task = self._tasks.get(flags["--task" if operation == "logs" else "--id"])
        if task is None:
            raise Refused(f"ResourceNotFound.CustomTask: the task of {flags} not found")
        if operation == "instance list":
            return BANNER + _rows([self._worker_row(task, worker) for worker in task.workers])
        if operation == "logs":
            [lines] = [
                each.lines for each in task.workers if f"worker_{each.index}" == flags["--instance"]
            ]
            return "".join(f"{line}\n" for line in lines[-int(flags["--lines"]) :])
        if task.status in ENDED:
            raise Refused(f"InvalidStatus: task {task.id} is {task.status}, it can not be canceled")
        self._kill(task)
        return "cancel success\n"

    def _authenticate(self, environ: Mapping[str, str]) -> None:
        """Check keys and region, from VOLC_* or a section of ~/.volc/credentials and config."""
        section = environ.get("VOLC_PROFILE") or "default"
        found = configparser.ConfigParser(interpolation=None)
        found.read([Path(environ["HOME"]) / ".volc" / name for name in ("credentials", "config")])
        own = found[section] if found.has_section(section) else {}
        ak = environ.get("VOLC_AK") or own.get("access_key_id")
        sk = environ.get("VOLC_SK") or own.get("secret_access_key")
        region = environ.get("VOLC_REGION") or own.get("region")
        if not ak or not sk:
            raise Refused(
                "AccessKeyId or SecretAccessKey is empty, please run `volc configure` first"
            )
        if region != self.region:
            raise Refused(f"InvalidParameter: region {region} is not supported")
        if (ak, sk) != (self.ak, self.sk):
            raise Refused("SignatureDoesNotMatch: The request signature does not match")

    def _fail_if_wanted(self, operation: str) -> None:
        if texts := self.errors.get(operation):
            raise Refused(texts.pop(0))

    def _submit(self, cwd: Path, path: str) -> str:
        conf: dict[str, Any] = yaml.safe_load((cwd / path).read_text())
        for name, value in conf.items():
            if FIELDS.get(name) is not type(value):
                raise Refused(f"load config file failed: cannot unmarshal {name} {value!r}")
        for name in ("TaskName", "Entrypoint", "ImageUrl"):
            if name not in conf:
                raise Refused(f"InvalidParameter: {name} is required")
        if not {conf.get("ResourceQueueID"), conf.get("ResourceQueueName")} & {
            *self.queues, *self.queues.values(),
        }:  # fmt: skip
            raise Refused("ResourceNotFound.ResourceQueue: resource queue not found")
        [role] = conf["TaskRoleSpecs"]
        if role["Flavor"] not in self.flavors:
            raise Refused(f"ResourceNotFound.Flavor: flavor {role['Flavor']} not found")
        code = None
        if source := conf.get("UserCodePath"):
            code = self.directory / "uploads" / str(len(self._tasks))
            # "dir/" uploads the contents of the directory, "dir" the directory itself.
            inside = code if source.endswith("/") else code / Path(source).name
            shutil.copytree(cwd / source, inside)
        task = self._add(conf, code)
        self._fail_if_wanted("submit after")
        return json.dumps({"Id": task.id}) + "\n"

    def _add(self, conf: dict[str, Any], code: Path | None, retries: int = 0) -> Task:
        now = dt.datetime.now(dt.timezone.utc)
        task_id = f"t-{now:%Y%m%d%H%M%S}-{random.randrange(10**5):05}"
        workers = [Worker(index) for index in range(conf["TaskRoleSpecs"][0]["RoleReplicas"])]
        task = self._tasks[task_id] = Task(task_id, conf, code, retries, workers)
        return task

    def _list(self, flags: dict[str, str]) -> str:
        wanted = flags["--status"].split(",")
        if unknown := set(wanted) - set(STATUSES):
            raise Refused(f"InvalidParameter: status {unknown}")
        found = [
            {
                "JobId": task.id, "JobName": task.name, "Status": task.status,
                "Description": task.conf.get("Description", ""), "Creator": "someone",
                "Start": _time(task.launched), "End": _time(task.finished),
            }
            for task in reversed(self._tasks.values())
            if task.status in wanted and flags.get("--name", "") in task.name
        ]  # fmt: skip
        offset = int(flags.get("--offset", 0))
        return _rows(found[offset : offset + int(flags.get("--limit", 10))])

    def _worker_row(self, task: Task, worker: Worker) -> dict[str, Any]:
        return {
            "Name": f"worker_{worker.index}", "PodName": f"{task.id}-worker-{worker.index}",
            "State": worker.state, "DiagInfo": worker.diag,
            "ExitCode": "" if worker.exit_code is None else worker.exit_code,
        }  # fmt: skip

    # -- the states of tasks -----------------------------------------------------------------------

    def step(self) -> None:
        with self._lock:
            for task in list(self._tasks.values()):
                if time.time() >= task.again_at:
                    task.again_at = math.inf
                    self._add(task.conf, task.code, task.retries + 1)
                if task.status in ("Running", "Killing"):
                    self._check_workers(task)
                elif task.status not in ENDED:
                    self._advance(task)

    def _advance(self, task: Task) -> None:
        for worker in task.workers:
            worker.diag = self.held.get(task.status, "")
        if task.status in self.held:
            return
        if task.status == "Staging":
            if len(self._free) >= len(task.workers):
                self._start(task)
        else:
            task.enter("Queue" if task.status == "Initialized" else "Staging")

    def _start(self, task: Task) -> None:
        task.launched = time.time()
        for worker in task.workers:
            worker.machine = self._free.pop(0)
        for worker in task.workers:
            self._launch(task, worker)
        task.enter("Running")

    def _launch(self, task: Task, worker: Worker) -> None:
        folder = new_folder(self.directory / "tasks" / task.id / str(worker.index))
        hosts = folder / "hosts"
        hostname = f"{task.id}-worker-{worker.index}"
        hosts.write_text(f"127.0.0.1 localhost\n{worker.machine.address} {hostname}\n")
        # The interpreters of the tests stay visible.
        mounts = [
            f"{place}:{place}"
            for place in {sys.prefix, sys.base_prefix}
            if place.startswith(("/tmp/", "/root/"))
        ]
        if task.code is not None:
            shutil.copytree(task.code, folder / "code")
            mounts.append(f"{folder / 'code'}:{task.conf['RemoteMountCodePath'].rstrip('/')}")
        for storage in task.conf.get("Storages", []):
            shared = new_folder(self.directory / "storages" / storage["VepfsId"])
            mounts.append(f"{shared}:{storage['MountPath']}")
        argv = worker.machine.command(
            "setpriv", "--pdeathsig", "KILL",
            "unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child",
            "--mount-proc", "bash", "-c", _CONTAINER, "bash",
            hostname, hosts, self.directory.parent.parent, task.conf["Entrypoint"], *mounts,
        )  # fmt: skip
        worker.process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=self._environ(task, worker), cwd="/",
        )  # fmt: skip
        worker.reader = threading.Thread(target=worker.read)
        worker.reader.start()

    def _environ(self, task: Task, worker: Worker) -> dict[str, str]:
        addresses = [each.machine.address for each in task.workers]
        port = 20_000 + int(task.id[-5:]) % 10_000  # the machines' network has no other users
        variables: dict[str, object] = {
            "PATH": PATH, "HOME": "/root", "MLP_TASK_ID": task.id, "MLP_REGION": self.region,
            "MLP_ROLE": "WORKER", "MLP_ROLE_INDEX": worker.index,
            "MLP_HOST": addresses[worker.index], "MLP_PRIMARY_HOST": addresses[worker.index],
            "MLP_PORT": port + worker.index, "MLP_IFNAME": "eth0", "MLP_SSH_PORT": 22,
            "MLP_WORKER_NUM": len(addresses), "MLP_WORKER_CPU": 4, "MLP_WORKER_MEM": 16,
            "MLP_WORKER_GPU": self.flavors[task.conf["TaskRoleSpecs"][0]["Flavor"]],
            "MLP_WORKER_ALL_HOSTS": ",".join(addresses),
            "MLP_WORKER_ALL_PRIMARY_HOSTS": ",".join(addresses),
        }  # fmt: skip
        for index, address in enumerate(addresses):
            variables |= {
                f"MLP_WORKER_{index}_HOST": address,
                f"MLP_WORKER_{index}_PRIMARY_HOST": address,
                f"MLP_WORKER_{index}_PORT": port + index,
            }
        own = {each["Name"]: each["Value"] for each in task.conf.get("Envs", [])}
        return {name: str(value) for name, value in variables.items()} | own

    def _check_workers(self, task: Task) -> None:
        for worker in task.workers:
            if worker.exit_code is None and worker.process.poll() is not None:
                worker.reader.join()
                worker.exit_code = worker.process.returncode
                if task.status == "Killing":
                    worker.state = "Killed"
                elif worker.exit_code == 0:
                    worker.state = "Success"
                else:
                    worker.state = "Failed"
                    worker.diag = f"Error: container exited with code {worker.exit_code}"
                    if not task.ends_as:
                        task.ends_as = task.policy = "Failed"
                        task.kill_at = time.time() + self.failure_grace
        if time.time() > task.kill_at:
            if task.status == "Killing":
                for worker in task.workers:
                    worker.process.kill()
            self._terminate(task)
        if all(worker.exit_code is not None for worker in task.workers):
            self._end(task, task.ends_as or "Success")

    def _kill(self, task: Task, policy: str = "") -> None:
        task.ends_as, task.policy = "Killed", policy
        if task.status in ("Running", "Killing"):
            self._terminate(task)
        else:
            self._end(task, "Killed")

    def _terminate(self, task: Task) -> None:
        """Send SIGTERM to all processes of the workers but the first, which has no handler."""
        task.enter("Killing")
        task.kill_at = time.time() + self.kill_grace
        for worker in task.workers:
            for first in children(worker.process.pid):
                for pid in below(first):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)

    def _end(self, task: Task, status: str) -> None:
        task.kill_at, task.finished = math.inf, time.time()
        self._free += [worker.machine for worker in task.workers if worker.machine is not None]
        task.enter(status)
        retry = task.conf.get("RetryOptions", {})
        if task.policy in retry.get("PolicySets", []) and task.retries < retry["MaxRetryTimes"]:
            # "interval = the moment when the new task is submitted - when the last one ended"
            task.again_at = task.finished + retry.get("IntervalSeconds", 0)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        words, cwd, environ = json.loads(self.rfile.readline())
        answer = self.server.platform.run(words, Path(cwd), environ)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(json.dumps(answer).encode())


class _Server(socketserver.ThreadingTCPServer):
    platform: Platform

    def service_actions(self) -> None:
        self.platform.step()


def _rows(rows: list[dict[str, Any]]) -> str:
    # Compact: users' scripts match this form.
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")) + "\n"


def _time(moment: float) -> str:
    """Return a time as the command prints it, by users' notes; empty if it has not come."""
    found = dt.datetime.fromtimestamp(moment, dt.timezone.utc)
    return found.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else ""


@pytest.fixture(scope="session")
def volc_machines() -> Iterator[list[Machine]]:
    """Return the machines; the platforms of all tests use them, one at a time."""
    if why := namespaces.skip_reason() or missing_programs("setpriv", "unshare"):
        pytest.skip(why)
    with namespaces.machines(4) as made:
        yield made


@pytest.fixture
def volc(
    tmp_path: Path, volc_machines: list[Machine], _isolated_environment: None
) -> Iterator[Platform]:
    """Run a platform for one test."""
    platform = Platform(tmp_path, volc_machines)
    try:
        yield platform
    finally:
        platform.close()
