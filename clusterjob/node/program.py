"""The workers' program: a Python script, a Python module or any command.

`run_as_main` runs a script or module in a process forked after the preload. The program sees the
same argv, ``__main__``, ``__file__``, sys.path[0], tracebacks, exit codes and atexit handlers as
under ``python train.py``: the function ends by SystemExit, and the interpreter then exits as usual.
"""

from __future__ import annotations

import builtins
import contextlib
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NoReturn

from clusterjob.errors import ClusterJobError, UsageError

# Files whose frames stand above the program's own frames in a traceback.
launcher_files = {
    __file__,
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
    "<frozen runpy>",
    runpy.__file__,
}

_MAX_SOURCE = 1 << 20  # bytes
# The targets of a script that every worker reads from its stdin, as Python does.
STDIN, _STDIN_FILE = "-", "/dev/stdin"
_MAX_STDIN = 16 << 20  # bytes of such a script
# Words of torchrun's --nproc-per-node: one worker per GPU, per core, or per GPU and without GPUs
# per core.
WORKER_WORDS = ("gpu", "cpu", "auto")
# Options of torchrun's own rendezvous, which the agents do not use.
NO_EFFECT = (
    "--rdzv-backend", "--rdzv-id", "--rdzv-conf", "--monitor-interval", "--local-addr", "--role",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The program of each worker.

    Attributes:
        kind: ``script`` (a Python file), ``module`` (as ``python -m``) or ``command`` (any
            executable).
        target: the file, the module's name, or the executable.
        args: the arguments after it, unchanged.
    """

    kind: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        """Whether the launcher's interpreter runs it, so that a worker can be forked for it."""
        return self.kind in ("script", "module")

    @property
    def on_stdin(self) -> bool:
        """Whether it is a script that every worker reads from its stdin."""
        return self.kind == "script" and self.target in (STDIN, _STDIN_FILE)

    def argv(self, python: str) -> list[str]:
        """Return the complete command line.

        Args:
            python: path of the interpreter for a script or a module.
        """
        before = {"script": [python], "module": [python, "-m"], "command": []}[self.kind]
        return [*before, self.target, *self.args]

    @property
    def file(self) -> Path:
        """The main file of a script, or of a module in the current directory."""
        if self.kind == "script":
            return Path(self.target)
        path = Path(*self.target.split("."))
        return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")

    def read_stream(self) -> tuple[Program, bytes] | None:
        """Read a script that can be read only once: standard input or a named pipe.

        Returns:
            The program with the target ``-``, and the script; None if it is another program.

        Raises:
            UsageError: the script is empty or too long.
            OSError: it cannot be read.
        """
        if not (self.on_stdin or (self.kind == "script" and Path(self.target).is_fifo())):
            return None
        # Not by its name: standard input may be a socket, as in a session of sshd.
        with open(os.dup(0) if self.on_stdin else self.target, "rb") as stream:
            text = stream.read(_MAX_STDIN + 1)
        if not 0 < len(text) <= _MAX_STDIN:
            raise UsageError(f"the script {self.target!r} is empty, or longer than 16 MiB")
        return Program("script", STDIN, args=self.args), text

    def source(self) -> bytes:
        """Return the first 1 MB of the main file; nothing if it cannot be read, or only once."""
        with contextlib.suppress(OSError, ValueError):
            if self.file.is_file():  # not a pipe
                with self.file.open("rb") as stream:
                    return stream.read(_MAX_SOURCE)
        return b""


_sources: dict[str, bytes] = {}  # what `read_ahead` has read, by path
_shadowed: list[str] = []  # loaded modules that the program's own directory has too
# Python loads these before it searches a script's directory.
_FIRST = {
    "abc", "codecs", "encodings", "genericpath", "importlib", "io", "os", "posixpath", "site",
    "stat", "sys",
}  # fmt: skip


def read_ahead(program: Program) -> None:
    """Read the program's script and its directory once for all workers that are forked next.

    Otherwise each worker reads them: all workers of a job at once, from a shared disk. A worker
    still reads what cannot be read here, and shows the error.
    """
    _sources.clear()
    directory = os.getcwd()
    if program.kind == "script":
        path = os.path.join(directory, program.target)
        directory = os.path.dirname(os.path.realpath(path))
        # A pipe can be read only once; each process has its own /dev/stdin and /proc/self.
        if os.path.isfile(path) and not path.startswith(("/dev/", "/proc/")):
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                _sources[path] = stream.read()
    with contextlib.suppress(Exception):  # an environment's own finder may raise anything
        finder: Any = pkgutil.get_importer(directory)
        finder.invalidate_caches()
        names = sys.stdlib_module_names & sys.modules.keys() - _FIRST
        specs = [(name, finder.find_spec(name)) for name in names]
        _shadowed[:] = [
            name for name, spec in specs if spec is not None and spec.loader is not None
        ]


def run_as_main(program: Program, on_failure: Callable[[str, int, str, str], None]) -> NoReturn:
    """Run a Python program as this process's ``__main__`` and end by SystemExit.

    Args:
        program: a script or a module.
        on_failure: called with one line, such as ``ValueError: boom``, the exit code, the
            `FailureKind` and the `place`, when an exception or a non-zero SystemExit leaves the
            program. This is the time of the failure: atexit handlers and other threads are waited
            for later.
    """
    sys.orig_argv = program.argv(sys.executable)
    try:
        code, module = _load_module(program) if program.kind == "module" else _load_script(program)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as request:
        if isinstance(request.code, int) and request.code & 0xFF:
            on_failure(f"sys.exit({request.code})", request.code & 0xFF, "exit_code", "")
        elif request.code is not None and not isinstance(request.code, int):
            on_failure(text_of(request.code), 1, "code", place(request))
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        exit_code = 130 if interrupted else 1
        on_failure(summary(error), exit_code, failure_kind(error), place(error))
        strip(error)
        sys.excepthook(type(error), error, error.__traceback__)
        if interrupted:
            sys.excepthook = lambda *_: None  # the exception has been shown
            raise  # the interpreter then ends by SIGINT, as usual
        sys.exit(1)
    sys.exit(0)


def strip(error: BaseException, seen: frozenset[int] | set[int] = frozenset()) -> None:
    """Remove the launcher's frames at the top of a traceback."""
    while (
        error.__traceback__ is not None
        and error.__traceback__.tb_frame.f_code.co_filename in launcher_files
    ):
        error.__traceback__ = error.__traceback__.tb_next
    for other in (error.__cause__, error.__context__):
        if other is not None and other.__traceback__ is not None and id(other) not in seen:
            strip(other, {*seen, id(other)})


def text_of(value: object) -> str:
    """Return a value as text, also if its own ``str`` fails."""
    try:
        return str(value)
    except Exception:  # the program's own class may raise anything
        return f"<{type(value).__name__}, str() failed>"


def summary(error: BaseException) -> str:
    """Return an exception as one line: ``ValueError: boom``."""
    first_line = text_of(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def place(error: BaseException) -> str:
    """Return the file and line that raised an exception, as ``train.py:12``; empty if unknown."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None or frame.tb_frame.f_code.co_filename in launcher_files:
        return ""
    return f"{os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}"


def failure_kind(error: BaseException) -> str:
    """Return the `FailureKind` of an uncaught exception."""
    if isinstance(error, ClusterJobError) and error.failure_kind:
        return error.failure_kind
    if isinstance(error, ImportError):
        return "import"
    return "oom_host" if isinstance(error, MemoryError) else "code"


def _load_script(program: Program) -> tuple[types.CodeType, types.ModuleType]:
    path = os.path.join(os.getcwd(), program.target)  # not normalized, as under `python train.py`
    sys.argv = [program.target, *program.args]
    _prepend_to_path(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    try:
        source = _sources[path] if path in _sources else loader.get_data(path)
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)
    return compile(source, path, "exec", dont_inherit=True), _fresh_main(path, loader)


def _load_module(program: Program) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = ["-m", *program.args]
    _prepend_to_path(os.getcwd())
    finder: Any = runpy  # what `python -m` calls, and pdb; it has no public name
    try:
        name, spec, code = finder._get_module_details(program.target, finder._Error)
    except finder._Error as error:
        print(f"{sys.executable}: {error}", file=sys.stderr)
        sys.exit(1)
    sys.argv[0] = spec.origin or name
    more = {"__spec__": spec, "__package__": spec.parent, "__cached__": spec.cached}
    return code, _fresh_main(spec.origin or "", spec.loader, **more)


def _fresh_main(path: str, loader: object, **more: object) -> types.ModuleType:
    module = types.ModuleType("__main__")
    known: dict[str, Any] = {"__builtins__": builtins, "__cached__": None, "__annotations__": {}}
    module.__dict__.update(known, __file__=path, __loader__=loader, **more)
    return module


def _prepend_to_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # not with python -P or PYTHONSAFEPATH
        sys.path.insert(0, directory)
        for name in [name for name in sys.modules if name.partition(".")[0] in _shadowed]:
            del sys.modules[name]
