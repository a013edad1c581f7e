"""Group the ranks of a job by their stacks, and summarize the groups in one line."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterjob.node.stacks import waits
from clusterjob.node.stacks.frames import (
    STOPPED,
    Frame,
    RankStack,
    is_of_import,
    program_frame,
)

SCHEMA = 1
_MAX_CLAUSES = 4  # groups in the headline
CUT_AT = 100  # frames of a thread that faulthandler writes (MAX_FRAME_DEPTH)
_PACKAGE = re.compile(r"-packages/(\w+)", re.ASCII)
_MAX_NAMED = 3  # ranks in a clause; more are counted


@dataclass(frozen=True)
class Group:
    """Ranks with equal stacks of their main threads.

    Attributes:
        ranks: the ranks, in order.
        frames: the main thread's frames, the innermost first; empty without an answer.
        state: the kernel's state of the first rank.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    state: str

    def to_json(self) -> dict[str, Any]:
        """Return the group as plain data."""
        return {"ranks": list(self.ranks), "frames": [vars(frame) for frame in self.frames]}


def group(stacks: Iterable[RankStack]) -> list[Group]:
    """Return the groups of ranks with equal stacks, the smallest first.

    Two stacks are equal if file, line and function of all frames are equal, where a file is its
    name and the name of its directory. Ranks that wait in the same function are equal wherever they
    are inside of it. Ranks without an answer are grouped by the kernel's state.
    """
    found: dict[Any, list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda each: each.rank):
        frames = stack.main_frames
        wait = waits.find(frames)
        key: Any = stack.state
        if wait is not None:
            key = (wait.function, *_comparable(frames[wait.depth + 1 :]))
        elif frames:
            key = _comparable(frames)
        key = (key, stack.state.startswith(STOPPED))
        found.setdefault(key, []).append(stack)
    groups = [
        Group(tuple(each.rank for each in equal), equal[0].main_frames, equal[0].state)
        for equal in found.values()
    ]
    return sorted(groups, key=lambda each: (len(each.ranks), each.ranks))


