"""What jobs have written whose whole directory this host sees, as a cluster's login host does: many
jobs, one question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterjob.node.host_server.poll import News
from clusterjob.node.logs import ends

JOB = re.compile(r"[^\W_][^/\0\n]*(?:/elements/[0-9]+)?")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_SHORT = 1 << 20  # bytes of a worker's stderr that is brought for the sake of its last lines


def looks(home: Path, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return what is new in the directories of jobs.

    Args:
        home: where all of ours lies on this host.
        request: ``most``, the bytes that are wanted at once; ``jobs``, for each: ``job``, its
            directory's name; ``logs``: ``all``, ``none``, or ``last`` for the workers' stderr once
            the step has ended; ``have``, for each file how much of it the submitter
            has: bytes of those that grow, the stamp of those that are replaced.
    """
    answers, data = [], bytearray()
    for asked in request["jobs"]:
        if not JOB.fullmatch(asked["job"]):
            raise ValueError(f"{asked['job']!r} is no job")
        job_dir = home / "jobs" / asked["job"]
        news = News(job_dir, asked["have"], data=data, most=int(request["most"]))
        known = job_dir.is_dir()
        if known:
            _look(job_dir, news, logs=asked["logs"])
        answers.append({"known": known, "files": news.files, "more": news.more})
    return {"jobs": answers}, bytes(data)


def _look(job_dir: Path, news: News, logs: str) -> None:
    over = any(ends.directory(job_dir).glob("srun.*"))
    for node in _entries(job_dir / "logs") if logs != "none" else []:
        if not node.is_dir():
            continue
        if logs == "all":
            news.node_logs(node)
        elif over:
            for path in _entries(node):
                if path.suffix == ".err" and path.stat().st_size <= _SHORT:
                    news.grown(path)
    news.grown(job_dir / "logs" / "slurm.out")
    news.grown(job_dir / "events.jsonl")
    # The ends first: whoever has read the verdict looks at nothing else.
    for path in _entries(ends.directory(job_dir)):
        if path.suffix != ".part":
            news.replaced(path)
    news.replaced(job_dir / "result.json")
    news.gone()


def _entries(folder: Path) -> Iterator[Path]:
    """Yield what lies in a directory under a name that we give."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in found if _NAME.fullmatch(path.name))
