"""The stacks of workers as data; the groups of equal ones; the texts and files about them."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from clusterjob.node.logs.events import now
from clusterjob.node.system import codec, files
from clusterjob.node.system.codec import Limit
from clusterjob.node.system.ranges import ranks_text
from clusterjob.node.system.sanitize import sanitize

MAX_TEXT = 600  # characters of a name
STOPPED = ("is stopped", "is being traced")  # the beginning of a state
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


# A line of a frame; faulthandler cuts file names off after 500 characters.
_FRAME = re.compile(
    r'  File (?:"(?P<file>.*)"|\?\?\?), line (?P<line>[0-9]{1,9}|\?\?\?) in (?P<name>.*)'
)
# The begin of a thread in the text of `offer`, and of the main thread in that of faulthandler.
_THREAD = re.compile(r"Thread (?P<name>.*)|Stack \(most recent call first\):")
# faulthandler's text for a character that is not ASCII; of a surrogate, JSON could not be decoded.
_ESCAPE = re.compile(r"\\(?:x([89a-f][0-9a-f])|u((?!d[89a-f])[0-9a-f]{4})|U000([0-9a-f]{5}))")
MAX_THREADS = 100
MAX_FRAMES = 200
# Files of the interpreter, of installed packages, and of clusterjob.
_LIBRARY = re.compile(
    r"/lib(64)?/python\d[^/]*/|-packages/|^<frozen |\.pyz/"
    r"|/clusterjob/(bootstrap\.py$|node/|worker/)"
    r"|/python/(sitecustomize|clusterjob_hook/\w+)\.py$"  # see `workers.hook`
)
# The hook's files: functions between the program and torch, and a thread of their own.
_HOOK = re.compile(
    r"/clusterjob/node/workers/(hook|torch_patches)\.py$"
    r"|/python/(sitecustomize|clusterjob_hook/\w+)\.py$"
)
_IMPORT = re.compile(
    r"^<frozen importlib|/python/(sitecustomize|clusterjob_hook/__init__)\.py$"
    r"|/node/workers/hook\.py$"
)


def parse_threads(text: str) -> tuple[ThreadStack, ...]:
    """Return the stacks in a text of `offer` or faulthandler, the main thread's first.

    clusterjob's own frames and threads are left out; the main thread may have no frames then.
    """
    found: list[tuple[str, list[Frame]]] = []
    text = _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)
    for line in text.split("\n"):
        if begin := _THREAD.fullmatch(line):
            found.append((begin["name"] or "MainThread", []))
        elif found and (match := _FRAME.fullmatch(line)):
            number = match["line"]
            frame = Frame(
                (match["file"] or "???")[:MAX_TEXT],
                int(number) if number.isdecimal() else None,
                match["name"][:MAX_TEXT],
            )
            found[-1][1].append(frame)
    threads = [
        ThreadStack(name[:MAX_TEXT], of_program(frames[:MAX_FRAMES]))
        for name, frames in found[:MAX_THREADS]
    ]
    return tuple(each for each in threads if each.frames or each is threads[0])


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


def is_of_program(frame: Frame) -> bool:
    """Return whether a frame is in a Python file of the program itself, not in a library."""
    return frame.line is not None and _LIBRARY.search(frame.file) is None


# Functions that wait, by the end of their file. "*": each function with a public name.
_WAITS = {
    "torch/distributed/distributed_c10d.py": {"*"},
    "torch/distributed/rendezvous.py": {"*"},
    "clusterjob/bootstrap.py": {"init"},
    "torch/distributed/nn/functional.py": {"*"},
    "torch/cuda/__init__.py": {"synchronize"},
    "torch/cuda/streams.py": {"synchronize", "wait"},
    "torch/utils/data/dataloader.py": {"__next__"},
    "concurrent/futures/_base.py": {"exception", "result", "wait"},
    "multiprocessing/connection.py": {"accept", "poll", "recv", "recv_bytes", "wait"},
    "multiprocessing/pool.py": {"get", "join", "wait"},
    "multiprocessing/popen_fork.py": {"poll", "wait"},
    "multiprocessing/process.py": {"join"},
    "multiprocessing/queues.py": {"get", "put"},
    "multiprocessing/synchronize.py": {"__enter__", "acquire", "wait"},
    "/queue.py": {"get", "join", "put"},
    "/selectors.py": {"select"},
    "/socket.py": {"accept", "create_connection", "readinto"},
    "/ssl.py": {"do_handshake", "read", "recv"},
    "/subprocess.py": {"_try_wait", "_wait", "call", "communicate", "run", "wait"},
    "/threading.py": {"__enter__", "acquire", "join", "wait", "wait_for"},
}
# Files that lie between a waiting function and the function that it waits in.
_PEERS = re.compile(r"torch/(?:distributed|cuda)/")
_BETWEEN = re.compile(r"/clusterjob/worker/|torch/distributed/c10d_logger\.py$")


def find_wait(frames: Sequence[Frame]) -> tuple[str, int] | None:
    """Return the outermost waiting function that all innermost frames belong to, or None.

    It is its name, such as ``all_reduce`` or ``queue.get``, and the index of its frame.

    Args:
        frames: the frames of a thread, the innermost first.
    """
    found = None
    for index, frame in enumerate(frames):
        if frame.line is None:  # C and C++
            continue
        file = next(filter(frame.file.endswith, _WAITS), None)
        if file is None and found is not None and _BETWEEN.search(frame.file):
            continue
        if file is None or is_of_program(frame):
            break
        name, waits = short_name(frame), _WAITS[file]
        if name in waits or ("*" in waits and not name.startswith("_")):
            found = _label(file, name), index
    return found


def waits_for_peers(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits in a collective, or for the GPU that runs it."""
    wait = find_wait(frames)
    return wait is not None and bool(_PEERS.search(frames[wait[1]].file))


