"""Choose what the page of a job or an array shows: the values of its template."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from clusterjob.backends import job_progress
from clusterjob.backends.base import Status
from clusterjob.core.listing import row_of
from clusterjob.core.records import Record
from clusterjob.core.times import parse_recorded, show_duration
from clusterjob.core.units import show_size
from clusterjob.insight.efficiency import averages
from clusterjob.insight.report import (
    plots,
    preflight_table,
    stack_groups,
    svg,
    texts,
    timeline,
    wait_plot,
)
from clusterjob.insight.report.data import ReportData
from clusterjob.node.logs import events
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict

_MAX_CONSEQUENCES, _MAX_CHANGED, _MAX_ELEMENTS = 200, 200, 5000
_OPEN_GROUPS = 16  # groups of last lines that are not folded
_LINES, _STACKS = 400_000, 250_000  # characters of all last lines, of all stacks
_PHASES = {
    "setup": "setup lines",
    "import": "the program starts and imports",
    "rendezvous": "it waits for other ranks",
    "init": "torch forms the group",
    "running": "it runs",
    "stop": "it is being stopped",
}
_LOOKS = {  # state -> tone and sign; the sign also says what the colour does
    JobState.SUCCEEDED: ("ok", "✓"),
    JobState.FAILED: ("bad", "✕"),
    JobState.LOST: ("bad", "✕"),
    JobState.CANCELLED: ("warn", "■"),
    JobState.PREEMPTED: ("warn", "■"),
    JobState.UNKNOWN: ("warn", "?"),
}
_FOOTNOTE = (
    "Times are durations since the first record of the job. Each node measures with its own"
    " monotonic clock; the clocks are aligned at the moment when the ranks formed their group, or"
    " else when the workers started, which is accurate to about the start-up time. The time"
    " between two attempts was measured by no node and appears as a short gap."
)


def of_array(
    record: Record,
    pairs: Sequence[tuple[Record, Status]],
    efficiency: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the values for an array: a row for each element.

    Args:
        record: the array.
        pairs: its elements with their status.
        efficiency: the sums of their efficiency; None if it is not known.
    """
    counts: dict[str, int] = {}
    rows = []
    for element, status in pairs:
        state = str(status.state)
        counts[state] = counts.get(state, 0) + 1
        row = row_of(element, status)
        tone, icon = _look(state)
        rows.append(
            {
                "id": element.job_id,
                "swept": sanitize(element.values_text)[:300],
                "state": state,
                "icon": icon,
                "bad": tone == "bad",
                "exit_code": row.exit_code,
                "time": "" if row.seconds is None else show_duration(row.seconds),
                "reason": sanitize(row.reason)[:300],
            }
        )
    rows.sort(key=lambda row: not row["bad"])
    ended = all(status.state.final for _, status in pairs)
    state = next(
        (str(each) for each in _LOOKS if str(each) in counts and _look(str(each))[0] == "bad"), ""
    )
    if not state:
        state = max(counts, key=lambda name: counts[name]) if ended and counts else "RUNNING"
    values = _common(record, state, snapshot=not ended) | {
        "state": f"Array of {len(pairs)} elements: "
        + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
        "facts": [
            ("Cluster", sanitize(record.cluster)),
            ("Nodes of each", str(record.nodes)),
            *_efficiency_facts(efficiency),
        ],
        "advice": _advice(efficiency),
        "elements": rows[:_MAX_ELEMENTS],
        "elements_caption": "Failed elements first; clusterjob report shows a single element whole."
        + (
            f" {len(rows) - _MAX_ELEMENTS} more are not shown." if len(rows) > _MAX_ELEMENTS else ""
        ),
        "settings": _settings(record),
        "script": texts.scripts([record.job_dir]),
        "diff": texts.diff(record.job_dir),
    }
    return values | {"sections": _sections(values)}


