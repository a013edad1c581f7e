"""Parse the answers of ``volc ml_task``: tasks, workers and times.

Source: the platform's documentation of its command line (1.2.57), and output that users published.
Builds of the command use different field names; each field is read under all names seen so far.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from clusterjob.backends.batch_command.command import CommandOutput
from clusterjob.backends.batch_command.platform import Instance, Task
from clusterjob.backends.shared import epoch
from clusterjob.errors import ClusterJobError
from clusterjob.node.verdict import JobState

STATES: Mapping[str, JobState] = {
    "Initialized": JobState.PENDING,
    "Queue": JobState.PENDING,
    "Staging": JobState.PENDING,
    "Running": JobState.RUNNING,
    "Killing": JobState.RUNNING,
    "Success": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Killed": JobState.CANCELLED,
    "Exception": JobState.FAILED,
}
_TASK_ID = re.compile(r"\bt-\d{14}-\w+")


def parse_task_id(answer: CommandOutput) -> str | None:
    """Return the task's id from the output of a submission, JSON or plain text."""
    data = answer.data
    task_id = _get(data, "Id", "JobId", "TaskId", "id") if isinstance(data, dict) else None
    if isinstance(task_id, str) and task_id:
        return task_id
    match = _TASK_ID.search(answer.out)
    return match[0] if match else None


def parse_rows(answer: CommandOutput) -> list[Mapping[str, Any]]:
    """Return the rows of an answer, which is a list or an object that contains a list.

    Raises:
        ClusterJobError: the answer has another form.
    """
    data = answer.data
    if data is None and not answer.out.strip():
        return []
    if isinstance(data, dict):
        data = next(
            (value for value in data.values() if isinstance(value, list)),
            [data] if _get(data, "Id", "JobId") else None,
        )
    if data is None and re.search(r"^\s*null\s*$", answer.out, re.MULTILINE):
        return []  # null: Go encodes an empty list in this way
    if not isinstance(data, list):
        raise ClusterJobError(
            f"volc did not print a list: {answer.out.strip()[:120]!r}",
            "check the build with `volc version`",
        )
    return [row for row in data if isinstance(row, dict)]


def _get(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def parse_task(row: Mapping[str, Any]) -> Task | None:
    """Return the task of a row; None if the row has no id or no name."""
    task_id, name = _get(row, "Id", "JobId", "TaskId"), _get(row, "Name", "JobName", "TaskName")
    state_text = str(_get(row, "Status", "State") or "")
    if not task_id or not name:
        return None
    return Task(
        id=str(task_id),
        name=str(name),
        state=STATES.get(state_text, JobState.UNKNOWN),
        state_text=state_text,
        created_at=_moment(_get(row, "CreateTime", "CreatedTime", "Created")),
        started_at=_moment(_get(row, "LaunchTime", "Start", "StartTime")),
        ended_at=_moment(_get(row, "FinishTime", "End", "EndTime")),
        reason=_line(_get(row, "DiagInfo", "Message", "Reason")),
        ending=state_text == "Killing",
    )


def parse_instance(row: Mapping[str, Any], index: int) -> Instance:
    """Return the worker of a row; `index` is its rank if its name has no number."""
    name = str(_get(row, "Name", "PodName") or f"worker_{index}")
    match = re.search(r"(\w+)[_-](\d+)$", name.replace("-", "_")) or re.search(r"()(\d+)$", name)
    node_rank = int(match[2]) if match else index
    code = _get(row, "ExitCode")
    state_text = str(_get(row, "State", "Status") or "")
    return Instance(
        name=f"worker_{node_rank}",  # `logs` needs this form; answers may have another form
        node_rank=node_rank,
        state_text=state_text,
        exit_code=int(code) if re.fullmatch(r"-?\d+", str(code)) else None,
        reason=_line(_get(row, "DiagInfo", "Message", "Reason")),
        failed=state_text in ("Failed", "Exception"),
    )


def _line(value: Any) -> str:
    """Return a text or a structured diagnosis of the platform as one line."""
    if not isinstance(value, str):
        value = "" if value is None else json.dumps(value, ensure_ascii=False)
    return " ".join(value.split())


def _moment(value: Any) -> str | None:
    """Return a time of an answer as RFC 3339, UTC; None if it is not a valid time.

    A time without a time zone is read in this machine's time zone.
    """
    text = str(value).strip()
    try:
        if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII):
            seconds = float(text)
            found = datetime.fromtimestamp(
                seconds / 1000 if seconds > 1e11 else seconds, timezone.utc
            )
        else:
            found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except (ValueError, OverflowError, OSError):
        return None
    if found.year < 2000:  # Go encodes a missing time as the year 1
        return None
    return found.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made_at(task: Task) -> float:
    """Return a task's submission time in seconds since the epoch, by the platform's clock.

    The time is read from the task's id, else from its creation time; it is 0 if both are missing.
    """
    with contextlib.suppress(ValueError):
        return datetime.strptime(f"{task.id[:16]}+0000", "t-%Y%m%d%H%M%S%z").timestamp()
    return epoch(task.created_at) if task.created_at else 0.0
