"""The pipe that signals a preemption warning to the workers of a node.

No process reads from it. Any number of processes can query its state at any time with poll(2),
also children of workers and processes that start late:

    empty     no warning
    a byte    a preemption is near: save, then exit
    EOF       the workers are being stopped, or their forkserver has ended: SIGTERM now means stop
"""

from __future__ import annotations

import os


class WarningPipe:
    """The forkserver's side, one for each round of workers; they inherit the read end.

    Args:
        warned: whether the warning arrived before this round.

    Attributes:
        write_end: the write end; a worker must close it.
        name: identifies the read end for a worker: its number and its inode. The inode is needed
            because a process that inherits only the variable may have another file at that number.
    """

    def __init__(self, *, warned: bool) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_inheritable(self._read_end, True)
        self.name = f"{self._read_end}:{os.fstat(self._read_end).st_ino}"
        self._warned = False
        if warned:
            self.warn()

    def warn(self) -> None:
        """Signal the preemption warning to the workers."""
        if not self._warned:
            self._warned = True
            os.write(self.write_end, b"!")

    def close(self) -> None:
        """Signal to the workers that they are being stopped now."""
        os.close(self.write_end)
        os.close(self._read_end)
