"""The rounds of workers of a job that have ended, from its events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterjob.node.logs.events import read_job_events
from clusterjob.node.verdict import FailureKind, RoundEnd, bounded

ENDED = "round_ended"  # the event; its other fields are those of `RoundEnd`
_MAX_LISTED = 1000  # rounds that are collected before the middle ones are dropped


def ended(job_dir: Path, *, running: bool) -> tuple[RoundEnd, ...]:
    """Return the rounds of a job that have ended; of many, the first and the latest.

    Args:
        job_dir: the job's directory.
        running: whether the newest round may still run; if not, it was lost.
    """
    found = _Rounds()
    for event in read_job_events(job_dir):
        found.take(event)
    return found.ended(running=running)


class _Rounds:
    """Collect the ends of rounds from the events of a job, which a host may have forged.

    The file has the events of all attempts of a job. A round without an end was lost: the agent
    of node 0 was killed, and a scheduler queued the job again.
    """

    def __init__(self) -> None:
        self._ended: list[RoundEnd] = []
        self._running: RoundEnd | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        kind = event.get("event")
        if kind in ("listening", "started"):
            self._end_lost()
        if kind not in ("started", ENDED):
            return
        try:
            if kind == ENDED:
                self._running = None
                self._add(RoundEnd.from_json({**event, "ended_at": event.get("time")}))
            else:
                started = {"kind": FailureKind.NODE_LOST.value, "node": 0}
                self._running = RoundEnd.from_json(
                    {**started, "started_at": event.get("time"), **_place(event)}
                )
        except ValueError:  # another program wrote the event
            return

    def ended(self, *, running: bool) -> tuple[RoundEnd, ...]:
        """Return the rounds that have ended; see `ended`."""
        if not running:
            self._end_lost()
        return bounded(self._ended)

    def _end_lost(self) -> None:
        """Count a round as lost if it has no end."""
        if self._running is not None:
            self._add(self._running)
            self._running = None

    def _add(self, end: RoundEnd) -> None:
        """Add an end; it replaces the loss that a later coordinator of the round has recorded."""
        last = self._ended[-1] if self._ended else None
        if last and (last.attempt, last.restart) == (end.attempt, end.restart):
            self._ended.pop()
        self._ended.append(end)
        if len(self._ended) > _MAX_LISTED:
            self._ended = list(bounded(self._ended))


def _place(event: Mapping[str, Any]) -> dict[str, Any]:
    return {"attempt": event.get("attempt"), "restart": event.get("restart")}
