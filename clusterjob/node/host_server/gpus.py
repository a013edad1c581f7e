"""GPUs of a host: users, idle GPUs, and locks that prevent two jobs on one GPU.

A job gets GPUs by UUID: without CUDA_DEVICE_ORDER, CUDA numbers GPUs in another order than
nvidia-smi.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from clusterjob.node.system import devices

AUTO = "auto"
# Bytes of used memory below which a GPU is idle: a driver reserves less.
_IDLE_MEMORY = 1 << 30
_SMI_TIMEOUT = 30.0  # seconds for nvidia-smi, which wakes sleeping GPUs one after the other
_TMP = "/tmp"  # noqa: S108 - the owner of the directory in it is checked
Locks = dict[str, list[int]]  # descriptors of locked files, by the UUID of the GPU


class TooFewGpusError(Exception):
    """There are not enough GPUs; the message names the holder of each."""


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: its index in nvidia-smi.
        uuid: its UUID.
        name: its model.
        used, total: bytes of its memory.
        processes: (pid, command) of each compute process on it.
    """

    index: int
    uuid: str
    name: str
    used: int
    total: int
    processes: tuple[tuple[int, str], ...] = ()

    @property
    def idle(self) -> bool:
        """Whether no process computes on the GPU and little of its memory is used."""
        return not self.processes and self.used < _IDLE_MEMORY

    def describe(self) -> str:
        """Return one line with its model, its users and its memory."""
        state = [
            f"{_owner(pid)}'s {os.path.basename(command)} (pid {pid})"
            for pid, command in self.processes
        ]
        state.append(f"{self.used / 1e9:.1f} of {self.total / 1e9:.0f} GB used")
        return f"{self.index} {self.name}: {'idle' if self.idle else ', '.join(state)}"


def read_gpus() -> list[Gpu]:
    """Return the GPUs of this host by index; empty without nvidia-smi.

    Raises:
        OSError: nvidia-smi fails.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    apps: dict[str, list[tuple[int, str]]] = {}
    for uuid, pid, command in _ask("compute-apps", "gpu_uuid", "pid", "process_name"):
        if pid.isdigit():
            apps.setdefault(uuid, []).append((int(pid), command))
    gpus = []
    for index, uuid, *memory, name in _ask(
        "gpu", "index", "uuid", "memory.used", "memory.total", "name"
    ):
        used, total = (int(text) << 20 if text.isdigit() else 0 for text in memory)
        users = tuple(apps.get(uuid, ()))
        gpus.append(Gpu(int(index), uuid, name, used=used, total=total, processes=users))
    return gpus


def _ask(query: str, *fields: str) -> list[list[str]]:
    """Return the rows of a query; a comma in the last field is no separator."""
    words = ["nvidia-smi", f"--query-{query}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SMI_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(0, f"nvidia-smi did not answer within {_SMI_TIMEOUT:g} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        raise OSError(0, f"nvidia-smi fails: {lines[0] if lines else 'no reason given'}")
    rows = [line.split(", ", len(fields) - 1) for line in lines]
    return [row for row in rows if len(row) == len(fields)]


def visible(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """Return the GPUs that the login's CUDA_VISIBLE_DEVICES allows; all if it is not set.

    As in CUDA, the list ends at the first GPU that this host does not have, and at a MIG device.
    """
    if listed is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in devices.cuda_devices(listed):
        matching = [
            gpu
            for gpu in gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        if not matching or matching[0] in found:
            break
        found.append(matching[0])
    return found


def _take(locks: Locks, gpu: Gpu, job_id: str) -> str:
    """Lock a GPU, or return its holder if another job has locked it.

    Raises:
        OSError: no lock file can be created.
    """
    taken: list[int] = []
    for directory in lock_directories():
        path = directory / gpu.uuid.replace("/", "_")
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        taken.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace")
            release({gpu.uuid: taken})
            return f"job {holder}" if holder else "another job"
    for lock in taken:
        os.ftruncate(lock, 0)
        os.pwrite(lock, job_id.encode(), 0)
    locks[gpu.uuid] = taken
    return ""


def descriptors(locks: Locks) -> tuple[int, ...]:
    """Return the descriptors that the processes of a job must inherit."""
    return tuple(chain.from_iterable(locks.values()))


def release(locks: Locks) -> None:
    """Close this process's descriptors; processes that inherited them keep the locks."""
    for lock in descriptors(locks):
        os.close(lock)


