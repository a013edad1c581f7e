"""torch's own agent on each node (``--launcher torchrun``): how it is started, and what its last
words say of a failure.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.contract import World
from clusterjob.node.logs.log_files import last_lines
from clusterjob.node.program import Program
from clusterjob.node.system import processes

# torchrun closes with this block; in it, a negative exit code is a signal's.
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?rank\s*:\s*(?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)"
    r".*?exitcode\s*:\s*(?P<code>-?\d+)",
    re.DOTALL,
)
_OWN_WORDS = re.compile(r"torch/distributed/elastic/|failed \(exitcode|^=+$|^-+$")
_RANK_MARK = re.compile(r"\[rank\d+\]:")
_LINES = 400


@dataclass(frozen=True)
class RootCause:
    """What a torchrun says of the worker that failed first on its node.

    Attributes:
        rank: the worker's rank.
        local_rank: its index on the node.
        exit_code: its own, 128 + n for signal n.
        signal: that signal's name, or None.
        last_lines: the end of what it wrote before torchrun's closing words.
    """

    rank: int
    local_rank: int
    exit_code: int
    signal: str | None
    last_lines: tuple[str, ...]


def command_line(program: Program, world: World, job_id: str) -> list[str]:
    """Return the command that starts one node's torchrun.

    Restarts are not left to it: torchruns of several nodes cannot agree on them without a
    rendezvous server.
    """
    flags = {"script": [], "module": ["-m"], "command": ["--no-python"]}[program.kind]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(world.nnodes), "--node-rank",
        str(world.node_rank), "--nproc-per-node", str(world.nproc), "--master-addr",
        world.master_addr, "--master-port", str(world.master_port), "--rdzv-id", job_id,
        "--max-restarts", "0", *flags, program.target, *program.args,
    ]  # fmt: skip


def root_cause(stderr: Path) -> RootCause | None:
    """Return what a torchrun's stderr says of the first failure on its node; None if it says
    nothing.
    """
    lines = last_lines(stderr, _LINES, 1 << 17)
    match = _ROOT_CAUSE.search("\n".join(lines))
    if match is None:
        return None
    code = int(match["code"])
    signal_name = processes.signal_name(-code) if code < 0 else None
    end = next((index for index, line in enumerate(lines) if _OWN_WORDS.search(line)), len(lines))
    words = _words_of(match["rank"], lines[:end])
    return RootCause(
        int(match["rank"]),
        int(match["local_rank"]),
        exit_code=128 - code if code < 0 else code,
        signal=signal_name,
        last_lines=words[-20:],
    )


def _words_of(rank: str, lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return a rank's own lines; torch marks the traceback of each, and what has no mark may be
    anyone's.
    """
    own = tuple(line for line in lines if line.startswith(f"[rank{rank}]:"))
    return own or tuple(line for line in lines if not _RANK_MARK.match(line))
