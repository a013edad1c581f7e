"""Save and load checkpoints; a kill at any moment leaves one that can be loaded.

Each checkpoint is a directory ``<number>.step<step>``. It is written under another name, flushed to
disk and renamed. Its file ``files.json`` lists the sizes of its files: a checkpoint that lacks a
part is skipped. The latest two are kept; older ones are removed when the new one is on disk.
`Context` inherits from `Checkpointing`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from clusterjob.errors import CheckpointError, UsageError
from clusterjob.worker import sharded_checkpoint

_NAME = re.compile(r"(?P<number>\d{8,12})\.step(?P<step>\d{1,18})", re.ASCII)
_UNFINISHED = ".saving"  # the checkpoint that is being written
_FILES, _STATE = "files.json", "state.pt"
_MAX_LIST = 16 << 20  # bytes of `files.json`
_CACHE_TIMEOUT = 5.0  # seconds


class Ranks(Protocol):
    """The part of a `Context` that this module uses."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """Combine one value from each process."""


class Checkpointing:
    """The checkpoint method of a `Context`."""

    def checkpoint(self, directory: str | os.PathLike[str], *, sharded: bool = False) -> Checkpoint:
        """Return the checkpoints in a directory that all nodes share; it may not exist yet.

        Args:
            directory: the directory; it should contain nothing else.
            sharded: whether each process saves its own part with torch.distributed.checkpoint, for
                models that no process holds as a whole (FSDP, DTensor); else rank 0 saves all.
        """
        return Checkpoint(self, directory, sharded=sharded)  # type: ignore[arg-type]


class _Saved(NamedTuple):
    number: int
    step: int
    path: Path


_NONE = _Saved(-1, -1, Path())


class Checkpoint:
    """The checkpoints of a job; `Context.checkpoint` makes it. All processes call its methods.

    Attributes:
        step: the step that was loaded or saved last; None before.
    """

    def __init__(self, context: Ranks, directory: str | os.PathLike[str], *, sharded: bool) -> None:
        self._context = context
        self._directory = Path(directory)
        self._sharded = sharded
        self._unreadable: set[int] = set()  # numbers of checkpoints that could not be loaded
        self.step: int | None = None

    # -- loading -----------------------------------------------------------------------------------

    def load(
        self, into: Any = None, *, weights_only: bool = True, map_location: Any = "cpu"
    ) -> Any:
        """Return the state of the latest checkpoint that is complete; None if there is none.

        All processes load the same one: rank 0 chooses it, and if a process cannot read it, all try
        the one before.

        Args:
            into: for a sharded checkpoint, the state to fill: the same keys as were saved, with
                tensors as they are placed now. The number of processes may have changed.
            weights_only: whether to refuse other objects than tensors, numbers, texts and
                containers of them: loading such an object may execute code.
            map_location: the device of the tensors, as for torch.load; not for a sharded one.

        Raises:
            CheckpointError: there are checkpoints, and none can be loaded.
            UsageError: `into` is missing, or does not belong to this kind of checkpoint.
        """
        if self._sharded != (into is not None):
            what = "needs the state to fill" if self._sharded else "takes no state to fill"
            raise UsageError(f"load of a checkpoint with sharded={self._sharded} {what}")
        saved = self._found() if self._context.is_main else []
        problem: Exception | None = None
        for place in itertools.count():
            chosen = saved[place] if place < len(saved) else _NONE
            number = self._context.reduce(chosen.number, "max")
            step = self._context.reduce(chosen.step, "max")
            if number < 0:
                break
            path = self._directory / _name(number, step)
            # No rank may begin to read, which is a collective if sharded, before rank 0 has
            # checked the files.
            failed, state, error = self._try(functools.partial(self._check_first, path))
            if not failed:
                failed, state, error = self._try(
                    functools.partial(self._read, path, into, weights_only, map_location)
                )
            if not failed:
                self.step = step
                return state
            problem = error or problem
            self._unreadable.add(number)
        if not self._unreadable:
            return None
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be loaded"
            + (f": {problem}" if problem is not None else ": another process failed"),
            "without them, training would start from the beginning: repair or remove them",
        ) from problem

    def _check_first(self, path: Path) -> None:
        if self._context.is_main:
            self._check(path)
        else:
            _wait_for(path)

    def _read(self, path: Path, into: Any, weights_only: bool, place: Any) -> Any:  # noqa: FBT001
        if self._sharded:
            return sharded_checkpoint.load(path, into, weights_only=weights_only)
        import torch

        return torch.load(path / _STATE, map_location=place, weights_only=weights_only)

    def _found(self) -> list[_Saved]:
        """Return the checkpoints of the directory, the newest first, complete or not."""
        try:
            names = [_NAME.fullmatch(name) for name in os.listdir(self._directory)]
        except FileNotFoundError:
            return []
        found = [
            _Saved(int(match["number"]), int(match["step"]), self._directory / match[0])
            for match in names
            if match
        ]
        return sorted(found, reverse=True)

    def _check(self, path: Path) -> None:
        """Raise an error if a checkpoint lacks a part, or is of the other kind."""
        with (path / _FILES).open("rb") as stream:
            listed = json.loads(stream.read(_MAX_LIST))
        for name, size in listed["files"].items():
            if (path / name).stat().st_size != size:
                raise CheckpointError(f"{path / name} is not as long as it was written")
        if listed["sharded"] != self._sharded:
            raise CheckpointError(f"{path} was saved with sharded={listed['sharded']}")

    # -- saving ------------------------------------------------------------------------------------

    def save(self, state: Any, *, step: int) -> None:
        """Save a checkpoint and return when it is on disk, on all processes.

        Args:
            state: what `load` returns later. Without `sharded`, only rank 0's is saved.
            step: the number of the step, which names the checkpoint.

        Raises:
            CheckpointError: it cannot be written, such as on a full disk; the earlier checkpoints
                remain.
            UsageError: the step is not a whole number from 0.
        """
        if type(step) is not int or not 0 <= step < 10**18:
            raise UsageError(f"step {step!r}: must be a whole number from 0")
        if self._sharded:
            self._together(step, self._begin)
            self._together(
                step, lambda: sharded_checkpoint.save(self._unfinished, state), all_ranks=True
            )
        self._together(step, lambda: self._finish(state, step))
        self.step = step

    @property
    def _unfinished(self) -> Path:
        return self._directory / _UNFINISHED

    def _begin(self) -> None:
        """Make an empty directory; the old one is left of a save that was killed."""
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            _sync_directory(self._directory.parent)
        if self._unfinished.exists():
            shutil.rmtree(self._unfinished)
        self._unfinished.mkdir()

    def _finish(self, state: Any, step: int) -> None:
        """Write the state of rank 0, the list of files, and rename the checkpoint."""
        if self._sharded:
            names = sharded_checkpoint.files(self._unfinished)
        else:
            self._begin()
            names = [_STATE]
            _save_alone(self._unfinished / _STATE, state)
        sizes = {name: (self._unfinished / name).stat().st_size for name in names}
        with (self._unfinished / _FILES).open("x") as stream:
            json.dump({"files": sizes, "sharded": self._sharded, "step": step}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_directory(self._unfinished)
        saved = self._found()
        new = self._directory / _name(saved[0].number + 1 if saved else 0, step)
        self._unfinished.rename(new)
        _sync_directory(self._directory)
        previous = next((one for one in saved if self._is_complete(one)), None)
        for one in saved:
            if one is not previous:
                shutil.rmtree(one.path, ignore_errors=True)

    def _is_complete(self, saved: _Saved) -> bool:
        try:
            self._check(saved.path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, CheckpointError):
            return False
        return saved.number not in self._unreadable

    # -- agreement ---------------------------------------------------------------------------------

    def _try(self, action: Callable[[], Any]) -> tuple[bool, Any, Exception | None]:
        """Run an action; return whether it failed on any rank, its result and its own error."""
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            problem = error
        return bool(self._context.reduce(int(problem is not None), "max")), result, problem

    def _together(self, step: int, action: Callable[[], None], *, all_ranks: bool = False) -> None:
        """Run an action on rank 0 or on all ranks; if it fails on one, raise an error on all."""
        if not (all_ranks or self._context.is_main):
            action = _nothing
        failed, _, problem = self._try(action)
        if failed:
            why = str(problem) if problem is not None else "another process failed"
            raise CheckpointError(
                f"step {step} cannot be saved in {self._directory}: {why}"
            ) from problem


def _nothing() -> None:
    pass


def _name(number: int, step: int) -> str:
    return f"{number:08}.step{step}"


def _save_alone(path: Path, state: Any) -> None:
    import torch

    with path.open("xb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_directory(path: Path) -> None:
    """Write the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wait_for(path: Path) -> None:
    """Wait a few seconds for a checkpoint that rank 0 sees: another node's cache may be older."""
    until = time.monotonic() + _CACHE_TIMEOUT
    while not (path / _FILES).exists() and time.monotonic() < until:
        time.sleep(0.1)
