"""Save and load checkpoints; a kill at any moment leaves one that can be loaded.

Each checkpoint is a directory ``<number>.step<step>``: rank 0's state as torch.save writes it, or
the parts of all ranks in the format of torch.distributed.checkpoint. It is written under another
name, flushed to disk and renamed. One that cannot be read is skipped. The latest two are kept;
older ones are removed when the new one is on disk. No pickle is executed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clusterjob.errors import CheckpointError, UsageError

_NAME = re.compile(r"(?P<number>\d{8,12})\.step(?P<step>\d{1,18})", re.ASCII)
_UNFINISHED = ".saving"  # the checkpoint that is being written
_STATE = "state.pt"
_METADATA = ".metadata"  # of torch.distributed.checkpoint: where each tensor is, as a pickle
# The classes of that metadata, besides torch's data types.
_ALLOWED = {
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
}  # fmt: skip


class Checkpoint:
    """The checkpoints of a job; `Context.checkpoint` makes it. All processes call its methods.

    Attributes:
        step: the step that was loaded or saved last; None before.
    """

    def __init__(self, context: Any, directory: str | os.PathLike[str], *, sharded: bool) -> None:
        self._context = context
        self._directory = Path(directory)
        self._unfinished = self._directory / _UNFINISHED
        self._sharded = sharded
        self._unreadable: set[int] = set()  # numbers of checkpoints that could not be loaded
        self.step: int | None = None

    def load(
        self, into: Any = None, *, weights_only: bool = True, map_location: Any = "cpu"
    ) -> Any:
        """Return the state of the latest checkpoint that can be read; None if there is none.

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

        def read() -> Any:
            if self._sharded:
                return _load_parts(path, into, weights_only=weights_only)
            import torch

            return torch.load(path / _STATE, map_location=map_location, weights_only=weights_only)

        problem: Exception | None = None
        saved = self._found() if self._context.is_main else []
        for index in range(self._context.reduce(len(saved), "max")):
            chosen = saved[index] if saved else (0, 0)
            number, step = (self._context.reduce(each, "max") for each in chosen)
            path = self._directory / _name(number, step)
            failed, state, error = self._try(read)
            if not failed:
                self.step = step
                return state
            problem = error or problem
            self._unreadable.add(number)
        if not self._unreadable:
            return None
        why = f"{type(problem).__name__}: {problem}" if problem else "another process failed"
        raise CheckpointError(
            f"no checkpoint in {self._directory} can be loaded: {why}",
            "without them, training would start from the beginning: repair or remove them",
        ) from problem

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

        save = _save_parts if self._sharded else _save_whole
        self._together(step, self._begin)
        self._together(step, lambda: save(self._unfinished, state), all_ranks=self._sharded)
        self._together(step, lambda: self._finish(step))
        self.step = step

    def _begin(self) -> None:
        """Make an empty directory; the old one is left of a save that was killed."""
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            _sync(self._directory.parent)
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir()

    def _finish(self, step: int) -> None:
        """Rename the checkpoint, and remove all but it and the one before."""
        _sync(self._unfinished)
        saved = self._found()
        number = saved[0][0] + 1 if saved else 0
        self._unfinished.rename(self._directory / _name(number, step))
        _sync(self._directory)
        previous = next((one for one in saved if one[0] not in self._unreadable), None)
        for one in saved:
            if one != previous:
                shutil.rmtree(self._directory / _name(*one), ignore_errors=True)

    def _found(self) -> list[tuple[int, int]]:
        """Return number and step of each checkpoint, the newest first, readable or not."""
        names = os.listdir(self._directory) if self._directory.is_dir() else []
        matches = filter(None, map(_NAME.fullmatch, names))
        found = [(int(match["number"]), int(match["step"])) for match in matches]
        return sorted(found, reverse=True)

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
        acts = all_ranks or self._context.is_main
        failed, _, problem = self._try(action if acts else lambda: None)
        if failed:
            why = str(problem) if problem is not None else "another process failed"
            raise CheckpointError(
                f"step {step} cannot be saved in {self._directory}: {why}"
            ) from problem


def _name(number: int, step: int) -> str:
    return f"{number:08}.step{step}"


def _sync(directory: Path) -> None:
    """Write the names in a directory to disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_whole(directory: Path, state: Any) -> None:
    import torch

    with (directory / _STATE).open("xb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


# -- parts -----------------------------------------------------------------------------------------


def _save_parts(directory: Path, state: Any) -> None:
    """Save this process's part of a state; all processes call it.

    Raises:
        CheckpointError: a process failed; all processes get the error.
    """
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(directory, sync_files=True)
    with _errors_of_torch():
        checkpoint.save(state, storage_writer=writer)


def _load_parts(directory: Path, into: Any, *, weights_only: bool) -> Any:
    """Fill a state from all parts that it needs, and return it; all processes call it.

    Raises:
        CheckpointError: a process failed; all processes get the error.
    """
    from torch.distributed import checkpoint

    class Reader(checkpoint.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            with (directory / _METADATA).open("rb") as stream:
                return _Unpickler(stream).load()

    class Planner(checkpoint.DefaultLoadPlanner):  # type: ignore[misc]
        def load_bytes(self, read_item: Any, value: Any) -> None:
            import torch

            torch.load(value, weights_only=True)  # refuses what torch would execute below
            value.seek(0)
            super().load_bytes(read_item, value)

    reader, planner = checkpoint.FileSystemReader(directory), None
    if weights_only:
        reader, planner = Reader(directory), Planner()
    with _errors_of_torch():
        checkpoint.load(into, storage_reader=reader, planner=planner)
    return into


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Turn torch's exception, which no `except Exception` catches, into an ordinary one.

    Also hide torch's warning that a single process has no process group.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (problem, _) = min(error.failures.items())
        raise CheckpointError(f"rank {rank}: {problem}") from error


class _Unpickler(pickle.Unpickler):
    """Read torch's metadata; refuse every other class."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"the metadata contains {module}.{name}")
