"""Compare the runs: goodput, what persons did, which nodes were named, and the weights."""

from __future__ import annotations

from typing import Any

from goodput_parts.faults import Kind
from goodput_parts.run import Result

_BLAME_SECONDS = 45.0  # seconds after a fault in which a restart may name it
# These faults hit no single machine: the disk is shared, and the scheduler preempts the job.
_OF_ALL = (Kind.DISK.value, Kind.PREEMPT.value)


def blames(result: Result, begin: float) -> tuple[int, int, list[dict[str, Any]]]:
    """Return how many restarts name the right machine, how many name none, and the wrong ones.

    Args:
        result: the run.
        begin: the time of its start, in seconds since the epoch.
    """
    right, silent, wrong = 0, 0, []
    for blame in result.blamed:
        at = blame["time"] - begin
        before = [each for each in result.injected if 0 <= at - each["at"] <= _BLAME_SECONDS]
        if blame["event"] == "ended" and at > result.seconds - 1:
            continue  # the benchmark itself has ended the job
        if blame["node"] is None:
            silent += 1
        elif any(each["node"] == blame["node"] or each["kind"] in _OF_ALL for each in before):
            right += 1
        else:
            wrong.append(blame | {"at": round(at, 1), "faults before": before})
    return right, silent, wrong


def row(result: Result, undisturbed: float, begin: float, weights: tuple[int, list[int]]) -> Any:
    """Return the summary of one run as plain data."""
    right, silent, wrong = blames(result, begin)
    return {
        "launcher": result.name,
        "faults": sum(each["node"] is not None for each in result.injected),
        "steps": result.steps,
        "undisturbed": round(undisturbed, 1),
        "goodput": round(result.steps / undisturbed, 3),
        "persons": len(result.persons),
        "restarts named right": right,
        "restarts without a node": silent,
        "restarts named wrong": len(wrong),
        "wrong": wrong,
        "weights compared": weights[0],
        "weights differ": len(weights[1]),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summaries as a table."""
    titles = [name for name in rows[0] if name != "wrong"]
    lines = [titles] + [[str(each[name]) for name in titles] for each in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True))
        for line in lines
    )
