"""A plan: the files and commands of a job, which ``--dry-run`` prints and ``submit`` runs."""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.spec import JobSpec
from clusterjob.core.units import show_size
from clusterjob.errors import OTHER_HOME, RecordError, SubmitError
from clusterjob.node.logs.job_dir import ENDS, LOGS, SECRETS, TOKEN
from clusterjob.node.system import private_dirs
from clusterjob.node.system.files import write_atomic

if TYPE_CHECKING:
    from clusterjob.core.snapshot import Snapshot
    from clusterjob.core.snapshot.source import CodeSource

_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"  # no characters that look alike


@dataclass(frozen=True)
class PlannedFile:
    """A file to write.

    Attributes:
        path: absolute path.
        data: its content.
        mode: permission bits.
    """

    path: Path
    data: bytes
    mode: int = 0o600

    def text(self) -> str:
        """Return the content for display: text unchanged, other data as size and digest."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return f"({len(self.data)} bytes, sha256 {hashlib.sha256(self.data).hexdigest()})\n"


@dataclass(frozen=True)
class PlannedCommand:
    """A command to start.

    Attributes:
        argv: the command line.
        env: variables added to its environment.
        node_rank: rank of the node that it starts.
        host: the host to start it on over SSH; empty for this machine, or if argv names the host.
        directory: working directory on the host; a ``~`` at its beginning is the home directory on
            that host.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    node_rank: int = 0
    host: str = ""
    directory: str = ""

    def text(self) -> str:
        """Return the command as a shell command line."""
        if self.host:
            home = "~/" if self.directory.startswith("~/") else ""
            there = (
                f"cd {home}{shlex.quote(self.directory.removeprefix(home))}"
                f" && {shlex.join(self.argv)}"
            )
            return shlex.join(("ssh", self.host, there))
        return " ".join(
            [
                *(f"{name}={shlex.quote(value)}" for name, value in self.env.items()),
                shlex.join(self.argv),
            ]
        )


@dataclass(frozen=True)
class Plan:
    """The files that a submission will write and the commands that it will run.

    Attributes:
        job_id: the job's id.
        backend: name of the backend that runs it.
        job_dir: directory of its files.
        spec: the job.
        files: files to write, in this order.
        commands: commands to start, in this order, once all files are written.
        notes: messages for the user, such as a warning about too few GPUs.
        array: for an array, the data for its record.
        sends_code: whether the files of the working directory are sent too.
        code: the code of which the job runs a snapshot; None if the job runs the current files, or
            a copy on other machines.
        avoid: the hosts that jobs blamed in the last day, each with a text that says why; a
            scheduler leaves them out if there are enough others.
    """

    job_id: str
    backend: str
    job_dir: Path
    spec: JobSpec
    files: tuple[PlannedFile, ...]
    commands: tuple[PlannedCommand, ...]
    notes: tuple[str, ...] = ()
    array: Mapping[str, Any] | None = None
    sends_code: bool = False
    code: CodeSource | None = None
    avoid: Mapping[str, str] = field(default_factory=dict)

    def _code(self) -> Snapshot | None:
        """Return the current files of the code if they are sent or kept, else None."""
        from clusterjob.core import snapshot
        from clusterjob.core.snapshot import source

        if self.code is not None:
            return source.listed(self.code)
        return (
            snapshot.listed(self.spec.workdir, include_secrets=self.spec.include_secrets)
            if self.sends_code
            else None
        )

    def text(self) -> str:
        """Return the plan as text: the content of each file and each command line."""
        parts = [
            f"### {file.path} ({file.mode:04o})\n{file.text().rstrip()}\n" for file in self.files
        ]
        if self.spec.secret:
            parts.append(
                "### secrets, whose values are not shown\n"
                f"{', '.join(secret.name for secret in self.spec.secret)}\n"
            )
        if self.spec.notifies:
            places = [*map(str, self.spec.notify), *self.spec.notify_cmd]
            parts.append(
                f"### notifications on {', '.join(self.spec.notify_on)}\n"
                + "".join(f"{place}\n" for place in places)
            )
        if (code := self._code()) is not None:
            parts.append(
                f"### code: {code.files} files, {show_size(code.size)}, of {code.root}\n"
                f"{code.text()}\n"
            )
        parts.append("### commands\n" + "\n".join(command.text() for command in self.commands))
        return "\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON; data that is not text appears as its digest."""
        return {
            "job_id": self.job_id,
            "backend": self.backend,
            "job_dir": str(self.job_dir),
            "files": [
                {"path": str(file.path), "mode": f"{file.mode:04o}", "text": file.text()}
                for file in self.files
            ],
            "commands": [
                {
                    "argv": list(command.argv),
                    "env": dict(command.env),
                    "node_rank": command.node_rank,
                }
                | ({"host": command.host, "directory": command.directory} if command.host else {})
                for command in self.commands
            ],
            "code": None if (code := self._code()) is None else code.to_json(),
            "secrets": [secret.name for secret in self.spec.secret],
            "notify": [*map(str, self.spec.notify), *self.spec.notify_cmd],
            "notes": list(self.notes),
        }


