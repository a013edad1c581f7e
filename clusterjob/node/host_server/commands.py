"""Scheduler commands that run on this host for a remote submitter.

The end of the session does not end a running command: the controller may already have received
its request, such as one of sbatch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.environments.slurm_env import slurm_environment
from clusterjob.node.host_server import requests
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import processes

MAX_OUTPUT = 32 << 20  # bytes of output of one command
_LOGIN_SHELL_TIMEOUT = 20.0  # seconds for a login shell to start
_MARK = b"clusterjob-environment\0"
_TICK = 0.05  # seconds between two checks of the size of the output


@dataclass
class _Command:
    process: subprocess.Popen[bytes]
    name: str
    out: int
    err: int

    def end(self) -> None:
        """Kill the command, if it runs, and close its files."""
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.err)


_running: dict[int, _Command] = {}  # the commands of this session, by number
_numbers = itertools.count(1)


def run(home: Path, request: requests.RunCommand) -> tuple[dict[str, Any], bytes]:
    """Start a command.

    Returns:
        ``number`` if the command still runs. ``code`` and ``out`` if it has ended: the bytes
        are its stdout and then its stderr, and ``out`` is the length of stdout. ``absent`` if
        it cannot run: the reason.
    """
    argv = [os.fsencode(word) for word in request.argv]
    name = request.argv[0]
    environ = _environment(name)
    conf = environ.get("SLURM_CONF")
    if conf and not os.path.exists(conf):  # Slurm's commands would wait a minute for it
        return {"absent": f"Slurm's configuration {conf} does not exist"}, b""
    path = shutil.which(name, path=environ.get("PATH"))
    directory = home / "jobs" / request.job if request.job else None
    out, err = anonymous_file("out"), anonymous_file("err")
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
    number = next(_numbers)
    _running[number] = _Command(process, name, out=out, err=err)
    return reap(home, requests.ReapCommand(number, wait=request.wait))


def reap(_home: Path, request: requests.ReapCommand) -> tuple[dict[str, Any], bytes]:
    """Return the output of a command if it has ended; see `run`."""
    number, command = request.number, _running[request.number]
    end = time.monotonic() + request.wait
    while (code := command.process.poll()) is None:
        if os.fstat(command.out).st_size + os.fstat(command.err).st_size > MAX_OUTPUT:
            del _running[number]
            command.end()
            why = f"{command.name}: it printed more than {MAX_OUTPUT} bytes\n"
            return {"code": -signal.SIGKILL, "out": 0}, why.encode()
        if (left := end - time.monotonic()) <= 0:
            return {"number": number}, b""
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(min(left, _TICK))
    del _running[number]
    try:
        out, err = (os.pread(handle, MAX_OUTPUT, 0) for handle in (command.out, command.err))
    finally:
        command.end()
    return {"code": code, "out": len(out)}, out + err


def drop(_home: Path, request: requests.DropCommand) -> dict[str, Any]:
    """Kill a command, if it runs."""
    command = _running.pop(request.number, None)
    if command is not None:
        command.end()
    return {}


def replace_process(request: requests.ExecCommand) -> None:
    """Execute a command in place of this process; after an error, print it and return."""
    name = request.argv[0]
    environ = _environment(name)
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


def _environment(name: str) -> dict[str, str]:
    """Return the environment for a command: a login shell's, which is asked once.

    Its profile may set SLURM_CONF, or a PATH with commands of environment modules. If only
    this session's PATH contains the command, that PATH is used.
    """
    environ = dict(_login_shell() or os.environ)
    if shutil.which(name, path=environ.get("PATH")) is None and shutil.which(name):
        environ["PATH"] = os.environ["PATH"]
    return environ


@functools.cache
def _login_shell() -> dict[str, str]:
    script = f"printf '%s\\0' {_MARK[:-1].decode()}; exec env -0"
    shown = processes.output_of(["bash", "-lc", script], os.environ, _LOGIN_SHELL_TIMEOUT)
    return processes.parse_environment(os.fsencode(shown).partition(_MARK)[2])
