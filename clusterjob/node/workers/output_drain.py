"""The process of a node that writes the workers' output into the log files.

Each stream of a worker is a pipe. A plain file would be emptied when a program opens /dev/stderr
for writing; sockets and append-only files refuse that. splice(2) moves the output: it is either in
the pipe or in the file, so nothing is lost if this process is killed. The forkserver keeps the read
ends and starts this process again. Without room on the disk the output waits in the pipes; after
2 s it is dropped, and a line says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PIPE_BYTES = 1 << 20  # beyond 64 MiB of a user (pipe-user-pages-soft), pipes stay small
_FULL_TIMEOUT = 2.0  # seconds to wait for room on the disk
_FLUSH_SECONDS = 1.0  # an answer may take longer on a disk that hangs


def start() -> tuple[int, socket.socket]:
    """Fork the process; return its pid and the socket that `add` and `flush` use."""
    own, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(_FLUSH_SECONDS)
    pid = os.fork()
    if pid == 0:
        try:
            _drain(control)
        except BaseException as error:
            os.write(2, f"clusterjob: writing the output failed: {error!r}\n".encode())
        os._exit(1)
    control.close()
    return pid, own


def open_pipe() -> tuple[int, int]:
    """Return the (read end, write end) of a pipe for one stream of a worker."""
    ends = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return ends


def add(control: socket.socket, read_end: int, path: Path) -> None:
    """Let the process write what comes from a pipe into a file.

    Raises:
        OSError: the file cannot be created, or the process has ended.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        socket.send_fds(control, [os.fsencode(path.name)], [read_end, log])
    finally:
        os.close(log)


def flush(control: socket.socket) -> None:
    """Wait until the process has written what is in the pipes now, for 1 s at most."""
    number = os.urandom(8)
    with contextlib.suppress(OSError):
        control.send(number)
        while control.recv(len(number)) not in (number, b""):
            pass  # an answer that came too late for an earlier call


@dataclass
class _Stream:
    """A pipe and its file; `full_since` is when the disk became full, `lost` what was dropped."""

    pipe: int
    log: int
    name: str
    full_since: float = 0.0
    lost: int = 0

    def move(self) -> bool:
        """Move what is in the pipe; return whether a process can still write into it."""
        try:
            os.lseek(self.log, 0, os.SEEK_END)  # the agent appends lines too
            if self.lost:
                note = f"\nclusterjob: {self.lost} bytes of output were lost: the disk was full\n"
                os.write(self.log, note.encode())
                self.lost = 0
            moved = self._move()
            self.full_since = 0.0
            return moved > 0
        except BlockingIOError:
            return True
        except OSError as error:
            now = time.monotonic()
            self.full_since = self.full_since or now
            if now - self.full_since < _FULL_TIMEOUT:
                return True
            if not self.lost:
                text = f"clusterjob: output of {self.name} is lost: {error.strerror}\n"
                with contextlib.suppress(OSError):  # the disk of agent.log may be full too
                    os.write(2, text.encode())
            with contextlib.suppress(BlockingIOError):
                dropped = len(os.read(self.pipe, PIPE_BYTES))
                self.lost += dropped
                return dropped > 0
            return True

    def _move(self) -> int:
        try:
            return os.splice(self.pipe, self.log, PIPE_BYTES)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        data = os.read(self.pipe, PIPE_BYTES)  # a file system without splice
        view = memoryview(data)
        while view:
            view = view[os.write(self.log, view) :]
        return len(data)


def _drain(control: socket.socket) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    streams: dict[int, _Stream] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    is_open = True
    while is_open or streams:
        ready = poll.poll()
        for descriptor, _ in ready:
            if descriptor in streams and not streams[descriptor].move():
                poll.unregister(descriptor)
                os.close(streams.pop(descriptor).log)
                os.close(descriptor)
        if any(stream.full_since for stream in streams.values()):
            time.sleep(0.05)
        if not is_open or all(descriptor != control.fileno() for descriptor, _ in ready):
            continue
        data, received, _, _ = socket.recv_fds(control, 256, 2)
        if received:
            pipe, log = received
            os.set_blocking(pipe, False)
            streams[pipe] = _Stream(pipe, log, os.fsdecode(data))
            poll.register(pipe, select.POLLIN)
        elif data:
            for stream in streams.values():
                stream.move()
            with contextlib.suppress(OSError):
                control.send(data)
        else:
            is_open = False
            poll.unregister(control)
    os._exit(0)
