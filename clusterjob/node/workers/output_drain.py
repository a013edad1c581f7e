"""The process of a node that writes the workers' output into the log files.

Each stream of a worker is a pipe. A plain file would be emptied when a program opens /dev/stderr
for writing; sockets and append-only files refuse that. splice(2) moves the output: it is either in
a pipe or in the file, so nothing is lost if this process is killed. The kernel locks a pipe while
it copies to a file; the output therefore goes through a second pipe, and the worker need not wait
for the file. The forkserver keeps both pipes and starts this process again. Output that finds no
room on the disk is dropped, and a line says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PIPE_BYTES = 1 << 20  # beyond 64 MiB of a user (pipe-user-pages-soft), pipes stay small
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


def open_stream() -> tuple[tuple[int, ...], int]:
    """Return what `add` needs for one stream of a worker, and the end that the worker writes to."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    buffer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for pipe in (read_end, buffer[0]):
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return (read_end, *buffer), write_end


def add(control: socket.socket, pipes: tuple[int, ...], path: Path) -> None:
    """Let the process write into a file what comes from the pipes of `open_stream`.

    Raises:
        OSError: the file cannot be created, or the process has ended.
    """
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        socket.send_fds(control, [os.fsencode(path.name)], [*pipes, log])
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
    """Pipes and their file; `lost` counts the bytes that have found no room on the disk."""

    name: str
    pipe: int
    buffer_read: int
    buffer_write: int
    log: int
    lost: int = 0

    def move(self) -> bool:
        """Move what is in the pipes; return whether a process can still write into the first."""
        is_open = True
        with contextlib.suppress(BlockingIOError):  # the first is empty, or the second full
            is_open = _splice(self.pipe, self.buffer_write) > 0
        with contextlib.suppress(BlockingIOError):  # until the second pipe is empty
            while True:
                self._write()
        return is_open

    def _write(self) -> None:
        try:
            if self.lost:
                note = f"\nclusterjob: {self.lost} bytes of output were lost: the disk was full\n"
                self._append(note.encode())
                self.lost = 0
            os.lseek(self.log, 0, os.SEEK_END)  # the agent appends lines too
            _splice(self.buffer_read, self.log)
        except BlockingIOError:
            raise
        except OSError:  # no room on the disk, or a file system without splice
            data = os.read(self.buffer_read, PIPE_BYTES)
            try:
                self._append(data)
            except OSError as error:
                if not self.lost:
                    text = f"clusterjob: output of {self.name} is lost: {error.strerror}\n"
                    with contextlib.suppress(OSError):  # the disk of agent.log may be full too
                        os.write(2, text.encode())
                self.lost += len(data)

    def _append(self, data: bytes) -> None:
        os.lseek(self.log, 0, os.SEEK_END)
        view = memoryview(data)
        while view:
            view = view[os.write(self.log, view) :]

    def close(self) -> None:
        for descriptor in (self.pipe, self.buffer_read, self.buffer_write, self.log):
            os.close(descriptor)


def _splice(source: int, target: int) -> int:
    # O_NONBLOCK of a pipe has no effect on splice before Linux 5.1.
    return os.splice(source, target, PIPE_BYTES, flags=os.SPLICE_F_NONBLOCK)


def _drain(control: socket.socket) -> NoReturn:
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
                streams.pop(descriptor).close()
        if control.fileno() not in ready:
            continue
        data, received, _, _ = socket.recv_fds(control, 256, 4)
        if received:
            stream = _Stream(os.fsdecode(data), *received)
            streams[stream.pipe] = stream
            stream.move()  # what an earlier process has left in the buffer
            poll.register(stream.pipe, select.POLLIN)
        elif data:
            for stream in streams.values():
                stream.move()
                stream.move()  # the buffer may have been full
            with contextlib.suppress(OSError):
                control.send(data)
        else:
            is_open = False
            poll.unregister(control)
    os._exit(0)
