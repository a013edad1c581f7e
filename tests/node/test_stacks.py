"""Stacks of running processes: offer, request, kernel state, py-spy."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hanging_fuse
import pytest
from hooked import hooked_path
from procs import wait_until

from clusterjob.node.job_processes import NodeProcesses, RankProcess
from clusterjob.node.stacks import collect
from clusterjob.node.stacks.grouping import RankStack
from clusterjob.node.stacks.offer import FILES, SIGNAL, SIGNAL_FOR_PYTHON

FILE = FILES[signal.SIGURG]
TIMEOUT = 20.0

HAS_PY_SPY = shutil.which("py-spy", path=f"{sys.prefix}/bin") is not None


@pytest.fixture(autouse=True)
def path_without_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


@contextlib.contextmanager
def child(
    directory: Path, text: str, *arguments: str, interpreter: str = sys.executable
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, and wait until it has created the file ``up``."""
    path = directory / "child.py"
    path.write_text(
        "import functools, os, pathlib, signal, subprocess, sys, threading, time\n"
        "from clusterjob.node.stacks.offer import SIGNAL, offer\n"
        # No Python function, which could still be on the stack.
        f"up = functools.partial(os.mknod, 'up')\n{textwrap.dedent(text)}"
    )
    with running([interpreter, "-S", str(path), *arguments], directory) as process:
        yield process


