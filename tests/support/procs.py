"""Find processes and their sockets for tests, and start the agents of a job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from launching import new_folder

from clusterjob.node.logs.log_files import FILE_NAME

MARKER = "TEST_OF_CLUSTERJOB"  # not CLUSTERJOB_*: the local backend does not pass those to agents
QUICK_LEASE = ("--lease", "2")
T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float, what: str = "the condition") -> T:
    """Return the predicate's first true value; fail the test after ``timeout`` seconds."""
    end = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come about within {timeout:g} s")
        time.sleep(0.02)


# Where programs are searched for, with those of root.
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def checked_output(*argv: object, env: Mapping[str, str] = os.environ, **options: Any) -> str:
    """Run a command and return its stdout; fail the test with its output if it fails."""
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=120.0,
        env={**env, "PATH": PATH}, check=False, **options,
    )  # fmt: skip
    assert done.returncode == 0, f"{argv}: {done.stderr}{done.stdout}"
    return done.stdout


def missing_programs(*names: str) -> str:
    """Return why a test that needs these programs is skipped; empty if all are installed."""
    absent = [name for name in names if shutil.which(name, path=PATH) is None]
    return f"{', '.join(absent)} missing: `make packages` installs it" if absent else ""


# -- processes in /proc; independent of the package's own reader, which is under test --------------


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state.

    The list is empty if the process is gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie is dead."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def handles_signal(pid: int, number: int) -> bool:
    """Return whether the process has installed a handler for a signal."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def identity(pid: int) -> tuple[int, str]:
    """Return pid and start time, which a later process with the same pid does not share."""
    fields = stat_fields(pid)
    return pid, fields[19] if fields else ""


def all_pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return ""


def environ(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; empty if it is gone or of another user."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in text.split("\0"))


def below(pid: int) -> list[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for candidate in all_pids():
        fields = stat_fields(candidate)
        if fields:
            children.setdefault(int(fields[1]), []).append(candidate)
    found: list[int] = []
    unseen = [pid]
    while unseen:
        found += (more := children.get(unseen.pop(), []))
        unseen += more
    return [candidate for candidate in found if alive(candidate)]


def children(pid: int) -> list[int]:
    """Return the live children of a process in the order of their start; pids may begin again."""
    fields = {each: stat_fields(each) for each in below(pid)}
    found = [each for each in fields if fields[each][1:2] == [str(pid)]]
    return sorted(found, key=lambda each: int(fields[each][19]))


def marked(marker: str, among: Iterable[int] | None = None) -> list[int]:
    """Return all live processes with this marker in their initial environment.

    Args:
        marker: the value of `MARKER`.
        among: the processes to check (default: all of this machine).
    """
    pids = all_pids() if among is None else among
    return [pid for pid in pids if environ(pid).get(MARKER) == marker and alive(pid)]


def own_processes() -> list[int]:
    """Return the live processes that the current test has started."""
    return marked(os.environ[MARKER])


def wait_for_no_processes(timeout: float) -> float:
    """Wait until all processes that the test has started are gone; return the seconds it took.

    Fail the test after ``timeout`` seconds.
    """
    begin = time.monotonic()
    try:
        wait_until(lambda: not own_processes(), timeout)
    except AssertionError:
        left = [f"{pid} {command_line(pid)}" for pid in own_processes()]
        raise AssertionError(f"still alive after {timeout:g} s: {left}") from None
    return time.monotonic() - begin


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def listening_sockets() -> set[str]:
    """Return the addresses on which this process listens.

    Each socket is asked: the tables in /proc/net hold thousands of closed connections after a
    while, and the kernel needs milliseconds for them.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by now, as the directory itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(f"{each.getsockname()}")
    return found


# -- a job of one or several agents on this machine ------------------------------------------------

# Without site-packages, torch cannot be imported: the same code starts ten times faster.
PLAIN = (sys.executable, "-S")
WITH_TORCH = (sys.executable,)
TEST_TIMEOUT = 60.0  # seconds, for a job that is about to end; it needs much less


