"""How nodes and jobs ended, written where they ended.

``ends/node<k>.json`` is an agent's word; ``ends/node<k>.refused`` that of a script that could not start one: line 1 the exit
code, line 2 ``host: why``. ``result.json`` is the job's verdict. Wishes lie beside them: ``detached``, the job lives on
without the submitting side, and ``cancelled``, it is to end, hold for the job; ``ends/warned.<attempt>``, the end is near,
for one start of it.

A job that is queued again starts again in the same directory. What an older start left does not count for a later one: ends
and verdicts bear their attempt, and from the second on a refusal does so in its name, ``node<k>.attempt<n>.refused``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterjob.node import files
from clusterjob.node.logs import last_lines, node_directory
from clusterjob.node.verdict import Failure, Verdict


def directory(job_dir: Path) -> Path:
    """Return where the ends of a job's nodes lie."""
    return job_dir / "ends"


def detached(job_dir: Path) -> bool:
    """Return whether the job may live on without the process that submitted it."""
    return (job_dir / "detached").exists()


def detach(job_dir: Path) -> None:
    """Let the job live on without this process.

    Raises:
        OSError: the wish cannot be written.
    """
    files.write_atomic(job_dir / "detached", b"")


def cancelled(job_dir: Path) -> bool:
    """Return whether somebody wished the job to end: an agent that is only starting cannot write that down."""
    return (job_dir / "cancelled").exists()


def cancel(job_dir: Path) -> None:
    """Note the wish that the job end; a full disk, or a directory that is gone, costs the note alone."""
    try:
        files.write_atomic(job_dir / "cancelled", b"")
    except OSError:
        pass


def warned(job_dir: Path, attempt: int) -> bool:
    """Return whether this start of the job was told that its end is near."""
    return warning_file(job_dir, attempt).exists()


def warn(job_dir: Path, attempt: int) -> None:
    """Note that the end of this start is near, for whoever cannot be told; what cannot be written costs the note alone."""
    try:
        warning_file(job_dir, attempt).touch(0o600)
    except OSError:
        pass


def warning_file(job_dir: Path, attempt: int) -> Path:
    """Return the file whose being there says that the end of this start is near."""
    return directory(job_dir) / f"warned.{attempt}"


def write(job_dir: Path, node_rank: int, end: dict[str, Any]) -> None:
    """Record a node's end, which says of which attempt it is; that of a later one stays.

    Raises:
        OSError: it cannot be written.
    """
    path = directory(job_dir) / f"node{node_rank}.json"
    if _attempt_of(path) <= int(end.get("attempt", 0)):
        files.write_json(path, end | {"node_rank": node_rank})


def written(job_dir: Path, attempt: int = 0) -> list[dict[str, Any]]:
    """Return the ends of one start of the job that agents wrote, in the order of their nodes."""
    found = [files.read_json(path) for path in directory(job_dir).glob("node*.json")]
    own = [end for end in found if isinstance(end, dict) and end.get("attempt", 0) == attempt]
    return sorted(own, key=lambda end: int(end.get("node_rank", 0)))


def write_result(job_dir: Path, verdict: Verdict) -> None:
    """Record the job's end.

    Raises:
        OSError: it cannot be written.
    """
    files.write_json(job_dir / "result.json", verdict.to_json())


def has_result(job_dir: Path, attempt: int) -> bool:
    """Return whether the end of this start of the job, or of a later one, is on record."""
    return _attempt_of(job_dir / "result.json") >= attempt


def put_aside_result(job_dir: Path, attempt: int) -> None:
    """Move the verdict of an older start to ``ends/result.attempt<n>.json``: the job runs again, and has none.

    Raises:
        OSError: it cannot be moved.
    """
    path = job_dir / "result.json"
    older = _attempt_of(path)
    if 0 <= older < attempt:
        path.replace(directory(job_dir) / f"result.attempt{older}.json")


def _attempt_of(path: Path) -> int:
    """Return which start of the job a verdict or a node's end is of; -1 where there is none."""
    end = files.read_json(path)
    return int(end.get("attempt") or 0) if isinstance(end, dict) else -1


def refuse(job_dir: Path, node_rank: int, attempt: int, exit_code: int, why: str) -> None:
    """Record that a node could not start its agent; the first word of it stays.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        attempt: the start of the job.
        exit_code: of its script.
        why: ``host: why``.

    Raises:
        OSError: it cannot be written.
    """
    path = directory(job_dir) / f"node{node_rank}{_refusal_suffix(attempt)}"
    if not path.exists():
        files.write_atomic(path, f"{exit_code}\n{why}\n".encode(errors="surrogateescape"))


def refusals(job_dir: Path, attempt: int = 0) -> list[Failure]:
    """Return the nodes whose script could not start an agent, as failures with the last lines that it printed."""
    found = []
    suffix = _refusal_suffix(attempt)
    for path in directory(job_dir).glob(f"node*{suffix}"):
        code, _, message = path.read_text(errors="replace").strip().partition("\n")
        host, _, why = message.partition(": ")
        number = path.name.removeprefix("node").removesuffix(suffix)
        if number.isdigit():
            exit_code = int(code) if code.isdigit() and int(code) else 1
            last = last_lines(node_directory(job_dir, int(number)) / "agent.log")
            found.append(Failure(None, None, int(number), host, exit_code, None, why, last))
    return sorted(found, key=lambda failure: failure.node_rank)


def _refusal_suffix(attempt: int) -> str:
    return f".attempt{attempt}.refused" if attempt else ".refused"
