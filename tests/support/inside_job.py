"""Run `clusterjob exec`, `shell` and `forward` against a running job."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import CLUSTERJOB, command
from procs import TEST_TIMEOUT, command_line, own_processes, wait_until
from terminals import Terminal

from clusterjob.backends import base
from clusterjob.backends.base import Status
from clusterjob.core.records import Handle, Record, Records
from clusterjob.core.resources import Resources
from clusterjob.core.spec import JobSpec
from clusterjob.errors import InsideError
from clusterjob.node.logs.events import now
from clusterjob.node.program import Program
from clusterjob.node.verdict import JobState, Verdict

# Each rank creates the file up<RANK> in its working directory, then waits for the file `leave`.
GUEST = """
    import os, pathlib, time
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.02)
"""

# Serves its working directory on a free port of loopback, and prints the port.
SERVER = (
    "import http.server as h;"
    "s = h.ThreadingHTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler);"
    "print(s.server_address[1], flush=True); s.serve_forever()"
)
LEFT = 20.0  # seconds until a killed client has left no process; it takes less than 3 s


def of_command(text: str) -> list[int]:
    """Return the test's processes whose command line contains a text."""
    return [pid for pid in own_processes() if text in command_line(pid) and pid != os.getpid()]


class ScriptedNodes:
    """A backend whose jobs have one state, and whose nodes send what `answer` returns for them.

    None is a node that cannot be reached.
    """

    capabilities: ClassVar[Sequence[Any]] = ()

    def __init__(
        self,
        state: JobState,
        answer: Callable[[int], bytes | None] = lambda _: None,
        reason: str = "",
    ) -> None:
        self.state, self.answer, self.reason = state, answer, reason

    def status(self, records: Sequence[Record]) -> dict[str, Status]:
        verdict = Verdict(self.state, 1, reason="") if self.state.final else None
        return {each.job_id: Status(self.state, self.reason, verdict) for each in records}

    def collect(self, record: Record) -> None:
        """Fetch nothing: the files are on this machine."""

    def command(
        self, record: Record, node: int, request: Mapping[str, Any], *, terminal: bool
    ) -> tuple[list[str], dict[str, str]]:
        sent = self.answer(node)
        if sent is None:
            raise InsideError(f"gpu{node}: no route to host")
        with tempfile.NamedTemporaryFile(delete=False) as stream:
            stream.write(sent)
        text = 'cat "$1"; rm "$1"; echo "clusterjob: error: the last line" >&2'
        return ["/bin/sh", "-c", text, "sh", stream.name], dict(os.environ)

    def tunnel(self, record: Record, node: int, port: int) -> list[str]:
        return []


def record_of(
    directory: Path,
    patch: pytest.MonkeyPatch,
    backend: Any,
    *,
    nodes: int = 2,
    nproc: int | None = 4,
    **more: Any,
) -> Record:
    """Save the record of a job t-1 of a backend."""
    patch.setitem(base._loaded, "fake", backend)
    spec = JobSpec(
        Program("command", "true"), resources=Resources(nodes=nodes), nproc_per_node=nproc or 1,
        nproc_is_default=nproc is None, name="t", workdir=directory,
    )  # fmt: skip
    made = Record(
        "t-1", "t", cluster="fake", backend="fake", job_dir=directory / "job", nodes=nodes,
        submitted_at=now(), spec=spec.to_json(), handle=Handle("fake", "1", {}), **more,
    )  # fmt: skip
    Records().save(made)
    return made


