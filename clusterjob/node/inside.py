"""Run a command, a shell, a relay or a request for stacks beside a worker of a running job.

`clusterjob exec`, `shell`, `forward` and `stacks` start this program on the worker's node: as a
child process, over SSH, or in an overlapping Slurm step. It uses the stdin, stdout and stderr that
it inherits, so ssh, srun and the kernel care for the terminal, its size and its keys.

It supervises what it starts: that ends with its client and with the job. The same supervision runs
around `ssh` and `srun` on the machines before.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from clusterjob.node import contract, job_processes
from clusterjob.node.job_processes import RankProcess
from clusterjob.node.system import codec, processes

# The request: base64 of a JSON object, so that no shell on the way needs quotes. It is a variable
# because Slurm's accounting keeps the command line of a step.
REQUEST = job_processes.MARK  # so that no process with it counts as a worker
MARKER = b"clusterjob-inside-3 "  # before an answer, after the text of a login
REFUSED = 255  # exit code; as of ssh
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes as of a shell, and of `docker exec`
MAX_PIECE = 1 << 16  # bytes
_START_TIMEOUT = 10.0  # seconds for workers that are being started
_TICK = 0.2  # seconds between two checks of the client and the job
_RANK_TIMEOUT = 2.0  # seconds for the ranks of a node to give their stacks
_CONNECT_TIMEOUT = 2.0  # seconds; loopback answers at once, unless the server's backlog is full
_LEFTOVERS = 1.0  # seconds for the output of what a command left behind
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_JOB_END = 6.0  # seconds for the job to end after its step; more than its usual grace
_STEP_GRACE = 10.0  # the same for srun, which ends its step before
_SIGNALS = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
# srun reports the end of each task that failed or was ended, and that it binds no CPUs.
_OF_SRUN = re.compile(rb"srun: (error: .*: task 0: |cluster configuration lacks .* cpu binding)")
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_NO_SHELLS = ("", "nologin", "false")
# Variables of the worker that mean nothing to a command: descriptors, the size of a terminal.
_OWN = {contract.REPORT_FD, contract.WARNING_FD, contract.STDIN_FD, "COLUMNS", "LINES", "TERM"}

_CLIENT = os.getppid()


def encoded(request: Mapping[str, Any]) -> str:
    """Return the value of the variable `REQUEST`."""
    return base64.b64encode(json.dumps(request).encode()).decode()


def main() -> None:
    """Serve the request of the environment, and exit with the code of the command.

    Its keys: ``job``, ``node`` and ``rank`` name the worker; ``argv`` is a command, empty for a
    shell; ``relay`` asks for a relay, ``stacks`` for stacks. With ``run``, it is a command line on
    this machine, ``env`` more variables for it, and ``socket`` that of its connection to ``host``.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: sys.exit(128 + signal.SIGINT))
    request = json.loads(base64.b64decode(os.environ.pop(REQUEST)))
    if "relay" in request:
        _relay()
    elif "stacks" in request:
        _send_stacks(request)
    elif "run" in request:
        environ = os.environ | request.get("env", {})
        code = _supervise(request["run"], environ, grace=_STEP_GRACE)
        if code == REFUSED and not os.path.exists(request.get("socket", "/")):
            _refuse(f"{request['host']}: the connection broke")
        sys.exit(code)
    else:
        sys.exit(_run_beside(request))


def _refuse(text: str) -> NoReturn:
    print(f"clusterjob: error: {text}", file=sys.stderr, flush=True)
    sys.exit(REFUSED)


# -- supervision -----------------------------------------------------------------------------------


