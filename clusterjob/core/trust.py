"""Whether a project's configuration file is obeyed: who could have written it, and what the user
runs or has trusted.

A cloned repository may hold a configuration file. Its numbers and names are harmless. Everything
else in it executes something or sends a job elsewhere: that is obeyed for a program of the same
project, and for anything else only after ``clusterjob trust``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterjob.core.options import read_setting
from clusterjob.errors import ConfigError, Untrusted
from clusterjob.node.program import Program
from clusterjob.node.system import files, private_dirs

# Settings that execute nothing and send a job nowhere; any other needs trust, so a new one does
# until it is named here.
HARMLESS = frozenset({
    "nodes", "gpus_per_node", "nproc_per_node", "cpus_per_task", "mem", "time", "name",
    "max_restarts", "start", "launcher", "require_gpus", "gpus", "sync", "account", "partition",
    "nodelist", "exclude", "reservation", "array", "after", "requeue", "signal_before",
    "join_timeout", "heartbeat", "lease", "grace",
})  # fmt: skip
HERE = ("local", "slurm")  # backends that send nothing away from this machine and its cluster
_NAMED_FILES = ("template", "hostfile")
LARGEST_NAMED = 4_000_000  # bytes of a file that a project's file names
_SCRIPTS = (".py", ".sh")
_INTERPRETERS = re.compile(
    r"(?:python[0-9.]*|pypy[0-9.]*|bash|sh|dash|ksh|zsh|env|torchrun|accelerate|deepspeed)",
    re.ASCII,
)
_LAUNCHERS = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "deepspeed.launcher.runner",
)  # python -m
_MARKS = (".git", ".hg", ".svn")


@dataclass(frozen=True)
class Line:
    """One setting as it stands in a file.

    Attributes:
        table: such as ``[clusters.lab]``; empty at the top of the file.
        key: the setting.
        value: as TOML has it.
    """

    table: str
    key: str
    value: Any

    def text(self) -> str:
        """Return it on one line, without characters that a terminal obeys."""
        return f"{self.table} {self.key} = {json.dumps(self.value, default=str)}".lstrip()


@dataclass(frozen=True)
class Use:
    """What is about to happen with the settings.

    Attributes:
        executes: whether anything is executed or contacted at all; a dry run does neither.
        program: what a job will run.
        sources: files whose code asks for the job.
    """

    executes: bool = True
    program: Program | None = None
    sources: tuple[Path, ...] = ()


LOOK = Use(executes=False)


def why_ignored(path: Path) -> str:
    """Return why a project's file is not obeyed: another user could have written it; empty if none
    could.

    Its directory counts, and those above it up to the top of its repository.
    """
    folders = [path.parent]
    top = next(
        (
            folder
            for folder in path.parents
            if any(os.path.exists(folder / mark) for mark in _MARKS)
        ),
        None,
    )
    while top is not None and folders[-1] != top:
        folders.append(folders[-1].parent)
    try:
        if why := private_dirs.danger(path):
            return why
        for folder in folders:
            if why := private_dirs.danger(folder):
                return f"{folder}: {why}"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def lines_of(data: Mapping[str, Any]) -> list[Line]:
    """Return all lines of a file that execute something or send a job elsewhere."""
    found = (
        [Line("", "cluster", value=data["cluster"])]
        if data.get("cluster", HERE[0]) not in HERE
        else []
    )
    tables = {"[defaults]": data.get("defaults", {})} | {
        f"[clusters.{name}]": table for name, table in data.get("clusters", {}).items()
    }
    for table, values in tables.items():
        for key, value in values.items():
            if key not in HARMLESS and not (key == "backend" and value in HERE):
                found.append(Line(table, key, value=value))
    return found


def check(
    path: Path, data: Mapping[str, Any], lines: Iterable[Line], workdirs: Sequence[Path], use: Use
) -> None:
    """Refuse lines of a project's file that are about to be obeyed, unless the user runs a program
    of the project or has trusted the file.

    Args:
        path: the file.
        data: its content.
        lines: those that hold, of any kind.
        workdirs: where the program starts; where a project's file names that, where the user is
            too. A program has to be below the file from each of them, or a file could declare a
            foreign program its own.
        use: what is about to happen.

    Raises:
        Untrusted: the user has to look at the lines first.
    """
    lines = list(lines)
    if not lines or not use.executes or is_trusted(path, data):
        return
    begun = _begun(use.program, workdirs) if use.program is not None else None
    if begun is not None and all(_is_below(workdir / begun, path.parent) for workdir in workdirs):
        return
    if any(_is_below(source, path.parent) for source in use.sources):
        return
    count = "1 line of it" if len(lines) == 1 else f"{len(lines)} lines of it"
    raise Untrusted(
        f"{path} is not trusted, and this command would execute or follow {count}",
        f"`clusterjob trust {path}` shows and trusts it, if you know who wrote it",
        lines=[line.text() for line in lines],
    )


def _begun(program: Program, workdirs: Sequence[Path]) -> str | None:
    """Return what a program is begun from: a script, a module's file or directory; None if nothing
    tells.
    """
    if program.kind == "module":
        return _script_of(("-m", program.target, *program.args), workdirs)
    if program.kind == "script":
        return program.target
    if not _INTERPRETERS.fullmatch(Path(program.target).name):
        return program.target if os.sep in program.target else None
    if os.sep in program.target and not os.path.isabs(program.target):
        return program.target
    return _script_of(program.args, workdirs)


def _script_of(words: Sequence[str], workdirs: Sequence[Path]) -> str | None:
    """Return what an interpreter or a launcher runs, such as ``train.py`` in ``torchrun
    --nproc-per-node 2 train.py``; None if unclear.
    """
    before = ""
    for word in words:
        after_option, is_module = (
            before.startswith("-") and "=" not in before,
            before in ("-m", "--module"),
        )
        before = word
        if is_module:
            module = word.replace(".", os.sep)
            if any((at / module).is_dir() or (at / f"{module}.py").is_file() for at in workdirs):
                return module
            if word not in _LAUNCHERS:
                return _installed_at(word)
        elif word == "-" or re.fullmatch("-[A-Za-z]*c", word):  # the program is no file
            return None
        elif (
            word.startswith("-")
            or re.match(r"\w+=", word)
            or word == "launch"
            or _INTERPRETERS.fullmatch(Path(word).name)
        ):
            continue
        elif not after_option or word.endswith(
            _SCRIPTS
        ):  # else it is an option's value, or a script that looks like one
            return word if any((at / word).is_file() for at in workdirs) else None
    return None


def _installed_at(module: str) -> str | None:
    """Return where a module's package is installed; the module itself, as in the working directory,
    if it is nowhere.
    """
    try:
        found = importlib.util.find_spec(
            module.partition(".")[0]
        )  # without its submodule, which would import the package
    except (ImportError, ValueError):
        found = None
    if found is None:
        return module
    return (
        found.origin
        if found.has_location
        else next(iter(found.submodule_search_locations or ()), None)
    )


def _is_below(place: Path, root: Path) -> bool:
    """Return whether a path is inside a directory, as it is written or as it is."""
    return Path(os.path.abspath(place)).is_relative_to(root) or place.resolve().is_relative_to(
        root.resolve()
    )


# -- what was trusted --------------------------------------------------------------------------------------------------------


def digest(path: Path, data: Mapping[str, Any]) -> str:
    """Return what names a file's content: its settings, and the files that it names.

    Raises:
        ConfigError: one that it names is a pipe or a device, or too large.
    """
    found = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode())
    for table in (data.get("defaults", {}), *data.get("clusters", {}).values()):
        names = [*(table.get(key) for key in _NAMED_FILES), _ssh_config_of(table)]
        for name in names:
            if isinstance(name, str):
                try:
                    content = files.read_regular(
                        path.parent / Path(name).expanduser(), LARGEST_NAMED
                    )
                except (OSError, RuntimeError):
                    content = b""
                except ValueError as error:
                    raise ConfigError(f"{path} cannot be trusted: {error}") from error
                found.update(hashlib.sha256(content).digest())
    return found.hexdigest()


def _ssh_config_of(table: Mapping[str, Any]) -> str | None:
    """Return the ssh configuration that a table names, in each form that ``set`` takes."""
    try:
        named = read_setting("set", table.get("set", {}), origin="").get("ssh_config")
    except ConfigError:  # who uses the table is told
        return None
    return named if isinstance(named, str) else None


def is_trusted(path: Path, data: Mapping[str, Any]) -> bool:
    """Return whether the user has trusted a file with this very content.

    Raises:
        ConfigError: see `digest`.
    """
    known = _recorded().get(str(path.resolve()))
    return known is not None and known == digest(path, data)


def record(path: Path, data: Mapping[str, Any]) -> None:
    """Note that the user trusts a file with its content of now.

    Raises:
        ConfigError: it cannot be written, or see `digest`.
    """
    place = _place()
    try:
        private_dirs.make(place.parent)
        files.write_json(
            place,
            {"schema": 1, "trusted": {**_recorded(), str(path.resolve()): digest(path, data)}},
        )
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written: {error.strerror}",
            "XDG_CONFIG_HOME names another directory",
        ) from error


def _recorded() -> dict[str, Any]:
    place = _place()
    try:
        found = (
            {}
            if private_dirs.danger(place) or private_dirs.danger(place.parent)
            else files.read_json(place)
        )
    except OSError:
        return {}
    trusted = found.get("trusted") if isinstance(found, dict) else None
    return trusted if isinstance(trusted, dict) else {}


def _place() -> Path:
    import platformdirs

    return platformdirs.user_config_path("clusterjob") / "trusted.json"
