"""Fetch results from a host: transfer changed files without overwriting local changes.

The host is trusted for the content of its files, but not for their paths or modification times.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clusterjob.core.units import show_size
from clusterjob.errors import ClusterJobError, HostError
from clusterjob.node.host_server.jobs import MAX_BYTES
from clusterjob.node.system import files
from clusterjob.remote.answer_schemas import (
    MAX_PARTS,
    TREE_ENTRY_BYTES,
    SchemaError,
    TreeEntry,
    check,
)
from clusterjob.remote.destination import (
    Destination,
    File,
    is_head,
    is_plain,
    is_version_control,
)
from clusterjob.remote.protocol import Exchange
from clusterjob.remote.session import Session

_SLOW = 300.0  # seconds for digests of large files
_DIGESTS_AT_ONCE = 10_000  # files
_TREE_MARGIN = 1 << 16  # bytes for a tree of few files, whose paths may be long
_HINT = "this host is not to be trusted"


@dataclass
class Fetched:
    """Result of fetching from one host.

    Attributes:
        host: the host as the user wrote it.
        written: paths that were written, relative to the target.
        unchanged: number of files that need no transfer: they are equal here and on the host, or
            the host has not changed them since they were sent.
        kept: paths that were not replaced because they changed here or were sent with the code.
        passed_over: paths that were skipped, each with the reason.
    """

    host: str
    written: list[str] = field(default_factory=list)
    unchanged: int = 0
    kept: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """The files to fetch from a job's hosts, and the directory to write them to.

    Attributes:
        job_id: the job.
        workdir: its working directory on the host: absolute, or relative to the job's directory.
        paths: files and directories in the working directory.
        target: the local directory to write to.
        may_replace: called with the paths of files that changed here; returns whether all of them
            may be replaced.
        max_files, max_bytes: limits of one fetch.
        sent: digest of each file that was sent, by path; empty unless the target is the directory
            that the code was sent from.
        notes: JSON file with the digest of each file that earlier fetches wrote to the target.
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


def listing(
    session: Session | Exchange,
    job_id: str,
    workdir: str,
    paths: Sequence[str],
    most: int,
    *,
    digests: bool = False,
) -> tuple[list[str], list[tuple[str, str, int, int, int, str, str]]]:
    """Return the paths that do not exist on the host, and the entries at the others.

    Args:
        session: the session with the host.
        job_id: the job; for an element of an array, the array.
        workdir: its working directory there.
        paths: files and directories in it.
        most: maximum number of entries.
        digests: whether the last field of a file's entry is its digest.

    Raises:
        HostError: the host does not answer, sends something else, or there are more entries.
    """
    answer, data = session.ask(
        "tree",
        job=job_id,
        workdir=workdir,
        paths=list(paths),
        most=most,
        digests=digests,
        bulk=True,
        timeout=_SLOW,
        max_bytes=_TREE_MARGIN + most * TREE_ENTRY_BYTES,
    )
    rows = data.splitlines()
    if len(rows) > most:
        hint = "--max-files raises the limit"
        raise HostError(session.label, f"it names more than {most} files", hint=hint)
    try:
        return answer["absent"], [check(json.loads(row), TreeEntry) for row in rows]
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, SchemaError) else "not JSON"
        raise HostError(session.label, f"it sends a malformed answer: {why}", hint=_HINT) from error


