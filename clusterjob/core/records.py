"""Store the record of each job in one small file, which is written atomically."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import socket
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterjob.core import arrays
from clusterjob.core.resources import MOST_NODES
from clusterjob.core.spec import JobSpec
from clusterjob.core.state_home import home as home  # noqa: PLC0414 - re-exported
from clusterjob.core.state_home import unchecked_home
from clusterjob.errors import OTHER_HOME, RecordError, SpecError
from clusterjob.node.logs.job_dir import ELEMENTS
from clusterjob.node.system import files, private_dirs, processes
from clusterjob.node.verdict import Verdict

FORMAT = 1  # of records and job directories; see `Record.format`
_SUFFIX = ".json"
_CORRECTED_WITHIN = 86400.0  # seconds for which the hosts of a provisional end are polled again
SEPARATOR = "_"  # between an array's id and an element's index; never part of a generated id


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process that stays unique after its pid is reused.

    Attributes:
        pid: its pid.
        ticks: its start time: on Linux in clock ticks since boot, elsewhere in seconds since the
            epoch.
        boot_id: id of the machine's boot; empty if this is not Linux.
        host: name of the machine.
    """

    pid: int
    ticks: int
    boot_id: str
    host: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return the identity of the calling process."""
        return cls(os.getpid(), _start(os.getpid()) or 0, processes.boot_id(), socket.gethostname())

    def alive(self) -> bool:
        """Return whether the process runs.

        It returns False for a process of another host or another boot, which cannot be checked from
        this machine.
        """
        return (
            self.host == socket.gethostname()
            and self.boot_id == processes.boot_id()
            and _start(self.pid) == self.ticks != 0
        )


def _start(pid: int) -> int | None:
    """Return the start time of a process as in `ProcessIdentity`; None if it has ended."""
    if sys.platform != "linux":
        return _shown_start(pid)
    return processes.start_ticks(pid)


def _shown_start(pid: int) -> int | None:
    import subprocess  # slow to load, and Linux does not need it

    try:
        shown = subprocess.run(
            ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
            capture_output=True,
            env=os.environ | {"LC_ALL": "C"},
            text=True,
            check=False,
        ).stdout
        state, started = shown.split(maxsplit=1)
        return None if state[0] in "ZX" else int(time.mktime(time.strptime(started.strip())))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Handle:
    """The data with which a later process polls, follows and cancels a job.

    Attributes:
        backend: name of the job's backend.
        id: the job's id in the backend, such as a Slurm job id; clusterjob's id if the backend has
            none.
        data: other data that the backend needs, plain JSON.
    """

    backend: str
    id: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """The data of a job on the submitting side.

    Attributes:
        job_id: the job's id.
        name: the job's name.
        cluster: the profile that it was submitted to.
        backend: name of the backend that runs it.
        job_dir: directory of its files.
        nodes: number of nodes.
        submitted_at: time of the submit, RFC 3339, UTC.
        spec: the job spec as plain data.
        handle: the job's handle; None until the backend has accepted the job.
        submitter: the process that submits it; other processes check whether this process runs.
        end: the verdict as plain data; None if it is not known yet.
        provisional: whether `end` is a guess, because the hosts with the real end were not reached;
            a later poll corrects it.
        array: for an array, ``indices`` (of its elements) and ``pieces`` (the offset of each
            submitted part).
        index: for an element of an array, its index.
        code: the submitted code: ``digest``, ``files``, ``bytes``, ``git`` (revision, branch,
            changed files) and, on a shared disk, ``root`` and ``top``; None if it is not known.
        format: the format number of the clusterjob that wrote it. A job of another format is
            listed, its logs are shown and it can be cancelled; see `Records.find`.
    """

    job_id: str
    name: str
    cluster: str
    backend: str
    job_dir: Path
    nodes: int
    submitted_at: str
    spec: Mapping[str, Any]
    handle: Handle | None = None
    submitter: ProcessIdentity | None = None
    end: Mapping[str, Any] | None = None
    array: Mapping[str, Sequence[int]] | None = None
    index: int | None = None
    provisional: bool = False
    code: Mapping[str, Any] | None = None
    format: int = FORMAT

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Return the record from the data that `to_json` returned.

        Raises:
            ValueError: the data is not a valid record.
        """
        import msgspec

        data = msgspec.convert(data, dict[str, Any])
        try:
            end = Verdict.from_json(data["end"]).to_json() if data.get("end") else None
        except ValueError:
            end = None  # a later poll finds the end again
        checked = {**data, "end": end, "provisional": data.get("provisional") is True}
        record = msgspec.convert(checked, cls, dec_hook=lambda _, text: Path(text))
        array = record.array
        lists = [] if array is None else [array.get("indices"), array.get("pieces")]
        if (
            not 1 <= record.nodes <= MOST_NODES
            or (record.index or 0) < 0
            or not all(
                numbers and len(numbers) <= arrays.MOST and min(numbers) >= 0 for numbers in lists
            )
        ):
            raise ValueError("a field has an invalid value")
        return record

    @functools.cached_property
    def job(self) -> JobSpec:
        """The job as it was submitted.

        Raises:
            RecordError: the recorded job is damaged.
        """
        try:
            return JobSpec.from_json(self.spec)
        except ValueError as error:
            raise RecordError(f"the record of {self.job_id} is damaged: {error}") from error

    @property
    def may_be_corrected(self) -> bool:
        """Whether the end is provisional and recent, so that the hosts are polled again."""
        if not self.provisional or self.end is None:
            return False
        try:
            ended = datetime.fromisoformat(str(self.end.get("ended_at")).replace("Z", "+00:00"))
            return (datetime.now(timezone.utc) - ended).total_seconds() < _CORRECTED_WITHIN
        except (TypeError, ValueError):
            return False

    @property
    def values(self) -> dict[str, str]:
        """The values of an element of a sweep, by name; empty for any other job."""
        sweep = self.spec.get("sweep")
        if self.index is None or not sweep:
            return {}
        try:
            return dict(_sweep_values(tuple(sweep))[self.index])
        except (SpecError, IndexError, TypeError):  # the record is damaged
            return {}

    @property
    def values_text(self) -> str:
        """The values as lr=0.1 seed=3."""
        return " ".join(f"{name}={value}" for name, value in self.values.items())

    @property
    def verdict(self) -> Verdict | None:
        """The recorded verdict of the job; None if there is none."""
        return None if self.end is None else Verdict.from_json(self.end)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data."""
        return {**asdict(self), "job_dir": str(self.job_dir)}

    @property
    def whole_id(self) -> str:
        """The job's id; for an element of an array, the array's id."""
        return self.job_id if self.index is None else self.job_id.rpartition(SEPARATOR)[0]

    @property
    def whole_dir(self) -> Path:
        """The job's directory; for an element of an array, the array's directory."""
        return self.job_dir if self.index is None else self.job_dir.parent.parent

    @property
    def directory_name(self) -> str:
        """The name of the job's directory inside the directory of all jobs."""
        return self.job_id if self.index is None else f"{self.whole_id}/elements/{self.index}"

    def element(self, index: int) -> Record:
        """Return one element of this array as a job with its own directory, state and logs."""
        assert self.array is not None
        return replace(
            self,
            job_id=f"{self.job_id}{SEPARATOR}{index}",
            job_dir=self.job_dir / ELEMENTS / str(index),
            array=None,
            index=index,
            handle=self._element_handle(index),
        )

    def _element_handle(self, index: int) -> Handle | None:
        if self.handle is None or self.array is None:
            return None
        piece = bisect.bisect_right(self.array["pieces"], index) - 1
        ids = self.handle.data.get("ids")
        # Without an id, the cluster has not (yet) confirmed this part of the array.
        if not isinstance(ids, list) or piece >= len(ids):
            return None
        return replace(self.handle, id=f"{ids[piece]}_{index - self.array['pieces'][piece]}")


