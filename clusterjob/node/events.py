"""The job's story as lines of JSON: what happened, on which node, by the wall clock and by the monotonic one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


def now() -> str:
    """Return the time as RFC 3339 in UTC, with milliseconds."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class EventLog:
    """Appends to ``events.jsonl``. One process of a job writes it: the lead, which the other agents tell their part."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, event: str, **details: Any) -> str:
        """Append one event and return its time. A full disk costs the line and not the job."""
        at = now()
        line = {"time": at, "monotonic": round(time.monotonic(), 6), "event": event, **details}
        try:
            with self._path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        except OSError:
            pass
        return at


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events that were written whole; a job that has none yields none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # the last line of a writer that died
        if isinstance(event, dict):
            yield event
