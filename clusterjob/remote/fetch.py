"""Results from a host: only what was asked for and has changed, and never over what has changed
here.

A host is believed in what its files hold, not in where they are to be written, nor in when they
were.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.core.schema import SchemaError
from clusterjob.core.units import show_size
from clusterjob.errors import ClusterJobError, HostError
from clusterjob.node.host_server.results import MOST, MOST_DIGESTS, MOST_PARTS
from clusterjob.remote.answer_schemas import ENTRY, MOST_ENTRY
from clusterjob.remote.destination import (
    Destination,
    File,
    digest,
    is_head,
    is_plain,
    is_version_control,
)

if TYPE_CHECKING:
    from clusterjob.remote.protocol import Exchange
    from clusterjob.remote.session import Session

_SLOW = 300.0  # seconds for digests of large files
_TREE_MARGIN = 1 << 16  # bytes for the entries of few files, which may be long
_HINT = "this host is not to be trusted"


@dataclass
class Fetched:
    """What came of fetching from one host.

    Attributes:
        host: as it was written.
        written: paths that were written, relative to the target.
        unchanged: how many files were here already, or are on the host as they were sent.
        kept: paths that have changed here, or were sent with the code, and were left as they are.
        passed_over: paths that were not taken, with why.
    """

    host: str
    written: list[str] = field(default_factory=list)
    unchanged: int = 0
    kept: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What is to be fetched.

    Attributes:
        job_id: the job.
        workdir: its working directory there: relative to the job's directory, or absolute.
        paths: files and directories in it.
        target: where to.
        may_replace: asked whether files that have changed here may be replaced: all of them, or
            none.
        max_files, max_bytes: how much may come.
        sent: where the target is the directory that the code was sent from: the digest of each
            file, by path.
        notes: the file that says what was fetched into the target before.
    """

    job_id: str
    workdir: str
    paths: Sequence[str]
    target: Path
    may_replace: Callable[[list[str]], bool]
    max_files: int
    max_bytes: int
    sent: Mapping[str, str]
    notes: Path


