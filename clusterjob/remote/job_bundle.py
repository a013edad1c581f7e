"""Send a job's files and its code to one host, without content that the host already has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.core.snapshot import Snapshot, SnapshotEntry, changed
from clusterjob.errors import HostError, SubmitError
from clusterjob.node.logs.job_dir import ARCHIVE
from clusterjob.remote.session import Session

_SLOW = 600.0  # seconds for slow requests: a large copy on a slow disk
_CHUNK = 1 << 18
_BATCH = 32 << 20  # bytes of files in one request


@dataclass(frozen=True)
class JobBundle:
    """The files and the code of a job on one host.

    Attributes:
        session: the session with the host.
        job_id: the job.
        node: the host's node number in the job.
        progress: called with (bytes sent, total bytes) while code is sent.
    """

    session: Session
    job_id: str
    node: int
    progress: Callable[[int, int], None]

    def put(self, files: Sequence[tuple[str, int, bytes]]) -> None:
        """Create the job's directory on the host, with its files.

        Args:
            files: (name, mode, content) of each file.

        Raises:
            HostError: a file cannot be written, or the host does not answer.
        """
        self.session.ask(
            "put",
            job=self.job_id,
            node=self.node,
            listed=[(name, mode, len(data)) for name, mode, data in files],
            body=b"".join(data for _, _, data in files),
        )

    def install(self, snapshot: Snapshot) -> None:
        """Install the complete code in the job's directory on the host.

        Raises:
            HostError: a file cannot be written, or the host does not answer.
            SubmitError: a local file changed while it was sent.
        """
        packed = snapshot.packed()
        for _ in range(3):  # a file that is damaged in the host's store is sent again
            answer, _ = self.session.ask(
                "install", job=self.job_id, bulk=True, body=packed, timeout=_SLOW
            )
            if not answer["missing"]:
                return
            self._send(set(answer["missing"]), snapshot)
        raise HostError(
            self.session.label,
            "files in its code store are damaged again after they were sent",
            hint="check its disk",
        )

    def send_archive(self, path: Path, digest: str, size: int) -> None:
        """Send a large file into the host's store, unless the store has it.

        Args:
            path: the file on this machine.
            digest: its SHA-256.
            size: its bytes.

        Raises:
            HostError: the file cannot be written, or the host does not answer.
            SubmitError: the file cannot be read, or has changed.
        """
        self.put([(ARCHIVE, 0o600, digest.encode())])  # `clean` reads it
        if self.session.ask("has_file", digest=digest, length=size)[0]["stored"]:
            return

        def pieces() -> Iterator[bytes]:
            done = 0
            try:
                with path.open("rb") as stream:
                    while data := stream.read(min(_CHUNK, size - done)):
                        done += len(data)
                        yield data
                        self.progress(done, size)
            except OSError as error:
                raise SubmitError(f"{path} cannot be read: {error.strerror}") from error
            if done < size:
                raise _changed(path)

        if self._receive([(digest, size)], pieces()):
            raise _changed(path)

    def _send(self, missing: set[str], snapshot: Snapshot) -> None:
        entries = snapshot.of_digests(missing)
        total, sent = sum(entry.size for entry in entries), 0
        while entries:
            batch: list[SnapshotEntry] = []
            size = 0
            while entries and (not batch or size + entries[0].size <= _BATCH):
                batch.append(entries.pop(0))
                size += batch[-1].size

            def pieces(batch: list[SnapshotEntry] = batch, before: int = sent) -> Iterator[bytes]:
                done = before
                for piece in snapshot.content(batch):
                    yield piece
                    done += len(piece)
                    self.progress(done, total)

            wrong = self._receive([(entry.value, entry.size) for entry in batch], pieces())
            if wrong:
                raise changed(next(entry for entry in batch if entry.value in wrong))
            sent += size

    def _receive(self, listed: list[tuple[str, int]], pieces: Iterator[bytes]) -> list[str]:
        """Send files into the host's store; return the digests of those that arrived damaged."""
        answer, _ = self.session.ask(
            "receive",
            listed=listed,
            bulk=True,
            body=pieces,
            size=sum(size for _, size in listed),
            timeout=_SLOW,
        )
        wrong: list[str] = answer["wrong"]
        return wrong


def _changed(path: Path) -> SubmitError:
    return SubmitError(f"{path} changed while it was being sent", "submit again")
