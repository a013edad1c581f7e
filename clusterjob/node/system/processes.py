"""Query and control processes of Linux: state, environment, descendants, signals, OOM kills.

Sources: prctl(2), proc(5). PR_SET_PDEATHSIG fires when the THREAD that forked exits, so long-lived
processes are started from main threads only.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterjob.node.system import files

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int, with_signal: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends.

    If the parent has already ended, this process exits at once.

    Args:
        parent_pid: pid of the parent, read before the fork; this closes the race between fork and
            prctl.
        with_signal: the signal to send.
    """
    _prctl(_PR_SET_PDEATHSIG, int(with_signal))
    if os.getppid() != parent_pid:
        os._exit(1)


def fork(action: Callable[[], int | None]) -> int:
    """Fork a process that calls a function and exits; return its pid.

    Its exit code is the function's result, 0 for None, and 1 after an exception, which is written
    to stderr.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = int(action() or 0)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(2, f"clusterjob: {error!r}\n".encode(errors="replace"))
        finally:
            os._exit(code)
    return pid


def adopt_orphans() -> None:
    """Become the parent of all orphaned descendants.

    Then no descendant can escape by a double fork or setsid.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    import ctypes  # slow to load; most callers only query processes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "prctl")


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state (field 3 of proc(5)) on, or None.

    None means that there is no such process.
    """
    text = files.read_text(f"/proc/{pid}/stat")
    # The process name may contain spaces and brackets.
    return text.rpartition(")")[2].split() or None


def running() -> dict[int, list[str]]:
    """Return the `stat_fields` of each process of this machine, by pid."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid: fields for pid in pids if (fields := stat_fields(pid)) is not None}


def parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process has ended."""
    fields = stat_fields(pid)
    return 0 if fields is None else int(fields[1])


def start_ticks(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it has ended.

    The pid and the start time identify a process during one boot. A zombie counts as ended.
    """
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


def age(pid: int) -> float:
    """Return for how many seconds a process has run."""
    ticks = start_ticks(pid) or 0
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return max(0.0, age)


def output_of(argv: Sequence[str], environ: Mapping[str, str], timeout: float) -> str:
    """Return what a command prints on stdout; empty if it fails or cannot be run.

    Args:
        argv: the command line.
        environ: the command's environment.
        timeout: seconds after which the command is killed.
    """
    import subprocess  # slow to load

    try:
        done = subprocess.run(
            argv,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=timeout,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else os.fsdecode(done.stdout)


def boot_id() -> str:
    """Return the kernel's random id of this boot, which distinguishes pids of different boots."""
    return files.read_text("/proc/sys/kernel/random/boot_id").strip()


def identity(pid: int) -> str:
    """Return a text that identifies a process of this machine for `has_ended`."""
    return f"{machine()} {pid} {start_ticks(pid) or 0}"


def has_ended(identity: str) -> bool:
    """Return whether a process has certainly ended; False if it was of another machine."""
    place, pid, ticks = identity.rsplit(" ", 2)
    return place == machine() and str(start_ticks(int(pid))) != ticks


def machine() -> str:
    """Return a text that identifies this boot of this machine, or of this container on it."""
    return f"{boot_id()} {namespace(os.getpid(), 'pid')}"


def namespace(pid: int, kind: str) -> str:
    """Return the identity of a process's namespace, such as ``mnt``; empty if it is unknown."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    try:
        return parse_environment(Path(f"/proc/{pid}/environ").read_bytes())
    except OSError:
        return {}


def parse_environment(data: bytes) -> dict[str, str]:
    """Return the variables of ``NAME=value`` entries that end with a zero byte, as of env -0."""
    pairs = (os.fsdecode(entry).partition("=") for entry in data.split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def files_named(pid: int, name: str) -> Iterator[str]:
    """Yield the paths in /proc of a process's open files that `offer.anonymous_file` made.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    for number in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(FileNotFoundError):  # the process has closed it
            if os.readlink(path).rpartition("/")[2].startswith((name, f"memfd:{name}")):
                yield path


def descendants(pid: int, *keep: int | None) -> list[int]:
    """Return the live (not zombie) descendants of a process, the nearest first.

    Args:
        pid: the process.
        keep: pids of descendants that are left out, with all processes below them.
    """
    stats = running()
    found = children(stats)
    kept = {each for top in filter(None, keep) for each in (top, *below(top, found))}
    alive = (each for each in below(pid, found) if stats[each][0] not in "ZX")
    return [each for each in alive if each not in kept]


def children(stats: Mapping[int, list[str]]) -> dict[int, list[int]]:
    """Return the children of each process, by pid, from the result of `running`."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for pid, fields in sorted(stats.items()):
        found[int(fields[1])].append(pid)
    return found


def below(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return the descendants of a process, the nearest first."""
    found = list(children.get(pid, ()))
    for each in found:  # it grows while it is read
        found += children.get(each, ())
    return found


def kill_descendants(*keep: int | None) -> None:
    """Kill every process below this one, adopted orphans included.

    Args:
        keep: pids of descendants that are left alone, with all processes below them.
    """
    # Without a free descriptor, PR_SET_PDEATHSIG ends the workers instead.
    with contextlib.suppress(OSError):
        for _ in range(100):
            left = descendants(os.getpid(), *keep)
            if not left:
                return
            for pid in left:
                send_signal(pid, signal.SIGKILL)
            time.sleep(0.01)


def send_signal(pid: int, with_signal: int) -> bool:
    """Send a signal to a process; return False if it has ended, or is not this user's."""
    try:
        os.kill(pid, with_signal)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_groups(leaders: list[int], timeout: float) -> None:
    """End agents, or the shells that will exec them, with all processes of their process groups.

    A command that a shell forks while SIGTERM arrives does not get the signal. So the processes of
    a group are killed when its leader has ended. An agent's forkserver has its own process group;
    it stops the workers after the agent's end.

    Args:
        leaders: pids of the leaders, each known to be alive.
        timeout: timeout of each leader, in seconds.
    """
    deadline = time.monotonic() + timeout
    for pid in leaders:
        signal_group(pid, signal.SIGTERM)
    while leaders:
        for pid in leaders:
            if start_ticks(pid) is None or time.monotonic() > deadline:
                signal_group(pid, signal.SIGKILL)
        time.sleep(0.02)
        reap(leaders)
        groups = {int(fields[2]) for fields in running().values() if fields[0] not in "ZX"}
        leaders = [pid for pid in leaders if pid in groups]


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process group, unless it has ended."""
    send_signal(-leader, number)


def reap(pids: list[int]) -> None:
    """Reap ended agents that are children of this process, so that no zombies remain."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def ended_children() -> Iterator[tuple[int, int]]:
    """Reap the children that have ended, and yield the pid and the wait status of each."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def exit_code_of(wait_status: int) -> tuple[int, str | None]:
    """Return (exit code, signal name or None) of a wait status; the code of signal n is 128 + n."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        return 128 + number, signal_name(number)
    return os.WEXITSTATUS(wait_status), None


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL; SIG34 for a real-time signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def signal_number(name: str) -> int:
    """Return the number of a signal that a process can handle, such as SIGUSR1 or usr1.

    Raises:
        ValueError: there is no such signal, or no process can handle it.
    """
    found = signal.Signals.__members__.get(f"SIG{name.upper().removeprefix('SIG')}")
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{name[:40]!r} is not a signal that a script can handle")
    return found


def handled_signals(*, preemptible: bool) -> list[int]:
    """Return the numbers of the signals that request a stop or warn of a preemption.

    Args:
        preemptible: whether the job may be preempted; SIGUSR1 then warns of it.
    """
    numbers: list[int] = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]
    # nohup and background jobs of a shell ignore some signals on purpose: keep these ignored. The
    # job script ignores SIGUSR1 only for its shell: this process handles it.
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN] + [
        signal.SIGUSR1
    ] * preemptible


