"""Start torchrun on a node (``--launcher torchrun``) and parse the failure in its output."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.logs.log_files import last_lines
from clusterjob.node.program import Program
from clusterjob.node.system import processes

# torchrun prints this block last; a negative exit code in it means a signal.
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?"
    r"rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)"
    r".*?exitcode\s*:\s*(?P<code>-?\d+)",
    re.DOTALL,
)
_TORCHRUN_OUTPUT = re.compile(r"torch/distributed/elastic/|failed \(exitcode|^=+$|^-+$")
_RANK_MARK = re.compile(r"\[rank\d+\]:")
_LINES = 400


@dataclass(frozen=True)
class TorchrunFailure:
    """The worker that failed first on a node, as its torchrun reports it.

    Attributes:
        rank: the worker's rank; None for torchrun itself.
        local_rank: its index on the node; None for torchrun itself.
        exit_code: its exit code, 128 + n for signal n.
        signal: that signal's name, or None.
        last_lines: the worker's last lines before torchrun's own output.
    """

    rank: int | None
    local_rank: int | None
    exit_code: int
    signal: str | None
    last_lines: tuple[str, ...]


def command_line(program: Program, world: World, job_id: str) -> list[str]:
    """Return the command that starts one node's torchrun.

    torchrun does not restart workers: without a rendezvous server, the torchruns of several nodes
    cannot agree on a restart.
    """
    # Not "-": its workers would share one position in the script.
    target = "/dev/stdin" if program.on_stdin else program.target
    flags = {"script": [], "module": ["-m"], "command": ["--no-python"]}[program.kind]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(world.nnodes), "--node-rank",
        str(world.node_rank), "--nproc-per-node", str(world.nproc), "--master-addr",
        world.master_addr, "--master-port", str(world.master_port), "--rdzv-id", job_id,
        "--max-restarts", "0", *flags, target, *program.args,
    ]  # fmt: skip


def root_cause(stderr: Path) -> TorchrunFailure | None:
    """Parse the first failure from torchrun's stderr; return None if there is none."""
    lines = last_lines(stderr, _LINES, 1 << 17)
    match = _ROOT_CAUSE.search("\n".join(lines))
    if match is None:
        return None
    code = int(match["code"])
    end = next(
        (index for index, line in enumerate(lines) if _TORCHRUN_OUTPUT.search(line)), len(lines)
    )
    return TorchrunFailure(
        int(match["rank"]),
        int(match["local_rank"]),
        exit_code=128 - code if code < 0 else code,
        signal=processes.signal_name(-code) if code < 0 else None,
        last_lines=_lines_of_rank(match["rank"], lines[:end])[-20:],
    )


def _lines_of_rank(rank: str, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the lines of a rank.

    torch marks the traceback of each rank. Without marked lines of this rank, return all unmarked
    lines, which may be of any rank.
    """
    own = tuple(line for line in lines if line.startswith(f"[rank{rank}]:"))
    return own or tuple(line for line in lines if not _RANK_MARK.match(line))
