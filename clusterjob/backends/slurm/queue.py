"""Read Slurm's queue with at most one squeue per cluster in 5 s.

All processes of the user share one snapshot of the queue in a file. If the snapshot is too old, a
process runs squeue and writes a new snapshot.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusterjob.backends.slurm.client import Client, SlurmOutput
from clusterjob.backends.slurm.squeue import EPOCH_TIMES, QueueSnapshot, command, new_mark, split
from clusterjob.node.system import files, private_dirs

if TYPE_CHECKING:
    from clusterjob.backends.slurm.remote_command import RemoteCommand

INTERVAL = 5.0  # minimum seconds between two calls to one cluster
_SLOWEST = 30.0  # maximum seconds between two calls while the followed jobs do not change
_FIRST_TIMEOUT = 20.0  # maximum seconds for the first call; without a controller it takes 10-30 s


class Queue:
    """The shared snapshot of one cluster's queue.

    Args:
        client: runs squeue.
        directory: the directory of the snapshot, private to the user.
    """

    def __init__(self, client: Client, directory: Path) -> None:
        self._client = client
        name = hashlib.sha256(client.key.encode()).hexdigest()[:16]
        self._path = directory / f"queue-{name}.json"
        self._lock_path = directory / f"queue-{name}.lock"
        self._looked = False
        # The running squeue, its start time and the separator of its fields.
        self._asking: tuple[subprocess.Popen[str] | RemoteCommand, float, str] | None = None

    def poll(self, *, urgent: bool = False) -> QueueSnapshot:
        """Return the newest snapshot; only the first call of a process may wait for Slurm.

        Args:
            urgent: whether to keep the shortest interval between calls, for example because a
                job's directory shows an end whose cause only Slurm knows.
        """
        first, self._looked = not self._looked, True
        if first:
            self._await_another()
        stored = _read(self._path)
        interval = INTERVAL
        if not first and not urgent:
            interval = min(_SLOWEST, INTERVAL * 1.5 ** int(stored.get("quiet", 0)))
        if self._asking is not None:
            self._collect(timeout=0.0)
        elif (
            not 0.0 <= time.time() - float(stored.get("asked_at", 0.0)) < interval
            and self._ask(stored)
            and first
        ):
            self._collect(timeout=_FIRST_TIMEOUT)
        return QueueSnapshot.from_json(_read(self._path))

    def close(self) -> None:
        """Kill a running squeue."""
        if self._asking is not None:
            process, _, _ = self._asking
            process.kill()
            process.communicate()
            self._asking = None

    def _await_another(self) -> None:
        """Wait until another process's squeue has ended, or INTERVAL seconds after its start."""
        while True:
            stored = _read(self._path)
            asked_at = float(stored.get("asked_at", 0.0))
            answered = (
                max(float(stored.get("taken_at", 0.0)), float(stored.get("failed_at", 0.0)))
                >= asked_at
            )
            if answered or not 0.0 <= time.time() - asked_at < INTERVAL:
                return
            time.sleep(0.02)

    def _ask(self, stored: dict[str, Any]) -> bool:
        """Start squeue and return True; return False if another process has just started one."""
        private_dirs.make(self._path.parent)
        with self._locked() as mine:
            now = _read(self._path)
            if not mine or now.get("asked_at") != stored.get("asked_at"):
                return False
            begin = time.time()
            # Store the time before the call, and release the lock during the call: if this process
            # is stopped in between, it does not block the other processes.
            _keep(self._path, {**now, "asked_at": begin})
        mark = new_mark()
        self._asking = (self._client.start(command(mark), EPOCH_TIMES), begin, mark)
        atexit.register(self.close)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the snapshot's lock for a write; yield False if another process has the lock."""
        with open(self._lock_path, "ab", opener=partial(os.open, mode=0o600)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def _collect(self, timeout: float) -> None:
        """Store squeue's answer if it arrives within timeout (seconds)."""
        assert self._asking is not None
        process, begin, mark = self._asking
        try:
            out, err = process.communicate(timeout=timeout or 0.001)
        except subprocess.TimeoutExpired:
            if timeout:
                error = f"it did not answer within {timeout:g} s"
                self._note(begin, {"failed_at": begin, "error": error})
            return
        self._asking = None
        atexit.unregister(self.close)
        if process.returncode == 0:
            self._note(begin, {"taken_at": begin, "rows": split(out, mark), "error": ""})
        else:
            error = SlurmOutput(process.returncode, out, err=err).message
            self._note(begin, {"failed_at": begin, "error": error})

    def _note(self, begin: float, news: dict[str, Any]) -> None:
        """Store the result of the squeue that started at `begin`."""
        with self._locked():
            now = _read(self._path)
            if begin < float(now.get("taken_at", 0.0)) <= time.time():
                return  # another process has stored a newer answer
            if "rows" in news:
                # Compare only active jobs: Slurm also removes ended jobs from the list.
                same = (
                    "rows" in now
                    and QueueSnapshot.from_json(news).active == QueueSnapshot.from_json(now).active
                )
                news["quiet"] = min(int(now.get("quiet", 0)) + 1, 9) if same else 0
            _keep(
                self._path, {**now, "asked_at": max(begin, float(now.get("asked_at", 0.0))), **news}
            )


def _read(path: Path) -> dict[str, Any]:
    stored = files.read_json(path)
    return stored if isinstance(stored, dict) else {}


def _keep(path: Path, value: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the disk is full: the next call runs squeue again
        files.write_json(path, value)
