"""Classify the errors that torch, gloo, NCCL and Python write, with the source of each text.

These texts belong to other programs, which report no error codes. clusterjob's own processes
report a `FailureKind` as data.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Sequence

from clusterjob.node.verdict import FailureKind

# The meanings of an error text.
# PEER_LOST: the connection to another worker is lost. RANKS_MISSING: other ranks did not join.
# PEER_FAILED: another worker has an error, and this one raises its own. TERMINATED, CHILD_KILLED:
# SIGTERM ended, or SIGKILL may have ended, a process that the worker needs. IN_TORCH_DISTRIBUTED:
# the failure is inside torch.distributed. The others have the name of a `FailureKind`.
Meaning = enum.Enum(
    "Meaning",
    "PEER_LOST RANKS_MISSING PEER_FAILED TERMINATED CHILD_KILLED NO_GPU_FOR_NCCL OOM_DEVICE DEVICE "
    "DISK OOM_HOST IMPORT IN_TORCH_DISTRIBUTED",
)
FULL_DISK = "No space left on device"
# Meaning, pattern, and the source of the text.
_RULES = (
    (
        Meaning.PEER_LOST,
        r"Connection closed by peer|application timeout caused pair closure",
        "gloo/transport/tcp/pair.cc",
    ),
    (
        Meaning.PEER_LOST,
        r"Connection reset by peer|Broken pipe",
        "errno(3), through gloo and c10d",
    ),
    (
        Meaning.PEER_LOST,
        (
            r"Connection was likely closed|Socket Timeout|failed to recv, got 0 bytes"
            r"|Failed to recv|DistNetworkError|recvValue failed|sendBytes failed"
            r"|recvVector failed|wait timeout after \d+ms"
        ),
        "torch/csrc/distributed/c10d/TCPStore.cpp, pytorch#113546, #194871",
    ),
    (
        Meaning.PEER_LOST,
        r"remote process exited or there was a network error|NCCL communicator was aborted",
        "nccl/src/init.cc, ProcessGroupNCCL.cpp",
    ),
    (
        Meaning.PEER_LOST,
        r"Timed out waiting \d+ms for (?:recv|send) operation",
        "gloo/transport/tcp/unbound_buffer.cc",
    ),
    (
        Meaning.RANKS_MISSING,
        r"\bRanksMissingError: ",
        "clusterjob.errors, in the traceback of a worker that has no report pipe",
    ),
    (
        Meaning.PEER_FAILED,
        r"\bCheckpointError: .*: another process failed",
        "clusterjob.worker.checkpoint",
    ),
    (
        Meaning.PEER_LOST,
        r"Watchdog caught collective operation timeout",
        "ProcessGroupNCCL.cpp",
    ),
    (
        Meaning.RANKS_MISSING,
        (
            r"wait timeout after \d+ms, keys: /(?:clusterjob/group\d+of\d+/)?default_pg/"
            r"|Timed out after \d+ seconds waiting for clients"
        ),
        "torch's store, in the rendezvous of init_process_group: TCPStore.cpp",
    ),
    (
        Meaning.TERMINATED,
        r"killed by signal: Terminated|DataLoader worker .* exited unexpectedly",
        "torch/csrc/DataLoader.cpp, torch/utils/data/dataloader.py",
    ),
    (
        Meaning.TERMINATED,
        r"got signal: 15\b",
        "torch/distributed/elastic/agent/server/api.py",
    ),
    (
        Meaning.CHILD_KILLED,
        r"DataLoader worker .* (?:is killed by signal: Killed|exited unexpectedly)",
        "torch/csrc/DataLoader.cpp, torch/utils/data/dataloader.py",
    ),
    (
        Meaning.NO_GPU_FOR_NCCL,
        r"doesn't have NCCL built in|ProcessGroupNCCL is only supported with GPUs, no GPUs found",
        "torch/distributed/distributed_c10d.py, ProcessGroupNCCL.cpp",
    ),
    (
        Meaning.OOM_DEVICE,
        r"\bOutOfMemoryError: |CUDA out of memory",
        "c10/cuda/CUDACachingAllocator.cpp",
    ),
    (
        Meaning.DEVICE,
        # A failed assertion in a kernel is an error of the program, such as an index out of bounds.
        (
            r"(?:CUDA|HIP) error: (?!device-side assert)|CUDA unknown error|unhandled cuda error"
            r"|uncorrectable ECC error|\bNVRM: Xid\b|GPU is lost|fallen off the bus"
        ),
        "c10/cuda/CUDAException.cpp, NCCL's ncclGetErrorString, docs.nvidia.com/deploy/xid-errors",
    ),
    (
        Meaning.OOM_HOST,
        (
            r"^(?:\[rank\d+\]: ?)*MemoryError\b|\[Errno 12\] Cannot allocate memory"
            r"|DefaultCPUAllocator: .*(?:not enough memory|can't allocate memory)"
            r"|workers are out of shared memory"
        ),
        "Python's MemoryError and OSError, c10/core/impl/alloc_cpu.cpp, torch/csrc/DataLoader.cpp",
    ),
    (
        Meaning.DISK,
        (
            rf"{FULL_DISK}|\[Errno 5\] Input/output error"
            r"|\[Errno 30\] Read-only file system|PytorchStreamWriter failed writing file"
        ),
        "errno(3), through Python; caffe2/serialize/inline_container.cc",
    ),
    (
        Meaning.IMPORT,
        r"^(?:\[rank\d+\]: ?)*(?:ImportError|ModuleNotFoundError): ",
        "Python",
    ),
    # torch/distributed/elastic is excluded: `@record` of torchrun wraps a whole script.
    (
        Meaning.IN_TORCH_DISTRIBUTED,
        (
            r'File ".*/torch/(?:nn/parallel/)?distributed(?:\.py|/(?!elastic/))'
            r"|torch\.distributed\.Dist|c10::Dist|\bProcessGroup|\[c10d\]|gloo/transport/|\bNCCL\b"
            r"|\bRendezvousError: |\bRanksMissingError: "
        ),
        "the frames of torch.distributed, and the loggers of c10d, gloo and NCCL",
    ),
)
_PATTERNS = [
    (meaning, re.compile(pattern, re.IGNORECASE | re.MULTILINE)) for meaning, pattern, _ in _RULES
]

# The first frame in these files of torch names the function that the script called. torch's wrapper
# for logs is in another file.
_COLLECTIVE = re.compile(
    r'File ".*/torch/(?:distributed/distributed_c10d|_tensor|autograd/__init__)\.py",'
    r" line \d+, in (\w+)"
)

_KINDS = {
    Meaning.TERMINATED: FailureKind.TERMINATED,
    Meaning.RANKS_MISSING: FailureKind.RENDEZVOUS,
    Meaning.PEER_LOST: FailureKind.NETWORK,
    Meaning.OOM_DEVICE: FailureKind.OOM_DEVICE,
    Meaning.DEVICE: FailureKind.DEVICE,
    Meaning.DISK: FailureKind.DISK,
    Meaning.OOM_HOST: FailureKind.OOM_HOST,
    Meaning.IMPORT: FailureKind.IMPORT,
}


# Only the error that ended the worker has these meanings, not an earlier error in its output.
_OF_LAST_ERROR = frozenset({
    Meaning.PEER_FAILED,
    Meaning.OOM_DEVICE, Meaning.DEVICE, Meaning.DISK, Meaning.OOM_HOST, Meaning.IMPORT,
})  # fmt: skip


def meanings_of_end(
    message: str, lines: Sequence[str], reported: FailureKind | None = None
) -> frozenset[Meaning]:
    """Return the meanings of a worker's end.

    A program may print an error that it has handled, such as a missing module or memory that it
    then does without.

    Args:
        message: the error message known so far.
        lines: the last lines of its stderr.
        reported: the kind that the worker itself has reported; with `CODE`, the message is the
            exception.
    """
    last_error = _last_error(lines)
    if not last_error and reported is not FailureKind.CODE:
        return meanings((message, *lines))
    handled = _OF_LAST_ERROR - meanings((message, *last_error))
    return meanings((message, *lines)) - handled


def meanings(lines: Sequence[str]) -> frozenset[Meaning]:
    """Return the meanings of all error texts in some lines."""
    text = "\n".join(lines)
    return frozenset(meaning for meaning, pattern in _PATTERNS if pattern.search(text))


def kind_of_end(
    reported: FailureKind | None,
    meanings: frozenset[Meaning],
    signal_name: str | None,
    *,
    raised: bool,
) -> FailureKind:
    """Return the kind of a worker's failure: the most specific kind that is known.

    Args:
        reported: the kind that the worker itself has reported, or None.
        meanings: the meanings of its last lines.
        signal_name: the signal that ended it, or None.
        raised: whether its last lines contain a traceback.
    """
    if signal_name == "SIGTERM":
        return FailureKind.TERMINATED
    if reported not in (None, FailureKind.CODE, FailureKind.EXIT_CODE):
        return reported
    found = next((kind for meaning, kind in _KINDS.items() if meaning in meanings), None)
    if found is not None and signal_name in (None, "SIGABRT"):
        return found
    if signal_name is not None:
        return FailureKind.SIGNAL
    if reported is FailureKind.CODE or raised:
        return FailureKind.CODE
    return FailureKind.EXIT_CODE


def is_effect(found: frozenset[Meaning]) -> bool:
    """Return whether the worker failed only because another one failed, ended or is missing."""
    return bool(found & {Meaning.PEER_LOST, Meaning.RANKS_MISSING, Meaning.PEER_FAILED})


def in_collective(lines: Sequence[str]) -> bool:
    """Return whether lines show a failure inside torch.distributed, not of another connection."""
    return Meaning.IN_TORCH_DISTRIBUTED in meanings(lines) or collective(lines) is not None


def collective(lines: Sequence[str]) -> str | None:
    """Return torch's function in a traceback, such as ``all_reduce``; None if there is none."""
    matches = map(_COLLECTIVE.search, lines)
    return next((match[1] for match in matches if match is not None), None)


