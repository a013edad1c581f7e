"""Call ``volc ml_task``, parse its answers and explain its errors.

Source: the platform's documentation of its command line (1.2.57), and output that users published.
Builds of the command use different field names; each field is read under all names seen so far.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterjob.backends.batch_command.attempts import CLOCKS_APART
from clusterjob.backends.batch_command.command import TIMEOUT, CommandOutput, run
from clusterjob.backends.batch_command.platform import Instance, Task
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.verdict import JobState

COMMAND, SIBLING = "volc", "mlp"
ACCOUNT = ("VOLC_PROFILE", "VOLC_REGION")  # the command's variables that select an account
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
SUBMIT_TIMEOUT = 600.0  # seconds; the same command uploads the code
_PAGE = 100  # number of rows to request in one answer
# The platform's default page size. An answer with fewer rows is the last page, even if the platform
# limits pages to fewer than `_PAGE` rows.
_DEFAULT_PAGE = 10
_MAX_PAGES = 200
_FEW = 3  # maximum number of names for which each name has its own search
_TASK_ID = re.compile(r"\bt-\d{14}-\w+")
_INSTALL = (
    'run the installer from the page "command line tool" of the platform\'s documentation; '
    "it puts volc and mlp into ~/.volc/bin"
)

# (pattern, message, hint); the first match applies. The platform's own text follows each message.
_UNKNOWN = r"[^;\n]{0,80}(?:not (?:be )?found|not exist|unknown|invalid|not support|not available)"
_KNOWN_ERRORS = (
    (
        rf'exec: "{SIBLING}"|{SIBLING}: (?:command )?not found',
        f"{COMMAND} does not find its sibling {SIBLING}",
        'both are in ~/.volc/bin: export PATH="$HOME/.volc/bin:$PATH"',
    ),
    (
        (
            r"AccessKeyId or SecretAccessKey is empty|"
            r"credentials?.{0,20}(?:not found|no such file|empty|missing)|"
            r"not logged in|no credentials"
        ),
        "not logged in to the platform",
        "run `volc configure`, or set VOLC_AK, VOLC_SK and VOLC_REGION",
    ),
    (
        (
            r"SignatureDoesNotMatch|InvalidAccessKey|InvalidCredential|AuthFailure|"
            r"InvalidSecretToken|signature.{0,40}not match|\b401\b"
        ),
        "the platform does not accept the keys",
        "run `volc configure`; VOLC_AK and VOLC_SK override its keys",
    ),
    (
        r"region.{0,60}(?:empty|not supported|invalid|missing)",
        "the platform does not know the region",
        "set VOLC_REGION or --set region=NAME, such as cn-beijing, or run `volc configure`",
    ),
    (
        (
            r"AccessDenied|not authorized|Unauthorized|no permission|permission denied|"
            r"Forbidden|\b403\b"
        ),
        "the account has no permission for this",
        "ask an administrator of the account for MLPlatformFullAccess or a part of that policy",
    ),
    (
        rf"queue\S*{_UNKNOWN}|InvalidQueue|QueueNotFound|unknown (?:resource ?)?queue",
        "the platform does not know the queue",
        "use --set queue=NAME or its id, q-...; the console lists them under resource queues",
    ),
    (
        rf"flavor\S*{_UNKNOWN}|FlavorNotFound|unknown flavor",
        "the queue has no such flavor",
        "use --set flavor=NAME; the console lists the flavors of each queue",
    ),
    (
        rf"image\S*{_UNKNOWN}|ImageNotFound|unknown image",
        "the platform does not find the image",
        "use --set image=URL; the console lists them under images",
    ),
    (
        r"quota|insufficient|exceed",
        "the queue has not enough free capacity",
        "see the capacity and usage of the queue in the console",
    ),
)
# After these errors it is unknown whether the service has executed the request.
_IN_DOUBT = re.compile(
    r"time[d ]?-?out|deadline exceeded|request canceled|\bEOF\b|connection reset|broken pipe|"
    r"unexpected end|"
    r"(?:status|code|HTTP)\D{0,12}50\d\b|InternalError|ServiceUnavailable|internal server error",
    re.IGNORECASE,
)
_UNREACHED = re.compile(
    r"no such host|connection refused|network is unreachable|dial tcp", re.IGNORECASE
)
_ENDED_ALREADY = re.compile(
    r"already|has (?:been )?(?:ended|finished|stopped)|not running|"
    r"invalid ?(?:status|state)|terminal",
    re.IGNORECASE,
)


class Volc:
    """Manage one account's tasks through the command.

    Args:
        account: values of the `ACCOUNT` variables. A variable of `ACCOUNT` without a value is unset
            for the command, even if it is set in this shell. The access keys are not included.
        submit_timeout: timeout in seconds for an upload with its submission.
    """

    def __init__(
        self, account: Mapping[str, str] | None = None, submit_timeout: float = SUBMIT_TIMEOUT
    ) -> None:
        self._account: dict[str, str | None] = {name: (account or {}).get(name) for name in ACCOUNT}
        self._submit_timeout = submit_timeout

    # -- the operations of a platform --------------------------------------------------------------

    def submit(self, conf: Path) -> str:
        """Submit the task in a file and return the task's id.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        answer = self._run(
            "submit", "--conf", str(conf), "--output", "json", timeout=self._submit_timeout
        )
        task_id = _submitted(answer)
        if answer.code == 0 and task_id is not None:
            return task_id
        refused, in_doubt = (
            _error(answer, "the platform refuses the task"),
            answer.timed_out or _IN_DOUBT.search(answer.words) is not None,
        )
        if answer.code == 0:
            raise SubmitInDoubtError(f"{COMMAND} printed no task id: {answer.out.strip()[:120]!r}")
        if in_doubt and not _UNREACHED.search(answer.words):
            raise SubmitInDoubtError(refused.message, refused.hint)
        raise SubmitError(refused.message, refused.hint)

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        """Return all tasks with one of the names, the oldest first.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        wanted = set(names)
        # All elements of an array share the job's id as a prefix: one search finds them.
        parts = {re.sub(r"_\d+$", "", name) for name in names}
        searches: list[str | None] = sorted(parts) if len(parts) <= _FEW else [None]  # type: ignore[assignment]
        found = {
            task.id: task
            for part in searches
            for task in self._listed(part, since)
            if task.name in wanted
        }
        oldest_first = [*found.values()][::-1]
        return sorted(
            oldest_first, key=made_at
        )  # a stable sort: tasks of the same second keep the platform's order

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers, node 0 first.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        answer = self._query("instance", "list", "--id", task_id, "--output", "json")
        return sorted(
            (_instance(row, index) for index, row in enumerate(_rows(answer))),
            key=lambda instance: instance.node_rank,
        )

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        """Return the last `count` lines of a worker's log.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        out = self._query(
            "logs", "--task", task_id, "--instance", instance, "--lines", str(count)
        ).out
        return out.removesuffix("\n").split("\n") if out else []

    def cancel(self, task_id: str) -> None:
        """Cancel a task; see `clusterjob.backends.batch_command.platform.Platform`."""
        answer = self._run("cancel", "--id", task_id)
        if answer.code != 0 and not _ENDED_ALREADY.search(answer.words):
            raise _error(answer, "the platform does not cancel the task")

    # -- queries of `doctor` -----------------------------------------------------------------------

    def newest(self, count: int) -> list[tuple[Mapping[str, Any], Task | None]]:
        """Return the account's newest tasks: raw rows, each with its parsed task or None.

        Raises:
            ClusterJobError: the platform does not answer.
        """
        answer = self._query(
            "list", "--status", ",".join(STATES), "--limit", str(count), "--output", "json"
        )
        return [(row, _task(row)) for row in _rows(answer)[:count]]

    def run(self, *words: str) -> CommandOutput:
        """Run the command with other arguments than ``ml_task``, such as ``version``.

        Raises:
            SubmitError: the command is not installed.
        """
        check_installed()
        return run([COMMAND, *words], self._account)

    # -- the command -------------------------------------------------------------------------------

    def _listed(self, name: str | None, since: float) -> Iterator[Task]:
        """Yield tasks page by page in the platform's order, the newest first.

        Stop at the last page, or at tasks older than `since`.
        """
        seen: set[str] = set()
        search = ("--name", name) if name is not None else ()
        for _ in range(_MAX_PAGES):
            page = ("--limit", str(_PAGE), "--offset", str(len(seen)))
            rows = _rows(
                self._query(
                    "list", "--status", ",".join(STATES), *search, *page, "--output", "json"
                )
            )
            found = [task for row in rows if (task := _task(row)) is not None]
            new = [task for task in found if task.id not in seen]
            yield from new
            seen.update(task.id for task in new)
            moments = [made_at(task) for task in found]
            if (
                not new
                or len(rows) < _DEFAULT_PAGE
                or (
                    moments == sorted(moments, reverse=True)
                    and 0.0 < moments[-1] < since - CLOCKS_APART
                )
            ):
                return

    def _query(self, *words: str) -> CommandOutput:
        """Return the answer to a query.

        Raises:
            ClusterJobError: the command failed.
        """
        answer = self._run(*words)
        if answer.code != 0:
            raise _error(answer, "the platform does not answer")
        return answer

    def _run(self, *words: str, timeout: float = TIMEOUT) -> CommandOutput:
        if shutil.which(COMMAND) is None:
            raise _missing()
        try:
            return run([COMMAND, "ml_task", *words], self._account, timeout=timeout)
        except OSError as error:
            raise SubmitError(f"{COMMAND} cannot be run: {error.strerror}", _INSTALL) from error


