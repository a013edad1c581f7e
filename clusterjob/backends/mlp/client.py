"""``volc ml_task``: its commands and answers, and words for what goes wrong.

Source: the platform's documentation of its command line (1.2.57) and what its users show of it.
Builds differ in how they name the fields of an answer: each is looked for under all names that were
seen.
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
from clusterjob.backends.batch_command.command import PATIENCE, Answer, run
from clusterjob.backends.batch_command.platform import Instance, Task
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError
from clusterjob.node.verdict import JobState

COMMAND, SIBLING = "volc", "mlp"
ACCOUNT = ("VOLC_PROFILE", "VOLC_REGION")  # the command's variables that choose one
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
SUBMIT_PATIENCE = 600.0  # seconds: the code is uploaded by the same command
_PAGE = 100  # rows of one answer
# Rows of an answer where nobody asks for more: fewer are the last ones, whatever the platform's own
# limit is.
_DEFAULT_PAGE = 10
_MOST_PAGES = 200
_FEW = 3  # names up to which each is asked for by itself
_TASK_ID = re.compile(r"\bt-\d{14}-\w+")
_INSTALL = 'the platform\'s documentation, "command line tool", has its installer, which puts volc and mlp into ~/.volc/bin'

# (pattern, what is wrong, hint); the first that matches holds. The platform's own words follow in
# each message.
_UNKNOWN = r"[^;\n]{0,80}(?:not (?:be )?found|not exist|unknown|invalid|not support|not available)"
_TROUBLES = (
    (
        rf'exec: "{SIBLING}"|{SIBLING}: (?:command )?not found',
        f"{COMMAND} does not find its sibling {SIBLING}",
        'both lie in ~/.volc/bin: export PATH="$HOME/.volc/bin:$PATH"',
    ),
    (
        r"AccessKeyId or SecretAccessKey is empty|credentials?.{0,20}(?:not found|no such file|empty|missing)|not logged in|no credentials",
        "nobody is logged in to the platform",
        "`volc configure` asks for the keys; VOLC_AK, VOLC_SK and VOLC_REGION are another way",
    ),
    (
        r"SignatureDoesNotMatch|InvalidAccessKey|InvalidCredential|AuthFailure|InvalidSecretToken|signature.{0,40}not match|\b401\b",
        "the platform does not accept the keys",
        "`volc configure` writes new ones; VOLC_AK and VOLC_SK come before them",
    ),
    (
        r"region.{0,60}(?:empty|not supported|invalid|missing)",
        "the platform does not know the region",
        "`volc configure` or VOLC_REGION names one, such as cn-beijing; --set region=NAME for this job",
    ),
    (
        r"AccessDenied|not authorized|Unauthorized|no permission|permission denied|Forbidden|\b403\b",
        "the account has no permission for this",
        "an administrator of the account grants it, with the policy MLPlatformFullAccess or a part of it",
    ),
    (
        rf"queue\S*{_UNKNOWN}|InvalidQueue|QueueNotFound|unknown (?:resource ?)?queue",
        "the platform does not know the queue",
        "--set queue=NAME, or the queue's id, q-...; the console lists them under resource queues",
    ),
    (
        rf"flavor\S*{_UNKNOWN}|FlavorNotFound|unknown flavor",
        "the queue has no such flavor",
        "--set flavor=NAME; the console lists the flavors of each queue",
    ),
    (
        rf"image\S*{_UNKNOWN}|ImageNotFound|unknown image",
        "the platform does not find the image",
        "--set image=URL; the console lists them under images",
    ),
    (
        r"quota|insufficient|exceed",
        "the queue has not enough for it",
        "the console shows what the queue has, and what is in use",
    ),
)
# After these words nobody knows whether the service has done what it was asked to do.
_IN_DOUBT = re.compile(
    r"time[d ]?-?out|deadline exceeded|request canceled|\bEOF\b|connection reset|broken pipe|unexpected end|"
    r"(?:status|code|HTTP)\D{0,12}50\d\b|InternalError|ServiceUnavailable|internal server error",
    re.IGNORECASE,
)
_UNREACHED = re.compile(
    r"no such host|connection refused|network is unreachable|dial tcp", re.IGNORECASE
)
_ENDED_ALREADY = re.compile(
    r"already|has (?:been )?(?:ended|finished|stopped)|not running|invalid ?(?:status|state)|terminal",
    re.IGNORECASE,
)


class Volc:
    """One account's tasks, through the command.

    Args:
        account: those of `ACCOUNT` that choose it, and no others: not what this shell has of them.
            Its keys stay where they are.
        submit_patience: seconds that an upload and a submission may take.
    """

    def __init__(
        self, account: Mapping[str, str] | None = None, submit_patience: float = SUBMIT_PATIENCE
    ) -> None:
        self._account: dict[str, str | None] = {name: (account or {}).get(name) for name in ACCOUNT}
        self._submit_patience = submit_patience

    # -- what a platform does ------------------------------------------------------------------------------------------

    def submit(self, conf: Path) -> str:
        """Submit the task that a file describes, and return its id; see
        `clusterjob.backends.batch_command.platform.Platform`.
        """
        answer = self._run(
            "submit", "--conf", str(conf), "--output", "json", patience=self._submit_patience
        )
        task_id = _submitted(answer)
        if answer.code == 0 and task_id is not None:
            return task_id
        refused, in_doubt = (
            _words(answer, "the platform refuses the task"),
            answer.timed_out or _IN_DOUBT.search(answer.words) is not None,
        )
        if answer.code == 0:
            raise SubmitInDoubtError(f"{COMMAND} printed no task id: {answer.out.strip()[:120]!r}")
        if in_doubt and not _UNREACHED.search(answer.words):
            raise SubmitInDoubtError(refused.message, refused.hint)
        raise SubmitError(refused.message, refused.hint)

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        """Return all tasks that bear one of the names, the oldest first; see
        `clusterjob.backends.batch_command.platform.Platform`.
        """
        wanted = set(names)
        parts = {re.sub(r"_\d+$", "", name) for name in names}  # an array's elements bear its name
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
        )  # those of one second stay as the platform has them

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers, node 0 first; see
        `clusterjob.backends.batch_command.platform.Platform`.
        """
        answer = self._ask("instance", "list", "--id", task_id, "--output", "json")
        return sorted(
            (_instance(row, index) for index, row in enumerate(_rows(answer))),
            key=lambda instance: instance.node_rank,
        )

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        """Return the last `count` lines of a worker's log; see
        `clusterjob.backends.batch_command.platform.Platform`.
        """
        out = self._ask(
            "logs", "--task", task_id, "--instance", instance, "--lines", str(count)
        ).out
        return out.removesuffix("\n").split("\n") if out else []

    def cancel(self, task_id: str) -> None:
        """Have a task stopped; see `clusterjob.backends.batch_command.platform.Platform`."""
        answer = self._run("cancel", "--id", task_id)
        if answer.code != 0 and not _ENDED_ALREADY.search(answer.words):
            raise _words(answer, "the platform does not cancel the task")

    # -- what `doctor` asks ----------------------------------------------------------------------------------------------

    def newest(self, count: int) -> list[tuple[Mapping[str, Any], Task | None]]:
        """Return the account's newest tasks as the platform gives them, each with what is read of
        it: None where that is not a task.

        Raises:
            ClusterJobError: the platform does not answer.
        """
        answer = self._ask(
            "list", "--status", ",".join(STATES), "--limit", str(count), "--output", "json"
        )
        return [(row, _task(row)) for row in _rows(answer)[:count]]

    def run(self, *words: str) -> Answer:
        """Return what the command says to other words than a task's, such as its version.

        Raises:
            SubmitError: it is not installed.
        """
        check_installed()
        return run([COMMAND, *words], self._account)

    # -- the command ---------------------------------------------------------------------------------------------------

    def _listed(self, name: str | None, since: float) -> Iterator[Task]:
        """Yield tasks page by page, the newest first as the platform has them, until it has no more
        or they are older than `since`.
        """
        seen: set[str] = set()
        search = ("--name", name) if name is not None else ()
        for _ in range(_MOST_PAGES):
            page = ("--limit", str(_PAGE), "--offset", str(len(seen)))
            rows = _rows(
                self._ask("list", "--status", ",".join(STATES), *search, *page, "--output", "json")
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

    def _ask(self, *words: str) -> Answer:
        """Return the answer to a question.

        Raises:
            ClusterJobError: there is none.
        """
        answer = self._run(*words)
        if answer.code != 0:
            raise _words(answer, "the platform does not answer")
        return answer

    def _run(self, *words: str, patience: float = PATIENCE) -> Answer:
        if shutil.which(COMMAND) is None:
            raise _missing()
        try:
            return run([COMMAND, "ml_task", *words], self._account, patience=patience)
        except OSError as error:
            raise SubmitError(f"{COMMAND} cannot be run: {error.strerror}", _INSTALL) from error


def check_installed() -> None:
    """Refuse where the platform's command is not there.

    Raises:
        SubmitError: it is not installed, or not on PATH.
    """
    if shutil.which(COMMAND) is None:
        raise _missing()


def _missing() -> SubmitError:
    place = Path("~/.volc/bin").expanduser()
    if os.access(place / COMMAND, os.X_OK):
        return SubmitError(
            f"the platform's command {COMMAND} lies in {place}, which is not on PATH",
            f'export PATH="{place}:$PATH"',
        )
    return SubmitError(f"the platform's command {COMMAND} is not installed", _INSTALL)


def _words(answer: Answer, otherwise: str) -> ClusterJobError:
    """Return what is to be said of a command that failed: what is wrong where its words are known,
    and these words.
    """
    if _UNREACHED.search(answer.words):
        return ClusterJobError(
            f"the platform is not reached: {answer.words}",
            "the network, a proxy, or the region (VOLC_REGION)",
        )
    if answer.timed_out or _IN_DOUBT.search(answer.words):
        return ClusterJobError(
            f"the platform does not answer: {answer.words}",
            "the network, a proxy, or a service that is busy",
        )
    for pattern, message, hint in _TROUBLES:
        if re.search(pattern, answer.words, re.IGNORECASE):
            return ClusterJobError(f"{message}: {answer.words}", hint)
    return ClusterJobError(f"{otherwise}: {answer.words}")


def _submitted(answer: Answer) -> str | None:
    """Return the task's id as a submission prints it, as JSON or in words."""
    data = answer.data
    task_id = _get(data, "Id", "JobId", "TaskId", "id") if isinstance(data, dict) else None
    if isinstance(task_id, str) and task_id:
        return task_id
    match = _TASK_ID.search(answer.out)
    return match[0] if match else None


# -- answers ---------------------------------------------------------------------------------------------------------------


def _rows(answer: Answer) -> list[Mapping[str, Any]]:
    """Return the rows of an answer: a list, or an object that holds one.

    Raises:
        ClusterJobError: it is neither.
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
        return []  # how Go writes an empty list
    if not isinstance(data, list):
        raise ClusterJobError(
            f"{COMMAND} printed what is no list: {answer.out.strip()[:120]!r}",
            f"`{COMMAND} version` says which it is",
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
        name=f"worker_{node_rank}",  # as `logs` takes it, whatever form an answer has
        node_rank=node_rank,
        words=str(_get(row, "State", "Status") or ""),
        exit_code=int(code) if re.fullmatch(r"-?\d+", str(code)) else None,
        reason=_line(_get(row, "DiagInfo", "Message", "Reason")),
    )


def _line(value: Any) -> str:
    """Return what the platform says on one line: a text, or what a diagnosis is made of."""
    text = (
        value
        if isinstance(value, str)
        else ""
        if value is None
        else json.dumps(value, ensure_ascii=False)
    )
    return " ".join(text.split())


def _moment(value: Any) -> str | None:
    """Return a time of an answer as RFC 3339, UTC; None where it is none. One without a time zone
    is taken for this machine's.
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
    if found.year < 2000:  # how Go writes no time at all
        return None
    return found.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def made_at(task: Task) -> float:
    """Return when a task was submitted, seconds by the platform's clock: its id says so; 0 where it
    does not.
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
