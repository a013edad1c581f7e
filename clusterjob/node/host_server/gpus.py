"""GPUs of a host: users, idle GPUs, and locks that prevent two jobs on one GPU.

A job gets GPUs by UUID: without CUDA_DEVICE_ORDER, CUDA numbers GPUs in another order than
nvidia-smi.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.node.system import devices

AUTO = "auto"
# Bytes of used memory below which a GPU is idle: a driver reserves less.
_IDLE_MEMORY = 1 << 30
_SMI_TIMEOUT = 30.0  # seconds for nvidia-smi, which wakes sleeping GPUs one after the other
_TMP = "/tmp"  # noqa: S108 - the owner of the directory in it is checked
_DRIVER = Path("/proc/driver/nvidia/gpus")


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
        users = ", ".join(
            f"{_owner(pid)}'s {os.path.basename(command)} (pid {pid})"
            for pid, command in self.processes
        )
        state = f"{self.used / 1e9:.1f} of {self.total / 1e9:.0f} GB used"
        if self.idle:
            state = "idle"
        elif users:
            state = f"{users}, {state}"
        return f"{self.index} {self.name}: {state}"


def read_gpus() -> list[Gpu]:
    """Return the GPUs of this host by index; empty without nvidia-smi.

    Raises:
        OSError: nvidia-smi fails.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    apps: dict[str, list[tuple[int, str]]] = {}
    for row in _ask("--query-compute-apps=gpu_uuid,pid,process_name"):
        if len(row) >= 3 and row[1].isdigit():
            apps.setdefault(row[0], []).append((int(row[1]), ", ".join(row[2:])))
    gpus = []
    for row in _ask("--query-gpu=index,uuid,memory.used,memory.total,name"):
        if len(row) >= 5 and row[0].isdigit():
            index, uuid, *memory = row[:4]
            used, total = (int(text) << 20 if text.isdigit() else 0 for text in memory)
            name, users = ", ".join(row[4:]), tuple(apps.get(uuid, ()))
            gpus.append(Gpu(int(index), uuid, name, used=used, total=total, processes=users))
    return gpus


def _ask(query: str) -> list[list[str]]:
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SMI_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(0, f"nvidia-smi did not answer within {_SMI_TIMEOUT:g} s") from error
    if done.returncode:
        output = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise OSError(0, f"nvidia-smi fails: {output[0] if output else 'no reason given'}")
    return [
        [cell.strip() for cell in line.split(",")]
        for line in done.stdout.decode(errors="replace").splitlines()
    ]


def visible(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """Return the GPUs that the login's CUDA_VISIBLE_DEVICES allows; all if it is not set.

    As in CUDA, the list ends at the first GPU that this host does not have. A MIG device counts as
    an idle GPU of its own: its memory and processes are not read.
    """
    if listed is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in devices.cuda_devices(listed):
        if entry.startswith("MIG-"):
            index = len(gpus) + len(found)
            found.append(Gpu(index, entry, name="MIG device", used=0, total=0))
            continue
        by_uuid = entry.startswith("GPU-")
        matching = (
            gpu
            for gpu in gpus
            if (gpu.uuid.startswith(entry) if by_uuid else entry == str(gpu.index))
        )
        gpu = next(matching, None)
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return found


class Reservation:
    """Locks on GPUs for one job.

    A lock is held until this process and all processes that inherit its descriptors have ended.

    Args:
        job_id: the job, which is written to the lock file for other jobs' messages.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self.gpus: list[Gpu] = []
        self.descriptors: list[int] = []

    def take(self, gpu: Gpu) -> str:
        """Lock a GPU.

        Returns:
            Its holder if another job has locked it; empty if it is now locked.

        Raises:
            OSError: no lock file can be created.
        """
        taken: list[int] = []
        for directory in lock_directories():
            path = directory / gpu.uuid.replace("/", "_")
            taken.append(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            )
            try:
                fcntl.flock(taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(taken[-1], 200, 0).decode(errors="replace")
                for descriptor in taken:
                    os.close(descriptor)
                return f"job {holder}" if holder else "another job"
        for descriptor in taken:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, self._job_id.encode(), 0)
        self.gpus.append(gpu)
        self.descriptors += taken
        return ""

    def release(self) -> None:
        """Close this process's descriptors; processes that inherited them keep the locks."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def lock_directories() -> list[Path]:
    """Return the directories of this user's locks on this machine.

    A GPU is locked in all of these directories. None is in the home directory, which several
    machines may share. No other user can create files in XDG_RUNTIME_DIR, but some logins lack it,
    and the user's last logout removes it. The directory in /tmp is skipped if another user owns it.

    Raises:
        OSError: no directory belongs to this user.
    """
    uid = os.getuid()
    runtime = dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"))
    found = [Path(name) for name in runtime if name.startswith("/") and _is_private(Path(name))]
    common = Path(f"{_TMP}/clusterjob-gpus-{uid}")
    try:
        common.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        if not found:
            raise
    if _is_private(common):
        found.append(common)
    if not found:
        raise OSError(
            0, "the directory is not this user's, and XDG_RUNTIME_DIR names none", str(common)
        )
    return found


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )


