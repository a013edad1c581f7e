"""Write and read what a job records while it runs: files with one JSON object per line.

- ``events.jsonl``: the events of the job, each with wall-clock and monotonic time. The coordinator
  writes them. `ended_rounds` and `clusterjob.backends.job_progress` read them.
- ``logs/node<k>/phases.jsonl``: the begins of the phases of a node and of its ranks. The rank of
  the node is null.
- ``logs/node<k>/environment.jsonl``: for each attempt what ``clusterjob env`` shows, and the
  versions of the programs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from clusterjob.node.logs.job_dir import ENVIRONMENT, PHASES, event_files
from clusterjob.node.logs.log_files import node_directory, open_regular
from clusterjob.node.system import codec, files
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.files import Appender
from clusterjob.node.verdict import FailureKind, RoundEnd, Word, bounded

ROUND_ENDED = "round_ended"  # the event; its other fields are those of `RoundEnd`
# The coordinator adds these events when a rank has been late for three measurements, and when it
# is no longer late.
STRAGGLING, CAUGHT_UP = "straggling", "caught_up"
_MAX_ROUNDS = 1000  # rounds that are collected before the middle ones are dropped
_MAX_PHASES = 16 << 20  # bytes to read of a file: the phases of hundreds of rounds
_TORCH = re.compile(r"^(?:__version__|(cuda|hip))\b[^=\n]*= '([^'\n]{1,60})'", re.MULTILINE)
_DRIVER = Path("/sys/module/nvidia/version")
# Maximum bytes to read of a line, of a file. A short line counts as `_MIN_LINE` bytes, because its
# time does not depend on its length.
_MAX_LINE, _MAX_FILE = 1 << 20, 64 << 20
_MIN_LINE = 64
_Rank = Annotated[int, Limit(1 << 24)]


def now() -> str:
    """Return the time as RFC 3339 in UTC, with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Append events to ``events.jsonl``.

    Only the coordinator writes the file; the other agents send their events to it.

    Args:
        path: the file.
        shift: seconds to add to this machine's monotonic clock, so that all monotonic times of a
            job are times of the clock of its first coordinator.
    """

    def __init__(self, path: Path, shift: float = 0.0) -> None:
        self._file = Appender(path)
        self._shift = shift

    def add(self, event: str, **details: Any) -> None:
        """Append one event.

        An error such as a full disk loses the line and does not end the job.
        """
        line = {
            "time": now(),
            "monotonic": round(time.monotonic() + self._shift, 6),
            "event": event,
        }
        files.later(_append, self._file, line | details)


def _append(file: Appender, *lines: Mapping[str, Any]) -> None:
    """Append objects in one write."""
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    file.write(text.encode(errors="replace"))


def read_job_events(job_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a job, those of a coordinator that has moved after the earlier ones."""
    for path in counted_files(job_dir):
        yield from read_events(path)


def counted_files(job_dir: Path) -> list[Path]:
    """Return the event files of a job, in order of time.

    A coordinator that has moved counts from its first round: without one, it was cut off.
    """
    first, *moved = event_files(job_dir)
    started = (any(each.get("event") == "started" for each in read_events(path)) for path in moved)
    return [first, *itertools.compress(moved, started)]


def read_events(path: Path, limit: int = _MAX_FILE) -> Iterator[dict[str, Any]]:
    """Yield the complete events of a file; yield none if the file cannot be read.

    Lines that are too long or are not events are skipped.

    Args:
        path: the file.
        limit: maximum bytes to read.
    """
    with contextlib.suppress(OSError), open_regular(path) as stream:
        left = limit
        while left > 0 and (line := stream.readline(_MAX_LINE)):
            left -= max(len(line), _MIN_LINE)
            try:
                event = json.loads(line.decode(errors="replace"))
            except (ValueError, RecursionError):
                continue  # the writer died before it finished the line, or the line is too long
            if isinstance(event, dict):
                yield event


