"""Call ``volc ml_task`` and explain its errors."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.backends.batch_command.attempts import CLOCKS_APART
from clusterjob.backends.batch_command.command import TIMEOUT, CommandOutput, run
from clusterjob.backends.batch_command.platform import Instance, Task
from clusterjob.backends.mlp.answers import (
    STATES,
    made_at,
    parse_instance,
    parse_rows,
    parse_task,
    parse_task_id,
)
from clusterjob.errors import ClusterJobError, SubmitError, SubmitInDoubtError

COMMAND, SIBLING = "volc", "mlp"
ACCOUNT = ("VOLC_PROFILE", "VOLC_REGION")  # the command's variables that select an account
SUBMIT_TIMEOUT = 600.0  # seconds; the same command uploads the code
_PAGE = 100  # number of rows to request in one answer
# The platform's default page size. An answer with fewer rows is the last page, even if the platform
# limits pages to fewer than `_PAGE` rows.
_DEFAULT_PAGE = 10
_MAX_PAGES = 200
# Up to this many names are searched one by one; for more names, all tasks are listed.
_FEW = 3
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
        self._account = {name: (account or {}).get(name) for name in ACCOUNT}
        self._submit_timeout = submit_timeout

    # -- the operations of a platform --------------------------------------------------------------

    def submit(self, conf: Path) -> str:
        """Submit the task in a file and return the task's id.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        answer = self._run(
            "submit", "--conf", str(conf), "--output", "json", timeout=self._submit_timeout
        )
        if answer.code == 0:
            if (task_id := parse_task_id(answer)) is not None:
                return task_id
            raise SubmitInDoubtError(f"{COMMAND} printed no task id: {answer.out.strip()[:120]!r}")
        error = _error(answer, "the platform refuses the task")
        if (answer.timed_out or _IN_DOUBT.search(answer.message)) and not _UNREACHED.search(
            answer.message
        ):
            raise SubmitInDoubtError(error.message, error.hint)
        raise SubmitError(error.message, error.hint)

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        """Return all tasks with one of the names, the oldest first.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        # All elements of an array share the job's id as a prefix: one search finds them.
        parts = {re.sub(r"_\d+$", "", name) for name in names}
        found = {
            task.id: task
            for part in (sorted(parts) if len(parts) <= _FEW else [""])
            for task in self._listed(part, since)
            if task.name in names
        }
        # The platform lists the newest first. The sort is stable: it keeps the order of tasks that
        # were submitted in the same second.
        oldest_first = [*found.values()][::-1]
        return sorted(oldest_first, key=made_at)

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers, node 0 first.

        See `clusterjob.backends.batch_command.platform.Platform`.
        """
        rows = self._rows("instance", "list", "--id", task_id)
        return sorted(
            (parse_instance(row, index) for index, row in enumerate(rows)),
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
        if answer.code != 0 and not _ENDED_ALREADY.search(answer.message):
            raise _error(answer, "the platform does not cancel the task")

    # -- queries of `doctor` -----------------------------------------------------------------------

    def newest(self, count: int) -> list[tuple[Mapping[str, Any], Task | None]]:
        """Return the account's newest tasks: raw rows, each with its parsed task or None.

        Raises:
            ClusterJobError: the platform does not answer.
        """
        rows = self._rows("list", "--status", ",".join(STATES), "--limit", str(count))
        return [(row, parse_task(row)) for row in rows[:count]]

    def run(self, *arguments: str) -> CommandOutput:
        """Run the command `volc` with any arguments, such as ``version``.

        Raises:
            SubmitError: the command is not installed.
        """
        check_installed()
        return run([COMMAND, *arguments], self._account)

    # -- the command -------------------------------------------------------------------------------

    def _listed(self, name: str, since: float) -> Iterator[Task]:
        """Yield tasks page by page in the platform's order, the newest first.

        It stops at the last page, or at tasks older than `since`.

        Args:
            name: a part of the tasks' names; empty for all tasks.
            since: seconds since the epoch, by this machine's clock.
        """
        seen: set[str] = set()
        query = ["list", "--status", ",".join(STATES), *(("--name", name) if name else ())]
        for _ in range(_MAX_PAGES):
            rows = self._rows(*query, "--limit", str(_PAGE), "--offset", str(len(seen)))
            found = [task for row in rows if (task := parse_task(row)) is not None]
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

    def _rows(self, *arguments: str) -> list[Mapping[str, Any]]:
        return parse_rows(self._query(*arguments, "--output", "json"))

    def _query(self, *arguments: str) -> CommandOutput:
        """Return the answer to a query.

        Raises:
            ClusterJobError: the command failed.
        """
        answer = self._run(*arguments)
        if answer.code != 0:
            raise _error(answer, "the platform does not answer")
        return answer

    def _run(self, *arguments: str, timeout: float = TIMEOUT) -> CommandOutput:
        check_installed()
        try:
            return run([COMMAND, "ml_task", *arguments], self._account, timeout=timeout)
        except OSError as error:
            raise SubmitError(f"{COMMAND} cannot be run: {error.strerror}", _INSTALL) from error


def check_installed() -> None:
    """Raise an error if the platform's command is missing.

    Raises:
        SubmitError: the command is not installed, or not on PATH.
    """
    if shutil.which(COMMAND) is not None:
        return
    directory = Path("~/.volc/bin").expanduser()
    if os.access(directory / COMMAND, os.X_OK):
        raise SubmitError(
            f"the platform's command {COMMAND} is in {directory}, which is not on PATH",
            f'export PATH="{directory}:$PATH"',
        )
    raise SubmitError(f"the platform's command {COMMAND} is not installed", _INSTALL)


def _error(answer: CommandOutput, otherwise: str) -> ClusterJobError:
    """Return the error for a failed command: its text, with a hint if the error is known."""
    if _UNREACHED.search(answer.message):
        return ClusterJobError(
            f"the platform is not reached: {answer.message}",
            "check the network, the proxy and the region (VOLC_REGION)",
        )
    if answer.timed_out or _IN_DOUBT.search(answer.message):
        return ClusterJobError(
            f"the platform does not answer: {answer.message}",
            "check the network and the proxy, or try again later: the service may be busy",
        )
    for pattern, message, hint in _KNOWN_ERRORS:
        if re.search(pattern, answer.message, re.IGNORECASE):
            return ClusterJobError(f"{message}: {answer.message}", hint)
    return ClusterJobError(f"{otherwise}: {answer.message}")
