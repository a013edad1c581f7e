"""Write the stacks of ranks into the logs before their job is stopped.

``stacks[.attempt<A>][.restart<R>].json`` has the content of ``clusterjob stacks --json``, the
reason of the stop and the time; the file ``.txt`` beside it is for a person.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.logs import log_files
from clusterjob.node.logs.events import now
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.frames import RankStack
from clusterjob.node.system.sanitize import sanitize


@dataclass(frozen=True)
class Round:
    """A round of the workers of a job, and the node that writes about it."""

    job_id: str
    attempt: int
    restart: int
    node_rank: int


def write(
    job_dir: Path,
    round_: Round,
    stacks: Sequence[RankStack],
    why: str,
    silent: Sequence[str] = (),
    dumps: Sequence[str] = (),
) -> str:
    """Write the files; return the path of the text, relative to the job directory.

    Args:
        job_dir: the job's directory.
        round_: the round, which gives the files their names.
        stacks: the stacks of the living ranks.
        why: why the job is stopped.
        silent: the nodes that did not answer, one text for each.
        dumps: the dumps of torch's flight recorder, relative to the job directory.

    Raises:
        OSError: a file cannot be written.
    """
    name = f"stacks{log_files.round_suffix(round_.attempt, round_.restart)}.txt"
    path = log_files.node_directory(job_dir, round_.node_rank) / name
    at, why = now(), sanitize(why)
    data = grouping.to_json(round_.job_id, stacks) | {
        "why": why,
        "time": at,
        "silent_nodes": list(silent),
        "flight_recorder": list(dumps),
    }
    _write(path.with_suffix(".json"), json.dumps(data))
    lines = [f"{at} {why}", *(f"{node} did not answer" for node in silent)]
    lines += [f"torch's flight recorder: {name}" for name in dumps]
    lines.append("")
    lines += grouping.text(stacks, all_threads=True)
    _write(path, "".join(f"{sanitize(line)}\n" for line in lines))
    return str(path.relative_to(job_dir))


def _write(path: Path, text: str) -> None:
    # O_NONBLOCK: a pipe of this name would block the coordinator for ever.
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w", encoding="utf-8", errors="replace") as stream:
        stream.write(text)