def ended_rounds(job_dir: Path, *, running: bool) -> tuple[RoundEnd, ...]:
    """Return the rounds of workers of a job that have ended; of many, the first and the latest.

    A round without an end was lost: the agent of node 0 was killed, and a scheduler queued the job
    again. A later coordinator may record the end of the same round again.

    Args:
        job_dir: the job's directory; a host may have forged its events.
        running: whether the newest round may still run; if not, it was lost.
    """
    found: dict[tuple[int, int], RoundEnd] = {}
    open_: RoundEnd | None = None
    for event in read_job_events(job_dir):
        kind, at = event.get("event"), event.get("time")
        if kind not in ("listening", "started", ROUND_ENDED):
            continue
        end, open_ = open_, None
        with contextlib.suppress(ValueError):  # another program wrote the event
            if kind == ROUND_ENDED:
                end = codec.read(RoundEnd, {**event, "ended_at": at})
            elif kind == "started":
                place = {"attempt": event.get("attempt"), "restart": event.get("restart")}
                lost = {"kind": FailureKind.NODE_LOST.value, "node": 0, "started_at": at}
                open_ = codec.read(RoundEnd, {**lost, **place})
        if end is not None:
            found[end.attempt, end.restart] = end
        if len(found) > _MAX_ROUNDS:
            found = {(each.attempt, each.restart): each for each in bounded([*found.values()])}
    if open_ is not None and not running:
        found[open_.attempt, open_.restart] = open_
    return bounded([*found.values()])


class Phase(Word):
    """A phase of a node, or of a rank. The next phase ends it."""

    SETUP = "setup"  # node: the script's setup lines run
    IMPORT = "import"  # node: the forkserver imports torch; rank: the program runs, before init
    RENDEZVOUS = "rendezvous"  # node: the agent joins the others; rank: it waits for others
    INIT = "init"  # rank: torch forms the process group
    RUNNING = "running"  # node: all workers run; rank: its group is formed, or it needs none
    STOP = "stop"  # the workers are being stopped
    ENDED = "ended"  # rank: the process has ended; node: all have


@dataclass(frozen=True)
class PhaseBegin:
    """The begin of a phase.

    Attributes:
        phase: the phase.
        rank: the rank; None for the node.
        restart, attempt: the round and the attempt.
        time: seconds since the epoch, by the node's clock; for display only.
        monotonic: seconds of the node's monotonic clock.
        detail: one short text, such as the exit code; empty without one.
    """

    phase: Phase
    rank: _Rank | None
    restart: int
    attempt: int
    time: float
    monotonic: float
    detail: Annotated[str, Limit(200, cuts=True)] = ""


class PhaseLog:
    """Append the begins of phases to a node's file; a full disk loses them."""

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self._file = Appender(node_directory(job_dir, node_rank) / PHASES)

    def add(self, *begins: PhaseBegin) -> None:
        """Append begins of phases in one write.

        Raises:
            OSError: they cannot be written.
        """
        _append(self._file, *map(vars, begins))


def read_phases(job_dir: Path, node_rank: int) -> Iterator[PhaseBegin]:
    """Yield the begins of phases of a node, in the order of the file; skip malformed lines."""
    for event in read_events(node_directory(job_dir, node_rank) / PHASES, _MAX_PHASES):
        with contextlib.suppress(ValueError):  # another program wrote the line
            yield codec.read(PhaseBegin, event)


def add_environment(
    job_dir: Path, node_rank: int, detected: dict[str, Any], *, attempt: int
) -> None:
    """Append the environment of one attempt; a full disk loses it.

    Args:
        job_dir: the job's directory.
        node_rank: the node.
        detected: the result of `clusterjob.node.environments.this_node.describe`.
        attempt: the number of the job's attempt, from 0.
    """
    line = {
        "attempt": attempt,
        "host": os.uname().nodename,
        "detected": detected,
        "versions": versions(),
    }
    with contextlib.suppress(OSError):
        _append(Appender(node_directory(job_dir, node_rank) / ENVIRONMENT), line)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of this node's programs, without an import of torch."""
    found = {
        "clusterjob": sys.modules["clusterjob"].__version__,
        "Python": f"{sys.version.split()[0]} ({sys.executable})",
        "kernel": f"{os.uname().sysname} {os.uname().release} {os.uname().machine}",
    }
    with contextlib.suppress(OSError, ValueError, ImportError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            text = Path(spec.origin).with_name("version.py").read_text()
            found |= {match[1] or "torch": match[2] for match in _TORCH.finditer(text)}
    with contextlib.suppress(OSError):
        found["NVIDIA driver"] = _DRIVER.read_text().strip()
    return found