def pick(job_id: str, wanted: str, count: int | None, environ: Mapping[str, str]) -> Reservation:
    """Choose GPUs for a job and lock them.

    Args:
        job_id: the job.
        wanted: ``auto`` for idle ones, otherwise a list of nvidia-smi indices or UUIDs.
        count: number of GPUs, equal to the length of the list, if there is one; None for all
            idle ones.
        environ: the login's environment.

    Raises:
        TooFewGpusError: there are not enough GPUs; with ``auto``, not enough idle ones.
        OSError: the GPUs cannot be read, or no lock file can be created.
    """
    there = visible(read_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    held = Reservation(job_id)
    try:
        if wanted != AUTO:
            for entry in wanted.split(","):
                gpu = next((gpu for gpu in there if entry in (str(gpu.index), gpu.uuid)), None)
                if gpu is None:
                    known = ", ".join(str(gpu.index) for gpu in there) or "none"
                    raise TooFewGpusError(f"GPU {entry} does not exist; existing GPUs: {known}")
                if holder := held.take(gpu):
                    raise TooFewGpusError(f"GPU {entry} is held by {holder}")
            return held
        holders: list[str] = []
        for gpu in there:
            if len(held.gpus) == count:
                return held
            if not gpu.idle:
                holders.append(gpu.describe())
            elif holder := held.take(gpu):
                holders.append(f"{gpu.index} {holder}")
        if len(held.gpus) < (count or 1):
            found = f"{len(held.gpus)} idle GPUs where {count} are asked for"
            if count is None:
                found = "no GPU is idle" if holders else "there is no GPU"
            raise TooFewGpusError(found + (f": {'; '.join(holders)}" if holders else ""))
    except BaseException:
        held.release()
        raise
    return held


def idle_count(environ: Mapping[str, str]) -> int:
    """Return the number of idle GPUs that no job of this user has locked.

    Raises:
        TooFewGpusError: there is none.
        OSError: the GPUs cannot be read, or no lock file can be created.
    """
    held = pick("", AUTO, count=None, environ=environ)
    held.release()
    return len(held.gpus)


def share(count: int, environ: Mapping[str, str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a job that needs `count` GPUs; None to leave it unchanged.

    The function reads the driver's files: nvidia-smi may take seconds.

    Raises:
        TooFewGpusError: there are fewer GPUs.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(len(os.listdir(_DRIVER)))] if _DRIVER.is_dir() else []
    if listed is not None:
        names = devices.cuda_devices(listed)
    if len(names) < count:
        raise TooFewGpusError(f"{len(names)} GPUs where {count} are asked for")
    return ",".join(names[:count]) if len(names) > count else None


def _owner(pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
