"""Jobs on this host: write, start, poll, cancel, remove, send results.

The functions take clusterjob's directory on this host, the job's name and the number of this host's
node in the job. An agent runs independently of the session that starts it. Growing files are sent
from a byte offset, replaced files as a whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from clusterjob.errors import os_error_text
from clusterjob.node.host_server import code_store
from clusterjob.node.host_server.host_check import Object, work_environment
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import (
    AGENT_LOG,
    AGENTS,
    ENDS,
    LOGS,
    RESULT,
    TIMELINE,
)
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import devices, files, private_dirs, processes

MAX_BYTES = 4 << 20  # bytes of growing files, or of parts of results, in one answer
MAX_REPLACED = 8 << 20  # bytes of one replaced file
_MAX_LAST = 1 << 20  # bytes of a worker's stderr that is sent for its last lines
# Seconds after the job's grace period before an agent that does not stop is killed.
_CANCEL_TIMEOUT = 2.0
_ENDING = 2.0  # seconds to wait for agents that have written their verdict and are about to exit
_KINDS = {stat.S_IFDIR: "dir", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
_JOB = re.compile(r"[^\W_][^/\0\n]*(?:/elements/[0-9]+)?")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
Read = Callable[[int], bytes]  # returns at most the given number of the next bytes of a call

_reserved: dict[str, devices.Locks] = {}  # by job, from `reserve` to `start` in one session


def directory(home: Path, job: str) -> Path:
    """Return the directory of a job, or of an array's element, on this host.

    Raises:
        ValueError: the text is not a job's name.
    """
    if not _JOB.fullmatch(job):
        raise ValueError(f"{job!r} is not a job's name")
    return home / "jobs" / job


def _agent_file(job_dir: Path, node: int) -> Path:
    """Return the file that names the process of a node's agent."""
    return job_dir / AGENTS / f"node{node}.json"


def _agent_of(job_dir: Path, node: int) -> int | None:
    """Return the pid of a node's agent; None if it does not run on this host."""
    noted = files.read_json(_agent_file(job_dir, node))
    pid: int = 0 if noted is None else noted["pid"]
    if noted is None or processes.start_ticks(pid) is None:
        return None
    return pid if processes.identity(pid) == noted.get("process") else None


# -- start and stop ------------------------------------------------------------------------------


def put(home: Path, job: str, node: int, listed: list[tuple[str, int, int]], read: Read) -> Object:
    """Create the job's directory with its files, readable only by the user.

    `listed` has (name, mode, size) of each file, in the order of the bytes.
    """
    job_dir = directory(home, job)
    for folder in (ENDS, AGENTS, f"{LOGS}/node{node}"):
        private_dirs.make(job_dir / folder)
    for made in (home, job_dir.parent, job_dir, job_dir / LOGS):
        made.chmod(0o700)  # an existing directory may have another mode
    for name, mode, size in listed:
        files.write_atomic(job_dir / name, read(size), mode=mode)
    return {}


def reserve(_home: Path, job: str, wanted: str, count: int) -> Object:
    """Choose a node's GPUs.

    `wanted` is their numbers, ``auto`` for idle ones, or empty for any; a `count` of 0 means all
    idle ones.

    Returns:
        ``devices``: the value for CUDA_VISIBLE_DEVICES; None to leave it unchanged.
        ``short``: why there are too few GPUs, or empty.
    """
    try:
        if not wanted:
            return {"devices": devices.share(count, os.environ), "short": ""}
        locks = devices.pick(job, wanted, count=count or None, environ=os.environ)
    except devices.TooFewGpusError as error:
        return {"devices": None, "short": str(error)}
    _reserved[job] = locks
    return {"devices": ",".join(locks), "short": ""}


