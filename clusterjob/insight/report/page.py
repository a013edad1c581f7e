"""Render a report as one HTML page that loads nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterjob import __version__
from clusterjob.backends.base import Status
from clusterjob.core.arrays import ranges_text
from clusterjob.core.listing import row_of
from clusterjob.core.records import Record
from clusterjob.core.render import template_directory
from clusterjob.core.times import show_duration
from clusterjob.insight.report import heat_map, plots, svg, timeline
from clusterjob.insight.report.data import ReportData
from clusterjob.node.logs import events
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import Failure, JobState

if TYPE_CHECKING:
    import jinja2

MARK = '<meta name="generator" content="clusterjob report">'  # identifies a report to overwrite
MAX_BYTES = 2_000_000
_DETAILS = (1.0, 0.4, 0.1, 0.02)  # of texts; the first whose page is small enough is used
_MAX_CONSEQUENCES, _MAX_CHANGED, _MAX_ELEMENTS = 200, 200, 5000
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
    " monotonic clock; the clocks are aligned at the moment when all ranks had joined, or else when"
    " the workers of a round started, which is accurate to about the start-up time. The time"
    " between two attempts was measured by no node and appears as a short gap."
)


def render(gather: Callable[[float], ReportData]) -> str:
    """Return the page of a job.

    Args:
        gather: returns the data; a smaller number shortens its texts.
    """
    page = ""
    for detail in _DETAILS:
        page = _page(_values(gather(detail)))
        if len(page.encode(errors="replace")) <= MAX_BYTES:
            break
    return page


def render_array(
    record: Record,
    pairs: Sequence[tuple[Record, Status]],
    facts: Sequence[tuple[str, str]],
    script: Sequence[tuple[str, str]],
    diff: str,
) -> str:
    """Return the page of an array: a row for each element.

    Args:
        record: the array.
        pairs: its elements with their status.
        facts: more facts, such as the efficiency.
        script: the name and the text of each script.
        diff: the uncommitted changes.
    """
    counts: dict[str, int] = {}
    rows = []
    for element, status in pairs:
        counts[str(status.state)] = counts.get(str(status.state), 0) + 1
        row = row_of(element, status)
        tone, icon = _look(str(status.state))
        rows.append(
            {
                "id": element.job_id,
                "state": str(status.state),
                "icon": icon,
                "bad": tone == "bad",
                "exit_code": row.exit_code,
                "time": "" if row.seconds is None else show_duration(row.seconds),
                "reason": sanitize(row.reason)[:300],
            }
        )
    rows.sort(key=lambda row: not row["bad"])
    worst = next((state for state in _LOOKS if str(state) in counts and state.final), None)
    ended = all(status.state.final for _, status in pairs)
    failed = counts.get("FAILED", 0) + counts.get("LOST", 0)
    state = "FAILED" if failed else (str(worst) if ended and worst else "RUNNING")
    values = _common(record, state, snapshot=not ended) | {
        "state": f"Array of {len(pairs)} elements: "
        + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
        "facts": [("Cluster", record.cluster), ("Nodes of each", str(record.nodes)), *facts],
        "elements": rows[:_MAX_ELEMENTS],
        "elements_caption": "Failed elements first. `clusterjob report ID_INDEX` shows one of them.",
        "script": script,
        "diff": diff,
    }
    return _page(values | {"sections": _sections(values)})


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
        "taken_at": events.now(),
        "version": __version__,
        "footnote": "",
        "revision": sanitize(str(git.get("revision") or ""))[:80],
        "branch": sanitize(str(git.get("branch") or ""))[:200],
        "changed": paths[:_MAX_CHANGED],
        "diff_incomplete": bool(paths) and git.get("complete") is False,
    } | dict.fromkeys(
        (
            "reason", "failure_lines", "failure_who", "consequences", "advice", "notes", "elements",
            "timeline", "marks", "rank_rows", "plots", "node_rows", "heat_maps", "stacks",
            "stacks_note", "last_lines", "environments", "settings", "restarts", "script", "diff",
        ),
        "",
    )  # fmt: skip


def _values(data: ReportData) -> dict[str, Any]:
    """Return the template's values for one job."""
    record, verdict = data.record, data.verdict
    failure = verdict.failure if verdict is not None else None
    hosts = {node.rank: node.host for node in data.nodes}
    metrics, node_rows, _ = plots.table(data)
    values = _common(record, data.state, snapshot=verdict is None) | {
        "taken_at": data.taken_at,
        "restarts": data.restarts,
        "reason": data.reason,
        "failure_who": failure.who if failure is not None else "",
        "failure_lines": _lines(failure.last_lines) if failure is not None else "",
        "consequences": _consequences(verdict.consequences if verdict is not None else ()),
        "facts": _facts(data),
        "advice": _advice(data),
        "notes": data.notes,
        "timeline": _picture(timeline.draw(data)),
        "phases": list(_PHASES.items()),
        "marks": data.marks,
        "clock": svg.clock,
        **_rank_table(data, hosts),
        "plots": plots.draw(data),
        "node_metrics": metrics,
        "node_rows": node_rows,
        "heat_maps": heat_map.draw(data),
        "stacks": data.stacks,
        "stacks_note": data.stacks_note,
        "last_lines": _last_lines(data),
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
            ("timeline", "Timeline", values["timeline"] or values["marks"]),
            ("metrics", "Metrics", values["plots"]),
            ("heat", "Ranks over time", values["heat_maps"]),
            ("stacks", "Stacks", values["stacks"]),
            ("output", "Last lines", values["last_lines"]),
            ("environment", "Environment", values["environments"] or values["settings"]),
            ("code", "Code", True),
        )
        if shown
    ]


