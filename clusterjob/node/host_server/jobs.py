"""Requests about jobs on this host: write, start, poll, cancel, remove, send results.

An agent runs independently of the session that starts it. Growing files are sent from a byte
offset, replaced files as a whole.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node.host_server import code_store, gpus, requests
from clusterjob.node.host_server.host_check import work_environment
from clusterjob.node.logs import ends
from clusterjob.node.logs.job_dir import (
    AGENT_LOG,
    AGENTS,
    ENDS,
    LOGS,
    RESULT,
    SLURM_LOG,
    TIMELINE,
    event_files,
    events_node,
)
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.system import files, private_dirs, processes

MAX_BYTES = 4 << 20  # bytes of growing files, or of parts of results, in one answer
_MAX_REPLACED = 8 << 20  # bytes of one replaced file
MAX_ANSWER = MAX_BYTES + _MAX_REPLACED
MAX_PARTS, MAX_DIGESTS = 1000, 10_000  # maximum numbers of results per request
_MAX_LAST = 1 << 20  # bytes of a worker's stderr that is sent for its last lines
# Seconds after the job's grace period before an agent that does not stop is killed.
_CANCEL_TIMEOUT = 2.0
_ENDING = 2.0  # seconds to wait for agents that have written their verdict and are about to exit
_JOB = re.compile(r"[^\W_][^/\0\n]*(?:/elements/[0-9]+)?")
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_AGENT = re.compile(r"node(\d{1,9})\.json", re.ASCII)

_reserved: dict[str, gpus.Reservation] = {}  # by job, from `Reserve` to `Start` in one session


def _directory(home: Path, request: requests.JobRequest) -> Path:
    return home / "jobs" / request.job


def _agent_file(job_dir: Path, node: int) -> Path:
    """Return the file that names the process of a node's agent."""
    return job_dir / AGENTS / f"node{node}.json"


def agent_of(job_dir: Path, node: int) -> int | None:
    """Return the pid of a node's agent; None if it does not run on this host."""
    try:
        noted = json.loads(_agent_file(job_dir, node).read_text())
    except (OSError, ValueError):
        return None
    same_boot = noted["boot_id"] == processes.boot_id()
    if same_boot and processes.start_ticks(noted["pid"]) == noted["ticks"]:
        return int(noted["pid"])
    return None


# -- start and stop ------------------------------------------------------------------------------


def put(home: Path, request: requests.Put, read: Callable[[int], bytes]) -> dict[str, Any]:
    """Create the job's directory with its files, readable only by the user.

    Args:
        home: clusterjob's directory on this host, as for the other requests.
        request: the node, and the files in the order of their bytes.
        read: returns the given number of the following bytes.

    Raises:
        OSError: a file cannot be written.
    """
    job_dir = _directory(home, request)
    for folder in (ENDS, AGENTS, f"{LOGS}/node{request.node}"):
        private_dirs.make(job_dir / folder)
    for made in (home, job_dir.parent, job_dir, job_dir / LOGS):
        made.chmod(0o700)  # an existing directory may have another mode
    for name, mode, size in request.files:
        files.write_atomic(job_dir / name, read(size), mode=mode)
    return {}


def request_stop(home: Path, request: requests.RequestStop) -> dict[str, Any]:
    """Write a stop request for each job, also for array elements that have not started."""
    for name in request.jobs:
        job_dir = home / "jobs" / name
        if (home / "jobs" / name.partition("/")[0]).is_dir():
            private_dirs.make(job_dir)
            if request.stacks:
                ends.want_stacks(job_dir)
            ends.cancel(job_dir, interrupt=request.interrupt)
    return {}


def reserve(_home: Path, request: requests.Reserve) -> dict[str, Any]:
    """Choose a node's GPUs.

    Returns:
        ``devices``: the value for CUDA_VISIBLE_DEVICES; None to leave it unchanged.
        ``short``: why there are too few GPUs, or empty.
    """
    job_id, wanted, count = request.job, request.gpus, request.count
    try:
        if not wanted:
            return {"devices": gpus.share(count, os.environ), "short": ""}
        reserved = gpus.pick(job_id, wanted, count=count or None, environ=os.environ)
    except gpus.TooFewGpusError as error:
        return {"devices": None, "short": str(error)}
    _reserved[job_id] = reserved
    return {"devices": ",".join(gpu.uuid for gpu in reserved.gpus), "short": ""}


