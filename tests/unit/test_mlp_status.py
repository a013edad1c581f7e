"""Status of jobs on a batch platform, from recorded answers of its command.

The answers come from different builds of the command, for many jobs and for errors.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterjob.backends.batch_command import attempts
from clusterjob.backends.batch_command.backend import Account
from clusterjob.backends.batch_command.command import CommandOutput
from clusterjob.backends.batch_command.platform import Instance, Platform, Task
from clusterjob.backends.mlp import client
from clusterjob.backends.mlp.backend import MlpBackend
from clusterjob.backends.mlp.client import Volc
from clusterjob.core.records import Handle, Record
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.system.processes import ProcessIdentity
from clusterjob.node.verdict import JobState

Rows = list[dict[str, Any]]


def record(job_id: str, directory: Path, **more: Any) -> Record:
    spec = {
        "options": {"poll": "0.001"} | more.pop("options", {}),
        "max_restarts": more.pop("max_restarts", 0),
    }
    job_dir = directory / job_id
    job_dir.mkdir()
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


def test_status_of_500_jobs_takes_at_most_six_calls(tmp_path: Path, volc: Any) -> None:
    rows = [
        {"JobId": task_id(number), "JobName": f"job-{number}", "Status": "Running"}
        for number in range(500)
    ]
    command = volc(listing(rows))
    records = [record(f"job-{number}", tmp_path) for number in range(500)]
    found = MlpBackend().status(records)
    assert {status.state for status in found.values()} == {JobState.RUNNING}
    assert len(command.calls) <= 6, "100 rows a page, and one that is empty"


def test_status_is_unknown_while_platform_does_not_answer(tmp_path: Path, volc: Any) -> None:
    volc(lambda _: CommandOutput(1, "", err="ServiceUnavailable: try again"))
    found = MlpBackend().status([record("a", tmp_path)])["a"]
    assert (found.state, found.verdict) == (JobState.UNKNOWN, None)
    assert "does not answer" in found.reason


def test_task_search_skips_pages_of_older_tasks(volc: Any) -> None:
    moments = [time.gmtime(1_700_000_000 + 60 * number) for number in range(5000)]
    rows = [
        {
            "JobId": f"t-{time.strftime('%Y%m%d%H%M%S', moment)}-abcde",
            "JobName": "old",
            "Status": "Success",
        }
        for moment in moments
    ]
    rows += [
        {
            "JobId": f"t-202601010000{number:02d}-abcde",
            "JobName": f"new-{number}",
            "Status": "Running",
        }
        for number in range(5)
    ]
    command = volc(listing(rows))
    since = time.mktime((2026, 1, 1, 0, 0, 0, 0, 0, 0))
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
        self, tasks: list[Task], instances: Sequence[Instance] = (), lines: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.shown, self.workers, self.log = tasks, list(instances), list(lines)
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
            [
                Instance(
                    "worker_0",
                    0,
                    state_text="Exception",
                    exit_code=None,
                    reason="NodeLost",
                    failed=True,
                )
            ],
            ("FAILED", 1, "Exception: NodeLost"),
        ),
        (
            JobState.FAILED,
            "Failed",
            {},
            [
                Instance(
                    "worker_0", 0, state_text="Killed", exit_code=143, reason="DeadlineExceeded"
                )
            ],
            ("FAILED", 124, "out of time"),
        ),
        (JobState.CANCELLED, "Killed", {}, [], ("CANCELLED", 143, "not by clusterjob")),
        (
            JobState.CANCELLED,
            "Killed",
            {"preemptible": "true"},
            [],
            ("PREEMPTED", 75, "reclaimed its machines"),
        ),
        (
            JobState.CANCELLED,
            "Killed",
            {"preemptible": "true", "retries": "0"},
            [],
            ("PREEMPTED", 75, "reclaimed its machines"),
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
    ended = Task(
        task_id(1), "a", state=state, state_text=task_status, started_at=now(), ended_at=now()
    )
    backend = FixedTasksBackend([ended], instances)
    first = backend.status([job])["a"]
    assert (first.state, first.verdict) == (JobState.RUNNING, None), "the log may lag"
    assert "waiting for the rest of its log" in first.reason
    age_task_ends(job, ended)
    found = FixedTasksBackend([ended], instances).status([job])["a"]
    assert found.verdict is not None
    assert (found.state.value, found.verdict.exit_code) == expected[:2]
    assert expected[2] in found.reason


@pytest.mark.parametrize(
    ("task_status", "signal", "cancelled", "options", "expected"),
    [
        ("Killed", "SIGTERM", True, {}, ("CANCELLED", 143)),
        ("Killed", "SIGKILL", True, {}, ("CANCELLED", 143)),
        ("Killed", "SIGTERM", False, {}, ("CANCELLED", 143)),
        ("Killed", "SIGTERM", False, {"preemptible": "true", "retries": "0"}, ("PREEMPTED", 75)),
        ("Killed", None, True, {}, ("FAILED", 3)),  # the workers failed before the cancel
        ("Failed", "SIGKILL", False, {}, ("FAILED", 137)),  # for example out of memory
    ],
)
def test_workers_killed_by_platform_signal_are_not_reported_as_failed(
    tmp_path: Path,
    task_status: str,
    signal: str | None,
    cancelled: bool,
    options: dict[str, str],
    expected: tuple[str, int],
) -> None:
    job = record("a", tmp_path, options=options)
    code = {"SIGTERM": 143, "SIGKILL": 137, None: 3}[signal]
    failure = {
        "rank": 1,
        "local_rank": 1,
        "node_rank": 0,
        "host": "h",
        "exit_code": code,
        "signal": signal,
        "message": "it is gone",
    }
    agent_verdict = {
        "state": "FAILED",
        "exit_code": code,
        "reason": "rank 1 is gone",
        "failure": failure,
        "consequences": [],
    }
    ended = Task(
        task_id(1),
        "a",
        state=JobState.CANCELLED if task_status == "Killed" else JobState.FAILED,
        state_text=task_status,
        started_at=now(),
        ended_at=now(),
    )
    age_task_ends(job, ended)
    if cancelled:
        ends.cancel(job.job_dir)
    found = FixedTasksBackend(
        [ended],
        [
            Instance(
                "worker_0",
                0,
                state_text=task_status,
                exit_code=code,
                failed=task_status == "Failed",
            )
        ],
        [f"1 clusterjob-verdict {json.dumps(agent_verdict)}"],
    ).status([job])["a"]
    assert found.verdict is not None
    assert (found.state.value, found.verdict.exit_code) == expected


@pytest.mark.parametrize(("task_status", "state"), [("Killed", "CANCELLED"), ("Failed", "FAILED")])
def test_node_ended_by_platform_in_setup_lines_has_platform_state(
    tmp_path: Path, task_status: str, state: str
) -> None:
    job = record("a", tmp_path)
    ended = Task(
        task_id(1),
        "a",
        state=JobState(state),
        state_text=task_status,
        started_at=now(),
        ended_at=now(),
    )
    age_task_ends(job, ended)
    ended_all = [
        Instance(
            "worker_0", 0, state_text=task_status, exit_code=143, failed=task_status == "Failed"
        )
    ]
    found = FixedTasksBackend(
        [ended], ended_all, ["clusterjob-refused 143 h: a setup line failed: module load"]
    ).status([job])["a"]
    assert found.verdict is not None
    assert (found.state.value, found.verdict.exit_code) == (state, 143)


def test_task_to_retry_is_pending_until_last_attempt_or_timeout(tmp_path: Path) -> None:
    job = record("a", tmp_path, max_restarts=1, options={"retry_interval": "100"})
    ended = [
        Task(task_id(number), "a", state=JobState.FAILED, state_text="Failed", started_at=now())
        for number in (1, 2)
    ]
    verdict = {"state": "FAILED", "exit_code": 5, "reason": "rank 0 failed"}
    line = f"1 clusterjob-verdict {json.dumps({**verdict, 'consequences': []})}"
    worker = [Instance("worker_0", 0, state_text="Failed", exit_code=5, failed=True)]
    waiting = FixedTasksBackend(ended[:1], worker, [line]).status([job])["a"]
    assert (waiting.state, waiting.verdict) == (JobState.PENDING, None)
    assert (
        waiting.reason
        == "the platform starts it again (attempt 2 of 2); it was failed: rank 0 failed"
    )
    last = FixedTasksBackend(ended[1:], worker, [line]).status([job])["a"]
    assert last.verdict is not None
    assert (last.state, last.restarts, last.verdict.attempt, last.verdict.exit_code) == (
        JobState.FAILED,
        1,
        1,
        5,
    )
    other = record("b", tmp_path, max_restarts=1, options={"retry_interval": "100"})
    theirs = replace(ended[0], name="b")
    age_task_ends(other, theirs)
    assert (
        FixedTasksBackend([theirs], worker, [line]).status([other])["b"].state is JobState.FAILED
    ), "it did not come"


@pytest.mark.parametrize(
    ("options", "attempt_text"),
    [({"retries": "0"}, "(attempt 2)"), ({"retries": "1"}, "(attempt 2 of 2)")],
)
def test_killed_preemptible_task_is_pending_with_any_retry_count(
    tmp_path: Path, options: dict[str, str], attempt_text: str
) -> None:
    job = record("a", tmp_path, options={"preemptible": "true", **options})
    killed = Task(task_id(1), "a", state=JobState.CANCELLED, state_text="Killed", started_at=now())
    line = (
        '1 clusterjob-verdict {"state": "CANCELLED", "exit_code": 143, "reason": "SIGTERM on gpu7"}'
    )
    found = FixedTasksBackend(
        [killed], [Instance("worker_0", 0, state_text="Killed", exit_code=143)], [line]
    ).status([job])["a"]
    assert (found.state, found.verdict) == (JobState.PENDING, None)
    assert attempt_text in found.reason


def test_end_of_task_is_reported_when_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    job, backend = (
        record("a", tmp_path),
        FixedTasksBackend(
            [
                Task(
                    task_id(1),
                    "a",
                    state=JobState.SUCCEEDED,
                    state_text="Success",
                    started_at=now(),
                )
            ]
        ),
    )
    monkeypatch.setattr(attempts.files, "write_json", full)
    assert backend.status([job])["a"].reason.endswith("waiting for the rest of its log")
    later = time.time() + 30
    monkeypatch.setattr(attempts.time, "time", lambda: later)
    time.sleep(0.01)  # longer than the poll interval
    assert backend.status([job])["a"].state is JobState.SUCCEEDED


def test_task_missing_from_list_is_unknown_first_and_lost_later(tmp_path: Path) -> None:
    job = record("a", tmp_path)
    assert FixedTasksBackend([]).status([job])["a"].state is JobState.PENDING
    running = Task(task_id(1), "a", state=JobState.RUNNING, state_text="Running", started_at=now())
    assert FixedTasksBackend([running]).status([job])["a"].state is JobState.RUNNING
    assert FixedTasksBackend([]).status([job])["a"].state is JobState.UNKNOWN
    path = job.job_dir / "platform.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"missing_since": time.time() - 1000})
    )
    lost = FixedTasksBackend([]).status([job])["a"]
    assert (lost.state, lost.reason) == (
        JobState.LOST,
        "the platform does not show its task any more",
    )


@pytest.mark.parametrize("array", [None, {"indices": [0, 1], "pieces": [0]}])
def test_cancelled_submission_without_task_is_unknown_first_and_cancelled_later(
    tmp_path: Path, array: dict[str, Any] | None
) -> None:
    whole = record("a", tmp_path, handle=None, array=array)
    ends.cancel(whole.job_dir)
    waiting = FixedTasksBackend([]).status([whole.element(1) if array else whole])
    assert {(status.state, status.reason) for status in waiting.values()} == {
        (JobState.UNKNOWN, "it is being cancelled; the platform does not show it (yet)")
    }
    long_ago = replace(whole, submitted_at="2026-01-01T00:00:00.000Z")
    found = FixedTasksBackend([]).status([long_ago.element(1) if array else long_ago])
    assert [status.state for status in found.values()] == [JobState.CANCELLED]


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
    left = [
        whole.job_dir / "task.private.yaml",
        whole.job_dir / ".task.private.yaml.x1y2",
        whole.job_dir / "upload" / "train.py",
    ]
    left[-1].parent.mkdir()
    for path in left:
        path.write_text("a secret")

    def poll_status(submitter: ProcessIdentity | None) -> None:
        polled = replace(whole, submitter=submitter)
        FixedTasksBackend(tasks).status(
            [polled.element(index) for index in array["indices"]] if array else [polled]
        )

    poll_status(whole.submitter)
    assert left[0].exists(), "it is being read just now"
    poll_status(None)
    assert [path for path in (*left, left[-1].parent) if path.exists()] == []


def test_new_attempt_of_cancelled_job_is_cancelled(tmp_path: Path) -> None:
    job = record("a", tmp_path)
    ends.cancel(job.job_dir)
    backend = FixedTasksBackend([Task(task_id(2), "a", state=JobState.PENDING, state_text="Queue")])
    assert backend.status([job])["a"].reason == "it is being cancelled"
    assert backend.cancelled == [task_id(2)]


def test_repeated_status_queries_platform_once_per_poll_interval(tmp_path: Path) -> None:
    job = record("a", tmp_path, options={"poll": "1000"})
    backend = FixedTasksBackend(
        [Task(task_id(1), "a", state=JobState.RUNNING, state_text="Running", started_at=now())]
    )
    for _ in range(50):
        assert backend.status([job])["a"].state is JobState.RUNNING
    assert backend.task_queries == 1


def test_fetch_from_platform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterJobError, match="cannot be reached from here"):
        MlpBackend().fetch(record("a", tmp_path), [], tmp_path, None, lambda _: True)


def test_account_combines_profile_of_job_and_region_of_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VOLC_REGION", "cn-shanghai")
    assert MlpBackend().account_of({"profile": "team"}) == (
        ("VOLC_PROFILE", "team"),
        ("VOLC_REGION", "cn-shanghai"),
    )
    assert "VOLC_PROFILE" not in os.environ


def test_command_uses_profile_of_job_instead_of_shell_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volc").write_text(
        '#!/bin/sh\necho "${VOLC_PROFILE-unset} ${VOLC_REGION-unset} $VOLC_AK"\n'
    )
    (tmp_path / "volc").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in {
        "VOLC_PROFILE": "other",
        "VOLC_REGION": "cn-shanghai",
        "VOLC_AK": "a key",
    }.items():
        monkeypatch.setenv(name, value)
    assert Volc({"VOLC_PROFILE": "team"}).run("version").out == "team unset a key\n"
