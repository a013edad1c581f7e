"""Print output for users and programs: merged logs, tables, JSON, messages and progress."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from clusterjob.cli import colours
from clusterjob.cli.tables import print_table
from clusterjob.core.live import live
from clusterjob.core.options import as_in_file
from clusterjob.core.records import Record, home
from clusterjob.core.units import show_size
from clusterjob.doctor.engine import Check, CheckState
from clusterjob.node.logs import ends, events
from clusterjob.node.logs.log_files import LONGEST, Labelled, LogLine, as_text, fold
from clusterjob.node.system import codec
from clusterjob.node.system.sanitize import UNSAFE, sanitize
from clusterjob.node.verdict import JobState, Verdict

if TYPE_CHECKING:
    from pathlib import Path

    from clusterjob.backends.base import Status
    from clusterjob.core.bad_hosts import BadHost
    from clusterjob.core.config import Settings
    from clusterjob.remote.host_probe import HostReport

SCHEMA = 1
_LONGEST_LINE, _MAX_HOSTS = 4000, 10  # characters of a line about written files; lines


def print_json(value: dict[str, Any]) -> None:
    """Print a value on stdout with its schema number; a value unknown to JSON becomes text."""
    text = json.dumps({"schema": SCHEMA, **value}, ensure_ascii=False, indent=1, default=str)
    print(escape_json(text))


def escape_json(text: str) -> str:
    """Escape the unsafe characters of a JSON text; its values stay the same."""
    return "\n".join(
        UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", line) for line in text.split("\n")
    )


def print_message(text: str) -> None:
    """Print a message line on stderr; results go to stdout."""
    live.clear()
    print(f"clusterjob: {sanitize(text)}", file=sys.stderr, flush=True)


def print_verdict(record: Record, verdict: Verdict) -> None:
    """Print the verdict of a job on stderr, with the last lines of its root cause."""
    live.clear()
    text = colours.verdict_text(verdict, coloured=colours.wanted(sys.stderr))
    print(f"clusterjob: job {sanitize(record.job_id)} {text}", file=sys.stderr, flush=True)
    for line in written_beside_code(record.job_dir, verdict):
        if line != verdict.in_code:
            print(f"  {sanitize(line)}", file=sys.stderr)


def written_beside_code(job_dir: Path, verdict: Verdict) -> list[str]:
    """Return a line for each host on which a job wrote files into its copy of the code."""
    lines = [end.get("in_code") for end in ends.written(job_dir, verdict.attempt)]
    texts = [line[:_LONGEST_LINE] for line in lines if line and isinstance(line, str)]
    return list(dict.fromkeys(filter(None, (verdict.in_code, *texts))))[:_MAX_HOSTS]


def job_json(
    record: Record, status: Status, efficiency: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the object that ``status --json`` prints for one job."""
    from clusterjob.core.listing import row_of

    verdict = status.verdict
    ended = verdict.attempts if verdict else ()
    if not ended:  # the job runs, or no coordinator wrote its verdict
        ended = events.ended_rounds(record.job_dir, running=verdict is None)
    failure = codec.plain(verdict.failure) if verdict is not None else None
    shown = (
        "rank", "local_rank", "node_rank", "host", "exit_code", "signal", "message", "kind",
        "where",
    )  # fmt: skip
    progress = status.progress
    return {
        "id": record.job_id,
        "name": record.name,
        "cluster": record.cluster,
        "backend": record.backend,
        "backend_id": record.handle.id if record.handle else None,
        "state": str(status.state),
        "progress": {**vars(progress), "phase": str(progress.phase)} if progress else None,
        "exit_code": verdict.exit_code if verdict else None,
        "nodes": record.nodes,
        "submitted_at": record.submitted_at,
        "started_at": status.started_at,
        "ended_at": verdict.ended_at if verdict else None,
        "seconds": row_of(record, status).seconds,
        "reason": status.reason,
        "restarts": status.restarts,
        "attempts": [vars(each) for each in ended],
        "hosts": status.hosts,
        "values": record.values,
        "stragglers": [straggler.to_json() for straggler in status.stragglers],
        "failure": {key: failure[key] for key in shown} if failure else None,
        "evidence": verdict.evidence or None if verdict else None,
        "job_dir": str(record.job_dir),
        "code": record.code,
        "written_beside_code": written_beside_code(record.job_dir, verdict) if verdict else [],
        "efficiency": efficiency,
    }