def collect_signals(*, preemptible: bool) -> list[int]:
    """Install handlers that collect these signals, and return the list that they append to.

    Without a handler such a signal would end this process, as if the agent had been killed. A
    forkserver that is forked later inherits the handlers and survives: if a scheduler signals every
    process of a job, only the agent reacts.
    """
    early: list[int] = []
    for number in handled_signals(preemptible=preemptible):
        signal.signal(number, lambda number, _: early.append(number))
    return early


def raise_open_files() -> None:
    """Raise the limit of open files to the hard limit: each node or rank needs a connection.

    Only for processes that run no user code: select(2) fails beyond 1,024.
    """
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def oom_kills() -> int:
    """Return the kernel's count of OOM kills in this process's cgroup; 0 without one."""
    for directory in memory_cgroups():
        for name in ("memory.events", "memory.oom_control"):  # of cgroups v2, and of v1
            text = files.read_text(directory / name)
            if found := re.search(r"^oom_kill (\d+)", text, re.MULTILINE):
                return int(found[1])
    return 0


def memory_cgroups(root: str = "") -> Iterator[Path]:
    """Yield the cgroup that counts the memory of this process, v2 or v1, and those above it.

    In a container the mounted root is the container's own cgroup.

    Args:
        root: replaces ``/`` in tests.
    """
    for line in files.read_text(f"{root}/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            top = f"{root}/sys/fs/cgroup{'/memory' if controllers else ''}"
            group = Path(f"{top}{path}")
            yield from (each for each in (group, *group.parents) if str(each).startswith(top))


class SharedNote:
    """A JSON object in memory that a process shares with the processes that it forks.

    It outlives the process that wrote it. There are two places for it, in turn: if the writer is
    killed while it writes, the value before is still there.

    Args:
        size: maximum bytes of the value; a larger value is not written.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        # The first byte counts the values. Anonymous: no descriptor that a worker could inherit.
        self._memory = mmap.mmap(-1, 1 + 2 * size)
        self.write({})

    def write(self, value: dict[str, Any]) -> None:
        """Replace the value."""
        data = json.dumps(value).encode() + b"\n"
        number = (self._memory[0] + 1) % 256
        begin = 1 + number % 2 * self._size
        if len(data) <= self._size:
            self._memory[begin : begin + len(data)] = data
            self._memory[0] = number

    def read(self) -> dict[str, Any]:
        """Return the last value that was written completely."""
        while True:
            number = self._memory[0]
            begin = 1 + number % 2 * self._size
            data = self._memory[begin : self._memory.find(b"\n", begin)]
            # A CPU that orders writes weakly may show the number before the value.
            with contextlib.suppress(ValueError):
                if number == self._memory[0]:  # else the writer has been here meanwhile
                    return json.loads(data)  # type: ignore[no-any-return]