@contextlib.contextmanager
def running(
    argv: list[str], directory: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a directory, and wait for the file ``up``."""
    process = subprocess.Popen(argv, cwd=directory, env=environment)
    try:
        wait_until(lambda: (directory / "up").exists() or process.poll() is not None, TIMEOUT)
        yield process
    finally:
        process.kill()
        process.wait()


def node_of(process: subprocess.Popen[bytes]) -> NodeProcesses:
    return NodeProcesses((RankProcess(0, process.pid, {}),))


def stack_of(process: subprocess.Popen[bytes], timeout: float = TIMEOUT) -> RankStack:
    (stack,) = collect.collect(node_of(process), 0, timeout)
    return stack


def functions(stack: RankStack, thread: int = 0) -> list[str]:
    return [frame.function for frame in stack.threads[thread].frames]


# -- one process -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "up(); time.sleep(1000)",  # this program never calls offer()
        "offer(); signal.signal(SIGNAL, signal.SIG_DFL); up(); time.sleep(1000)",
        "offer(); signal.signal(signal.SIGWINCH, lambda *_: os._exit(9)); up(); time.sleep(1000)",
        "signal.signal(SIGNAL, lambda *_: os._exit(9)); offer(); up(); time.sleep(1000)",
        "offer(); signal.signal(SIGNAL, lambda *_: os._exit(9)); up(); time.sleep(1000)",
        "offer(); os.execvp('sh', ['sh', '-c', 'touch up; exec sleep 1000'])",
        "offer(); os.closerange(3, 100); own = open('own', 'w'); up(); time.sleep(1000)",
        f"offer(); os.closerange(3, 100); own = open('{FILE}', 'w'); up(); time.sleep(1000)",
    ],
)
def test_process_without_stack_handler_is_not_signalled(tmp_path: Path, text: str) -> None:
    with child(tmp_path, text) as process:
        assert not collect.offers(process.pid)
        stack = stack_of(process)
        assert not stack.answered
        assert stack.threads == ()
        assert stack.state.startswith(("sleeps", "runs"))
        assert process.poll() is None
        for name in ("own", FILE):
            assert not (tmp_path / name).exists() or not (tmp_path / name).read_text()


def test_process_answers_repeatedly_and_continues_to_sleep(tmp_path: Path) -> None:
    text = """
        def größe():
            up()
            begin = time.monotonic()
            time.sleep(3)
            sys.exit(0 if time.monotonic() - begin >= 3 else 3)
        offer()
        größe()
    """
    with child(tmp_path, text) as process:
        for _ in range(20):
            stack = stack_of(process)
            assert stack.answered
            assert functions(stack) == ["größe", "<module>"]
            assert stack.threads[0].frames[0].file.endswith("child.py")
        assert process.wait(TIMEOUT) == 0


def test_all_threads_answer_and_main_thread_is_first(tmp_path: Path) -> None:
    text = """
        begun = threading.Semaphore(0)
        def first():
            begun.release()
            threading.Event().wait()
        def second():
            begun.release()
            time.sleep(1000)
        offer()
        threading.Thread(target=first, name="loader").start()
        threading.Thread(target=second).start()
        for _ in range(2): begun.acquire()
        up()
        while True: pass
    """
    with child(tmp_path, text) as process:
        stack = stack_of(process)
        assert stack.threads[0].name == "MainThread"
        assert functions(stack) == ["<module>"]
        found = {thread.name: functions(stack, n) for n, thread in enumerate(stack.threads)}
        assert "first" in found["loader"]
        assert "second" in next(found[name] for name in found if name.startswith("Thread-"))


def test_state_describes_sleeping_stopped_and_ended_process(tmp_path: Path) -> None:
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        wait_until(lambda: collect.state_of(process.pid).startswith("sleeps"), TIMEOUT)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: collect.state_of(process.pid).startswith("is stopped"), TIMEOUT)
        begin = time.monotonic()
        stack = stack_of(process, 60)
        assert time.monotonic() - begin < 30
        assert not stack.answered
        assert stack.state.startswith("is stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: collect.state_of(process.pid).startswith("sleeps"), TIMEOUT)
        assert functions(stack_of(process)) == ["<module>"]
    assert collect.state_of(process.pid) == "has ended"


def test_main_thread_that_blocks_the_signals_has_no_answer_after_a_second(tmp_path: Path) -> None:
    text = """
        offer()
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL, signal.SIGWINCH})
        up()
        time.sleep(1000)
    """
    with child(tmp_path, text) as process:
        begin = time.monotonic()
        stack = stack_of(process)
        assert time.monotonic() - begin < TIMEOUT / 2
        assert (stack.answered, stack.threads) == (False, ())
        assert stack.state.startswith("sleeps")


def test_python_below_shell_answers_for_its_rank(tmp_path: Path) -> None:
    text = """
        if sys.argv[1:] == ["below"]:
            offer(); up(); time.sleep(1000)
        subprocess.run(["sh", "-c", f"{sys.executable} -S child.py below; true"])
    """
    with child(tmp_path, text) as process:
        try:
            stack = stack_of(process)
            assert functions(stack) == ["<module>"]
            assert stack.pid != process.pid
        finally:
            os.kill(stack.pid, signal.SIGKILL)


def test_requests_at_same_time_wait_for_each_other(tmp_path: Path) -> None:
    text = """
        offer()
        for _ in range(5): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        up()
        time.sleep(1000)
    """
    with child(tmp_path, text) as process:
        found: list[RankStack] = []

        def ask() -> None:
            for _ in range(20):
                found.append(stack_of(process))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 80
        assert all(functions(stack) == ["<module>"] for stack in found)
        assert {len(stack.threads) for stack in found} == {6}


@pytest.mark.root
@pytest.mark.skipif(not hanging_fuse.can_mount(), reason="needs root and /dev/fuse")
def test_read_of_hanging_file_system_is_not_interrupted(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    text = """
        offer()
        with open(sys.argv[1], "rb", buffering=0) as file:
            up()
            file.read(10)
    """
    # The server ends first: its end ends the read, which not even SIGKILL does.
    with contextlib.ExitStack() as stack, hanging_fuse.mounted(tmp_path / "mount") as file:
        process = stack.enter_context(child(tmp_path, text, str(file)))
        wait_until(lambda: "request_wait" in collect.state_of(process.pid), TIMEOUT)
        before = collect.state_of(process.pid)
        for native in (False, True):
            (found,) = collect.collect(node_of(process), 0, 5, native=native)
            assert not found.answered
            assert collect.state_of(process.pid) == before, "a signal makes it wait in state D"


@pytest.mark.parametrize(
    "native",
    [
        "up(); sum(range(10**9))",  # runs, with the interpreter's lock
        "lock = ctypes.CDLL(None).pthread_mutex_lock; lock(mutex); up(); lock(mutex)",
        "lock = ctypes.PyDLL(None).pthread_mutex_lock; lock(mutex); up(); lock(mutex)",
    ],
    ids=["computes", "waits", "waits with the lock"],
)
def test_main_thread_in_native_code_answers(tmp_path: Path, native: str) -> None:
    text = f"""
        import ctypes
        mutex = ctypes.create_string_buffer(64)
        def compute():
            {native}
        offer()
        compute()
    """
    with child(tmp_path, text) as process:
        for _ in range(3):
            assert functions(stack_of(process)) == ["compute", "<module>"]


def test_resized_terminal_changes_nothing(tmp_path: Path) -> None:
    text = """
        offer()
        up()
        while not os.path.exists("leave"): time.sleep(0.01)
        sys.exit(46)
    """
    with child(tmp_path, text) as process:
        for _ in range(3):
            assert functions(stack_of(process)) == ["<module>"]
            process.send_signal(signal.SIGWINCH)
        (tmp_path / "leave").touch()
        assert process.wait(TIMEOUT) == 46


# -- a worker is never ended -----------------------------------------------------------------------

BUSY = """
    import atexit
    def recurse(count): return recurse(count - 1) if count else 1
    def generate(count):
        if count: yield from generate(count - 1)
        yield count
    def work():
        while True:
            recurse(300)
            list(generate(30))
            space = {}
            exec(compile("def f(n):\\n return n and f(n - 1)\\n", "<text>", "exec"), space)
            space["f"](200)
    def fork():
        while True:
            pid = os.fork()
            if not pid: os._exit(0)
            os.waitpid(pid, 0)
    def start_threads():
        while True:
            thread = threading.Thread(target=recurse, args=(100,))
            thread.start()
            thread.join()
    offer()
    for each in (work, work, work, work, fork, start_threads):
        threading.Thread(target=each, daemon=True).start()
    up()
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end:
        recurse(50)
        time.sleep(0.0005)
    os._exit(42)