class Job:
    """One job: its directory, its token and its agents."""

    def __init__(self, directory: Path, nnodes: int = 1) -> None:
        self.directory = directory
        self.nnodes = nnodes
        self.id = f"test-{uuid.uuid4().hex[:12]}"
        self.token = uuid.uuid4().hex
        self.dir = new_folder(directory / "job")
        self.agents: list[subprocess.Popen[bytes]] = []
        self._outputs: dict[int, tuple[Path, Path]] = {}

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a program beside the job and return its path."""
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def path(self, name: str) -> Path:
        """Return the path of a file that workers and the test share."""
        return self.directory / name

    def start(
        self,
        node_rank: int,
        *arguments: str,
        python: tuple[str, ...] = PLAIN,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        until: Iterable[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start one node's agent; its output goes to files unless stdout or stderr is given.

        Return it when workers have created the files ``until``.
        """
        variables = {
            "CLUSTERJOB_NNODES": str(self.nnodes),
            "CLUSTERJOB_NODE_RANK": str(node_rank),
            "CLUSTERJOB_MASTER_ADDR": "127.0.0.1",
            "CLUSTERJOB_JOB_ID": self.id,
            "CLUSTERJOB_JOB_DIR": str(self.dir),
            "CLUSTERJOB_TOKEN": self.token,
        }
        number = len(self.agents)
        out, err = self.directory / f"agent{number}.out", self.directory / f"agent{number}.err"
        with out.open("wb") as out_stream, err.open("wb") as err_stream:
            agent = subprocess.Popen(
                [*python, "-m", "clusterjob.node", *arguments],
                env=os.environ | variables | (env or {}),
                stdin=stdin,
                stdout=out_stream if stdout is None else stdout,
                stderr=err_stream if stderr is None else stderr,
                cwd=self.directory,
            )
        self.agents.append(agent)
        self._outputs[agent.pid] = out, err
        self.wait_for(*until)
        return agent

    def start_all(
        self,
        *arguments: str,
        python: tuple[str, ...] = PLAIN,
        env: Mapping[str, str] | None = None,
        until: Iterable[str] = (),
    ) -> None:
        """Start the agents of all nodes; wait until workers have created the files ``until``."""
        for node_rank in range(self.nnodes):
            self.start(node_rank, *arguments, python=python, env=env)
        self.wait_for(*until)

    def run(self, *arguments: str, code: int = 0, **more: Any) -> None:
        """Run the job; fail the test unless all agents end with this exit code."""
        self.start_all(*arguments, **more)
        assert self.wait() == [code] * self.nnodes, [self.stderr(agent) for agent in self.agents]

    def wait(self, timeout: float = TEST_TIMEOUT) -> list[int]:
        """Wait for all agents; return their exit codes in start order."""
        end = time.monotonic() + timeout
        try:
            return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            errors = "\n".join(
                f"-- agent {agent.pid} (exit code {agent.poll()}):\n{self.stderr(agent)}"
                for agent in self.agents
            )
            raise AssertionError(f"the job did not end within {timeout:g} s\n{errors}") from None

    def stdout(self, agent: subprocess.Popen[bytes]) -> str:
        return self._outputs[agent.pid][0].read_text(errors="replace")

    def stderr(self, agent: subprocess.Popen[bytes]) -> str:
        return self._outputs[agent.pid][1].read_text(errors="replace")

    def forkserver_of(self, agent: subprocess.Popen[bytes]) -> int:
        """Return the pid of an agent's forkserver, the agent's only child process."""
        (forkserver,) = children(agent.pid)
        return forkserver

    def agent_of(self, node_rank: int) -> int:
        """Return the pid of a node's agent in a job with restarts: the child of its parent."""
        (agent,) = children(self.agents[node_rank].pid)
        return agent

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.dir / "result.json").read_text())

    def node_end(self, node_rank: int) -> dict[str, Any]:
        return json.loads((self.dir / "ends" / f"node{node_rank}.json").read_text())

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def log(self, node_rank: int, name: str) -> str:
        return (self.dir / "logs" / f"node{node_rank}" / name).read_text()

    def logs(self) -> list[str]:
        """Return the names of the workers' log files, node by node."""
        files = sorted((self.dir / "logs").glob("node*/*"))
        return [
            f"{path.parent.name}/{path.name}" for path in files if FILE_NAME.fullmatch(path.name)
        ]

    def wait_for(self, *names: str, timeout: float = TEST_TIMEOUT) -> None:
        """Wait until workers have created these files; fail if an agent ends before.

        An agent that the test has killed does not count.
        """

        def all_exist() -> bool:
            return all(self.path(name).exists() for name in names)

        killed = (None, -signal.SIGKILL)
        try:
            wait_until(
                lambda: all_exist() or any(agent.poll() not in killed for agent in self.agents),
                timeout,
            )
            assert all_exist()
        except AssertionError:
            errors = "\n".join(self.stderr(agent) for agent in self.agents)
            raise AssertionError(f"not all of {names} came to be\n{errors}") from None


MakeJob = Callable[..., Job]


@contextlib.contextmanager
def job_factory(directory: Path) -> Iterator[Callable[..., Job]]:
    """Yield a function that creates jobs; kill agents that outlive the test, and fail the test."""
    made: list[Job] = []

    def make(nnodes: int = 1) -> Job:
        job_directory = new_folder(directory / f"job{len(made)}")
        made.append(Job(job_directory, nnodes))
        return made[-1]

    try:
        yield make
    finally:
        running = [agent for job in made for agent in job.agents if agent.poll() is None]
        for agent in running:
            os.kill(agent.pid, signal.SIGCONT)
            agent.kill()
        for job in made:
            for agent in job.agents:
                agent.wait(10)
                for stream in (agent.stdin, agent.stdout, agent.stderr):
                    if stream is not None:
                        with contextlib.suppress(BrokenPipeError):
                            stream.close()
    assert not running, f"agents that the test left running: {[agent.args for agent in running]}"
    for job in made:
        for agent in job.agents:
            errors = job.stderr(agent)
            # Messages of asyncio and the interpreter about unhandled errors in callbacks, tasks and
            # finalizers.
            assert not re.search(
                "Exception in callback|was never retrieved|Exception ignored|never awaited"
                "|was destroyed but",
                errors,
            ), errors
