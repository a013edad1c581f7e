"""Run one command in the environment of a worker, on a terminal of its own or on pipes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pwd
import re
import shlex
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

from clusterjob.node.inside import streams
from clusterjob.node.inside.search import WorkerPlace
from clusterjob.node.inside.streams import STDERR, STDIN, STDOUT, Stream, Streams
from clusterjob.node.system import processes

NOT_EXECUTABLE, NOT_FOUND = 126, 127  # exit codes as of a shell, and of `docker exec`
_LEFTOVERS = 1.0  # seconds that processes left behind by the command may still write
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_END_OF_FILE = b"\x04"  # Ctrl-D
# bash refuses to set these.
_READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
_NO_SHELLS = ("", "nologin", "false")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class Command:
    """A command and the processes below it.

    Args:
        connection: the streams to the submitter.
        place: the worker whose environment it gets.
        argv: its command line; empty for a shell.
        enter: the words of `enter_container`.
        terminal: (rows, columns, TERM) of its terminal; None for pipes.
        title: the prompt of a shell.
        stdin: whether it reads the submitter's stdin.

    Attributes:
        code: its exit code; None while it runs.
    """

    def __init__(
        self,
        connection: Streams,
        place: WorkerPlace,
        *,
        argv: Sequence[str],
        enter: Sequence[str],
        terminal: tuple[int, int, str] | None,
        title: str,
        stdin: bool,
    ) -> None:
        self.code: int | None = None
        self._connection = connection
        self._terminal = terminal is not None
        self._ended_at = 0.0
        self._pid: int | None = None
        self._master: int | None = None
        self._rcfile: int | None = None
        environ = dict(place.environ)
        for name in ("COLUMNS", "LINES", "TERM"):
            environ.pop(name, None)
        if terminal is not None:
            environ["TERM"] = terminal[2] or "xterm"
        root = f"/proc/{place.pid}/root" if enter else ""
        words = list(argv) or self._shell(environ, title, root=root)
        directory = place.directory
        if enter:  # the directory may exist only in the container
            words, directory = [*enter, "--wd", "--", *words], "/"
        try:
            self._start(words, environ, directory=directory, terminal=terminal, stdin=stdin)
        except OSError as error:
            absent = error.errno in (errno.ENOENT, errno.ENOTDIR)
            self._fail(words[0], error, code=NOT_FOUND if absent else NOT_EXECUTABLE)

    def _fail(self, name: str, error: OSError, code: int) -> None:
        end = "\r\n" if self._terminal else "\n"
        text = f"clusterjob: {name}: {error.strerror or error}{end}"
        data = text.encode(errors="surrogateescape")
        self._connection.send(streams.DATA, STDERR, payload=data[: streams.MAX_PAYLOAD])
        self.code, self._ended_at = code, time.monotonic()

    def _shell(self, environ: dict[str, str], title: str, root: str) -> list[str]:
        """Return the command line of the user's shell; bash gets a prompt and the environment.

        Args:
            environ: the environment; the shell's variables are set.
            title: the prompt.
            root: the root directory of the container; empty for this one.
        """
        try:
            own = pwd.getpwuid(os.geteuid()).pw_shell
        except KeyError:  # the account is known elsewhere only
            own = environ.get("SHELL", "")
        usable = (
            path
            for path in (own, *_SHELLS)
            if os.path.basename(path) not in _NO_SHELLS and os.access(f"{root}{path}", os.X_OK)
        )
        shell = next(usable, _SHELLS[-1])
        environ["SHELL"] = shell
        environ["PS1"] = f"({title}) \\w\\$ " if shell.endswith("bash") else f"({title}) $ "
        if os.path.basename(shell) != "bash" or not hasattr(os, "memfd_create"):
            return [shell, "-i"]
        # The user's .bashrc may activate another environment: set the worker's again afterwards.
        exports = "".join(
            f"export {name}={shlex.quote(value)}\n"
            for name, value in environ.items()
            if _NAME.fullmatch(name) and name not in _READ_ONLY and name != "PS1"
        )
        text = (
            "[ -r ~/.bashrc ] && . ~/.bashrc\n"
            f"{exports}PS1={shlex.quote(f'({title}) ')}${{PS1:-'\\w\\$ '}}\nunset PROMPT_COMMAND\n"
        )
        self._rcfile = os.memfd_create("bashrc", 0)
        os.write(self._rcfile, text.encode(errors="surrogateescape"))
        os.lseek(self._rcfile, 0, os.SEEK_SET)
        return [shell, "--rcfile", f"/dev/fd/{self._rcfile}", "-i"]

    def _start(
        self,
        words: list[str],
        environ: dict[str, str],
        *,
        directory: str,
        terminal: tuple[int, int, str] | None,
        stdin: bool,
    ) -> None:
        slave = None
        if terminal is not None:
            self._master, slave = os.openpty()
            self.resize(*terminal[:2])
        end = subprocess.PIPE if slave is None else slave
        parent = os.getpid()
        ctypes.CDLL(None)  # loaded before the fork

        def prepare() -> None:
            processes.die_with_parent(parent)
            if slave is not None:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        try:
            child = subprocess.Popen(
                [os.fsencode(word) for word in words],
                bufsize=0,
                stdin=end if stdin else subprocess.DEVNULL,
                stdout=end,
                stderr=end,
                cwd=directory if os.access(directory, os.X_OK) else "/",
                env={os.fsencode(name): os.fsencode(value) for name, value in environ.items()},
                start_new_session=True,
                pass_fds=() if self._rcfile is None else (self._rcfile,),
                preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
            )
        finally:
            for each in (slave, self._rcfile):
                if each is not None:
                    os.close(each)
        self._pid = child.pid
        child.returncode = 0  # this object reaps it
        if self._master is not None:
            os.set_blocking(self._master, False)
            self._connection.add(Stream(STDOUT, source=self._master))
            self._connection.add(Stream(STDIN, sink=self._master, close_sink=self._hang_up))
        for number, pipe in ((STDOUT, child.stdout), (STDERR, child.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._connection.add(Stream(number, source=pipe.fileno(), close_source=pipe.close))
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            self._connection.add(
                Stream(STDIN, sink=child.stdin.fileno(), close_sink=child.stdin.close)
            )

    def _hang_up(self) -> None:
        if self._master is not None:
            with contextlib.suppress(OSError):
                os.write(self._master, _END_OF_FILE)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of the terminal; the kernel sends SIGWINCH."""
        if self._master is not None:
            size = struct.pack("HHHH", rows, columns, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        if self._pid is not None and self.code is None:
            processes.signal_group(self._pid, number)

    def poll(self) -> bool:
        """Return whether the command has ended and its output is complete."""
        if self.code is None:
            self._reap()
        if self.code is None:
            return False
        if not self._connection.reading:
            return True
        # Processes that the command left behind hold its output.
        if time.monotonic() - self._ended_at > _LEFTOVERS and processes.descendants(os.getpid()):
            self.stop()
        return False

    @property
    def closing(self) -> bool:
        """Whether the command has closed its output, or has ended, so that its end is near."""
        return self.code is not None or not self._connection.reading

    def stop(self) -> None:
        """End all processes of the command: SIGHUP, SIGTERM and, after the grace, SIGKILL."""
        end = time.monotonic() + _GRACE
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCONT):
            for pid in processes.descendants(os.getpid()):
                processes.send_signal(pid, number)
        while processes.descendants(os.getpid()) and time.monotonic() < end:
            self._reap()
            time.sleep(0.02)
        processes.kill_descendants()
        self._reap()

    def _reap(self) -> None:
        for pid, status in processes.ended_children():
            if pid == self._pid and self.code is None:
                self.code, _ = processes.exit_code_of(status)
                self._ended_at = time.monotonic()


def enter_container(place: WorkerPlace) -> list[str] | None:
    """Return the words that run a command in the worker's container.

    The container of an unprivileged engine has a user namespace that its owner may enter.

    Returns:
        The words; empty if the worker runs in no container; None if this user cannot enter it.
    """
    pid = place.pid if processes.start_ticks(place.pid) is not None else place.watched[0]
    if _namespace(pid, "mnt") in ("", _namespace(os.getpid(), "mnt")):
        return []
    words = ["nsenter", f"--target={pid}", "--mount"]
    if _namespace(pid, "user") != _namespace(os.getpid(), "user"):
        words += ["--user", "--preserve-credentials"]
    try:
        can = subprocess.run(
            [*words, "--", "/bin/sh", "-c", ":"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError:  # this machine has no nsenter
        return None
    return words if can.returncode == 0 else None


def _namespace(pid: int, kind: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""