def _supervise(
    words: Sequence[str],
    environ: Mapping[str, str],
    *,
    job: str = "",
    keeper: str = "",
    grace: float = _GRACE,
    **options: Any,
) -> int:
    """Run a command; end it, and all processes below this one, with the client or the job.

    The client is gone when this process has another parent, or its stdin and stdout have no other
    end: sshd sends no signal to a command without a terminal. SIGINT and SIGQUIT reach the command
    from the terminal.

    Args:
        words: the command line.
        environ: its environment.
        job: the job.
        keeper: the identity of a process that ends with the job.
        grace: seconds between SIGTERM and SIGKILL.
        options: more for `subprocess.Popen`.

    Returns:
        Its exit code; 126 or 127 if it cannot be started. Of ssh and srun, 255 if they fail.
    """
    processes.adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else its exit code would be lost
    own = os.getpid()
    signals = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    awaited = [each for each in signals if each != signal.SIGTERM]  # that one stays pending

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        processes.die_with_parent(own)

    try:
        child = subprocess.Popen(
            [os.fsencode(word) for word in words],
            env={os.fsencode(name): os.fsencode(value) for name, value in environ.items()},
            preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
            stderr=subprocess.PIPE if not job and words[0] == "srun" else None,
            **options,
        )
    except OSError as error:
        why = f"{words[0][:4096]}: {error.strerror or error}"
        if not job:
            _refuse(why)
        print(f"clusterjob: {why}", file=sys.stderr)
        return NOT_FOUND if error.errno in (errno.ENOENT, errno.ENOTDIR) else NOT_EXECUTABLE
    failed = list[bytes]()
    copier = threading.Thread(target=_copy_errors, args=(child.stderr, failed), daemon=True)
    copier.start()
    code, stopped = None, False
    try:
        while code is None and not stopped:
            ended = dict(processes.ended_children())  # also what it has left behind
            if child.pid in ended:
                code, _ = processes.exit_code_of(ended[child.pid])
                break
            received = signal.sigtimedwait(awaited, _TICK)
            if keeper and processes.has_ended(keeper):
                _refuse(f"job {job} has ended")
            hung_up = received is not None and received.si_signo == signal.SIGHUP
            if hung_up or os.getppid() != _CLIENT or _is_alone():
                return 128 + signal.SIGHUP
            stopped = signal.SIGTERM in signal.sigpending()
        end = time.monotonic() + _LEFTOVERS
        while processes.descendants(own) and time.monotonic() < end and not stopped:
            time.sleep(0.02)
    finally:
        _end_all(grace)
    copier.join()
    if code is not None and signal.SIGTERM not in signal.sigpending():
        return REFUSED if code == 1 and failed else code  # as of srun, if it could not start it
    end = time.monotonic() + _JOB_END  # Slurm stops a job's steps at the same time
    while keeper and os.getppid() == _CLIENT and not _is_alone() and time.monotonic() < end:
        if processes.has_ended(keeper):
            _refuse(f"job {job} has ended")
        time.sleep(_TICK)
    return 128 + signal.SIGTERM


def _copy_errors(errors: IO[bytes] | None, failed: list[bytes]) -> None:
    """Copy srun's stderr by lines, as Slurm does, without what `_OF_SRUN` says.

    Other errors of srun are added to `failed`.
    """
    while errors is not None and (line := errors.readline(MAX_PIECE)):
        if not _OF_SRUN.match(line):
            if line.startswith(b"srun: error: "):
                failed.append(line)
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(2, line)


def _is_alone() -> bool:
    """Return whether stdin and stdout are pipes without another end, or a closed terminal."""
    poll = select.poll()
    poll.register(0, 0)
    poll.register(1, 0)
    return sum(bool(flags & (select.POLLERR | select.POLLHUP)) for _, flags in poll.poll(0)) == 2


def _end_all(grace: float) -> None:
    """End all processes below this one: SIGHUP, SIGTERM and, after the grace, SIGKILL."""
    end = time.monotonic() + grace
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
        for pid in processes.descendants(os.getpid()):
            processes.send_signal(pid, number)
    while processes.descendants(os.getpid()) and time.monotonic() < end:
        time.sleep(0.02)
    processes.kill_descendants()


# -- the worker ------------------------------------------------------------------------------------


