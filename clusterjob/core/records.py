"""Job records on disk: what was submitted, where, its handle and its end. One small file a job,
written whole or not at all.
"""

from __future__ import annotations

import bisect
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from clusterjob.errors import AmbiguousId, JobNotFound, RecordError
from clusterjob.node.system import files, private_dirs
from clusterjob.node.system.processes import ProcessIdentity
from clusterjob.node.verdict import Verdict

SCHEMA = 1
_SUFFIX = ".json"
_CORRECTED_WITHIN = 86400.0  # seconds after which the end on record is not asked for again
SEPARATOR = "_"  # between an array's id and an element's index; no id that we make holds one


@dataclass(frozen=True)
class Handle:
    """How another process, on another day, can ask for a job, follow it and cancel it.

    Attributes:
        backend: who has the job.
        id: the job's name there: a Slurm job id; our own id where the backend has none.
        data: what else the backend needs, plain JSON.
    """

    backend: str
    id: str
    data: Mapping[str, Any]


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("job_id", "name", "cluster", "backend", "job_dir", "submitted_at"), str),
    "nodes": int,
    "spec": dict,
    **dict.fromkeys(("handle", "submitter", "end", "array"), (dict, type(None))),
    "index": (int, type(None)),
}


@dataclass(frozen=True)
class Record:
    """What is known of a job on the submitting side.

    Attributes:
        job_id: the job's id.
        name: the name that the user gave it.
        cluster: the profile that it was submitted to.
        backend: who carries it out.
        job_dir: where its files lie.
        nodes: number of nodes.
        submitted_at: RFC 3339, UTC.
        spec: the job as it was asked for.
        handle: None while it is being submitted, and for ever if the submitter died in that.
        submitter: the process that submits it, so that others can tell the two.
        end: the verdict as plain data once it is known, so that it outlives the job's directory.
        provisional: whether the end is a guess, as hosts that know it were not reached: a later
            answer corrects it.
        array: for an array, ``indices`` (of its elements) and ``pieces`` (the offset of each part
            that was submitted).
        index: for one element of an array, which.
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
    array: Mapping[str, Any] | None = None
    index: int | None = None
    provisional: bool = False

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Return the record that `to_json` wrote.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"it is no record of schema {SCHEMA}")
        fields: dict[str, Any] = {name: data.get(name) for name in cls.__dataclass_fields__}
        for name, kind in _KINDS.items():
            if not isinstance(fields[name], kind) or isinstance(fields[name], bool):
                raise ValueError(f"{name} is {type(fields[name]).__name__}")  # noqa: TRY004 - one exception for all that is wrong
        fields["job_dir"] = Path(data["job_dir"])
        try:
            fields["handle"] = Handle(**data["handle"]) if data.get("handle") else None
            fields["submitter"] = (
                ProcessIdentity(**data["submitter"]) if data.get("submitter") else None
            )
        except TypeError as error:
            raise ValueError(f"handle or submitter: {error}") from error
        try:
            fields["end"] = Verdict.from_json(data["end"]).to_json() if data.get("end") else None
        except ValueError:
            fields["end"] = None  # it is asked for again
        fields["provisional"] = data.get("provisional") is True
        record = cls(**fields)
        record._check()
        return record

    def _check(self) -> None:
        """Raise ValueError unless the parts of the record are what they are declared to be."""
        handle, array, submitter = self.handle, self.array, self.submitter
        well = self.nodes >= 1 and (self.index is None or self.index >= 0)
        if handle is not None:
            well &= (
                isinstance(handle.backend, str)
                and isinstance(handle.id, str)
                and isinstance(handle.data, dict)
            )
        if submitter is not None:
            well &= type(submitter.pid) is int and isinstance(submitter.host, str)
        if array is not None:
            lists = [array.get("indices"), array.get("pieces")]
            well &= all(
                isinstance(each, list)
                and each
                and all(type(item) is int and item >= 0 for item in each)
                for each in lists
            )
        if not well:
            raise ValueError("a field has a value that no job has")

    @property
    def may_be_corrected(self) -> bool:
        """Whether the end on record is a guess of late, so that the hosts are worth asking again."""
        if not self.provisional or self.end is None:
            return False
        try:
            ended = datetime.fromisoformat(str(self.end.get("ended_at")).replace("Z", "+00:00"))
            return (datetime.now(timezone.utc) - ended).total_seconds() < _CORRECTED_WITHIN
        except (TypeError, ValueError):
            return False

    @property
    def verdict(self) -> Verdict | None:
        """How the job ended, if that is on record."""
        return None if self.end is None else Verdict.from_json(self.end)

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data, with its schema number."""
        return {"schema": SCHEMA, **asdict(self), "job_dir": str(self.job_dir)}

    @property
    def whole_id(self) -> str:
        """The job's id; for an element that of its array."""
        return self.job_id if self.index is None else self.job_id.rpartition(SEPARATOR)[0]

    def element(self, index: int) -> Record:
        """Return one element of this array as a job of its own: it has its own directory, state and
        logs.
        """
        assert self.array is not None
        return replace(
            self, job_id=f"{self.job_id}{SEPARATOR}{index}",
            job_dir=self.job_dir / "elements" / str(index), array=None, index=index,
            handle=self._element_handle(index),
        )  # fmt: skip

    def _element_handle(self, index: int) -> Handle | None:
        if self.handle is None or self.array is None:
            return None
        piece = bisect.bisect_right(self.array["pieces"], index) - 1
        ids = self.handle.data.get("ids")
        if not isinstance(ids, list) or piece >= len(
            ids
        ):  # of which nobody knows (yet) whether it was taken
            return None
        return replace(self.handle, id=f"{ids[piece]}_{index - self.array['pieces'][piece]}")


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where records and local jobs lie: CLUSTERJOB_HOME, else the user's state directory."""
    if environ.get("CLUSTERJOB_HOME"):
        return Path(environ["CLUSTERJOB_HOME"]).expanduser().absolute()
    import platformdirs

    return platformdirs.user_state_path("clusterjob")