def check_installed() -> None:
    """Raise an error if the platform's command is missing.

    Raises:
        SubmitError: the command is not installed, or not on PATH.
    """
    if shutil.which(COMMAND) is None:
        raise _missing()


def _missing() -> SubmitError:
    place = Path("~/.volc/bin").expanduser()
    if os.access(place / COMMAND, os.X_OK):
        return SubmitError(
            f"the platform's command {COMMAND} is in {place}, which is not on PATH",
            f'export PATH="{place}:$PATH"',
        )
    return SubmitError(f"the platform's command {COMMAND} is not installed", _INSTALL)


def _error(answer: CommandOutput, otherwise: str) -> ClusterJobError:
    """Return the error for a failed command: its text, with a hint if the error is known."""
    if _UNREACHED.search(answer.words):
        return ClusterJobError(
            f"the platform is not reached: {answer.words}",
            "check the network, the proxy and the region (VOLC_REGION)",
        )
    if answer.timed_out or _IN_DOUBT.search(answer.words):
        return ClusterJobError(
            f"the platform does not answer: {answer.words}",
            "check the network and the proxy, or try again later: the service may be busy",
        )
    for pattern, message, hint in _KNOWN_ERRORS:
        if re.search(pattern, answer.words, re.IGNORECASE):
            return ClusterJobError(f"{message}: {answer.words}", hint)
    return ClusterJobError(f"{otherwise}: {answer.words}")


