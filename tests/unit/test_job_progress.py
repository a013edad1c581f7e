"""The phase of a job from its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clusterjob.backends.base import JobPhase
from clusterjob.backends.job_progress import progress
from clusterjob.cli.phase_text import phase_text
from clusterjob.node.logs.events import EventLog
from clusterjob.node.verdict import JobState


def test_each_event_gives_phase_counts_and_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    assert progress(tmp_path).phase is None
    steps: list[tuple[str, dict[str, Any], tuple[str, int, int] | None]] = [
        ("joined", {"node_rank": 0}, None),
        ("listening", {"nnodes": 3}, ("nodes", 1, 3)),
        ("joined", {"node_rank": 2}, ("nodes", 2, 3)),
        ("waiting", {"missing": [1]}, ("nodes", 2, 3)),
        ("joined", {"node_rank": 1}, ("nodes", 3, 3)),
        ("started", {"preload": True, "world_size": 6, "restart": 0}, ("import", 0, 6)),
        ("running", {}, ("start", 0, 6)),
        ("ranks", {"joined": 5, "formed": 0}, ("ranks", 5, 6)),
        ("ranks", {"joined": 6, "formed": 2}, ("ranks", 6, 6)),
        ("ranks", {"joined": 6, "formed": 6}, ("running", 6, 6)),
        ("stop", {"why": "boom"}, ("stop", 0, 0)),
        ("restart", {}, ("stop", 0, 0)),
        ("started", {"preload": False, "world_size": 6, "restart": 1}, ("start", 0, 6)),
        ("running", {}, ("start", 0, 6)),
        ("ranks", {"joined": 0, "formed": 0}, ("start", 0, 6)),
        ("ranks", {"joined": 1, "formed": 0}, ("ranks", 1, 6)),
        ("ended", {}, None),
        ("joined", {"node_rank": 0}, None),  # the next attempt
        ("listening", {"nnodes": 3}, ("nodes", 1, 3)),
    ]
    for name, details, wanted in steps:
        log.add(name, **details)
        phase = progress(tmp_path).phase
        assert (phase and (str(phase.phase), phase.done, phase.total)) == wanted, name


def test_elastic_job_without_some_nodes_says_so_while_it_runs(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    def text() -> str:
        return phase_text(progress(tmp_path).status(JobState.RUNNING), has_output=True)

    started = {"preload": False, "world_size": 2, "wanted": 3}
    log.add("started", nodes=[0, 2], **started)
    log.add("running")
    assert text() == "running on 2 of 3 nodes"
    log.add("ranks", joined=2, formed=2)
    assert text() == "running on 2 of 3 nodes"
    log.add("started", nodes=[0, 2, 1], **started)
    log.add("ranks", joined=3, formed=3)
    assert text() == "running"
    for forged in ({"nodes": 7}, {"nodes": [0], "wanted": "3"}, {"nodes": [0], "wanted": -1}):
        log.add("started", **started | forged)
        log.add("running")
        assert text() == "running"


def test_progress_names_slow_hosts_of_preflight(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("listening", nnodes=2)
    log.add("measuring", nodes=2)
    assert progress(tmp_path).waiting == "measuring the hosts (--preflight)"
    log.add("preflight", slow=["host gpu1: memory 0.31 of the median", 7], findings=[])
    log.add("started", world_size=2, restart=0)
    assert progress(tmp_path).waiting == "slow host gpu1: memory 0.31 of the median"


def test_progress_has_reason_of_last_restart(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.add("started", world_size=2, restart=0)
    assert progress(tmp_path).status(JobState.RUNNING).restart_reason == ""
    log.add("restart", restart=1, why="rank 1: killed by SIGKILL")
    log.add("started", world_size=2, restart=1)
    status = progress(tmp_path).status(JobState.RUNNING)
    assert (status.restarts, status.restart_reason) == (1, "rank 1: killed by SIGKILL")


def test_seconds_of_phase_are_those_of_clock_of_node_0(tmp_path: Path) -> None:
    lines = (
        '{"event": "listening", "monotonic": 5, "nnodes": 2}\n'
        '{"event": "started", "monotonic": 7, "world_size": 2}\n'
        '{"event": "running", "monotonic": 8}\n'
    )
    (tmp_path / "events.jsonl").write_text(lines)
    found = progress(tmp_path)
    status = found.status(JobState.RUNNING, clock=10.0)
    assert (status.progress.phase, status.progress.seconds) == (JobPhase.START, 3.0)
    assert status.elapsed == 3.0
    for clock in (None, 6.0):  # unknown, or the clock of another boot
        progress_then = found.status(JobState.RUNNING, clock=clock).progress
        assert progress_then.seconds is None