def lock_directories() -> list[Path]:
    """Return the private directories of this user's locks; a GPU is locked in all of them.

    None is in the home directory, which several machines may share. The one in /tmp is not used
    if another user owns it. Some logins lack XDG_RUNTIME_DIR, and the last logout removes it.

    Raises:
        OSError: no directory belongs to this user.
    """
    uid = os.getuid()
    common = Path(f"{_TMP}/clusterjob-gpus-{uid}")
    with contextlib.suppress(OSError):
        common.mkdir(mode=0o700, exist_ok=True)
    found: list[Path] = []
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}")
    for path in dict.fromkeys((common, runtime, Path(f"/run/user/{uid}"))):
        with contextlib.suppress(OSError):
            status = path.lstat()
            kind, others = stat.S_IFMT(status.st_mode), status.st_mode & 0o077
            if (kind, status.st_uid, others) == (stat.S_IFDIR, uid, 0) and path.is_absolute():
                found.append(path)
    if not found:
        raise OSError(
            0, "the directory is not this user's, and XDG_RUNTIME_DIR names none", str(common)
        )
    return found


def pick(job_id: str, wanted: str, count: int | None, environ: Mapping[str, str]) -> Locks:
    """Choose GPUs for a job and lock them.

    A lock is held until this process and all processes that inherit its descriptor have ended.

    Args:
        job_id: the job, which is written to the lock files for other jobs' messages.
        wanted: ``auto`` for idle ones, otherwise a list of nvidia-smi indices or UUIDs.
        count: number of GPUs, equal to the length of the list, if there is one; None for all
            idle ones.
        environ: the login's environment.

    Raises:
        TooFewGpusError: there are not enough GPUs; with ``auto``, not enough idle ones.
        OSError: the GPUs cannot be read, or no lock file can be created.
    """
    there = visible(read_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    locks: Locks = {}
    try:
        if wanted == AUTO:
            _take_idle(locks, there, job_id, count=count)
        else:
            _take_listed(locks, there, job_id, entries=wanted.split(","))
    except BaseException:
        release(locks)
        raise
    return locks


def _take_listed(locks: Locks, there: Sequence[Gpu], job_id: str, entries: Sequence[str]) -> None:
    by_name = {name: gpu for gpu in there for name in (str(gpu.index), gpu.uuid)}
    for entry in entries:
        if entry not in by_name:
            known = ", ".join(str(gpu.index) for gpu in there) or "none"
            raise TooFewGpusError(f"GPU {entry} does not exist; existing GPUs: {known}")
        if holder := _take(locks, by_name[entry], job_id):
            raise TooFewGpusError(f"GPU {entry} is held by {holder}")


def _take_idle(locks: Locks, there: Sequence[Gpu], job_id: str, count: int | None) -> None:
    holders: list[str] = []
    for gpu in there:
        if len(locks) == count:
            return
        if not gpu.idle:
            holders.append(gpu.describe())
        elif holder := _take(locks, gpu, job_id):
            holders.append(f"{gpu.index} {holder}")
    if len(locks) < (count or 1):
        found = f"{len(locks)} idle GPUs where {count} are asked for"
        if count is None:
            found = "no GPU is idle" if holders else "there is no GPU"
        raise TooFewGpusError(found + (f": {'; '.join(holders)}" if holders else ""))


def share(count: int, environ: Mapping[str, str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a job that needs `count` GPUs; None to leave it unchanged.

    The function counts device files: nvidia-smi may take seconds.

    Raises:
        TooFewGpusError: there are fewer GPUs.
    """
    names = devices.listed_gpus(environ.get("CUDA_VISIBLE_DEVICES"), devices.visible_gpus({}))
    if len(names) < count:
        raise TooFewGpusError(f"{len(names)} GPUs where {count} are asked for")
    return ",".join(names[:count]) if len(names) > count else None


def _owner(pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
