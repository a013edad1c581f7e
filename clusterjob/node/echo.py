"""The workers' output on the agent's own stdout and stderr, for nodes that nobody follows from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterjob.node.logs import LogReader, fold


class Echo:
    """Shows what this node's workers wrote since the last look, each line with its rank.

    Args:
        job_dir: the job's directory.
        node_rank: whose workers.
    """

    def __init__(self, job_dir: Path, node_rank: int) -> None:
        self._reader = LogReader(job_dir, node=node_rank)

    def show(self) -> None:
        """Print what is new; a reader that went away is no reason to stop the job."""
        try:
            for line in fold(self._reader.read()):
                stream = sys.stdout if line.stream == "out" else sys.stderr
                print(f"[{line.label}] {line.text}", file=stream, flush=True)
        except OSError:
            pass
