"""Processes as the tests see them: who is alive, who belongs to a test, what listens; and how the
tests start a job's agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

MARKER = "TEST_OF_CLUSTERJOB"  # not CLUSTERJOB_*: the local backend keeps those from its agents
T = TypeVar("T")
SAVER = """
    import time
    try:
        print("up", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(1)
        print("saved", flush=True)
"""


def wait_until(predicate: Callable[[], T], timeout: float, what: str = "the condition") -> T:
    """Return the predicate's first true value; fail the test when there is none in time (seconds)."""
    end = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come about within {timeout:g} s")
        time.sleep(0.02)


# -- /proc, read here once more: what the package knows of it is what is being tested -----------------------------------


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty list for a process that is
    gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie is dead."""
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in "ZX"


def heeds(pid: int, number: int) -> bool:
    """Return whether the process has a handler of its own for a signal."""
    try:
        caught = re.search(
            r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
        )
    except OSError:
        return False
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def identity(pid: int) -> tuple[int, str]:
    """Return what tells a process from a later one with the same pid."""
    fields = stat_of(pid)
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


def below(pid: int) -> list[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for candidate in all_pids():
        fields = stat_of(candidate)
        if fields:
            children.setdefault(int(fields[1]), []).append(candidate)
    found: list[int] = []
    unseen = [pid]
    while unseen:
        found += (more := children.get(unseen.pop(), []))
        unseen += more
    return [candidate for candidate in found if alive(candidate)]


def marked(marker: str, among: Iterable[int] | None = None) -> list[int]:
    """Return every live process that was started with this marker in its environment.

    Args:
        marker: the value of `MARKER`.
        among: the processes to look at; default: all of this machine.
    """
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for pid in all_pids() if among is None else among:
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0") and alive(pid):
            found.append(pid)
    return found


def own_marked() -> list[int]:
    """Return the live processes that the running test has started."""
    return marked(os.environ[MARKER])


def nothing_left(timeout: float) -> float:
    """Fail the test unless every process that it has started is gone in time; return how long that
    took (seconds).
    """
    begin = time.monotonic()
    try:
        wait_until(lambda: not own_marked(), timeout)
    except AssertionError:
        left = [f"{pid} {command_line(pid)}" for pid in own_marked()]
        raise AssertionError(f"still alive after {timeout:g} s: {left}") from None
    return time.monotonic() - begin


def kill_one_by_one(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def listening_sockets(pid: int) -> set[str]:
    """Return ``address:port`` (as the kernel writes it) of the TCP sockets on which the process
    listens.
    """
    owned = set()
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            owned.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    if not any(link.startswith("socket:") for link in owned):
        return set()  # the kernel takes milliseconds to write its tables
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in owned:
                    address, _, port = fields[1].rpartition(":")
                    found.add(f"{address}:{int(port, 16)}")
    return found


# -- a job of one or several agents on this machine ----------------------------------------------------------------------

# Without site-packages there is no torch to be found: the same code, started in a tenth of the
# time.
PLAIN = (sys.executable, "-S")
WITH_TORCH = (sys.executable,)
# torch's own: a process of a DataLoader dies of the signal that its worker outlives, and the worker
# hears of it while it ends.
_LOADER_AT_EXIT = re.compile(
    r"^\[\d+\] Exception ignored in atexit callback:.*\n(?:\[\d+\] .*\n)*?\[\d+\] RuntimeError: DataLoader worker .*\n",
    re.MULTILINE,
)
PATIENCE = 60.0  # for a job that is about to end; many times what it needs


class Job:
    """One job: its directory, its secret and the agents that were started for it."""

    def __init__(self, directory: Path, nnodes: int = 1) -> None:
        self.directory = directory
        self.nnodes = nnodes
        self.id = f"test-{uuid.uuid4().hex[:12]}"
        self.token = uuid.uuid4().hex
        self.dir = directory / "job"
        self.dir.mkdir()
        self.agents: list[subprocess.Popen[bytes]] = []
        self._outputs: dict[int, tuple[Path, Path]] = {}

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a program beside the job and return its path."""
        path = self.directory / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def path(self, name: str) -> Path:
        """Return the path of a file by which workers tell the test something."""
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
    ) -> subprocess.Popen[bytes]:
        """Start one node's agent; its output goes to files unless it is told otherwise."""
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
        return agent

    def start_all(
        self, *arguments: str, python: tuple[str, ...] = PLAIN, env: Mapping[str, str] | None = None
    ) -> None:
        for node_rank in range(self.nnodes):
            self.start(node_rank, *arguments, python=python, env=env)

    def wait(self, timeout: float = PATIENCE) -> list[int]:
        """Wait for all agents; return their exit codes in the order in which they were started."""
        end = time.monotonic() + timeout
        try:
            return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            said = "\n".join(
                f"-- agent {agent.pid} (exit code {agent.poll()}):\n{self.stderr(agent)}"
                for agent in self.agents
            )
            raise AssertionError(f"the job did not end within {timeout:g} s\n{said}") from None

    def stdout(self, agent: subprocess.Popen[bytes]) -> str:
        return self._outputs[agent.pid][0].read_text(errors="replace")

    def stderr(self, agent: subprocess.Popen[bytes]) -> str:
        return self._outputs[agent.pid][1].read_text(errors="replace")

    def starter_of(self, agent: subprocess.Popen[bytes]) -> int:
        """Return the pid of an agent's starter: its one child that is its own process group's
        leader.
        """
        children = [pid for pid in below(agent.pid) if stat_of(pid)[1:2] == [str(agent.pid)]]
        assert len(children) == 1, children
        return children[0]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.dir / "result.json").read_text())

    def end_of(self, node_rank: int) -> dict[str, Any]:
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
            f"{path.parent.name}/{path.name}"
            for path in files
            if path.name not in ("timeline", "store.log")
        ]

    def wait_for(self, *names: str, timeout: float = PATIENCE) -> None:
        """Wait until workers have made these files; an agent that ends meanwhile makes waiting
        pointless.
        """

        def there() -> bool:
            return all(self.path(name).exists() for name in names)

        try:
            wait_until(
                lambda: there() or any(agent.poll() is not None for agent in self.agents), timeout
            )
            assert there()
        except AssertionError:
            said = "\n".join(self.stderr(agent) for agent in self.agents)
            raise AssertionError(f"not all of {names} came to be\n{said}") from None


@contextlib.contextmanager
def jobs_in(directory: Path) -> Iterator[Callable[..., Job]]:
    """Give a maker of jobs; agents that outlive the test are killed one by one, and fail it."""
    made: list[Job] = []

    def make(nnodes: int = 1) -> Job:
        place = directory / f"job{len(made)}"
        place.mkdir()
        made.append(Job(place, nnodes))
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
            said = _LOADER_AT_EXIT.sub("", job.stderr(agent))
            # What asyncio and the interpreter say of a callback, a task or a finalizer that nobody
            # thought of.
            assert not re.search(
                "Exception in callback|was never retrieved|Exception ignored|never awaited|was destroyed but",
                said,
            ), said