# torch marks every line of a traceback once a process group was made, and again for each one.
_RANK_MARK = re.compile(r"(?:\[rank\d+\]: ?)+")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[^\W\d][\w.]*(: .*)?")
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): ")
_FRAME = re.compile(r' +File "(?:.*/)?(?P<name>[^/"]+)", line (?P<line>\d+)', re.ASCII)


def last_exception(lines: Sequence[str]) -> str | None:
    """Return the exception of the last Python traceback, such as ``ValueError: boom``, or None.

    Lines may follow it: Hydra catches the exception, prints a line, and calls sys.exit(1).
    """
    return next(filter(_EXCEPTION.fullmatch, _last_traceback(lines)), None)


def _last_error(lines: Sequence[str]) -> list[str]:
    """Return the last exception of a traceback, and the lines after it."""
    after = _last_traceback(lines)
    number = next((n for n, line in enumerate(after) if _EXCEPTION.fullmatch(line)), len(after))
    return after[number:]


def ending_at_error(lines: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the last lines; those that end at the last exception if as many lines follow it.

    A library may print many lines at the end of the interpreter.

    Args:
        lines: the end of a worker's stderr.
        count: the maximum number of lines; one more says how many followed.
    """
    followed = len(_last_error(lines)) - 1
    if followed < count:
        return tuple(lines[-count:])
    end = len(lines) - followed
    return (*lines[max(0, end - count) : end], f"({followed} more lines followed)")


def place(lines: Sequence[str]) -> str:
    """Return the file and line of the last Python traceback, as ``train.py:12``, or ""."""
    own = itertools.takewhile(lambda line: not _EXCEPTION.fullmatch(line), _last_traceback(lines))
    frames = [frame for frame in map(_FRAME.match, own) if frame is not None]
    return f"{frames[-1]['name']}:{frames[-1]['line']}" if frames else ""


def _last_traceback(lines: Sequence[str]) -> list[str]:
    """Return the lines after the begin of the last traceback, without torch's marks."""
    bare = [_RANK_MARK.sub("", line, count=1) for line in lines]
    # A DataLoader worker's "Original Traceback" precedes the traceback of its rank.
    begins = [number for number, line in enumerate(bare) if line.endswith(_TRACEBACK)]
    if begins:
        return bare[begins[-1] + 1 :]
    # Python prints no such title for a SyntaxError of the script itself.
    frame = next((number for number, line in enumerate(bare) if _FRAME.match(line)), len(bare))
    return bare[frame:] if any(map(_SYNTAX.match, bare[frame:])) else []


# Warnings of c10d's and NCCL's loggers, and the C++ frames that follow some of them.
_LIBRARY_LINE = re.compile(
    r"(\[rank\d+\]: ?)?(\[[WI]\d{4} \d\d:\d\d:\d\d\.\d+ \w+\.\w+:\d+\]|frame #\d+: "
    r"|Exception raised from .*\(most recent call first\):)"
)


def without_library_warnings(lines: Sequence[str]) -> tuple[str, ...]:
    """Return lines of stderr without the warnings of C++ libraries; all lines if none is left."""
    own = tuple(line for line in lines if not _LIBRARY_LINE.match(line))
    return own or tuple(lines)
