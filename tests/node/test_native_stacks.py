"""Frames of C and C++: copies of threads, unwinding, symbols."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import hanging_fuse
import pytest
from asked_process import TIMEOUT, child, functions, stack_of
from hypothesis import given
from hypothesis import strategies as st
from procs import wait_until

from clusterjob.node.stacks import (
    collect,
    grouping,
    kernel,
    native_frames,
    thread_copies,
    unwinding,
)
from clusterjob.node.stacks.elf import Image
from clusterjob.node.stacks.frames import RankStack

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="only for x86_64")

PACKAGE = str(Path(collect.__file__).parents[3])
PY_SPY = shutil.which("py-spy", path=f"{sys.prefix}/bin")


@pytest.fixture(autouse=True)
def path_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def native_stack(process: subprocess.Popen[bytes], warnings: list[str] | None = None) -> RankStack:
    lines: list[str] = []
    (stack,) = collect.of_ranks([(0, process.pid)], 0, TIMEOUT, native=True, warn=lines.append)
    assert lines == [] or warnings is not None
    if warnings is not None:
        warnings += lines
    return stack


NATIVE_THREAD = """
    import ctypes
    offer()
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    never = ctypes.create_string_buffer(64)  # a semaphore that is 0
    libc.pthread_create(ctypes.byref(thread), None, libc.sem_wait, never)
    def wait():
        up()
        time.sleep(1000)
    wait()
"""


def test_native_frames_are_above_python_frames_and_native_threads_are_shown(tmp_path: Path) -> None:
    with child(tmp_path, NATIVE_THREAD) as process:
        stack = native_stack(process)
        assert stack.answered
        names = functions(stack)
        assert names[-2:] == ["wait", "<module>"]
        assert "clock_nanosleep" in names[: names.index("wait")]
        assert not any(name.startswith("_PyEval") for name in names)
        assert stack.threads[0].name == "MainThread"
        assert len(stack.threads) == 2
        assert stack.threads[1].frames[0].line is None
        assert "libc" in stack.threads[1].frames[0].file
        assert functions(stack_of(process)) == ["wait", "<module>"]


@pytest.mark.skipif(PY_SPY is None, reason="needs py-spy; pip install py-spy")
def test_native_frames_are_those_of_py_spy(tmp_path: Path) -> None:
    """py-spy leaves out the frames of the interpreter, and names without symbols differ."""
    text = """
        import ctypes
        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        def compare(left, right):
            up()
            time.sleep(1000)
            return 0
        offer()
        numbers = (ctypes.c_int * 8)()
        ctypes.CDLL(None).qsort(numbers, 8, 4, compare)
    """
    with child(tmp_path, text) as process:
        wait_until(lambda: kernel.state(process.pid).startswith("sleeps"), TIMEOUT)
        names = functions(native_stack(process))
        out = subprocess.check_output(
            [str(PY_SPY), "dump", "--native", "--pid", str(process.pid)], text=True
        )
        shown = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
        above = [name for name in shown[: shown.index("compare")] if "0x" not in name]
        assert above
        assert [name for name in names if name in above] == above


def test_process_without_python_frames_shows_native_ones(tmp_path: Path) -> None:
    """The stack goes on below a signal handler."""
    text = """
        import ctypes
        libc = ctypes.CDLL(None)
        @ctypes.CFUNCTYPE(None, ctypes.c_int)
        def handle(number):
            up()
            time.sleep(1000)
        libc.signal(signal.SIGUSR1, handle)
        libc.raise_ = getattr(libc, "raise")
        libc.raise_(signal.SIGUSR1)
    """
    with child(tmp_path, text) as process:
        stack = native_stack(process)
        assert stack.answered
        names = functions(stack)
        names = ["raise" if name == "gsignal" else name for name in names]
        assert names.index("clock_nanosleep") < names.index("raise") < names.index("Py_RunMain")
        assert grouping.headline(grouping.group([stack])).startswith("rank 0 is in ")


def test_stopped_process_shows_native_frames_and_remains_stopped(tmp_path: Path) -> None:
    with child(tmp_path, NATIVE_THREAD) as process:
        wait_until(lambda: kernel.state(process.pid).startswith("sleeps"), TIMEOUT)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: kernel.state(process.pid).startswith("is stopped"), TIMEOUT)
        stack = native_stack(process)
        assert "clock_nanosleep" in functions(stack)
        assert stack.state.startswith("is stopped")
        assert kernel.state(process.pid).startswith("is stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: kernel.state(process.pid).startswith("sleeps"), TIMEOUT)
        assert functions(stack_of(process)) == ["wait", "<module>"]


CLOCKS = """
    sys.path.append(sys.argv[1])
    import torch
    offer()
    gaps = [0.0] * 4
    def clock(index):
        last = time.monotonic()
        while True:
            time.sleep(0.001)
            now = time.monotonic()
            gaps[index] = max(gaps[index], now - last)
            last = now
    for each in range(1, 4): threading.Thread(target=clock, args=(each,), daemon=True).start()
    def report(*_):
        pathlib.Path("gaps.new").write_text(" ".join(map(str, gaps)))
        os.rename("gaps.new", "gaps")
        gaps[:] = [0.0] * 4
    signal.signal(signal.SIGUSR1, report)
    up()
    clock(0)
