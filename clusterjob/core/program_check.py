"""Check that the program of a job exists, is Python if it must be, and has no syntax error."""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from clusterjob.errors import SpecError, did_you_mean

if TYPE_CHECKING:
    from clusterjob.core.spec import JobSpec

_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def check(spec: JobSpec) -> None:
    """Check the program of a job as far as this machine can.

    Raises:
        SpecError: the program does not exist, or no node could run it.
    """
    if not spec.sync:
        return  # the program may exist only on the machines that run the job
    is_sent = bool(spec.hosts or spec.login)
    if not (is_sent and spec.earlier_code) and not spec.workdir.is_dir():
        raise SpecError(f"the working directory {str(spec.workdir)!r} does not exist")
    if spec.earlier_code:
        return  # the earlier job has checked its program
    if spec.program.kind == "script" and not spec.program.on_stdin:
        _check_script(spec.workdir, spec.program.target)
    elif spec.program.kind == "module" and not _MODULE_NAME.fullmatch(spec.program.target):
        raise SpecError(
            f"{spec.program.target!r} is not a module name",
            "write it as for python -m, such as package.train",
        )
    elif spec.program.kind == "command" and not spec.program.target:
        raise SpecError("the command is empty", "write it after --, such as -- bash train.sh")
    python = os.path.realpath(shutil.which(spec.python) or "")
    own = spec.uv or spec.env_archive is not None  # its Python may be newer
    runs_here = not (is_sent or spec.container or own)
    is_this = runs_here and python == os.path.realpath(sys.executable)
    if is_this and (wrong := syntax_error(spec)):
        raise SpecError(wrong, f"no node could run it: {spec.python} is this interpreter")


def syntax_error(spec: JobSpec) -> str:
    """Return the program's syntax error in this process's Python as one line.

    The text is empty if there is no error, or if the source is not on this machine.
    """
    if not spec.sync or spec.earlier_code or not spec.program.is_python:
        return ""
    target = spec.program.target
    if spec.program.kind == "module":
        target = f"{target.replace('.', '/')}.py"
    path = spec.workdir / target
    try:
        source = path.read_bytes() if path.is_file() else b""  # a pipe can be read only once
    except OSError:
        return ""
    is_python = target.endswith(".py") or (
        source.startswith(b"#!") and b"python" in source.partition(b"\n")[0]
    )
    return _syntax_error(source, target) if is_python else ""


def _check_script(workdir: Path, target: str) -> None:
    path = workdir / target
    if not path.exists():
        raise SpecError(
            f"the script {target!r} does not exist (in {workdir})", _nearest_script(path)
        )
    if (path / "__main__.py").is_file() or path.is_fifo():
        return
    if not path.is_file():
        raise SpecError(f"the script {target!r} is not a file (in {workdir})")
    try:
        with path.open("rb") as stream:
            first_line = stream.readline(256)
    except OSError as error:
        raise SpecError(f"the script {target!r} cannot be read: {error.strerror}") from error
    if path.suffix != ".py" and first_line.startswith(b"#!") and b"python" not in first_line:
        raise SpecError(
            f"{target!r} is not a Python script",
            f"a command goes after --: clusterjob submit -- ./{target}",
        )


@functools.lru_cache(maxsize=4)  # every copy of a spec is validated, with the same source
def _syntax_error(source: bytes, name: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the job itself will show these warnings
            compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f", line {error.lineno}" if error.lineno else ""
        line = f": {error.text.strip()[:80]}" if error.text and error.text.strip() else ""
        return f"{name}{where}: {type(error).__name__}: {error.msg}{line}"
    except (ValueError, MemoryError, RecursionError, OverflowError):
        return ""  # this is not a syntax error: the job's Python may accept the source
    return ""


def _nearest_script(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix]
    except OSError:
        return ""
    hint = "a script's path is relative to the working directory (--workdir)"
    if shutil.which(path.name):
        hint = f"a command goes after --: clusterjob submit -- {path.name}"
    return did_you_mean(path.name, names, hint)
