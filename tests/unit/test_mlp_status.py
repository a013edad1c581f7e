"""Status of jobs on a batch platform, from recorded answers of its command.

The answers come from different builds of the command, for many jobs and for errors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import executable, new_folder, write_tree

from clusterjob.backends.base import Status
from clusterjob.backends.batch_command import attempts
from clusterjob.backends.batch_command.backend import Account
from clusterjob.backends.batch_command.command import CommandOutput
from clusterjob.backends.batch_command.platform import Instance, Platform, Task
from clusterjob.backends.mlp import client
from clusterjob.backends.mlp.backend import MlpBackend
from clusterjob.backends.mlp.client import Volc
from clusterjob.core.records import Handle, ProcessIdentity, Record
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.verdict import JobState

Rows = list[dict[str, Any]]


def record(job_id: str, directory: Path, **more: Any) -> Record:
    spec = {
        "options": {"poll": "0.001"} | more.pop("options", {}),
        "max_restarts": more.pop("max_restarts", 0),
    }
    job_dir = new_folder(directory / job_id)
    fields = {
        "handle": Handle("mlp", "t-1", data={"ids": ["t-1"], "account": {}, "at": time.time()})
    } | more
    return Record(
        job_id,
        job_id,
        cluster="mlp",
        backend="mlp",
        job_dir=job_dir,
        nodes=1,
        submitted_at=now(),
        spec=spec,
        **fields,
    )


def task_id(number: int) -> str:
    return f"t-20260101{number:06d}-abcde"


def task(state: JobState, text: str, *, number: int = 1, name: str = "a", **more: Any) -> Task:
    """Return a task that has run."""
    fields = {"started_at": now()} | more
    return Task(task_id(number), name, state=state, state_text=text, **fields)


def worker(text: str, exit_code: int | None, **more: Any) -> Instance:
    """Return the worker of node 0."""
    fields = {"failed": text == "Failed"} | more
    return Instance("worker_0", 0, state_text=text, exit_code=exit_code, **fields)


class FakeCommand:
    """Record the calls of the platform's command and return prepared answers.

    The real command is a process that takes 100 ms for each call.
    """

    def __init__(self, answer: Callable[[Sequence[str]], CommandOutput]) -> None:
        self.calls: list[list[str]] = []
        self._answer = answer

    def __call__(self, argv: Sequence[str], more: Any, timeout: float = 0) -> CommandOutput:
        self.calls.append(list(argv[2:]))
        return self._answer(argv[2:])


@pytest.fixture
def volc(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[Sequence[str]], CommandOutput]], FakeCommand]:
    def make(answer: Callable[[Sequence[str]], CommandOutput]) -> FakeCommand:
        command = FakeCommand(answer)
        monkeypatch.setattr(client, "run", command)
        monkeypatch.setattr(client.shutil, "which", lambda _: "/usr/bin/volc")
        return command

    return make


def listing(rows: Rows) -> Callable[[Sequence[str]], CommandOutput]:
    """Answer `list` page by page, the newest task first; workers return nothing."""

    def answer(argv: Sequence[str]) -> CommandOutput:
        if argv[0] != "list":
            return CommandOutput(0, "[]" if argv[0] == "instance" else "", err="")
        options = dict(zip(argv[1::2], argv[2::2], strict=True))
        found = [row for row in reversed(rows) if options.get("--name", "") in row["JobName"]]
        begin = int(options["--offset"])
        return CommandOutput(
            0,
            "a newer version is there!\n"
            + json.dumps(found[begin : begin + int(options["--limit"])]),
            err="",
        )

    return answer


def test_status_is_unknown_while_platform_does_not_answer(tmp_path: Path, volc: Any) -> None:
    volc(lambda _: CommandOutput(1, "", err="ServiceUnavailable: try again"))
    found = MlpBackend().status([record("a", tmp_path)])["a"]
    assert (found.state, found.verdict) == (JobState.UNKNOWN, None)
    assert "does not answer" in found.reason


def test_task_search_skips_pages_of_older_tasks(volc: Any) -> None:
    def rows(first: float, count: int, name: str) -> Rows:
        times = [time.strftime("%Y%m%d%H%M%S", time.gmtime(first + 60 * n)) for n in range(count)]
        return [
            {"JobId": f"t-{at}-abcde", "JobName": f"{name}-{number}", "Status": "Running"}
            for number, at in enumerate(times)
        ]

    since = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, 0))
    command = volc(listing([*rows(1_700_000_000, 5000, "old"), *rows(since + 86400, 5, "new")]))
    assert len(Volc().tasks([f"new-{number}" for number in range(5)], since)) == 5
    assert len(command.calls) == 1


@pytest.mark.parametrize(
    "row",
    [
        {
            "JobId": task_id(1),
            "JobName": "a",
            "Status": "Failed",
            "Start": "2026-01-01T08:00:00+08:00",
            "End": 1767225610,
        },
        {
            "Id": task_id(1),
            "Name": "a",
            "Status": "Failed",
            "LaunchTime": "2026-01-01T00:00:00Z",
            "FinishTime": "1767225610000",
        },
    ],
)
def test_task_rows_with_both_field_spellings_are_read(row: dict[str, Any], volc: Any) -> None:
    volc(
        lambda argv: CommandOutput(
            0, json.dumps({"Total": 1, "List": [row, {"strange": True}]}), err=""
        )
    )
    (task,) = Volc().tasks(["a"])
    assert (task.id, task.state, task.state_text) == (task_id(1), JobState.FAILED, "Failed")
    assert (task.started_at, task.ended_at) == (
        "2026-01-01T00:00:00.000Z",
        "2026-01-01T00:00:10.000Z",
    )


@pytest.mark.parametrize("name", ["worker_3", "t-20260101000000-abcde-worker-3"])
def test_worker_names_in_both_formats_are_read(name: str, volc: Any) -> None:
    volc(
        lambda argv: CommandOutput(
            0,
            json.dumps(
                [{"Name": name, "State": "Failed", "ExitCode": "7", "DiagInfo": {"Reason": "x"}}]
            ),
            err="",
        )
    )
    assert Volc().instances("t") == [
        Instance(
            "worker_3", 3, state_text="Failed", exit_code=7, reason='{"Reason": "x"}', failed=True
        )
    ]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (
            CommandOutput(1, "", err='Error: exec: "mlp": executable file not found in $PATH'),
            SubmitError,
            "does not find its sibling mlp",
        ),
        (
            CommandOutput(1, "", err="AccessKeyId or SecretAccessKey is empty"),
            SubmitError,
            "not logged in",
        ),
        (
            CommandOutput(1, "", err="InvalidCredential: the access key is wrong"),
            SubmitError,
            "does not accept the keys",
        ),
        (
            CommandOutput(1, "AccessDenied: User is not authorized to perform", err=""),
            SubmitError,
            "no permission",
        ),
        (
            CommandOutput(1, "", err="resource queue nowhere is not found"),
            SubmitError,
            "does not know the queue",
        ),
        (
            CommandOutput(1, "", err="InvalidParameter: flavor ml.x does not exist"),
            SubmitError,
            "no such flavor",
        ),
        (
            CommandOutput(1, "", err="dial tcp: lookup open.volcengineapi.com: no such host"),
            SubmitError,
            "is not reached",
        ),
        (
            CommandOutput(1, "", err="something new"),
            SubmitError,
            "the platform refuses the task: something new",
        ),
        (
            CommandOutput(1, "", err="net/http: request canceled (Client.Timeout exceeded)"),
            SubmitInDoubtError,
            "does not answer",
        ),
        (
            CommandOutput(-9, "", err="volc did not answer", timed_out=True),
            SubmitInDoubtError,
            "did not answer",
        ),
        (CommandOutput(0, "fine", err=""), SubmitInDoubtError, "printed no task id"),
    ],
)
def test_failed_submission_gives_error_type_and_message(
    answer: CommandOutput, kind: type[ClusterJobError], message: str, volc: Any
) -> None:
    volc(lambda _: answer)
    with pytest.raises(SubmitError, match=message) as caught:
        Volc().submit(Path("x.yaml"))
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    "out",
    [
        'notice {of} a version\n{"Id": "t-20260101000000-abcde"}',
        "submit task success, task_id=t-20260101000000-abcde\n",
    ],
)
def test_task_id_is_read_from_json_and_text_output(out: str, volc: Any) -> None:
    volc(lambda _: CommandOutput(0, out, err=""))
    assert Volc().submit(Path("x.yaml")) == "t-20260101000000-abcde"


class FixedTasksBackend(MlpBackend):
    """Backend of a platform whose tasks, workers and log the test sets."""

    def __init__(
        self, tasks: Sequence[Task], instances: Sequence[Instance] = (), lines: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.shown, self.workers, self.log = list(tasks), list(instances), list(lines)
        self.cancelled: list[str] = []
        self.task_queries = 0

    def platform(self, account: Account) -> Platform:
        return self  # type: ignore[return-value]

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        self.task_queries += 1
        return self.shown

    def instances(self, task_id: str) -> list[Instance]:
        return self.workers

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        return self.log[-count:]

    def cancel(self, wanted: Any) -> None:
        self.cancelled.append(wanted)


def status_of(
    job: Record, *tasks: Task, workers: Sequence[Instance] = (), lines: Sequence[str] = ()
) -> Status:
    return FixedTasksBackend(tasks, workers, lines).status([job])[job.job_id]


def age_task_ends(job: Record, *tasks: Task) -> None:
    """Record that the ends of the tasks were first seen 10,000 s ago."""
    attempts.Known.of(job.job_dir).meet(tasks)
    path = job.job_dir / "platform.json"
    data = json.loads(path.read_text())
    data["ended"] = dict.fromkeys(data["ended"], time.time() - 10_000)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("state", "task_status", "options", "instances", "expected"),
    [
        (JobState.SUCCEEDED, "Success", {}, [], ("SUCCEEDED", 0, "the platform reports success")),
        (
            JobState.FAILED,
            "Failed",
            {},
            [Instance("worker_1", 1, state_text="Failed", exit_code=9, reason="OOM", failed=True)],
            ("FAILED", 9, "node 1 (host worker_1)"),
        ),
        (
            JobState.FAILED,
            "Exception",
            {},
            [worker("Exception", None, reason="NodeLost", failed=True)],
            ("FAILED", 1, "Exception: NodeLost"),
        ),
        (
            JobState.FAILED,
            "Failed",
            {},
            [worker("Killed", 143, reason="DeadlineExceeded")],
            ("FAILED", 124, "out of time"),
        ),
        (JobState.CANCELLED, "Killed", {}, [], ("CANCELLED", 143, "not by clusterjob")),
        *(
            (
                JobState.CANCELLED,
                "Killed",
                {"preemptible": "true", **options},
                [],
                ("PREEMPTED", 75, "reclaimed its machines"),
            )
            for options in ({}, {"retries": "0"})
        ),
    ],
)
def test_end_without_verdict_uses_platform_state_after_wait_for_log(
    tmp_path: Path,
    state: JobState,
    task_status: str,
    options: dict[str, str],
    instances: list[Instance],
    expected: tuple[str, int, str],
) -> None:
    job = record("a", tmp_path, options=options)
    ended = task(state, task_status, ended_at=now())
    first = status_of(job, ended, workers=instances)
    assert (first.state, first.verdict) == (JobState.RUNNING, None), "the log may lag"
    assert "waiting for the rest of its log" in first.reason
    age_task_ends(job, ended)
    found = status_of(job, ended, workers=instances)
    assert (found.state.value, found.verdict.exit_code) == expected[:2]
    assert expected[2] in found.reason


def failed_by(code: int, signal: str | None) -> str:
    """Return the line of an agent whose worker has failed."""
    failure = {
        "rank": 1, "local_rank": 1, "node_rank": 0, "host": "h", "exit_code": code,
        "signal": signal, "message": "it is gone",
    }  # fmt: skip
    verdict = {"state": "FAILED", "exit_code": code, "reason": "rank 1 failed", "failure": failure}
    return f"1 clusterjob-verdict {json.dumps({**verdict, 'consequences': []})}"


REFUSED = "clusterjob-refused 143 h: a setup line failed: module load"


@pytest.mark.parametrize(
    ("task_status", "line", "code", "cancelled", "options", "expected"),
    [
        ("Killed", failed_by(143, "SIGTERM"), 143, True, {}, ("CANCELLED", 143)),
        ("Killed", failed_by(137, "SIGKILL"), 137, True, {}, ("CANCELLED", 143)),
        ("Killed", failed_by(143, "SIGTERM"), 143, False, {}, ("CANCELLED", 143)),
        (
            "Killed",
            failed_by(143, "SIGTERM"),
            143,
            False,
            {"preemptible": "true", "retries": "0"},
            ("PREEMPTED", 75),
        ),
        ("Killed", failed_by(3, None), 3, True, {}, ("FAILED", 3)),  # before the cancel
        ("Failed", failed_by(137, "SIGKILL"), 137, False, {}, ("FAILED", 137)),  # out of memory
        ("Killed", REFUSED, 143, False, {}, ("CANCELLED", 143)),
        ("Failed", REFUSED, 143, False, {}, ("FAILED", 143)),
    ],
)
def test_workers_killed_by_platform_signal_are_not_reported_as_failed(
    tmp_path: Path,
    task_status: str,
    line: str,
    code: int,
    cancelled: bool,
    options: dict[str, str],
    expected: tuple[str, int],
) -> None:
    job = record("a", tmp_path, options=options)
    state = JobState.CANCELLED if task_status == "Killed" else JobState.FAILED
    ended = task(state, task_status, ended_at=now())
    age_task_ends(job, ended)
    if cancelled:
        ends.cancel(job.job_dir)
    found = status_of(job, ended, workers=[worker(task_status, code)], lines=[line])
    assert (found.state.value, found.verdict.exit_code) == expected


def test_task_to_retry_is_pending_until_last_attempt_or_timeout(tmp_path: Path) -> None:
    first, second = (task(JobState.FAILED, "Failed", number=number) for number in (1, 2))
    log = {"workers": [worker("Failed", 5)], "lines": [failed_by(5, None)]}
    job = record("a", tmp_path, max_restarts=1, options={"retry_interval": "100"})
    waiting = status_of(job, first, **log)
    assert (waiting.state, waiting.verdict) == (JobState.PENDING, None)
    assert (
        waiting.reason
        == "the platform starts it again (attempt 2 of 2); it was failed: rank 1 failed"
    )
    last = status_of(job, second, **log)
    found = (last.state, last.restarts, last.verdict.attempt, last.verdict.exit_code)
    assert found == (JobState.FAILED, 1, 1, 5)
    other = record("b", tmp_path, max_restarts=1, options={"retry_interval": "100"})
    theirs = replace(first, name="b")
    age_task_ends(other, theirs)
    assert status_of(other, theirs, **log).state is JobState.FAILED, "it did not come"


@pytest.mark.parametrize(
    ("options", "attempt_text"),
    [({"retries": "0"}, "(attempt 2)"), ({"retries": "1"}, "(attempt 2 of 2)")],
)
def test_killed_preemptible_task_is_pending_with_any_retry_count(
    tmp_path: Path, options: dict[str, str], attempt_text: str
) -> None:
    job = record("a", tmp_path, options={"preemptible": "true", **options})
    line = (
        '1 clusterjob-verdict {"state": "CANCELLED", "exit_code": 143, "reason": "SIGTERM on gpu7"}'
    )
    killed = task(JobState.CANCELLED, "Killed")
    found = status_of(job, killed, workers=[worker("Killed", 143)], lines=[line])
    assert (found.state, found.verdict) == (JobState.PENDING, None)
    assert attempt_text in found.reason


def test_task_missing_from_list_is_unknown_first_and_lost_later(tmp_path: Path) -> None:
    job = record("a", tmp_path)
    running = task(JobState.RUNNING, "Running")
    states = [status_of(job, *tasks).state for tasks in ((), (running,), ())]
    assert states == [JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN]
    path = job.job_dir / "platform.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"missing_since": time.time() - 1000})
    )
    lost = status_of(job)
    assert lost.state is JobState.LOST
    assert lost.reason == "the platform does not show its task any more"


@pytest.mark.parametrize("array", [None, {"indices": [0, 1], "pieces": [0]}])
def test_cancelled_submission_without_task_is_unknown_first_and_cancelled_later(
    tmp_path: Path, array: dict[str, Any] | None
) -> None:
    whole = record("a", tmp_path, handle=None, array=array)
    ends.cancel(whole.job_dir)
    waiting = status_of(whole.element(1) if array else whole)
    assert waiting.state is JobState.UNKNOWN
    assert waiting.reason == "it is being cancelled; the platform does not show it (yet)"
    long_ago = replace(whole, submitted_at="2026-01-01T00:00:00.000Z")
    assert status_of(long_ago.element(1) if array else long_ago).state is JobState.CANCELLED


@pytest.mark.parametrize("array", [None, {"indices": [0, 1], "pieces": [0]}])
@pytest.mark.parametrize(
    "tasks",
    [
        [],
        [
            Task(task_id(k), name, state=JobState.RUNNING, state_text="Running")
            for k, name in enumerate(("a", "a_0"))
        ],
    ],
)
def test_private_files_of_killed_submitter_are_removed(
    tmp_path: Path, array: dict[str, Any] | None, tasks: list[Task]
) -> None:
    whole = record(
        "a", tmp_path, handle=None, array=array, submitter=ProcessIdentity.of_this_process()
    )
    names = ("task.private.yaml", ".task.private.yaml.x1y2", "upload/train.py")
    write_tree(whole.job_dir, **dict.fromkeys(names, "a secret"))
    for polled, left in ((whole, names), (replace(whole, submitter=None), ())):
        elements = [polled.element(index) for index in array["indices"]] if array else [polled]
        FixedTasksBackend(tasks).status(elements)
        assert tuple(name for name in names if (whole.job_dir / name).exists()) == left
    assert not (whole.job_dir / "upload").exists()


def test_new_attempt_of_cancelled_job_is_cancelled(tmp_path: Path) -> None:
    job = record("a", tmp_path)
    ends.cancel(job.job_dir)
    backend = FixedTasksBackend([task(JobState.PENDING, "Queue", number=2, started_at=None)])
    assert backend.status([job])["a"].reason == "it is being cancelled"
    assert backend.cancelled == [task_id(2)]


def test_repeated_status_queries_platform_once_per_poll_interval(tmp_path: Path) -> None:
    job = record("a", tmp_path, options={"poll": "1000"})
    backend = FixedTasksBackend([task(JobState.RUNNING, "Running")])
    found = {backend.status([job])["a"].state for _ in range(50)}
    assert (found, backend.task_queries) == ({JobState.RUNNING}, 1)


def test_end_of_task_is_reported_when_its_time_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = record("a", tmp_path)
    backend = FixedTasksBackend([task(JobState.SUCCEEDED, "Success")])
    job.job_dir.rmdir()
    assert backend.status([job])["a"].reason.endswith("waiting for the rest of its log")
    later = time.time() + 30
    monkeypatch.setattr(attempts.time, "time", lambda: later)
    time.sleep(0.01)  # longer than the poll interval
    assert backend.status([job])["a"].state is JobState.SUCCEEDED


def test_fetch_from_platform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterJobError, match="cannot be reached from here"):
        MlpBackend().fetch(record("a", tmp_path), [], tmp_path, None, lambda _: True)


def test_command_uses_profile_of_job_instead_of_shell_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable(
        tmp_path / "volc", '#!/bin/sh\necho "${VOLC_PROFILE-unset} ${VOLC_REGION-unset} $VOLC_AK"\n'
    )
    variables = {"VOLC_PROFILE": "other", "VOLC_REGION": "cn-shanghai", "VOLC_AK": "a key"}
    for name, value in {"PATH": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    assert Volc({"VOLC_PROFILE": "team"}).run("version").out == "team unset a key\n"
