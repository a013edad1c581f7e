"""Read the stacks that were recorded before a stop, and show equal ones of several ranks once."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clusterjob.insight.report.texts import Texts, label
from clusterjob.node.logs.log_files import file_names, node_directory, open_regular
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.frames import Frame, RankStack
from clusterjob.node.system.sanitize import sanitize

_NAME = re.compile(
    r"stacks(?:\.attempt(?P<attempt>\d{1,9}))?(?:\.restart(?P<restart>\d{1,9}))?\.json", re.ASCII
)
_MAX_FILE = 64 << 20  # bytes
_FRAMES, _THREADS, _GROUPS = 40, 8, 64  # most frames, further threads of a group, groups
_SHORTEST = 2000  # characters of a group


class _File(msgspec.Struct):
    """What a report needs of the output of ``clusterjob stacks --json``."""

    ranks: list[RankStack]
    why: str = ""
    time: str = ""


@dataclass(frozen=True)
class Stacks:
    """The stacks of a job's ranks, and one line about why and when they were taken."""

    ranks: Sequence[RankStack] = ()
    note: str = ""

    @property
    def headline(self) -> str:
        """One line about all ranks; empty without stacks."""
        return sanitize(grouping.headline(grouping.group(self.ranks)))[:600] if self.ranks else ""

    def groups(self, budget: int) -> list[Texts]:
        """Return the stacks as text, equal ones once, the smallest group first.

        Args:
            budget: about how many characters all texts may have.
        """
        by_rank = {stack.rank: stack for stack in self.ranks}
        groups = grouping.group(self.ranks)
        share = max(_SHORTEST, budget // max(1, len(groups)))
        found = []
        for group in groups[:_GROUPS]:
            lines = _lines("", group.frames) if group.frames else ["no answer"]
            for thread in itertools.islice(by_rank[group.ranks[0]].threads, 1, 1 + _THREADS):
                lines += ["", *_lines(f"{thread.name} of rank {group.ranks[0]}", thread.frames)]
            text = "\n".join(lines)
            cut = text[:share] + ("\n…" if len(text) > share else "")
            note = sanitize(group.state)[:200]
            found.append(Texts(label(group.ranks), cut, group.ranks, note))
        return found


def recorded(job_dir: Path, nodes: Iterable[int]) -> Stacks:
    """Return the latest recorded stacks: those of all ranks, or else of single nodes."""
    found: list[tuple[tuple[int, int], _File]] = []
    for node in nodes:
        directory = node_directory(job_dir, node)
        places = [
            ((int(match["attempt"] or 0), int(match["restart"] or 0)), name)
            for name in file_names(directory)
            if (match := _NAME.fullmatch(name)) is not None
        ]
        if places:
            place, name = max(places)
            file = _read(directory / name)
            found += [] if file is None else [(place, file)]
    if not found:
        return Stacks()
    last = max(place for place, _ in found)
    files = [file for place, file in found if place == last]
    ranks = {stack.rank: stack for file in files for stack in file.ranks if stack.rank >= 0}
    note = ": ".join(part for part in (files[0].time, files[0].why) if part)
    return Stacks([ranks[rank] for rank in sorted(ranks)], sanitize(note)[:300])


def _read(path: Path) -> _File | None:
    try:
        with open_regular(path) as stream:
            return msgspec.json.decode(stream.read(_MAX_FILE), type=_File)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return None


def _lines(title: str, frames: Sequence[Frame]) -> list[str]:
    lines = [sanitize(title[:200])] if title else []
    for frame in frames[:_FRAMES]:
        where = f"{frame.file[-200:]}:{'?' if frame.line is None else frame.line}"
        lines.append(sanitize(f"  {frame.function[:160]} ({where})"))
    if len(frames) > _FRAMES:
        lines.append(f"  … {len(frames) - _FRAMES} more frames")
    return lines