def new_id(name: str) -> str:
    """Return a new job id: the letters and digits of its name, and six random characters.

    Letters of any language are kept.
    """
    import unicodedata

    # No underscore: it separates an array's id from the index of an element.
    kept = [
        letter if unicodedata.category(letter)[0] in "LMN" else "-"
        for letter in unicodedata.normalize("NFC", name).lower()
    ]
    stem = re.sub(r"-+", "-", "".join(kept)).strip("-")[:24].strip("-") or "job"
    return f"{stem}-{''.join(secrets.choice(_ALPHABET) for _ in range(6))}"


def write_files(plan: Plan, values: bytes = b"") -> None:
    """Create the job directory, private to its owner, with the planned files and a new token.

    Args:
        plan: the job.
        values: the user's secrets, as `job_secrets.packed` returns them.

    Raises:
        RecordError: a file cannot be written, such as on a full disk; the directory is removed.
    """
    try:
        private_dirs.make(plan.job_dir.parent)
        plan.job_dir.mkdir(mode=0o700)
    except OSError as error:
        raise RecordError(
            f"the job directory {plan.job_dir} cannot be made: {error.strerror}", OTHER_HOME
        ) from error
    try:
        for folder in (LOGS, ENDS):
            (plan.job_dir / folder).mkdir(mode=0o700)
        write_atomic(token_file(plan.job_dir), secrets.token_hex(32).encode())
        if values:
            write_atomic(secrets_file(plan.job_dir), values)
        for file in plan.files:
            if plan.array is not None:
                private_dirs.make(file.path.parent)  # directory of an array element
            write_atomic(file.path, file.data, mode=file.mode)
    except OSError as error:
        shutil.rmtree(plan.job_dir, ignore_errors=True)
        raise RecordError(
            f"the job directory {plan.job_dir} cannot be written: {error.strerror}", OTHER_HOME
        ) from error


@dataclass(frozen=True)
class KeptCode:
    """The code of a job in the store of snapshots.

    Attributes:
        data: the data for the job's record, `Record.code`.
        snapshot: the files.
        diff: the uncommitted changes.
    """

    data: Mapping[str, Any]
    snapshot: Snapshot
    diff: bytes = b""

    def place(self, plan: Plan, home: Path) -> None:
        """Copy the code into the job's directory, with the uncommitted changes beside it.

        Raises:
            SubmitError: the code is not kept any more, or a file cannot be written.
        """
        from clusterjob.core.snapshot import git_revision, store

        assert plan.code is not None
        store.place(home, plan.code.top.name, self.snapshot, job_dir=plan.job_dir)
        try:
            git_revision.write_diff(self.diff, plan.job_dir)
        except OSError as error:
            raise SubmitError(f"{plan.job_dir} cannot be written: {error.strerror}") from error


def keep_code(plan: Plan, home: Path) -> KeptCode | None:
    """Keep the code of a job in the store of snapshots.

    Returns:
        None if the job runs the current files, or a copy that its backend sends.

    Raises:
        SubmitError: the code is too large, or cannot be read or kept.
    """
    if plan.code is None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    from clusterjob.core import snapshot
    from clusterjob.core.snapshot import store
    from clusterjob.core.snapshot.git_revision import Git

    source = plan.code
    if source.kept is not None:
        # The file with the uncommitted changes is in the earlier job's directory.
        facts = source.kept.facts
        recorded = {k: v for k, v in (facts.get("git") or {}).items() if k != "diff"}
        earlier = snapshot.sent(source.kept.job_dir, source.top)
        if earlier is None:
            raise SubmitError("the code of the job is not kept any more")
        return KeptCode({**facts, "git": recorded or None}, earlier)
    with ThreadPoolExecutor(1) as pool, tempfile.TemporaryDirectory() as folder:
        git = Git(source.top)
        asked = pool.submit(git.state)  # git runs meanwhile
        found = store.take(home, source, git)
        state, diff = asked.result()
        whole = git.with_repository(found, Path(folder) / "git", state, shared=True)
        try:
            store.add_repository(home, whole)
        except OSError as error:
            raise SubmitError(f"{home} cannot be written: {error.strerror}") from error
    data = {
        "digest": found.digest,
        "files": found.files,
        "bytes": found.size,
        "git": state,
        "root": str(source.root),
        "top": str(source.top),
    }
    return KeptCode(data, whole, diff)


def token_file(job_dir: Path) -> Path:
    """Return the path of the job's token, with which agents authenticate."""
    return job_dir / TOKEN


def secrets_file(job_dir: Path) -> Path:
    """Return the path of the file with the values of ``--secret``."""
    return job_dir / SECRETS


def carried_elsewhere(job_dir: Path) -> list[tuple[str, int, bytes]]:
    """Return the files of the token and the secrets, for hosts that do not share this directory.

    Each file is (name, mode, content). The file of the secrets is deleted here: afterwards only
    those hosts have the secrets.
    """
    found = [(token_file(job_dir).name, 0o600, token_file(job_dir).read_bytes())]
    path = secrets_file(job_dir)
    if path.exists():
        found.append((path.name, 0o600, path.read_bytes()))
        path.unlink()
    return found
