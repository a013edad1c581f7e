"""The process of a node that writes the workers' output into the log files.

Each stream of a worker is a pipe. A plain file would be emptied when a program opens /dev/stderr
for writing; sockets and append-only files refuse that. A worker waits for the file only if the pipe
is full. If this process is killed, so are the forkserver and the workers. Output that finds no room
on the disk is dropped, and a line says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from clusterjob.node.system import files, processes

# Of a pipe: those of 32 workers take half of what a user may have (pipe-user-pages-soft). Of a
# read: a program may enlarge its pipe.
_PIPE_BYTES, _READ_BYTES = 1 << 19, 1 << 20
_FLUSH_SECONDS = 1.0  # an answer may take longer on a disk that hangs


def start() -> tuple[int, socket.socket]:
    """Fork the process; return its pid and the socket that `open_stream` and `flush` use."""
    own, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(_FLUSH_SECONDS)
    pid = processes.fork(lambda: _drain(control))
    control.close()
    return pid, own


def open_stream(control: socket.socket, path: Path) -> FileIO:
    """Return a worker's end of a pipe; the process writes what comes from it into a file.

    Raises:
        OSError: the file cannot be created, or the process has ended.
    """
    with os.fdopen(files.open_log(path), "wb") as log:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        socket.send_fds(control, [os.fsencode(path.name)], [read_end, log.fileno()])
        os.close(read_end)
    return FileIO(write_end, "wb")


def flush(control: socket.socket) -> None:
    """Wait until the process has written what is in the pipes now, for 1 s at most."""
    number = os.urandom(8)
    with contextlib.suppress(OSError):
        control.send(number)
        while control.recv(len(number)) not in (number, b""):
            pass  # an answer that came too late for an earlier call


@dataclass
class _Stream:
    """A pipe and its file; `lost` counts the bytes that have found no room on the disk."""

    name: str
    pipe: int
    log: int
    lost: int = 0

    def move(self) -> bool:
        """Write what is in the pipe now; return whether a process can still write into it."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.pipe, _READ_BYTES)
            self._write(data)
            return bool(data)
        return True

    def _write(self, data: bytes) -> None:
        note = f"\nclusterjob: {self.lost} bytes of output were lost: the disk was full\n"
        left = memoryview((note.encode() if self.lost else b"") + data)
        try:
            while left:
                left = left[os.write(self.log, left) :]
            self.lost = 0
        except OSError as error:
            if not self.lost:
                text = f"clusterjob: output of {self.name} is lost: {error.strerror}\n"
                with contextlib.suppress(OSError):  # the disk of agent.log may be full too
                    os.write(2, text.encode())
            self.lost += min(len(left), len(data))


def _drain(control: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
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
        ready = {descriptor for descriptor, _ in poll.poll()}
        for descriptor in ready.intersection(streams):
            if not streams[descriptor].move():
                poll.unregister(descriptor)
                os.close(streams.pop(descriptor).log)
                os.close(descriptor)
        if control.fileno() not in ready:
            continue
        data, received, _, _ = socket.recv_fds(control, 256, 2)
        if received:
            streams[received[0]] = _Stream(os.fsdecode(data), *received)
            poll.register(received[0], select.POLLIN)
        elif data:
            for stream in streams.values():
                stream.move()
            with contextlib.suppress(OSError):
                control.send(data)
        else:
            is_open = False
            poll.unregister(control)