"""


def test_native_frames_pause_process_with_torch_for_less_than_50_ms(tmp_path: Path) -> None:
    """The shortest of some pauses counts, because other processes delay threads too."""

    def longest_gap() -> float:
        (tmp_path / "gaps").unlink(missing_ok=True)
        process.send_signal(signal.SIGUSR1)
        wait_until((tmp_path / "gaps").exists, TIMEOUT)
        return max(map(float, (tmp_path / "gaps").read_text().split()))

    with child(tmp_path, CLOCKS, str(Path(pytest.__file__).parents[1])) as process:
        wait_until((tmp_path / "up").exists, 60)
        pauses = []
        while len(pauses) < 10 and min(pauses, default=1.0) >= 0.03:
            longest_gap()
            assert len(native_stack(process).threads) >= 4
            pauses.append(longest_gap())
        assert min(pauses) < 0.03  # py-spy needs 0.05 s and more


def test_process_loses_no_signal_while_it_is_read(tmp_path: Path) -> None:
    """The kernel queues each of these signals, and Python's C handler writes a byte for each."""
    text = """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGRTMIN, lambda *_: None)
        up()
        count = 0
        while count < 500: count += len(os.read(reader, 500))
        os.mknod("counted")
        while not os.path.exists("read"): time.sleep(0.01)
        sys.exit(45)
    """
    send = (
        "import os, sys, time\n"
        "for _ in range(500): os.kill(int(sys.argv[1]), int(sys.argv[2])); time.sleep(1e-3)"
    )
    with child(tmp_path, text) as process:
        words = [sys.executable, "-S", "-c", send, str(process.pid), str(int(signal.SIGRTMIN))]
        sender = subprocess.Popen(words)
        reads = 0
        while sender.poll() is None:
            reads += len(thread_copies.copy_threads(process.pid))
        assert sender.wait(TIMEOUT) == 0
        wait_until((tmp_path / "counted").exists, TIMEOUT)
        # The reader is the parent too: it would take the exit code of a process that ends now.
        (tmp_path / "read").touch()
        assert process.wait(TIMEOUT) == 45
        assert reads > 20


def test_process_continues_if_its_reader_is_killed(tmp_path: Path) -> None:
    text = """
        beats = 0
        def beat(*_): os.mknod(f"beat{beats}")
        signal.signal(signal.SIGUSR1, beat)
        up()
        while True:
            time.sleep(0.001)
            beats += 1
    """
    read = (
        "import sys\nfrom clusterjob.node.stacks.thread_copies import copy_threads\n"
        "print(flush=True)\nwhile True: copy_threads(int(sys.argv[1]))"
    )
    with child(tmp_path, text) as process:
        for delay in (0.0, 0.003, 0.011, 0.027, 0.05):
            reader = subprocess.Popen(
                [sys.executable, "-S", "-c", read, str(process.pid)],
                stdout=subprocess.PIPE,
                env={"PYTHONPATH": PACKAGE},
            )
            assert reader.stdout is not None
            reader.stdout.readline()
            time.sleep(delay)
            reader.kill()
            reader.wait()
            reader.stdout.close()
            beats = len(list(tmp_path.glob("beat*")))
            process.send_signal(signal.SIGUSR1)
            wait_until(lambda n=beats: len(list(tmp_path.glob("beat*"))) > n, TIMEOUT)


