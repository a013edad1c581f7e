"""Platforms with a submit command and no disk in common with the submitter: what one has to do, and
what it says of its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from clusterjob.node.verdict import JobState


@dataclass(frozen=True)
class Task:
    """One start of a job, as the platform knows it. A retry is another task of the same name.

    Attributes:
        id: the platform's id of it.
        name: the name that it was submitted with.
        state: where it stands.
        words: the platform's own name of that state.
        created_at: when it was submitted, RFC 3339, UTC; None where the platform does not say.
        started_at: when its workers were started; None before.
        ended_at: when it ended; None before.
        reason: what the platform says of it, one line.
    """

    id: str
    name: str
    state: JobState
    words: str
    created_at: str | None = None
    started_at: str | None = None
    ended_at: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class Instance:
    """One worker of a task: a node of the job.

    Attributes:
        name: what its log is asked for by, such as ``worker_0``.
        node_rank: which node of the job it is.
        words: the platform's own name of its state.
        exit_code: how its entry command ended; None before.
        reason: what the platform says of it, one line.
    """

    name: str
    node_rank: int
    words: str
    exit_code: int | None = None
    reason: str = ""


class Platform(Protocol):
    """What a platform can do."""

    def submit(self, conf: Path) -> str:
        """Submit the task that a file describes, and return its id.

        Raises:
            SubmitError: it is refused, and there is none.
            SubmitInDoubtError: the platform did not answer, or not clearly: there may be one.
        """

    def tasks(self, names: Sequence[str], since: float = 0.0) -> list[Task]:
        """Return all tasks that bear one of the names, the oldest first; few questions, however
        many names.

        Args:
            names: those of jobs; an element of an array is called ``ID_7``.
            since: seconds of the epoch, by this machine's clock: no task of these names is older.

        Raises:
            ClusterJobError: the platform does not answer, or lets nobody in.
        """

    def instances(self, task_id: str) -> list[Instance]:
        """Return a task's workers, node 0 first; none before they are made.

        Raises:
            ClusterJobError: as above.
        """

    def lines(self, task_id: str, instance: str, count: int) -> list[str]:
        """Return the last `count` lines of a worker's log, the oldest first; fewer where there are
        fewer.

        Raises:
            ClusterJobError: as above.
        """

    def cancel(self, task_id: str) -> None:
        """Have a task stopped; one that has ended stays as it is.

        Raises:
            ClusterJobError: as above.
        """
