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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import volc_conf
import yaml
from volc_conf import Refused, Site
from volc_tasks import STATUSES, Scheduler, Task, when

# The fields that `--format` accepts, from users' notes of `--helpformat`.
TASK_FIELDS = (
    "Id", "JobId", "Name", "JobName", "CreateTime", "LaunchTime", "Start", "FinishTime", "End",
    "Tags", "EntrypointPath", "Framework", "ResourceQueueId", "ExitCode", "Status", "Description",
    "Elapsed", "NNode", "Creator", "Image", "Preemptible", "Priority", "TaskRoleSpecs",
)  # fmt: skip
# The fields without --format, in two builds of the command, from users' outputs.
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
INSTANCE_FIELDS = (
    "Name",
    "PodName",
    "State",
    "FlavorId",
    "ExitCode",
    "LaunchTime",
    "FinishTime",
    "DiagInfo",
)
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

    @property
    def _site(self) -> Site:
        return Site(
            self.settings["queues"],
            self.settings["flavors"],
            self.settings["priorities"],
            self.settings["refuse_args"],
        )

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
            "get": "GetJob",
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

    def submit(self, flags: dict[str, Any], request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("submit before"):
                raise Gone
            conf = volc_conf.load(request["conf"], flags)
            volc_conf.check(conf, self._site)
            task_id = self.scheduler.new_id()
        code = None
        if conf.get("UserCodePath"):
            code = self.directory / "uploads" / task_id
            links = "copy" if flags.get("copy-links") else "keep" if flags.get("links") else ""
            volc_conf.upload(
                conf["UserCodePath"],
                Path(request["cwd"]),
                code,
                links=links,
                keep_modes=self.settings["keep_modes"],
            )
        with self.scheduler.lock:
            self.scheduler.submit(
                task_id, conf, volc_conf.queue_of(conf, self._site), self.settings["creator"], code
            )
            if self._breaks("submit after"):
                raise Gone
            hangs = self._breaks("submit hangs")
        while hangs:
            time.sleep(0.1)  # until the command ends; then a broken pipe ends this thread
            yield {"out": ""}
        text = (
            json.dumps({"Id": task_id}) + "\n"
            if flags.get("output")
            else f"submit task success, task_id={task_id}\n\n"
        )
        yield {"out": self._banner() + text}

    def list(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            if self._breaks("list"):
                raise Gone
            _columns(flags, TASK_FIELDS)
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
            rows = [self._row(task, flags) for task in found[offset : offset + limit]]
        yield {"out": self._banner() + _json(rows)}

    def get(self, flags: dict[str, Any], _request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            row = self._row(self._task(flags["id"]), flags)
        yield {"out": self._banner() + _json([row])}

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
                code = "" if each.exit_code is None else each.exit_code
                values = (
                    name,
                    pod,
                    each.state,
                    flavor,
                    code,
                    when(each.launched),
                    when(each.finished),
                    each.diag,
                )
                rows.append(
                    _chosen(dict(zip(INSTANCE_FIELDS, values, strict=True)), flags, INSTANCE_FIELDS)
                )
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
        lines, seen = self._lines(instance, flags.get("content"))
        chosen = lines[:count] if flags.get("reverse") else lines[max(0, len(lines) - count) :]
        yield {"out": "".join(f"{line}\n" for line in chosen)}
        while flags.get("f") and (not task.ended or seen < len(instance.lines)):
            time.sleep(STEP)
            more, now_seen = self._lines(instance, flags.get("content"), seen)
            yield {"out": "".join(f"{line}\n" for line in more)}
            seen = now_seen

    def export(self, flags: dict[str, Any], request: dict[str, Any]) -> Any:
        with self.scheduler.lock:
            task = self._task(flags["task"])
            text = yaml.safe_dump(task.conf, allow_unicode=True, sort_keys=False)
        # The documentation of private variables: "only who created the task sees them".
        # Here, all tasks have the same creator.
        (Path(request["cwd"]) / f"{task.id}.yaml").write_text(text)
        yield {"out": f"export config to {task.id}.yaml\n"}

    def _lines(self, instance: Any, content: str | None, begin: int = 0) -> tuple[list[str], int]:
        """Return the visible log lines after line ``begin``, and the number of the last line.

        The settings log_lag, lost_lines and log_cap hide lines.
        """
        settings = self.settings
        newest = time.time() - settings["log_lag"]
        end = begin
        while end < len(instance.lines) and instance.lines[end][0] <= newest:
            end += 1
        numbered = list(enumerate((line for _, line in instance.lines[begin:end]), begin + 1))
        given = [
            line
            for number, line in numbered
            if not any(first <= number <= last for first, last in settings["lost_lines"])
        ]
        if content:
            given = [line for line in given if _matches(content, line)]
        if settings["log_cap"] is not None and not begin:
            given = given[max(0, len(given) - settings["log_cap"]) :]
        return given, end

    def _task(self, task_id: str) -> Task:
        if task_id not in self.scheduler.tasks:
            raise Refused(f"ResourceNotFound.CustomTask: task {task_id} not found")
        return self.scheduler.tasks[task_id]

    def _row(self, task: Task, flags: dict[str, Any]) -> dict[str, Any]:
        conf, role = task.conf, task.conf["TaskRoleSpecs"][0]
        elapsed = int((task.finished or time.time()) - task.launched) if task.launched else 0
        roles = [
            {
                "RoleName": role["RoleName"],
                "RoleReplicas": role["RoleReplicas"],
                "ResourceSpecId": role["Flavor"],
                "Flavor": role["Flavor"],
            }
        ]
        values = (
            task.id, task.id, task.name, task.name, when(task.created), when(task.launched),
            when(task.launched), when(task.finished), when(task.finished), conf.get("Tags") or [],
            conf["Entrypoint"], conf["Framework"], task.queue,
            "" if task.exit_code is None else task.exit_code, task.status,
            conf.get("Description") or "", elapsed, role["RoleReplicas"], task.creator,
            conf["ImageUrl"], conf.get("Preemptible", False), conf.get("Priority", 4), roles,
        )  # fmt: skip
        return _chosen(
            dict(zip(TASK_FIELDS, values, strict=True)), flags, SHOWN[self.settings["spelling"]]
        )

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

    def test_vanish(self, task: str, worker: int) -> None:
        self.scheduler.vanish(self._task(task), worker)


def _chosen(row: dict[str, Any], flags: dict[str, Any], shown: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that `--format` names.

    The format is FieldName or FieldName=outputFieldName, separated by commas.
    """
    return {
        other: row[name]
        for name, other in (_columns(flags, row) or [(name, name) for name in shown])
    }


def _columns(flags: dict[str, Any], known: Iterable[str]) -> list[tuple[str, str]]:
    """Return the field names in `--format`, each with its output name; empty without `--format`."""
    pairs = (
        [word.partition("=") for word in flags["format"].split(",")] if flags.get("format") else []
    )
    for name, _, _ in pairs:
        if name not in known:
            raise Refused(f"unsupported format field {name!r}, see --helpformat")
    return [(name, other or name) for name, _, other in pairs]


def _matches(content: str, line: str) -> bool:
    """Return whether a line matches a query.

    It supports a part of Lucene's syntax: words and phrases, all joined by OR or all by AND.
    """
    parts = (
        content.split(" AND ")
        if " AND " in content
        else [content]
        if content.startswith('"')
        else content.replace(" OR ", " ").split()
    )
    hits = [part.strip('"').lower() in line.lower() for part in parts]
    return all(hits) if " AND " in content else any(hits)


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
