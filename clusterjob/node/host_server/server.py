"""Main loop of the host server: read calls from stdin, write answers to stdout.

A call is one line of JSON: ``call``, the name of a function; ``arguments``, by name; and ``size``,
the number of bytes that follow. Its sender is the user, and runs the same version.

Scheduler commands run here too. The end of the session does not end a running command: the
controller may already have received its request, such as one of sbatch.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from clusterjob.errors import os_error_text
from clusterjob.node.environments.slurm_env import slurm_environment
from clusterjob.node.host_server import code_store, host_check, jobs
from clusterjob.node.stacks.offer import anonymous_file
from clusterjob.node.system import processes

MAX_OUTPUT = 32 << 20  # bytes of output of one command
_LOGIN_SHELL_TIMEOUT = 20.0  # seconds for a login shell to start
_MARK = "clusterjob-environment"
_TICK = 0.02  # seconds between two checks of a command
_IDLE_TIMEOUT = 600  # seconds without a call after which the session ends

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
    conf = _environment(argv[0]).get("SLURM_CONF")
    if conf and not os.path.exists(conf):  # Slurm's commands would wait a minute for it
        return {"absent": f"Slurm's configuration {conf} does not exist"}, b""
    out, err = anonymous_file("out"), anonymous_file("err")
    try:
        process = _start(
            argv,
            env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=home / "jobs" / job if job else None,
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


def supervise() -> None:
    """Run a scheduler command of `clusterjob.node.inside` on this process's streams."""
    from clusterjob.node import inside

    request = os.environ[inside.REQUEST]
    environ = slurm_environment(_environment("srun"), "srun")
    os.environ.clear()
    os.environ.update(environ, **{inside.REQUEST: request})
    inside.main()


def _start(argv: list[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    environ = _environment(argv[0])
    return subprocess.Popen(
        [os.fsencode(word) for word in argv],
        executable=shutil.which(argv[0], path=environ.get("PATH")),
        env={**slurm_environment(environ, argv[0]), **env},
        **options,
    )


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


# Functions that take clusterjob's directory on this host and the arguments of the call. They return
# a JSON object, or one and the bytes that follow it.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        host_check.check,
        jobs.put,
        jobs.reserve,
        jobs.start,
        jobs.up,
        jobs.poll,
        jobs.cancel,
        jobs.request_stop,
        jobs.remove,
        jobs.clean,
        jobs.tree,
        jobs.get,
        code_store.install,
        code_store.has_file,
        code_store.receive,
        run_command,
        reap_command,
    )
}
_WITH_BODY = ("put", "install", "receive")  # bytes follow these calls


def main(home: str, node_zip: str) -> None:
    """Answer calls until stdin ends.

    Args:
        home: clusterjob's directory on this host.
        node_zip: path of the node zip.
    """
    functions = FUNCTIONS | {"interpreter": functools.partial(host_check.interpreter, node_zip)}
    while True:
        # After a network failure stdin never ends: SIGALRM, which has no handler, ends the process.
        signal.alarm(_IDLE_TIMEOUT)
        line = sys.stdin.buffer.readline()
        signal.alarm(0)
        if not line:
            return
        received = json.loads(line)
        name, arguments = received["call"], received["arguments"]
        body = code_store.Part(sys.stdin.buffer.read, received["size"])
        if name in _WITH_BODY:
            arguments["read"] = body.read
        data = b""
        try:
            answer = functions[name](Path(home), **arguments)
            if isinstance(answer, tuple):
                answer, data = answer
        except EOFError:
            return
        except OSError as error:
            answer = {"error": os_error_text(error)}
        except Exception:
            trace = traceback.format_exc().strip().replace("\n", " | ")
            answer = {"error": f"internal error of clusterjob: {trace}"}
        while body.read(1 << 20):
            pass
        sys.stdout.buffer.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        sys.stdout.buffer.flush()
