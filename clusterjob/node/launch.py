"""Entry point of a node: detect the environment, fork the forkserver, run the agent, return."""

from __future__ import annotations

import gc
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from clusterjob.errors import ClusterJobError, UsageError
from clusterjob.node import contract
from clusterjob.node.agent.parent import AgentParent
from clusterjob.node.environments import slurm_env, this_node, worker_variables
from clusterjob.node.environments.topology import Finding, Topology, candidate_ports
from clusterjob.node.logs import ends, events, log_files
from clusterjob.node.logs.console import Console, refusal_line
from clusterjob.node.logs.job_dir import STDIN_SCRIPT
from clusterjob.node.logs.log_files import LogReader
from clusterjob.node.options import LaunchOptions, parse
from clusterjob.node.program import run_as_main
from clusterjob.node.rendezvous.identity import JobIdentity, NodeJob
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import devices, private_dirs, processes
from clusterjob.node.system.sanitize import sanitize
from clusterjob.node.verdict import JobState, Verdict
from clusterjob.node.workers import preload, torch_patches
from clusterjob.node.workers.forkserver import Forkserver

_OPEN_FILES = 32  # of an agent and its forkserver; node 0 has one connection for each node


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a job; return the job's exit code.

    Only the agent's process returns. A forked worker runs the program, which ends by SystemExit.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        os.environ.update(options.placement)
        return launch(options, os.environ)
    except ClusterJobError as error:
        if os.environ.get(contract.STREAM) == "1":
            print(
                refusal_line(error.exit_code, this_node.node_name(), why=error.message),
                end="",
                flush=True,
            )
        print(f"clusterjob: {sanitize(error.message)}", file=sys.stderr)
        if error.hint:
            print(f"  {sanitize(error.hint)}", file=sys.stderr)
        return error.exit_code


