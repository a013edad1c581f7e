"""Scheduler commands that run on this host for a remote submitter.

The end of the session does not end a running command: the controller may already have received
its request, such as one of sbatch.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from clusterjob.node.environments.slurm_env import slurm_environment
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import processes

MAX_OUTPUT = 32 << 20  # bytes of output of one command
_LOGIN_SHELL_TIMEOUT = 20.0  # seconds for a login shell to start
_MARK = "clusterjob-environment"
_TICK = 0.02  # seconds between two checks of a command

Command = tuple["subprocess.Popen[bytes]", int, int]  # its process, and its stdout and stderr
_running: dict[int, Command] = {}  # the commands of this session, by pid


def run_command(
    home: Path, argv: list[str], env: dict[str, str], job: str, wait: float
) -> tuple[dict[str, Any], bytes]:
    """Start a command.

    Args:
        home: clusterjob's directory on this host.
        argv: the command line.
        env: variables to add.
        job: the job in whose directory it runs; empty for none.
        wait: maximum seconds to wait for its end.

    Returns:
        ``number`` if the command still runs. ``code`` and ``out`` if it has ended: the bytes
        are its stdout and then its stderr, and ``out`` is the length of stdout. ``absent`` if
        it cannot run: the reason.
    """
    environ = _environment(argv[0])
    conf = environ.get("SLURM_CONF")
    if conf and not os.path.exists(conf):  # Slurm's commands would wait a minute for it
        return {"absent": f"Slurm's configuration {conf} does not exist"}, b""
    out, err = anonymous_file("out"), anonymous_file("err")
    try:
        process = subprocess.Popen(
            [os.fsencode(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=home / "jobs" / job if job else None,
            executable=shutil.which(argv[0], path=environ.get("PATH")),
            env=slurm_environment(environ, argv[0]) | env,
            start_new_session=True,
        )
    except OSError as error:
        os.close(out)
        os.close(err)
        return {"absent": error.strerror or str(error)}, b""
    _running[process.pid] = process, out, err
    return reap_command(home, process.pid, wait)


def reap_command(
    _home: Path, number: int, wait: float, *, kill: bool = False
) -> tuple[dict[str, Any], bytes]:
    """Return the output of a command if it has ended, and kill it if asked; see `run_command`."""
    process, *outputs = _running[number]
    end = time.monotonic() + wait
    while process.poll() is None:
        if kill or sum(os.fstat(each).st_size for each in outputs) > MAX_OUTPUT:
            process.kill()
            process.wait()
        elif time.monotonic() >= end:
            return {"number": number}, b""
        else:
            time.sleep(_TICK)
    del _running[number]
    out, err = (os.pread(each, MAX_OUTPUT + 1, 0) for each in outputs)
    for each in outputs:
        os.close(each)
    if len(out) + len(err) > MAX_OUTPUT:
        out, err = b"", f"it printed more than {MAX_OUTPUT} bytes\n".encode()
    return {"code": process.returncode, "out": len(out)}, out + err


def take_over(_home: Path, argv: list[str]) -> dict[str, Any]:
    """Let a program use the streams of the session after the answer.

    Args:
        argv: a scheduler command, which replaces this process; empty for
            `clusterjob.node.inside.program`.
    """
    from clusterjob.node.inside import program

    return {"then": functools.partial(_replace_process, argv) if argv else program.main}


def _replace_process(argv: list[str]) -> None:
    """Execute a command in place of this process; after an error, print it and return."""
    environ = _environment(argv[0])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    path = shutil.which(argv[0], path=environ.get("PATH")) or argv[0]
    try:
        os.execve(path, [os.fsencode(word) for word in argv], slurm_environment(environ, argv[0]))
    except OSError as error:
        print(f"{argv[0]} cannot be run: {error.strerror}", file=sys.stderr, flush=True)


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
    script = f"printf '%s\\0' {_MARK}; exec env -0"
    shown = processes.output_of(["bash", "-lc", script], os.environ, _LOGIN_SHELL_TIMEOUT)
    return processes.parse_environment(os.fsencode(shown.partition(f"{_MARK}\0")[2]))
