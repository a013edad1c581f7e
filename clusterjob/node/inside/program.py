"""Entry point of the program that runs commands, relays and stack requests inside a job.

It reads one line of JSON, the request, from stdin and answers with one line: `streams.MARKER` and
a JSON object. Then stdin and stdout carry the frames of `streams`. It ends, with all processes
below it, when its command ends, when the submitter's side closes stdin or is silent, or when the
job ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any

from clusterjob.node import contract, job_processes
from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import STDERR, STDIN, STDOUT, FrameError, Stream, Streams
from clusterjob.node.job_processes import RankProcess
from clusterjob.node.stacks.collect import collect
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import codec, processes

_SILENCE = 120.0  # seconds without a frame after which the submitter counts as dead
_START_TIMEOUT = 10.0  # seconds for workers that are being started
_TICK = 0.2  # seconds between two checks of the command and the job
_SHORT_TICK = 0.01  # the same while the command ends
_FLUSH = 30.0  # seconds for the last frames, and for stacks
_CONNECT_TIMEOUT = 2.0  # seconds; loopback answers at once, unless the server's backlog is full
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes as of a shell, and of `docker exec`
_LEFTOVERS = 1.0  # seconds for the output of a stopped command, or of what it left behind
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
# bash refuses to set these.
_READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_NO_SHELLS = ("", "nologin", "false")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Variables of the worker that mean nothing to a command: descriptors, the size of a terminal.
_OWN = {contract.REPORT_FD, contract.WARNING_FD, contract.STDIN_FD, "COLUMNS", "LINES", "TERM"}


def main() -> None:
    """Serve one request."""
    line = io.FileIO(0, closefd=False).readline()  # no byte after the line
    if not line.endswith(b"\n"):
        return
    request = json.loads(line)
    processes.adopt_orphans()
    end = time.monotonic() + (0.0 if request.get("stacks") else _START_TIMEOUT)
    found = find(request["job"], request["node"], request["rank"])
    while isinstance(found, dict) and found["why"] == "starting" and time.monotonic() < end:
        time.sleep(_TICK)
        found = find(request["job"], request["node"], request["rank"])
    if isinstance(found, dict):
        _answer({"error": found})
        return
    worker, keeper = found
    answer = {"rank": worker.rank, "host": socket.gethostname()}
    if request.get("stacks"):
        _answer(answer | {"stacks": True})
        _send_stacks(request)
        return
    beside = keeper if processes.start_ticks(worker.pid) is None else worker.pid
    enter = _enter_container(beside)
    _answer(answer | {"outside": enter is None})
    try:
        _serve(worker, keeper, request, enter=enter or [], beside=beside)
    except FrameError as error:
        print(f"clusterjob: {error}", file=sys.stderr)


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(streams.MARKER + json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _serve(
    worker: RankProcess, keeper: int, request: dict[str, Any], enter: Sequence[str], beside: int
) -> None:
    """Carry the streams of a command or a relay until the end; leave no process behind."""
    command: _Command | None = None  # None for a relay
    stopped: list[int] = []  # signals that end this program

    def control(kind: int, number: int, payload: bytes) -> None:
        if kind != streams.CONTROL:  # a reset: the reason of the submitter's side is not used
            return
        message = json.loads(payload)
        if command is None:
            _open_connection(connection, number, message["port"])
        elif "size" in message:
            command.resize(*message["size"])
        else:
            command.signal(message["signal"])

    connection = Streams(0, 1, control=control)
    for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(each, lambda number, _: stopped.append(number))
    if not request.get("relay"):
        command = _Command(connection, worker, request, enter=enter, beside=beside)
    job, job_ended = processes.identity(keeper), False
    try:
        while not (connection.closed or stopped or job_ended or connection.silence > _SILENCE):
            closing = command is not None and not connection.reading
            connection.step(_SHORT_TICK if closing else _TICK)
            if command is not None and command.poll():
                break
            job_ended = processes.has_ended(job)
    finally:
        if command is not None:
            command.stop()
    code = None if command is None else command.code
    _send_end(connection, code, ended=job_ended or bool(stopped))


def _send_end(connection: Streams, code: int | None, *, ended: bool) -> None:
    """Send what is left of the streams, and the last frame, with the exit code."""
    end = time.monotonic() + (0.0 if code is None else _LEFTOVERS)
    while connection.reading and not connection.closed and time.monotonic() < end:
        connection.step(_SHORT_TICK)
    connection.tell({"code": code, "ended": ended})
    end = time.monotonic() + _FLUSH
    while connection.unsent and not connection.closed and time.monotonic() < end:
        connection.step(_SHORT_TICK)


def _send_stacks(request: dict[str, Any]) -> None:
    """Send the stacks of this node's ranks as one JSON object on stream `STDOUT`.

    Args:
        request: the submitter's request; ``stacks`` has ``timeout`` and ``native``.
    """
    warnings: list[str] = []
    stacks = collect(
        job_processes.on_node(request["job"], request["node"]),
        request["node"],
        min(request["stacks"]["timeout"], _FLUSH),
        rank=request["rank"],
        native=request["stacks"]["native"],
        warn=warnings.append,
    )
    data = json.dumps({"ranks": [codec.plain(each) for each in stacks], "warnings": warnings})
    connection = Streams(0, 1, control=lambda *_: None)
    for begin in range(0, len(data), streams.MAX_PAYLOAD):  # the submitter stores none of them
        part = data[begin : begin + streams.MAX_PAYLOAD]
        connection.send(streams.DATA, STDOUT, payload=part.encode())
    _send_end(connection, 0, ended=False)


def _open_connection(connection: Streams, number: int, port: int) -> None:
    """Connect to a port of this machine and add the stream; reset it on an error."""
    why = ""
    # Not by the name "localhost": many machines map it to the first address alone.
    for address in ("127.0.0.1", "::1"):
        try:
            sock = socket.create_connection((address, port), _CONNECT_TIMEOUT)
        except OSError as error:
            why = why or f"{port}: {error.strerror or 'timed out'}"
        else:
            streams.add_socket(connection, number, sock)
            return
    connection.send(streams.RESET, number, payload=why.encode())


def find(job_id: str, node: int, rank: int | None) -> tuple[RankProcess, int] | dict[str, Any]:
    """Return a worker of this node, and the process with which the node's part of the job ends.

    Args:
        job_id: the job.
        node: the node's rank; several nodes of a job may be on one machine.
        rank: the worker's rank; None for the node's first worker.

    Returns:
        If there is no such worker, ``why`` (absent, starting or rank); for a wrong rank also
        ``first``, ``count`` and ``world`` of the ranks.
    """
    found = job_processes.on_node(job_id, node)
    worker = next((each for each in found.ranks if rank in (None, each.rank)), None)
    if worker is not None:
        return worker, worker.pid if found.forkserver is None else found.forkserver
    if not found.ranks or found.ranks[0].rank is None:
        return {"why": "starting" if found.started else "absent"}
    facts = {"first": found.ranks[0].rank, "count": len(found.ranks), "world": found.world}
    return {"why": "rank", **facts}


class _Command:
    """A command and the processes below it.

    Args:
        connection: the streams to the submitter.
        worker: the worker whose environment it gets.
        request: ``argv``: its command line, empty for a shell; ``terminal``: (rows, columns, TERM)
            of its terminal, None for pipes; ``stdin``: whether it reads the submitter's stdin.
        enter: the words of `_enter_container`.
        beside: the process whose directory it gets.

    Attributes:
        code: its exit code; None while it runs.
    """

    def __init__(
        self,
        connection: Streams,
        worker: RankProcess,
        request: dict[str, Any],
        enter: Sequence[str],
        beside: int,
    ) -> None:
        self.code: int | None = None
        self._connection = connection
        self._terminal = request["terminal"]
        self._ended_at = 0.0
        self._pid: int | None = None
        self._master: int | None = None
        self._rcfile: int | None = None
        environ = {name: value for name, value in worker.environ.items() if name not in _OWN}
        environ[job_processes.MARK] = str(worker.pid)
        if self._terminal is not None:
            environ["TERM"] = self._terminal[2] or "xterm"
        root = f"/proc/{beside}/root" if enter else ""
        title = f"{request['job']} rank {worker.rank}"
        words = list(request["argv"]) or self._shell(environ, title, root=root)
        directory = f"/proc/{beside}/cwd"
        if enter:  # the directory may exist only in the container
            words, directory = [*enter, "--wd", "--", *words], "/"
        else:  # the link leads into another mount namespace, where the path may be unreachable
            with contextlib.suppress(OSError):
                directory = os.readlink(directory)
        try:
            self._start(words, environ, directory=directory, stdin=request["stdin"])
        except OSError as error:
            end = "\n" if self._terminal is None else "\r\n"
            text = f"clusterjob: {words[0][:4096]}: {error.strerror or error}{end}"
            data = text.encode(errors="surrogateescape")
            connection.send(streams.DATA, STDERR, payload=data)
            absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
            self.code = NOT_FOUND if absent else NOT_EXECUTABLE

    def _shell(self, environ: dict[str, str], title: str, root: str) -> list[str]:
        """Return the command line of the worker's SHELL; bash gets a prompt and the environment.

        Args:
            environ: the environment; the shell's variables are set.
            title: the prompt.
            root: the root directory of the container; empty for this one.
        """
        usable = (
            path
            for path in (environ.get("SHELL", ""), *_SHELLS)
            if os.path.basename(path) not in _NO_SHELLS and os.access(f"{root}{path}", os.X_OK)
        )
        shell = next(usable, _SHELLS[-1])
        environ["SHELL"] = shell
        if os.path.basename(shell) != "bash":
            environ["PS1"] = f"({title}) $ "
            return [shell, "-i"]
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
        self._rcfile = anonymous_file("bashrc")
        os.write(self._rcfile, text.encode(errors="surrogateescape"))
        return [shell, "--rcfile", f"/dev/fd/{self._rcfile}", "-i"]

    def _start(
        self, words: list[str], environ: dict[str, str], *, directory: str, stdin: bool
    ) -> None:
        slave = None
        if self._terminal is not None:
            self._master, slave = os.openpty()
            self.resize(*self._terminal[:2])
        end = subprocess.PIPE if slave is None else slave
        parent = os.getpid()
        ctypes.CDLL(None)  # loaded before the fork

        def prepare() -> None:
            processes.die_with_parent(parent)
            if slave is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            child = subprocess.Popen(
                [os.fsencode(word) for word in words],
                bufsize=0,
                stdin=end if stdin else subprocess.DEVNULL,
                stdout=end,
                stderr=end,
                cwd=directory if os.access(directory, os.X_OK) else "/",
                env={os.fsencode(name): os.fsencode(value) for name, value in environ.items()},
                start_new_session=True,
                pass_fds=() if self._rcfile is None else (self._rcfile,),
                preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
            )
        finally:
            for each in (slave, self._rcfile):
                if each is not None:
                    os.close(each)
        self._pid = child.pid
        child.returncode = 0  # this object reaps it
        if self._master is not None:
            self._add(STDOUT, self._master, lambda: None)
            self._add(STDIN, self._master, self._hang_up)
        for number, pipe in ((STDOUT, child.stdout), (STDERR, child.stderr), (STDIN, child.stdin)):
            if pipe is not None:
                self._add(number, pipe.fileno(), pipe.close)

    def _add(self, number: int, end: int, close: Callable[[], None]) -> None:
        os.set_blocking(end, False)
        if number == STDIN:
            self._connection.add(Stream(number, sink=end, close_sink=close))
        else:
            self._connection.add(Stream(number, source=end, close_source=close))

    def _hang_up(self) -> None:
        if self._master is not None:
            with contextlib.suppress(OSError):
                os.write(self._master, b"\x04")  # Ctrl-D

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal; the kernel sends SIGWINCH."""
        if self._master is not None:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        if self._pid is not None and self.code is None:
            processes.signal_group(self._pid, number)

    def poll(self) -> bool:
        """Return whether the command has ended and its output is complete."""
        self._reap()
        if self.code is None:
            return False
        if not self._connection.reading:
            return True
        # Processes that the command left behind hold its output.
        if time.monotonic() - self._ended_at > _LEFTOVERS and processes.descendants(os.getpid()):
            self.stop()
        return False

    def stop(self) -> None:
        """End all processes of the command: SIGHUP, SIGTERM and, after the grace, SIGKILL."""
        end = time.monotonic() + _GRACE
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            for pid in processes.descendants(os.getpid()):
                processes.send_signal(pid, number)
        while processes.descendants(os.getpid()) and time.monotonic() < end:
            self._reap()
            time.sleep(0.02)
        processes.kill_descendants()
        self._reap()

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            if pid == self._pid and self.code is None:
                self.code, _ = processes.exit_code_of(status)
                self._ended_at = time.monotonic()


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


if __name__ == "__main__":
    main()
