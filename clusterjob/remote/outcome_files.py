"""Read the small result files of a function's job from a host, with a limit on their bytes."""

from __future__ import annotations

from collections.abc import Collection

from clusterjob.core.units import show_size
from clusterjob.errors import HostError
from clusterjob.node.host_server.jobs import MAX_BYTES
from clusterjob.remote.fetch import listing
from clusterjob.remote.protocol import Exchange
from clusterjob.remote.session import Session

_HINT = "this host is not to be trusted"


def read(
    session: Session | Exchange, job_id: str, folder: str, names: Collection[str], most: int
) -> dict[str, bytes]:
    """Return the content of the files that exist, by name.

    Args:
        session: the session with the host.
        job_id: the job; for an element of an array, the array.
        folder: the directory, relative to the job's directory.
        names: the files.
        most: maximum bytes of all files.

    Raises:
        HostError: the host does not answer, sends something else, or the files are too large.
    """
    _, rows = listing(session, job_id, folder, list(names), most=len(names))
    sizes: dict[str, int] = {}
    for path, kind, _, size, *_ in rows:
        if path not in names or kind != "file" or path in sizes:
            raise _malformed(session, f"it names a file that was not asked for: {path[:80]!r}")
        sizes[path] = size
    if sum(sizes.values()) > most:
        raise HostError(
            session.label,
            f"the results have {show_size(sum(sizes.values()))}, more than {show_size(most)}",
            hint="write large results to a file, and copy it with `clusterjob fetch`",
        )
    return {name: _content(session, job_id, folder, name, size) for name, size in sizes.items()}


def _content(session: Session | Exchange, job_id: str, folder: str, name: str, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        length = min(MAX_BYTES, size - len(data))
        parts = [(name, len(data), length)]
        answer, part = session.ask("get", job=job_id, workdir=folder, parts=parts, bulk=True)
        if answer["lengths"] != [len(part)] or not 0 < len(part) <= length:
            raise _malformed(session, f"it sends another size of {name} than it announces")
        data += part
    return bytes(data)


def _malformed(session: Session | Exchange, why: str) -> HostError:
    return HostError(session.label, why, hint=_HINT)