def short_name(frame: Frame) -> str:
    """Return a function's name without that of its class, which only py-spy knows."""
    return frame.function.rpartition(".")[2]


def _label(file: str, function: str) -> str:
    if not file.startswith(("torch/", "clusterjob/")):
        return f"{os.path.basename(file).removesuffix('.py')}.{function}"
    return {"__next__": "DataLoader", "init": "bootstrap.init"}.get(function, function)


SCHEMA = 1
_MAX_CLAUSES = 4  # groups in the headline
_MAX_NAMED = 3  # ranks in a clause; more are counted


@dataclass(frozen=True)
class Group:
    """Ranks with equal stacks of their main threads.

    Attributes:
        ranks: the ranks, in order.
        frames: the main thread's frames, the innermost first; empty without an answer.
        state: the kernel's state of the first rank.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    state: str


def group(stacks: Iterable[RankStack]) -> list[Group]:
    """Return the groups of ranks with equal stacks, the smallest first.

    Two stacks are equal if file, line and function of all frames are equal, where a file is its
    name and the name of its directory. Ranks that wait in the same function are equal wherever they
    are inside of it. Ranks without an answer are grouped by the kernel's state.
    """
    found: dict[Any, list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda each: each.rank):
        frames = stack.main_frames
        wait = find_wait(frames)
        key: Any = stack.state
        if wait is not None:
            key = (wait[0], *_comparable(frames[wait[1] + 1 :]))
        elif frames:
            key = _comparable(frames)
        key = (key, stack.state.startswith(STOPPED))
        found.setdefault(key, []).append(stack)
    groups = [
        Group(tuple(each.rank for each in equal), equal[0].main_frames, equal[0].state)
        for equal in found.values()
    ]
    return sorted(groups, key=lambda each: (len(each.ranks), each.ranks))


def _comparable(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the Python frames, or native ones if there are no others, comparable between hosts.

    The directories of the code and of the packages differ between hosts.
    """
    known = list(frames)
    return tuple(
        replace(
            frame,
            file="/".join(frame.file.rsplit("/", 2)[1:]),
            function=short_name(frame),
        )
        for frame in [each for each in known if each.line is not None] or known
    )


def headline(groups: Sequence[Group]) -> str:
    """Return one line about all groups, the largest first.

    For example ``7 ranks wait in all_reduce (train.py:9); rank 3 is in decode (data.py:41)``.
    """
    ordered = sorted(groups, key=lambda each: (-len(each.ranks), each.ranks))
    clauses = []
    for each in ordered[:_MAX_CLAUSES]:
        count = len(each.ranks)
        named = ranks_text(each.ranks) if count <= _MAX_NAMED else f"{count} ranks"
        if count > 1 and len(ordered) == 1:
            named = f"all {count} ranks"
        clauses.append(f"{named} {position_text(each.frames, each.state, several=count > 1)}")
    others = sum(len(each.ranks) for each in ordered[_MAX_CLAUSES:])
    if others:
        clauses.append(f"{others} more {'ranks are' if others > 1 else 'rank is'} elsewhere")
    return "; ".join(clauses) or "no ranks"