def print_broken(names: Sequence[str]) -> None:
    """Print which records cannot be read; their jobs are not listed."""
    for name in names:
        print_message(
            f"the record {home() / 'records' / name} cannot be read: its job is not listed"
        )


def print_end(record: Record, status: Status) -> None:
    """Print the verdict of one of several jobs; print nothing if it has no verdict."""
    if status.verdict is not None:
        print_verdict(record, status.verdict)


def print_cancelled(done: Sequence[tuple[Record, bool]]) -> None:
    """Print which jobs were cancelled, with one line per array."""
    for job_id, group in itertools.groupby(done, lambda pair: pair[0].whole_id):
        members = list(group)
        stopped = sum(was_running for _, was_running in members)
        if len(members) == 1:
            print_message(
                f"job {members[0][0].job_id} {'is cancelled' if stopped else 'had ended already'}"
            )
        else:
            rest = "" if stopped == len(members) else ", the others had ended already"
            print_message(f"job {job_id}: {stopped} of {len(members)} elements are cancelled{rest}")


def print_hosts(reports: Sequence[HostReport]) -> None:
    """Print host reports, one per line; the last column is the error, or `fit`.

    The first hints follow on stderr.
    """
    rows = [("HOST", "ADDRESS", "PYTHON", "TORCH", "FREE", "GPUS", "STATE")]
    for report in reports:
        torch = "" if report.torch is None else "yes" if report.torch else "no"
        free = "" if report.free is None else show_size(report.free)
        gpus = str(len(report.gpus)) if report.python else ""
        rows.append(
            (report.host, report.address, report.python, torch, free, gpus, report.error or "fit")
        )
    print_table(rows)
    hints = dict.fromkeys(report.hint for report in reports if report.hint)
    for hint in list(hints)[:3]:
        print(f"  hint: {sanitize(hint)}", file=sys.stderr, flush=True)


def print_bad_hosts(rows: Sequence[tuple[str, BadHost]]) -> None:
    """Print the hosts that jobs blamed, one per line, each with its cluster."""
    print_table(
        [
            ("HOST", "CLUSTER", "KIND", "JOB", "AGO", "REASON"),
            *((each.host, name, each.kind, each.job, each.age, each.why) for name, each in rows),
        ]
    )


def print_check(check: Check) -> None:
    """Print one doctor check immediately, with its hint on the next line."""
    print(f"{check.state!s:<7}  {check.name:<12}  {sanitize(check.message)}", flush=True)
    if check.hint and check.state is not CheckState.OK:
        print(f"{'':<7}  {'':<12}  hint: {sanitize(check.hint)}", flush=True)


