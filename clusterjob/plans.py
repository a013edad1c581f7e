"""A job as files and commands, pure data: exactly what ``--dry-run`` prints and what ``submit`` carries out."""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.errors import RecordError
from clusterjob.spec import JobSpec

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no letter that is read as another


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written.

    Attributes:
        path: where, absolute.
        data: its content.
        mode: permission bits.
    """

    path: Path
    data: bytes
    mode: int = 0o600

    def text(self) -> str:
        """Return the content as it is to be shown: text as it is, anything else by its size and digest."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return f"({len(self.data)} bytes, sha256 {hashlib.sha256(self.data).hexdigest()})\n"


@dataclass(frozen=True)
class PlannedCommand:
    """A command to be started.

    Attributes:
        argv: the command line.
        env: variables added to its environment.
        node_rank: the node that it starts.
        host: where it is started over SSH; empty for here, or where argv says so itself.
        directory: where it is started there; a ``~`` at its beginning is the home directory there.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    node_rank: int = 0
    host: str = ""
    directory: str = ""

    def text(self) -> str:
        """Return the command as a shell would take it."""
        if self.host:
            home = "~/" if self.directory.startswith("~/") else ""
            there = f"cd {home}{shlex.quote(self.directory.removeprefix(home))} && {shlex.join(self.argv)}"
            return shlex.join(("ssh", self.host, there))
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class Plan:
    """What submitting a job will do.

    Attributes:
        job_id: the job's id.
        backend: who carries it out.
        job_dir: where its files lie.
        spec: what was asked for.
        files: to be written, in this order.
        commands: to be started, in this order, once all files are there.
        notes: lines that the user should see, such as that there are too few GPUs.
        array: for an array, what its record holds of it.
    """

    job_id: str
    backend: str
    job_dir: Path
    spec: JobSpec
    files: tuple[PlannedFile, ...]
    commands: tuple[PlannedCommand, ...]
    notes: tuple[str, ...] = ()
    array: Mapping[str, Any] | None = None

    def text(self) -> str:
        """Return the plan for people: each file whole, each command as a shell would take it."""
        parts = [f"### {file.path} ({file.mode:04o})\n{file.text().rstrip()}\n" for file in self.files]
        parts.append("### commands\n" + "\n".join(command.text() for command in self.commands))
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data; what is not text appears by its digest."""
        return {
            "job_id": self.job_id,
            "backend": self.backend,
            "job_dir": str(self.job_dir),
            "files": [{"path": str(file.path), "mode": f"{file.mode:04o}", "text": file.text()} for file in self.files],
            "commands": [
                {"argv": list(command.argv), "env": dict(command.env), "node_rank": command.node_rank}
                | ({"host": command.host, "directory": command.directory} if command.host else {})
                for command in self.commands
            ],
            "notes": list(self.notes),
        }


def new_id(name: str) -> str:
    """Return an id for a job: its name as far as a file name can carry it, and six random characters."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24].strip("-") or "job"
    return f"{stem}-{''.join(secrets.choice(_ALPHABET) for _ in range(6))}"


def write_files(plan: Plan) -> None:
    """Make the job's directory, readable by its owner alone, with the planned files and a fresh token.

    Raises:
        RecordError: it cannot be written, or the disk is full; nothing is left of it.
    """
    try:
        plan.job_dir.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise RecordError(f"the job directory {plan.job_dir} cannot be made: {error.strerror}", _where()) from error
    from clusterjob.node.files import write_atomic

    try:
        for folder in ("logs", "ends"):
            (plan.job_dir / folder).mkdir(mode=0o700)
        write_atomic(token_file(plan.job_dir), secrets.token_hex(32).encode())
        for file in plan.files:
            if plan.array is not None:
                file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # of an element
            write_atomic(file.path, file.data, file.mode)
    except OSError as error:
        shutil.rmtree(plan.job_dir, ignore_errors=True)
        raise RecordError(f"the job directory {plan.job_dir} cannot be written: {error.strerror}", _where()) from error


def token_file(job_dir: Path) -> Path:
    """Return where the job's secret lies."""
    return job_dir / "token"


def _where() -> str:
    return "CLUSTERJOB_HOME names another place for jobs"