def start(home: Path, request: requests.Start) -> dict[str, Any]:
    """Start a node's agent, which holds the reserved GPUs from then on."""
    job_dir = _directory(home, request)
    log = node_directory(job_dir, request.node) / AGENT_LOG
    reserved = _reserved.pop(request.job, None)
    with log.open("ab") as output:
        agent = subprocess.Popen(
            ["bash", str(job_dir / request.script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=job_dir,
            env=work_environment() | request.env,
            start_new_session=True,
            pass_fds=reserved.descriptors if reserved is not None else (),
        )
    if reserved is not None:
        reserved.release()  # the agent and its children hold the locks
    noted = {
        "pid": agent.pid,
        "ticks": processes.start_ticks(agent.pid) or 0,
        "boot_id": processes.boot_id(),
    }
    # The agent outlives this process: stop Popen from warning that nothing waits for it.
    agent.returncode = 0
    files.write_json(_agent_file(job_dir, request.node), noted)
    return {}


def up(home: Path, request: requests.Up) -> dict[str, Any]:
    """Return whether the agent runs; ``why`` is the reason if it will never run."""
    job_dir, node = _directory(home, request), request.node
    pid = agent_of(job_dir, node)
    for refused in ends.refusals(job_dir):
        if refused.node_rank == node:
            last = "".join(refused.last_lines[-1:])
            output = f" ({last})" if last and refused.message not in last else ""
            return {"up": False, "why": f"{refused.message}{output}"}
    if pid is not None:
        words = files.read_text(f"/proc/{pid}/cmdline").split("\0")
        return {"up": any(word.endswith("clusterjob-node.pyz") for word in words), "why": ""}
    if (ends.directory(job_dir) / f"node{node}.json").exists() or (job_dir / RESULT).exists():
        return {"up": True}
    last_line = last_lines(node_directory(job_dir, node) / AGENT_LOG, 1)
    return {"up": False, "why": ": ".join(["the agent ended at once", *last_line])}


def cancel(home: Path, request: requests.Cancel) -> dict[str, Any]:
    """Stop the node's agent, or interrupt it.

    The agent stops its workers; an agent that does not end within the grace period is killed.
    An interrupt (SIGINT, as Ctrl-C sends) returns immediately.
    """
    job_dir = _directory(home, request)
    if job_dir.is_dir():
        if request.stacks:
            ends.want_stacks(job_dir)
        ends.cancel(job_dir)
    pid = agent_of(job_dir, request.node)
    if pid is not None and request.interrupt:
        processes.signal_group(pid, signal.SIGINT)
    elif pid is not None:
        saving = ends.STACKS_SECONDS if request.stacks else 0.0
        processes.end_groups([pid], request.grace + saving + _CANCEL_TIMEOUT)
    return {"running": pid is not None}


def remove(home: Path, request: requests.Remove) -> dict[str, Any]:
    """Delete the job's directory, and release its GPUs."""
    if (reserved := _reserved.pop(request.job, None)) is not None:
        reserved.release()
    shutil.rmtree(_directory(home, request), ignore_errors=True)
    return {}


# -- poll ----------------------------------------------------------------------------------------


def poll_node(home: Path, request: requests.PollNode) -> tuple[dict[str, Any], bytes]:
    """Return the state of a node and new data in its files, at most `MAX_BYTES` at once.

    Returns:
        ``known``: whether the job's directory exists; ``alive``: whether the agent runs; ``files``:
        the files whose bytes follow; ``more``: whether there is more data; ``clock``: the host's
        monotonic clock, to which the events of node 0 refer.
    """
    job_dir, node = _directory(home, request), request.node
    # Check this before reading files: an agent that is dead now has written its result before.
    answer: dict[str, Any] = {"known": job_dir.is_dir()}
    answer["alive"] = agent_of(job_dir, node) is not None
    news = News(job_dir, request.sizes, stamps=request.stamps, data=bytearray(), most=request.most)
    if request.logs:
        news.node_logs(node_directory(job_dir, node))
    for path in event_files(job_dir):
        if events_node(path.name) == node:
            news.grown(path)
    ends_of_node = [ends.directory(job_dir) / f"node{node}.{end}" for end in ("json", "refused")]
    for path in [job_dir / RESULT, *ends_of_node] if node == 0 else ends_of_node:
        news.replaced(path)
    answer |= {"files": news.files, "more": news.more, "clock": time.monotonic()}
    return answer, bytes(news.data)


@dataclass
class News:
    """Collects new data in a job's directory.

    Attributes:
        job_dir: the directory.
        sizes: the size of each growing file that the submitter has.
        stamps: the stamp (time, size and inode) of each replaced file that the submitter has.
        data: receives the bytes; several collectors may share it.
        most: maximum length of `data`, in bytes.
        files: the files to which the bytes belong.
        more: whether there is more data.
        full: whether a replaced file was left out.
    """

    job_dir: Path
    sizes: Mapping[str, int]
    stamps: Mapping[str, str]
    data: bytearray
    most: int
    files: list[dict[str, Any]] = field(default_factory=list)
    more: bool = False
    full: bool = False

    def node_logs(self, logs: Path) -> None:
        """Add new data in the logs of a node."""
        # The timeline is measured first and sent last: it must not refer to log bytes that the
        # submitter does not have yet.
        noted = files.size_of(logs / TIMELINE)
        for path in sorted(logs.iterdir()) if logs.is_dir() else []:
            if path.name != "timeline":
                self.grown(path)
        if not self.more:
            self.grown(logs / TIMELINE, noted)

    def grown(self, path: Path, upto: int | None = None) -> None:
        """Add the new bytes of a growing file, up to the size `upto`."""
        name = str(path.relative_to(self.job_dir))
        offset = self.sizes.get(name, 0)
        size = files.size_of(path) if upto is None else upto
        if size <= offset and (size or not path.exists() or name in self.sizes):
            return
        room = min(self.most, MAX_BYTES) - len(self.data)
        if size - offset > room:
            self.more = True
            if room <= 0:
                return
            size = offset + room
        with path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(size - offset)
        self.files.append({"path": name, "offset": offset, "size": len(data)})
        self.data += data

    def replaced(self, path: Path) -> None:
        """Add the whole content of a file if its stamp has changed."""
        name = str(path.relative_to(self.job_dir))
        try:
            status = os.stat(path)
            stamp = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            if self.stamps.get(name) == stamp or status.st_size > _MAX_REPLACED:
                return
            if len(self.data) > min(self.most, MAX_BYTES):
                self.more = self.full = True
            if self.full:
                # Skip all later files too: the verdict must not come before the nodes' results.
                return
            with path.open("rb") as stream:
                data = stream.read(_MAX_REPLACED)
        except OSError:
            return
        self.files.append({"path": name, "stamp": stamp, "size": len(data)})
        self.data += data

    def gone(self) -> None:
        """List files that the submitter has and that no longer exist on this host.

        An example is the verdict of an earlier run, which the next run renames.
        """
        for name in self.stamps:
            if not (self.job_dir / name).exists():
                self.files.append({"path": name, "gone": True, "size": 0})


def poll_jobs(home: Path, request: requests.PollJobs) -> tuple[dict[str, Any], bytes]:
    """Return new data in the directories of jobs.

    Returns:
        ``jobs``: for each job, ``known``: whether its directory exists; ``files``: the files whose
        bytes follow; ``more``: whether there is more data.
    """
    answers, data = [], bytearray()
    for asked in request.jobs:
        if not _JOB.fullmatch(asked.job):
            raise ValueError(f"{asked.job!r} is not a job's name")
        job_dir = home / "jobs" / asked.job
        news = News(job_dir, asked.sizes, stamps=asked.stamps, data=data, most=request.most)
        known = job_dir.is_dir()
        if known:
            _add_files(job_dir, news, logs=asked.logs)
        answers.append({"known": known, "files": news.files, "more": news.more})
    return {"jobs": answers}, bytes(data)


def _add_files(job_dir: Path, news: News, logs: str) -> None:
    over = any(ends.directory(job_dir).glob("srun.*"))
    for node in _entries(job_dir / LOGS) if logs != "none" else []:
        if not node.is_dir():
            continue
        if logs == "all":
            news.node_logs(node)
        elif over:
            for path in _entries(node):
                if path.suffix == ".err" and path.stat().st_size <= _MAX_LAST:
                    news.grown(path)
    news.grown(job_dir / LOGS / SLURM_LOG)
    for path in event_files(job_dir):
        news.grown(path)
    # Send node results before the verdict: after the verdict the submitter stops reading.
    for path in _entries(ends.directory(job_dir)):
        if path.suffix != ".part":
            news.replaced(path)
    news.replaced(job_dir / RESULT)
    news.gone()


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a directory whose names clusterjob may have written."""
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return
    yield from (path for path in found if _NAME.fullmatch(path.name))


# -- clean ---------------------------------------------------------------------------------------


def clean(home: Path, request: requests.Clean) -> dict[str, Any]:
    """Measure ended jobs on this host; with `remove`, remove them.

    Returns:
        ``jobs``: for each job, ``size`` in bytes, a ``stamp`` of its directory, which two hosts
        share if they share the directory, and ``kept``: why it is not removed, or empty. ``code``:
        bytes of the code that no other job uses.

    Raises:
        ValueError: a name is not that of a job.
        OSError: the jobs cannot be listed.
    """
    answers = []
    until = time.monotonic() + _ENDING
    for name in request.jobs:
        if not _JOB.fullmatch(name) or "/" in name:
            raise ValueError(f"{name!r} is not a job's name")
        job_dir = home / "jobs" / name
        while _running(job_dir) and time.monotonic() < until:
            time.sleep(0.05)
        answers.append(_clean(job_dir, remove=request.remove))
    gone = {name for name, answer in zip(request.jobs, answers, strict=True) if not answer["kept"]}
    return {"jobs": answers, "code": code_store.clean(home, gone, remove=request.remove)}


def _clean(job_dir: Path, *, remove: bool) -> dict[str, Any]:
    answer = {"size": 0, "stamp": "", "kept": ""}
    try:
        if not files.is_directory(job_dir):
            return answer | {"kept": "its directory is a link" if job_dir.is_symlink() else ""}
        if why := _running(job_dir):
            return answer | {"kept": why}
        status = job_dir.lstat()
        answer |= {
            "size": files.tree_size(job_dir),
            "stamp": f"{status.st_ino}-{status.st_ctime_ns}",
        }
        if remove:
            files.remove_tree(job_dir)
    except OSError as error:
        answer["kept"] = f"{error.strerror or error}: {error.filename}"
    return answer


def _running(job_dir: Path) -> str:
    """Return why the job may still run on this host; empty if it does not."""
    try:
        names = [path.name for path in (job_dir / AGENTS).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return ""
    for name in names:
        match = _AGENT.fullmatch(name)
        try:
            if match is not None and agent_of(job_dir, int(match[1])) is not None:
                return f"its agent of node {match[1]} still runs"
        except (KeyError, TypeError, ValueError):
            return f"its file {AGENTS}/{name} is damaged"
    return ""


# -- results -------------------------------------------------------------------------------------


def _workdir(home: Path, request: requests.WorkdirRequest) -> Path:
    return Path(os.path.normpath(_directory(home, request) / request.workdir))


def tree(home: Path, request: requests.Tree) -> tuple[dict[str, Any], bytes]:
    """List files, directories and links at paths below the job's working directory.

    Returns:
        ``absent``: the paths that do not exist. The bytes have one line of JSON for each file,
        directory and link: (path, kind, mode, size, modification time in ns, target of a link). A
        directory comes before its content.
    """
    root = _workdir(home, request)
    entries: list[tuple[str, str, int, int, int, str]] = []
    absent = []
    for text in request.paths:
        path = os.path.normpath(os.path.join(root, text))
        if os.path.commonpath([path, root]) != str(root) or not os.path.lexists(path):
            absent.append(text)
        else:
            _walk(str(root), path, entries=entries, most=request.most)
    return {"absent": absent}, b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def _walk(
    root: str, path: str, entries: list[tuple[str, str, int, int, int, str]], most: int
) -> None:
    if len(entries) >= most:
        raise OSError(0, f"more than {most} files: fetch fewer paths, or raise --max-files", path)
    status = os.lstat(path)
    name = os.path.relpath(path, root)
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if stat.S_ISDIR(status.st_mode):
        if name != ".":
            entries.append((name, "dir", mode, 0, 0, ""))
        for child in sorted({*os.listdir(path)} - {".git"}):
            _walk(root, os.path.join(path, child), entries=entries, most=most)
    elif stat.S_ISLNK(status.st_mode):
        entries.append((name, "link", 0, 0, 0, os.readlink(path)))
    elif stat.S_ISREG(status.st_mode):
        entries.append((name, "file", mode, status.st_size, max(0, status.st_mtime_ns), ""))


def digests(home: Path, request: requests.Digests) -> dict[str, Any]:
    """Return the SHA-256 digests of files; empty for a missing file."""
    found = []
    for path in request.paths:
        try:
            found.append(files.sha256(_workdir(home, request) / path))
        except OSError:
            found.append("")
    return {"digests": found}


def get(home: Path, request: requests.Get) -> tuple[dict[str, Any], bytes]:
    """Return parts of files, at most `MAX_BYTES` in total.

    Returns:
        ``lengths``: the length of each part, which is smaller if a file became shorter; and the
        bytes of all parts.
    """
    lengths, data = [], bytearray()
    root = _workdir(home, request)
    for path, offset, length in request.parts:
        part = b""
        with contextlib.suppress(FileNotFoundError), (root / path).open("rb") as stream:
            stream.seek(offset)
            part = stream.read(min(length, MAX_BYTES - len(data)))
        lengths.append(len(part))
        data += part
    return {"lengths": lengths}, bytes(data)
