"""Copy the logs of a task's workers from the platform into the job's directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clusterjob.backends.batch_command.log_stream import LogStream
from clusterjob.backends.batch_command.platform import Instance, Platform, in_parallel

# Lines of a worker's log in the first request; maximum lines.
_LINES, _MAX_LINES = 500, 128_000


class LogCollector:
    """Copies logs, and remembers how many lines each worker's log needed."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], int] = {}  # by task id and node rank

    def collect(
        self,
        job_dir: Path,
        platform: Platform,
        task_id: str,
        attempt: int,
        instances: Sequence[Instance],
    ) -> None:
        """Copy the current logs of some workers of a task, in parallel.

        Each request returns the last lines of a log. If they do not overlap the lines copied
        before, the request is repeated with more lines.

        Args:
            job_dir: the job's directory on this machine.
            platform: the platform.
            task_id: the task.
            attempt: the number of the task's attempt, from 0.
            instances: the workers.

        Raises:
            ClusterJobError: the platform does not answer, or the logs cannot be written.
        """

        def collect(instance: Instance) -> None:
            stream = LogStream(job_dir, instance.node_rank, attempt=attempt)
            key = (task_id, instance.node_rank)
            count = self._lines.get(key, _LINES)
            while True:
                lines = platform.lines(task_id, instance.name, count)
                if len(lines) < count or stream.joins(lines) or count >= _MAX_LINES:
                    break
                count *= 4
            self._lines[key] = min(count, _MAX_LINES)
            stream.take(lines)

        in_parallel(collect, instances)
