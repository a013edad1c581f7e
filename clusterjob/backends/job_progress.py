"""How far a job is that has not ended, from the events in its directory."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from clusterjob.backends.base import JobPhase, JobProgress, Status, Straggler
from clusterjob.core.records import Handle
from clusterjob.node.logs.events import CAUGHT_UP, STRAGGLING, now, read_job_events
from clusterjob.node.logs.job_dir import AGENT_LOG, LOGS, SLURM_LOG
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import codec
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState

# A line of templates/python-env.sh.j2.
_PREPARING = re.compile(
    r"clusterjob: (preparing the Python environment(?:: \d{1,9} s so far)?)", re.ASCII
)
_MAX_CLOCK = 1e12  # seconds; no machine runs that long
_MAX_COUNT = 1 << 24  # ranks or nodes
_MAX_NODES = 1 << 16  # nodes that are told apart
_MAX_DETAIL = 300  # characters
_MAX_NAMED = 3  # ranks that a text names
_MAX_STRAGGLERS = 64  # that are kept of a job; a host may forge events


class Progress(NamedTuple):
    """The progress of a running job.

    Attributes:
        started_at: when its workers first started, RFC 3339, UTC; None before.
        restarts: number of restarts of the workers.
        waiting: what its agents wait for; empty if they do not wait.
        started: when its workers first started, by the monotonic clock of node 0; None before.
        phase: its phase and counts; None before an agent has started.
        phase_began: the begin of the phase, by the same clock; None if it is unknown.
        restart_reason: why the workers were started again the last time.
        stragglers: the ranks that the others wait for in collectives.
        attempt: the number of the attempt, from 0.
    """

    started_at: str | None = None
    restarts: int = 0
    waiting: str = ""
    started: float | None = None
    phase: JobProgress | None = None
    phase_began: float | None = None
    restart_reason: str = ""
    stragglers: tuple[Straggler, ...] = ()
    attempt: int = 0

    def status(
        self,
        state: JobState,
        reason: str = "",
        handle: Handle | None = None,
        clock: float | None = None,
    ) -> Status:
        """Return the status of a job that has not ended.

        Args:
            state: the job's state.
            reason: one line; empty if there is no reason.
            handle: the job's handle, if its record has none.
            clock: the monotonic clock of node 0 now; None if it is unknown.
        """
        elapsed = _seconds(self.started, clock)
        phase = self.phase
        if phase is not None:
            phase = replace(phase, seconds=_seconds(self.phase_began, clock))
        return Status(
            state,
            reason,
            started_at=self.started_at,
            restarts=self.restarts,
            handle=handle,
            elapsed=elapsed,
            progress=phase,
            restart_reason=self.restart_reason,
            stragglers=self.stragglers,
        )


def progress(job_dir: Path) -> Progress:
    """Return the progress of a job from the events in its directory."""
    started_at, restarts, waiting, started = None, 0, "", None
    restart_reason, attempt, notice = "", 0, ""
    phases, stragglers = _Phases(), dict[int, Straggler]()
    agents_started = False
    for event in read_job_events(job_dir):
        agents_started = True
        phases.take(event)
        note_straggler(stragglers, event)
        kind = event.get("event")
        if kind == "started":
            at, restart = event.get("time"), event.get("restart")
            if started_at is None:
                started = _clock(event)
            started_at = started_at or (at if isinstance(at, str) else now())
            restarts, waiting = restart if type(restart) is int else 0, notice
            attempt = _count(event, "attempt")
        elif kind == "waiting":
            missing = event.get("missing")
            waiting = (
                f"waiting for node {', '.join(map(str, missing))}"
                if isinstance(missing, list)
                else ""
            )
        elif kind == "measuring":
            waiting = "measuring the hosts (--preflight)"
        elif kind == "preflight":
            notice = _slow_hosts(event) or notice
        elif kind == "restart":
            restart_reason = str(event.get("why", ""))[:_MAX_DETAIL]
        elif kind == "exec":
            # Before or after the start.
            waiting = notice = str(event.get("why", ""))[:_MAX_DETAIL]
    if not agents_started:
        waiting = _preparing(job_dir)
        phase = JobProgress(JobPhase.SETUP, detail=waiting) if waiting else None
        return Progress(waiting=waiting, phase=phase)
    return Progress(
        started_at,
        restarts,
        waiting,
        started=started,
        restart_reason=restart_reason,
        stragglers=tuple(stragglers[rank] for rank in sorted(stragglers)),
        attempt=attempt,
        **phases.found(),
    )


def _slow_hosts(event: Mapping[str, Any]) -> str:
    """Return the hosts that a preflight has found slow, with the reasons; empty without any."""
    slow = event.get("slow")
    named = [line for line in slow if isinstance(line, str)] if isinstance(slow, list) else []
    return f"slow {'; '.join(named)}"[:_MAX_DETAIL] if named else ""


class _Phases:
    """The phase of a job after the events so far; a host may have forged them.

    Attributes:
        progress: the phase; None before the first event that gives one.
    """

    def __init__(self) -> None:
        self.progress: JobProgress | None = None
        self._joined: set[int] = set()
        self._nodes = 0
        self._world_size = 0
        self._few_nodes = ""
        self._began: float | None = None

    def found(self) -> dict[str, Any]:
        """Return the phase and its begin, as the fields of `Progress`."""
        return {"phase": self.progress, "phase_began": self._began}

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event."""
        before = self.progress
        self._take(event)
        if self.progress is not None and (
            before is None or before.phase is not self.progress.phase
        ):
            self._began = _clock(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "listening":  # the first event of an attempt, after node 0 has joined
            self._joined, self._nodes = {0}, _count(event, "nnodes")
            self.progress = JobProgress(JobPhase.NODES, 1, self._nodes)
        elif kind == "joined":
            if len(self._joined) < _MAX_NODES:
                self._joined.add(_count(event, "node_rank"))
            if self.progress is not None and self.progress.phase is JobPhase.NODES:
                self.progress = JobProgress(JobPhase.NODES, len(self._joined), self._nodes)
        elif kind == "started":
            self._world_size = _count(event, "world_size")
            self._few_nodes = _few_nodes(event)
            phase = JobPhase.IMPORT if event.get("preload") is True else JobPhase.START
            self.progress = JobProgress(phase, 0, self._world_size)
        elif kind == "running":
            self._start()
        elif kind == "ranks":
            joined, formed = _count(event, "joined"), _count(event, "formed")
            if self._world_size and formed >= self._world_size:
                self.progress = JobProgress(
                    JobPhase.RUNNING, formed, self._world_size, detail=self._few_nodes
                )
            elif joined:
                self.progress = JobProgress(JobPhase.RANKS, joined, self._world_size)
            else:
                self._start()
        elif kind == "stop":
            why = event.get("why")
            detail = why[:_MAX_DETAIL] if isinstance(why, str) else ""
            self.progress = JobProgress(JobPhase.STOP, detail=detail)
        elif kind == "ended":  # the job may be queued again
            self.progress = None

    def _start(self) -> None:
        if self.progress is None or self.progress.phase in (JobPhase.IMPORT, JobPhase.START):
            self.progress = JobProgress(JobPhase.START, 0, self._world_size, detail=self._few_nodes)


def _few_nodes(event: Mapping[str, Any]) -> str:
    """Return how many nodes run a round, if an elastic job wants more; else an empty text."""
    nodes, wanted = event.get("nodes"), _count(event, "wanted")
    there = len(nodes) if isinstance(nodes, list) else wanted
    return f"{there} of {wanted} nodes" if there < wanted else ""


def _clock(event: Mapping[str, Any]) -> float | None:
    """Return the monotonic time of an event; None if it has none."""
    clock = event.get("monotonic")
    return float(clock) if isinstance(clock, (int, float)) and 0 <= clock < _MAX_CLOCK else None


def _seconds(begin: float | None, clock: float | None) -> float | None:
    """Return the seconds since a time of the same clock; None if a time is unknown or wrong."""
    seconds = None if begin is None or clock is None else clock - begin
    return None if seconds is None or seconds < 0 else seconds


def _count(event: Mapping[str, Any], name: str) -> int:
    value = event.get(name)
    return value if type(value) is int and 0 <= value < _MAX_COUNT else 0


def _preparing(job_dir: Path) -> str:
    """Return that node 0's script prepares the Python environment; empty if it does not."""
    for log in (node_directory(job_dir, 0) / AGENT_LOG, job_dir / LOGS / SLURM_LOG):
        for line in last_lines(log, 1):
            if match := _PREPARING.fullmatch(line):
                return match[1]
    return ""


def note_straggler(known: dict[int, Straggler], event: Mapping[str, Any]) -> None:
    """Change the stragglers of a job, by rank, as its next event says."""
    kind, rank = event.get("event"), event.get("rank")
    if kind == STRAGGLING and len(known) < _MAX_STRAGGLERS:
        with contextlib.suppress(ValueError):  # another program wrote the event
            found = codec.read(Straggler, event)
            if found.waited_s <= found.step_s and found.step_s:
                known[found.rank] = replace(found, host=sanitize(found.host))
    elif kind == CAUGHT_UP and type(rank) is int:
        known.pop(rank, None)
    elif kind in ("started", "stop", "ended"):
        known.clear()


def job_stragglers(job_dir: Path) -> tuple[Straggler, ...]:
    """Return all stragglers of the newest round of a job, as they were told the last time."""
    known: dict[int, Straggler] = {}
    for event in read_job_events(job_dir):
        if event.get("event") in ("started", STRAGGLING):
            note_straggler(known, event)
    return tuple(known[rank] for rank in sorted(known))


def straggler_lines(stragglers: Iterable[Straggler]) -> list[str]:
    """Return one line for each straggler, the worst one first."""
    return [
        f"rank {each.rank} (node {each.node_rank}, {each.host}): the others wait"
        f" {round(each.waited_s, 3):g} s of each {round(each.step_s, 3):g} s step for it"
        for each in sorted(stragglers, key=lambda each: each.waited_s, reverse=True)
    ]


def straggler_text(stragglers: Iterable[Straggler]) -> str:
    """Return the stragglers as one line; empty without one."""
    found = straggler_lines(stragglers)
    more = [f"{len(found) - _MAX_NAMED} more ranks"] if len(found) > _MAX_NAMED else []
    return "; ".join([*found[:_MAX_NAMED], *more])