def _look(state: str) -> tuple[str, str]:
    try:
        return _LOOKS.get(JobState(state), ("info", "▶"))
    except ValueError:
        return "info", "▶"


def _common(record: Record, state: str, *, snapshot: bool) -> dict[str, Any]:
    """Return the values that the pages of jobs and arrays share; a page may replace them."""
    tone, icon = _look(state)
    code = record.code or {}
    git = code.get("git")
    git = git if isinstance(git, Mapping) else {}
    changed = git.get("changed")
    paths = [sanitize(str(path))[:300] for path in changed] if isinstance(changed, list) else []
    return {
        "title": f"{state} {record.job_id} – clusterjob report",
        "name": sanitize(record.name),
        "job_id": sanitize(record.job_id),
        "state": state,
        "tone": tone,
        "icon": icon,
        "snapshot": snapshot,
        "taken_at": _time(events.now()),
        "version": sys.modules["clusterjob"].__version__,
        "footnote": "",
        "revision": sanitize(str(git.get("revision") or ""))[:80],
        "branch": sanitize(str(git.get("branch") or ""))[:200],
        "changed": paths[:_MAX_CHANGED],
        "diff_incomplete": bool(paths) and git.get("complete") is False,
    } | dict.fromkeys(
        (
            "reason", "failure_title", "failure_lines", "failure_who", "consequences", "advice",
            "notes", "elements", "timeline", "marks", "rank_rows", "plots", "node_rows",
            "wait_plot", "stragglers", "preflight", "stacks", "stacks_note",
            "stacks_headline", "last_lines", "more_lines",
            "environments", "settings", "restarts", "script", "diff",
        ),
        "",
    )  # fmt: skip


def of_job(data: ReportData, detail: float) -> dict[str, Any]:
    """Return the values for one job; a smaller `detail` shortens its texts."""
    record, verdict = data.record, data.verdict
    failure = verdict.failure if verdict is not None else None
    title, shown = failure.output() if failure is not None else ("", [])
    hosts = {node.rank: node.host for node in data.nodes}
    metrics, node_rows = plots.table(data)
    stacks = data.stacks.stacks if data.stacks is not None else []
    values = _common(record, data.state, snapshot=verdict is None) | {
        "taken_at": _time(data.taken_at),
        "restarts": data.restarts,
        "reason": data.reason,
        "failure_who": sanitize(failure.who)[:300] if failure is not None else "",
        "failure_title": title,
        "failure_lines": _lines(shown),
        "consequences": _consequences(verdict),
        "facts": _facts(data),
        "advice": _advice(data.efficiency),
        "notes": data.notes,
        "timeline": timeline.draw(data),
        "phases": list(_PHASES.items()),
        "marks": data.marks,
        "clock": svg.clock,
        **_rank_table(data, hosts),
        "plots": plots.draw(data),
        "node_metrics": metrics,
        "node_rows": node_rows,
        "wait_plot": wait_plot.draw(data),
        "stragglers": job_progress.straggler_lines(data.stragglers),
        "preflight": preflight_table.rows(data.preflight),
        "stacks": stack_groups.groups(stacks, int(_STACKS * detail)),
        "stacks_note": sanitize(data.stacks.saved)[:600] if data.stacks is not None else "",
        "stacks_headline": stack_groups.headline(stacks),
        **_last_lines(data, detail),
        "environments": data.environments,
        "settings": _settings(record),
        "script": data.script,
        "diff": data.diff,
        "footnote": _FOOTNOTE if data.end > 0 else "",
    }
    return values | {"sections": _sections(values)}


