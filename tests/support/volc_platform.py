"""A simulation of Volcengine's ML Platform, which tests use through its command `volc`.

It follows the platform's documentation and does not depend on clusterjob. Tests can inject faults.
A task gets machines (`namespaces.machines`). Each worker runs in its own container on one machine,
with the uploaded code, an empty /tmp and /root, and the documented variables.

    volc_platform.py   the interface for tests
    volc_command.py    the command `volc`
    volc_service.py    the service, a separate process
    volc_tasks.py      tasks and their states
    volc_conf.py       checks of a task's configuration, and the upload of code
    volc_worker.py     a worker's container
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import namespaces
import pytest
import yaml
from namespaces import Machine
from procs import missing_programs, wait_until

HERE = Path(__file__).resolve().parent
FLAVORS = {
    "ml.c1e.xlarge": 0,
    "ml.pni3ln.4xlarge": 1,
    "ml.pni3ln.8xlarge": 2,
    "ml.hpcpni2l": 8,
}  # name to number of GPUs
QUEUES = {"q-20260101000000-train": "train", "q-20260101000000-other": "other"}
TEST_TIMEOUT = 60.0  # seconds; a change of state takes much less


def skip_reason() -> str:
    """Return why the platform cannot run on this machine; empty if it can."""
    if why := namespaces.skip_reason() or missing_programs("setpriv", "unshare", "bash"):
        return why
    made = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"no mounts of one's own can be made here: {made.stderr.strip()}"
        if made.returncode != 0
        else ""
    )


class Platform:
    """One platform, and an account with access to it.

    Attributes:
        bin: the folder of the command, to be put on PATH.
        home: a home directory with the account's credentials.
    """

    ak, sk, region = "AKLTstandin0access0key", "c3RhbmRpbi1zZWNyZXQta2V5", "cn-beijing"

    def __init__(self, directory: Path, machines: Sequence[Machine], **settings: Any) -> None:
        """Start the service; `set` describes ``settings``."""
        self.directory = directory / "volc"
        self.bin, self.home, self._state = (
            self.directory / "bin",
            self.directory / "home",
            self.directory / "state",
        )
        for folder in (self.bin, self.home, self._state):
            folder.mkdir(parents=True)
        base = Path(os.path.realpath(sys.executable)).parent.parent
        visible = {str(Path(place)) for place in (sys.prefix, sys.base_prefix, base)}
        given = {
            "machines": [asdict(machine) for machine in machines], "visible": sorted(visible),
            "ak": self.ak, "sk": self.sk, "region": self.region, "creator": "someone",
            "queues": QUEUES, "flavors": FLAVORS, "priorities": [2, 4, 6], "failure_grace": 15.0,
            "kill_grace": 5.0, "spelling": "JobId", "long_names": False,
            "banner": "A new version of volc is available: volc/1.2.58", "held": {}, "denied": [],
            "breaks": {}, "log_lag": 0.0,
        }  # fmt: skip
        assert not settings.keys() - given.keys(), settings.keys() - given.keys()
        (self._state / "settings.json").write_text(json.dumps(given | settings))
        self._write_commands()
        self.login()
        argv = [sys.executable, str(HERE / "volc_service.py"), str(self._state)]
        self._service = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._service.stdout is not None
        assert self._service.stdout.readline() == "ready\n"

    def _write_commands(self) -> None:
        """Write the commands `volc` and `mlp`; `volc` finds `mlp` on PATH and runs it."""
        command = shlex.join(
            [sys.executable, "-I", "-S", str(HERE / "volc_command.py"), str(self._state)]
        )
        find_mlp = (
            "command -v mlp > /dev/null || "
            """{ echo 'exec: "mlp": executable file not found in $PATH' >&2; exit 1; }"""
        )
        for name, text in (
            ("volc", f'{find_mlp}\nexec mlp "$@"\n'),
            ("mlp", f'exec {command} "$@"\n'),
        ):
            (self.bin / name).write_text(f"#!/bin/sh\n{text}")
            (self.bin / name).chmod(0o755)

    def close(self) -> None:
        """Stop the service and all workers, and remove their files."""
        assert self._service.stdin is not None
        assert self._service.stdout is not None
        self._service.stdin.close()
        try:
            self._service.wait(timeout=TEST_TIMEOUT)
        finally:
            self._service.kill()
            self._service.wait()
            self._service.stdout.close()
            shutil.rmtree(self.directory)

    # -- account and command -----------------------------------------------------------------------

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that `volc` needs: PATH, and HOME with the credentials."""
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.home)}

    def login(self, **more: str) -> None:
        """Write the credentials like `volc configure`; ``ak=...`` and ``sk=...`` replace them."""
        folder = self.home / ".volc"
        folder.mkdir(exist_ok=True)
        ak, sk = more.get("ak", self.ak), more.get("sk", self.sk)
        (folder / "credentials").write_text(
            f"[default]\naccess_key_id = {ak}\nsecret_access_key = {sk}\n"
        )
        (folder / "config").write_text(f"[default]\nregion = {self.region}\n")

    def logout(self) -> None:
        shutil.rmtree(self.home / ".volc")

    def volc(
        self, *words: str, env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run the command; its environment has only `variables` and ``env``."""
        environ = self.variables | dict(env or {})
        return subprocess.run(
            ["volc", *words],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=TEST_TIMEOUT,
            **more,
        )

    def rows(self, *words: str) -> list[dict[str, Any]]:
        """Return the rows that `volc ml_task list` or `instance list` prints."""
        done = self.volc("ml_task", *words, "--output", "json")
        assert done.returncode == 0, done.stderr
        return parsed(done.stdout)

    def submit(self, directory: Path, entrypoint: str, **fields: Any) -> str:
        """Submit a task with the fields of `conf` from a directory; return its id."""
        (directory / "task.yaml").write_text(yaml.safe_dump(conf(entrypoint, **fields)))
        done = self.volc(
            "ml_task", "submit", "--conf", "task.yaml", "--output", "json", cwd=directory
        )
        assert done.returncode == 0, done.stderr
        return parsed(done.stdout)["Id"]

    def calls(self, *begin: str) -> list[list[str]]:
        """Return the arguments of all calls of the command that begin with ``begin``."""
        path = self._state / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line)["argv"] for line in lines]
        return [words for words in found if words[: len(begin)] == list(begin)]

    # -- tasks and their output --------------------------------------------------------------------

    def tasks(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the service's tasks, oldest first: id, name, status, conf, instances, ..."""
        return [task for task in self._ask("tasks") if name in (None, task["name"])]

    def task(self, task_id: str) -> dict[str, Any]:
        return next(task for task in self.tasks() if task["id"] == task_id)

    def wait(self, task_id: str, *statuses: str, timeout: float = TEST_TIMEOUT) -> dict[str, Any]:
        """Wait until a task has one of these statuses; return it."""
        seen: list[dict[str, Any]] = []

        def task_has_status() -> bool:
            seen[:] = [self.task(task_id)]
            return seen[0]["status"] in statuses

        try:
            wait_until(task_has_status, timeout, f"{task_id}: {' or '.join(statuses)}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {seen[0]}") from None
        return seen[0]

    def wait_for_line(
        self, task_id: str, text: str, worker: int = 0, timeout: float = TEST_TIMEOUT
    ) -> None:
        """Wait until a worker has printed a line that holds this text."""
        wait_until(
            lambda: any(text in line for line in self.lines(task_id, worker)),
            timeout,
            f"{text!r} from worker {worker}",
        )

    def lines(self, task_id: str, worker: int = 0) -> list[str]:
        """Return all lines that a worker has printed, with those that the log service hides."""
        return list(self.task(task_id)["instances"][worker]["lines"])

    def code(self, task_id: str, worker: int = 0) -> Path:
        """Return the path of a worker's copy of the code."""
        return Path(self.task(task_id)["directory"]) / f"worker_{worker}" / "code"

    # -- faults and variants of the command --------------------------------------------------------

    def set(self, **settings: Any) -> None:
        """Change settings of the service.

        failure_grace (seconds from a worker's failure until the other workers are killed),
        kill_grace (seconds between SIGTERM and SIGKILL), spelling (JobId or Id), long_names
        (t-...-worker-0 for worker_0), banner, queues (id to name), flavors (name to GPUs),
        priorities.
        """
        self._ask("set", **settings)

    def hold(self, status: str, diag: str = "") -> None:
        """Keep tasks in a status (Initialized, Queue or Staging); ``diag`` is their DiagInfo."""
        self.set(held={status: diag})

    def release(self) -> None:
        self.set(held={})

    def deny(self, *actions: str) -> None:
        """Deny the account some actions, or all actions without an argument.

        The actions are CreateJob, ListJobs, StopJob, GetJobLog and ListJobInstances.
        """
        self.set(denied=list(actions) or ["*"])

    def allow(self) -> None:
        self.set(denied=[])

    def break_submit(self, how: str = "after", times: int = 1) -> None:
        """Break the network in the next submits.

        ``how``: ``before`` the task is created, ``after`` it, or ``hangs``: submit never returns.
        """
        self.set(breaks={f"submit {how}": times})

    def break_calls(self, operation: str, times: int = 1) -> None:
        """Break the network in the next calls of list, instance list, cancel or logs."""
        self.set(breaks={operation: times})

    def lag_logs(self, seconds: float) -> None:
        self.set(log_lag=seconds)

    def reclaim(self, task_id: str) -> None:
        """Preempt a task."""
        self._ask("reclaim", task=task_id)

    def _ask(self, name: str, **arguments: Any) -> Any:
        folder = os.open(self._state, os.O_RDONLY)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.connect(f"/proc/self/fd/{folder}/socket")
                connection.sendall(
                    json.dumps({"operation": f"test_{name}", "with": arguments}).encode() + b"\n"
                )
                with connection.makefile("r") as answers:
                    line = answers.readline()
        finally:
            os.close(folder)
        assert line, f"the service could not do it: {name} {arguments}"
        return json.loads(line)["answer"]


def conf(
    entrypoint: str, *, workers: int = 1, flavor: str = "ml.pni3ln.8xlarge", **fields: Any
) -> dict[str, Any]:
    """Return the configuration of a task; ``fields`` replace or extend it."""
    basis = {
        "TaskName": "a task", "Entrypoint": entrypoint,
        "ImageUrl": "vemlp-cn-beijing.cr.volces.com/preset-images/pytorch:2.0.0",
        "ResourceQueueID": next(iter(QUEUES)), "Framework": "PyTorchDDP",
        "TaskRoleSpecs": [{"RoleName": "worker", "RoleReplicas": workers, "Flavor": flavor}],
    }  # fmt: skip
    return basis | fields


def parsed(text: str) -> Any:
    """Return the JSON value that follows the banner."""
    begin = min(index for index in (text.find("["), text.find("{")) if index >= 0)
    return json.loads(text[begin:])


@contextlib.contextmanager
def platform(directory: Path, machines: Sequence[Machine], **settings: Any) -> Iterator[Platform]:
    """Run a platform; stop it and remove its files at the end."""
    made = Platform(directory, machines, **settings)
    try:
        yield made
    finally:
        made.close()


def _main() -> None:
    """Run a platform for manual use until Ctrl-D."""
    directory = Path(tempfile.mkdtemp(prefix="volc"))
    with namespaces.machines(4) as made, platform(directory, made) as running:
        print(
            *(f"export {name}={shlex.quote(value)}" for name, value in running.variables.items()),
            sep="\n",
            flush=True,
        )
        sys.stdin.read()
    directory.rmdir()


@pytest.fixture(scope="session")
def volc_machines() -> Iterator[list[Machine]]:
    """Return the machines; the platforms of all tests use them, one at a time."""
    if why := skip_reason():
        pytest.skip(why)
    with namespaces.machines(4) as made:
        yield made


@pytest.fixture
def volc(
    tmp_path: Path, volc_machines: list[Machine], _isolated_environment: None
) -> Iterator[Platform]:
    """Run a platform for one test."""
    with platform(tmp_path, volc_machines, kill_grace=2.0) as made:
        yield made


if __name__ == "__main__":
    _main()