class Inside:
    """A running job, as the commands see it.

    Args:
        job_id: its id.
        directory: the directory in which the commands run.
    """

    def __init__(self, job_id: str, directory: Path) -> None:
        self.id = job_id
        self.directory = directory

    def popen(self, verb: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        return subprocess.Popen(
            [*CLUSTERJOB, verb, self.id, *words], cwd=self.directory, **given | options
        )

    def exec(
        self, *words: str, code: int = 0, data: bytes = b"", verb: str = "exec"
    ) -> tuple[bytes, bytes]:
        """Run a command to its end; return its stdout and stderr."""
        with self.popen(verb, *words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            out, err = process.communicate(data, TEST_TIMEOUT)
        assert process.returncode == code, (process.returncode, out[-2000:], err)
        return out, err

    def shell(self, text: str, *options: str, code: int = 0) -> str:
        """Run a line of bash inside the job; return its stdout."""
        return self.exec(*options, "--", "bash", "-c", text, code=code)[0].decode()

    def check_exec(self, where: str, answer: str) -> None:
        """Run a command beside rank 3 on node 1, whose stdout, stderr and exit code come back.

        Args:
            where: words of `echo` in bash that show the node.
            answer: their output.
        """
        text = f"echo $RANK {where}; echo wrong >&2; exit 7"
        out, err = self.exec("--rank", "3", "--", "bash", "-c", text, code=7)
        assert (out.decode(), err) == (f"3 {answer}\n", b"wrong\n")
        data = os.urandom(3_000_000)
        assert self.exec("--node", "1", "cat", data=data)[0] == data

    def check_killed_client(
        self, node: int, sleepers: Callable[[], list[int]] = lambda: of_command("sleep 7777")
    ) -> None:
        """Kill `exec`, which leaves no process on the node, not even a daemon.

        Args:
            node: the node.
            sleepers: returns the processes of ``sleep 7777`` on the node.
        """
        text = "trap '' HUP TERM; sleep 7777 & setsid sleep 7777 & sleep 7777 | cat & echo up; wait"
        with self.popen("exec", "--node", str(node), "--", "bash", "-c", text) as process:
            assert process.stdout.readline() == b"up\n"
            wait_until(lambda: len(sleepers()) >= 3, TEST_TIMEOUT, "the command's processes")
            process.kill()
            process.stdout.close()
        wait_until(lambda: not sleepers(), LEFT, "the end")

    def check_shell(self, rank: int, where: str, answer: str) -> None:
        """Use a shell beside a rank as a person does: keys, a resize, Ctrl-C and the end.

        Args:
            rank: the rank.
            where: a command that shows the node.
            answer: its output.
        """
        argv = [*CLUSTERJOB, "shell", "--rank", str(rank), self.id]
        with Terminal(argv, controlling=True, rows=33, columns=77, cwd=self.directory) as terminal:
            before = terminal.attributes
            terminal.read_until(f"({self.id} rank {rank})".encode())
            terminal.type(f"stty size; {where}\r".encode())
            terminal.read_until(f"33 77\r\n{answer}\r\n".encode())
            terminal.resize(50, 132)
            terminal.type(
                b"until [ \"$(stty size)\" = '50 132' ]; do sleep 0.05; done; echo o''k2\r"
            )
            terminal.read_until(b"ok2\r\n")
            trap = "trap 'echo cau''ght; exit' INT; echo be''gun; while :; do sleep 0.05; done"
            terminal.type(f'sh -c "{trap}"\r'.encode())
            terminal.read_until(b"begun\r\n")
            terminal.type(b"\x03")
            terminal.read_until(b"caught\r\n")
            terminal.type(b"exit 5\r")
            assert terminal.finish() == 5
            assert terminal.attributes == before

    @contextlib.contextmanager
    def served(self, node: int, python: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
        """Run `SERVER` on a node of the job with `exec`; yield that process and the port."""
        argv = ("--node", str(node), "--", python, "-c", SERVER)
        with self.popen("exec", *argv) as process:
            try:
                yield process, process.stdout.readline().decode().strip()
            finally:
                process.kill()

    @contextlib.contextmanager
    def forwarded(
        self, *words: str, **options: Any
    ) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
        """Run `forward`; yield the process and the local ports. It is killed afterwards."""
        count = sum(not word.startswith("-") and word != "1" for word in words)
        with self.popen("forward", *words, text=True, stderr=subprocess.PIPE, **options) as process:
            try:
                lines = [process.stdout.readline() for _ in range(count)]
                ports = [re.match(r"http://127\.0\.0\.1:(\d+) is", line) for line in lines]
                assert all(ports), (lines, process.poll())
                yield process, [int(port[1]) for port in ports if port]
            finally:
                process.kill()


def get(port: int, path: str) -> bytes:
    """Return the answer of an HTTP server on loopback, with its headers."""
    with socket.create_connection(("127.0.0.1", port), TEST_TIMEOUT) as sock:
        sock.sendall(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
        with sock.makefile("rb") as stream:
            return stream.read()


def get_at_once(port: int, path: str, count: int = 20) -> set[bytes]:
    """Return the different bodies of answers to requests at the same time."""
    with ThreadPoolExecutor(count) as pool:
        answers = pool.map(lambda _: get(port, path), range(count))
        return {answer.partition(b"\r\n\r\n")[2] for answer in answers}


def write_script(directory: Path, text: str = GUEST) -> str:
    (directory / "guest.py").write_text(textwrap.dedent(text))
    return "guest.py"


def submit(directory: Path, *options: str, program: Sequence[str] = (), ranks: int = 4) -> Inside:
    """Submit a job of `GUEST` and wait until its ranks are up."""
    words = program or (write_script(directory),)
    done = command(directory, "submit", *options, *words)
    job = Inside(done.stdout.split()[-1], directory)
    wait_until(
        lambda: all((directory / f"up{rank}").exists() for rank in range(ranks)), TEST_TIMEOUT
    )
    return job


@contextlib.contextmanager
def running(directory: Path, *options: str, **more: Any) -> Iterator[Inside]:
    """Submit a job with `submit`; cancel it afterwards."""
    job = submit(directory, *options, **more)
    try:
        yield job
    finally:
        command(directory, "cancel", job.id)
