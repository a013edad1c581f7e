"""Save and load a state in parts with torch.distributed.checkpoint; execute no pickle."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clusterjob.errors import CheckpointError

_METADATA = ".metadata"  # of torch: where each tensor is, as a pickle
# The classes of torch's metadata, besides torch's data types.
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


def save(directory: Path, state: Any) -> None:
    """Save this process's part of a state; all processes call it.

    Raises:
        CheckpointError: a process failed; all processes get the error.
    """
    from torch.distributed import checkpoint

    writer = checkpoint.FileSystemWriter(directory, sync_files=True)
    with _errors_of_torch():
        checkpoint.save(state, storage_writer=writer)


def load(directory: Path, into: Any, *, weights_only: bool) -> Any:
    """Fill a state from all parts that it needs, and return it; all processes call it.

    Raises:
        CheckpointError: a process failed; all processes get the error.
    """
    from torch.distributed import checkpoint

    class Reader(checkpoint.FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *_: Any, **__: Any) -> Any:
            metadata = _metadata(directory)
            if metadata.storage_meta is not None:
                metadata.storage_meta.load_id = self.load_id
            return metadata

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


def files(directory: Path) -> list[str]:
    """Return the names of all files of a saved state, also of those that other nodes wrote."""
    metadata = _metadata(directory)
    return sorted({_METADATA, *(info.relative_path for info in metadata.storage_data.values())})


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


def _metadata(directory: Path) -> Any:
    with (directory / _METADATA).open("rb") as stream:
        return _Unpickler(stream).load()


class _Unpickler(pickle.Unpickler):
    """Read torch's metadata; refuse every other class."""

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"the metadata contains {module}.{name}")