def _comparable(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the Python frames, or native ones if there are no others, comparable between hosts.

    The directories of the code and of the packages differ between hosts.
    """
    known = list(frames)
    return tuple(
        replace(
            frame,
            file="/".join(frame.file.rsplit("/", 2)[1:]),
            function=waits.short_name(frame),
        )
        for frame in [each for each in known if each.line is not None] or known
    )


def headline(groups: Sequence[Group]) -> str:
    """Return one line about all groups, the largest first.

    For example ``7 ranks wait in all_reduce; rank 3 is in decode (data.py:41)``.
    """
    if not groups:
        return "no ranks"
    ordered = sorted(groups, key=lambda each: (-len(each.ranks), each.ranks))
    texts = [_verb_and_place(each, place=False) for each in ordered]
    clauses = []
    for each, known in zip(ordered[:_MAX_CLAUSES], texts, strict=False):
        alone = len(ordered) == 1
        # The smallest group is the one to look at.
        place = each is ordered[-1] or texts.count(known) > 1
        verbs, rest = _verb_and_place(each, place=True) if place else known
        several = len(each.ranks) > 1
        named = f"all {len(each.ranks)} ranks" if alone and several else ranks_text(each.ranks)
        clauses.append(f"{named} {verbs[several]} {rest}")
    if len(ordered) > _MAX_CLAUSES:
        others = sum(len(each.ranks) for each in ordered[_MAX_CLAUSES:])
        clauses.append(f"{others} more {'ranks are' if others > 1 else 'rank is'} elsewhere")
    return "; ".join(clauses)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as ``rank 3``, ``ranks 1, 2`` or ``7 ranks``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _MAX_NAMED:
        return f"ranks {', '.join(map(str, ranks))}"
    return f"{len(ranks)} ranks"


def _verb_and_place(each: Group, *, place: bool) -> tuple[tuple[str, str], str]:
    """Return the verb in singular and plural, and where the ranks of a group are.

    Args:
        each: the group.
        place: whether to add the program's line to a function in which ranks wait.
    """
    if not each.frames:
        return ("does not answer:", "do not answer:"), f"the process {each.state}"
    own = program_frame(each.frames)
    where = f" ({place_text(own)})" if own is not None else ""
    wait = waits.find(each.frames)
    if each.state.startswith(STOPPED):  # py-spy has read the stack
        frame = own or each.frames[0]
        return ("is stopped in", "are stopped in"), f"{frame.function} ({place_text(frame)})"
    if wait is not None:
        return ("waits in", "wait in"), wait.function + (where if place else "")
    shown = without_imports(each.frames)
    frame = own or shown[0]
    importing = len(each.frames) > len(shown)
    if own is not None:
        importing = any(map(is_of_import, each.frames[: each.frames.index(own)]))
    elif importing:  # the frames of the program are cut off
        package = _PACKAGE.search(shown[-1].file)
        name = package[1] if package else os.path.basename(shown[-1].file)
        return ("imports", "import"), f"{name} ({place_text(frame)})"
    verbs = ("imports in", "import in") if importing else ("is in", "are in")
    return verbs, f"{frame.function} ({place_text(frame)})"


def without_imports(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames without those of Python's import machinery, as a traceback shows them."""
    return [frame for frame in frames if not is_of_import(frame)] or frames


def place_text(frame: Frame) -> str:
    """Return the place of a frame as ``data.py:41``."""
    return f"{os.path.basename(frame.file)}:{frame.line if frame.line is not None else '?'}"


def to_json(job_id: str, stacks: Sequence[RankStack]) -> dict[str, Any]:
    """Return the stacks of a job and their groups as plain data.

    Args:
        job_id: the job.
        stacks: the stacks of its ranks.
    """
    return {
        "schema": SCHEMA,
        "id": job_id,
        "ranks": [each.to_json() for each in sorted(stacks, key=lambda each: each.rank)],
        "groups": [each.to_json() for each in group(stacks)],
    }


def text(stacks: Sequence[RankStack], *, all_threads: bool = False) -> list[str]:
    """Return the headline, and the groups with their frames, as lines.

    Args:
        stacks: the stacks of a job's ranks.
        all_threads: whether to show all threads of all ranks; else those of the smallest group.
    """
    groups = group(stacks)
    by_rank = {each.rank: each for each in stacks}
    lines = [headline(groups)]
    for index, each in enumerate(groups):
        members = [by_rank[rank] for rank in each.ranks]
        lines += ["", _title(members)]
        lines += _frame_lines(each.frames)
        shown = members if all_threads else members[:1] if index == 0 else []
        for stack in shown:
            named = f" of rank {stack.rank}" if len(members) > 1 else ""
            for thread in itertools.islice(stack.threads, 1, None):
                lines.append(f"  {thread.name}{named}:")
                lines += [f"  {line}" for line in _frame_lines(thread.frames)]
    return lines


def _title(members: Sequence[RankStack]) -> str:
    """Return the ranks of a group, and where one or all of them run."""
    named = f"rank {members[0].rank}" if len(members) == 1 else f"ranks {_ranges(members)}"
    first = members[0]
    if len(members) == 1:
        where = f"node {first.node_rank}, {first.host}, pid {first.pid}: {first.state}"
    else:
        nodes = {each.node_rank for each in members}
        states = sorted({each.state.partition(" (")[0] for each in members})
        count = f"{len(nodes)} nodes" if len(nodes) > 1 else f"node {first.node_rank}"
        where = f"{count}: {', '.join(states)}"
    return f"{named} ({where})" + ("" if first.answered else ": no answer")


def _ranges(members: Sequence[RankStack]) -> str:
    """Return ranks as ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(each.rank for each in members):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _frame_lines(frames: Sequence[Frame]) -> list[str]:
    lines = []
    for frame in without_imports(frames):
        line = frame.line if frame.line is not None else "?"
        lines.append(f"  {frame.function} ({frame.file}:{line})")
    cut = len(frames) == CUT_AT and all(frame.line is not None for frame in frames)
    return lines + ([f"  ... (Python writes only the innermost {CUT_AT} frames)"] if cut else [])