def _submitted(answer: CommandOutput) -> str | None:
    """Return the task's id from the output of a submission, JSON or plain text."""
    data = answer.data
    task_id = _get(data, "Id", "JobId", "TaskId", "id") if isinstance(data, dict) else None
    if isinstance(task_id, str) and task_id:
        return task_id
    match = _TASK_ID.search(answer.out)
    return match[0] if match else None


# -- answers ---------------------------------------------------------------------------------------


def _rows(answer: CommandOutput) -> list[Mapping[str, Any]]:
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
            f"{COMMAND} did not print a list: {answer.out.strip()[:120]!r}",
            f"check the build with `{COMMAND} version`",
        )
    return [row for row in data if isinstance(row, dict)]


def _get(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _task(row: Mapping[str, Any]) -> Task | None:
    task_id, name = _get(row, "Id", "JobId", "TaskId"), _get(row, "Name", "JobName", "TaskName")
    words = str(_get(row, "Status", "State") or "")
    if not task_id or not name:
        return None
    return Task(
        id=str(task_id),
        name=str(name),
        state=STATES.get(words, JobState.UNKNOWN),
        words=words,
        created_at=_moment(_get(row, "CreateTime", "CreatedTime", "Created")),
        started_at=_moment(_get(row, "LaunchTime", "Start", "StartTime")),
        ended_at=_moment(_get(row, "FinishTime", "End", "EndTime")),
        reason=_line(_get(row, "DiagInfo", "Message", "Reason")),
    )


def _instance(row: Mapping[str, Any], index: int) -> Instance:
    name = str(_get(row, "Name", "PodName") or f"worker_{index}")
    match = re.search(r"(\w+)[_-](\d+)$", name.replace("-", "_")) or re.search(r"()(\d+)$", name)
    node_rank = int(match[2]) if match else index
    code = _get(row, "ExitCode")
    return Instance(
        name=f"worker_{node_rank}",  # `logs` needs this form; answers may have another form
        node_rank=node_rank,
        words=str(_get(row, "State", "Status") or ""),
        exit_code=int(code) if re.fullmatch(r"-?\d+", str(code)) else None,
        reason=_line(_get(row, "DiagInfo", "Message", "Reason")),
    )


def _line(value: Any) -> str:
    """Return a text or a structured diagnosis of the platform as one line."""
    text = (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )
    return " ".join(text.split())


def _moment(value: Any) -> str | None:
    """Return a time of an answer as RFC 3339, UTC; None if it is not a valid time.

    A time without a time zone is read in this machine's time zone.
    """
    if isinstance(value, (int, float)) or (
        isinstance(value, str) and value.isascii() and value.isdigit()
    ):
        seconds = float(value)
        if seconds <= 0:
            return None
        found = datetime.fromtimestamp(seconds / 1000 if seconds > 1e11 else seconds, timezone.utc)
    else:
        try:
            found = datetime.fromisoformat(str(value).strip().replace("Z", "+00:00"))
        except ValueError:
            return None
    if found.year < 2000:  # Go encodes a missing time as the year 1
        return None
    return found.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made_at(task: Task) -> float:
    """Return a task's submission time in seconds since the epoch, by the platform's clock.

    The time is read from the task's id, else from its creation time; it is 0 if both are missing.
    """
    match = re.match(r"t-(\d{14})", task.id)
    try:
        if match:
            return (
                datetime.strptime(match[1], "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()
            )
    except ValueError:
        pass
    return (
        datetime.fromisoformat(task.created_at.replace("Z", "+00:00")).timestamp()
        if task.created_at
        else 0.0
    )
