"""The verdict of a node whose coordinator gives none, and the record of a node's end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterjob.node.logs import ends
from clusterjob.node.logs.events import now
from clusterjob.node.logs.log_files import node_directory
from clusterjob.node.verdict import CANCELLED_EXIT_CODE, Failure, JobState, Verdict


class NodeEnd:
    """The end of one node.

    Args:
        job_dir: the job's directory, as this node sees it.
        node_rank, host: the node.
        attempt: the number of the job's attempt, from 0.
        failure: returns a failure of the node, for a reason.
    """

    def __init__(
        self,
        job_dir: Path,
        node_rank: int,
        host: str,
        attempt: int,
        failure: Callable[[str], Failure],
    ) -> None:
        self._job_dir = job_dir
        self._node_rank = node_rank
        self._host = host
        self._attempt = attempt
        self._failure = failure

    def verdict(self, state: JobState, reason: str) -> Verdict:
        """Return this node's own verdict."""
        cancelled = state is JobState.CANCELLED
        return Verdict(
            state,
            CANCELLED_EXIT_CODE if cancelled else 1,
            reason=reason,
            failure=None if cancelled else self._failure(reason),
            attempt=self._attempt,
            ended_at=now(),
        )

    def recorded(self) -> Verdict | None:
        """Return the verdict of this attempt from the shared job directory; None without one."""
        verdict = ends.read_result(self._job_dir)
        return verdict if verdict is not None and verdict.attempt == self._attempt else None

    def record(self, verdict: Verdict, usage: Mapping[str, Any], *, coordinates: bool) -> None:
        """Write this node's end, and the job's verdict if its coordinator could not.

        Args:
            verdict: the job's verdict, as this node knows it.
            usage: the sums of this node's samples.
            coordinates: whether the coordinator is in this process.

        Raises:
            OSError: the end cannot be written.
        """
        end = verdict.to_json() | {"host": self._host, "usage": usage}
        # One node looks at each copy of the code: the coordinator's, and those with a copy.
        if not coordinates and not (self._node_rank and node_directory(self._job_dir, 0).exists()):
            end["in_code"] = ends.files_in_code()
        ends.write(self._job_dir, self._node_rank, end=end)
        if coordinates and not ends.has_result(self._job_dir, self._attempt):
            ends.write_result(self._job_dir, verdict)
