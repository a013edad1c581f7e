"""Job records on disk: what was submitted, where, its handle and its end. One small file a job, written whole or not at all."""

from __future__ import annotations

import bisect
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from clusterjob.errors import JobNotFound, RecordError
from clusterjob.node import files
from clusterjob.node.processes import ProcessIdentity

SCHEMA = 1
_SEPARATOR = "_"  # between an array's id and an element's index; no id that we make holds one


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
        array: for an array, ``indices`` (of its elements) and ``pieces`` (the offset of each part that was submitted).
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        fields = {name: data.get(name) for name in cls.__dataclass_fields__}
        if not all(isinstance(data[name], str) for name in ("job_id", "name", "cluster", "backend", "job_dir", "submitted_at")):
            raise TypeError("a field that is a text is none")
        fields["job_dir"] = Path(data["job_dir"])
        fields["handle"] = Handle(**data["handle"]) if data.get("handle") else None
        fields["submitter"] = ProcessIdentity(**data["submitter"]) if data.get("submitter") else None
        return cls(**fields)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain data, with its schema number."""
        return {"schema": SCHEMA, **asdict(self), "job_dir": str(self.job_dir)}

    @property
    def whole_id(self) -> str:
        """The job's id; for an element that of its array."""
        return self.job_id if self.index is None else self.job_id.rpartition(_SEPARATOR)[0]

    def element(self, index: int) -> Record:
        """Return one element of this array as a job of its own: it has its own directory, state and logs."""
        assert self.array is not None
        return replace(
            self, job_id=f"{self.job_id}{_SEPARATOR}{index}", job_dir=self.job_dir / "elements" / str(index), array=None, index=index,
            handle=self._element_handle(index),
        )  # fmt: skip

    def _element_handle(self, index: int) -> Handle | None:
        if self.handle is None or self.array is None:
            return None
        piece = bisect.bisect_right(self.array["pieces"], index) - 1
        ids = self.handle.data["ids"]
        if piece >= len(ids):  # of which nobody knows (yet) whether it was taken
            return None
        return replace(self.handle, id=f"{ids[piece]}_{index - self.array['pieces'][piece]}")


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where records and local jobs lie: CLUSTERJOB_HOME, else the user's state directory."""
    if environ.get("CLUSTERJOB_HOME"):
        return Path(environ["CLUSTERJOB_HOME"]).expanduser().absolute()
    import platformdirs

    return platformdirs.user_state_path("clusterjob")


class Records:
    """The records of one user.

    Args:
        directory: where they lie; made when the first is written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or home() / "records"

    def save(self, record: Record) -> None:
        """Write a record.

        Raises:
            RecordError: it cannot be written; what was there before is untouched.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            files.write_json(self._path(record.job_id), record.to_json())
        except OSError as error:
            raise RecordError(f"the record {self._path(record.job_id)} cannot be written: {error.strerror}") from error

    def with_handle(self, record: Record, handle: Handle) -> Record:
        """Note where the job is and return the new record."""
        record = replace(record, handle=handle)
        self.save(record)
        return record

    def with_end(self, record: Record, end: Mapping[str, Any]) -> Record:
        """Note how the job ended and return the new record; a disk that is full costs the note alone.

        A record that somebody else has changed or removed since it was read is left as it is.
        """
        now = self._read(record.whole_id)
        if now is not None and record.index is None and now.handle != record.handle:
            return now
        record = replace(record, end=end)
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
        """Return the elements of an array; of any other job the job itself. What is known of their ends comes with them."""
        if record.array is None:
            return [record]
        noted = {name for name in self._names() if name.startswith(record.job_id + _SEPARATOR)}
        found = []
        for index in record.array["indices"]:
            name = f"{record.job_id}{_SEPARATOR}{index}"
            found.append((self._read(name) if name in noted else None) or record.element(index))
        return found

    def find(self, text: str) -> Record:
        """Return the job of this id, or of the one id that begins so; ``ID_7`` is an element of the array ID.

        Raises:
            JobNotFound: there is none, or more than one.
        """
        names = [name for name in self._names() if _SEPARATOR not in name]
        whole, separator, index = text.rpartition(_SEPARATOR)
        if separator and index.isascii() and index.isdigit():
            array = self.find(whole)
            if array.array is None or int(index) not in array.array["indices"]:
                raise JobNotFound(f"job {array.job_id} has no element {index}", f"`clusterjob status {array.job_id}` shows what it has")
            return self._read(f"{array.job_id}{_SEPARATOR}{int(index)}") or array.element(int(index))
        matches = [text] if text in names else [name for name in names if text and name.startswith(text)]
        if len(matches) == 1:
            record = self._read(matches[0])
            if record is not None:
                return record
        if len(matches) > 1:
            raise JobNotFound(f"{text!r} is the beginning of {len(matches)} jobs", f"it could be {', '.join(sorted(matches)[:5])}")
        import difflib

        near = difflib.get_close_matches(text, names, 1)
        raise JobNotFound(f"there is no job {text!r}", f"did you mean {near[0]}?" if near else "`clusterjob list` shows them all")

    def all(self) -> list[Record]:
        """Return every record, the oldest first; an array is one."""
        names = [name for name in self._names() if _SEPARATOR not in name]
        found = [record for name in names if (record := self._read(name)) is not None]
        return sorted(found, key=lambda record: (record.submitted_at, record.job_id))

    def _names(self) -> list[str]:
        try:
            return [path.stem for path in self._directory.iterdir() if path.suffix == ".json" and not path.name.startswith(".")]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"the records in {self._directory} cannot be read: {error.strerror}") from error

    def _read(self, name: str) -> Record | None:
        try:
            data = files.read_json(self._path(name))
        except OSError as error:
            raise RecordError(f"the record {self._path(name)} cannot be read: {error.strerror}") from error
        try:
            return Record.from_json(data) if isinstance(data, dict) and data.get("schema") == SCHEMA else None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None  # not a record of ours, whatever its name

    def _path(self, job_id: str) -> Path:
        return self._directory / f"{job_id}.json"
