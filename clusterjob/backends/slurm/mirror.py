"""Mirror job directories from a login host: many jobs in one request, by byte offset."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from clusterjob.core.records import Record
from clusterjob.errors import HostError
from clusterjob.node.logs.job_dir import ENDS, EVENTS, LOGS, RESULT, SLURM_LOG
from clusterjob.remote.mirror import LOG_BYTES, Volume, check_progress, contents, held, keep

_AT_ONCE = 500  # maximum number of jobs in one request
_STATUS_BYTES = 1 << 20  # maximum bytes of one answer with only the status of the jobs
# The files that the login host may send; results before the verdict: after that the job has ended.
_GROWN = [EVENTS, "events.*.jsonl", f"{LOGS}/{SLURM_LOG}"]
_REPLACED = [f"{ENDS}/*", RESULT]


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
            bulk = any(len(job["grown"]) > len(_GROWN) for job in asked)
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
                        grown=had["grown"] + had["late"],
                        replaced=_REPLACED,
                    )
                more[record.job_id] = one["more"]
        return more

    def _asked(self, record: Record, *, logs: bool) -> dict[str, Any]:
        """Return a job's part of the request, with the local version of each file."""
        known = self._stamps.setdefault(record.job_id, {})
        grown = [*(["logs/node*/*"] if logs else []), *_GROWN]
        # With --launcher srun, the root cause is found in the last lines of the workers' stderr.
        late = ["logs/node*/*.err"] if record.job.launcher == "srun" and not logs else []
        return {
            "job": record.directory_name,
            "node": None,
            "grown": grown,
            "late": late,
            "replaced": _REPLACED,
            "sizes": held(record.job_dir, grown + late),
            "stamps": {name: known.get(name, "") for name in held(record.job_dir, _REPLACED)},
        }