def _sections(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the anchor and the name of each section of a page."""
    return [
        (anchor, label)
        for anchor, label, shown in (
            ("verdict", "Verdict", True),
            ("elements", "Elements", values["elements"]),
            ("preflight", "Preflight", values["preflight"]),
            ("timeline", "Timeline", values["timeline"] or values["marks"]),
            ("metrics", "Metrics", values["plots"]),
            ("waits", "Waits", values["wait_plot"]),
            ("stacks", "Stacks", values["stacks"]),
            ("output", "Last lines", values["last_lines"]),
            ("environment", "Environment", values["environments"] or values["settings"]),
            ("code", "Code", True),
        )
        if shown
    ]


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(sanitize(line) for line in lines)


def _consequences(verdict: Verdict | None) -> list[tuple[str, list[str]]]:
    """Return the failures after the root cause, folded: a label and the lines below it."""
    found = []
    groups = verdict.later_failures() if verdict is not None else []
    for label, group in groups[:_MAX_CONSEQUENCES]:
        lines = [sanitize(f"{item.who}: {item.message}")[:400] for item in group]
        more = (
            [f"and {len(lines) - _MAX_CONSEQUENCES} more"] if len(lines) > _MAX_CONSEQUENCES else []
        )
        found.append((sanitize(label)[:400], lines[:_MAX_CONSEQUENCES] + more))
    return found


def _facts(data: ReportData) -> list[tuple[str, str]]:
    record, verdict = data.record, data.verdict
    own = record.cluster == record.backend
    facts = [
        *([("Sweep", record.values_text)] if record.values else []),
        ("Cluster", record.cluster if own else f"{record.cluster} ({record.backend})"),
        ("Nodes", str(record.nodes)),
        ("Ranks", str(len(data.ranks)) if data.ranks else "not known"),
        ("Exit code", str(verdict.exit_code) if verdict is not None else ""),
        ("Submitted", _time(record.submitted_at)),
        ("Workers started", _time(data.started_at)),
        ("Ended", _time(verdict.ended_at) if verdict is not None else ""),
        ("Recorded time", show_duration(data.end) if data.end > 0 else ""),
        ("Attempts", str(len(data.attempts)) if len(data.attempts) > 1 else ""),
        *_efficiency_facts(data.efficiency),
    ]
    return [(label, sanitize(value)) for label, value in facts if value]


def _time(text: str | None) -> str:
    """Show a recorded time in UTC, to the second."""
    time = parse_recorded(text)
    return "" if time is None else f"{time:%Y-%m-%d %H:%M:%S} UTC"


def _efficiency_facts(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the efficiency of a job or an array as labels and texts."""
    if found is None:
        return []
    use = found if "jobs" in found else averages(dict(found))
    facts = [("Wall time", show_duration(found["wall_seconds"]))]
    if found["startup_seconds"] is not None:
        facts.append(("Start-up", show_duration(found["startup_seconds"])))
    if found["restarts"]:
        lost = show_duration(found["restart_seconds"])
        facts.append(("Lost in restarts", f"{lost} in {found['restarts']}"))
    if found["gpu_hours_held"]:
        idle = found["gpu_hours_idle"]
        held = f"{found['gpu_hours_held']:.2f}"
        facts.append(("GPU-hours", held if idle is None else f"{held}, {idle:.2f} of them idle"))
    if use["cpu_mean"] is not None:
        peak = "" if use["cpu_peak"] is None else f", peak {use['cpu_peak']:.1f}"
        facts.append(("CPU per node", f"{use['cpu_mean']:.1f} of {use['cores']:g} cores{peak}"))
    if use["memory_peak"] is not None:
        facts.append(("Memory per node", f"peak {show_size(use['memory_peak'])}"))
    if use["gpu_mean"] is not None:
        facts.append(("GPU use", f"mean {use['gpu_mean']:.0f} %, peak {use['gpu_peak']:.0f} %"))
    if use["gpu_memory_peak"]:
        facts.append(("GPU memory", f"peak {show_size(use['gpu_memory_peak'])}"))
    if (slow := found.get("slowest_rank")) is not None:
        more = f"{slow['seconds']:g} s more {slow['measure']} than the median"
        facts.append(("Slowest rank", f"rank {slow['rank']} (node {slow['node_rank']}): {more}"))
    return facts


def _advice(efficiency: Mapping[str, Any] | None) -> list[str]:
    return [sanitize(str(line))[:300] for line in (efficiency or {}).get("advice", [])[:10]]


def _rank_table(data: ReportData, hosts: Mapping[int, str]) -> dict[str, Any]:
    ranks = timeline.shown_ranks(data)
    times = {rank.rank: timeline.times(rank) for rank in ranks}
    phases = [phase for phase in timeline.PHASES if any(phase in one for one in times.values())]
    metrics, values = plots.rank_values(data)
    rows = [
        {
            "rank": rank.rank,
            "node": f"{rank.node} {hosts.get(rank.node, '')}".strip(),
            "failed": rank.failed,
            "cells": [
                *(
                    show_duration(times[rank.rank][phase]) if phase in times[rank.rank] else ""
                    for phase in phases
                ),
                *(values.get(rank.rank, {}).get(key, "–") for key, _ in metrics),
            ],
            "how": (rank.message or (rank.spans[-1].detail if rank.spans else ""))[:200],
        }
        for rank in ranks
    ]
    left = len(data.ranks) - len(ranks)
    caption = "Time in each phase, all rounds; metrics as mean and peak."
    return {
        "rank_rows": rows,
        "rank_phases": phases,
        "rank_metrics": [title for _, title in metrics],
        "ranks_caption": caption + (f" {left} more ranks are not shown." if left else ""),
    }


def _last_lines(data: ReportData, detail: float) -> dict[str, Any]:
    """Return the last lines of all ranks: those to show, and those to fold."""
    ordered = sorted(
        (rank for rank in data.ranks if rank.message),
        key=lambda rank: (not rank.failed, rank.consequence, rank.rank),
    )
    own = [rank.rank for rank in ordered if not rank.consequence]
    root = {rank.rank for rank in ordered if rank.failed}
    found = [
        {"label": group.label, "text": group.text, "bad": bool(root & {*group.ranks})}
        for group in texts.last_lines_of(
            data.record.job_dir, [node.rank for node in data.nodes], own, int(_LINES * detail)
        )
    ]
    return {"last_lines": found[:_OPEN_GROUPS], "more_lines": found[_OPEN_GROUPS:]}


def _shown(form: Callable[[int], str], value: object) -> str:
    return form(value) if type(value) is int else ""


def _items(value: object) -> Iterable[Any]:
    """Return the items of a list or the names of an object; a record may be of another version."""
    return value if isinstance(value, (list, tuple, Mapping)) else ()


def _settings(record: Record) -> list[tuple[str, str]]:
    """Return what the job asked for; of secrets only the names."""
    spec = record.spec
    program = spec.get("program")
    program = program if isinstance(program, Mapping) else {}
    resources = spec.get("resources")
    resources = resources if isinstance(resources, Mapping) else {}
    words = [str(program.get("target", "")), *map(str, _items(program.get("args")))]
    secrets = [
        item.get("name") if isinstance(item, Mapping) else item
        for item in _items(spec.get("secret"))
    ]
    found = [
        ("Program", " ".join(words)),
        ("Working directory", spec.get("workdir")),
        ("Interpreter", spec.get("python")),
        ("Launcher", spec.get("launcher")),
        ("Workers per node", spec.get("nproc_per_node")),
        ("GPUs per node", resources.get("gpus_per_node")),
        ("GPU type", resources.get("gpu_type")),
        ("Cores per worker", resources.get("cpus_per_task")),
        ("Memory per node", _shown(show_size, resources.get("mem"))),
        ("Time limit", _shown(show_duration, resources.get("time_limit"))),
        ("Container", spec.get("container")),
        ("Variables", ", ".join(map(str, _items(spec.get("env"))))),
        ("Secrets (names)", ", ".join(str(name) for name in secrets)),
    ]
    return [
        (label, sanitize(str(value))[:600]) for label, value in found if value not in (None, "", [])
    ]
