"""Read the texts of a report within limits: last lines, environments, script and diff."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.logs import events
from clusterjob.node.logs.job_dir import DIFF, ENVIRONMENT
from clusterjob.node.logs.log_files import (
    FILE_NAME,
    file_names,
    last_lines,
    node_directory,
    open_regular,
)
from clusterjob.node.system.ranges import ranges
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import RANK_MARK

_LINES, _LINES_OF_FAILED = 12, 30  # last lines of each stream of a rank
_SHORTEST, _LONGEST = 240, 12_000  # characters of one text
_SCRIPTS = ("*.sh", "task.yaml")
_MAX_SCRIPT, _MAX_DIFF = 60_000, 160_000  # bytes


@dataclass(frozen=True)
class Texts:
    """Equal text of several ranks: their last lines, or their stacks."""

    label: str
    text: str
    ranks: tuple[int, ...] = ()
    note: str = ""


def last_lines_of(
    job_dir: Path, nodes: Iterable[int], failed: Sequence[int], budget: int
) -> list[Texts]:
    """Return the last lines of all ranks, equal ones once, failed ranks first.

    Args:
        job_dir: the job's directory.
        nodes: the nodes.
        failed: the ranks that failed, the root cause first.
        budget: about how many characters all texts may have.
    """
    files: dict[int, dict[str, Path]] = {}
    for node in nodes:
        directory = node_directory(job_dir, node)
        for name in file_names(directory):  # in the order of starts: the last one stays
            match = FILE_NAME.fullmatch(name)
            if match is not None:
                files.setdefault(int(match["rank"]), {})[match["stream"]] = directory / name
    root = failed[0] if failed else None
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank in sorted(files):
        count = _LINES_OF_FAILED if rank == root else _LINES
        parts = []
        for stream, title in (("out", "stdout"), ("err", "stderr")):
            path = files[rank].get(stream)
            lines = _tail(path, count, budget=budget // 40) if path is not None else ()
            if lines:
                parts.append("\n".join([f"-- {title}", *lines]))
        if parts:
            groups.setdefault((rank == root, "\n".join(parts)), []).append(rank)
    ordered = sorted(
        groups.items(), key=lambda item: (not item[0][0], not {*failed} & {*item[1]}, item[1])
    )
    share = max(_SHORTEST, budget // max(1, len(ordered)))
    return [
        Texts(label(numbers), _cut(text, min(_LONGEST, share)), tuple(numbers))
        for (_, text), numbers in ordered
    ]


def _tail(path: Path, count: int, budget: int) -> list[str]:
    lines = last_lines(path, count, limit=min(16_384, max(2048, budget)))
    return [sanitize(RANK_MARK.sub("", line))[:400] for line in lines]


def label(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as ``ranks 0-2,5 (4 ranks)``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {','.join(ranges(sorted(ranks)))} ({len(ranks)} ranks)"


def _cut(text: str, limit: int) -> str:
    """Return the end of a text that is too long, from the begin of a line."""
    if len(text) <= limit:
        return text
    return "… " + text[-limit:].partition("\n")[2]


def _dicts(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


# -- environment, script, diff ---------------------------------------------------------------------


def environments(job_dir: Path, nodes: Iterable[int]) -> list[dict[str, Any]]:
    """Return the texts of the latest environment of each node, equal ones once."""
    groups: dict[str, dict[str, Any]] = {}
    for node in nodes:
        lines = events.read_events(node_directory(job_dir, node) / ENVIRONMENT)
        whole = (
            line
            for line in lines
            if isinstance(line.get("detected"), dict) and isinstance(line.get("versions"), dict)
        )
        recorded = deque(whole, maxlen=1)
        if not recorded:
            continue
        line = recorded[0]
        detected = {**line["detected"], "node_rank": None}
        key = json.dumps([detected, line["versions"]], sort_keys=True, default=str)
        group = groups.setdefault(key, {**line, "detected": detected, "nodes": [], "hosts": []})
        group["nodes"].append(node)
        group["hosts"].append(sanitize(str(line.get("host", "")))[:80])
    return list(map(_environment, groups.values()))


def _environment(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the texts of an environment: where each field comes from, and the versions."""
    detected = group["detected"]
    evidence = detected.get("evidence")
    evidence = evidence if isinstance(evidence, dict) else {}
    nodes = group["nodes"]
    detected = {**detected, "node_rank": nodes[0] if len(nodes) == 1 else "one for each node"}
    fields = [
        (name, _short(detected.get(name)), _short(evidence.get(name)))
        for name in (
            "source", "level", "nnodes", "node_rank", "nproc_per_node", "master_addr",
            "master_port",
        )
        if detected.get(name) is not None or name in evidence
    ]  # fmt: skip
    return {
        "label": f"node{'s' if len(group['nodes']) > 1 else ''} "
        + ",".join(ranges(sorted(group["nodes"]))),
        "fields": fields,
        "ignored": [
            f"{_short(item.get('variable'))}: {_short(item.get('why'))}"
            for item in _dicts(detected.get("ignored"))[:20]
        ],
        "versions": [
            (_short(name), _short(version))
            for name, version in list(group["versions"].items())[:20]
        ],
        "hosts": list(dict.fromkeys(group["hosts"]))[:64],
    }


def _short(value: object) -> str:
    return "" if value is None else sanitize(str(value))[:300]


def scripts(folders: Iterable[Path]) -> list[tuple[str, str]]:
    """Return the name and the text of each rendered script and task of a job."""
    found: dict[str, str] = {}
    for folder in folders:
        for pattern in _SCRIPTS:
            for path in sorted(folder.glob(pattern)):
                text = read_text(path, _MAX_SCRIPT)
                if text:
                    found.setdefault(path.name, text)
    return list(found.items())[:4]


def diff(folder: Path) -> str:
    """Return the uncommitted changes of the submitted code; empty if none were kept."""
    return read_text(folder / DIFF, _MAX_DIFF)


def read_text(path: Path, limit: int) -> str:
    """Return a file's text without control characters; a last line names a cut."""
    try:
        with open_regular(path) as stream:
            data = stream.read(limit + 1)
            size = stream.seek(0, 2)
    except OSError:
        return ""
    text = sanitize(data[:limit].decode(errors="replace").replace("\r\n", "\n"), lines=True)
    return text + (f"\n… {size - limit:,} more bytes: see {path}" if size > limit else "")
