"""Read and write the files that record how nodes and jobs ended.

All files are in the job's directory:

- ``ends/node<k>.json``: a node's end, written by its agent; ``ends/node<k>.attempt<n>.json``: the
  end of an earlier attempt.
- ``ends/node<k>.refused``: written by a script that could not start an agent. Line 1 is the exit
  code, line 2 is ``host: why``.
- ``result.json``: the job's verdict.
- ``detached``: a request that the job continues without the submitting process.
- ``cancelled``: a request to end the job, with SIGINT if the file contains ``interrupt``.
- ``ends/warned.<attempt>``: a preemption warning for one attempt of the job.
- ``ends/memory.<attempt>``: the factor of memory, in thousandths, with which a job is queued again.
- For the job's script, which reads no JSON: ``ends/started.<attempt>`` (one with --until-done
  has begun), ``ends/code.<attempt>`` (the exit code of its verdict), ``ends/again.<attempt>`` (the
  job has to be queued again).
- ``ends/avoid.<host>``: a host that caused a failure; the next attempt of the job avoids it.
- ``ends/next.<attempt>``: the scheduler's id of the job that continues after this attempt, if it is
  another one; written by the job's script.

A job that is queued again runs again in the same directory. The files of an older attempt do not
count for a later attempt: ends and verdicts contain their attempt. From the second attempt on, the
name of a refusal contains the attempt: ``node<k>.attempt<n>.refused``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.logs.events import now
from clusterjob.node.logs.job_dir import (
    AGENT_LOG,
    CANCEL_STACKS,
    CANCELLED,
    CODE,
    CODE_LIST,
    DETACHED,
    ENDS,
    RESULT,
)
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import files, processes
from clusterjob.node.verdict import Failure, FailureKind, JobState, Verdict

REQUEST_SECONDS = 2.0  # node 0's agent looks for a cancel request this often
STACKS_SECONDS = 2.0  # maximum seconds in which the stacks are saved before a stop
_INTERRUPT = "interrupt\n"  # the content of ``cancelled`` after Ctrl-C
_SHORT_TEXT = 4000  # characters of a shortened text
_MAX_ATTEMPTS = 5  # rounds in a shortened verdict
_MAX_NAMED = 10  # maximum number of names of written files, and of hosts with them
_MAX_WALK = 1.0  # maximum seconds to look for written files
_MAX_REFUSAL = 1 << 20  # maximum bytes of a refusal
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_EXIT_CODE = re.compile(r"\d{1,3}", re.ASCII)
_NODE_END = re.compile(r"node(?P<node>\d{1,9})(?:\.attempt(?P<attempt>\d{1,9}))?\.json", re.ASCII)


def directory(job_dir: Path) -> Path:
    """Return the directory with the ends of a job's nodes."""
    return job_dir / ENDS


def detached(job_dir: Path) -> bool:
    """Return whether the job may continue without the process that submitted it."""
    return (job_dir / DETACHED).exists()


def detach(job_dir: Path) -> None:
    """Let the job continue without this process.

    Raises:
        OSError: the request cannot be written.
    """
    files.write_atomic(job_dir / DETACHED, b"")


def cancelled(job_dir: Path) -> bool:
    """Return whether the job has a cancel request.

    It explains the end of a job whose agent was still starting and could not write a verdict.
    """
    return (job_dir / CANCELLED).exists()


def interrupted(job_dir: Path) -> bool:
    """Return whether Ctrl-C caused the cancel: workers then get SIGINT instead of SIGTERM."""
    return files.read_text(job_dir / CANCELLED, len(_INTERRUPT)) == _INTERRUPT


def cancel(job_dir: Path, *, interrupt: bool = False) -> None:
    """Write a cancel request; an error such as a full disk or a missing directory is ignored.

    Args:
        job_dir: the job's directory.
        interrupt: whether the workers get SIGINT first.
    """
    with contextlib.suppress(OSError):
        files.write_atomic(job_dir / CANCELLED, _INTERRUPT.encode() if interrupt else b"")


def stacks_wanted(job_dir: Path) -> bool:
    """Return whether a cancel must save the stacks of the workers first."""
    return (job_dir / CANCEL_STACKS).exists()


def want_stacks(job_dir: Path) -> None:
    """Let a cancel save the stacks of the workers first; call it before the cancel.

    An error such as a full disk or a missing directory is ignored.
    """
    with contextlib.suppress(OSError):
        (job_dir / CANCEL_STACKS).touch(0o600)


def want_memory(job_dir: Path, attempt: int, factor: float) -> None:
    """Let the job's script queue the job again with `factor` times the memory.

    Raises:
        OSError: the request cannot be written.
    """
    thousandths = f"{round(factor * 1000)}\n".encode()
    files.write_atomic(directory(job_dir) / f"memory.{attempt}", thousandths)


