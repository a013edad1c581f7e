"""How one worker comes to be: forked from the starter, tied to its life, given its files and
variables, then run or exec-ed.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node import contract
from clusterjob.node.system import processes
from clusterjob.node.workers import preload, stacks
from clusterjob.node.workers.report import report

_NOT_STARTED = 127  # as a shell says of a command that it cannot start


@dataclass(frozen=True)
class WorkerStart:
    """Everything that tells one worker from its siblings.

    Attributes:
        local_rank: its index on the node; 0 for the one torchrun of a node.
        variables: added to the environment that it inherits.
        argv: the command line to exec; None when the forked process is to run the program itself.
        out, err: the files that become its stdout and stderr; appended to.
    """

    local_rank: int
    variables: dict[str, str]
    argv: list[str] | None
    out: Path
    err: Path


def start(
    worker: WorkerStart, report_pipe: tuple[int, int], close: list[int], stdin: int | None
) -> int:
    """Fork a worker; return its pid in the starter, and 0 in a worker that is to run the program in
    this very process.

    A worker that execs never returns from here. One that cannot exec reports why and exits 127, as
    a shell does.

    Args:
        worker: what tells it from its siblings.
        report_pipe: (read end, write end) of the starter's report pipe.
        close: the starter's own file descriptors.
        stdin: what becomes the first worker's stdin; that of the others is empty.

    Raises:
        OSError: no process, or no log file, could be made.
    """
    out = _open_log(worker.out)
    err = _open_log(worker.err)
    starter = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # The starter ignores SIGTERM; blocked, one that meets the child before it has its own handler
    # waits instead of being lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    pid = os.fork()
    if pid != 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(out)
        os.close(err)
        return pid
    try:
        processes.die_with_parent(starter)
        _reset_signals()
        _wire(out, err, stdin=stdin, close=[report_pipe[0], *close], reads=worker.local_rank == 0)
        os.environ.update(worker.variables)
        # The pid says whose descriptor this is: a child of the worker inherits the variable and not
        # the pipe.
        os.environ[contract.REPORT_FD] = f"{report_pipe[1]}:{os.getpid()}"
        if worker.argv is None:
            preload.refresh_after_fork()
            stacks.offer()
            return 0
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(
                number, signal.SIG_DFL
            )  # Python ignores them, and an ignored signal stays so over exec
        os.set_inheritable(report_pipe[1], True)
        _exec(worker.argv, report_pipe[1], local_rank=worker.local_rank)
    except BaseException as error:
        report(
            report_pipe[1],
            worker.local_rank,
            message=f"cannot start: {error}",
            exit_code=_NOT_STARTED,
        )
    os._exit(_NOT_STARTED)


def _exec(argv: list[str], report_fd: int, local_rank: int) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        message = f"cannot start {argv[0]}: {error.strerror}"
        print(f"clusterjob: {message}", file=sys.stderr, flush=True)
        report(report_fd, local_rank, message=message, exit_code=_NOT_STARTED)


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup asks for
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())


def _wire(out: int, err: int, stdin: int | None, close: list[int], *, reads: bool) -> None:
    for descriptor in close:
        os.close(descriptor)
    if stdin is None or not reads:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    elif stdin:
        os.dup2(stdin, 0)
    if stdin:
        os.close(stdin)
    for source, target in ((out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
