"""Write and read a job's events as lines of JSON, each with wall-clock and monotonic time."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterjob.node.logs.job_dir import event_files
from clusterjob.node.logs.log_files import open_regular
from clusterjob.node.system import files

# Maximum bytes to read of a line, of a file. A short line counts as `_MIN_LINE` bytes, because its
# time does not depend on its length.
_MAX_LINE, _MAX_FILE = 1 << 20, 64 << 20
_MIN_LINE = 64
# Maximum characters of a text, and of an item in a list: nodes send lists of up to 256 long items.
_MAX_TEXT, _MAX_ITEM = 4000, 1000


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
        self._file = files.Appender(path)
        self._shift = shift

    def add(self, event: str, **details: Any) -> str:
        """Append one event and return its time.

        Long texts are cut. An error such as a full disk loses the line and does not end the job.
        """
        at = now()
        line = {"time": at, "monotonic": round(time.monotonic() + self._shift, 6), "event": event}
        line |= {name: _cut(value) for name, value in details.items()}
        text = json.dumps(line, ensure_ascii=False) + "\n"
        files.later(self._file.write, text.encode(errors="replace"))
        return at


def _cut(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [item[:_MAX_ITEM] if isinstance(item, str) else item for item in value]
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def read_job_events(job_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a job, those of a coordinator that has moved after the earlier ones."""
    for path in counted_files(job_dir):
        yield from read_events(path)


def counted_files(job_dir: Path) -> list[Path]:
    """Return the event files of a job, in order of time.

    A coordinator that has moved counts from its first round: without one, it was cut off.
    """
    first, *moved = event_files(job_dir)
    return [first, *(path for path in moved if any(map(_is_start, read_events(path))))]


def _is_start(event: dict[str, Any]) -> bool:
    return event.get("event") == "started"


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