"""


def interpreters() -> list[str]:
    """Return this interpreter, and others of this machine."""
    others = Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python")
    known = [str(path) for path in sorted(others) if int(path.parts[-3].split(".")[1]) >= 8]
    return [sys.executable, *known]


@pytest.mark.parametrize(
    ("interpreter", "seconds", "least"),
    [
        (sys.executable, "4", 20),
        *(pytest.param(each, "20", 500, marks=pytest.mark.slow) for each in interpreters()),
    ],
)
def test_busy_worker_survives_thousands_of_signals(
    tmp_path: Path, interpreter: str, seconds: str, least: int
) -> None:
    shutil.copy(Path(collect.__file__).parent / "offer.py", tmp_path / "own_offer.py")
    path = tmp_path / "busy.py"
    path.write_text(
        "import os, pathlib, sys, threading, time\nfrom own_offer import offer\n"
        f"up = pathlib.Path('up').touch\n{textwrap.dedent(BUSY)}"
    )
    signals = 0
    with running([interpreter, "-W", "ignore", str(path), seconds], tmp_path) as process:
        offers = collect.offers(process.pid)
        while process.poll() is None:
            signals += len(stack_of(process, 5).threads)
        assert process.returncode == 42
    assert offers == (Path(interpreter).parts[-3] != "3.13.0")
    assert signals > least or not offers


def test_process_that_executes_programs_meanwhile_survives_requests(tmp_path: Path) -> None:
    text = """
        offer()
        count = int(sys.argv[1])
        if count == 0: up()
        if count < 20: os.execv(sys.executable, [sys.executable, "-S", __file__, str(count + 1)])
        sys.exit(43)
    """
    with child(tmp_path, text, "0") as process:
        while process.poll() is None:
            request = collect.ask(process.pid)
            for _ in range(20):
                next(request, None)
            request.close()
        assert process.returncode == 43


@pytest.mark.parametrize("number", [SIGNAL, SIGNAL_FOR_PYTHON])
def test_request_at_the_very_end_does_not_crash_the_process(tmp_path: Path, number: int) -> None:
    # The C library calls raise(number) after the interpreter has ended.
    text = f"""
        import ctypes
        offer(); up()
        library = ctypes.CDLL(None)
        library.__cxa_atexit(getattr(library, "raise"), {number}, None)
    """
    with child(tmp_path, text) as process:
        assert process.wait(TIMEOUT) == 0


def test_workers_that_end_meanwhile_are_no_error(tmp_path: Path) -> None:
    text = "offer(); up(); time.sleep(float(sys.argv[1]))"
    for delay in (0.0, 0.01, 0.02, 0.05):
        (tmp_path / "up").unlink(missing_ok=True)
        with child(tmp_path, text, str(delay)) as process:
            while process.poll() is None:
                collect.collect(node_of(process), 0, 5)
            assert process.returncode == 0
            assert collect.collect(node_of(process), 0, 5) == []


def test_requests_leave_no_descriptor_and_no_memory_in_the_worker(tmp_path: Path) -> None:
    text = """
        offer()
        up()
        while True:
            for number in range(1000): str(number)
    """

    def used() -> tuple[int, int]:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
        return len(os.listdir(f"/proc/{process.pid}/fd")), pages * 4096

    with child(tmp_path, text) as process:
        assert all(stack_of(process).answered for _ in range(20))
        before = used()
        assert all(stack_of(process).answered for _ in range(100))
        after = used()
    assert after[0] == before[0]
    assert after[1] < before[1] + 2_000_000


# -- the hook --------------------------------------------------------------------------------------

WAIT = "import os, time; os.mknod('up'); time.sleep(1000)"


@contextlib.contextmanager
def hooked(
    directory: Path, text: str, interpreter: str = sys.executable, **environ: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program with the hook of a job, and wait for the file ``up``."""
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "PYTHONPATH")},
        "PYTHONPATH": hooked_path(directory),
        **environ,
    }
    with running([interpreter, "-c", text], directory, environment) as process:
        yield process