def launch(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Run this node's part of a job.

    Args:
        options: the node's options.
        environ: the environment that gives this node's placement; without a placement, the job
            has one node.

    Raises:
        PlacementError: the environment is incomplete or contradictory, or belongs to one process.
        UsageError: a GPU of --gpus is not visible here, or too few nodes are left for the workers.
        ClusterJobError: the job directory cannot be written.
    """
    options = _for_launcher(options)
    finding = this_node.find_node(environ)
    topology = _place(finding, options, environ)
    nproc = _choose_workers(options, topology, environ)
    if options.launcher != "ray":  # Ray sets the threads of each task
        os.environ.update(
            worker_variables.thread_defaults(environ, nproc, cpus_per_task=options.cpus_per_task)
        )
    os.environ.update(contract.read_secrets(environ))
    notifications = os.environ.pop(contract.NOTIFICATIONS, "")  # the workers must not get the URLs
    os.environ.pop(contract.SECRETS_FILE, None)  # another job in a worker must not inherit it
    job = _identity(environ, topology, options)
    job_dir, temporary = _job_directory(environ, topology, attempt=job.attempt)
    # Remove the variable: another job in a worker must not inherit it.
    numbered = os.environ.pop(contract.STREAM, "") == "1"

    options, stdin = _stdin_of_workers(options, topology, job_dir)
    early = processes.collect_signals(preemptible=options.warning is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = AgentParent(topology, options, job_dir=job_dir, attempt=job.attempt)
    if options.restarts and (exit_code := parent.run()) is not None:
        return exit_code
    forkserver_pid, agent_end = _fork_forkserver(
        topology,
        replace(options, require_gpus=_required_gpus(options, finding, nproc, environ)),
        job=job,
        job_dir=job_dir,
        stdin=stdin,
        parent=parent,
    )
    processes.raise_open_files()  # the forkserver and the workers keep the old limit
    processes.adopt_orphans()
    is_first = not parent.why  # not after an agent that was killed
    if is_first:
        events.add_environment(
            job_dir, topology.node_rank, this_node.describe(finding), attempt=job.attempt
        )

    # From here on there may be threads. The forkserver imports torch while this process imports
    # asyncio.
    import asyncio

    from clusterjob.node.agent.agent import Agent
    from clusterjob.node.workers.forkserver_client import ForkserverClient

    gc.enable()

    console = Console(
        LogReader(job_dir, node=topology.node_rank, attempt=job.attempt)
        if options.echo or numbered
        else None,
        numbered=numbered,
        note=parent.console if options.restarts else None,
    )
    if job.is_open and topology.node_rank == 0 and is_first:
        origin = f"the nodes that {topology.source} names" if job.peers else "any address"
        console.print(
            f"no {contract.TOKEN}: agents join from {origin}; this prevents accidents, not attacks"
        )

    node = NodeJob(topology, options, job, job_dir, print_line=console.print)

    async def live() -> Verdict:
        forkserver = ForkserverClient(forkserver_pid, agent_end, early=early)
        agent = Agent(
            node, nproc, forkserver, console=console, parent=parent, notifications=notifications
        )
        verdict = await agent.run()
        if temporary and not numbered and verdict.state is not JobState.SUCCEEDED:
            console.print(f"logs: {job_dir}")
        # Write all output while the signal handlers are set: a platform may stop this node when
        # another node has ended.
        console.close()
        return verdict

    try:
        verdict = asyncio.run(live())
    finally:
        console.close()
    if temporary and verdict.state is JobState.SUCCEEDED:
        shutil.rmtree(job_dir, ignore_errors=True)
    return verdict.exit_code


def _place(finding: Finding, options: LaunchOptions, environ: Mapping[str, str]) -> Topology:
    """Return this node's place in the job.

    Raises:
        UsageError: the options leave too few nodes for the workers, or too few files may be open.
    """
    topology = slurm_env.resolve_master_address(this_node.node_of(finding), environ)
    working = topology.nnodes - options.spares
    if working < max(1, options.min_nodes or 1):
        flag = "--spares" if options.spares else "--min-nodes"
        raise UsageError(
            f"{flag}: nodes left for the workers: {max(0, working)} of {topology.nnodes}",
            f"lower {flag}, or add nodes",
        )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # negative: no limit
    needed = _OPEN_FILES + (topology.nnodes if topology.node_rank == 0 else 0)
    if 0 <= hard < needed:
        raise UsageError(
            f"ulimit -n: the hard limit of {hard} open files is too small, needed: {needed}",
            "raise it with ulimit -Hn, LimitNOFILE= or in /etc/security/limits.conf",
        )
    return topology


def _choose_workers(options: LaunchOptions, topology: Topology, environ: Mapping[str, str]) -> int:
    """Restrict this node to the GPUs of --gpus, and return its number of workers.

    Raises:
        UsageError: a requested GPU is not visible here, or no GPU.
    """
    gpus = devices.visible_gpus(environ)
    if options.gpus is not None:
        chosen = devices.requested_gpus(options.gpus, environ)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
        gpus = len(chosen)
    wanted = options.nproc_per_node
    if wanted is None:
        return (options.gpus is None and topology.nproc_per_node) or gpus or 1
    if isinstance(wanted, int):
        return wanted
    if wanted == "gpu" and not gpus:
        raise UsageError(
            "--nproc-per-node gpu: no GPU is visible here",
            "--nproc-per-node cpu starts one worker per core",
        )
    return gpus if gpus and wanted != "cpu" else devices.usable_cores()


def _required_gpus(
    options: LaunchOptions, finding: Finding, nproc: int, environ: Mapping[str, str]
) -> int:
    """Return how many GPUs the workers must see: by default one each, as far as promised."""
    if options.require_gpus is not None:
        return options.require_gpus
    return 0 if options.nproc_per_node == "cpu" else min(nproc, this_node.gpus(finding, environ))


def _for_launcher(options: LaunchOptions) -> LaunchOptions:
    """Return the options; for Ray, those of a node whose one worker runs Ray.

    Raises:
        UsageError: the launcher cannot go on without a lost node, as the options ask for.
    """
    if options.launcher != "agent" and (options.min_nodes or options.spares):
        raise UsageError(
            f"--launcher {options.launcher} cannot replace a lost node, or go on without it",
            "use --launcher agent, or leave out --spares and MIN:MAX",
        )
    if options.launcher != "ray":
        return options
    from clusterjob.node.workers import ray_node

    return ray_node.node_options(options)


def _stdin_of_workers(
    options: LaunchOptions, topology: Topology, job_dir: Path
) -> tuple[LaunchOptions, int | None]:
    """Return the options and the descriptor of rank 0's stdin, or of a file with the script.

    Rank 0's stdin on node 0 is an inherited descriptor, else that of this process.

    Raises:
        UsageError: the script on standard input is empty or too long.
    """
    handed = os.environ.pop(contract.STDIN_FD, "")
    stdin: int | None = int(handed) if handed.isdecimal() else 0
    try:
        os.set_inheritable(stdin, False) if stdin else os.fstat(0)
    except OSError:
        stdin = None
    if topology.node_rank or (options.lifeline and not handed.isdecimal()):
        stdin = None
    if ".pyz/" in __file__:  # the submitter has read the script
        if options.program.on_stdin:
            stdin = os.open(job_dir / STDIN_SCRIPT, os.O_RDONLY)
    elif found := options.program.read_stream():
        options = replace(options, program=found[0])
        stdin = anonymous_file("script")
        Path(f"/dev/fd/{stdin}").write_bytes(found[1])
    return options, stdin


def _fork_forkserver(
    topology: Topology,
    options: LaunchOptions,
    job: JobIdentity,
    job_dir: Path,
    stdin: int | None,
    parent: AgentParent,
) -> tuple[int, socket.socket]:
    """Fork the forkserver; return its pid and the agent's end of the socket pair.

    Only the agent's process returns. A forked worker runs the program.
    """
    agent_end, forkserver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        agent_end.close()
        forkserver = Forkserver(
            forkserver_end,
            options,
            job_dir=job_dir,
            job_id=job.job_id,
            attempt=job.attempt,
            node_rank=topology.node_rank,
            stdin=stdin,
            agent_parent=parent.pid if options.restarts else None,
            lease=parent.note if options.restarts else None,
        )
        if not getattr(sys.flags, "safe_path", False) and sys.path:
            del sys.path[0]  # the launcher's directory, which `python train.py` does not have
        gc.disable()
        if (program := forkserver.serve()) is not None:  # in a forked worker
            run_as_main(program, torch_patches.fail)
        os._exit(0)
    forkserver_end.close()
    agent_end.setblocking(False)
    if stdin:  # descriptor 0 may be the user's terminal
        os.close(stdin)
    return pid, agent_end


def _identity(
    environ: Mapping[str, str], topology: Topology, options: LaunchOptions
) -> JobIdentity:
    """Return the job's identity.

    Without CLUSTERJOB_JOB_ID, all nodes compute the same id from the environment; a single node
    takes a random one.

    Raises:
        UsageError: the job has several nodes and no secret, but requires one.
    """
    attempt = this_node.read_attempt(environ)
    own_name = (
        f"launch-{secrets.token_hex(4)}"
        if topology.nnodes == 1
        else f"launch-{topology.master_addr}-{topology.master_port or 0}-{topology.nnodes}"
    )
    job_id = this_node.job_id(topology.source, environ) or own_name
    token = contract.read_token(environ)
    is_open = token is None and topology.nnodes > 1
    ray = options.launcher == "ray" and not environ.get("RAY_AUTH_MODE")
    if is_open and (options.require_token or ray):
        danger = "run code as you in Ray" if ray else "join the job or end it"
        raise UsageError(
            f"{topology.nnodes} nodes and no {contract.TOKEN}:"
            f" everyone who can connect to node 0 could {danger}",
            f"set {contract.TOKEN} to the same secret on every node",
        )
    # No other node needs the token of a single node.
    own_token = f"clusterjob:{job_id}:{attempt}".encode() if is_open else secrets.token_bytes(16)
    return JobIdentity(
        job_id,
        attempt,
        token=token or own_token,
        ports=candidate_ports(job_id, attempt)
        if topology.master_port is None
        else [topology.master_port],
        has_torch=preload.has_torch(),
        is_open=is_open,
        peers=tuple(this_node.peers(topology, environ)) if is_open else (),
    )


def _job_directory(
    environ: Mapping[str, str], topology: Topology, attempt: int
) -> tuple[Path, bool]:
    named = environ.get(contract.JOB_DIR)
    job_dir = Path(named) if named else Path(tempfile.mkdtemp(prefix="clusterjob-"))
    try:
        # The directory of a submitted job also has the node zip, which this process runs from.
        is_given = named and ".pyz/" not in __file__ and job_dir.exists()
        if is_given and (why := private_dirs.other_writers(job_dir, sticky=False)):
            raise ClusterJobError(
                f"the job directory {job_dir} is not safe for a job: {why}",
                f"set {contract.JOB_DIR} to a directory that only you can write to",
            )
        private_dirs.make(log_files.node_directory(job_dir, topology.node_rank))
        private_dirs.make(ends.directory(job_dir))
        if topology.node_rank == 0:
            ends.put_aside_result(job_dir, attempt)
        ends.reserve(job_dir, topology.node_rank)
    except OSError as error:
        raise ClusterJobError(
            f"the job directory {job_dir} cannot be written: {error.strerror}"
        ) from error
    return job_dir, not named
