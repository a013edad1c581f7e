"""`sbatch --requeue` with `srun torchrun` on the Slurm of the tests: four nodes, no spare."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurm_cluster import NODES, SlurmCluster

from clusterjob.node.system import network
from goodput_parts.faults import Kind
from goodput_parts.machines import has_rank, send

_SCRIPT = """#!/bin/bash
#SBATCH --nodes={nodes} --ntasks-per-node=1 --requeue --open-mode=append --output={output}
srun --kill-on-bad-exit=1 {python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node=1 \\
  --max-restarts=100 --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \\
  --rdzv-endpoint=127.0.0.1:{port} {program}{after}
"""
# Slurm queues a job again after the loss of a node and after a preemption, not after a failure.
_AFTER_FAILURE = ' || scontrol requeue "$SLURM_JOB_ID"'
_MARK = "GOODPUT_RUN"


class Slurm:
    """A job on a cluster of the tests.

    Args:
        cluster: a running cluster.
        directory: for the script and the output.
        environ: the variables of the job.
        program: the script and its arguments.
        requeues: whether the script queues the job again after a failure.
    """

    def __init__(
        self,
        cluster: SlurmCluster,
        directory: Path,
        environ: Mapping[str, str],
        *program: str,
        requeues: bool,
    ) -> None:
        self.name = "slurm-requeues" if requeues else "slurm"
        self._requeues = requeues
        self.kinds = list(Kind)
        self._cluster = cluster
        self._directory = directory
        self._mark = secrets.token_hex(8)
        self._environ = {
            **environ,
            **cluster.environment,
            _MARK: self._mark,
            "OMP_NUM_THREADS": "1",
        }
        self._program = program
        self._job = 0

    def start(self) -> None:
        """Submit the job."""
        with network.listen_at("127.0.0.1", 0, backlog=1) as free:
            port = free.getsockname()[1]
        script = self._directory / "job.sh"
        script.write_text(
            _SCRIPT.format(
                nodes=NODES,
                output=self._directory / "job.out",
                python=shlex.quote(sys.executable),
                port=port,
                program=shlex.join(self._program),
                after=_AFTER_FAILURE if self._requeues else "",
            )
        )
        submitted = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=self._environ,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=True,
        )
        self._job = int(submitted.stdout.split(";")[0])

    def _pids(self, wanted: Callable[[int], bool]) -> dict[int, list[int]]:
        """Return the job's processes by node."""
        found: dict[int, list[int]] = {}
        mark = f"{_MARK}={self._mark}".encode()
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError, ValueError):
                variables = Path(f"/proc/{int(name)}/environ").read_bytes().split(b"\0")
                node = [each[13:] for each in variables if each.startswith(b"SLURM_NODEID=")]
                if mark in variables and node and wanted(int(name)):
                    found.setdefault(int(node[0]), []).append(int(name))
        return found

    def targets(self) -> list[int]:
        """Return the nodes that run workers now."""
        return sorted(self._pids(has_rank))

    def kill_rank(self, node: int, number: int) -> None:
        """Send a signal to the rank of a node."""
        for pid in self._pids(has_rank).get(node, []):
            send(pid, number)

    def kill_agent(self, node: int) -> None:
        """Kill the torchrun of a node."""
        for pid in self._pids(_is_torchrun).get(node, []):
            send(pid, signal.SIGKILL)

    def cut(self, node: int) -> Callable[[], None]:
        """Set a node down; the cluster then queues the job again."""
        name = f"nodename=n{node + 1}"
        self._cluster.run("scontrol", "update", name, "state=down", "reason=fault")
        # A node that slurmctld has resumed already refuses this.
        resume = ("scontrol", "update", name, "state=resume")
        return lambda: self._cluster.run(*resume, check=False) and None

    def preempt(self) -> bool:
        """Queue the job again, as preemption with PreemptMode=REQUEUE does."""
        self._cluster.run("scontrol", "requeue", str(self._job), check=False)
        return False

    def restore(self) -> None:
        """Do nothing: slurmd starts what is queued again."""

    def ended(self) -> bool:
        """Return whether the job is neither waiting nor running."""
        listed = self._cluster.run("squeue", "--noheader", f"--jobs={self._job}", check=False)
        return not listed.stdout.strip()

    def stop(self) -> None:
        """Cancel the job, and kill what Slurm leaves behind."""
        self._cluster.cancel_all()
        for pids in self._pids(lambda _pid: True).values():
            for pid in pids:
                send(pid, signal.SIGKILL)

    def blamed(self) -> list[dict[str, Any]]:
        """Return nothing: Slurm names no cause of a requeue."""
        return []


def _is_torchrun(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"torch.distributed.run" in words and not words[0].endswith(b"srun")


@contextlib.contextmanager
def slurm_launcher(
    directory: Path, environ: Mapping[str, str], *program: str, requeues: bool
) -> Iterator[Slurm]:
    """Yield the launcher, with a cluster that stops at the end."""
    directory.mkdir()
    cluster = SlurmCluster(directory / "slurm")
    cluster.start()
    try:
        yield Slurm(cluster, directory, environ, *program, requeues=requeues)
    finally:
        cluster.stop()
