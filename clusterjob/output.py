"""What people and programs are shown: merged output, tables, JSON, and a line that moves while one waits."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends import Status
from clusterjob.checks import Check, CheckState
from clusterjob.config import Settings
from clusterjob.node.logs import Line, fold
from clusterjob.node.verdict import JobState
from clusterjob.records import Record
from clusterjob.units import show_size

if TYPE_CHECKING:
    from rich.status import Status as Spinner

    from clusterjob.ssh.survey import HostReport

SCHEMA = 1


def print_json(value: dict[str, Any]) -> None:
    """Print a value on stdout with its schema number."""
    print(json.dumps({"schema": SCHEMA, **value}, ensure_ascii=False, indent=1))


def say(text: str) -> None:
    """Print a line on stderr, where everything goes that is not a result."""
    print(f"clusterjob: {text}", file=sys.stderr, flush=True)


def job_json(record: Record, status: Status) -> dict[str, Any]:
    """Return what ``status --json`` gives for one job."""
    verdict = status.verdict
    failure = verdict.failure.to_json() if verdict is not None and verdict.failure is not None else None
    shown = ("rank", "local_rank", "node_rank", "host", "exit_code", "signal", "message")
    return {
        "id": record.job_id,
        "name": record.name,
        "cluster": record.cluster,
        "backend": record.backend,
        "backend_id": record.handle.id if record.handle else None,
        "state": str(status.state),
        "exit_code": verdict.exit_code if verdict else None,
        "nodes": record.nodes,
        "submitted_at": record.submitted_at,
        "started_at": status.started_at,
        "ended_at": verdict.ended_at if verdict else None,
        "reason": status.reason,
        "restarts": status.restarts,
        "failure": {key: failure[key] for key in shown} if failure else None,
        "job_dir": str(record.job_dir),
    }


def print_jobs(pairs: Sequence[tuple[Record, Status]], *, together: bool = False) -> None:
    """Print jobs as a table on stdout, one a line.

    Args:
        pairs: the jobs and how they stand.
        together: give an array one line, with how many of its elements are in which state.
    """
    rows = [("ID", "STATE", "CODE", "NODES", "CLUSTER", "SUBMITTED", "REASON")]
    for job_id, group in itertools.groupby(pairs, lambda pair: _listed_id(pair[0], together=together)):
        members = list(group)
        record, status = members[0]
        state, code, reason = str(status.state), "" if status.verdict is None else str(status.verdict.exit_code), status.reason
        if record.index is not None and together:
            counts = Counter(str(now.state) for _, now in members)
            state = ",".join(counts) if len(counts) == 1 else "MIXED"
            code = next((str(now.verdict.exit_code) for _, now in members if now.verdict is not None and now.verdict.exit_code), code)
            reason = ", ".join(f"{count} {name}" for name, count in counts.items())
        when = record.submitted_at[:19].replace("T", " ")
        rows.append((job_id, state, code, str(record.nodes), record.cluster, when, reason.partition("\n")[0]))
    print_table(rows)


def _listed_id(record: Record, *, together: bool) -> str:
    return record.job_id.rpartition("_")[0] if together and record.index is not None else record.job_id


def print_end(record: Record, status: Status) -> None:
    """Say how one of several jobs has ended."""
    if status.verdict is not None:
        say(f"job {record.job_id} {status.verdict.text()}")


def print_cancelled(done: Sequence[tuple[Record, bool]]) -> None:
    """Say which jobs were cancelled; of an array in one line."""
    for job_id, group in itertools.groupby(done, lambda pair: _listed_id(pair[0], together=True)):
        members = list(group)
        stopped = sum(was_running for _, was_running in members)
        if len(members) == 1:
            say(f"job {members[0][0].job_id} {'is cancelled' if stopped else 'had ended already'}")
        else:
            say(f"job {job_id}: {stopped} of {len(members)} elements are cancelled, the others had ended already")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns; the last one is not padded, so that nothing is cut and no line ends in blanks."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_hosts(reports: Sequence[HostReport]) -> None:
    """Print what hosts answered, one a line; what is wrong with one stands at the end of its line."""
    rows = [("HOST", "ADDRESS", "PYTHON", "TORCH", "FREE", "GPUS", "STATE")]
    for report in reports:
        torch = "" if report.torch is None else "yes" if report.torch else "no"
        free = "" if report.free is None else show_size(report.free)
        gpus = str(len(report.gpus)) if report.python else ""
        rows.append((report.host, report.address, report.python, torch, free, gpus, report.trouble or "fit"))
    print_table(rows)


def print_check(check: Check) -> None:
    """Print one line of an examination, at once; what to do about it stands below."""
    print(f"{check.state!s:<7}  {check.name:<12}  {check.words}", flush=True)
    if check.hint and check.state is not CheckState.OK:
        print(f"{'':<7}  {'':<12}  hint: {check.hint}", flush=True)


class LogPrinter:
    """Prints merged output: the workers' stdout on stdout, their stderr on stderr, each line with its rank.

    Args:
        world_is_one: a job of one worker needs no labels, so that its output can be piped on.
    """

    def __init__(self, *, world_is_one: bool) -> None:
        self._plain = world_is_one

    def show(self, lines: list[Line]) -> None:
        """Print lines; those that many ranks wrote alike as one."""
        for line in fold(lines):
            text = line.text if self._plain else f"[{line.label}] {line.text}"
            print(text, file=sys.stdout if line.stream == "out" else sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()


class Progress:
    """Says what a job waits for: a moving line on a terminal, else a line when there is news; silent once it runs."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._spinner: Spinner | None = None
        self._told = ""
        self._restarts = 0

    def update(self, status: Status) -> None:
        """Take in how the job stands."""
        if status.restarts > self._restarts:
            self._restarts = status.restarts
            say(f"restart {status.restarts}")
        if status.state is not JobState.PENDING:
            self.stop()
        text = status.reason or "starting"
        if status.state is JobState.PENDING and sys.stderr.isatty():
            if time.monotonic() - self._begin > 0.5:  # most jobs are up before a spinner is worth its import
                self._spin(f"{text} ({time.monotonic() - self._begin:.0f} s)")
        elif status.reason and status.reason != self._told:
            self._told = status.reason
            say(status.reason)

    def _spin(self, text: str) -> None:
        if self._spinner is None:
            from rich.console import Console

            self._spinner = Console(stderr=True).status(text)
            self._spinner.start()
        self._spinner.update(text)

    def stop(self) -> None:
        """Take the moving line away."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None


def print_verdicts(pairs: Sequence[tuple[Record, Status]]) -> None:
    """Print how jobs failed, after their table."""
    for record, status in pairs:
        if status.verdict is not None and status.state is not JobState.SUCCEEDED:
            print(f"\n{record.job_id} {status.verdict.text()}\n  logs: {record.job_dir / 'logs'}")


def settings_json(settings: Settings) -> dict[str, Any]:
    """Return settings as plain data."""
    values = {
        key: {"value": str(value) if isinstance(value, Path) else value, "origin": settings.origins[key]}
        for key, value in settings.values.items()
    }
    return {"cluster": settings.cluster, "backend": settings.backend, "settings": values}


def print_settings(settings: Settings) -> None:
    """Print settings, each with where it was written."""
    print(f"cluster: {settings.cluster}   backend: {settings.backend}")
    rows = [(key, str(value), settings.origins[key]) for key, value in settings.values.items()]
    if rows:
        print_table([("SETTING", "VALUE", "FROM"), *rows])
