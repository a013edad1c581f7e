"""The stacks of workers as data."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from clusterjob.node.system.codec import Limit

MAX_TEXT = 600  # characters of a name
_Text = Annotated[str, Limit(MAX_TEXT)]


@dataclass(frozen=True)
class Frame:
    """One frame of a thread.

    Attributes:
        file: the path of the source file, as the interpreter knows it.
        line: the line number; None if it is not known, as in C and C++.
        function: the name of the function.
    """

    file: _Text
    line: int | None
    function: _Text


@dataclass(frozen=True)
class ThreadStack:
    """The stack of one thread; the innermost frame is first."""

    name: _Text
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class RankStack:
    """The stacks of all threads of one rank.

    Attributes:
        rank, node_rank, host, pid: the worker.
        state: the kernel's state of the process, such as ``sleeps (futex_wait)``.
        answered: whether its main thread's stack is known.
        threads: its threads, the main thread first; empty without an answer. If only other threads
            have answered, the main thread has no frames.
    """

    rank: int
    node_rank: int
    host: _Text
    pid: int
    state: _Text
    answered: bool
    threads: tuple[ThreadStack, ...] = ()

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """The main thread's frames, the innermost first; empty without an answer."""
        return self.threads[0].frames if self.answered and self.threads else ()

    def to_json(self) -> dict[str, Any]:
        """Return the stack as plain data."""
        return {
            "rank": self.rank,
            "node_rank": self.node_rank,
            "host": self.host,
            "pid": self.pid,
            "state": self.state,
            "answered": self.answered,
            "threads": [
                {"name": thread.name, "frames": [vars(frame) for frame in thread.frames]}
                for thread in self.threads
            ],
        }


# A line of faulthandler; its file names are cut off after 500 characters.
_FRAME = re.compile(r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_THREAD = re.compile(r"^Thread ([0-9]{1,20})\n", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
MAX_THREADS = 100
MAX_FRAMES = 200
# Files of the interpreter, of installed packages, and of clusterjob.
_LIBRARY = re.compile(
    r"/lib(64)?/python\d[^/]*/|-packages/|^<frozen |\.pyz/"
    r"|/clusterjob/(bootstrap\.py$|node/|worker/)"
    r"|/python/(sitecustomize|clusterjob_\w+)\.py$"  # see `worker_process.write_hook`
)
# The hook's files: functions between the program and torch, and a thread of their own.
_HOOK = re.compile(
    r"/clusterjob/node/workers/(hook|torch_patches)\.py$"
    r"|/python/(sitecustomize|clusterjob_\w+)\.py$"
)
_IMPORT = re.compile(r"^<frozen importlib|/python/sitecustomize\.py$|/node/workers/hook\.py$")


def parse_thread(name: str, text: str) -> ThreadStack:
    """Return the stack that faulthandler has written; clusterjob's own frames are left out."""
    found: list[Frame] = []
    for line in text.splitlines()[: 2 * MAX_FRAMES]:
        match = _FRAME.fullmatch(line)
        if match is None or len(found) == MAX_FRAMES:
            continue
        number = match["line"]
        frame = Frame(
            _unescaped(match["file"] or "???")[:MAX_TEXT],
            int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else None,
            _unescaped(match["name"])[:MAX_TEXT],
        )
        found.append(frame)
    return ThreadStack(name, of_program(found))


def of_all_threads(text: str) -> dict[int, str]:
    """Return the stacks by thread id that `offer` has written for all threads."""
    parts = _THREAD.split(text)
    return dict(zip(map(int, parts[1::2]), parts[2::2], strict=True))


def of_program(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames without those of the forkserver and of the hook; none of its threads."""
    inner = tuple(
        itertools.takewhile(
            lambda frame: (
                not (frame.function == "run_as_main" and frame.file.endswith("node/program.py"))
            ),
            frames,
        )
    )
    kept = tuple(frame for frame in inner if not _HOOK.search(frame.file))
    own_thread = kept != inner and all(frame.file.endswith("/threading.py") for frame in kept)
    return () if own_thread else kept


def _unescaped(text: str) -> str:
    """Decode the escapes that faulthandler writes for all characters that are not ASCII."""

    def character(match: re.Match[str]) -> str:
        number = int(next(filter(None, match.groups())), 16)
        return chr(number) if number < 0x110000 and number >= 0x80 else match[0]

    return _ESCAPE.sub(character, text)


def is_of_program(frame: Frame) -> bool:
    """Return whether a frame is in a Python file of the program itself, not in a library."""
    return frame.line is not None and _LIBRARY.search(frame.file) is None


def program_frame(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame in a file of the program itself, or None."""
    return next(filter(is_of_program, frames), None)


def is_of_import(frame: Frame) -> bool:
    """Return whether a frame is of Python's import machinery, or of the hook in it."""
    return _IMPORT.search(frame.file) is not None


def position_text(frames: Sequence[Frame]) -> str:
    """Return a thread's position as one clause.

    It names the innermost line, and the innermost line of the program's own files.
    """
    shown = [frame for frame in frames if not is_of_import(frame)]
    if not shown:
        return "its stack names no file"
    text = "it imports, in " if len(shown) < len(frames) else "it is in "
    own = program_frame(shown) or shown[0]
    text += _line_text(shown[0])
    return text if own is shown[0] else f"{text}, from {_line_text(own)}"


def _line_text(frame: Frame) -> str:
    return f"{os.path.basename(frame.file)} line {frame.line}, {frame.function}"


def to_lines(threads: Iterable[ThreadStack]) -> list[str]:
    """Return the stacks as lines, each thread's name above its frames."""
    return [
        line
        for thread in threads
        for line in (
            f"Thread {thread.name} (most recent call first):",
            *map(frame_line, thread.frames),
        )
    ]


def frame_line(frame: Frame) -> str:
    """Return a frame as a line of a traceback."""
    return f'  File "{frame.file}", line {frame.line} in {frame.function}'
