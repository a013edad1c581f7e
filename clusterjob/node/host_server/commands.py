"""Scheduler commands that run on this host for a remote submitter."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.environments.slurm_commands import slurm_environment
from clusterjob.node.host_server import requests

MAX_OUTPUT = 32 << 20  # bytes of output of one command
_LOGIN_SHELL_TIMEOUT = 20.0  # seconds for a login shell to start
_MARK = b"clusterjob-environment\0"
_PAUSE, _LONGEST_PAUSE = 0.002, 0.05


@dataclass
class _Command:
    process: subprocess.Popen[bytes]
    name: str
    out: int
    err: int

    def close(self) -> None:
        os.close(self.out)
        os.close(self.err)


class Commands:
    """The commands of one session.

    The end of the session does not end a running command: the controller may already have received
    its request, such as one of sbatch.

    Args:
        home: clusterjob's directory on this host.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: dict[int, _Command] = {}
        self._count = 0
        self._of_login_shell: dict[str, str] | None = None

    def run(self, request: requests.RunCommand) -> tuple[dict[str, Any], bytes]:
        """Start a command.

        Returns:
            ``number`` if the command still runs. ``code`` and ``out`` if it has ended: the bytes
            are its stdout and then its stderr, and ``out`` is the length of stdout. ``absent`` if
            it cannot run: the reason.
        """
        argv = [os.fsencode(word) for word in request.argv]
        name = request.argv[0]
        environ = self._environment(name)
        conf = environ.get("SLURM_CONF")
        if conf and not os.path.exists(conf):  # Slurm's commands would wait a minute for it
            return {"absent": f"Slurm's configuration {conf} does not exist"}, b""
        path = shutil.which(name, path=environ.get("PATH"))
        directory = self._home / "jobs" / request.job if request.job else None
        out, err = os.memfd_create("out"), os.memfd_create("err")
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=directory,
                executable=path,
                env=slurm_environment(environ, name) | request.env,
                start_new_session=True,
            )
        except OSError as error:
            os.close(out)
            os.close(err)
            return {"absent": error.strerror or str(error)}, b""
        self._count += 1
        self._running[self._count] = _Command(process, name, out=out, err=err)
        return self._reap(self._count, request.wait)

    def reap(self, request: requests.ReapCommand) -> tuple[dict[str, Any], bytes]:
        """Return the output of a command if it has ended; see `run`."""
        return self._reap(request.number, request.wait)

    def drop(self, request: requests.DropCommand) -> dict[str, Any]:
        """Kill a command, if it runs."""
        command = self._running.pop(request.number, None)
        if command is not None:
            command.process.kill()
            command.process.wait()
            command.close()
        return {}

    def replace_process(self, request: requests.ExecCommand) -> None:
        """Execute a command in place of this process; after an error, print it and return."""
        name = request.argv[0]
        environ = self._environment(name)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
            signal.signal(number, signal.SIG_DFL)
        path = shutil.which(name, path=environ.get("PATH")) or name
        try:
            os.execve(
                path,
                [os.fsencode(word) for word in request.argv],
                slurm_environment(environ, name) | request.env,
            )
        except OSError as error:
            print(f"{name} cannot be run: {error.strerror}", file=sys.stderr, flush=True)

    def _reap(self, number: int, timeout: float) -> tuple[dict[str, Any], bytes]:
        command = self._running[number]
        end, pause = time.monotonic() + timeout, _PAUSE
        while (code := command.process.poll()) is None:
            if os.fstat(command.out).st_size + os.fstat(command.err).st_size > MAX_OUTPUT:
                command.process.kill()
                command.process.wait()
                code = -9
                os.ftruncate(command.out, 0)
                os.pwrite(
                    command.err,
                    f"{command.name}: it printed more than {MAX_OUTPUT} bytes\n".encode(),
                    0,
                )
                break
            if time.monotonic() >= end:
                return {"number": number}, b""
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        del self._running[number]
        try:
            out, err = (os.pread(handle, MAX_OUTPUT, 0) for handle in (command.out, command.err))
        finally:
            command.close()
        return {"code": code, "out": len(out)}, out + err

    def _environment(self, name: str) -> dict[str, str]:
        """Return the environment for a command: a login shell's, which is asked once.

        Its profile may set SLURM_CONF, or a PATH with commands of environment modules. If only
        this session's PATH contains the command, that PATH is used.
        """
        if self._of_login_shell is None:
            self._of_login_shell = _login_shell() or dict(os.environ)
        environ = dict(self._of_login_shell)
        if shutil.which(name, path=environ.get("PATH")) is None and shutil.which(name):
            environ["PATH"] = os.environ["PATH"]
        return environ


def _login_shell() -> dict[str, str]:
    script = f"printf '%s\\0' {_MARK[:-1].decode()}; exec env -0"
    try:
        asked = subprocess.run(
            ["bash", "-lc", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LOGIN_SHELL_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (
        os.fsdecode(entry).partition("=")
        for entry in asked.stdout.partition(_MARK)[2].split(b"\0")
        if entry
    )
    return {name: value for name, _, value in pairs}
