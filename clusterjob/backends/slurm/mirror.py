"""Mirror job directories from a login host: many jobs in one request, by byte offset."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.logs.job_dir import ENDS, LOGS, RESULT, SLURM_LOG, event_files
from clusterjob.remote.mirror import LOG_BYTES, Volume, check_progress, contents, keep

_AT_ONCE = 500  # maximum number of jobs in one request
_STATUS_BYTES = 1 << 20  # maximum bytes of one answer with only the status of the jobs
# The files that the login host may send: replaced files, and growing files for each mode of
# logs (none, only stderr files, all).
_REPLACED = re.compile(r"result\.json|ends/\w[\w.-]*", re.ASCII)
_ALWAYS = r"events(?:\.\d{1,4}\.node\d{1,7})?\.jsonl|logs/slurm\.out"
_GROWN = {
    "none": re.compile(_ALWAYS),
    "last": re.compile(rf"{_ALWAYS}|logs/node\d+/\w[\w.-]*\.err", re.ASCII),
    "all": re.compile(rf"{_ALWAYS}|logs/node\d+/\w[\w.-]*", re.ASCII),
}


class ClusterMirror:
    """Local copies of the job directories of one cluster.

    Args:
        label: name of the login host in error messages.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._stamps: dict[str, dict[str, str]] = {}
        self._volumes: dict[str, Volume] = {}

    def poll(
        self,
        ask: Callable[..., tuple[dict[str, Any], bytes]],
        wanted: Sequence[tuple[Record, bool]],
    ) -> dict[str, bool]:
        """Fetch new data of jobs; return for each job id whether more data is waiting.

        Args:
            ask: sends a request to the login host; see `clusterjob.remote.session.Session.ask`.
            wanted: the jobs, each with a flag that requests its logs.

        Raises:
            HostError: the host does not answer, or its answer is malformed.
        """
        more: dict[str, bool] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            chunk = wanted[begin : begin + _AT_ONCE]
            asked = [self._asked(record, logs=logs) for record, logs in chunk]
            bulk = any(job["logs"] != "none" for job in asked)
            most = LOG_BYTES if bulk else _STATUS_BYTES
            answer, data = ask("poll", jobs=asked, most=most, bulk=bulk)
            found = answer["jobs"]
            if len(found) != len(chunk):
                raise HostError(
                    self._label,
                    f"it answers for {len(found)} jobs, but {len(chunk)} were requested",
                )
            check_progress(self._label, found, data=data, most=most)
            parts = contents(
                self._label, [file for one in found for file in one["files"]], data=data
            )
            for (record, _), had, one in zip(chunk, asked, found, strict=True):
                self._volumes.setdefault(
                    record.job_id, Volume(self._label, record.job_dir, nodes=record.nodes)
                ).check([*had["sizes"], *had["stamps"]], one["files"])
                for file, content in itertools.islice(parts, len(one["files"])):
                    keep(
                        self._label,
                        record.job_dir,
                        file=file,
                        content=content,
                        sizes=had["sizes"],
                        stamps=self._stamps[record.job_id],
                        grown=_GROWN[had["logs"]],
                        replaced=_REPLACED,
                    )
                more[record.job_id] = one["more"]
        return more

    def _asked(self, record: Record, *, logs: bool) -> dict[str, Any]:
        """Return a job's part of the request, with the local version of each file."""
        known = self._stamps.setdefault(record.job_id, {})
        replaced = [*_files_in(record.job_dir / ENDS), record.job_dir / RESULT]
        grown = [*event_files(record.job_dir), record.job_dir / LOGS / SLURM_LOG]
        # With --launcher srun, the root cause is found in the last lines of the workers' stderr.
        mode = "all" if logs else "last" if record.job.launcher == "srun" else "none"
        if mode != "none":
            grown += [
                path
                for node in _files_in(record.job_dir / LOGS)
                if node.is_dir()
                for path in _files_in(node)
            ]

        def by_name(paths: Iterable[Path]) -> dict[str, Path]:
            return {str(path.relative_to(record.job_dir)): path for path in paths if path.exists()}

        return {
            "job": record.directory_name,
            "node": None,
            "logs": mode,
            "sizes": {name: path.stat().st_size for name, path in by_name(grown).items()},
            "stamps": {name: known.get(name, "") for name in by_name(replaced)},
        }


def _files_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
