"""The pipe by which the workers of a node hear that their job's end is near.

Nobody ever reads it: what its state says, any number of processes can ask at any time with poll(2),
children of workers and those that begin to ask late included.

    nothing    all is well a byte     the end is near: save, and leave its end    the workers are
    being stopped (or their starter is gone): a SIGTERM is meant now
"""

from __future__ import annotations

import os


class WarningPipe:
    """The starter's side, one for each round of workers. They inherit the reading end.

    Args:
        warned: whether the warning came before this round.

    Attributes:
        write_end: the descriptor that no worker may keep.
        name: how a worker knows the reading end: its number and its inode, for a process that
            inherits the variable alone may have a file of its own under that number.
    """

    def __init__(self, *, warned: bool) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_inheritable(self._read_end, True)
        self.name = f"{self._read_end}:{os.fstat(self._read_end).st_ino}"
        self._warned = False
        if warned:
            self.warn()

    def warn(self) -> None:
        """Let the workers know."""
        if not self._warned:
            self._warned = True
            os.write(self.write_end, b"!")

    def close(self) -> None:
        """Let the workers know that what comes now is the stop."""
        os.close(self.write_end)
        os.close(self._read_end)
