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
from dataclasses import replace
from pathlib import Path

from clusterjob.errors import ClusterJobError, PlaceError
from clusterjob.node import addresses, contract, devices, ends, environments, logs, network, processes, signals
from clusterjob.node.environments import Finding, slurm_env
from clusterjob.node.gang import ports
from clusterjob.node.identity import JobIdentity
from clusterjob.node.logs import LogReader
from clusterjob.node.numbered import refusal
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import run_as_main
from clusterjob.node.report import report
from clusterjob.node.topology import Topology
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.workers import warm
from clusterjob.node.workers.starter import Starter


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job; returns the job's exit code.

    Returns in the agent's process only: in a forked worker, the program takes over and ends by SystemExit.
    """
    try:
        return launch(parse(sys.argv[1:] if argv is None else argv), os.environ)
    except ClusterJobError as error:
        if os.environ.get(contract.STREAM) == "1":
            print(refusal(error.exit_code, network.own_name(), error.message), end="", flush=True)
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
        UsageError: the GPUs that the node was told of are not visible here.
        ClusterJobError: the job's directory cannot be written.
    """
    finding = find_node(environ)
    topology = addresses.settle(node_of(finding), environ)
    chosen = devices.choose_gpus(options.gpus.split(","), environ) if options.gpus is not None else []
    if chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    nproc = options.nproc_per_node or len(chosen) or topology.nproc_per_node or devices.visible_gpus(environ) or 1
    os.environ.update(contract.thread_defaults(environ, nproc, options.cpus_per_task))
    job = _identity(environ, topology, finding)
    job_dir, temporary = _job_directory(environ, topology, job.attempt)
    numbered = os.environ.pop(contract.STREAM, "") == "1"  # of this agent, not of one that a worker may start

    agent_end, starter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    early = signals.note_early(preemptible=options.warning is not None)
    starter_pid = os.fork()
    if starter_pid == 0:
        agent_end.close()
        _serve_as_starter(Starter(starter_end, options, job_dir, job.job_id, job.attempt, topology.node_rank))
    starter_end.close()
    agent_end.setblocking(False)
    processes.adopt_orphans()

    # From here on there may be threads; and while this process loads asyncio, the starter imports torch.
    import asyncio

    from clusterjob.node.agent import Agent
    from clusterjob.node.voice import Voice
    from clusterjob.node.workers.handle import StarterProcess

    reader = LogReader(job_dir, node=topology.node_rank, attempt=job.attempt)
    voice = Voice(reader if options.echo or numbered else None, numbered=numbered)

    async def live() -> Verdict:
        verdict = await agent.run()
        if topology.node_rank == 0:
            voice.say(verdict.text())
        elif verdict.state is not JobState.SUCCEEDED:
            voice.say(f"{verdict.state}: {verdict.reason}")
        if temporary and verdict.state is not JobState.SUCCEEDED and not numbered:
            voice.say(f"logs: {job_dir}")
        if topology.node_rank == 0:
            voice.tell(verdict)
        voice.close()  # while signals are still heeded: a platform may end this node because another one has ended
        return verdict

    try:
        agent = Agent(topology, nproc, options, job, job_dir, StarterProcess(starter_pid, agent_end, early), voice)
        verdict = asyncio.run(live())
    finally:
        voice.close()
    if temporary and verdict.state is JobState.SUCCEEDED:
        shutil.rmtree(job_dir, ignore_errors=True)
    return verdict.exit_code


def find_node(environ: Mapping[str, str]) -> Finding:
    """Return this node's place in the job, with the evidence; a world of one node where the environment names no job at all.

    Raises:
        PlaceError: the environment is half-set or contradictory, or it is one process's: launching there would start a
            whole set of workers in the place of each. Or it is Slurm's and of several nodes, and this is no task of srun's.
    """
    finding = environments.detect(environments.look(environ)).check()
    if isinstance(finding.place, Topology):
        return finding
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
    return replace(finding, place=Topology(1, 0, None, "127.0.0.1", None, finding.source))


def node_of(finding: Finding) -> Topology:
    """Return the place of a finding of `find_node`."""
    assert isinstance(finding.place, Topology)
    return finding.place


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


def _identity(environ: Mapping[str, str], topology: Topology, finding: Finding) -> JobIdentity:
    """Return which job this is; where nobody gave an id, one that all nodes come to by themselves, a random one on a single node."""
    attempt = contract.read_attempt(environ)
    place_text = f"{topology.master_addr}-{topology.master_port or 0}-{topology.nnodes}"
    own_name = f"launch-{secrets.token_hex(4)}" if topology.nnodes == 1 else f"launch-{place_text}"
    if topology.source == slurm_env.SOURCE:
        own_name = f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    job_id = environ.get(contract.JOB_ID) or own_name
    token = contract.read_token(environ, f"{job_id}:{attempt}:{place_text}")
    counted_by = "" if topology.source == "clusterjob" else finding.evidence.get("node_rank", "")
    return JobIdentity(job_id, attempt, token, ports.candidates(job_id, attempt, topology.master_port), warm.has_torch(), counted_by)


def _job_directory(environ: Mapping[str, str], topology: Topology, attempt: int) -> tuple[Path, bool]:
    named = environ.get(contract.JOB_DIR)
    job_dir = Path(named) if named else Path(tempfile.mkdtemp(prefix="clusterjob-"))
    try:
        for directory in (logs.node_directory(job_dir, topology.node_rank), ends.directory(job_dir)):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if topology.node_rank == 0:
            ends.put_aside_result(job_dir, attempt)
    except OSError as error:
        raise ClusterJobError(f"the job's directory {job_dir} cannot be written: {error.strerror}") from error
    return job_dir, not named
