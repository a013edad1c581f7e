"""A small value in memory that a process shares with the processes that it forks."""

from __future__ import annotations

import json
import mmap
import struct
import zlib
from typing import Any

_HEADER = struct.Struct("<QII")  # number of the value, its bytes, checksum of both and the value
_NUMBER = struct.Struct("<QI")


class SharedNote:
    """A JSON object that outlives the process that wrote it.

    If the writer is killed while it writes, the value before is still there.

    Args:
        size: maximum bytes of the value; a larger value is not written.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        # Anonymous: no descriptor that a worker could inherit. Unused pages need no memory.
        self._memory = mmap.mmap(-1, 2 * (_HEADER.size + size))

    def write(self, value: dict[str, Any]) -> None:
        """Replace the value."""
        data = json.dumps(value).encode()
        if len(data) <= self._size:
            number = self._newest()[0] + 1
            checksum = zlib.crc32(data, zlib.crc32(_NUMBER.pack(number, len(data))))
            place = self._place(number)
            record = _HEADER.pack(number, len(data), checksum) + data
            self._memory[place : place + len(record)] = record

    def read(self) -> dict[str, Any]:
        """Return the last value that was written completely; empty if there is none."""
        value: dict[str, Any] = json.loads(self._newest()[1])
        return value

    def close(self) -> None:
        """Free the memory in this process; the note cannot be used here any more."""
        self._memory.close()

    def _place(self, number: int) -> int:
        return number % 2 * (_HEADER.size + self._size)

    def _newest(self) -> tuple[int, bytes]:
        found = [(0, b"{}")]
        for place in (self._place(0), self._place(1)):
            number, length, checksum = _HEADER.unpack_from(self._memory, place)
            begin = place + _HEADER.size
            if 0 < length <= self._size:
                data = self._memory[begin : begin + length]
                if zlib.crc32(data, zlib.crc32(_NUMBER.pack(number, length))) == checksum:
                    found.append((number, data))
        return max(found)
