"""One node's part of a job as a story: read the environment, fork the starter, meet the others,
run, give the verdict.
"""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterjob.errors import ClusterJobError, PlaceError, UsageError
from clusterjob.node import contract, environments
from clusterjob.node.environments import Finding, slurm_addresses, slurm_env
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.logs.log_protocol import refusal
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import run_as_main
from clusterjob.node.rendezvous import ports
from clusterjob.node.rendezvous.identity import JobIdentity
from clusterjob.node.system import devices, network, private_dirs, processes, signals
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.workers import preload
from clusterjob.node.workers.forkserver import Starter
from clusterjob.node.workers.report import report


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job; returns the job's exit code.

    Returns in the agent's process only: in a forked worker, the program takes over and ends by
    SystemExit.
    """
    try:
        return launch(parse(sys.argv[1:] if argv is None else argv), os.environ)
    except ClusterJobError as error:
        if os.environ.get(contract.STREAM) == "1":
            print(
                refusal(error.exit_code, network.own_name(), why=error.message), end="", flush=True
            )
        print(f"clusterjob: {sanitize(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"  {sanitize(error.hint)}", file=sys.stderr)
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
    topology = slurm_addresses.settle(node_of(finding), environ)
    chosen = (
        devices.choose_gpus(options.gpus.split(","), environ) if options.gpus is not None else []
    )
    if chosen:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    nproc = (
        options.nproc_per_node
        or len(chosen)
        or topology.nproc_per_node
        or devices.visible_gpus(environ)
        or 1
    )
    os.environ.update(
        contract.thread_defaults(environ, nproc, cpus_per_task=options.cpus_per_task)
        | contract.read_secrets(environ)
    )
    os.environ.pop(contract.SECRETS_FILE, None)  # of this job, not of one that a worker may start
    job = _identity(environ, topology, finding=finding, insecure=options.insecure_no_token)
    job_dir, temporary = _job_directory(environ, topology, attempt=job.attempt)
    numbered = (
        os.environ.pop(contract.STREAM, "") == "1"
    )  # of this agent, not of one that a worker may start

    stdin = _stdin_of_rank_0(topology, lifeline=options.lifeline)

    agent_end, starter_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sys.stdout.flush()
    sys.stderr.flush()
    early = signals.note_early(preemptible=options.warning is not None)
    starter_pid = os.fork()
    if starter_pid == 0:
        _serve_as_starter(
            agent_end,
            Starter(
                starter_end,
                options,
                job_dir=job_dir,
                job_id=job.job_id,
                attempt=job.attempt,
                node_rank=topology.node_rank,
                stdin=stdin,
            ),
        )
    _give_away(starter_end, stdin)
    agent_end.setblocking(False)
    processes.raise_open_files()  # the starter, and so each worker, keeps the limit as it was
    processes.adopt_orphans()

    # From here on there may be threads; and while this process loads asyncio, the starter imports
    # torch.
    import asyncio

    from clusterjob.node.agent import Agent
    from clusterjob.node.logs.console import Voice
    from clusterjob.node.workers.forkserver_client import StarterProcess

    reader = LogReader(job_dir, node=topology.node_rank, attempt=job.attempt)
    voice = Voice(reader if options.echo or numbered else None, numbered=numbered)
    _log_insecurity(voice.say, options, topology=topology, environ=environ)

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
        # While signals are still heeded: a platform may end this node because another one has
        # ended.
        voice.close()
        return verdict

    try:
        agent = Agent(
            topology,
            nproc,
            options=options,
            job=job,
            job_dir=job_dir,
            starter_process=StarterProcess(starter_pid, agent_end, early=early),
            voice=voice,
        )
        verdict = asyncio.run(live())
    finally:
        voice.close()
    if temporary and verdict.state is JobState.SUCCEEDED:
        shutil.rmtree(job_dir, ignore_errors=True)
    return verdict.exit_code


def _stdin_of_rank_0(topology: Topology, *, lifeline: bool) -> int | None:
    """Return the descriptor that is to be rank 0's stdin, on its node: one that was handed over,
    else this command's own.
    """
    handed = os.environ.pop(contract.STDIN_FD, "")
    if topology.node_rank or (lifeline and not handed.isdecimal()):
        return None
    descriptor = int(handed) if handed.isdecimal() else 0
    try:
        os.set_inheritable(descriptor, False) if descriptor else os.fstat(descriptor)
    except OSError:
        return None
    return descriptor


def _give_away(starter_end: socket.socket, stdin: int | None) -> None:
    """Close, in the agent, what is its starter's."""
    starter_end.close()
    if stdin:  # 0 may be the terminal of whoever runs this
        os.close(stdin)


