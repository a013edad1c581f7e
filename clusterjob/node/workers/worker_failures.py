"""Make the failures of a node and its workers, and describe workers that others wait for.

A failure contains the last lines of stderr, and whether it is only an effect of another failure.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.logs import failure_texts, log_files
from clusterjob.node.logs.failure_texts import Meaning
from clusterjob.node.stacks import grouping
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.states import Probe
from clusterjob.node.system import processes
from clusterjob.node.verdict import STACK_TITLE, Failure, FailureKind

_NO_NCCL_HINT = (
    '; this worker sees no GPU: use init_process_group("gloo"), or backend=None, which works with'
    " and without GPUs"
)
# Limits for stderr. Many lines are read, because libraries may print warnings at the end.
_MAX_LINES, _SHOWN_LINES, _MAX_BYTES = 400, 20, 1 << 17
# Limits of a line of a worker's stack, and of the text about it, that are sent.
_MAX_LINE, _MAX_TEXT = 300, 1000
_MAX_EXITS = 8  # maximum ranks with exit code 0 that one message names


def how(code: int, signal_name: str | None) -> str:
    """Return the end of a process as text."""
    return f"killed by {signal_name}" if signal_name else f"exited with code {code}"


@dataclass(frozen=True)
class Failures:
    """Make the failures of one node.

    Attributes:
        node_rank, host: the node.
        directory: the directory of its logs.
        attempt: the number of the job's attempt, from 0.
        oom_kills: the kernel's count of out-of-memory kills when the agent started.
    """

    node_rank: int
    host: str
    directory: Path
    attempt: int
    oom_kills: int = field(default_factory=processes.oom_kills)

    def of_node(self, why: str) -> Failure:
        """Return the failure of the node itself."""
        return Failure.of_node(self.node_rank, self.host, message=why, kind=FailureKind.LAUNCH)

    def stderr_of(self, world: World, local_rank: int) -> Path:
        """Return the stderr file of a worker."""
        return log_files.rank_files(
            self.directory, world.first_rank + local_rank, world.restart, self.attempt
        )[1]

    def of_worker(
        self,
        world: World,
        local_rank: int,
        code: int,
        signal_name: str | None,
        message: str,
        kind: FailureKind | None = None,
        where: str = "",
    ) -> Failure:
        """Return the failure of a worker.

        Args:
            world: the round of the worker.
            local_rank: its index on the node.
            code: its exit code, 128 + n for signal n.
            signal_name: the name of that signal, or None.
            message: the error message known so far.
            kind: the kind that the worker has reported; None if it has reported none.
            where: the file and line that it has reported; empty if it has reported none.
        """
        stderr = self.stderr_of(world, local_rank)
        lines = log_files.last_lines(stderr, _MAX_LINES, limit=_MAX_BYTES)
        own = failure_texts.without_library_warnings(lines)
        raised = signal_name in (None, "SIGABRT")  # not an exception that it has handled
        last = failure_texts.ending_at_error(own, _SHOWN_LINES) if raised else own[-_SHOWN_LINES:]
        meanings = failure_texts.meanings_of_end(message, last, kind)
        # A worker that fails because another worker ended raises an exception or aborts. SIGKILL
        # and SIGSEGV are never such an effect.
        effect = raised and (kind is FailureKind.RENDEZVOUS or failure_texts.is_effect(meanings))
        exception = failure_texts.last_exception(own) if raised else None
        if exception is not None and kind in (None, FailureKind.EXIT_CODE):
            message = f"{exception} ({message})"
        if not world.gpus and Meaning.NO_GPU_FOR_NCCL in failure_texts.meanings((message,)):
            message += _NO_NCCL_HINT
        by_kernel = signal_name == "SIGKILL" or Meaning.CHILD_KILLED in meanings  # perhaps
        if by_kernel and processes.oom_kills() > self.oom_kills:
            message += " (out of memory: the kernel killed it)"
            kind = FailureKind.OOM_HOST
        return Failure(
            world.first_rank + local_rank,
            local_rank,
            node_rank=self.node_rank,
            host=self.host,
            exit_code=code,
            signal=signal_name,
            message=message,
            last_lines=last,
            effect=effect,
            kind=failure_texts.kind_of_end(
                kind, meanings, signal_name, raised=exception is not None
            ),
            where=where or failure_texts.place(lines),
        )


@dataclass
class WorkerStatus:
    """The workers of one node in one round.

    Attributes:
        failures: makes the failures of this node's workers.
        world: the round.
        started: the monotonic time at which they were started; None before.
        ended: the end of each ended worker, by local rank.
        exits: the monotonic time of each end with exit code 0, by local rank, the first one first.
    """

    failures: Failures
    world: World
    started: float | None = None
    ended: dict[int, str] = field(default_factory=dict)
    exits: dict[int, float] = field(default_factory=dict)

    def early_exits(self) -> list[tuple[Failure, float]]:
        """Return the first 8 workers that ended with exit code 0, each with its monotonic time."""
        return [
            (self.failures.of_worker(self.world, local_rank, 0, signal_name=None, message=""), at)
            for local_rank, at in itertools.islice(self.exits.items(), _MAX_EXITS)
        ]

    def describe(
        self, probe: Probe, stacks: Iterable[RankStack]
    ) -> tuple[list[str], list[Failure]]:
        """Describe workers that other ranks wait for.

        Args:
            probe: the question, which names the workers.
            stacks: the stacks of this node's living workers.

        Returns:
            One line about each worker, and its failure if the other ranks have given up.
        """
        lines, failures = list[str](), list[Failure]()
        found = {stack.rank: stack for stack in stacks}
        host, node_rank = self.failures.host, self.failures.node_rank
        for rank in probe.ranks:
            local_rank, stack = rank - self.world.first_rank, found.get(rank)
            stderr = self.failures.stderr_of(self.world, local_rank)
            place, who, last = f"host {host}", "it", tuple[str, ...]()
            if self.started is None:
                text = "was not started: its node still imports torch"
            elif stack is None:
                text = f"{self.ended.get(local_rank, 'runs')} and never joined the rendezvous"
            else:
                place, who = f"{place}, pid {stack.pid}", f"it (pid {stack.pid})"
                text = _what_it_does(stack, time.monotonic() - self.started)
                if frames := grouping.frame_lines(stack.main_frames):
                    last = (STACK_TITLE, *(line[:_MAX_LINE] for line in frames))[:_SHOWN_LINES]
            name = f"rank {rank} (node {node_rank}, local rank {local_rank}, {place})"
            lines.append(f"{name}: {text}")
            if probe.gave_up:
                failures.append(
                    Failure(
                        rank,
                        local_rank,
                        node_rank=node_rank,
                        host=host,
                        exit_code=1,
                        signal=None,
                        message=f"the others gave up waiting for {who}: it {text}",
                        # The log is read without a stack only: the disk may hang.
                        last_lines=last or log_files.last_lines(stderr),
                        kind=FailureKind.RENDEZVOUS,
                    )
                )
        return lines, failures


def _what_it_does(stack: RankStack, age: float) -> str:
    frames = stack.main_frames
    how = "has not reached bootstrap.init()" if frames else "has not joined the rendezvous"
    if any(frame.function == "init" and frame.file.endswith("bootstrap.py") for frame in frames):
        how = "is inside bootstrap.init()"
    doing = grouping.position_text(frames, stack.state)
    return f"has run for {age:.0f} s and {how}; it {doing}"[:_MAX_TEXT]