def test_hook_offers_stacks_of_ranks_alone(tmp_path: Path) -> None:
    for name, environ in (("a", {"RANK": "0"}), ("b", {}), ("c", {"CLUSTERJOB_TASK_RANK": "0"})):
        (tmp_path / name).mkdir()
        with hooked(tmp_path / name, WAIT, **environ) as process:
            assert functions(stack_of(process, 5)) == ["<module>"] if "RANK" in environ else True
            assert collect.offers(process.pid) == ("RANK" in environ)


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.7", "3.8", "3.9", "3.10", "3.12", "3.13"])
def test_hook_offers_stacks_in_other_python_versions(tmp_path: Path, version: str) -> None:
    found = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no Python {version}; pyenv install {version}")
    text = "import time; open('up', 'w'); time.sleep(1000)"
    with hooked(tmp_path, text, str(found[0]), RANK="0") as process:
        assert process.poll() is None
        exact = found[0].parts[-3]
        assert collect.offers(process.pid) == (version not in ("2.7", "3.6") and exact != "3.13.0")


# -- py-spy ----------------------------------------------------------------------------------------

py_spy_installed = pytest.mark.skipif(not HAS_PY_SPY, reason="needs py-spy; pip install py-spy")


@pytest.fixture
def with_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:/usr/bin:/bin")


@py_spy_installed
@pytest.mark.usefixtures("with_py_spy")
def test_py_spy_reads_process_without_offer_and_stopped_process(tmp_path: Path) -> None:
    text = """
        def inner():
            up()
            time.sleep(1000)
        if sys.argv[1:]: offer()
        inner()
    """
    for arguments in ((), ("offer",)):
        (tmp_path / "up").unlink(missing_ok=True)
        with child(tmp_path, text, *arguments) as process:
            if arguments:
                process.send_signal(signal.SIGSTOP)
                wait_until(
                    lambda p=process: collect.state_of(p.pid).startswith("is stopped"), TIMEOUT
                )
            stack = stack_of(process)
            assert functions(stack) == ["inner", "<module>"]


# -- native frames ---------------------------------------------------------------------------------


def native_stack(process: subprocess.Popen[bytes]) -> tuple[RankStack, list[str]]:
    lines: list[str] = []
    (stack,) = collect.collect(node_of(process), 0, TIMEOUT, native=True, warn=lines.append)
    return stack, lines


@py_spy_installed
@pytest.mark.usefixtures("with_py_spy")
def test_native_frames_of_py_spy_are_above_python_frames(tmp_path: Path) -> None:
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        stack, lines = native_stack(process)
        if lines:  # ptrace is not permitted here
            assert lines[0].startswith("no native frames: py-spy failed; see ptrace_scope")
        else:
            assert any("nanosleep" in name for name in functions(stack))
        assert functions(stack)[-1:] == ["<module>"]


def test_native_frames_without_py_spy_are_one_line_and_python_stacks_are_shown(
    tmp_path: Path,
) -> None:
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        stack, lines = native_stack(process)
        assert functions(stack) == ["<module>"]
        assert lines == ["no native frames: py-spy is not installed; pip install py-spy"]


@py_spy_installed
@pytest.mark.usefixtures("with_py_spy")
def test_stopped_process_remains_stopped_when_native_frames_are_wanted(tmp_path: Path) -> None:
    with child(tmp_path, "offer(); up(); time.sleep(1000)") as process:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: collect.state_of(process.pid).startswith("is stopped"), TIMEOUT)
        stack, lines = native_stack(process)
        assert functions(stack) == ["<module>"]
        assert lines == ["no native frames of a process that is stopped or waits for a file system"]
        assert collect.state_of(process.pid).startswith("is stopped")
