"""Show the stacks of ranks as text, equal ones once, the smallest group first."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from clusterjob.insight.report.texts import Texts, label
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import Frame, RankStack
from clusterjob.node.system.sanitize import sanitize

_FRAMES, _THREADS, _GROUPS = 40, 8, 64  # most frames, further threads of a group, groups
_SHORTEST = 2000  # characters of a group


def headline(stacks: Sequence[RankStack]) -> str:
    """Return one line about all ranks; empty without stacks."""
    return sanitize(grouping.headline(grouping.group(stacks)))[:600] if stacks else ""


def groups(stacks: Sequence[RankStack], budget: int) -> list[Texts]:
    """Return a text for each group of ranks with equal stacks.

    Args:
        stacks: the stacks of a job's ranks.
        budget: about how many characters all texts may have.
    """
    by_rank = {stack.rank: stack for stack in stacks}
    found = grouping.group(stacks)
    share = max(_SHORTEST, budget // max(1, len(found)))
    shown = []
    for group in found[:_GROUPS]:
        lines = _lines("", group.frames) if group.frames else ["no answer"]
        for thread in itertools.islice(by_rank[group.ranks[0]].threads, 1, 1 + _THREADS):
            lines += ["", *_lines(f"{thread.name} of rank {group.ranks[0]}", thread.frames)]
        text = "\n".join(lines)
        cut = text[:share] + ("\n…" if len(text) > share else "")
        shown.append(Texts(label(group.ranks), cut, group.ranks, sanitize(group.state)[:200]))
    return shown


def _lines(title: str, frames: Sequence[Frame]) -> list[str]:
    frames = grouping.without_imports(frames)
    lines = [sanitize(title[:200])] if title else []
    for frame in frames[:_FRAMES]:
        where = f"{frame.file[-200:]}:{'?' if frame.line is None else frame.line}"
        lines.append(sanitize(f"  {frame.function[:160]} ({where})"))
    if len(frames) > _FRAMES:
        lines.append(f"  … {len(frames) - _FRAMES} more frames")
    return lines
