"""A small value in memory that a process shares with the processes that it forks."""

from __future__ import annotations

import json
import mmap
import zlib
from typing import Any


class SharedNote:
    """A JSON object that outlives the process that wrote it.

    There are two places for it, in turn: if the writer is killed while it writes, or another
    process reads at that moment, the value before is still there.

    Args:
        size: maximum bytes of the value; a larger value is not written.
    """

    def __init__(self, size: int = 1 << 20) -> None:
        self._size = size
        # Anonymous: no descriptor that a worker could inherit. Unused pages need no memory.
        self._memory = mmap.mmap(-1, 2 * size)

    def write(self, value: dict[str, Any]) -> None:
        """Replace the value."""
        number = self._newest()[0] + 1
        data = json.dumps([number, value]).encode()
        line = b"%08x%s\n" % (zlib.crc32(data), data)
        if len(line) <= self._size:
            place = number % 2 * self._size
            self._memory[place : place + len(line)] = line

    def read(self) -> dict[str, Any]:
        """Return the last value that was written completely; empty if there is none."""
        return self._newest()[1]

    def _newest(self) -> tuple[int, dict[str, Any]]:
        found: list[tuple[int, dict[str, Any]]] = [(0, {})]
        for place in (0, self._size):
            if not self._memory[place]:
                continue  # nothing was written: a search would fill the memory
            end = self._memory.find(b"\n", place, place + self._size)
            checksum, data = self._memory[place : place + 8], self._memory[place + 8 : max(0, end)]
            if checksum == b"%08x" % zlib.crc32(data):
                number, value = json.loads(data)
                found.append((number, value))
        return max(found, key=lambda each: each[0])
