"""One run: start a job, inject faults, let machines return, and count what a person did."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from goodput_parts.disk import Disk
from goodput_parts.faults import Fault, Kind
from goodput_parts.progress import POLL_SECONDS, Progress

RETURN_SECONDS = 20.0  # seconds until a machine starts its launcher again
CUT_SECONDS = 30.0  # seconds for which a machine is cut off
FULL_SECONDS = 5.0  # seconds for which the disk is full
REQUEUE_SECONDS = 5.0  # seconds until the scheduler starts a preempted job again


class Launcher(Protocol):
    """What differs between clusterjob, torchrun and Slurm.

    Attributes:
        name: the name for the table.
        kinds: the faults that can be injected.
    """

    name: str
    kinds: list[Kind]

    def start(self) -> None:
        """Start the job on all machines, or start it again: it continues from its checkpoint."""

    def targets(self) -> list[int]:
        """Return the machines that run workers now."""

    def kill_rank(self, node: int, number: int) -> None:
        """Send a signal to the rank of a machine."""

    def kill_agent(self, node: int) -> None:
        """Kill the launcher's process of a machine; the machine returns later."""

    def cut(self, node: int) -> Callable[[], None]:
        """Cut off a machine; return the function that connects it again."""

    def preempt(self) -> bool:
        """Warn the job, as a scheduler does; return whether the caller starts the job again."""

    def restore(self) -> None:
        """Start the launchers of machines that have been without one for `RETURN_SECONDS`."""

    def ended(self) -> bool:
        """Return whether no launcher of the job runs."""

    def stop(self) -> None:
        """End everything."""

    def blamed(self) -> list[dict[str, Any]]:
        """Return the restarts that the launcher has recorded: their time and the node named."""


@dataclass
class Result:
    """The result of one run.

    Attributes:
        injected: the faults, each with the time and the machine that it has hit; None if no machine
            ran workers then.
        persons: what a person had to do, with the time.
    """

    name: str
    seconds: float
    steps: int
    injected: list[dict[str, Any]] = field(default_factory=list)
    persons: list[dict[str, Any]] = field(default_factory=list)
    blamed: list[dict[str, Any]] = field(default_factory=list)


def run(
    launcher: Launcher,
    disk: Disk,
    progress: Progress,
    faults: list[Fault],
    seconds: float,
    person_seconds: float,
) -> Result:
    """Run a job among faults; return what happened.

    Args:
        launcher: starts the job.
        disk: has the checkpoint.
        progress: watches the checkpoint.
        faults: what to inject.
        seconds: length of the run.
        person_seconds: time without progress after which a person starts the job again.
    """
    result = Result(launcher.name, seconds, 0)
    left = [fault for fault in faults if fault.kind in launcher.kinds]
    undo: list[tuple[float, Callable[[], None]]] = []
    begin = progress.begin = progress.moved_at = time.monotonic()
    preempted = False  # and not started again yet

    def start_again() -> None:
        nonlocal preempted
        preempted = False
        progress.moved_at = time.monotonic()
        launcher.stop()
        launcher.start()

    launcher.start()
    try:
        while (now := time.monotonic()) < begin + seconds:
            progress.poll()
            for due, action in [each for each in undo if each[0] <= now]:
                action()
                undo.remove((due, action))
            if left and now >= begin + left[0].at:
                fault = left.pop(0)
                targets = [] if preempted else launcher.targets()
                node = targets[fault.target % len(targets)] if targets else None
                result.injected.append(
                    {"at": round(now - begin, 1), "kind": fault.kind.value, "node": node}
                )
                _log(launcher.name, result.injected[-1], progress)
                if node is not None:
                    preempted = _inject(launcher, disk, fault=fault, node=node, undo=undo)
            if preempted:
                if launcher.ended():
                    undo.append((now + REQUEUE_SECONDS, start_again))
                    preempted = False
                    progress.moved_at = now + REQUEUE_SECONDS
            else:
                launcher.restore()
            if now - progress.moved_at > person_seconds:
                what = "ended" if launcher.ended() else "no progress"
                result.persons.append({"at": round(now - begin, 1), "why": what})
                _log(launcher.name, result.persons[-1], progress)
                start_again()
            time.sleep(POLL_SECONDS)
        progress.poll()
        result.steps = progress.steps
        result.blamed = launcher.blamed()
    finally:
        for _, action in undo:
            if action is not start_again:
                action()
        launcher.stop()
    return result


def _inject(
    launcher: Launcher,
    disk: Disk,
    fault: Fault,
    node: int,
    undo: list[tuple[float, Callable[[], None]]],
) -> bool:
    """Inject a fault; return whether the job must be started again after it has ended."""
    now = time.monotonic()
    if fault.kind is Kind.RANK:
        launcher.kill_rank(node, signal.SIGKILL)
    elif fault.kind is Kind.FREEZE:
        launcher.kill_rank(node, signal.SIGSTOP)
    elif fault.kind is Kind.AGENT:
        launcher.kill_agent(node)
    elif fault.kind is Kind.NODE:
        undo.append((now + CUT_SECONDS, launcher.cut(node)))
    elif fault.kind is Kind.DISK:
        disk.fill()
        undo.append((now + FULL_SECONDS, disk.free))
    else:
        return launcher.preempt()
    return False


def _log(name: str, what: dict[str, Any], progress: Progress) -> None:
    print(f"{name}: {json.dumps(what)} at step {progress.steps}", flush=True)


def save(path: Path, results: list[Result], extra: dict[str, Any]) -> None:
    """Write all results as JSON."""
    data = extra | {"runs": [asdict(each) for each in results]}
    path.write_text(json.dumps(data, indent=1) + "\n")
