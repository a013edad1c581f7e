"""Functions that read the state of processes from the kernel, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import alive, wait_until

from clusterjob.node.system import processes

# Start of small programs that use the functions; each prints "up PID..." when it is ready.
PRELUDE = "import os, signal, sys, time\nfrom clusterjob.node.system import processes\n"


class Child:
    """A program of a test, with the pids that it has printed."""

    def __init__(self, text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.pids = [int(word) for word in self.process.stdout.readline().split()[1:]]

    def end(self) -> int:
        self.process.kill()
        self.process.stdout.close()
        return self.process.wait(10)


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.end()
        for pid in child.pids:
            processes.send_signal(pid, signal.SIGKILL)


# If the parent dies between the fork and the call, the kernel sends no signal.
@pytest.mark.parametrize("before", ["", "while os.getppid() == parent: time.sleep(0.01)"])
def test_die_with_parent_kills_child_when_parent_dies(children: list[Child], before: str) -> None:
    child = Child(f"""
        parent = os.getpid()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            {before or "pass"}
            processes.die_with_parent(parent)
            os.write(tell, b"x")
            time.sleep(1000)
        {"" if before else "os.read(ready, 1)"}
        print("up", pid, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert alive(child.pids[0])
    child.process.kill()
    wait_until(lambda: not alive(child.pids[0]), 10)


def test_die_with_parent_sends_chosen_signal(children: list[Child], tmp_path: Path) -> None:
    child = Child(f"""
        parent = os.getpid()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            def note(*_):
                open({str(tmp_path / "noted")!r}, "w").close()
                os._exit(0)
            signal.signal(signal.SIGUSR1, note)
            processes.die_with_parent(parent, signal.SIGUSR1)
            os.write(tell, b"x")
            while True:
                time.sleep(1000)
        os.read(ready, 1)
        print("up", pid, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    child.process.kill()
    wait_until((tmp_path / "noted").exists, 10)


def test_daemonized_orphans_are_adopted(children: list[Child]) -> None:
    child = Child("""
        processes.adopt_orphans()
        ready, tell = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                if os.fork() == 0:
                    os.write(tell, b"%d" % os.getpid())
                    time.sleep(1000)
            os._exit(0)
        os.wait()
        orphan = int(os.read(ready, 99))
        while open(f"/proc/{orphan}/stat").read().rpartition(")")[2].split()[1] != str(os.getpid()):
            time.sleep(0.01)
        print("up", orphan, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert processes.descendants(child.process.pid) == child.pids
    assert processes.stat_fields(child.pids[0])[1] == str(child.process.pid)


def test_descendants_are_all_live_processes_below(children: list[Child]) -> None:
    child = Child("""
        ready, tell = os.pipe()
        first = os.fork()
        if first == 0:
            second = os.fork()
            if second == 0:
                os.setsid()
                time.sleep(1000)
            os.write(tell, b"%d" % second)
            time.sleep(1000)
        second = int(os.read(ready, 99))
        zombie = os.fork()
        if zombie == 0:
            os._exit(0)
        while open(f"/proc/{zombie}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        print("up", first, second, zombie, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    first, second, zombie = child.pids
    assert sorted(processes.descendants(child.process.pid)) == sorted([first, second])
    assert processes.descendants(first) == [second]
    assert processes.descendants(second) == []
    assert {child.process.pid, first, second} <= set(processes.descendants(os.getpid()))
    assert os.getpid() not in processes.descendants(os.getpid())
    assert zombie not in processes.descendants(os.getpid())


def test_descendants_include_children_of_zombie(children: list[Child]) -> None:
    """A process whose main thread has ended looks like a zombie and may have children."""
    child = Child("""
        import threading
        ready, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            def run():
                grandchild = os.fork()
                if grandchild == 0:
                    time.sleep(1000)
                os.write(tell, b"%d" % grandchild)
                time.sleep(1000)
            threading.Thread(target=run, daemon=True).start()
            import ctypes
            time.sleep(0.2)
            # The system call exit ends only this thread.
            ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
        grandchild = int(os.read(ready, 99))
        while open(f"/proc/{middle}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        print("up", grandchild, middle, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert child.pids[0] in processes.descendants(child.process.pid)


def test_stat_fields_are_right_with_parentheses_in_process_name(tmp_path: Path) -> None:
    path = tmp_path / ") R 1 (x"
    path.symlink_to("/bin/sleep")
    with subprocess.Popen([str(path), "1000"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith(")"), 10)
        fields = processes.stat_fields(process.pid)
        assert fields[1] == str(os.getpid())
        assert process.pid in processes.descendants(os.getpid())
        process.kill()


def test_start_ticks_identify_process_until_it_ends() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        ticks = processes.start_ticks(process.pid)
        assert ticks is not None
        assert ticks == processes.start_ticks(process.pid)
        assert ticks >= (processes.start_ticks(os.getpid()) or 0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # the process stays a zombie
        assert processes.stat_fields(process.pid)[0] == "Z"
        assert processes.start_ticks(process.pid) is None
    assert processes.start_ticks(process.pid) is None
    assert processes.stat_fields(process.pid) is None


def test_signal_to_ended_process_returns_false() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert processes.send_signal(process.pid, signal.SIGKILL)
    assert not processes.send_signal(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("exit 0", (0, None)),
        ("exit 3", (3, None)),
        ("exit 255", (255, None)),
        ("kill -KILL $$", (137, "SIGKILL")),
        ("kill -SEGV $$", (139, "SIGSEGV")),
        ("kill -TERM $$", (143, "SIGTERM")),
        ("kill -34 $$", (162, "SIGRTMIN")),
        ("kill -40 $$", (168, "SIG40")),
    ],
)
def test_exit_codes_are_same_as_in_shell(command: str, expected: tuple[int, str | None]) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
    code, name = processes.exit_code_of(os.waitpid(pid, 0)[1])
    assert code == expected[0]
    assert name == expected[1] or name == f"SIG{expected[0] - 128}"
    shell = subprocess.run(
        ["sh", "-c", f"sh -c '{command}'; exit $?"], check=False, stderr=subprocess.DEVNULL
    )
    assert shell.returncode == code


def test_exit_code_of_process_with_core_dump_names_signal() -> None:
    assert processes.exit_code_of(0x80 | signal.SIGSEGV) == (139, "SIGSEGV")
