"""How the end of a worker, or of a node, becomes a failure: its last words, and whether it only
follows from another one's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.logs import log_files
from clusterjob.node.system import processes
from clusterjob.node.verdict import Failure, is_peer_loss, last_exception, without_library_warnings
from clusterjob.node.workers import torchrun

# torch's words for init_process_group("nccl") in a build without it, and in one with it on a
# machine without a GPU.
_NO_NCCL = re.compile(
    r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs, no GPUs found"
)
_NO_NCCL_HINT = '; this worker sees no GPU: init_process_group("gloo") suits a rehearsal, and backend=None suits both'
_MOST_LINES, _SHOWN_LINES, _MOST_BYTES = (
    100,
    20,
    32768,
)  # of stderr; libraries may warn of much at the end

# What torch says of a DataLoader's worker that somebody killed.
_CHILD_KILLED = re.compile(
    r"DataLoader worker .* is killed by signal: Killed|DataLoader worker .* exited unexpectedly"
)


def _last_lines(path: Path) -> tuple[str, ...]:
    return without_library_warnings(log_files.last_lines(path, _MOST_LINES, limit=_MOST_BYTES))[
        -_SHOWN_LINES:
    ]


def how(code: int, signal_name: str | None) -> str:
    """Return how a process ended, in words."""
    return f"killed by {signal_name}" if signal_name else f"exited with code {code}"


@dataclass(frozen=True)
class Failures:
    """Makes the failures of one node.

    Attributes:
        node_rank, host: which node it is.
        directory: of its logs.
        attempt: which start of the job this is.
        under_torchrun: its workers are torchrun's, whose last words tell of them.
        oom_kills: the kernel's count of processes killed for want of memory when the agent began.
    """

    node_rank: int
    host: str
    directory: Path
    attempt: int
    under_torchrun: bool
    oom_kills: processes.OomKills = field(default_factory=processes.OomKills.now)

    def of_node(self, why: str) -> Failure:
        """Return the failure of the node itself."""
        return Failure(
            None,
            None,
            node_rank=self.node_rank,
            host=self.host,
            exit_code=1,
            signal=None,
            message=why,
        )

    def of_worker(
        self, world: World, local_rank: int, code: int, signal_name: str | None, message: str
    ) -> Failure:
        """Return the failure of a worker.

        Args:
            world: the round that it belongs to.
            local_rank: its index on the node.
            code: its exit code, 128 + n for signal n.
            signal_name: that signal, or None.
            message: what is known of it by now.
        """
        if self.under_torchrun:
            return self._of_torchrun(world, code, signal_name=signal_name, message=message)
        rank = world.first_rank + local_rank
        last = _last_lines(
            log_files.rank_files(self.directory, rank, restart=world.restart, attempt=self.attempt)[
                1
            ]
        )
        # A worker that another's end brings down raises or aborts; a SIGKILL or a SIGSEGV is always
        # its own.
        effect = signal_name in (None, "SIGABRT") and is_peer_loss("\n".join((message, *last)))
        exception = last_exception(last)
        if exception is not None and (
            message.startswith(("exited", "sys.exit(")) or signal_name == "SIGABRT"
        ):
            message = f"{exception} ({message})"
        if not world.gpus and _NO_NCCL.search(message):
            message += _NO_NCCL_HINT
        message += self._of_memory(signal_name, "\n".join((message, *last)))
        return Failure(
            rank,
            local_rank,
            node_rank=self.node_rank,
            host=self.host,
            exit_code=code,
            signal=signal_name,
            message=message,
            last_lines=last,
            effect=effect,
        )

    def _of_memory(self, signal_name: str | None, words: str) -> str:
        """Return what to add for a worker, or a process of a worker's, that was killed by SIGKILL:
        whether memory was the reason.
        """
        news = (
            self.oom_kills.news() if signal_name == "SIGKILL" or _CHILD_KILLED.search(words) else ""
        )
        return f" ({news})" if news else ""

    def _of_torchrun(
        self, world: World, code: int, signal_name: str | None, message: str
    ) -> Failure:
        stderr = log_files.torchrun_files(self.directory, world.restart, attempt=self.attempt)[1]
        cause = torchrun.root_cause(stderr)
        if cause is None:
            return Failure(
                None,
                None,
                node_rank=self.node_rank,
                host=self.host,
                exit_code=code,
                signal=signal_name,
                message=f"torchrun {message}",
                last_lines=log_files.last_lines(stderr),
            )
        effect = cause.signal in (None, "SIGABRT") and is_peer_loss("\n".join(cause.last_lines))
        words = how(cause.exit_code, cause.signal)
        words += self._of_memory(cause.signal, "\n".join(cause.last_lines))
        return Failure(
            cause.rank,
            cause.local_rank,
            node_rank=self.node_rank,
            host=self.host,
            exit_code=cause.exit_code,
            signal=cause.signal,
            message=words,
            last_lines=cause.last_lines,
            effect=effect,
        )
