"""Decide which directory holds a job's code, and where the job finds the snapshot of it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from clusterjob.core import snapshot
from clusterjob.core.earlier_code import EarlierCode
from clusterjob.core.snapshot import Linked, Snapshot
from clusterjob.core.snapshot.git_revision import Git
from clusterjob.errors import SubmitError
from clusterjob.node.logs.job_dir import CODE
from clusterjob.node.program import Program

_OWN_MODULES = "clusterjob."  # modules of the node zip: Python functions as jobs
# Maximum number of entries of a repository to copy as a whole; of a larger repository, only the
# working directory is copied.
_MOST_AROUND = 20_000
NO_SNAPSHOT = "--no-snapshot runs the current files"
_SHELL = re.compile(r"(ba|da|z|k|fi)?sh")


@dataclass(frozen=True)
class CodeSource:
    """The directory with a job's code.

    Attributes:
        root: the working directory; the script's directory if the script is outside of it.
        top: top directory of the git repository around the root; else the root. Imports and paths
            that begin at ``__file__`` may leave the root, but seldom the repository.
        limit: maximum bytes of the snapshot.
        kept: the code of an earlier job, to run it again; None for a new snapshot.
    """

    root: Path
    top: Path
    limit: int
    kept: EarlierCode | None = None

    @classmethod
    def again(cls, code: EarlierCode) -> CodeSource:
        """Return the code of an earlier job."""
        return cls(Path(code.facts["root"]), Path(code.facts["top"]), 0, kept=code)

    @classmethod
    def of(cls, workdir: Path, program: Program, limit: int) -> CodeSource | None:
        """Return the code of a program; None if a snapshot would not hold it.

        That is so for clusterjob's own modules, and for the home directory and those above it,
        which hold everything.

        Args:
            workdir: the job's working directory, an absolute path.
            program: the job's program.
            limit: maximum bytes of the snapshot.
        """
        if is_own(program):
            return None
        root = Path(os.path.realpath(workdir))
        if program.kind == "script":
            script = Path(os.path.realpath(root / program.target))
            if not script.is_relative_to(root) or _holds_home(root):
                root = script.parent
        if _holds_home(root):
            return None
        return cls(root, _top(root), limit)

    @property
    def below(self) -> str:
        """The path of the root, relative to the top; empty if both are the same."""
        return "" if self.root == self.top else self.root.relative_to(self.top).as_posix()

    def directory(self, job_dir: Path) -> Path:
        """Return the root's path in the snapshot, below a job's directory."""
        return job_dir / CODE / self.below

    def program(self, program: Program, workdir: Path, job_dir: Path) -> Program:
        """Return the program with its script's path in the snapshot.

        A command comes from the snapshot if it is a file of the top directory, or if it is a shell
        and its first word that is no option is such a file.

        Args:
            program: the program, with paths relative to the working directory.
            workdir: the job's working directory.
            job_dir: the job's directory, as the nodes see it.
        """
        if program.kind == "module":
            return program
        words = [program.target, *program.args]
        index = 0
        if program.kind == "command" and _SHELL.fullmatch(os.path.basename(words[0])):
            index = next(
                (at for at, word in enumerate(words) if at and not word.startswith("-")), 0
            )
        path = Path(os.path.realpath(os.path.join(workdir, words[index])))
        named = program.kind == "script" or os.sep in words[index] or index
        if named and path.is_relative_to(self.top) and self._has_file(path):
            words[index] = str(job_dir / CODE / path.relative_to(self.top))
        return Program(program.kind, words[0], args=tuple(words[1:]))

    def _has_file(self, path: Path) -> bool:
        """Return whether a path below the top is a file of the code."""
        if self.kept is None:
            return path.is_file()
        return (self.kept.job_dir / CODE / path.relative_to(self.top)).is_file()


def is_own(program: Program) -> bool:
    """Return whether a program is a module of clusterjob, such as the one that calls functions."""
    return program.kind == "module" and program.target.startswith(_OWN_MODULES)


def listed(source: CodeSource, git: Git | None = None) -> Snapshot:
    """Return the list of a job's code; `git` asks about its top directory.

    Raises:
        SubmitError: the code is too large, or a directory cannot be read.
    """
    try:
        git = git or Git(source.top)
        found = _around(source, git) or snapshot.listed(
            source.top, linked=Linked(source.below, only=bool(source.below)), git=git
        )
        if found.size > source.limit:
            raise snapshot.too_large(source.root, found.entries, limit=source.limit)
    except SubmitError as error:
        error.hint = f"{error.hint}; {NO_SNAPSHOT}" if error.hint else NO_SNAPSHOT
        raise
    return replace(found, secrets=())  # they are links


def _around(source: CodeSource, git: Git) -> Snapshot | None:
    """Return the list of the whole repository around the code; None if it is too large."""
    if not source.below:
        return None
    try:
        found = snapshot.listed(source.top, linked=Linked(source.below), git=git)
    except SubmitError:
        return None
    return found if len(found.entries) <= _MOST_AROUND and found.size <= source.limit else None


def _top(root: Path) -> Path:
    """Return the top directory of the repository around a directory; else the directory itself.

    A repository of the home directory does not count: it holds settings, not a project.
    """
    for folder in (root, *root.parents):
        if _holds_home(folder):
            return root
        if (folder / ".git").exists():
            return folder
    return root


def _holds_home(folder: Path) -> bool:
    return Path(os.path.realpath(os.path.expanduser("~"))).is_relative_to(folder)
