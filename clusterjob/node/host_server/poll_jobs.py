"""Poll many job directories on a login host in one request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import requests
from clusterjob.node.host_server.poll import News
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import EVENTS, LOGS, RESULT, SLURM_LOG

JOB = re.compile(r"[^\W_][^/\0\n]*(?:/elements/[0-9]+)?")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MAX_LAST = 1 << 20  # bytes of a worker's stderr that is sent for its last lines


def poll_jobs(home: Path, request: requests.PollJobs) -> tuple[dict[str, Any], bytes]:
    """Return new data in the directories of jobs.

    Args:
        home: clusterjob's directory on this host.
        request: the jobs, each with the sizes and stamps of the files that the submitter has.

    Returns:
        ``jobs``: for each job, ``known``: whether its directory exists; ``files``: the files whose
        bytes follow; ``more``: whether there is more data.
    """
    answers, data = [], bytearray()
    for asked in request.jobs:
        if not JOB.fullmatch(asked.job):
            raise ValueError(f"{asked.job!r} is not a job's name")
        job_dir = home / "jobs" / asked.job
        news = News(job_dir, asked.sizes, stamps=asked.stamps, data=data, most=request.most)
        known = job_dir.is_dir()
        if known:
            _look(job_dir, news, logs=asked.logs)
        answers.append({"known": known, "files": news.files, "more": news.more})
    return {"jobs": answers}, bytes(data)


def _look(job_dir: Path, news: News, logs: str) -> None:
    over = any(ends.directory(job_dir).glob("srun.*"))
    for node in _entries(job_dir / LOGS) if logs != "none" else []:
        if not node.is_dir():
            continue
        if logs == "all":
            news.node_logs(node)
        elif over:
            for path in _entries(node):
                if path.suffix == ".err" and path.stat().st_size <= _MAX_LAST:
                    news.grown(path)
    news.grown(job_dir / LOGS / SLURM_LOG)
    news.grown(job_dir / EVENTS)
    # Node results before the verdict: a submitter that has the verdict reads nothing more.
    for path in _entries(ends.directory(job_dir)):
        if path.suffix != ".part":
            news.replaced(path)
    news.replaced(job_dir / RESULT)
    news.gone()


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a directory whose names clusterjob may have written."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in found if _NAME.fullmatch(path.name))