def _lines(lines: Sequence[str]) -> str:
    return "\n".join(sanitize(line) for line in lines)


def _consequences(failures: Sequence[Failure]) -> list[tuple[str, list[str]]]:
    """Return the failures after the root cause, folded: a label and the lines below it."""
    found = []
    for label, group in (
        ("failed after it, as a consequence", [item for item in failures if item.effect]),
        ("failed too, for a reason of its own", [item for item in failures if not item.effect]),
    ):
        if group:
            lines = [sanitize(f"{item.who}: {item.message}")[:400] for item in group]
            more = (
                [f"and {len(lines) - _MAX_CONSEQUENCES} more"]
                if len(lines) > _MAX_CONSEQUENCES
                else []
            )
            found.append((f"{_names(group)} {label}", lines[:_MAX_CONSEQUENCES] + more))
    return found


def _names(failures: Sequence[Failure]) -> str:
    ranks = sorted({item.rank for item in failures if item.rank is not None})
    nodes = sorted({item.node_rank for item in failures if item.rank is None})
    parts = [f"rank{'s' if len(ranks) > 1 else ''} {ranges_text(ranks)}"] if ranks else []
    parts += [f"node{'s' if len(nodes) > 1 else ''} {ranges_text(nodes)}"] if nodes else []
    return ", ".join(parts)[:300]


def _facts(data: ReportData) -> list[tuple[str, str]]:
    record, verdict = data.record, data.verdict
    facts = [
        (
            "Cluster",
            record.cluster
            if record.cluster == record.backend
            else f"{record.cluster} ({record.backend})",
        ),
        ("Nodes", str(record.nodes)),
        ("Ranks", str(len(data.ranks)) if data.ranks else "not known"),
        ("Exit code", str(verdict.exit_code) if verdict is not None else ""),
        ("Submitted", record.submitted_at),
        ("Workers started", data.started_at or ""),
        ("Ended", (verdict.ended_at or "") if verdict is not None else ""),
        ("Recorded time", show_duration(data.end) if data.end > 0 else ""),
        ("Attempts", str(len(data.attempts)) if len(data.attempts) > 1 else ""),
    ]
    facts += [
        (sanitize(label), sanitize(text)) for label, text in efficiency_facts(data.efficiency)
    ]
    return [(label, sanitize(value)) for label, value in facts if value]


def efficiency_facts(efficiency: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return the numbers of an efficiency as label and text."""
    found = []
    for key, value in (efficiency or {}).items():
        label = key.replace("_", " ").capitalize()
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)):
            found.append((label, f"{value:.4g}"))
        elif isinstance(value, str):
            found.append((label, value[:200]))
    return found


def _advice(data: ReportData) -> list[str]:
    advice = (data.efficiency or {}).get("advice")
    return [sanitize(str(line))[:300] for line in advice[:10]] if isinstance(advice, list) else []


def _rank_table(data: ReportData, hosts: Mapping[int, str]) -> dict[str, Any]:
    ranks = timeline.shown_ranks(data)
    times = {rank.rank: timeline.times(rank) for rank in ranks}
    phases = [phase for phase in timeline.PHASES if any(phase in one for one in times.values())]
    metrics, values = heat_map.rank_values(data)
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


def _last_lines(data: ReportData) -> list[dict[str, Any]]:
    failed = {rank.rank for rank in data.ranks if rank.failed}
    return [
        {"label": group.label, "text": group.text, "bad": bool(failed & {*group.ranks})}
        for group in data.last_lines
    ]


def _settings(record: Record) -> list[tuple[str, str]]:
    """Return what the job asked for; of secrets only the names."""
    spec = record.spec
    program = spec.get("program")
    program = program if isinstance(program, Mapping) else {}
    resources = spec.get("resources")
    resources = resources if isinstance(resources, Mapping) else {}
    words = [str(program.get("target", "")), *map(str, program.get("args") or ())]
    secrets = [
        item.get("name") if isinstance(item, Mapping) else item for item in spec.get("secret") or ()
    ]
    found = [
        ("Program", " ".join(words)),
        ("Working directory", spec.get("workdir")),
        ("Interpreter", spec.get("python")),
        ("Launcher", spec.get("launcher")),
        ("Workers per node", spec.get("nproc_per_node")),
        *((key.replace("_", " ").capitalize(), value) for key, value in resources.items()),
        ("Container", spec.get("container")),
        ("Variables", ", ".join(map(str, spec.get("env") or ()))),
        ("Secrets (names)", ", ".join(str(name) for name in secrets)),
    ]
    return [
        (label, sanitize(str(value))[:600]) for label, value in found if value not in (None, "", [])
    ]


# -- HTML ------------------------------------------------------------------------------------------


def _picture(text: str) -> Any:
    """Mark a picture as HTML: the modules that draw it escape each text."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704


def _page(values: Mapping[str, Any]) -> str:
    environment = _environment()
    css, js = (_source(environment, name) for name in ("report.css.j2", "report.js.j2"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(css)}'; script-src '{_hash(js)}';"
        " base-uri 'none'; form-action 'none'"
    )
    template = environment.get_template("report.html.j2")
    text = template.render(values, css=_picture(css), js=_picture(js), policy=_picture(policy))
    # A surrogate cannot be written as UTF-8.
    return text.encode(errors="replace").decode()


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_directory()),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["safe_picture"] = _picture
    return environment


def _source(environment: jinja2.Environment, name: str) -> str:
    """Return the styles or the script, shortened."""
    assert environment.loader is not None
    text = environment.loader.get_source(environment, name)[0]
    return re.sub(r"\n\s+", "\n", text).strip() if name.endswith("css.j2") else text.strip()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