class LogPrinter:
    """Print the merged output of the workers, each line with its rank.

    The workers' stdout goes to stdout and their stderr goes to stderr.

    Args:
        world_is_one: whether the job has one worker; its lines get no label.
        element: the first part of each label, for an element of an array.
        raw: whether to print the workers' bytes unchanged: no labels, and equal lines are not
            joined.

    Attributes:
        has_open_lines: whether the terminal shows unfinished lines.
    """

    def __init__(self, *, world_is_one: bool, raw: bool = False, element: str = "") -> None:
        self._plain = world_is_one and not element
        self._element, self._world_is_one = sanitize(element), world_is_one
        self._raw = raw
        self.has_open_lines = False

    def show(
        self, batches: Iterable[list[LogLine]], open_lines: Callable[[], Sequence[LogLine]]
    ) -> None:
        """Print the lines of one poll; a terminal also shows the unfinished lines below them.

        `open_lines` is called after the batches are consumed.
        """
        self.show_all(batches)
        if not self._raw and live.has_terminal:
            shown = [
                line.text if self._plain else f"[{self._label(str(line.rank))}] {line.text}"
                for line in open_lines()
            ]
            self.has_open_lines = bool(shown)
            live.show(shown)

    def show_all(self, batches: Iterable[list[LogLine]]) -> None:
        """Print lines; equal lines that several ranks wrote at about the same time become one."""
        if not self._raw and not self._plain:
            for folded in fold(batches):
                self._print(folded)
            return
        for lines in batches:
            if not self._raw:  # only one worker writes
                self._print([("", line) for line in lines])
                continue
            live.clear()
            for line in lines:
                stream = sys.stdout.buffer if line.stream == "out" else sys.stderr.buffer
                stream.write(line.text.encode(errors="surrogateescape") + b"\n" * line.ended)
                stream.flush()

    def _print(self, lines: list[Labelled]) -> None:
        for name, text in as_text(lines, self._shown):
            live.clear()
            stream = sys.stdout if name == "out" else sys.stderr
            stream.write(text)
            stream.flush()

    def _label(self, ranks: str) -> str:
        if not self._element:
            return ranks
        return self._element if self._world_is_one else f"{self._element}: {ranks}"

    def _shown(self, label: str, line: LogLine) -> str:
        # A part of one long line gets no line break.
        end = "\n" if line.ended or not self._plain or len(line.text) < LONGEST else ""
        text = sanitize(line.text, colours=True)
        return text + end if self._plain else f"[{self._label(label)}] {text}{end}"


class NodeLines:
    """Print output of several nodes by lines, each with its node."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], bytes] = {}

    def show(self, node: int, stream: int, data: bytes) -> None:
        """Print the complete lines; with no data, print the unfinished line too.

        Args:
            node: the node.
            stream: 1 for stdout, 2 for stderr.
            data: bytes of the stream.
        """
        *lines, rest = (self._open.pop((node, stream), b"") + data).split(b"\n")
        if rest and (not data or len(rest) >= LONGEST):
            lines.append(rest)
        elif rest:
            self._open[node, stream] = rest
        target = sys.stdout if stream == 1 else sys.stderr
        for line in lines:
            text = sanitize(line.decode(errors="replace").rstrip("\r"), colours=True)
            target.write(f"[node {node}] {text}\n")
        target.flush()


def print_verdicts(pairs: Sequence[tuple[Record, Status]]) -> None:
    """Print the verdicts of jobs that did not succeed, below their table."""
    for record, status in pairs:
        if status.verdict is not None and status.state is not JobState.SUCCEEDED:
            text = colours.verdict_text(status.verdict, coloured=colours.wanted(sys.stdout))
            print(f"\n{sanitize(record.job_id)} {text}")
            print(sanitize(f"  logs: {record.job_dir / 'logs'}"))
    notes: dict[str, str] = {}  # by place: the elements of an array share their code
    for record, status in pairs:
        if status.verdict is not None:
            for line in written_beside_code(record.job_dir, status.verdict):
                if line != status.verdict.in_code or status.state is JobState.SUCCEEDED:
                    notes[line.partition(": ")[0]] = f"{record.job_id}: {line}"
    for note in notes.values():
        print(sanitize(note))


def settings_json(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data for JSON."""
    return {
        "cluster": settings.cluster,
        "backend": settings.backend,
        "settings": {
            key: {
                "value": shown,
                **({unit: value} if unit else {}),
                "origin": settings.origins[key],
            }
            for key, value in settings.values.items()
            for shown, unit in [as_in_file(key, value)]
        },
    }


def _on_one_line(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def print_settings(settings: Settings) -> None:
    """Print settings, each with its origin."""
    print(sanitize(f"cluster: {settings.cluster}   backend: {settings.backend}"))
    rows = [
        (key, _on_one_line(as_in_file(key, value)[0]), settings.origins[key])
        for key, value in settings.values.items()
    ]
    if rows:
        print_table([("SETTING", "VALUE", "FROM"), *rows])
