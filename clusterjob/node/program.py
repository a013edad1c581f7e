"""What the workers run: a Python script, a Python module or any command; and running the first two
as ``__main__``.

`run_as_main` is for a process that was forked with the interpreter already warm. What the program
sees of itself (argv, ``__main__``, ``__file__``, sys.path[0], tracebacks, exit codes, atexit) is
what ``python train.py`` shows it: the function ends by SystemExit, and the interpreter then
finishes as always.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import NoReturn

# What stands in a traceback above the program's own frames.
_LAUNCHERS_FILES = (
    __file__,
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


@dataclass(frozen=True)
class Program:
    """What each worker runs.

    Attributes:
        kind: ``script`` (a Python file), ``module`` (as ``python -m``) or ``command`` (any
            executable).
        target: the file, the module's name, or the executable.
        args: the arguments after it, untouched.
    """

    kind: str
    target: str
    args: tuple[str, ...] = ()

    @property
    def is_python(self) -> bool:
        """Whether the launcher's own interpreter runs it, so that it can be started warm."""
        return self.kind in ("script", "module")

    def argv(self, python: str) -> list[str]:
        """Return the whole command line.

        Args:
            python: path of the interpreter for a script or a module.
        """
        if self.kind == "command":
            return [self.target, *self.args]
        return [python, *(["-m"] if self.kind == "module" else []), self.target, *self.args]

    def launch_arguments(self) -> list[str]:
        """Return how the launch command line names this program: the inverse of parsing it."""
        prefix = {"script": [], "module": ["-m"], "command": ["--"]}[self.kind]
        if self.kind == "script" and self.target.startswith("-"):
            return [f"./{self.target}", *self.args]
        return [*prefix, self.target, *self.args]


def run_as_main(program: Program, on_failure: Callable[[str, int], None]) -> NoReturn:
    """Run a Python program as this process's ``__main__`` and end by SystemExit.

    Args:
        program: a script or a module.
        on_failure: told one line, such as ``ValueError: boom``, and the exit code, at the moment
            when an exception or a non-zero SystemExit leaves the program, before atexit handlers
            and other threads are waited for: the failure's true time.
    """
    failure: BaseException | None = None
    sys.orig_argv = program.argv(sys.executable)
    try:
        code, module = _load_module(program) if program.kind == "module" else _load_script(program)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as request:
        if isinstance(request.code, int) and request.code & 0xFF:
            on_failure(f"sys.exit({request.code})", request.code & 0xFF)
        elif request.code is not None and not isinstance(request.code, int):
            on_failure(_text(request.code), 1)
        raise
    except BaseException as error:
        failure = error
    if failure is None:
        sys.exit(0)
    interrupted = isinstance(failure, KeyboardInterrupt)
    on_failure(summary(failure), 130 if interrupted else 1)
    _show(failure)  # out here, where it is nobody's context
    if interrupted:
        sys.excepthook = _silent
        raise failure  # so that the interpreter ends by SIGINT, as it always does
    sys.exit(1)


def _show(error: BaseException) -> None:
    """Show an uncaught exception as the interpreter does: through the program's own hook, with the
    program's own frames.
    """
    _strip(error)
    mishap: BaseException | None = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as failed:
        mishap = failed
    if mishap is not None:
        sys.stderr.write("Error in sys.excepthook:\n")
        _strip(mishap)
        sys.__excepthook__(type(mishap), mishap, mishap.__traceback__)
        sys.stderr.write("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _strip(error: BaseException) -> None:
    """Take the launcher's frames off the top of a traceback."""
    while (
        error.__traceback__ is not None
        and error.__traceback__.tb_frame.f_code.co_filename in _LAUNCHERS_FILES
    ):
        error.__traceback__ = error.__traceback__.tb_next


def _silent(*_: object) -> None:
    """Say nothing: all was said."""


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # the program's own class may raise anything
        return f"<{type(value).__name__}, str() failed>"


def summary(error: BaseException) -> str:
    """Return an exception as one line: ``ValueError: boom``."""
    first_line = _text(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def _load_script(program: Program) -> tuple[types.CodeType, types.ModuleType]:
    path = os.path.join(
        os.getcwd(), program.target
    )  # as it was written: Python itself does not tidy it either
    sys.argv = [program.target, *program.args]
    _prepend_to_path(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        print(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}",
            file=sys.stderr,
        )
        sys.exit(2)
    return _compile(source, path), _fresh_main(path, loader)


def _compile(source: bytes, path: str) -> types.CodeType:
    try:
        return compile(source, path, "exec", dont_inherit=True)
    except ValueError as error:  # null bytes, before Python 3.11.4
        raise SyntaxError(str(error)) from None


def _load_module(program: Program) -> tuple[types.CodeType, types.ModuleType]:
    sys.argv = ["-m", *program.args]
    _prepend_to_path(os.getcwd())
    name = program.target
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the list of runpy
        _refuse(f"Error while finding module specification for {name!r} ({summary(error)})")
    if spec is None or spec.loader is None or not hasattr(spec.loader, "get_code"):
        package = (
            f"; {program.target!r} is a package and cannot be directly executed"
            if name != program.target
            else ""
        )
        _refuse(f"No module named {name}{package}")
    code = spec.loader.get_code(spec.name)
    if code is None:
        _refuse(f"No code object available for {name}")
    module = _fresh_main(spec.origin or "", spec.loader)
    module.__spec__ = spec
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    sys.argv[0] = spec.origin or name
    return code, module


def _refuse(message: str) -> NoReturn:
    print(f"{sys.executable}: {message}", file=sys.stderr)
    sys.exit(1)


def _fresh_main(path: str, loader: object) -> types.ModuleType:
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader  # type: ignore[assignment]
    module.__dict__.update(__builtins__=builtins, __cached__=None, __annotations__={})
    return module


def _prepend_to_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # python -P, PYTHONSAFEPATH
        sys.path.insert(0, directory)
