"""One node's part of a job as a story: read the environment, fork the starter, meet the others, run, give the verdict."""

from __future__ import annotations

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
from clusterjob.node import addresses, contract, ends, environments, logs, processes
from clusterjob.node.environments import slurm_env
from clusterjob.node.gang import ports
from clusterjob.node.identity import JobIdentity
from clusterjob.node.logs import LogReader
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import run_as_main
from clusterjob.node.report import report
from clusterjob.node.topology import Topology
from clusterjob.node.verdict import JobState
from clusterjob.node.workers import warm
from clusterjob.node.workers.starter import Starter


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
    topology = addresses.settle(place(environ), environ)
    nproc = options.nproc_per_node or topology.nproc_per_node or 1
    os.environ.update(contract.thread_defaults(environ, nproc, options.cpus_per_task))
    job = _identity(environ, topology)
    job_dir, temporary = _job_directory(environ, topology)

    agent_end, starter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    starter_pid = os.fork()
    if starter_pid == 0:
        agent_end.close()
        _serve_as_starter(Starter(starter_end, options, job_dir, job.job_id, topology.node_rank))
    starter_end.close()
    agent_end.setblocking(False)
    processes.adopt_orphans()

    # From here on there may be threads; and while this process loads asyncio, the starter imports torch.
    import asyncio

    from clusterjob.node.agent import Agent, StarterProcess
    from clusterjob.node.voice import Voice

    voice = Voice(LogReader(job_dir, node=topology.node_rank) if options.echo else None)
    try:
        agent = Agent(topology, nproc, options, job, job_dir, StarterProcess(starter_pid, agent_end), voice)
        verdict = asyncio.run(agent.run())
        if topology.node_rank == 0:
            voice.say(verdict.text())
        elif verdict.state is not JobState.SUCCEEDED:
            voice.say(f"{verdict.state}: {verdict.reason}")
        if temporary and verdict.state is JobState.SUCCEEDED:
            shutil.rmtree(job_dir, ignore_errors=True)
        elif temporary:
            voice.say(f"logs: {job_dir}")
    finally:
        voice.close()
    return verdict.exit_code


def place(environ: Mapping[str, str]) -> Topology:
    """Return this node's place in the job; a world of one node where the environment names no job at all.

    Raises:
        PlaceError: the environment is half-set or contradictory, or it is one process's: launching there would start a
            whole set of workers in the place of each. Or it is Slurm's and of several nodes, and this is no task of srun's.
    """
    finding = environments.detect(environ).check()
    if isinstance(finding.place, Topology):
        return finding.place
    if finding.place is not None:
        raise PlaceError(
            f"this is one process of a job already ({finding.source}: {', '.join(sorted(set(finding.evidence.values())))})",
            "launch starts the workers of a whole node; start it once per node, outside of them",
        )
    nodes = slurm_env.nodes_outside_a_step(environ)
    if nodes > 1:
        raise PlaceError(
            f"this is outside of srun, in an allocation of {nodes} nodes: the others would stay idle",
            "`srun --ntasks-per-node=1 clusterjob launch ...` starts it on each; CLUSTERJOB_NNODES=1 CLUSTERJOB_NODE_RANK=0 means this one",
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
    report_fd, local_rank, own_pid = int(os.environ[contract.REPORT_FD].partition(":")[0]), int(os.environ["LOCAL_RANK"]), os.getpid()

    def on_failure(message: str, exit_code: int) -> None:
        if os.getpid() == own_pid:  # a child that the program forked runs the same code to its end
            report(report_fd, local_rank, message, exit_code)

    run_as_main(program, on_failure)


def _identity(environ: Mapping[str, str], topology: Topology) -> JobIdentity:
    """Return which job this is; where nobody gave an id, one that all nodes come to by themselves, a random one on a single node."""
    attempt = contract.read_attempt(environ)
    place_text = f"{topology.master_addr}-{topology.master_port or 0}-{topology.nnodes}"
    own_name = f"launch-{secrets.token_hex(4)}" if topology.nnodes == 1 else f"launch-{place_text}"
    job_id = environ.get(contract.JOB_ID) or own_name
    token = contract.read_token(environ, f"{job_id}:{attempt}:{place_text}")
    return JobIdentity(job_id, attempt, token, ports.candidates(job_id, attempt, topology.master_port), warm.has_torch())


def _job_directory(environ: Mapping[str, str], topology: Topology) -> tuple[Path, bool]:
    named = environ.get(contract.JOB_DIR)
    job_dir = Path(named) if named else Path(tempfile.mkdtemp(prefix="clusterjob-"))
    try:
        for directory in (logs.node_directory(job_dir, topology.node_rank), ends.directory(job_dir)):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ClusterJobError(f"the job's directory {job_dir} cannot be written: {error.strerror}") from error
    return job_dir, not named
