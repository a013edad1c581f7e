"""What the kernel knows of processes: who is alive, who descends from whom, who dies with whom.
Linux, standard library.

Sources: prctl(2), proc(5). PR_SET_PDEATHSIG fires when the THREAD that forked exits, so processes
that matter are started from main threads only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_READ = {
    "x86_64": "0",
    "aarch64": "63",
    "ppc64le": "3",
    "s390x": "3",
    "riscv64": "63",
}  # the number of read(2), by machine


def die_with_parent(parent_pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends; exits at once if the parent
    is gone already.

    Args:
        parent_pid: pid of the parent as read before the fork, which closes the race between fork
            and prctl.
        with_signal: the signal to be sent.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of every orphan below it, so that none escapes by a double fork
    or setsid.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # not needed where processes are only looked at

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "prctl")


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on (field 3 of proc(5)), or None when
    there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot: with the pid, its identity on
    this boot of the machine.

    None for a process that is gone; a zombie is gone, it only waits for its parent.
    """
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Return the kernel's random name for this boot, so that a pid from before a reboot is not
    taken for a live one.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return the live (not zombie) processes below one, in no special order, the process itself
    left out.
    """
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = stat_fields(int(entry))
        if fields is None:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry))
        if fields[0] in "ZX":
            zombies.add(int(entry))
    found: list[int] = []
    unseen = [pid]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return [found_pid for found_pid in found if found_pid not in zombies]


def terminal_reader(above: int, terminal: int = 0) -> int | None:
    """Return the process below one that waits in read(2) for input from a terminal; None where none
    does.

    Only main threads count: a thread that listens for keys beside the work is no prompt.

    Args:
        above: pid of the process whose descendants are looked at.
        terminal: a descriptor of the terminal; where it is none, nothing reads it.
    """
    if not os.isatty(terminal):
        return None
    device = os.fstat(terminal).st_rdev
    for pid in descendants(above):
        try:
            call, *arguments = Path(f"/proc/{pid}/syscall").read_text().split()
            if (
                call == _READ.get(os.uname().machine)
                and os.stat(f"/proc/{pid}/fd/{int(arguments[0], 16)}").st_rdev == device
            ):
                return pid
        except OSError:  # it has ended, or is not ours to look at
            continue
    return None


def send_signal(pid: int, with_signal: int) -> bool:
    """Send a signal; return False when the process is gone."""
    try:
        os.kill(pid, with_signal)
    except ProcessLookupError:
        return False
    return True


def exit_code_of(wait_status: int) -> tuple[int, str | None]:
    """Return (exit code, signal name or None) of a wait status: 128 + n for a process that signal n
    ended.
    """
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        return 128 + number, signal_name(number)
    return os.WEXITSTATUS(wait_status), None


def signal_name(number: int) -> str:
    """Return SIGKILL for 9 and so on; real-time signals, which have no name, as SIG34."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def raise_open_files() -> None:
    """Let this process open as many files as it may at all: a connection for each node, or each
    rank, takes one.

    For processes that run no code of the user's: select(2) fails beyond 1,024.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass(frozen=True)
class OomKills:
    """The kernel's count of processes that it has killed for want of memory: in this process's
    cgroup, else on this machine.

    Attributes:
        count: how many, so far.
        cgroup: the directory of the cgroup; None where the count is the machine's.
    """

    count: int
    cgroup: Path | None = None

    @classmethod
    def now(cls) -> OomKills:
        """Return the count as it is."""
        for directory, name in _memory_cgroups():
            count = _count_in(directory / name)
            if count is not None:
                return cls(count, directory)
        return cls(_count_in(Path("/proc/vmstat")) or 0)

    def news(self) -> str:
        """Return what to say of a killed process if the kernel has killed one since; else nothing."""
        now = OomKills.now()
        if now.count <= self.count:
            return ""
        if now.cgroup is None:
            return "this machine ran out of memory meanwhile"
        limits = [now.cgroup / name for name in ("memory.max", "memory.limit_in_bytes")]
        texts = [text.strip() for path in limits if (text := _text(path))]
        limit = next(
            (int(text) for text in texts if text.isdigit() and int(text) < 1 << 60), None
        )  # v1 writes a huge number for none
        return "out of memory: the kernel killed it" + (
            f", limit {limit // 10**6} MB" if limit else ""
        )


def _memory_cgroups() -> Iterator[tuple[Path, str]]:
    """Yield where this process's memory is counted, for version 2 and 1 of cgroups; in a container
    its own root is mounted.
    """
    for _, controllers, path in (
        line.split(":", 2) for line in _text(Path("/proc/self/cgroup")).splitlines()
    ):
        if not controllers:
            yield from ((Path(f"/sys/fs/cgroup{place}"), "memory.events") for place in (path, ""))
        elif "memory" in controllers.split(","):
            yield from (
                (Path(f"/sys/fs/cgroup/memory{place}"), "memory.oom_control")
                for place in (path, "")
            )


def _count_in(path: Path) -> int | None:
    return next(
        (int(line.split()[1]) for line in _text(path).splitlines() if line.startswith("oom_kill ")),
        None,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class ProcessIdentity:
    """A process as another can recognise it later: a pid alone may be another process's by then.

    Attributes:
        pid: its pid.
        ticks: when it started, in clock ticks since boot.
        boot_id: which boot of the machine that was.
        host: the machine's name.
    """

    pid: int
    ticks: int
    boot_id: str
    host: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the caller's own."""
        return cls(os.getpid(), start_ticks(os.getpid()) or 0, boot_id(), socket.gethostname())

    def alive(self) -> bool:
        """Return whether the process runs; one of another host or another boot does not, as far as
        can be known here.
        """
        return (
            self.host == socket.gethostname()
            and self.boot_id == boot_id()
            and start_ticks(self.pid) == self.ticks != 0
        )