def avoid(job_dir: Path, host: str) -> None:
    """Let the next attempt of the job avoid a host, if the script can read its name."""
    if _HOST.fullmatch(host):
        with contextlib.suppress(OSError):
            (directory(job_dir) / f"avoid.{host}").touch(0o600)


def warning_file(job_dir: Path, attempt: int) -> Path:
    """Return the file that marks a preemption warning for this attempt of the job.

    Processes that no forkserver started poll it.
    """
    return directory(job_dir) / f"warned.{attempt}"


def write(job_dir: Path, node_rank: int, end: dict[str, Any]) -> None:
    """Write a node's end, unless the end of a later attempt is recorded.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        end: the end, with its ``attempt``.

    Raises:
        OSError: the file cannot be written.
    """
    path = directory(job_dir) / f"node{node_rank}.json"
    older, attempt = _attempt_of(path), int(end.get("attempt", 0))
    if 0 <= older < attempt:
        with contextlib.suppress(OSError):  # its usage counts for the efficiency of the job
            path.replace(path.with_name(f"node{node_rank}.attempt{older}.json"))
    if older <= attempt:
        files.write_reserved(path, _fitting(end | {"node_rank": node_rank}))


def write_lost(job_dir: Path, node_rank: int, attempt: int, why: str) -> None:
    """Write the end of a node whose agent was killed, unless its end is recorded.

    An error such as a full disk is ignored.
    """
    with contextlib.suppress(OSError):
        if all(end["node_rank"] != node_rank for end in written(job_dir, attempt)):
            lost = {"state": str(JobState.LOST), "reason": why, "attempt": attempt, "time": now()}
            write(job_dir, node_rank, end=lost)


def written(job_dir: Path, attempt: int | None = 0) -> list[dict[str, Any]]:
    """Return the ends that agents wrote, in the order of nodes and attempts.

    Args:
        job_dir: the job's directory.
        attempt: only the ends of this attempt after which no later one ended; None for all ends.
    """
    found = []
    for match in map(_NODE_END.fullmatch, files.listed(str(directory(job_dir)))):
        if match is None or (match["attempt"] and attempt is not None):
            continue
        node, end = int(match["node"]), files.read_json(directory(job_dir) / match[0])
        # A host may write the end of another node's rank.
        if isinstance(end, dict) and end.get("node_rank") == node:
            own, reason = end.get("attempt", 0), str(end.get("reason") or "")[:_SHORT_TEXT]
            is_named = match["attempt"] in (None, str(own))
            if type(own) is int and attempt in (None, own) and is_named:
                found.append(end | {"node_rank": node, "attempt": own, "reason": reason})
    return sorted(found, key=lambda end: (end["node_rank"], end["attempt"]))


def files_in_code() -> str:
    """Return a line with the files that a job wrote into its copy of the code; empty if none.

    The variables of the agent, the caller, name the copy. Its list is newer than its own files.
    """
    tree = os.environ.get(contract.CODE_TREE) or os.environ.get(contract.CODE_DIR, "")
    if os.path.basename(tree) != CODE:
        return ""
    listed = os.path.join(os.path.dirname(tree), CODE_LIST)
    # Times of the inode: an archive keeps those of the content.
    tests = "( -name .git -o -name __pycache__ ) -prune -o ! -type d -newercc"
    found = processes.output_of(
        # What it finds before an error or the timeout counts.
        [
            "sh",
            "-c",
            f'timeout {_MAX_WALK} find "$@"; true',
            "sh",
            f"{tree}/",
            *tests.split(),
            listed,
            "-printf",
            "%P\\n",
        ],
        os.environ,
        timeout=2 * _MAX_WALK,
    ).splitlines()
    shown = ", ".join(found[:_MAX_NAMED]) + ", ..." * (len(found) > _MAX_NAMED)
    return f"written beside the code, in {tree} on {os.uname().nodename}: {shown}" if found else ""


def write_result(job_dir: Path, verdict: Verdict) -> None:
    """Write the job's verdict.

    Before it, the job's script gets its part.

    Raises:
        OSError: the verdict cannot be written.
    """
    with contextlib.suppress(OSError):  # the script then uses the exit code of srun
        if verdict.state is JobState.PREEMPTED:
            (directory(job_dir) / f"again.{verdict.attempt}").touch(0o600)
        if verdict.state is not JobState.LOST:
            code = f"{verdict.exit_code}\n".encode()
            files.write_atomic(directory(job_dir) / f"code.{verdict.attempt}", code)
    files.write_reserved(job_dir / RESULT, _fitting(verdict.to_json()))