def _find(job_id: str, node: int, rank: int | None) -> tuple[RankProcess, int]:
    """Return a worker of this node, and the process with which the node's part of the job ends.

    It waits up to 10 s for workers that are being started, and exits if there is none.

    Args:
        job_id: the job.
        node: the node's rank; several nodes of a job may be on one machine.
        rank: the worker's rank; None for the node's first worker.
    """
    end = time.monotonic() + _START_TIMEOUT
    while True:
        found = job_processes.on_node(job_id, node)
        for worker in found.ranks:
            if rank in (None, worker.rank):
                return worker, found.forkserver or worker.pid
        if not found.started or time.monotonic() > end:
            of_rank = "" if rank is None else f" of rank {rank}"
            _refuse(f"job {job_id}: no worker{of_rank} runs on node {node}")
        time.sleep(_TICK)


def _run_beside(request: Mapping[str, Any]) -> int:
    """Run a command with the environment, the directory and the container of a worker."""
    worker, keeper = _find(request["job"], request["node"], request["rank"])
    beside = keeper if processes.start_ticks(worker.pid) is None else worker.pid
    enter = _enter_container(beside)
    if enter is None:
        where = f"the container of node {request['node']}"
        print(f"clusterjob: {where} cannot be entered: this runs outside of it", file=sys.stderr)
    environ = {name: value for name, value in worker.environ.items() if name not in _OWN}
    environ[job_processes.MARK] = str(worker.pid)
    if os.isatty(0):
        environ["TERM"] = os.environ.get("TERM", "xterm")
    words, files = list(request["argv"]), tuple[int, ...]()
    if not words:
        title = f"{request['job']} rank {worker.rank}"
        words, files = _shell(environ, title, root=f"/proc/{beside}/root" if enter else "")
    # The directory may exist only in the container. Outside, its link leads into another mount
    # namespace.
    directory = "/" if enter else os.path.realpath(f"/proc/{beside}/cwd")
    if enter:
        words = [*enter, "--wd", "--", *words]
    return _supervise(
        words,
        environ,
        job=request["job"],
        keeper=processes.identity(keeper),
        cwd=directory if os.access(directory, os.X_OK) else "/",
        pass_fds=files,
    )


def _shell(environ: dict[str, str], title: str, root: str) -> tuple[list[str], tuple[int, ...]]:
    """Return the command line of the worker's SHELL, and the descriptor that it reads.

    bash gets a prompt and the environment.

    Args:
        environ: the environment; the shell's variables are set.
        title: the prompt.
        root: the root directory of the container; empty for this one.
    """
    from clusterjob.node.stacks.offer import anonymous_file

    usable = (
        path
        for path in (environ.get("SHELL", ""), *_SHELLS)
        if os.path.basename(path) not in _NO_SHELLS and os.access(f"{root}{path}", os.X_OK)
    )
    shell = next(usable, _SHELLS[-1])
    environ["SHELL"] = shell
    if os.path.basename(shell) != "bash":
        environ["PS1"] = f"({title}) $ "
        return [shell, "-i"], ()
    # The user's .bashrc may activate another environment: set the worker's again afterwards.
    text = (
        "clusterjob_environment=$(declare -px)\n"
        "[ -r ~/.bashrc ] && . ~/.bashrc\n"
        "clusterjob_prompt=$PS1\n"
        'eval "$clusterjob_environment" 2> /dev/null\n'
        f"PS1={shlex.quote(f'({title}) ')}$clusterjob_prompt\n"
        "unset clusterjob_environment clusterjob_prompt PROMPT_COMMAND\n"
    )
    rcfile = anonymous_file("bashrc")
    os.write(rcfile, text.encode())
    return [shell, "--rcfile", f"/dev/fd/{rcfile}", "-i"], (rcfile,)


