"""Record the phases of a node and its ranks; count the joined ranks for the coordinator.

The phases of a rank that runs:

- ``import`` from its start;
- ``running`` from its first line of output, or from its start if it is no Python program;
- ``rendezvous``, ``init`` and again ``running`` when it forms a process group (`torch_patches`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from clusterjob.node.agent.state_report import StateReport
from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.logs.events import Phase, PhaseBegin, PhaseLog
from clusterjob.node.system import files, processes
from clusterjob.node.workers import forkserver_messages

_MAX_PHASES = 64  # phases to record of a rank in one round: a program may form groups in a loop
_FROM_WORKER = (Phase.RENDEZVOUS, Phase.INIT, Phase.RUNNING)  # the phases that a worker reports
_OVER = (Phase.STOP, Phase.ENDED)


class PhaseRecorder:
    """Record the phases of one node.

    Args:
        job_dir: the job's directory, as this node sees it.
        node_rank: this node.
        attempt: the job's attempt.
        report: the state of this node.
    """

    def __init__(self, job_dir: Path, node_rank: int, attempt: int, report: StateReport) -> None:
        self._log = PhaseLog(job_dir, node_rank)
        self._attempt = attempt
        self._report = report
        self._restart = 0
        self._first_rank = 0
        self._started = 0.0  # the begin of the round
        self._ranks: dict[int, Phase] = {}  # the current phase by local rank
        self._counts: dict[int, int] = {}  # the recorded phases by local rank
        self._joined: set[int] = set()
        self._formed: set[int] = set()
        self._importing: set[int] = set()  # local ranks that import torch at this moment
        self._unwritten: list[PhaseBegin] = []

    # -- the node ----------------------------------------------------------------------------------

    def begin(self, script: int | None) -> None:
        """Record the setup lines and the import of torch.

        Args:
            script: pid of the process that the node's script has become; None if this agent
                replaces one that was killed, and no setup lines have run.
        """
        if script is not None:
            self._add_node(Phase.SETUP, time.monotonic() - _age(script))
        self._add_node(Phase.IMPORT, time.monotonic())

    def imported(self) -> None:
        """Record that the forkserver is ready before the other nodes."""
        self._add_node(Phase.RENDEZVOUS, time.monotonic())

    def start(self, world: World, *, is_python: bool) -> None:
        """Record that the workers of a round are started.

        Args:
            world: the round.
            is_python: whether they run a Python program.
        """
        self._restart, self._first_rank = world.restart, world.first_rank
        self._counts = {}
        self._joined, self._formed, self._importing = set(), set(), set()
        self._add_node(Phase.RUNNING, time.monotonic())
        self._ranks = dict.fromkeys(range(world.nproc), Phase.SETUP)
        for local_rank in self._ranks:
            self._add_rank(local_rank, Phase.IMPORT if is_python else Phase.RUNNING)
        self._started = time.monotonic()

    def stop(self) -> None:
        """Record that the workers that still run are being stopped."""
        if running := [rank for rank, phase in self._ranks.items() if phase not in _OVER]:
            self._add_node(Phase.STOP, time.monotonic())
            for local_rank in running:
                self._add_rank(local_rank, Phase.STOP)

    # -- ranks -------------------------------------------------------------------------------------

    def on_worker_phase(self, message: forkserver_messages.WorkerPhase) -> None:
        """Record a phase that a worker reports; ignore phases that it cannot have."""
        local_rank = message.local_rank
        if message.phase == Phase.IMPORT and local_rank in self._ranks:
            self._importing.add(local_rank)
            return
        self._importing.discard(local_rank)
        try:
            phase = Phase(message.phase)
        except ValueError:
            return  # user code can write anything into the pipe
        current = self._ranks.get(local_rank)
        if phase not in _FROM_WORKER or current is None or current in _OVER:
            return
        self._joined.add(local_rank)
        if phase is Phase.RUNNING:
            self._formed.add(local_rank)
        at = min(max(message.monotonic, self._started), time.monotonic())
        self._add_rank(local_rank, phase, at=at)

    def on_output(self, files: Iterable[str]) -> None:
        """Record that the ranks run which write output before they join a process group.

        Args:
            files: the names of the log files that have grown.
        """
        if Phase.IMPORT not in self._ranks.values():
            return
        ranks = {
            match["rank"] and int(match["rank"]) - self._first_rank  # torchrun's file has no rank
            for match in map(log_files.FILE_NAME.fullmatch, files)
            if match is not None
            and match["stream"] == "out"
            and int(match["restart"] or 0) == self._restart
        }
        for local_rank, phase in self._ranks.items():
            if phase is Phase.IMPORT and (local_rank in ranks or None in ranks):
                self._add_rank(local_rank, Phase.RUNNING, detail="first output")

    def ended(self, local_rank: int, how: str) -> None:
        """Record the end of a rank."""
        self._importing.discard(local_rank)
        self._add_rank(local_rank, Phase.ENDED, detail=how)

    def all_ended(self) -> None:
        """Record the end of all workers, including those that torchrun has started."""
        for local_rank in self._ranks:
            self._add_rank(local_rank, Phase.ENDED)
        self._add_node(Phase.ENDED, time.monotonic())

    def flush(self) -> None:
        """Write the new phases; put the counts of ranks into the state if they have changed."""
        files.later(self._log.add, *self._unwritten)
        self._unwritten.clear()
        joined, formed, importing = len(self._joined), len(self._formed), bool(self._importing)
        known = self._report.state
        if (joined, formed, importing) != (known.joined, known.formed, known.importing):
            self._report.set(joined=joined, formed=formed, importing=importing)

    # -- the file ----------------------------------------------------------------------------------

    def _add_node(self, phase: Phase, at: float) -> None:
        self._add(phase, None, at=at)

    def _add_rank(
        self, local_rank: int, phase: Phase, detail: str = "", at: float | None = None
    ) -> None:
        if local_rank not in self._ranks or self._ranks[local_rank] is phase:
            return
        self._ranks[local_rank] = phase
        self._counts[local_rank] = count = self._counts.get(local_rank, 0) + 1
        if count <= _MAX_PHASES or phase in _OVER:
            rank = self._first_rank + local_rank
            self._add(phase, rank, at=time.monotonic() if at is None else at, detail=detail)

    def _add(self, phase: Phase, rank: int | None, at: float, detail: str = "") -> None:
        self._unwritten.append(
            PhaseBegin(
                phase,
                rank,
                restart=self._restart,
                attempt=self._attempt,
                time=round(time.time() - (time.monotonic() - at), 3),
                monotonic=round(at, 6),
                detail=detail,
            )
        )


def _age(pid: int) -> float:
    """Return for how many seconds a process has run."""
    ticks = processes.start_ticks(pid) or 0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, age)
