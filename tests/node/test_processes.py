"""What the kernel knows of processes, asked of real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from procs import alive, wait_until

from clusterjob.node.system import processes

# Small programs that use the functions in a process of their own; each says "up PID..." when it is
# ready.
PRELUDE = "import os, signal, sys, time\nfrom clusterjob.node.system import processes\n"


class Child:
    """A program of the test's, with what it said."""

    def __init__(self, text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", PRELUDE + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.pids = [int(word) for word in self.process.stdout.readline().split()[1:]]

    def end(self) -> int:
        self.process.kill()
        assert self.process.stdout is not None
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


def test_die_with_parent_kills(children: list[Child]) -> None:
    child = Child("""
        parent = os.getpid()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent(parent)
            os.write(tell, b"x")
            time.sleep(1000)
        os.read(ready, 1)
        print("up", pid, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert alive(child.pids[0])
    child.process.kill()
    wait_until(lambda: not alive(child.pids[0]), 10)


def test_die_with_parent_sends_the_signal_that_is_asked_for(
    children: list[Child], tmp_path: Path
) -> None:
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


def test_a_parent_that_is_gone_already_is_noticed(children: list[Child]) -> None:
    """Between the fork and the call the parent may die: then no signal would ever come."""
    child = Child("""
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            while os.getppid() == parent:
                time.sleep(0.01)
            processes.die_with_parent(parent)
            time.sleep(1000)
        print("up", pid, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert alive(child.pids[0])
    child.process.kill()
    wait_until(lambda: not alive(child.pids[0]), 10)


def test_orphans_are_adopted_however_far_they_fled(children: list[Child]) -> None:
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


def test_descendants_are_all_live_ones_below(children: list[Child]) -> None:
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


def test_descendants_of_a_zombie_s_children_are_found(children: list[Child]) -> None:
    """A thread group whose leader has ended looks like a zombie and may still have children."""
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
            ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit of this thread alone
        grandchild = int(os.read(ready, 99))
        while open(f"/proc/{middle}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        print("up", grandchild, middle, flush=True)
        time.sleep(1000)
    """)
    children.append(child)
    assert child.pids[0] in processes.descendants(child.process.pid)


def test_a_name_of_any_kind_does_not_confuse_the_fields(tmp_path: Path) -> None:
    path = tmp_path / ") R 1 (x"
    path.symlink_to("/bin/sleep")
    with subprocess.Popen([str(path), "1000"]) as process:
        wait_until(lambda: Path(f"/proc/{process.pid}/comm").read_text().startswith(")"), 10)
        fields = processes.stat_fields(process.pid)
        assert fields is not None
        assert fields[1] == str(os.getpid())
        assert process.pid in processes.descendants(os.getpid())
        process.kill()


def test_start_ticks_tell_processes_apart_and_end_with_them() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        ticks = processes.start_ticks(process.pid)
        assert ticks is not None
        assert ticks == processes.start_ticks(process.pid)
        assert ticks >= (processes.start_ticks(os.getpid()) or 0)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is not reaped
        assert processes.stat_fields(process.pid)[0] == "Z"
        assert processes.start_ticks(process.pid) is None
    assert processes.start_ticks(process.pid) is None
    assert processes.stat_fields(process.pid) is None


def test_the_boot_id_is_this_boot_s() -> None:
    assert len(processes.boot_id()) == 36
    assert processes.boot_id() == processes.boot_id()


def test_a_signal_to_a_process_that_is_gone_is_no_error() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        assert processes.send_signal(process.pid, signal.SIGKILL)
    assert not processes.send_signal(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("command", "wanted"),
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
def test_exit_codes_are_a_shell_s(command: str, wanted: tuple[int, str | None]) -> None:
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
    code, name = processes.exit_code_of(os.waitpid(pid, 0)[1])
    assert code == wanted[0]
    assert name == wanted[1] or name == f"SIG{wanted[0] - 128}"
    shell = subprocess.run(
        ["sh", "-c", f"sh -c '{command}'; exit $?"], check=False, stderr=subprocess.DEVNULL
    )
    assert shell.returncode == code


def test_an_exit_code_of_a_process_that_dumped_core_is_its_signal_s() -> None:
    assert processes.exit_code_of(0x80 | signal.SIGSEGV) == (139, "SIGSEGV")


def test_descendants_is_quick_enough_to_be_asked_often() -> None:
    begin = time.monotonic()
    for _ in range(10):
        processes.descendants(os.getpid())
    assert time.monotonic() - begin < 10
