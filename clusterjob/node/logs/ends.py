"""How nodes and jobs ended, written where they ended.

``ends/node<k>.json`` is an agent's word; ``ends/node<k>.refused`` that of a script that could not
start one: line 1 the exit code, line 2 ``host: why``. ``result.json`` is the job's verdict. Wishes
lie beside them: ``detached``, the job lives on without the submitting side, and ``cancelled``, it
is to end (by SIGINT, where that file says ``interrupt``), hold for the job;
``ends/warned.<attempt>``, the end is near, for one start of it.

A job that is queued again starts again in the same directory. What an older start left does not
count for a later one: ends and verdicts bear their attempt, and from the second on a refusal does
so in its name, ``node<k>.attempt<n>.refused``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import files
from clusterjob.node.verdict import Failure, Verdict

_ASIDE = Path(f"/tmp/clusterjob-ends-{os.geteuid()}")  # noqa: S108 - used only where it is a directory of this user alone
_KEPT_ASIDE = 30 * 86400.0  # seconds
_INTERRUPT = b"interrupt\n"  # in ``cancelled``
_SHORT_TEXT = 4000  # characters
_LARGEST_REFUSAL = 1 << 20  # bytes
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


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
    """Return whether somebody wished the job to end: an agent that is only starting cannot write
    that down.
    """
    return (job_dir / "cancelled").exists()


def interrupted(job_dir: Path) -> bool:
    """Return whether the job is to end by Ctrl-C: its workers get SIGINT in the place of SIGTERM."""
    try:
        return (job_dir / "cancelled").read_bytes() == _INTERRUPT
    except OSError:
        return False


def cancel(job_dir: Path, *, interrupt: bool = False) -> None:
    """Note the wish that the job end; a full disk, or a directory that is gone, costs the note
    alone.

    Args:
        job_dir: the job's directory.
        interrupt: whether the workers are to get SIGINT first.
    """
    try:
        files.write_atomic(job_dir / "cancelled", _INTERRUPT if interrupt else b"")
    except OSError:
        pass


def warned(job_dir: Path, attempt: int) -> bool:
    """Return whether this start of the job was told that its end is near."""
    return warning_file(job_dir, attempt).exists()


def warn(job_dir: Path, attempt: int) -> None:
    """Note that the end of this start is near, for whoever cannot be told; what cannot be written
    costs the note alone.
    """
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
        files.write_reserved(path, _fitting(end | {"node_rank": node_rank}))


def written(job_dir: Path, attempt: int = 0) -> list[dict[str, Any]]:
    """Return the ends of one start of the job that agents wrote, in the order of their nodes."""
    found = []
    for path in _glob(directory(job_dir), "node*.json"):
        end = files.read_json(path)
        if (
            not isinstance(end, dict)
            or end.get("attempt", 0) != attempt
            or type(end.get("node_rank")) is not int
        ):
            continue
        if (
            path.stem == f"node{end['node_rank']}"
        ):  # a node speaks for itself alone, whatever its host has written
            found.append(end | {"reason": str(end.get("reason") or "")[:_SHORT_TEXT]})
    return sorted(found, key=lambda end: end["node_rank"])


def write_result(job_dir: Path, verdict: Verdict) -> None:
    """Record the job's end; on a read-only disk beside it, where `read_result` of this machine
    looks.

    Raises:
        OSError: it cannot be written into the job's directory.
    """
    try:
        files.write_reserved(job_dir / "result.json", _fitting(verdict.to_json()))
    except OSError as error:
        why = f"its directory cannot be written: {error.strerror}"
        _write_aside(
            job_dir, replace(verdict, reason=f"{verdict.reason} ({why})" if verdict.reason else why)
        )
        raise


def reserve(job_dir: Path, node_rank: int) -> None:
    """Take the space that this node's end, and node 0's verdict, will need, while there is some."""
    files.reserve(directory(job_dir) / f"node{node_rank}.json")
    if node_rank == 0:
        files.reserve(job_dir / "result.json")


def _fitting(end: dict[str, Any]) -> bytes:
    """Return an end as JSON; one that is larger than what is reserved for it without what its logs
    say too.
    """
    data = files.json_bytes(end)
    if len(data) <= files.RESERVED:
        return data
    failure = end.get("failure")
    if failure:
        last_lines = [line[:200] for line in failure["last_lines"][-20:]]
        failure = failure | {"message": failure["message"][:_SHORT_TEXT], "last_lines": last_lines}
    return files.json_bytes(
        end
        | {
            "failure": failure,
            "reason": str(end.get("reason", ""))[:_SHORT_TEXT],
            "consequences": [],
        }
    )


def read_result(job_dir: Path) -> Verdict | None:
    """Return the newest verdict on record; None where there is none, or what is there is no
    verdict.
    """
    for path in (job_dir / "result.json", _aside(job_dir)):
        try:
            return Verdict.from_json(files.read_json(path))
        except (OSError, ValueError):
            continue
    return None


def _write_aside(job_dir: Path, verdict: Verdict) -> None:
    try:
        _ASIDE.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(_ASIDE):
            files.write_json(_aside(job_dir), verdict.to_json())
            for old in _ASIDE.iterdir():
                with contextlib.suppress(
                    FileNotFoundError
                ):  # another job's: renamed or removed at this moment
                    if time.time() - old.stat().st_mtime > _KEPT_ASIDE:
                        old.unlink()
    except OSError:
        pass  # it is told to whoever is connected, and to nobody else


def _aside(job_dir: Path) -> Path:
    """Return where a verdict lies that did not get into the job's directory; nowhere, where another
    user has made that place.
    """
    name = hashlib.sha256(os.fsencode(job_dir)).hexdigest()
    return _ASIDE / f"{name}.json" if _is_ours(_ASIDE) else Path("/nonexistent")


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )


def has_result(job_dir: Path, attempt: int) -> bool:
    """Return whether the end of this start of the job, or of a later one, is on record."""
    return _attempt_of(job_dir / "result.json") >= attempt


def put_aside_result(job_dir: Path, attempt: int) -> None:
    """Move the verdict of an older start to ``ends/result.attempt<n>.json``: the job runs again,
    and has none.

    Raises:
        OSError: it cannot be moved.
    """
    path = job_dir / "result.json"
    older = _attempt_of(path)
    if 0 <= older < attempt:
        path.replace(directory(job_dir) / f"result.attempt{older}.json")
    if 0 <= _attempt_of(_aside(job_dir)) < attempt:
        _aside(job_dir).unlink()


def _attempt_of(path: Path) -> int:
    """Return which start of the job a verdict or a node's end is of; -1 where there is none."""
    end = files.read_json(path)
    attempt = end.get("attempt", 0) if isinstance(end, dict) else -1
    return attempt if type(attempt) is int else -1


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
    """Return the nodes whose script could not start an agent, as failures with the last lines that
    it printed.

    A directory that cannot be read, as for want of descriptors, tells of nobody.
    """
    found = []
    suffix = _refusal_suffix(attempt)
    for path in _glob(directory(job_dir), f"node*{suffix}"):
        try:
            code, _, message = (
                files.read_regular(path, _LARGEST_REFUSAL)
                .decode(errors="replace")
                .strip()
                .partition("\n")
            )
        except (OSError, ValueError):
            continue  # taken away since it was listed, or none of ours
        host, _, why = message.partition(": ")
        number = path.name.removeprefix("node").removesuffix(suffix)
        if _NUMBER.fullmatch(number):
            exit_code = int(code) if _NUMBER.fullmatch(code) and 0 < int(code) <= 255 else 1
            last = last_lines(node_directory(job_dir, int(number)) / "agent.log")
            found.append(
                Failure(
                    None,
                    None,
                    node_rank=int(number),
                    host=host[:_SHORT_TEXT],
                    exit_code=exit_code,
                    signal=None,
                    message=why[:_SHORT_TEXT],
                    last_lines=last,
                )
            )
    return sorted(found, key=lambda failure: failure.node_rank)


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []


def _refusal_suffix(attempt: int) -> str:
    return f".attempt{attempt}.refused" if attempt else ".refused"
