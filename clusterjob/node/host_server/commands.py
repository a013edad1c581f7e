"""A scheduler's commands, run on this host for a submitter who is elsewhere: started, and asked for
when they have ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.node.environments.slurm_commands import slurm_environment

MOST = 32 << 20  # bytes that a command may say
_LOGIN_PATIENCE = 20.0  # seconds for a login shell to start
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
    """The commands of one visit. One that is under way when the visit ends runs on: sbatch may just
    have been heard.

    Args:
        home: where all of ours lies on this host.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._running: dict[int, _Command] = {}
        self._count = 0
        self._of_login_shell: dict[str, str] | None = None

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return what is to be said to ``run``, ``reap`` and ``drop``.

        Args:
            request: for ``run``: ``argv``, ``env`` (what is added), ``job`` (in whose directory it
                runs; empty for none) and ``patience``, seconds that its end is waited for. For the
                others: ``number``.

        Returns:
            ``number`` while it runs; ``code`` and ``out``, the length of its stdout, before its
            stderr, when it has ended; ``absent``, why it cannot be run.
        """
        if request["op"] == "run":
            return self._run(request)
        number = int(request["number"])
        if request["op"] == "reap":
            return self._reap(number, float(request["patience"]))
        command = self._running.pop(number, None)
        if command is not None:
            command.process.kill()
            command.process.wait()
            command.close()
        return {}, b""

    def _run(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        argv = [os.fsencode(word) for word in request["argv"]]
        name = str(request["argv"][0])
        environ = self._environment(name)
        conf = environ.get("SLURM_CONF")
        if conf and not os.path.exists(conf):  # Slurm's commands would wait a minute for it
            return {"absent": f"Slurm's configuration {conf} is not there"}, b""
        path = shutil.which(name, path=environ.get("PATH"))
        directory = self._home / "jobs" / request["job"] if request["job"] else None
        out, err = os.memfd_create("out"), os.memfd_create("err")
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=directory,
                executable=path, env=slurm_environment(environ, name) | request["env"],
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            os.close(out)
            os.close(err)
            return {"absent": error.strerror or str(error)}, b""
        self._count += 1
        self._running[self._count] = _Command(process, name, out=out, err=err)
        return self._reap(self._count, float(request["patience"]))

    def _reap(self, number: int, patience: float) -> tuple[dict[str, Any], bytes]:
        command = self._running[number]
        end, pause = time.monotonic() + patience, _PAUSE
        while (code := command.process.poll()) is None:
            if os.fstat(command.out).st_size + os.fstat(command.err).st_size > MOST:
                command.process.kill()
                command.process.wait()
                code = -9
                os.ftruncate(command.out, 0)
                os.pwrite(
                    command.err, f"{command.name}: it says more than {MOST} bytes\n".encode(), 0
                )
                break
            if time.monotonic() >= end:
                return {"number": number}, b""
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        del self._running[number]
        try:
            out, err = (os.pread(handle, MOST, 0) for handle in (command.out, command.err))
        finally:
            command.close()
        return {"code": code, "out": len(out)}, out + err

    def _environment(self, name: str) -> dict[str, str]:
        """Return this login's environment; where the command is not on its PATH, that of a login
        shell, as modules may put it there.
        """
        if shutil.which(name) is not None:
            return dict(os.environ)
        if self._of_login_shell is None:
            self._of_login_shell = _login_shell()
        return (
            self._of_login_shell
            if shutil.which(name, path=self._of_login_shell.get("PATH"))
            else dict(os.environ)
        )


def _login_shell() -> dict[str, str]:
    script = f"printf '%s\\0' {_MARK[:-1].decode()}; exec env -0"
    try:
        asked = subprocess.run(
            ["bash", "-lc", script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, timeout=_LOGIN_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (
        os.fsdecode(entry).partition("=")
        for entry in asked.stdout.partition(_MARK)[2].split(b"\0")
        if entry
    )
    return {name: value for name, _, value in pairs}
