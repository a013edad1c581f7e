"""The interface of a platform with a submit command: its operations, tasks and workers.

Such a platform shares no disk with the submitter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from clusterjob.node.verdict import JobState

_PARALLEL = 8  # maximum number of parallel calls to a platform


@dataclass(frozen=True)
class Task:
    """One attempt of a job on the platform. A retry is another task with the same name.

    Attributes:
        id: the platform's id of the task; the platform gives it to no other task.
        name: the name with which it was submitted.
        state: its state.
        state_text: the platform's name of that state.
        created_at: the submission time, RFC 3339, UTC; None if the platform does not report it.
        started_at: the start time of its workers; None before. A cancelled task without it has no
            logs.
        ended_at: the end time; None before.
        reason: the platform's explanation of the state, one line.
        ending: whether the platform is stopping the task already, so that it needs no `cancel`.
    """

    id: str
    name: str
    state: JobState
    state_text: str
    created_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    reason: str = ""
    ending: bool = False


@dataclass(frozen=True)
class Instance:
    """One worker of a task: a node of the job.

    Attributes:
        name: the name by which its log is read, such as ``worker_0``.
        node_rank: the node's rank in the job.
        state_text: the platform's name of its state.
        exit_code: the exit code of its entry command; None before the end.
        reason: the platform's explanation of the state, one line.
        failed: whether the platform counts it as failed; it needs no exit code then.
    """

    name: str
    node_rank: int
    state_text: str
    exit_code: int | None = None
    reason: str = ""
    failed: bool = False


class Platform(Protocol):
    """The operations of a platform."""

    def submit(self, conf: Path) -> str:
        """Submit the task in a file and return the task's id.

        Raises:
            SubmitError: the platform refused the task; none was created.
            SubmitInDoubtError: the platform gave no clear answer; a task may have been created.
        """

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        """Return all tasks with one of the names, the oldest first.

        The number of calls should stay small for any number of names.

        Args:
            names: the names of jobs; the name of an array element is ``ID_7``.
            since: seconds since the epoch, by this machine's clock; no task of these names is
                older.

        Raises:
            ClusterJobError: the platform does not answer, or refuses the login.
        """

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers, node 0 first; an empty list before they are created.

        Raises:
            ClusterJobError: the platform does not answer, or refuses the login.
        """

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        """Return the last `count` lines of a worker's log, the oldest first.

        The list is shorter if the log has fewer lines.

        Raises:
            ClusterJobError: the platform does not answer, or refuses the login.
        """

    def cancel(self, task_id: str) -> None:
        """Cancel a task; do nothing if it has ended. The call is repeated until the task ends.

        Raises:
            ClusterJobError: the platform does not answer, or refuses the login.
        """


def in_parallel(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a function to items, `_PARALLEL` at a time; raise the first error at the end."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_PARALLEL, len(items))) as pool:
        return list(pool.map(work, items))