def find_node(environ: Mapping[str, str]) -> Finding:
    """Return this node's place in the job, with the evidence; a world of one node where the
    environment names no job at all.

    Raises:
        PlaceError: the environment is half-set or contradictory, or it is one process's: launching
            there would start a whole set of workers in the place of each. Or it is Slurm's and of
            several nodes, and this is no task of srun's.
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
    return replace(
        finding,
        place=Topology(
            1,
            0,
            nproc_per_node=None,
            master_addr="127.0.0.1",
            master_port=None,
            source=finding.source,
        ),
    )


def node_of(finding: Finding) -> Topology:
    """Return the place of a finding of `find_node`."""
    assert isinstance(finding.place, Topology)
    return finding.place


def _serve_as_starter(agent_end: socket.socket, starter: Starter) -> None:
    """Serve as the starter; in a worker that it forks, become the program."""
    agent_end.close()
    if not getattr(sys.flags, "safe_path", False) and sys.path:
        del sys.path[0]  # the launcher's own place, which `python train.py` would not have
    gc.disable()
    program = starter.serve()
    if program is None:
        os._exit(0)
    report_fd, local_rank, own_pid = (
        int(os.environ[contract.REPORT_FD].partition(":")[0]),
        int(os.environ["LOCAL_RANK"]),
        os.getpid(),
    )

    def on_failure(message: str, exit_code: int) -> None:
        if os.getpid() == own_pid:  # a child that the program forked runs the same code to its end
            report(report_fd, local_rank, message=message, exit_code=exit_code)

    run_as_main(program, on_failure)


def _log_insecurity(
    say: Callable[[str], None],
    options: LaunchOptions,
    topology: Topology,
    environ: Mapping[str, str],
) -> None:
    if options.insecure_no_token and topology.nnodes > 1 and contract.read_token(environ) is None:
        say(
            f"--insecure-no-token: anybody who reaches {topology.master_addr} can join this job, or end it"
        )


def _identity(
    environ: Mapping[str, str], topology: Topology, finding: Finding, *, insecure: bool
) -> JobIdentity:
    """Return which job this is; where nobody gave an id, one that all nodes come to by themselves,
    a random one on a single node.

    Raises:
        UsageError: there are several nodes and no secret, and that was not asked for (insecure).
    """
    attempt = contract.read_attempt(environ)
    place_text = f"{topology.master_addr}-{topology.master_port or 0}-{topology.nnodes}"
    own_name = f"launch-{secrets.token_hex(4)}" if topology.nnodes == 1 else f"launch-{place_text}"
    if topology.source == slurm_env.SOURCE:
        own_name = f"slurm-{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    job_id = environ.get(contract.JOB_ID) or own_name
    token = contract.read_token(environ)
    if token is None and topology.nnodes > 1 and not insecure:
        raise UsageError(
            f"{topology.nnodes} nodes and no {contract.TOKEN}: anybody who reaches node 0 could join the job, or end it",
            f"set {contract.TOKEN} to one secret on every node; --insecure-no-token does without",
        )
    if token is None:  # a single node needs to tell nobody
        token = (
            f"clusterjob:{job_id}:{attempt}:{place_text}".encode()
            if topology.nnodes > 1
            else secrets.token_bytes(16)
        )
    counted_by = "" if topology.source == "clusterjob" else finding.evidence.get("node_rank", "")
    return JobIdentity(
        job_id,
        attempt,
        token=token,
        ports=ports.candidates(job_id, attempt, named_port=topology.master_port),
        has_torch=preload.has_torch(),
        counted_by=counted_by,
    )


def _job_directory(
    environ: Mapping[str, str], topology: Topology, attempt: int
) -> tuple[Path, bool]:
    named = environ.get(contract.JOB_DIR)
    job_dir = Path(named) if named else Path(tempfile.mkdtemp(prefix="clusterjob-"))
    try:
        for directory in (
            log_files.node_directory(job_dir, topology.node_rank),
            ends.directory(job_dir),
        ):
            private_dirs.make(directory)
        if topology.node_rank == 0:
            ends.put_aside_result(job_dir, attempt)
        ends.reserve(job_dir, topology.node_rank)
    except OSError as error:
        raise ClusterJobError(
            f"the job's directory {job_dir} cannot be written: {error.strerror}"
        ) from error
    return job_dir, not named