class Fetch:
    """Fetch from one host.

    Args:
        session: the session with the host.
        request: the files to fetch, and the directory to write them to.
    """

    def __init__(self, session: Session | Exchange, request: Request) -> None:
        self._session = session
        self._label = session.label
        self._request = request
        self._done = Fetched(self._label)

    def run(self) -> Fetched:
        """Fetch the requested paths.

        Raises:
            HostError: the host does not answer, a path does not exist there, or it sends something
                that was not requested.
            ClusterJobError: a file cannot be written here.
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

    # -- list ----------------------------------------------------------------------------------

    def _tree(self) -> list[tuple[str, str, File, str]]:
        """Return the entries at the paths, without those that are never fetched.

        Each entry is (path, kind, file, target of a link).
        """
        request = self._request
        asked = {text: self._normal(text) for text in request.paths}
        absent = [text for text, path in asked.items() if path.startswith(("/", ".."))]
        rows: list[tuple[str, str, int, int, int, str, str]] = []
        if not absent:
            paths = list(dict.fromkeys(asked.values()))
            missing, rows = listing(
                self._session, request.job_id, request.workdir, paths, most=request.max_files
            )
            absent = [text for text, path in asked.items() if path in missing]
        if absent:
            raise HostError(
                self._label, f"there is no {', '.join(absent)} in the job's working directory"
            )
        found: dict[str, tuple[str, str, File, str]] = {}
        hidden: dict[str, None] = {}
        for path, kind, mode, size, mtime, link, _ in rows:
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
                    f"{path}: it would create a git repository, which is never written"
                )
            else:
                found[path] = (path, kind, File(path, mode, size=size, mtime=mtime), link)
        self._done.passed_over += [
            f"{path}: a version control directory, which is never written" for path in hidden
        ]
        return list(found.values())

    def _normal(self, text: str) -> str:
        """Return a path normalized and relative to the working directory."""
        workdir = self._request.workdir
        if text.startswith("/") and workdir.startswith("/"):
            return posixpath.relpath(text, workdir)
        return posixpath.normpath(text)

    # -- transfer ------------------------------------------------------------------------------

    def _write(self, destination: Destination, entries: list[tuple[str, str, File, str]]) -> None:
        """Write directories, then files, then links.

        In this order no file is written through a link that the host sent.
        """
        fresh: list[File] = []
        differing: list[File] = []
        folders = dict.fromkeys(posixpath.dirname(path) for path, *_ in entries)
        own = {folder: found for folder in folders if (found := destination.repository_of(folder))}
        self._done.passed_over += [
            f"{each}: a git repository, which is never written"
            for each in dict.fromkeys(own.values())
        ]
        entries = [entry for entry in entries if posixpath.dirname(entry[0]) not in own]
        for path, kind, file, _ in entries:
            place = destination.place(path)
            if kind == "dir":
                destination.directory(path)
            elif kind == "file" and (place.is_symlink() or place.is_dir()):
                self._done.passed_over.append(f"{path}: another file of that name exists here")
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
            limit = show_size(self._request.max_bytes)
            raise HostError(
                self._label,
                f"{show_size(total)} would be fetched, more than {limit}",
                hint="fetch fewer paths, or raise the limit with --max-size",
            )
        for file, part, found in self._contents(destination, wanted):
            destination.finish(file, part, found)
            self._done.written.append(file.path)
        links = {path: link for path, kind, _, link in entries if kind == "link"}
        try:
            self._make_links(destination, links)
        except BaseException:  # unchecked links may point outside of the destination
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

    def _decided(self, destination: Destination, differing: list[File]) -> list[File]:
        """Return which existing files to replace, of those that differ in size or time.

        A file is replaced without a question if an earlier fetch wrote it and it has not changed
        since. The user is asked about all other files, and about code that was sent, which
        may run here.
        """
        sent = self._request.sent
        here = {file.path: files.sha256(destination.place(file.path)) for file in differing}
        there = self._digests(
            [
                f.path
                for f in differing
                if f.path in sent or destination.place(f.path).stat().st_size == f.size
            ]
        )
        changed: list[File] = []
        for file in differing:
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
        request = self._request
        for begin in range(0, len(paths), _DIGESTS_AT_ONCE):
            some = paths[begin : begin + _DIGESTS_AT_ONCE]
            _, rows = listing(
                self._session, request.job_id, request.workdir, some, most=len(some), digests=True
            )
            found.update((row[0], row[-1]) for row in rows)
        return found

    def _contents(
        self, destination: Destination, wanted: list[File]
    ) -> Iterator[tuple[File, Path, str]]:
        """Yield (file, temporary file with its content, digest) of each file."""
        batch: list[File] = []
        for file in wanted:
            if file.size > MAX_BYTES // 4:
                yield file, *self._large(destination, file)
            else:
                batch.append(file)
                if sum(item.size for item in batch) > MAX_BYTES // 2 or len(batch) == MAX_PARTS:
                    yield from self._small(destination, batch)
                    batch = []
        yield from self._small(destination, batch)

    def _get(self, parts: list[tuple[str, int, int]]) -> list[bytes]:
        """Return the bytes of each (path, offset, length); fewer if the file became shorter."""
        answer, data = self._session.ask(
            "get",
            job=self._request.job_id,
            workdir=self._request.workdir,
            parts=parts,
            bulk=True,
        )
        lengths = answer["lengths"]
        fits = len(lengths) == len(parts) and all(
            length <= most for length, (_, _, most) in zip(lengths, parts, strict=False)
        )
        if not fits or sum(lengths) != len(data):
            raise HostError(self._label, "it sends bytes that were not asked for", hint=_HINT)
        found, position = [], 0
        for length in lengths:
            found.append(data[position : position + length])
            position += length
        return found

    def _small(
        self, destination: Destination, wanted: list[File]
    ) -> Iterator[tuple[File, Path, str]]:
        if not wanted:
            return
        contents = self._get([(file.path, 0, file.size) for file in wanted])
        for file, content in zip(wanted, contents, strict=True):
            yield file, *self._part(destination, file, iter([content]))

    def _large(self, destination: Destination, file: File) -> tuple[Path, str]:
        def pieces() -> Iterator[bytes]:
            offset = 0
            while offset < file.size:
                wanted = min(MAX_BYTES, file.size - offset)
                [data] = self._get([(file.path, offset, wanted)])
                yield data
                if len(data) < wanted:
                    # The file became shorter, or the host sends one byte per answer: stop.
                    return
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