def start(home: Path, job: str, node: int, script: str, env: dict[str, str]) -> Object:
    """Start a node's agent by a script in the job's directory; it then holds the reserved GPUs.

    The variables of `env` are added to its environment.
    """
    job_dir = directory(home, job)
    locks = _reserved.pop(job, {})
    with (node_directory(job_dir, node) / AGENT_LOG).open("ab") as output:
        agent = subprocess.Popen(
            ["bash", str(job_dir / script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=job_dir,
            env=work_environment() | env,
            start_new_session=True,
            pass_fds=devices.descriptors(locks),
        )
    devices.release(locks)  # the agent and its children hold the locks
    noted = {"pid": agent.pid, "process": processes.identity(agent.pid)}
    # The agent outlives this process: stop Popen from warning that nothing waits for it.
    agent.returncode = 0
    files.write_json(_agent_file(job_dir, node), noted)
    return {}


def up(home: Path, job: str, node: int) -> Object:
    """Return whether a node's agent runs; ``why`` is the reason if it will never run."""
    job_dir = directory(home, job)
    pid = _agent_of(job_dir, node)
    for refused in ends.refusals(job_dir):
        if refused.node_rank == node:
            last = "".join(refused.last_lines[-1:])
            output = f" ({last})" if last and refused.message not in last else ""
            return {"up": False, "why": f"{refused.message}{output}"}
    if pid is not None:
        words = files.read_text(f"/proc/{pid}/cmdline").split("\0")
        return {"up": any(word.endswith("clusterjob-node.pyz") for word in words), "why": ""}
    if (ends.directory(job_dir) / f"node{node}.json").exists() or (job_dir / RESULT).exists():
        return {"up": True, "why": ""}
    last_line = last_lines(node_directory(job_dir, node) / AGENT_LOG, 1)
    return {"up": False, "why": ": ".join(["the agent ended at once", *last_line])}


def cancel(
    home: Path, job: str, node: int, grace: float, *, interrupt: bool = False, stacks: bool = False
) -> Object:
    """Stop a node's agent, which stops its workers, and kill it after `grace` seconds.

    With `interrupt` send SIGINT, as Ctrl-C does, and return immediately. With `stacks` the stacks
    of the workers are saved first.
    """
    request_stop(home, [job], stacks=stacks)
    pid = _agent_of(directory(home, job), node)
    if pid is not None and interrupt:
        processes.signal_group(pid, signal.SIGINT)
    elif pid is not None:
        saving = ends.STACKS_SECONDS if stacks else 0.0
        processes.end_groups([pid], grace + saving + _CANCEL_TIMEOUT)
    return {}


def request_stop(
    home: Path, jobs: Iterable[str], *, interrupt: bool = False, stacks: bool = False
) -> Object:
    """Write a stop request for each job, also for array elements that have not started.

    With `interrupt` the workers get SIGINT first; with `stacks` their stacks are saved before.
    """
    for job in jobs:
        job_dir = directory(home, job)
        if directory(home, job.partition("/")[0]).is_dir():
            private_dirs.make(job_dir)
            if stacks:
                ends.want_stacks(job_dir)
            ends.cancel(job_dir, interrupt=interrupt)
    return {}


def remove(home: Path, job: str) -> Object:
    """Delete the job's directory, and release its GPUs."""
    devices.release(_reserved.pop(job, {}))
    shutil.rmtree(directory(home, job), ignore_errors=True)
    return {}


# -- poll ----------------------------------------------------------------------------------------


def poll(home: Path, jobs: list[Object], most: int) -> tuple[Object, bytes]:
    """Return new data in the directories of jobs, about `most` bytes at once.

    Each of `jobs` has the job's name as ``job``; ``node``, whose agent is looked for, or None; the
    patterns of its growing files (``grown``), of those that are sent when a Slurm step has ended
    (``late``), and of its replaced files (``replaced``), all in the order in which they are sent;
    the size of each growing file (``sizes``) and the stamp of each replaced file (``stamps``) that
    the submitter has.

    Returns:
        ``clock``: the host's monotonic clock. ``jobs``: for each job, ``known``: whether its
        directory exists; ``alive``: whether the node's agent runs; ``files``: the files whose bytes
        follow; ``more``: whether there is more data.
    """
    answers, data = [], bytearray()
    for asked in jobs:
        job_dir, node = directory(home, asked["job"]), asked["node"]
        # Check this before reading files: an agent that is dead now has written its result before.
        alive = node is not None and _agent_of(job_dir, node) is not None
        known = job_dir.is_dir()
        found, more = _news(job_dir, asked, data, most) if known else ([], False)
        answers.append({"known": known, "alive": alive, "files": found, "more": more})
    return {"jobs": answers, "clock": time.monotonic()}, bytes(data)


def _news(job_dir: Path, asked: Object, data: bytearray, most: int) -> tuple[list[Object], bool]:
    """Add the new bytes of a job to `data`; return their files, and whether there are more."""
    found: list[Object] = []
    more = False
    paths = _matching(job_dir, asked["grown"])
    if any(job_dir.glob(f"{ENDS}/srun.*")):
        late = _matching(job_dir, asked["late"])
        paths += [path for path in late if files.size_of(path) <= _MAX_LAST]
    # A timeline is measured first and sent last: it must not refer to log bytes that the submitter
    # does not have yet.
    paths.sort(key=lambda path: path.name != TIMELINE)
    sizes = [(path, files.size_of(path)) for path in paths]
    for path, size in sorted(sizes, key=lambda each: each[0].name == TIMELINE):
        name = str(path.relative_to(job_dir))
        had = asked["sizes"].get(name, -1)  # an empty file is sent once
        if size <= had or (more and path.name == TIMELINE):
            continue
        offset, room = max(0, had), max(0, most - len(data))
        more = more or size - offset > room
        with path.open("rb") as stream:
            stream.seek(offset)
            content = stream.read(min(room, size - offset))
        found.append({"path": name, "offset": offset, "size": len(content)})
        data += content
    for path in _matching(job_dir, asked["replaced"]):
        name = str(path.relative_to(job_dir))
        with contextlib.suppress(OSError, ValueError):  # it is gone, or too long
            status = os.stat(path)
            stamp = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            if asked["stamps"].get(name) == stamp:
                continue
            # Skip all later files too: the verdict must not come before the nodes' results.
            if len(data) > most:
                return found, True
            content = files.read_regular(path, MAX_REPLACED)
            found.append({"path": name, "stamp": stamp, "size": len(content)})
            data += content
    # Such as the verdict of an earlier run, which the next run renames.
    gone = [name for name in asked["stamps"] if not (job_dir / name).exists()]
    return found + [{"path": name, "gone": True, "size": 0} for name in gone], more


def _matching(job_dir: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of these patterns whose names clusterjob may have written."""
    found = (path for each in patterns for path in sorted(job_dir.glob(each)))
    return [path for path in found if _NAME.fullmatch(path.name) and path.suffix != ".part"]


# -- clean ---------------------------------------------------------------------------------------


def clean(home: Path, jobs: list[str], *, remove: bool) -> Object:
    """Measure ended jobs on this host, and the code that no other job uses.

    With `remove` they are removed too; a job whose agent runs is kept.

    Returns:
        ``jobs``: for each job, ``size`` in bytes, a ``stamp`` of its directory, which two hosts
        share if they share the directory, and ``kept``: why it is not removed, or empty. ``code``:
        bytes of the code that no other job uses.

    Raises:
        OSError: the jobs cannot be listed.
    """
    until = time.monotonic() + _ENDING
    answers = [_clean(directory(home, job), until, remove=remove) for job in jobs]
    gone = {name for name, answer in zip(jobs, answers, strict=True) if not answer["kept"]}
    return {"jobs": answers, "code": code_store.clean(home, gone, remove=remove)}


def _clean(job_dir: Path, until: float, *, remove: bool) -> Object:
    answer = {"size": 0, "stamp": "", "kept": ""}
    try:
        if job_dir.is_symlink() or not job_dir.is_dir():
            return answer | {"kept": "its directory is a link" if job_dir.is_symlink() else ""}
        for path in (job_dir / AGENTS).glob("node*.json"):
            node = int(path.stem.removeprefix("node"))
            while _agent_of(job_dir, node) is not None:
                if time.monotonic() > until:
                    return answer | {"kept": f"its agent of node {node} still runs"}
                time.sleep(0.05)
        status = job_dir.lstat()
        answer["stamp"] = f"{status.st_ino}-{status.st_ctime_ns}"
        answer["size"] = files.tree_size(job_dir)
        if remove:
            files.remove_tree(job_dir)
    except OSError as error:
        answer["kept"] = os_error_text(error)
    return answer


# -- results -------------------------------------------------------------------------------------


def tree(
    home: Path, job: str, workdir: str, paths: list[str], most: int, *, digests: bool = False
) -> tuple[Object, bytes]:
    """List at most `most` files, directories and links at paths below the working directory.

    The working directory is absolute, or relative to the job's directory.

    Returns:
        ``absent``: the paths that do not exist. The bytes have one line of JSON for each file,
        directory and link: (path, kind, mode, size, modification time in ns, target of a link,
        digest of a file if asked). A directory comes before its content.
    """
    root = os.path.normpath(directory(home, job) / workdir)
    entries: list[tuple[Any, ...]] = []
    absent = []
    for text in paths:
        path = os.path.normpath(os.path.join(root, text))
        if os.path.commonpath([path, root]) != root or not os.path.lexists(path):
            absent.append(text)
        else:
            _walk(root, path, entries=entries, most=most, digests=digests)
    return {"absent": absent}, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _walk(
    root: str, path: str, entries: list[tuple[Any, ...]], most: int, *, digests: bool
) -> None:
    if len(entries) >= most:
        raise OSError(0, f"more than {most} files: fetch fewer paths, or raise --max-files", path)
    status = os.lstat(path)
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    name = os.path.relpath(path, root)
    if kind is not None and name != ".":
        mode, time_ns = status.st_mode & 0o777, max(0, status.st_mtime_ns)
        link = os.readlink(path) if kind == "link" else ""
        digest = ""
        if digests and kind == "file":
            with contextlib.suppress(OSError):  # it changed, or cannot be read: it is asked for
                digest = files.sha256(Path(path))
        entries.append((name, kind, mode, status.st_size, time_ns, link, digest))
    if kind == "dir":
        for child in sorted({*os.listdir(path)} - {".git"}):
            _walk(root, os.path.join(path, child), entries, most=most, digests=digests)


def get(
    home: Path, job: str, workdir: str, parts: list[tuple[str, int, int]]
) -> tuple[Object, bytes]:
    """Return parts (path, offset, length) of files, at most `MAX_BYTES` in total.

    Returns:
        ``lengths``: the length of each part, which is smaller if a file became shorter; and the
        bytes of all parts.
    """
    lengths, data = [], bytearray()
    for path, offset, length in parts:
        part = b""
        with (
            contextlib.suppress(FileNotFoundError),
            (directory(home, job) / workdir / path).open("rb") as stream,
        ):
            stream.seek(offset)
            part = stream.read(min(length, MAX_BYTES - len(data)))
        lengths.append(len(part))
        data += part
    return {"lengths": lengths}, bytes(data)
