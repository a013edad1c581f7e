"""A FUSE file system with one file whose reads never return; it needs root and /dev/fuse.

    python tests/support/hanging_fuse.py DIRECTORY

mounts it, prints a line when it is mounted, and serves it until it is killed. The protocol is that
of <linux/fuse.h>.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FILE = "data.bin"
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _INIT = 1, 2, 3, 14, 15, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_DIRECT_IO = 1
_DETACH = 2  # MNT_DETACH of umount2(2)


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """Mount the file system; yield the path of the file."""
    server = subprocess.Popen(
        [sys.executable, __file__, str(directory)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline() == "mounted\n"
        yield directory / FILE
    finally:
        server.kill()  # ends every read with an error
        server.wait()
        server.stdout.close()
        ctypes.CDLL(None).umount2(os.fsencode(directory), _DETACH)


def can_mount() -> bool:
    """Return whether this process may mount FUSE file systems."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


def _attributes(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
    size = 0 if node == 1 else 1 << 20
    times = (int(time.time()),) * 3
    return struct.pack("<6Q10I", node, size, 0, *times, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes) -> bytes | int | None:
    """Return the answer to a request: data, an error number, or None for no answer."""
    if opcode == _INIT:
        _, minor = struct.unpack_from("<2I", body)
        return struct.pack("<4I2H2I2H8I", 7, min(minor, 31), 0, 0, 9, 9, 4096, 1, 0, 0, *(0,) * 8)
    if opcode == _LOOKUP:
        if body.rstrip(b"\0") != FILE.encode():
            return errno.ENOENT
        return struct.pack("<4Q2I", 2, 0, 60, 60, 0, 0) + _attributes(2)
    if opcode == _GETATTR:
        return struct.pack("<Q2I", 60, 0, 0) + _attributes(node)
    if opcode == _OPEN:
        return struct.pack("<Q2I", 1, _DIRECT_IO, 0)
    if opcode in (_FORGET, _READ, _INTERRUPT, _BATCH_FORGET):
        return None
    return errno.ENOSYS


def _serve(directory: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hang", os.fsencode(directory), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    while True:
        request = os.read(device, 1 << 20)
        _, opcode, unique, node = struct.unpack_from("<2I2Q", request)
        answer = _answer(opcode, node, request[40:])
        if answer is None:
            continue
        error, data = (-answer, b"") if isinstance(answer, int) else (0, answer)
        os.write(device, struct.pack("<IiQ", 16 + len(data), error, unique) + data)


if __name__ == "__main__":
    _serve(sys.argv[1])
