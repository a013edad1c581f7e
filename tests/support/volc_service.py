"""Service of the simulated platform: a process that the command `volc` calls.

It serves requests on a Unix socket until its stdin is closed. A request is one line of JSON. An
answer has several lines: ``{"out": text}`` and ``{"err": text}`` for output, then ``{"code": n}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socketserver
import sys
import threading
import time
from pathlib import Path
from typing import Any

import volc_conf
from volc_conf import Refused
from volc_tasks import STATUSES, Scheduler, Task, when

# The fields in two builds of the command, from users' outputs.
SHOWN = {
    "JobId": (
        "JobId",
        "JobName",
        "Description",
        "Status",
        "Start",
        "End",
        "Creator",
        "ResourceQueueId",
        "TaskRoleSpecs",
    ),
    "Id": (
        "Id",
        "Name",
        "Status",
        "CreateTime",
        "LaunchTime",
        "FinishTime",
        "Elapsed",
        "ExitCode",
        "Priority",
        "Preemptible",
    ),
}
NETWORK_ERROR = (
    'Post "https://open.volcengineapi.com/?Action={}&Version=2021-07-01": '
    "net/http: request canceled (Client.Timeout exceeded)"
)
STEP = 0.02  # seconds between two steps of the scheduler


class Gone(Exception):
    """The network between the command and the service fails."""


class Service:
    """The operations; each has a method that yields the parts of its answer."""

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self.directory = directory
        self.settings = settings
        self.scheduler = Scheduler(directory, settings)

    def answer(self, request: dict[str, Any]) -> Any:
        name = request["operation"]
        if name.startswith("test_"):
            with self.scheduler.lock:
                yield {"answer": getattr(self, name)(**request["with"])}
            return
        # Actions of the service's API. Which action a command calls is not documented.
        action = {
            "submit": "CreateJob",
            "list": "ListJobs",
            "cancel": "StopJob",
            "logs": "GetJobLog",
        }.get(name, "ListJobInstances")
        try:
            self._authenticate(request, action)
            yield from getattr(self, name)(request["flags"], request)
        except Refused as refused:
            yield {"err": f"{refused}\n"}
            yield {"code": 1}
        except Gone:
            yield {"err": NETWORK_ERROR.format(action) + "\n"}
            yield {"code": 1}
        else:
            yield {"code": 0}

    def _authenticate(self, request: dict[str, Any], action: str) -> None:
        if (request["ak"], request["sk"]) != (self.settings["ak"], self.settings["sk"]):
            raise Refused(
                "SignatureDoesNotMatch: The request signature we calculated does not match "
                "the signature you provided. Check your Secret Access Key and signing method."
            )
        if request["region"] != self.settings["region"]:
            raise Refused(f"InvalidParameter: region {request['region']} is not supported")
        if action in self.settings["denied"] or "*" in self.settings["denied"]:
            raise Refused(
                f"AccessDenied: User is not authorized to perform: ml_platform:{action}"
                " on resource: trn:ml_platform:::*"
            )

    def _banner(self) -> str:
        return self.settings["banner"] + "\n" if self.settings["banner"] else ""

    def _breaks(self, name: str) -> bool:
        if self.settings["breaks"].get(name, 0) <= 0:
            return False
        self.settings["breaks"][name] -= 1
        return True

    # -- operations of the command -----------------------------------------------------------------

    def submit(self, _flags: dict[str, Any], request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("submit before"):
                raise Gone
            conf = volc_conf.load(request["conf"])
            volc_conf.check(conf, self.settings)
            task_id = self.scheduler.new_id()
        code = None
        if conf.get("UserCodePath"):
            code = self.directory / "uploads" / task_id
            volc_conf.upload(conf["UserCodePath"], Path(request["cwd"]), code)
        with self.scheduler.lock:
            queue = volc_conf.queue_of(conf, self.settings["queues"])
            self.scheduler.submit(task_id, conf, queue, self.settings["creator"], code)
            if self._breaks("submit after"):
                raise Gone
            hangs = self._breaks("submit hangs")
        while hangs:
            time.sleep(0.1)  # until the command ends; then a broken pipe ends this thread
            yield {"out": ""}
        yield {"out": self._banner() + json.dumps({"Id": task_id}) + "\n"}

    def list(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("list"):
                raise Gone
            # The documentation: "lists tasks that are Queue, Staging, Running, Killing unless asked
            # otherwise".
            wanted = flags.get("status", "Queue,Staging,Running,Killing").split(",")
            for status in wanted:
                if status not in STATUSES:
                    raise Refused(
                        f"InvalidParameter: status {status!r} is not one of {','.join(STATUSES)}"
                    )
            part = flags.get("name", "")
            found = [
                each
                for each in reversed(self.scheduler.tasks.values())
                if each.status in wanted and (part in each.name or part in each.id)
            ]
            offset, limit = int(flags.get("offset", 0)), int(flags.get("limit", 10))
            rows = [self._row(task) for task in found[offset : offset + limit]]
        yield {"out": self._banner() + _json(rows)}

    def instance_list(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("instance list"):
                raise Gone
            task = self._task(flags["id"])
            flavor = task.conf["TaskRoleSpecs"][0]["Flavor"]
            rows = []
            for each in task.instances:
                pod = f"{task.id}-worker-{each.index}"
                name = pod if self.settings["long_names"] else each.name
                row = {
                    "Name": name, "PodName": pod, "State": each.state, "FlavorId": flavor,
                    "ExitCode": "" if each.exit_code is None else each.exit_code,
                    "LaunchTime": when(each.launched), "FinishTime": when(each.finished),
                    "DiagInfo": each.diag,
                }  # fmt: skip
                rows.append(row)
        yield {"out": self._banner() + _json(rows)}

    def cancel(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("cancel"):
                raise Gone
            task = self._task(flags["id"])
            if task.ended:
                raise Refused(
                    f"InvalidStatus: task {task.id} is {task.status}, it can not be canceled"
                )
            self.scheduler.cancel(task)
        yield {"out": "cancel success\n"}

    def logs(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        count = int(flags.get("lines", 500))
        with self.scheduler.lock:
            if self._breaks("logs"):
                raise Gone
            task = self._task(flags["task"])
            found = [each for each in task.instances if each.name == flags["instance"]]
            if not found:
                raise Refused(
                    f"ResourceNotFound.Instance: instance {flags['instance']} of task {task.id}"
                    " not found"
                )
            instance = found[0]
        newest = time.time() - self.settings["log_lag"]
        lines = [f"{line}\n" for moment, line in instance.lines if moment <= newest]
        yield {"out": "".join(lines[max(0, len(lines) - count) :])}

    def _task(self, task_id: str) -> Task:
        if task_id not in self.scheduler.tasks:
            raise Refused(f"ResourceNotFound.CustomTask: task {task_id} not found")
        return self.scheduler.tasks[task_id]

    def _row(self, task: Task) -> dict[str, Any]:
        conf, role = task.conf, task.conf["TaskRoleSpecs"][0]
        elapsed = int((task.finished or time.time()) - task.launched) if task.launched else 0
        values = {
            "Id": task.id, "JobId": task.id, "Name": task.name, "JobName": task.name,
            "CreateTime": when(task.created), "LaunchTime": when(task.launched),
            "Start": when(task.launched), "FinishTime": when(task.finished),
            "End": when(task.finished), "ResourceQueueId": task.queue,
            "ExitCode": "" if task.exit_code is None else task.exit_code, "Status": task.status,
            "Description": conf.get("Description") or "", "Elapsed": elapsed,
            "Creator": task.creator, "Preemptible": conf.get("Preemptible", False),
            "Priority": conf.get("Priority", 4),
            "TaskRoleSpecs": [{**role, "ResourceSpecId": role["Flavor"]}],
        }  # fmt: skip
        return {name: values[name] for name in SHOWN[self.settings["spelling"]]}

    # -- operations for tests ----------------------------------------------------------------------

    def test_set(self, **settings: Any) -> None:
        for name, value in settings.items():
            if (
                isinstance(self.settings[name], dict)
                and isinstance(value, dict)
                and name == "breaks"
            ):
                self.settings[name].update(value)
            else:
                self.settings[name] = value

    def test_tasks(self) -> list[dict[str, Any]]:
        return [
            {
                "id": task.id,
                "name": task.name,
                "status": task.status,
                "conf": task.conf,
                "retries": task.retries,
                "created": task.created,
                "finished": task.finished,
                "code": task.code and str(task.code),
                "directory": str(task.directory),
                "instances": [
                    {
                        "name": each.name,
                        "state": each.state,
                        "exit_code": each.exit_code,
                        "diag": each.diag,
                        "pid": each.process and each.process.pid,
                        "lines": [line for _, line in each.lines],
                    }
                    for each in task.instances
                ],
            }
            for task in self.scheduler.tasks.values()
        ]

    def test_reclaim(self, task: str) -> None:
        assert not self._task(task).ended
        self.scheduler.reclaim(self._task(task))


def _json(rows: list[dict[str, Any]]) -> str:
    # Compact: users' scripts match this form.
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")) + "\n"


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            request = json.loads(self.rfile.readline())
            for piece in self.server.service.answer(request):
                self.wfile.write(json.dumps(piece).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128
    service: Service


def main(directory: Path) -> None:
    settings = json.loads((directory / "settings.json").read_text())
    os.chdir(directory)  # the socket's absolute path can exceed the kernel's limit
    service = Service(directory, settings)
    with _Server("socket", _Handler) as server:
        server.service = service
        threading.Thread(target=server.serve_forever, args=(STEP,), daemon=True).start()
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], STEP)[0]:
            with service.scheduler.lock:
                service.scheduler.step()
        server.shutdown()
    with service.scheduler.lock:
        service.scheduler.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
