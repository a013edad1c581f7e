"""One worker of the stand-in platform: an entry command in a container, with files, processes, a
host name and a network of its own.

Run as a program by volc_service.py, which names a JSON file with what to run: it stays outside of
the container. SIGTERM to it goes to everything in the container, SIGUSR1 ends everything there at
once; it ends when the container is empty, with the entry command's exit code. It needs root and the
standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

NEW_MOUNTS, NEW_NAME, NEW_IPC, NEW_PIDS, NEW_NETWORK = (
    0x20000,
    0x4000000,
    0x8000000,
    0x20000000,
    0x40000000,
)
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000
OWN = {
    "dev",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
}  # what a container has of its own; all else at the top is the machine's
SIGNALS = {signal.SIGTERM, signal.SIGUSR1}
PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def main(path: str) -> int:
    with open(path) as file:
        what = json.load(file)
    os.unlink(path)  # private variables are in it
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with open(f"/run/netns/{what['network']}") as network:
        _done(libc.setns(network.fileno(), NEW_NETWORK), "setns")
    _done(libc.unshare(NEW_MOUNTS | NEW_NAME | NEW_IPC | NEW_PIDS), "unshare")
    first = os.fork()
    if first == 0:
        try:
            code = _first_process(what)
        except BaseException as error:
            Path(what["error"]).write_text(f"{type(error).__name__}: {error}")
            code = 125
        os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(first, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    _, status = os.waitpid(
        first, 0
    )  # the kernel lets it be reaped when all others of the container are gone
    return _code(status)


def _first_process(what: dict) -> int:
    """Furnish the container, start the entry command, reap whatever ends; return the command's exit
    code.
    """
    _done(libc.prctl(PDEATHSIG, signal.SIGKILL), "prctl")  # with it goes the container
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: (ending.append(True), _terminate_all()))
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    root = _file_system(what)
    socket.sethostname(what["hostname"])
    entry = os.fork()
    if entry == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.setsid()
        os.chroot(root)
        os.chdir("/")
        try:
            os.execve("/bin/bash", ["bash", "-c", what["command"]], what["environ"])
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # none is left
            return code or 0
        if pid == entry:
            code = _code(status)
        if code is not None and not ending:
            return code  # what is left of the container is killed by the kernel


def _terminate_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)  # of this container, and not this process


def _file_system(what: dict) -> str:
    """Mount the container's root; return where it is.

    The machine's files are there (the image is whatever runs the tests), but /root, /tmp and /run
    are empty, but for what has to be seen.
    """
    root = what["root"]
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", 0)
    for name in sorted(os.listdir("/")):
        source = f"/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"{root}/{name}")
        elif os.path.isdir(source):
            os.mkdir(f"{root}/{name}")
            if name not in OWN:
                _mount(source, f"{root}/{name}", None, BIND | RECURSIVE)
    for name in OWN:
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.chmod(f"{root}/tmp", 0o1777)
    _mount("proc", f"{root}/proc", "proc", 0)
    _mount("sysfs", f"{root}/sys", "sysfs", 0)  # /sys/class/net is that of this network
    if os.path.isdir("/sys/fs/cgroup"):
        _mount("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", None, BIND | RECURSIVE)
    _mount("/dev", f"{root}/dev", None, BIND | RECURSIVE)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", f"{root}/dev/shm", "tmpfs", 0)
    _mount(what["hosts"], f"{root}/etc/hosts", None, BIND)
    for place in what["visible"]:
        if place.split("/")[1] in OWN:
            os.makedirs(root + place, exist_ok=True)
            _mount(place, root + place, None, BIND | RECURSIVE)
    for source, place in what["mounts"]:
        if (
            os.path.isdir(f"/{place.split('/')[1]}")
            and place.split("/")[1] not in OWN
            and not os.path.isdir(place)
        ):
            raise FileNotFoundError(
                f"mount path {place} is not in the image"
            )  # it would have to be made in the machine's own folder
        os.makedirs(root + place, exist_ok=True)
        _mount(source, root + place, None, BIND)
    return root


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind)]
    _done(libc.mount(*words, ctypes.c_ulong(flags), None), f"mount {source} at {target}")


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