def _enter_container(pid: int) -> list[str] | None:
    """Return the words that run a command in the container of a process.

    The container of an unprivileged engine has a user namespace that its owner may enter.

    Returns:
        The words; empty if the process runs in no container; None if this user cannot enter it.
    """
    if processes.namespace(pid, "mnt") in ("", processes.namespace(os.getpid(), "mnt")):
        return []
    words = ["nsenter", f"--target={pid}", "--mount"]
    if processes.namespace(pid, "user") != processes.namespace(os.getpid(), "user"):
        words += ["--user", "--preserve-credentials"]
    try:
        can = subprocess.run(
            [*words, "--", "/bin/sh", "-c", ":"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError:  # this machine has no nsenter
        return None
    return words if can.returncode == 0 else None


# -- stacks ----------------------------------------------------------------------------------------


def _send_stacks(request: Mapping[str, Any]) -> None:
    """Print the stacks of this node's ranks as a marker and one JSON object.

    Args:
        request: ``native`` says whether to add the frames of C and C++.
    """
    from clusterjob.node.stacks.collect import collect

    found = job_processes.on_node(request["job"], request["node"])
    if not found.ranks:
        _refuse(f"job {request['job']}: no worker runs on node {request['node']}")
    warnings: list[str] = []
    stacks = collect(
        found,
        request["node"],
        _RANK_TIMEOUT,
        rank=request["rank"],
        native=request["native"],
        warn=warnings.append,
    )
    answer = {"host": socket.gethostname(), "warnings": warnings}
    text = json.dumps(answer | {"ranks": [codec.plain(each) for each in stacks]})
    sys.stdout.buffer.write(MARKER + text.encode() + b"\n")
    sys.stdout.buffer.flush()


# -- relays ----------------------------------------------------------------------------------------


def _relay() -> None:
    """Carry one TCP connection to a port of this machine after the other over stdin and stdout.

    A connection begins with a piece from the client, its port, and a piece from here: a plus sign,
    or why the port cannot be reached. In each direction, an empty piece ends it.
    """
    source, out = sys.stdin.buffer, sys.stdout.buffer
    out.write(MARKER + b"\n")
    out.flush()
    while port := read_piece(source):
        try:
            sock = _connect(int(port))
        except OSError as error:
            write_piece(out, (error.strerror or "timed out").encode())
            continue
        write_piece(out, b"+")
        with sock:
            back = send_pieces(sock, out)
            try:
                receive_pieces(source, sock)
            except OSError:  # the server reads no more
                while read_piece(source):
                    pass
            back.join()


def _connect(port: int) -> socket.socket:
    # Not by the name "localhost": many machines map it to the first address alone.
    try:
        return socket.create_connection(("127.0.0.1", port), _CONNECT_TIMEOUT)
    except OSError:
        with contextlib.suppress(OSError):
            return socket.create_connection(("::1", port), _CONNECT_TIMEOUT)
        raise


def send_pieces(sock: socket.socket, out: IO[bytes]) -> threading.Thread:
    """Start a thread that sends what a socket receives, as pieces, to its end."""

    def send() -> None:
        # The socket is reset, or the other side is gone.
        with contextlib.suppress(OSError, ValueError):
            try:
                while data := sock.recv(MAX_PIECE):
                    write_piece(out, data)
            finally:
                write_piece(out, b"")

    sock.settimeout(None)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def receive_pieces(source: IO[bytes], sock: socket.socket) -> None:
    """Write pieces to a socket, to their end.

    Raises:
        OSError: the socket takes no more.
        ValueError: the source has no pieces.
    """
    while data := read_piece(source):
        sock.sendall(data)
    with contextlib.suppress(OSError):  # the other end has reset it
        sock.shutdown(socket.SHUT_WR)


def write_piece(out: IO[bytes], data: bytes) -> None:
    """Write a piece: its length, the bytes, and a newline, as Slurm keeps open lines back."""
    out.write(b"%d\n%b\n" % (len(data), data))
    out.flush()


def read_piece(source: IO[bytes]) -> bytes:
    """Return the next piece; empty at the end of the source.

    Raises:
        ValueError: this is no piece, or it is too large.
    """
    length = int(source.readline(16) or b"0")
    if not 0 <= length <= MAX_PIECE:
        raise ValueError(f"a piece of {length} bytes")
    return source.read(length + 1)[:-1]