def secure_home() -> None:
    """Make the directories of jobs and records, and see that nobody else can write to them.

    Raises:
        RecordError: they cannot be made, or somebody else could change what jobs run.
    """
    place = home()
    own = (place / "jobs", place / "records")
    try:
        for folder in own:
            private_dirs.make(folder)
        for folder in own if os.environ.get("CLUSTERJOB_HOME") else (*own, place):
            _close(folder)
        for folder in (*own, place):
            if why := private_dirs.danger(folder):
                raise RecordError(
                    f"{folder} is not safe for jobs: {why}",
                    f"chmod go-w {folder}; or CLUSTERJOB_HOME names another place",
                )
        for folder in place.resolve().parents:
            status = folder.stat()
            who = f"uid {status.st_uid} owns" if status.st_uid not in (os.geteuid(), 0) else ""
            if status.st_mode & 0o002 and not status.st_mode & stat.S_ISVTX:
                who = "everyone can write to"
            if who:
                why = f"{who} {folder}, and could put another directory in its place"
                raise RecordError(
                    f"{place} is not safe for jobs: {why}", "CLUSTERJOB_HOME names another place"
                )
    except OSError as error:
        raise RecordError(
            f"{error.filename} cannot be written: {error.strerror}",
            "CLUSTERJOB_HOME names another place",
        ) from error


def _close(folder: Path) -> None:
    """Take from others the right to write in a directory that was made here under a generous umask."""
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & 0o022:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~0o022)