def position_text(frames: Sequence[Frame], state: str, *, several: bool = False) -> str:
    """Return where a main thread is, without the subject: ``is in decode (data.py:41)``.

    It names the function that waits, or the innermost function in a file of the program.

    Args:
        frames: its frames; empty without an answer.
        state: the kernel's state of its process.
        several: whether the subject is several ranks.
    """
    be, s = ("are", "") if several else ("is", "s")
    if not frames:
        return f"{'do' if several else 'does'} not answer: the process {state}"
    shown = without_imports(frames)
    frame = next(filter(is_of_program, shown), shown[0])
    wait = find_wait(frames)
    verb, function = f"{be} in", frame.function
    if state.startswith(STOPPED):  # py-spy has read the stack
        verb = f"{be} stopped in"
    elif wait is not None:
        verb, function = f"wait{s} in", wait[0]
    elif len(shown) < len(frames):
        verb = f"import{s} in"
    return f"{verb} {function} ({place_text(frame)})"


def without_imports(frames: Sequence[Frame]) -> Sequence[Frame]:
    """Return the frames without those of Python's import machinery, as a traceback shows them."""
    return [frame for frame in frames if not _IMPORT.search(frame.file)] or frames


def place_text(frame: Frame) -> str:
    """Return the place of a frame as ``data.py:41``."""
    return f"{os.path.basename(frame.file)}:{frame.line if frame.line is not None else '?'}"


def to_json(job_id: str, stacks: Sequence[RankStack]) -> dict[str, Any]:
    """Return the stacks of a job and their groups as plain data.

    Args:
        job_id: the job.
        stacks: the stacks of its ranks.
    """
    return {
        "schema": SCHEMA,
        "id": job_id,
        "ranks": [codec.plain(each) for each in sorted(stacks, key=lambda each: each.rank)],
        "groups": [codec.plain(each) for each in group(stacks)],
    }


def text(stacks: Sequence[RankStack], *, all_threads: bool = False) -> list[str]:
    """Return the headline, and the groups with their frames, as lines.

    Args:
        stacks: the stacks of a job's ranks.
        all_threads: whether to show all threads of all ranks; else those of the smallest group.
    """
    groups = group(stacks)
    by_rank = {each.rank: each for each in stacks}
    lines = [headline(groups)]
    for index, each in enumerate(groups):
        members = [by_rank[rank] for rank in each.ranks]
        lines += ["", _title(members), *frame_lines(each.frames)]
        shown = members if all_threads else members[:1] if index == 0 else []
        for stack in shown:
            for thread in stack.threads[1:]:
                lines.append(f"  {thread.name} of rank {stack.rank}:")
                lines += [f"  {line}" for line in frame_lines(thread.frames)]
    return lines


def _title(members: Sequence[RankStack]) -> str:
    """Return the ranks of a group, and where one or all of them run."""
    first, nodes = members[0], {each.node_rank for each in members}
    where = f"node {first.node_rank}" if len(nodes) == 1 else f"{len(nodes)} nodes"
    if len(members) == 1:
        where += f", {first.host}, pid {first.pid}"
    states = ", ".join(sorted({each.state for each in members}))
    named = ranks_text(each.rank for each in members)
    return f"{named} ({where}: {states})" + ("" if first.answered else ": no answer")


def frame_lines(frames: Sequence[Frame]) -> list[str]:
    """Return the frames of a thread as lines, without those of Python's import machinery."""
    return [
        f"  {frame.function} ({frame.file}:{'?' if frame.line is None else frame.line})"
        for frame in without_imports(frames)
    ]


def write_evidence(
    path: Path,
    job_id: str,
    stacks: Sequence[RankStack],
    why: str,
    silent: Sequence[str] = (),
    dumps: Sequence[str] = (),
) -> None:
    """Write the stacks before a job is stopped.

    ``stacks[.attempt<A>][.restart<R>].json`` has the content of ``clusterjob stacks --json``, the
    reason of the stop and the time; the file ``.txt`` beside it is for a person.

    Args:
        path: the path of the text.
        job_id: the job.
        stacks: the stacks of the living ranks.
        why: why the job is stopped.
        silent: the nodes that did not answer, one text for each.
        dumps: the dumps of torch's flight recorder, relative to the job directory.

    Raises:
        OSError: a file cannot be written.
    """
    at, why = now(), sanitize(why)
    data = to_json(job_id, stacks) | {
        "why": why,
        "time": at,
        "silent_nodes": list(silent),
        "flight_recorder": list(dumps),
    }
    files.write_atomic(path.with_suffix(".json"), json.dumps(data).encode())
    lines = [
        f"{at} {why}",
        *(f"{node} did not answer" for node in silent),
        *(f"torch's flight recorder: {name}" for name in dumps),
        "",
        *text(stacks, all_threads=True),
    ]
    shown = "".join(f"{sanitize(line)}\n" for line in lines)
    files.write_atomic(path, shown.encode(errors="replace"))