def reserve(job_dir: Path, node_rank: int) -> None:
    """Reserve disk space on node 0 for the verdict, and then for this node's end."""
    if node_rank == 0:
        files.reserve(job_dir / RESULT)
    files.reserve(directory(job_dir) / f"node{node_rank}.json")


def _fitting(end: dict[str, Any]) -> bytes:
    """Return an end as JSON, shortened if it is larger than the reserved space.

    The logs contain the removed parts.
    """
    data = files.json_bytes(end)
    for name, shortened in _SHORTENED.items():
        if len(data) > files.RESERVED and end.get(name):
            end = end | {name: shortened(end[name])}
            data = files.json_bytes(end)
    return data


_SHORTENED: dict[str, Callable[[Any], Any]] = {
    "consequences": lambda _: [],
    "attempts": lambda rounds: rounds[-_MAX_ATTEMPTS:],
    "usage": lambda usage: usage | {"ranks": {}, "ran": {}},  # of hundreds of ranks
    "reason": lambda reason: reason[:_SHORT_TEXT],
    "failure": lambda failure: failure | {
        "message": failure["message"][:_SHORT_TEXT],
        "last_lines": [line[:200] for line in failure["last_lines"][-20:]],
    },
}  # fmt: skip


def read_result(job_dir: Path, older: int | None = None) -> Verdict | None:
    """Return the recorded verdict; None if there is no file with a valid verdict.

    Args:
        job_dir: the job's directory.
        older: the attempt before the newest one whose verdict is wanted; None for the newest.
    """
    path = job_dir / RESULT if older is None else _older_result(job_dir, older)
    with contextlib.suppress(OSError, ValueError):
        return Verdict.from_json(files.read_json(path))
    return None


def has_result(job_dir: Path, attempt: int) -> bool:
    """Return whether the verdict of this attempt, or of a later attempt, is recorded."""
    return _attempt_of(job_dir / RESULT) >= attempt


def put_aside_result(job_dir: Path, attempt: int) -> None:
    """Move the verdict of an older attempt to ``ends/result.attempt<n>.json``.

    While an attempt runs, its job must have no verdict.

    Raises:
        OSError: the file cannot be moved.
    """
    path = job_dir / RESULT
    older = _attempt_of(path)
    if 0 <= older < attempt:
        path.replace(_older_result(job_dir, older))


def _older_result(job_dir: Path, attempt: int) -> Path:
    return directory(job_dir) / f"result.attempt{attempt}.json"


def _attempt_of(path: Path) -> int:
    """Return the attempt of a verdict or of a node's end; -1 if there is none."""
    end = files.read_json(path)
    attempt = end.get("attempt", 0) if isinstance(end, dict) else -1
    return attempt if type(attempt) is int else -1


def refuse(job_dir: Path, node_rank: int, attempt: int, exit_code: int, why: str) -> None:
    """Record that a node could not start its agent; an existing record is not changed.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        attempt: the number of the job's attempt, from 0.
        exit_code: the exit code of the node's script.
        why: the host and the reason, as ``host: why``.

    Raises:
        OSError: the file cannot be written.
    """
    path = directory(job_dir) / f"node{node_rank}{_refusal_suffix(attempt)}"
    if not path.exists():
        files.write_atomic(path, f"{exit_code}\n{why}\n".encode(errors="surrogateescape"))


def refusals(job_dir: Path, attempt: int = 0) -> list[Failure]:
    """Return a failure for each node whose script could not start an agent.

    Each failure has the last lines of the node's agent.log. The list is empty if the directory
    cannot be read, for example because too many files are open.
    """
    found = []
    pattern = re.compile(rf"node(\d{{1,9}}){re.escape(_refusal_suffix(attempt))}", re.ASCII)
    for match in map(pattern.fullmatch, files.listed(str(directory(job_dir)))):
        if match is None:
            continue
        node_rank, path = int(match[1]), directory(job_dir) / match[0]
        # Another program may write the file or remove it meanwhile.
        with contextlib.suppress(OSError, ValueError):
            text = files.read_regular(path, _MAX_REFUSAL).decode(errors="replace").strip()
            code, _, message = text.partition("\n")
            host, _, why = message.partition(": ")
            failure = Failure.of_node(
                node_rank,
                host[:_SHORT_TEXT],
                message=why[:_SHORT_TEXT],
                kind=FailureKind.LAUNCH,
                exit_code=int(code) if _EXIT_CODE.fullmatch(code) and 0 < int(code) <= 255 else 1,
                last_lines=last_lines(node_directory(job_dir, node_rank) / AGENT_LOG),
            )
            found.append(failure)
    return sorted(found, key=lambda failure: failure.node_rank)


def _refusal_suffix(attempt: int) -> str:
    return f".attempt{attempt}.refused" if attempt else ".refused"
