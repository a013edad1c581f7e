"""One worker of the simulated platform: it runs the entry command in a container.

The container has its own files, processes, host name and network. volc_service.py runs this program
with the path of a JSON file that describes the container. The program itself stays outside of the
container. It passes SIGTERM on to all processes in the container; at SIGUSR1 it kills them. It ends
when the container is empty, with the entry command's exit code. It needs root, and imports only the
standard library.
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
# The top-level folders that a container does not share with the machine.
OWN = {"dev", "proc", "root", "run", "sys", "tmp"}
SIGNALS = {signal.SIGTERM, signal.SIGUSR1}
PDEATHSIG = 1

libc = ctypes.CDLL(None, use_errno=True)


def main(path: str) -> int:
    with open(path) as file:
        container = json.load(file)
    os.unlink(path)  # the file contains private variables
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    with open(f"/run/netns/{container['network']}") as network:
        _check(libc.setns(network.fileno(), NEW_NETWORK), "setns")
    _check(libc.unshare(NEW_MOUNTS | NEW_NAME | NEW_IPC | NEW_PIDS), "unshare")
    first = os.fork()
    if first == 0:
        try:
            code = _first_process(container)
        except BaseException as error:
            Path(container["error"]).write_text(f"{type(error).__name__}: {error}")
            code = 125
        os._exit(code)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGTERM))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(first, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # Process 1 of a pid namespace can be reaped only after all others in it have ended.
    _, status = os.waitpid(first, 0)
    return _code(status)


def _first_process(container: dict) -> int:
    """Set up the container, run the entry command and reap processes; return its exit code."""
    _check(libc.prctl(PDEATHSIG, signal.SIGKILL), "prctl")  # kills the container
    ending = []
    signal.signal(signal.SIGTERM, lambda *_: (ending.append(True), _terminate_all()))
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    root = _file_system(container)
    socket.sethostname(container["hostname"])
    entry = os.fork()
    if entry == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.setsid()
        os.chroot(root)
        os.chdir("/")
        try:
            os.execve("/bin/bash", ["bash", "-c", container["command"]], container["environ"])
        finally:
            os._exit(127)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:  # all processes have ended
            return code or 0
        if pid == entry:
            code = _code(status)
        if code is not None and not ending:
            return code  # the kernel kills the other processes of the container


def _terminate_all() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)  # all processes of the container except this one


def _file_system(container: dict) -> str:
    """Mount the container's root and return its path.

    The machine's files serve as the image. /root, /tmp and /run are empty, except for the folders
    that have to be visible and the mounts.
    """
    root = container["root"]
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
    _mount("sysfs", f"{root}/sys", "sysfs", 0)  # /sys/class/net shows the container's network
    if os.path.isdir("/sys/fs/cgroup"):
        _mount("/sys/fs/cgroup", f"{root}/sys/fs/cgroup", None, BIND | RECURSIVE)
    _mount("/dev", f"{root}/dev", None, BIND | RECURSIVE)
    if os.path.isdir("/dev/shm"):
        _mount("tmpfs", f"{root}/dev/shm", "tmpfs", 0)
    _mount(container["hosts"], f"{root}/etc/hosts", None, BIND)
    for path in container["visible"]:
        if path.split("/")[1] in OWN:
            os.makedirs(root + path, exist_ok=True)
            _mount(path, root + path, None, BIND | RECURSIVE)
    for source, path in container["mounts"]:
        if (
            os.path.isdir(f"/{path.split('/')[1]}")
            and path.split("/")[1] not in OWN
            and not os.path.isdir(path)
        ):
            # Creating the mount path would create it in the machine's folder.
            raise FileNotFoundError(f"mount path {path} is not in the image")
        os.makedirs(root + path, exist_ok=True)
        _mount(source, root + path, None, BIND)
    return root


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    args = [arg.encode() if arg is not None else None for arg in (source, target, kind)]
    _check(libc.mount(*args, ctypes.c_ulong(flags), None), f"mount {source} at {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