def test_forbidden_ptrace_is_one_line_and_python_stacks_are_shown(tmp_path: Path) -> None:
    """A filter of system calls forbids it, as in containers."""
    read = """
import ctypes, struct, sys
from clusterjob.node.stacks import collect
steps = ((0x20, 0, 0, 0), (0x15, 0, 1, 101), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000))
steps = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", 4, ctypes.addressof(steps)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program) == 0
(stack,) = collect.of_ranks([(0, int(sys.argv[1]))], 0, 20.0, native=True, warn=print)
print([frame.function for frame in stack.threads[0].frames])
"""
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        lines = subprocess.check_output(
            [sys.executable, "-c", read, str(process.pid)],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": PACKAGE},
            text=True,
        ).splitlines()
    assert lines[0].startswith("no native frames: ptrace: Operation not permitted; see ptrace_")
    assert lines[1:] == ["['<module>']"]


@pytest.mark.root
@pytest.mark.skipif(not hanging_fuse.can_mount(), reason="needs root and /dev/fuse")
def test_thread_that_waits_for_file_system_is_not_stopped(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    text = """
        with open(sys.argv[1], "rb", buffering=0) as file:
            up()
            file.read(10)
    """
    with contextlib.ExitStack() as stack, hanging_fuse.mounted(tmp_path / "mount") as file:
        process = stack.enter_context(child(tmp_path, text, str(file)))
        wait_until(lambda: "request_wait" in kernel.state(process.pid), TIMEOUT)
        before = kernel.state(process.pid)
        assert not native_stack(process).answered
        assert kernel.state(process.pid) == before, "ptrace makes it wait in state D"


# -- ELF files -------------------------------------------------------------------------------------

LIBC = Path(
    next(
        line.split()[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libc.so" in line or "/libc-" in line
    )
)


def test_symbols_and_rules_of_c_library_are_found() -> None:
    image = Image(LIBC.read_bytes())
    libc = ctypes.CDLL(None)
    addresses = {
        name: ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        for name in ("sem_wait", "qsort")
    }
    # The file may be mapped a second time, as data.
    mapped = next(
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(LIBC)) and "r-xp" in line
    )
    first = int(mapped[0].split("-")[0], 16) - int(mapped[2], 16)
    for name, address in addresses.items():
        assert address is not None
        at = address - first + 1
        assert image.names([at]) == {at: name}
        rules = image.rules(at)
        assert rules is not None
        assert rules.begin == at - 1
        assert rules.return_register == 16


PROGRAM = Path("/usr/bin/true").read_bytes()
RULES = int(
    next(
        line.split()[1]
        for line in subprocess.check_output(
            ["readelf", "-lW", "/usr/bin/true"], text=True
        ).splitlines()
        if "GNU_EH_FRAME" in line
    ),
    16,
)


@given(
    st.dictionaries(
        st.integers(0, 1000) | st.integers(RULES, RULES + 1000), st.integers(0, 255), max_size=40
    ),
    st.integers(0, len(PROGRAM)),
    st.binary(max_size=200),
)
def test_malformed_elf_file_gives_addresses_or_nothing(
    changes: dict[int, int], at: int, stack: bytes
) -> None:
    data = bytearray(PROGRAM)
    for place, byte in changes.items():
        data[place] = byte
    library = native_frames._Library(bytes(data))
    library.names({at})
    image = library.image
    if image is not None:
        registers = {number: at + number for number in range(17)}
        copy = thread_copies.ThreadCopy(registers, stack)
        assert unwinding.addresses(copy, lambda _: (image, 0))[:1] == [at + 16]
