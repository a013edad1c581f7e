"""Results from a host: only what has changed, never over what is newer here, and nowhere but below the directory that was named.

A host is believed in what its files hold, not in where they are to be written.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from clusterjob.errors import ClusterJobError, HostError
from clusterjob.ssh.session import Session

_BATCH = 4 << 20  # bytes asked for at a time; `clusterjob.node.visit.carry` answers with no more
_SLOW = 300.0  # seconds for digests of large files


@dataclass
class Fetched:
    """What came of fetching from one host.

    Attributes:
        host: as it was written.
        written: paths that were written, relative to the target.
        unchanged: how many files were here already.
        kept: paths that are newer here, and were left as they are.
        passed_over: paths that were not taken, with why.
    """

    host: str
    written: list[str] = field(default_factory=list)
    unchanged: int = 0
    kept: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _File:
    path: str
    mode: int
    size: int
    mtime: int


class Fetch:
    """Fetching from one host.

    Args:
        session: with the host.
        job_id: the job.
        workdir: its working directory there: relative to the job's directory, or absolute.
        target: where to.
        may_replace: asked whether files that are newer here may be replaced: all of them, or none.
    """

    def __init__(self, session: Session, job_id: str, workdir: str, target: Path, may_replace: Callable[[list[str]], bool]) -> None:
        self._session = session
        self._label = session.connection.target.label
        self._where: dict[str, Any] = {"job": job_id, "workdir": workdir}
        self._target = target
        self._may_replace = may_replace

    def run(self, paths: Sequence[str]) -> Fetched:
        """Fetch what lies at paths of the working directory.

        Raises:
            HostError: the host does not answer, or there is nothing at one of the paths.
            ClusterJobError: it cannot be written here.
        """
        answer, _ = self._session.ask("tree", paths=list(paths), timeout=_SLOW, **self._where)
        if answer["absent"]:
            raise HostError(self._label, f"there is no {', '.join(answer['absent'])} in the job's working directory")
        done = Fetched(self._label)
        try:
            self._target.mkdir(parents=True, exist_ok=True)
            wanted = self._sort_out(answer["entries"], done)
            for file, part in self._contents(wanted):
                self._finish(file, part)
                done.written.append(file.path)
        except OSError as error:
            raise ClusterJobError(f"{error.filename or self._target} cannot be written: {error.strerror}") from error
        return done

    def _sort_out(self, entries: list[Any], done: Fetched) -> list[_File]:
        """Make directories and links; return the files that have to be fetched."""
        differing: list[_File] = []
        fresh: list[_File] = []
        for path, kind, mode, size, mtime, link in entries:
            place = self._place(path)
            if kind == "dir":
                place.mkdir(exist_ok=True)
            elif kind == "link":
                self._link(path, place, link, done)
            elif place.is_symlink() or place.is_dir():
                done.passed_over.append(f"{path}: there is something else of that name here")
            elif not place.exists():
                fresh.append(_File(path, mode, size, mtime))
            elif (place.stat().st_size, place.stat().st_mtime_ns) == (size, mtime):
                done.unchanged += 1
            else:
                differing.append(_File(path, mode, size, mtime))
        changed = self._changed(differing)
        done.unchanged += len(differing) - len(changed)
        newer = [file for file in changed if self._place(file.path).stat().st_mtime_ns > file.mtime]
        if newer and not self._may_replace([file.path for file in newer]):
            done.kept += [file.path for file in newer]
            changed = [file for file in changed if file not in newer]
        return fresh + changed

    def _changed(self, files: list[_File]) -> list[_File]:
        """Return those whose content differs: a file of the same size is compared before it is sent again."""
        alike = [file for file in files if self._place(file.path).stat().st_size == file.size]
        if not alike:
            return files
        answer, _ = self._session.ask("digests", paths=[file.path for file in alike], timeout=_SLOW, **self._where)
        same = {file.path for file, digest in zip(alike, answer["digests"], strict=True) if _digest(self._place(file.path)) == digest}
        return [file for file in files if file.path not in same]

    def _contents(self, files: list[_File]) -> Iterator[tuple[_File, Path]]:
        """Yield each file with a temporary one beside its place that holds its content."""
        batch: list[_File] = []
        for file in files:
            if file.size > _BATCH // 4:
                yield file, self._large(file)
            else:
                batch.append(file)
                if sum(item.size for item in batch) > _BATCH // 2 or len(batch) == 1000:
                    yield from self._small(batch)
                    batch = []
        yield from self._small(batch)

    def _small(self, files: list[_File]) -> Iterator[tuple[_File, Path]]:
        if not files:
            return
        answer, data = self._session.ask("get", parts=[(file.path, 0, file.size) for file in files], **self._where)
        position = 0
        for file, length in zip(files, answer["lengths"], strict=True):
            handle, name = self._beside(file)
            with os.fdopen(handle, "wb") as stream:
                stream.write(data[position : position + length])
            position += length
            yield file, Path(name)

    def _large(self, file: _File) -> Path:
        handle, name = self._beside(file)
        try:
            with os.fdopen(handle, "wb") as stream:
                offset = 0
                while offset < file.size:
                    _, data = self._session.ask("get", parts=[(file.path, offset, min(_BATCH, file.size - offset))], **self._where)
                    if not data:
                        break  # it has become shorter meanwhile
                    stream.write(data)
                    offset += len(data)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return Path(name)

    def _beside(self, file: _File) -> tuple[int, str]:
        place = self._place(file.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix=".clusterjob-", dir=place.parent)

    def _finish(self, file: _File, part: Path) -> None:
        try:
            part.chmod(file.mode & 0o777)
            os.utime(part, ns=(file.mtime, file.mtime))
            os.replace(part, self._place(file.path))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _link(self, path: str, place: Path, link: str, done: Fetched) -> None:
        inside = (place.parent.resolve() / link).resolve()
        if os.path.isabs(link) or not inside.is_relative_to(self._target.resolve()):
            done.passed_over.append(f"{path}: a link to {link}, which is elsewhere")
        elif place.is_symlink() and os.readlink(place) == link:
            done.unchanged += 1
        elif os.path.lexists(place):
            done.passed_over.append(f"{path}: there is something else of that name here")
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(link)
            done.written.append(path)

    def _place(self, path: str) -> Path:
        """Return where a path of the host's is written.

        Raises:
            HostError: that would not be below the target.
        """
        parts = PurePosixPath(path).parts
        place = self._target.joinpath(*parts)
        if (
            not parts
            or path.startswith("/")
            or ".." in parts
            or "\0" in path
            or not place.parent.resolve().is_relative_to(self._target.resolve())
        ):
            raise HostError(self._label, f"it names a file outside of what was asked for: {path[:80]!r}")
        return place


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while data := stream.read(1 << 20):
            found.update(data)
    return found.hexdigest()
