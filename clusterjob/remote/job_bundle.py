"""A job's files and its code brought to one host: what the host has of them already is not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clusterjob.core.snapshot import Entry, Snapshot, changed
from clusterjob.errors import HostError
from clusterjob.remote.session import Session

_SLOW = 600.0  # seconds for answers that may take long: a large copy on a slow disk
_BATCH = 32 << 20  # bytes that are sent between two answers


class Delivery:
    """What is brought to one host of a job.

    Args:
        session: with the host.
        job_id: the job.
        node: which of its nodes the host is.
        progress: told (bytes sent, bytes to be sent) as code is sent.
    """

    def __init__(
        self, session: Session, job_id: str, node: int, progress: Callable[[int, int], None]
    ) -> None:
        self._session = session
        self._job_id = job_id
        self._node = node
        self._progress = progress

    def put(self, files: Sequence[tuple[str, int, bytes]]) -> None:
        """Make the job's directory there.

        Args:
            files: (name, mode, content) of what belongs in it.

        Raises:
            HostError: it cannot be written, or the host does not answer.
        """
        listed = [(name, mode, len(data)) for name, mode, data in files]
        self._ask("put", files=listed, body=b"".join(data for _, _, data in files))

    def land(self, snapshot: Snapshot) -> None:
        """Have the code in the job's directory there, as a whole.

        Raises:
            HostError: it cannot be written, or the host does not answer.
            SubmitError: a file changed while it was sent.
        """
        packed = snapshot.packed()
        for _ in range(3):  # a file of the store that turns out to be damaged is sent once more
            answer = self._ask("land", bulk=True, body=packed, timeout=_SLOW)
            if not answer["missing"]:
                return
            self._send(set(answer["missing"]), snapshot)
        raise HostError(
            self._session.connection.target.label,
            "its store of files does not keep what it is given",
            hint="is its disk sound?",
        )

    def _send(self, missing: set[str], snapshot: Snapshot) -> None:
        entries = snapshot.of_digests(missing)
        total, sent = sum(entry.size for entry in entries), 0
        while entries:
            batch: list[Entry] = []
            size = 0
            while entries and (not batch or size + entries[0].size <= _BATCH):
                batch.append(entries.pop(0))
                size += batch[-1].size

            def pieces(batch: list[Entry] = batch, before: int = sent) -> Iterator[bytes]:
                done = before
                for piece in snapshot.content(batch):
                    yield piece
                    done += len(piece)
                    self._progress(done, total)

            listed = [(entry.value, entry.size) for entry in batch]
            answer = self._ask(
                "blobs", bulk=True, files=listed, body=pieces(), size=size, timeout=_SLOW
            )
            if answer["wrong"]:
                raise changed(next(entry for entry in batch if entry.value in answer["wrong"]))
            sent += size

    def _ask(self, op: str, **more: Any) -> dict[str, Any]:
        answer, _ = self._session.ask(op, job=self._job_id, node=self._node, **more)
        found: dict[str, Any] = answer
        return found
