"""Run Python programs in processes forked from one process that has imported their modules.

Imports take longer than most tests: torch for a script without a launcher, and our own modules and
typer for a command. Some tests of each kind still start an interpreter of their own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from launching import Run, environment, finish

SCRIPT_MODULES = ("torch.distributed.nn.functional", "torch.utils.data")
COMMAND_MODULES = (
    "clusterjob.cli",
    "clusterjob.cli.output",
    "clusterjob.cli.watch",
    "clusterjob.backends.local.backend",
    "clusterjob.backends.mlp.backend",
    "clusterjob.backends.slurm.backend",
    "clusterjob.core.jobs",
    "jinja2.sandbox",
    "platformdirs",
)


class ForkedProgram:
    """A running program, with the part of `subprocess.Popen` that the tests use."""

    def __init__(
        self, args: list[str], link: socket.socket, *, stdout: TextIO, stderr: TextIO
    ) -> None:
        self.args = args
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._link = link.makefile("r")
        link.close()
        self.pid = int(self._link.readline())
        self._output: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._link], [], [], 0)[0]:
            self._read_exit_code()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of the output at the program's end."""
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(name, stream), daemon=True)
                for name, stream in (("out", self.stdout), ("err", self.stderr))
            ]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        if self.returncode is None:
            self._read_exit_code()
        return self._output["out"], self._output["err"]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, name: str, stream: TextIO) -> None:
        with stream:
            self._output[name] = stream.read()

    def _read_exit_code(self) -> None:
        with self._link:
            self.returncode = int(self._link.readline())


class Preloaded:
    """The process that has imported modules and forks a process for each program."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def start(
        self, argv: Sequence[object], directory: Path, extra: Mapping[str, str] | None = None
    ) -> ForkedProgram:
        """Start a script with the variables of `launching.environment`."""
        return self.start_program(argv, directory, environment(directory, extra))

    def start_program(
        self, argv: Sequence[object], directory: Path, environ: Mapping[str, str]
    ) -> ForkedProgram:
        """Start a script, or ``-m`` and a module; the caller waits for its end."""
        words = [str(word) for word in argv]
        request = {"argv": words, "directory": str(directory), "environ": dict(environ)}
        link, its_link = socket.socketpair()
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        sent = [its_link.detach(), its_out, its_err]
        socket.send_fds(self._requests, [json.dumps(request).encode()], sent)
        for descriptor in sent:
            os.close(descriptor)
        return ForkedProgram(
            words,
            link,
            stdout=os.fdopen(out, errors="surrogateescape"),
            stderr=os.fdopen(err, errors="surrogateescape"),
        )

    def run(
        self,
        argv: Sequence[object],
        directory: Path,
        extra: Mapping[str, str] | None = None,
        *,
        code: int | None = None,
    ) -> Run:
        return finish(self.start(argv, directory, extra), code=code)


@contextlib.contextmanager
def preloaded_process(directory: Path, modules: Sequence[str]) -> Iterator[Preloaded]:
    """Start the process that imports modules; stop it at the end."""
    requests, its_requests = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with requests:
        with its_requests:
            process = subprocess.Popen(
                [sys.executable, __file__, str(its_requests.fileno()), *modules],
                env=environment(directory),
                pass_fds=[its_requests.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        with process:
            yield Preloaded(requests)
            requests.close()


# -- the process that has imported the modules -----------------------------------------------------


def _fork_programs(requests: socket.socket) -> list[str] | None:
    """Fork a process for each request.

    Returns:
        In a forked process, the program to run and its arguments; in this process, None at the end.
    """
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not message:
            return None
        if os.fork() == 0:
            requests.close()
            return _fork_program(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_program(request: dict[str, Any], link: int, out: int, err: int) -> list[str]:
    """Fork the program's process; report its pid and its exit code in the form of Popen."""
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(err)
        os.write(link, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(link, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(link)
    os.setsid()
    # New streams: the old ones remember whether their file could seek.
    sys.stdout = sys.__stdout__ = os.fdopen(os.dup2(out, 1), "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        os.dup2(err, 2), "w", buffering=1, errors="backslashreplace", closefd=False
    )
    os.close(out)
    os.close(err)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    return request["argv"]


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()
    program = _fork_programs(socket.socket(fileno=int(sys.argv[1])))
    if program and program[0] == "-m":
        sys.argv, sys.path[0] = program[1:], os.getcwd()
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program:
        sys.argv, sys.path[0] = program, os.path.dirname(program[0])
        runpy.run_path(program[0], run_name="__main__")