@functools.lru_cache(maxsize=8)
def _sweep_values(sweep: tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    found = arrays.parse("", sweep)
    return found.values if found else ()


def secure_home() -> None:
    """Create the directories of jobs and records; check that no other user can write to them.

    Raises:
        RecordError: a directory cannot be created, or another user could change the files of jobs.
    """
    place = unchecked_home()
    own = (place / "jobs", place / "records")
    try:
        for folder in own:
            private_dirs.make(folder)
        for folder in own if os.environ.get("CLUSTERJOB_HOME") else (*own, place):
            status = folder.stat()
            if status.st_uid == os.geteuid() and status.st_mode & 0o022:
                # Under a permissive umask, the group or all users got write permission: remove it.
                folder.chmod(stat.S_IMODE(status.st_mode) & ~0o022)
    except OSError as error:
        raise RecordError(
            f"{error.filename} cannot be written: {error.strerror}", OTHER_HOME
        ) from error
    home()


class Records:
    """The records of one user.

    Args:
        directory: directory of the records; it is created when the first record is written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or home() / "records"

    def save(self, record: Record) -> None:
        """Write a record.

        Raises:
            RecordError: the record cannot be written; an older version of it is unchanged.
        """
        try:
            private_dirs.make(self.directory)
            files.write_json(self._path(record.job_id), record.to_json())
        except OSError as error:
            raise RecordError(
                f"the record {self._path(record.job_id)} cannot be written: {error.strerror}",
                OTHER_HOME,
            ) from error

    def with_handle(self, record: Record, handle: Handle) -> Record:
        """Save the job's handle and return the new record."""
        record = replace(record, handle=handle)
        self.save(record)
        return record

    def with_end(
        self, record: Record, end: Mapping[str, Any], *, provisional: bool = False
    ) -> Record:
        """Save the job's end and return the new record.

        On a full disk, the end is not saved and no error is raised. A record is not written if it
        was removed, has another format, or if another process has changed its handle.
        """
        now = self.read(record.whole_id)
        if now is not None and record.index is None and now.handle != record.handle:
            return now
        record = replace(record, end=end, provisional=provisional)
        if now is not None and now.format == FORMAT:
            with contextlib.suppress(RecordError):
                self.save(record)
        return record

    def remove(self, job_id: str) -> None:
        """Remove the record of a job that could not be submitted."""
        # If the directory is not writable, the record was not written either.
        with contextlib.suppress(OSError):
            self.delete(job_id)

    def delete(self, job_id: str) -> None:
        """Remove the record of an ended job, or of an array's element.

        Raises:
            OSError: it cannot be removed.
        """
        self._path(job_id).unlink(missing_ok=True)

    def elements(self, record: Record) -> list[Record]:
        """Return an array's elements with their recorded ends, or a list with only the job."""
        if record.array is None:
            return [record]
        noted = {name for name in self.names() if name.startswith(record.job_id + SEPARATOR)}
        found = []
        for index in record.array["indices"]:
            name = f"{record.job_id}{SEPARATOR}{index}"
            found.append((self.read(name) if name in noted else None) or record.element(index))
        return found

    def find(self, text: str, *, any_format: bool = False) -> Record:
        """Return the job that a text names; see `clusterjob.core.job_references`.

        Raises:
            JobNotFound: no job matches, or several ids begin with the text (`AmbiguousId`).
            RecordError: the record cannot be read, or another version of clusterjob has written it,
                unless `any_format`.
        """
        from clusterjob.core import job_references

        record = job_references.find(self, text)
        if record.format != FORMAT and not any_format:
            raise RecordError(
                f"another version of clusterjob has submitted job {record.job_id} (format"
                f" {record.format}, this one has {FORMAT})",
                "use that version; this one shows its status and logs, and cancels it",
            )
        return record

    def all(self) -> list[Record]:
        """Return every record, oldest first; an array is one record.

        A file that is not a record, or cannot be read, is skipped.
        """
        names = [name for name in self.names() if SEPARATOR not in name]
        found = [record for name in names if (record := self.read(name)) is not None]
        return sorted(found, key=lambda record: (record.submitted_at, record.job_id))

    def entries(self) -> list[os.DirEntry[str]]:
        """Return the files of all records, including those of array elements.

        Raises:
            RecordError: the directory cannot be listed.
        """
        try:
            with os.scandir(self.directory) as found:
                return [
                    entry
                    for entry in found
                    if entry.name.endswith(_SUFFIX) and not entry.name.startswith(".")
                ]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(
                f"the records in {self.directory} cannot be read: {error.strerror}"
            ) from error

    def names(self) -> list[str]:
        """Return the ids of all recorded jobs and array elements."""
        return [entry.name.removesuffix(_SUFFIX) for entry in self.entries()]

    def read(self, name: str) -> Record | None:
        """Return the record with this name; None if it is missing, invalid or unreadable."""
        try:
            return self.load(name)
        except RecordError:
            return None

    def has(self, name: str) -> bool:
        """Return whether the file of this record exists; an NFS directory listing may lack it.

        Raises:
            OSError: the file system returned an error other than "not found".
        """
        try:
            self._path(name).lstat()
        except FileNotFoundError:
            return False
        return True

    def load(self, name: str) -> Record:
        """Return the record with this name.

        Raises:
            RecordError: it is missing, invalid or unreadable.
        """
        path = self._path(name)
        try:
            record = Record.from_json(files.read_json(path))
            if record.job_id != name:
                raise ValueError("it belongs to another job")
        except OSError as error:
            raise RecordError(f"the record {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RecordError(
                f"the file {path} is not a job record: {error}",
                "remove it if you do not need it",
            ) from error
        return record

    def _path(self, job_id: str) -> Path:
        return self.directory / f"{job_id}{_SUFFIX}"
