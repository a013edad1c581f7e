"""Add the C and C++ frames to the Python stacks of processes."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import itertools
import mmap
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterjob.node.stacks import elf, thread_copies, unwinding
from clusterjob.node.stacks.elf import Image
from clusterjob.node.stacks.frames import MAX_FRAMES, MAX_TEXT, MAX_THREADS, Frame, ThreadStack
from clusterjob.node.stacks.thread_copies import ThreadCopy
from clusterjob.node.system import files

# Functions of the interpreter that run Python code; Python itself knows the frames below them.
_RUN_PYTHON = ("_PyEval_EvalFrame", "_TAIL_CALL_")

Frames = tuple[Frame, ...]
Threads = dict[int, ThreadStack]  # by thread id


def add(found: Mapping[int, Threads], warn: Callable[[str], None]) -> dict[int, Threads]:
    """Return the threads of processes with their native frames, and their native threads.

    A thread's native frames are those above its Python frames. If the threads of a process cannot
    be copied, they are returned as they are.

    Args:
        found: the Python stacks, by pid.
        warn: called with one line if there are no native frames.
    """
    copied: dict[int, dict[int, ThreadCopy]] = {}
    errors = []
    for pid in found:
        try:
            copied[pid] = thread_copies.copy_threads(pid)
        except ProcessLookupError:  # it has ended
            continue
        except OSError as error:
            errors.append(error.strerror or str(error))
    for text in dict.fromkeys(errors):
        warn(f"no native frames: ptrace: {text}; see ptrace_scope, or the container's rights")
    frames = _of_processes(copied)
    return {
        pid: _merged(pid, threads, frames[pid]) if pid in frames else threads
        for pid, threads in found.items()
    }


def _merged(pid: int, threads: Threads, native_frames: Mapping[int, Frames]) -> Threads:
    """Return the main thread, the other Python threads, and the native threads."""
    tids = [pid, *threads, *native_frames]
    merged = {}
    for tid in list(dict.fromkeys(tids))[:MAX_THREADS]:
        known = threads.get(tid, ThreadStack(_name(pid, tid), ()))
        frames = native_frames.get(tid, ())
        if known.frames:
            frames = tuple(
                itertools.takewhile(lambda each: not each.function.startswith(_RUN_PYTHON), frames)
            )
        merged[tid] = ThreadStack(known.name, (*frames, *known.frames)[:MAX_FRAMES])
    return merged


def _name(pid: int, tid: int) -> str:
    comm = files.read_text(f"/proc/{pid}/task/{tid}/comm").strip()
    if tid == pid:
        return "MainThread"
    same = comm == files.read_text(f"/proc/{pid}/comm").strip()
    return f"thread {tid}" if same or not comm else comm


def _of_processes(
    copied: Mapping[int, Mapping[int, ThreadCopy]],
) -> dict[int, dict[int, Frames]]:
    """Return the native frames of copied threads, the innermost first."""
    libraries: dict[str, _Library] = {}
    calls: dict[int, dict[int, list[_Call]]] = {}
    wanted: dict[str, set[int]] = defaultdict(set)
    for pid, threads in copied.items():
        mapped = _Mapped(pid, libraries)
        calls[pid] = {
            tid: [mapped.call(at) for at in unwinding.addresses(each, mapped.image_at)]
            for tid, each in threads.items()
        }
        for call in itertools.chain.from_iterable(calls[pid].values()):
            wanted[call.path].add(call.address)
    names = {path: each.names(wanted[path]) for path, each in libraries.items()}

    def frame(call: _Call) -> Frame:
        name = names.get(call.path, {}).get(call.address, hex(call.address))
        return Frame(call.path[:MAX_TEXT], None, name[:MAX_TEXT])

    return {
        pid: {tid: tuple(map(frame, each)) for tid, each in threads.items()}
        for pid, threads in calls.items()
    }


@dataclass(frozen=True)
class _Call:
    """An address in a library; one of the process if there is no library."""

    path: str
    address: int


class _Library:
    """An ELF file of a process.

    Args:
        content: the content; None if it cannot be read.
    """

    def __init__(self, content: mmap.mmap | bytes | None) -> None:
        self.image: Image | None = None
        if content is not None:
            with contextlib.suppress(*elf.MALFORMED):
                self.image = Image(content)

    def names(self, addresses: set[int]) -> dict[int, str]:
        """Return the names of the functions at some addresses."""
        if self.image is None:
            return {}
        try:
            return {at: _demangled(name) for at, name in self.image.names(addresses).items()}
        except elf.MALFORMED:
            return {}


class _Mapped:
    """The libraries in the memory of a process.

    Args:
        pid: the process.
        libraries: the libraries that are known, by path.
    """

    def __init__(self, pid: int, libraries: dict[str, _Library]) -> None:
        self._pid = pid
        self._libraries = libraries
        # Begin, end, offset in the file, path.
        self._ranges: list[tuple[int, int, int, str]] = []
        for line in files.read_text(f"/proc/{pid}/maps").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1]:
                begin, end = (int(each, 16) for each in fields[0].split("-"))
                self._ranges.append((begin, end, int(fields[2], 16), fields[5]))

    def image_at(self, address: int) -> tuple[Image, int] | None:
        """Return the ELF file at an address, and what its own addresses lack."""
        found = self._range(address)
        if found is None:
            return None
        begin, end, offset, path = found
        if path not in self._libraries:
            self._libraries[path] = _Library(self._content(begin, end, path))
        image = self._libraries[path].image
        own = None if image is None else image.address(offset)
        return None if image is None or own is None else (image, begin - own)

    def call(self, address: int) -> _Call:
        """Return an address in its library."""
        image, found = self.image_at(address), self._range(address)
        if found is None:
            return _Call("???", address)
        return _Call(found[3], address - image[1] if image else address)

    def _range(self, address: int) -> tuple[int, int, int, str] | None:
        index = bisect.bisect(self._ranges, (address, 1 << 64)) - 1
        if index >= 0 and address < self._ranges[index][1]:
            return self._ranges[index]
        return None

    def _content(self, begin: int, end: int, path: str) -> mmap.mmap | bytes | None:
        try:
            if path == "[vdso]":
                file = os.open(f"/proc/{self._pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            else:
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
                file = os.open(f"/proc/{self._pid}/root{path}", flags)
            try:
                if path == "[vdso]":
                    return os.pread(file, end - begin, begin)
                if stat.S_ISREG(os.fstat(file).st_mode):
                    return mmap.mmap(file, 0, prot=mmap.PROT_READ)
            finally:
                os.close(file)
        except (OSError, ValueError):  # an empty file
            pass
        return None


def _demangled(name: str) -> str:
    """Return a C++ name as it is written in C++, if the node has the C++ library."""
    library = _cxx_library() if name.startswith("_Z") else None
    text = library and library.__cxa_demangle(name.encode(), None, None, None)
    return text.decode(errors="replace") if text else name


@functools.cache
def _cxx_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        # The texts are never freed: this process ends soon.
        library.__cxa_demangle.restype = ctypes.c_char_p
    except (OSError, AttributeError):
        return None
    return library
