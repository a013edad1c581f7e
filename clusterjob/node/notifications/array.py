"""Notify about an array as a whole: its elements share marks in the array's directory."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from clusterjob.node.logs.job_dir import ELEMENTS, NOTIFIED
from clusterjob.node.notifications import END, FAILURE
from clusterjob.node.notifications.events import Event
from clusterjob.node.system import private_dirs
from clusterjob.node.verdict import JobState

_MARK = re.compile(r"([0-9]{1,10})\.([A-Z]{1,20})", re.ASCII)
_MAX_LISTED = 20  # maximum elements that a text lists


class WholeArray:
    """An array that sends each event once.

    The first element that starts, fails or is queued again sends that event. The last element that
    ends sends the end of the array. An element that never starts leaves no mark.

    Args:
        job_dir: the directory of one element.
        elements: number of elements.
    """

    def __init__(self, job_dir: Path, elements: int) -> None:
        self._index = job_dir.name
        self._marks = job_dir.parent.parent / NOTIFIED
        self._elements = elements

    @staticmethod
    def has(job_dir: Path) -> bool:
        """Return whether a job's directory is that of an element, next to the other elements."""
        return job_dir.parent.name == ELEMENTS and job_dir.name.isdecimal()

    def merge(self, event: Event) -> list[Event]:
        """Return the events of the whole array to send after an event of this element.

        Raises:
            OSError: the marks cannot be written.
        """
        if event.event == FAILURE and not event.final:
            return []  # a restart of one element
        private_dirs.make(self._marks)
        array_id = event.job_id.removesuffix(f"_{self._index}")
        found = []
        if event.event != END and self._first(event.event):
            # The reason and the hint name the element; the state is not that of the array.
            found.append(replace(event, final=False) if event.event == FAILURE else event)
        if event.final:
            self._note_end(event.state)
            ended = self._ended()
            if len(ended) >= self._elements and self._first(END):
                found.append(_summary(event, array_id, ended=ended))
        return found

    def _first(self, kind: str) -> bool:
        """Return whether this is the first element with this kind of event."""
        try:
            os.close(os.open(self._marks / f"first.{kind}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def _note_end(self, state: str) -> None:
        for older in self._marks.glob(f"{self._index}.*"):  # of an earlier attempt
            older.unlink(missing_ok=True)
        if state != JobState.PREEMPTED:
            (self._marks / f"{self._index}.{state}").touch(0o600)

    def _ended(self) -> dict[int, str]:
        """Return the final state of each ended element, by index."""
        marks = (_MARK.fullmatch(entry.name) for entry in os.scandir(self._marks))
        return {int(mark[1]): mark[2] for mark in marks if mark}


def _summary(event: Event, array_id: str, ended: dict[int, str]) -> Event:
    """Return the end of the array: the number of elements in each state."""
    groups: dict[str, list[int]] = {}
    for index, state in sorted(ended.items()):
        groups.setdefault(state, []).append(index)
    texts = []
    for state, indices in sorted(groups.items()):
        text = f"{len(indices)} {state}"
        if state != JobState.SUCCEEDED:
            listed = ", ".join(map(str, indices[:_MAX_LISTED]))
            text += f" ({listed}{', ...' if len(indices) > _MAX_LISTED else ''})"
        texts.append(text)
    failed = [state for state in groups if state != JobState.SUCCEEDED]
    return replace(
        event,
        event=FAILURE if failed else END,
        job_id=array_id,
        state=failed[0] if failed else str(JobState.SUCCEEDED),
        reason=f"{len(ended)} elements: {'; '.join(texts)}",
        exit_code=None,
        seconds=None,
        rank=None,
        host="",
    )
