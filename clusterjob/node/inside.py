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
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from clusterjob.node import contract, job_processes
from clusterjob.node.job_processes import RankProcess
from clusterjob.node.system import codec, processes

# The request: base64 of a JSON object, so that no shell on the way needs quotes. It is a variable
# because Slurm's accounting keeps the command line of a step. See `_serve` for its keys.
REQUEST = "CLUSTERJOB_INSIDE_REQUEST"
MARKER = b"clusterjob-inside-3 "  # before the answer of a relay or of stacks, after a login's text
REFUSED = 255  # exit code; as of ssh
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes as of a shell, and of `docker exec`
MAX_PIECE = 1 << 16  # bytes
_LENGTH = struct.Struct(">I")
_START_TIMEOUT = 10.0  # seconds for workers that are being started
_TICK = 0.2  # seconds between two checks of the client and the job
_STACKS = 30.0  # maximum seconds for the stacks of a node
_CONNECT_TIMEOUT = 2.0  # seconds; loopback answers at once, unless the server's backlog is full
_LEFTOVERS = 1.0  # seconds for the output of what a command left behind
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_STEP_GRACE = 10.0  # the same for srun, which ends its step before
_SIGNALS = (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
# srun reports each exit code that is not 0, and that it binds no CPUs, also with --quiet.
_OF_SRUN = re.compile(
    rb"srun: (error: .*: Exited with exit code \d+|cluster configuration lacks .* cpu binding)\r?\n"
)
# bash refuses to set these.
_READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_NO_SHELLS = ("", "nologin", "false")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Variables of the worker that mean nothing to a command: descriptors, the size of a terminal.
_OWN = {contract.REPORT_FD, contract.WARNING_FD, contract.STDIN_FD, "COLUMNS", "LINES", "TERM"}


class Stop(Exception):
    """End this program with an exit code, and perhaps a line on stderr."""

    def __init__(self, code: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = code, text


def _refusal(text: str) -> Stop:
    return Stop(REFUSED, f"error: {text}")


def encoded(request: Mapping[str, Any]) -> str:
    """Return the value of the variable `REQUEST`."""
    return base64.b64encode(json.dumps(request).encode()).decode()


def main() -> None:
    """Serve the request of the environment, and exit with the code of the command.

    Its keys: ``job``, ``node`` and ``rank`` name the worker; ``argv`` is a command, empty for a
    shell; ``relay`` asks for a relay, ``stacks`` for stacks. With ``run``, it is a command line on
    this machine, ``env`` more variables for it, and ``socket`` that of its connection to ``host``.
    """
    request = json.loads(base64.b64decode(os.environ.pop(REQUEST)))
    try:
        code = _serve(request)
    except Stop as stop:
        code = stop.code
        if stop.text:
            _say(stop.text)
    os._exit(code)  # the thread of a relay may read stdin, at which Python's own end fails


def _serve(request: Mapping[str, Any]) -> int:
    processes.adopt_orphans()
    supervisor = _Supervisor()
    if "run" in request:
        environ = os.environ | request.get("env", {})
        code = supervisor.run(request["run"], environ, grace=_STEP_GRACE)
        if code == REFUSED and not os.path.exists(request.get("socket", "/")):
            raise _refusal(f"{request['host']}: the connection broke")
        return code
    worker, keeper = _find(request["job"], request["node"], request["rank"])
    if "stacks" in request:
        return _send_stacks(request)
    supervisor.watch(keeper, request["job"])
    if "relay" in request:
        print(MARKER.decode() + socket.gethostname(), flush=True)
        thread = threading.Thread(target=_relay, daemon=True)
        thread.start()
        supervisor.wait(lambda: not thread.is_alive())
        return 0
    return _run_beside(worker, keeper, request, supervisor)


def _say(text: str) -> None:
    print(f"clusterjob: {text}", file=sys.stderr, flush=True)


# -- supervision -----------------------------------------------------------------------------------


class _Supervisor:
    """Waits for a child; ends it, and all processes below, with the client or the job.

    The client is gone when this process has another parent, or its stdin and stdout have no other
    end: sshd sends no signal to a command without a terminal. SIGINT and SIGQUIT reach the command
    from the terminal.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._keeper, self._job = "", ""
        self._woken, writer = os.pipe()
        for end in (self._woken, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in _SIGNALS:  # with SIG_IGN, the command would ignore them too
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)

    def watch(self, keeper: int, job: str) -> None:
        """End with a process of the job."""
        self._keeper, self._job = processes.identity(keeper), job

    def run(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        grace: float = _GRACE,
        **more: Any,
    ) -> int:
        """Run a command and return its exit code; 126 or 127 if it cannot be started.

        Raises:
            Stop: the job has ended.
        """
        parent = os.getpid()
        noisy = words[0] == "srun"
        try:
            child = subprocess.Popen(
                [os.fsencode(word) for word in words],
                env={os.fsencode(name): os.fsencode(value) for name, value in environ.items()},
                preexec_fn=lambda: processes.die_with_parent(parent),  # noqa: PLW1509 - one thread
                stderr=subprocess.PIPE if noisy else None,
                bufsize=0,
                **more,
            )
        except OSError as error:
            _say(f"{words[0][:4096]}: {error.strerror or error}")
            absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
            return NOT_FOUND if absent else NOT_EXECUTABLE
        codes: list[int] = []

        def ended() -> bool:
            for pid, status in processes.ended_children():
                if pid == child.pid:
                    codes.append(processes.exit_code_of(status)[0])
            return bool(codes)

        child.returncode = 0  # `ended` reaps it
        try:
            self.wait(ended, child.stderr and child.stderr.fileno())
            end = time.monotonic() + _LEFTOVERS
            while processes.descendants(parent) and time.monotonic() < end:
                time.sleep(0.02)
        finally:
            _end_all(grace, ended)
        return codes[0] if codes else 128 + signal.SIGKILL

    def wait(self, ended: Callable[[], bool], errors: int | None = None) -> None:
        """Wait for an end; copy the stderr of srun meanwhile.

        Raises:
            Stop: the job has ended, or this process was asked to end.
        """
        line = b""
        while not ended():
            sources = [self._woken] if errors is None else [self._woken, errors]
            ready = select.select(sources, [], [], _TICK)[0]
            if errors is not None and errors in ready:
                line, errors = _copy_errors(errors, line)
            stop = os.read(self._woken, 64) if self._woken in ready else b""
            if signal.SIGHUP in stop or os.getppid() != self._parent or _is_alone():
                raise Stop(128 + signal.SIGHUP)
            if signal.SIGTERM in stop and not self._job:
                raise Stop(128 + signal.SIGTERM)
            if signal.SIGTERM in stop or (self._keeper and processes.has_ended(self._keeper)):
                raise _refusal(f"job {self._job} has ended")
        while errors is not None:
            line, errors = _copy_errors(errors, line)


def _copy_errors(errors: int, line: bytes) -> tuple[bytes, int | None]:
    """Copy bytes to stderr, without what `_OF_SRUN` says; return an open line."""
    data = os.read(errors, 1 << 16)
    text = _OF_SRUN.sub(b"", line + data)
    kept = text.rpartition(b"\n")[2]
    if not data or not (kept.startswith(b"srun: ") or b"srun: ".startswith(kept)):
        kept = b""
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stderr.buffer.write(text[: len(text) - len(kept)])
        sys.stderr.buffer.flush()
    return kept, errors if data else None


def _is_alone() -> bool:
    """Return whether stdin and stdout are pipes without another end, or a closed terminal."""
    poll = select.poll()
    poll.register(0, 0)
    poll.register(1, 0)
    return sum(bool(flags & (select.POLLERR | select.POLLHUP)) for _, flags in poll.poll(0)) == 2


def _end_all(grace: float, ended: Callable[[], bool]) -> None:
    """End all processes below this one: SIGHUP, SIGTERM and, after the grace, SIGKILL."""
    end = time.monotonic() + grace
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
        for pid in processes.descendants(os.getpid()):
            processes.send_signal(pid, number)
    while processes.descendants(os.getpid()) and time.monotonic() < end:
        ended()
        time.sleep(0.02)
    processes.kill_descendants()
    ended()


# -- the worker ------------------------------------------------------------------------------------


def _find(job_id: str, node: int, rank: int | None) -> tuple[RankProcess, int]:
    """Return a worker of this node, and the process with which the node's part of the job ends.

    Args:
        job_id: the job.
        node: the node's rank; several nodes of a job may be on one machine.
        rank: the worker's rank; None for the node's first worker.

    Raises:
        Stop: there is none. Workers that are being started have 10 s.
    """
    end = time.monotonic() + _START_TIMEOUT
    while True:
        found = job_processes.on_node(job_id, node)
        worker = next((each for each in found.ranks if rank in (None, each.rank)), None)
        if worker is not None:
            return worker, worker.pid if found.forkserver is None else found.forkserver
        if found.ranks and found.ranks[0].rank is not None:
            ranks = f"ranks {found.ranks[0].rank} to {found.ranks[-1].rank}"
            raise _refusal(f"rank {rank} is not on node {node}, which has {ranks}")
        if not found.started or time.monotonic() > end:
            raise _refusal(f"job {job_id}: no worker runs on node {node}")
        time.sleep(_TICK)


def _run_beside(
    worker: RankProcess, keeper: int, request: Mapping[str, Any], supervisor: _Supervisor
) -> int:
    """Run a command with the environment, the directory and the container of a worker."""
    beside = keeper if processes.start_ticks(worker.pid) is None else worker.pid
    enter = _enter_container(beside)
    if enter is None:
        where = f"the container of node {request['node']}"
        _say(f"{where} cannot be entered: this runs outside of it")
    environ = {name: value for name, value in worker.environ.items() if name not in _OWN}
    environ[job_processes.MARK] = str(worker.pid)
    if os.isatty(0):
        environ["TERM"] = os.environ.get("TERM", "xterm")
    more: dict[str, Any] = {}
    words = list(request["argv"])
    if not words:
        title = f"{request['job']} rank {worker.rank}"
        words, rcfile = _shell(environ, title, root=f"/proc/{beside}/root" if enter else "")
        more["pass_fds"] = rcfile
    directory = f"/proc/{beside}/cwd"
    if enter:  # the directory may exist only in the container
        words, directory = [*enter, "--wd", "--", *words], "/"
    else:  # the link leads into another mount namespace, where the path may be unreachable
        with contextlib.suppress(OSError):
            directory = os.readlink(directory)
    more["cwd"] = directory if os.access(directory, os.X_OK) else "/"
    return supervisor.run(words, environ, **more)


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
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in environ.items()
        if _NAME.fullmatch(name) and name not in _READ_ONLY and name != "PS1"
    )
    text = (
        "[ -r ~/.bashrc ] && . ~/.bashrc\n"
        f"{exports}PS1={shlex.quote(f'({title}) ')}$PS1\nunset PROMPT_COMMAND\n"
    )
    rcfile = anonymous_file("bashrc")
    os.write(rcfile, text.encode(errors="surrogateescape"))
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


def _send_stacks(request: Mapping[str, Any]) -> int:
    """Print the stacks of this node's ranks as a marker and one JSON object.

    Args:
        request: ``stacks`` has ``timeout`` and ``native``.
    """
    from clusterjob.node.stacks.collect import collect

    warnings: list[str] = []
    stacks = collect(
        job_processes.on_node(request["job"], request["node"]),
        request["node"],
        min(request["stacks"]["timeout"], _STACKS),
        rank=request["rank"],
        native=request["stacks"]["native"],
        warn=warnings.append,
    )
    answer = {"host": socket.gethostname(), "warnings": warnings}
    text = json.dumps(answer | {"ranks": [codec.plain(each) for each in stacks]})
    sys.stdout.buffer.write(MARKER + text.encode() + b"\n")
    sys.stdout.buffer.flush()
    return 0


# -- relays ----------------------------------------------------------------------------------------


def _relay() -> None:
    """Carry one TCP connection to a port of this machine after the other over stdin and stdout.

    A connection begins with a piece from the client, its port, and a piece from here: why the
    port cannot be reached, or nothing. In each direction, an empty piece ends it.
    """
    source, out = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(OSError, ValueError):  # the client is gone
        while port := read_piece(source):
            try:
                sock = _connect(int(port))
            except OSError as error:
                write_piece(out, (error.strerror or "timed out").encode())
                continue
            write_piece(out, b"")
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
        with contextlib.suppress(OSError, ValueError):  # the other side is gone
            data = b"-"
            while data:
                try:
                    data = sock.recv(MAX_PIECE)
                except OSError:
                    data = b""
                write_piece(out, data)

    sock.settimeout(None)
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def receive_pieces(source: IO[bytes], sock: socket.socket) -> None:
    """Write pieces to a socket, to their end.

    Raises:
        OSError: the socket takes no more.
    """
    while data := read_piece(source):
        sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)


def write_piece(out: IO[bytes], data: bytes) -> None:
    """Write one piece: its length, the bytes, and a newline: Slurm buffers output by lines."""
    out.write(_LENGTH.pack(len(data)) + data + b"\n")
    out.flush()


def read_piece(source: IO[bytes]) -> bytes | None:
    """Return the next piece; None at the end of the source.

    Raises:
        ValueError: it is too large.
    """
    head = source.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_PIECE:
        raise ValueError(f"a piece of {length} bytes")
    data = source.read(length + 1)
    return data[:-1] if len(data) > length else None
