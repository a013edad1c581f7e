"""Make a Python process find what it would find on macOS: no /proc, and no calls of Linux.

A directory on PYTHONPATH with this file stands for a Mac in tests: ssh and the hosts are real.
"""

import fcntl
import os
import resource
import select
import signal
import socket
import sys
import time

HIDDEN = ("/proc", "/sys")
REMOVED = {
    os: (
        "pipe2", "memfd_create", "MFD_CLOEXEC", "eventfd", "eventfd_read", "eventfd_write",
        "pidfd_open", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity",
        "O_PATH", "O_TMPFILE", "O_DIRECT", "O_LARGEFILE", "O_NOATIME", "getxattr", "setxattr",
        "listxattr", "removexattr", "splice", "copy_file_range", "getrandom", "unshare", "setns",
        "getresuid", "getresgid", "setresuid", "setresgid", "accept4", "fdatasync",
        "sched_getparam", "sched_setscheduler",
    ),
    socket: (
        "SO_PEERCRED", "SO_PASSCRED", "SO_MARK", "SO_BINDTODEVICE", "TCP_USER_TIMEOUT",
        "TCP_KEEPIDLE", "TCP_QUICKACK", "TCP_CORK", "TCP_DEFER_ACCEPT", "SOCK_CLOEXEC",
        "SOCK_NONBLOCK", "AF_NETLINK", "AF_PACKET", "AF_VSOCK", "AF_ALG", "MSG_CMSG_CLOEXEC",
        "MSG_NOSIGNAL",
    ),
    signal: (
        "SIGRTMIN", "SIGRTMAX", "SIGPWR", "SIGSTKFLT", "SIGPOLL", "SIGCLD", "sigtimedwait",
        "sigwaitinfo", "pidfd_send_signal",
    ),
    select: ("epoll", *(name for name in dir(select) if name.startswith("EPOLL"))),
    fcntl: (
        "F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_GET_SEALS", "F_OFD_SETLK", "F_OFD_GETLK",
    ),
    resource: ("prlimit",),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI", "clock_getcpuclockid"),
}  # fmt: skip


def _hidden(path: object) -> bool:
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:  # a descriptor
        return False
    return any(text == place or text.startswith(f"{place}/") for place in HIDDEN)


def _hide(name: str) -> None:
    """Replace a function of os by one that does not find the hidden directories."""
    real = getattr(os, name)

    def call(path: object = ".", *args: object, **more: object) -> object:
        if _hidden(path):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))  # type: ignore[arg-type]
        return real(path, *args, **more)

    setattr(os, name, call)


def _forbid(event: str, args: tuple[object, ...]) -> None:
    """Let every way to open a hidden file, and every Linux call, fail as on macOS."""
    if event == "open" and _hidden(args[0]):
        raise FileNotFoundError(2, "No such file or directory", args[0])
    if (
        event in ("socket.bind", "socket.connect")
        and args[1:]
        and isinstance(args[1], (str, bytes))
    ):
        name = os.fsencode(args[1])
        if name.startswith(b"\0"):
            raise FileNotFoundError(2, "No such file or directory")
        if len(name) > 103:
            raise OSError("AF_UNIX path too long")
    if event == "socket.__new__" and args[2] == socket.SOCK_SEQPACKET:
        raise OSError(43, "Protocol not supported")
    if event == "ctypes.dlsym" and args[1] == "prctl":
        raise AttributeError("dlsym(RTLD_DEFAULT, prctl): symbol not found")


for module, names in REMOVED.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("stat", "lstat", "readlink", "access", "listdir", "scandir", "chdir"):
    _hide(name)
sys.addaudithook(_forbid)
sys.platform = "darwin"
