"""Start workers, forked or by exec, and the server of torch's store on node 0."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.program import Program
from clusterjob.node.stacks import offer
from clusterjob.node.system import files, processes
from clusterjob.node.verdict import FailureKind
from clusterjob.node.workers import preload, torch_patches

_NOT_STARTED = 127  # a shell's exit code for a command that it cannot start


@dataclass(frozen=True)
class WorkerStart:
    """The settings in which one worker differs from the other workers of its node.

    Attributes:
        local_rank: its index on the node; 0 for torchrun, because a node has only one.
        variables: environment variables, added to the inherited ones.
        argv: the command line to exec; None if the forked process runs the program itself.
        out, err: the files for its stdout and stderr.
    """

    local_rank: int
    variables: dict[str, str]
    argv: list[str] | None
    out: Path
    err: Path


def start(
    worker: WorkerStart,
    report_pipe: tuple[int, int],
    streams: tuple[int, int],
    close: list[int],
    stdin: int | None,
    *,
    is_script: bool,
) -> int:
    """Fork a worker; the worker executes its command line or returns to run the program.

    A worker with a command line never returns from this function. If the exec fails, it reports the
    error and exits with code 127, as a shell does.

    Args:
        worker: the settings of this worker.
        report_pipe: (read end, write end) of the forkserver's report pipe.
        streams: the descriptors for its stdout and stderr.
        close: the forkserver's own file descriptors, which the worker closes.
        stdin: the descriptor for the first worker's stdin; the stdin of the other workers is empty.
        is_script: whether stdin is a file with the script, which every worker reads.

    Returns:
        The worker's pid in the forkserver; 0 in a worker that runs the program in this process.

    Raises:
        OSError: a process could not be created.
    """
    forkserver_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # The child inherits the forkserver's handler of SIGTERM. A blocked SIGTERM is not lost: it
    # stays pending until the child has reset the handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid
    try:
        _begin_child(forkserver_pid, [report_pipe[0], *close])
        os.setsid()  # as under torchrun: os.killpg(0, ...) of a rank reaches no other rank
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        _connect_stdin(stdin, is_script=is_script, reads=worker.local_rank == 0)
        for source, target in zip(streams, (1, 2), strict=True):
            os.dup2(source, target)
            os.close(source)
        os.environ.update(worker.variables)
        # The pid identifies the owner of the descriptor: a child of the worker inherits the
        # variable, but not the pipe. Without a local rank, torchrun starts the workers.
        local_rank = worker.variables.get("LOCAL_RANK", "")
        os.environ[contract.REPORT_FD] = f"{report_pipe[1]}:{local_rank}:{os.getpid()}"
        if worker.argv is None:
            preload.refresh_after_fork()
            offer.offer()
            return 0
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores these signals, and exec keeps ignored signals ignored.
            signal.signal(number, signal.SIG_DFL)
        os.set_inheritable(report_pipe[1], True)
        os.execvp(worker.argv[0], worker.argv)
    except BaseException as error:
        what = f"cannot start {worker.argv[0]}" if worker.argv else "cannot start"
        message = f"{what}: {getattr(error, 'strerror', None) or error}"
        with contextlib.suppress(OSError):
            os.write(2, f"clusterjob: {message}\n".encode(errors="replace"))
        torch_patches.fail(message, _NOT_STARTED, FailureKind.LAUNCH.value)
    os._exit(_NOT_STARTED)


def start_store(world: World, listener: int, log: Path, close: Sequence[int]) -> int:
    """Fork a process that serves torch's store until it is killed; return its pid.

    Args:
        world: the round whose workers use the store.
        listener: the descriptor of the listening socket; it is closed in this process.
        log: the file for the process's output.
        close: descriptors of this process that the new one must not keep.
    """
    forkserver_pid = os.getpid()
    pid = os.fork()
    if pid != 0:
        os.close(listener)
        return pid
    try:
        _begin_child(forkserver_pid, close)
        output = files.open_log(log)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        processes.raise_open_files()
        from torch.distributed import TCPStore

        # The socket was bound before any client got its port. So there is no EADDRINUSE race, and
        # early clients wait in the backlog. The store takes ownership of the descriptor.
        store = TCPStore(
            world.master_addr,
            world.master_port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        while store is not None:
            signal.pause()
    except ImportError as error:
        # torch is broken; a worker that imports it shows the full error, and ends the round.
        os.write(2, f"cannot start torch's store: {error!r}\n".encode())
        while True:
            signal.pause()
    except BaseException as error:
        os.write(2, f"the store process failed: {error!r}\n".encode())
    os._exit(1)


def _begin_child(parent: int, close: Sequence[int]) -> None:
    """Leave the forkserver's state behind in a process that it has forked."""
    processes.die_with_parent(parent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in close:
        os.close(descriptor)


def _connect_stdin(stdin: int | None, *, is_script: bool, reads: bool) -> None:
    """Connect the standard input of a worker: empty, the caller's, or a script.

    A script is opened again: each worker needs a position of its own.
    """
    path = f"/dev/fd/{stdin}" if is_script else os.devnull
    if stdin is None or is_script or not reads:
        own = os.open(path, os.O_RDONLY)
        os.dup2(own, 0)
        os.close(own)
    elif stdin:
        os.dup2(stdin, 0)
    if stdin:
        os.close(stdin)


def torchrun_command(program: Program, world: World, job_id: str) -> list[str]:
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
