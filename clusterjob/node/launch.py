"""One node's part of a job as a story: read the environment, fork the starter, meet the others, run, give the verdict."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from clusterjob.errors import ClusterJobError, PlaceError
from clusterjob.node import contract, ends, environments, logs, processes, warm, workers
from clusterjob.node.gang import ports
from clusterjob.node.identity import JobIdentity
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import run_as_main
from clusterjob.node.starter import Starter
from clusterjob.node.topology import Topology
from clusterjob.node.verdict import JobState


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job; returns the job's exit code.

    Returns in the agent's process only: in a forked worker, the program takes over and ends by SystemExit.
    """
    try:
        return launch(parse(sys.argv[1:] if argv is None else argv), os.environ)
    except ClusterJobError as error:
        print(f"clusterjob: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return error.exit_code


def launch(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Run this node's part of a job.

    Args:
        options: what the node was told.
        environ: where its place in the job is read from; a place that is not there means one node.

    Raises:
        PlaceError: the environment is half-set, contradictory, or already one process's.
        ClusterJobError: the job's directory cannot be written.
    """
    topology = place(environ)
    nproc = options.nproc_per_node or topology.nproc_per_node or 1
    os.environ.update(contract.thread_defaults(environ, nproc, options.cpus_per_task))
    job_id = environ.get(contract.JOB_ID) or _identity(topology)
    job_dir, temporary = _job_directory(environ, topology)

    agent_end, starter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    starter_pid = os.fork()
    if starter_pid == 0:
        agent_end.close()
        _serve_as_starter(Starter(starter_end, options, job_dir, job_id, nproc, topology.node_rank))
    starter_end.close()

    from clusterjob.node.agent import Agent, StarterProcess, say  # asyncio, which the starter has no use for

    attempt = int(environ.get(contract.ATTEMPT) or 0)
    identity = f"{topology.master_addr}:{topology.master_port}:{topology.nnodes}:{attempt}"
    job = JobIdentity(
        job_id, attempt, contract.read_token(environ, job_id, identity), ports.candidates(job_id, attempt, topology.master_port),
        warm.has_torch(),
    )  # fmt: skip
    processes.adopt_orphans()
    agent_end.setblocking(False)
    verdict = asyncio.run(Agent(topology, nproc, options, job, job_dir, StarterProcess(starter_pid, agent_end)).run())
    if topology.node_rank == 0 or verdict.state is JobState.LOST:
        say(verdict.text())
    if temporary and verdict.state is JobState.SUCCEEDED:
        shutil.rmtree(job_dir, ignore_errors=True)
    elif temporary:
        say(f"logs: {job_dir}")
    return verdict.exit_code


def place(environ: Mapping[str, str]) -> Topology:
    """Return this node's place in the job; a world of one node where the environment names no job at all.

    Raises:
        PlaceError: the environment is half-set or contradictory, or it is one process's: launching there would start a
            whole set of workers in the place of each.
    """
    finding = environments.detect(environ).check()
    if isinstance(finding.place, Topology):
        return finding.place
    if finding.place is not None:
        raise PlaceError(
            f"this is one process of a job already ({finding.source}: {', '.join(sorted(set(finding.evidence.values())))})",
            "launch starts the workers of a whole node; start it once per node, outside of them",
        )
    return Topology(1, 0, None, "127.0.0.1", None, "none")


def _serve_as_starter(starter: Starter) -> None:
    """Serve as the starter; in a worker that it forks, become the program."""
    if not getattr(sys.flags, "safe_path", False) and sys.path:
        del sys.path[0]  # the launcher's own place, which `python train.py` would not have
    gc.disable()
    program = starter.serve()
    if program is None:
        os._exit(0)
    report_fd, local_rank = int(os.environ[contract.REPORT_FD].partition(":")[0]), int(os.environ["LOCAL_RANK"])
    run_as_main(program, lambda message, code: workers.report(report_fd, local_rank, message, code))


def _identity(topology: Topology) -> str:
    """Return a job id where nobody gave one: the same on every node of several, a random one on a single node."""
    if topology.nnodes == 1:
        return f"launch-{secrets.token_hex(4)}"
    return f"launch-{topology.master_addr}-{topology.master_port or 0}-{topology.nnodes}"


def _job_directory(environ: Mapping[str, str], topology: Topology) -> tuple[Path, bool]:
    named = environ.get(contract.JOB_DIR)
    job_dir = Path(named) if named else Path(tempfile.mkdtemp(prefix="clusterjob-"))
    try:
        for directory in (logs.node_directory(job_dir, topology.node_rank), ends.directory(job_dir)):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterJobError(f"the job's directory {job_dir} cannot be written: {error.strerror}") from error
    return job_dir, not named