class Fetch:
    """Fetching from one host.

    Args:
        session: with the host.
        request: what is to be fetched.
    """

    def __init__(self, session: Session | Exchange, request: Request) -> None:
        self._session = session
        self._label = session.label
        self._request = request
        self._where: dict[str, Any] = {"job": request.job_id, "workdir": request.workdir}
        self._done = Fetched(self._label)

    def run(self) -> Fetched:
        """Fetch what lies at the paths.

        Raises:
            HostError: the host does not answer, there is nothing at one of the paths, or it sends
                what was not asked for.
            ClusterJobError: it cannot be written here.
        """
        entries = self._tree()
        try:
            destination = Destination(self._label, self._request.target, notes=self._request.notes)
            try:
                self._write(destination, entries)
            finally:
                destination.save_notes()
        except OSError as error:
            raise ClusterJobError(
                f"{error.filename or self._request.target} cannot be written: {error.strerror}"
            ) from error
        return self._done

    # -- what there is -------------------------------------------------------------------------------------------------

    def _tree(self) -> list[tuple[str, str, File, str]]:
        """Return what lies at the paths: (path, kind, file, target of a link), without what is
        never taken.
        """
        request = self._request
        asked = {text: self._normal(text) for text in request.paths}
        absent = [text for text, path in asked.items() if path.startswith(("/", ".."))]
        rows: list[bytes] = []
        if not absent:
            paths = list(dict.fromkeys(asked.values()))
            most = _TREE_MARGIN + request.max_files * MOST_ENTRY
            answer, data = self._session.ask(
                "tree",
                bulk=True,
                paths=paths,
                most=request.max_files,
                timeout=_SLOW,
                most_bytes=most,
                **self._where,
            )
            absent = [text for text, path in asked.items() if path in answer["absent"]]
            rows = data.splitlines()
        if absent:
            raise HostError(
                self._label, f"there is no {', '.join(absent)} in the job's working directory"
            )
        if len(rows) > request.max_files:
            raise HostError(
                self._label,
                f"it names more than {request.max_files} files",
                hint="--max-files raises the limit",
            )
        found: dict[str, tuple[str, str, File, str]] = {}
        hidden: dict[str, None] = {}
        for row in rows:
            path, kind, mode, size, mtime, link = self._entry(row)
            if (
                not any(top in (".", path) or path.startswith(f"{top}/") for top in asked.values())
                or not is_plain(path)
                or path in found
            ):
                raise HostError(
                    self._label,
                    f"it names a file that was not asked for: {path[:80]!r}",
                    hint=_HINT,
                )
            if is_version_control(path):
                hidden[_top_of_version_control(path)] = None
            elif is_head(path) and kind != "dir":
                self._done.passed_over.append(
                    f"{path}: it would make a repository of git, which is never written"
                )
            else:
                found[path] = (path, kind, File(path, mode, size=size, mtime=mtime), link)
        self._done.passed_over += [
            f"{path}: a directory of version control, which is never written" for path in hidden
        ]
        return list(found.values())

    def _entry(self, row: bytes) -> tuple[str, str, int, int, int, str]:
        try:
            entry = json.loads(row)
            ENTRY.check(entry, "an entry")
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, SchemaError) else "no JSON"
            raise HostError(self._label, f"it answers nonsense: {why}", hint=_HINT) from error
        path, kind, mode, size, mtime, link = entry
        return path, kind, mode, size, mtime, link

    def _normal(self, text: str) -> str:
        """Return a path relative to the working directory, in its shortest form."""
        workdir = self._request.workdir
        if text.startswith("/") and workdir.startswith("/"):
            return posixpath.relpath(text, workdir)
        return posixpath.normpath(text)

    # -- what is brought -----------------------------------------------------------------------------------------------

    def _write(self, destination: Destination, entries: list[tuple[str, str, File, str]]) -> None:
        """Make directories, then files, then links: no file is written through a link of the
        host's.
        """
        fresh: list[File] = []
        differing: list[File] = []
        folders = dict.fromkeys(posixpath.dirname(path) for path, *_ in entries)
        own = {folder: found for folder in folders if (found := destination.repository_of(folder))}
        self._done.passed_over += [
            f"{each}: a repository of git, which is never written"
            for each in dict.fromkeys(own.values())
        ]
        entries = [entry for entry in entries if posixpath.dirname(entry[0]) not in own]
        for path, kind, file, _ in entries:
            place = destination.place(path)
            if kind == "dir":
                destination.directory(path)
            elif kind == "file" and (place.is_symlink() or place.is_dir()):
                self._done.passed_over.append(f"{path}: there is something else of that name here")
            elif kind == "file" and not place.exists():
                fresh.append(file)
            elif kind == "file" and (place.stat().st_size, place.stat().st_mtime_ns) == (
                file.size,
                file.mtime,
            ):
                self._done.unchanged += 1
            elif kind == "file":
                differing.append(file)
        wanted = fresh + self._decided(destination, differing)
        total = sum(file.size for file in wanted)
        if total > self._request.max_bytes:
            why = f"{show_size(total)} would be fetched, more than {show_size(self._request.max_bytes)}"
            raise HostError(
                self._label, why, hint="name a part of them, or raise the limit: --max-size"
            )
        for file, part, found in self._contents(destination, wanted):
            destination.finish(file, part, found)
            self._done.written.append(file.path)
        links = {path: link for path, kind, _, link in entries if kind == "link"}
        try:
            self._make_links(destination, links)
        except BaseException:  # unchecked, they may lead elsewhere
            destination.remove_links()
            raise

    def _make_links(self, destination: Destination, links: Mapping[str, str]) -> None:
        made = []
        for path, link in links.items():
            same = (place := destination.place(path)).is_symlink() and os.readlink(place) == link
            if why := destination.link(path, link):
                self._done.passed_over.append(f"{path}: {why}")
            else:
                made.append((path, same))
        while bad := [
            (path, same, why) for path, same in made if (why := destination.check_link(path))
        ]:
            self._done.passed_over += [f"{path}: {why}" for path, _, why in bad]
            made = [item for item in made if item not in [(path, same) for path, same, _ in bad]]
        self._done.written += [path for path, same in made if not same]
        self._done.unchanged += sum(same for _, same in made)

    def _decided(self, destination: Destination, files: list[File]) -> list[File]:
        """Return those that are to be replaced, of files that are here and differ in size or time.

        What fetch itself wrote and nobody changed is replaced. All else was made or changed here,
        or is code that may be run here: code that was sent is never replaced without asking, also
        where an earlier fetch noted it.
        """
        sent = self._request.sent
        here = {file.path: digest(destination.place(file.path)) for file in files}
        there = self._digests(
            [
                f.path
                for f in files
                if f.path in sent or destination.place(f.path).stat().st_size == f.size
            ]
        )
        changed: list[File] = []
        for file in files:
            path = file.path
            if path in there and there[path] in (here[path], sent.get(path)):
                self._done.unchanged += 1
                if there[path] == here[path] and path not in sent:
                    destination.note(path, here[path])
            else:
                changed.append(file)
        doubtful = [
            file.path
            for file in changed
            if file.path in sent or not destination.was_fetched(file.path, here[file.path])
        ]
        if doubtful and not self._request.may_replace(doubtful):
            self._done.kept += doubtful
            left = set(doubtful)
            changed = [file for file in changed if file.path not in left]
        return changed

    def _digests(self, paths: list[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for begin in range(0, len(paths), MOST_DIGESTS):
            some = paths[begin : begin + MOST_DIGESTS]
            answer, _ = self._session.ask(
                "digests", bulk=True, paths=some, timeout=_SLOW, **self._where
            )
            if len(answer["digests"]) != len(some):
                raise HostError(
                    self._label,
                    f"it answers with {len(answer['digests'])} digests of {len(some)} files",
                    hint=_HINT,
                )
            found.update(zip(some, answer["digests"], strict=True))
        return found

    def _contents(
        self, destination: Destination, files: list[File]
    ) -> Iterator[tuple[File, Path, str]]:
        """Yield each file with a temporary one beside its place that holds its content, and its
        digest.
        """
        batch: list[File] = []
        for file in files:
            if file.size > MOST // 4:
                yield file, *self._large(destination, file)
            else:
                batch.append(file)
                if sum(item.size for item in batch) > MOST // 2 or len(batch) == MOST_PARTS:
                    yield from self._small(destination, batch)
                    batch = []
        yield from self._small(destination, batch)

    def _get(self, parts: list[tuple[str, int, int]]) -> list[bytes]:
        """Return parts of files: (path, offset, length) of each; less where one has become shorter."""
        answer, data = self._session.ask("get", bulk=True, parts=parts, **self._where)
        lengths = answer["lengths"]
        fits = len(lengths) == len(parts) and all(
            length <= most for length, (_, _, most) in zip(lengths, parts, strict=False)
        )
        if not fits or sum(lengths) != len(data):
            raise HostError(self._label, "it sends other bytes than were asked for", hint=_HINT)
        found, position = [], 0
        for length in lengths:
            found.append(data[position : position + length])
            position += length
        return found

    def _small(
        self, destination: Destination, files: list[File]
    ) -> Iterator[tuple[File, Path, str]]:
        if not files:
            return
        for file, content in zip(
            files, self._get([(file.path, 0, file.size) for file in files]), strict=True
        ):
            yield file, *self._part(destination, file, iter([content]))

    def _large(self, destination: Destination, file: File) -> tuple[Path, str]:
        def pieces() -> Iterator[bytes]:
            offset = 0
            while offset < file.size:
                wanted = min(MOST, file.size - offset)
                [data] = self._get([(file.path, offset, wanted)])
                yield data
                if len(data) < wanted:
                    return  # it has become shorter meanwhile; a byte per answer holds nobody up
                offset += len(data)

        return self._part(destination, file, pieces())

    def _part(
        self, destination: Destination, file: File, pieces: Iterator[bytes]
    ) -> tuple[Path, str]:
        handle, part = destination.begin(file)
        found = hashlib.sha256()
        try:
            with os.fdopen(handle, "wb") as stream:
                for piece in pieces:
                    found.update(piece)
                    stream.write(piece)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return part, found.hexdigest()


def _top_of_version_control(path: str) -> str:
    parts = path.split("/")
    depth = next(index for index, part in enumerate(parts) if is_version_control(part))
    return "/".join(parts[: depth + 1])