class Records:
    """The records of one user.

    Args:
        directory: where they lie; made when the first is written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or home() / "records"

    def save(self, record: Record) -> None:
        """Write a record.

        Raises:
            RecordError: it cannot be written; what was there before is untouched.
        """
        try:
            private_dirs.make(self.directory)
            files.write_json(self._path(record.job_id), record.to_json())
        except OSError as error:
            raise RecordError(
                f"the record {self._path(record.job_id)} cannot be written: {error.strerror}"
            ) from error

    def with_handle(self, record: Record, handle: Handle) -> Record:
        """Note where the job is and return the new record."""
        record = replace(record, handle=handle)
        self.save(record)
        return record

    def with_end(
        self, record: Record, end: Mapping[str, Any], *, provisional: bool = False
    ) -> Record:
        """Note how the job ended and return the new record; a disk that is full costs the note
        alone.

        A record that somebody else has changed or removed since it was read is left as it is.
        """
        now = self.read(record.whole_id)
        if now is not None and record.index is None and now.handle != record.handle:
            return now
        record = replace(record, end=end, provisional=provisional)
        try:
            if now is not None:
                self.save(record)
        except RecordError:
            pass
        return record

    def remove(self, job_id: str) -> None:
        """Forget a job that never came to be."""
        try:
            self._path(job_id).unlink(missing_ok=True)
        except OSError:
            pass  # what cannot be removed could not be written either

    def elements(self, record: Record) -> list[Record]:
        """Return the elements of an array; of any other job the job itself. What is known of their
        ends comes with them.
        """
        if record.array is None:
            return [record]
        noted = {name for name in self._names() if name.startswith(record.job_id + SEPARATOR)}
        found = []
        for index in record.array["indices"]:
            name = f"{record.job_id}{SEPARATOR}{index}"
            found.append((self.read(name) if name in noted else None) or record.element(index))
        return found

    def find(self, text: str) -> Record:
        """Return the job of this id, or of the one id that begins so; ``ID_7`` is an element of the
        array ID.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        names = [name for name in self._names() if SEPARATOR not in name]
        whole, separator, index = text.rpartition(SEPARATOR)
        if separator and index.isascii() and index.isdigit():
            array = self.find(whole)
            if array.array is None or int(index) not in array.array["indices"]:
                raise JobNotFound(
                    f"job {array.job_id} has no element {index}",
                    f"`clusterjob status {array.job_id}` shows what it has",
                )
            return self.read(f"{array.job_id}{SEPARATOR}{int(index)}") or array.element(int(index))
        matches = (
            [text] if text in names else [name for name in names if text and name.startswith(text)]
        )
        if len(matches) == 1:
            return self._load(matches[0])
        if len(matches) > 1:
            found = [record for name in matches if (record := self.read(name)) is not None]
            found.sort(key=lambda record: (record.submitted_at, record.job_id), reverse=True)
            raise AmbiguousId(text, [record.job_id for record in found] or sorted(matches))
        import difflib

        near = difflib.get_close_matches(text, names, 1)
        raise JobNotFound(
            f"there is no job {text!r}",
            f"did you mean {near[0]}?" if near else "`clusterjob list` shows them all",
        )

    def all(self) -> list[Record]:
        """Return every record, the oldest first; an array is one. A file that is none, or cannot be
        read, is left out.
        """
        names = [name for name in self._names() if SEPARATOR not in name]
        found = [record for name in names if (record := self.read(name)) is not None]
        return sorted(found, key=lambda record: (record.submitted_at, record.job_id))

    def entries(self) -> list[os.DirEntry[str]]:
        """Return the files of the records, an element's of an array included.

        Raises:
            RecordError: they cannot be listed.
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

    def _names(self) -> list[str]:
        return [entry.name.removesuffix(_SUFFIX) for entry in self.entries()]

    def read(self, name: str) -> Record | None:
        """Return the record of this name; None where there is none, or what is there is none or
        cannot be read.
        """
        try:
            return self._load(name)
        except RecordError:
            return None

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name's record, whatever is in it; a listing may be
        older.

        Raises:
            OSError: nobody can tell.
        """
        try:
            self._path(name).lstat()
        except FileNotFoundError:
            return False
        return True

    def _load(self, name: str) -> Record:
        path = self._path(name)
        try:
            record = Record.from_json(files.read_json(path))
            if record.job_id != name:
                raise ValueError("it is another job's")
        except OSError as error:
            raise RecordError(f"the record {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise RecordError(
                f"the file {path} is no record of a job: {error}",
                "remove it, if it is of no use to you",
            ) from error
        return record

    def _path(self, job_id: str) -> Path:
        return self.directory / f"{job_id}{_SUFFIX}"
