"""GPUs of a machine: which a process sees, who uses them, and locks for the idle ones.

Nothing here imports torch or a vendor's library. A lock prevents two jobs on one GPU. Locked GPUs
are named by UUID: without CUDA_DEVICE_ORDER, CUDA numbers GPUs in another order than nvidia-smi.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pwd
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterjob.errors import UsageError
from clusterjob.node.system import files

AUTO = "auto"

_NVIDIA = re.compile(r"nvidia[0-9]+\Z")
_COUNT = re.compile(r"[0-9]{1,4}")
# Ascend, TPU and Gaudi, Trainium, Cambricon, Moore Threads.
_OTHER = re.compile(r"(davinci|accel|hl|neuron|cambricon_dev|mtgpu\.)[0-9]*\Z")
_SIMD = re.compile(r"^simd_count [1-9]", re.MULTILINE)
_DEVICES = "/dev"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_AMD_NODES = "/sys/class/kfd/kfd/topology/nodes"
_ANY = 10_000  # GPUs of a machine without one: there, workers run on the CPU for a test
# Bytes of used memory below which a GPU is idle: a driver reserves less.
_IDLE_MEMORY = 1 << 30
_SMI_TIMEOUT = 30.0  # seconds for nvidia-smi, which wakes sleeping GPUs one after the other
_TMP = "/tmp"  # noqa: S108 - the owner of the directory in it is checked
Locks = dict[str, list[int]]  # descriptors of locked files, by the UUID of the GPU


class TooFewGpusError(Exception):
    """There are not enough GPUs; the message names the holder of each."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that are visible to a process with this environment.

    The number is 0 without a GPU or a driver. For NVIDIA, device files are counted: a container has
    only those of its own GPUs. For AMD, nodes with SIMD units in the kernel's topology are counted.
    """
    nvidia = _nvidia()
    if nvidia:
        return len(listed_gpus(environ.get(_VISIBLE), nvidia))
    properties = (
        files.read_text(f"{_AMD_NODES}/{node}/properties") for node in files.listed(_AMD_NODES)
    )
    amd = sum(_SIMD.search(text) is not None for text in properties)
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        amd = len(listed_gpus(environ.get(variable), amd))
    return amd


def has_other_accelerator() -> bool:
    """Return whether the machine has an accelerator that `visible_gpus` does not count."""
    return any(_OTHER.match(name) for name in files.listed(_DEVICES))


def cuda_devices(listed: str) -> list[str]:
    """Parse CUDA_VISIBLE_DEVICES: indices and UUIDs of GPUs (GPU-...) or MIG devices (MIG-...).

    As in CUDA, the list ends at the first entry that has neither form or occurs twice: ``0,-1,2``
    is one GPU.
    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    found: list[str] = []
    for entry in (part.strip() for part in listed.split(",")):
        is_index = entry.isascii() and entry.isdigit() and len(entry) < 10
        if not (is_index or entry.startswith(("GPU-", "MIG-"))) or entry in found:
            break
        found.append(entry)
    return found


def listed_gpus(listed: str | None, installed: int) -> list[str]:
    """Return the GPUs that are both listed and installed.

    The list ends at the first index that is not installed.

    Args:
        listed: the value of CUDA_VISIBLE_DEVICES; None if it is not set, which means all GPUs.
        installed: number of GPUs of the machine.
    """
    if listed is None:
        return [str(index) for index in range(installed)]
    entries = cuda_devices(listed) if installed else []
    return list(itertools.takewhile(lambda e: not e.isdigit() or int(e) < installed, entries))


def requested_gpus(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs of ``launch --gpus``, for CUDA_VISIBLE_DEVICES.

    Args:
        text: a number of GPUs, or their indices or UUIDs: ``0,1``, ``device=5``.
        environ: the environment that the workers inherit.

    Raises:
        UsageError: there are fewer GPUs, or a GPU is not visible on this machine.
    """
    named = text.strip().strip('"').removeprefix("device=")
    if named != text.strip() or not _COUNT.fullmatch(named):
        return choose_gpus(named.split(","), environ)
    there = listed_gpus(environ.get(_VISIBLE), _installed(environ) or _ANY)
    if len(there) < int(named):
        raise UsageError(
            f"--gpus {named}: {len(there)} GPUs are visible here",
            f"--gpus device={named} chooses GPU {named}",
        )
    return there[: int(named)]


def choose_gpus(wanted: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Check the GPUs that the workers must use, and return them for CUDA_VISIBLE_DEVICES.

    On a machine without a GPU, workers run on the CPU for a test. Then the names are compared with
    CUDA_VISIBLE_DEVICES only.

    Args:
        wanted: indices or UUIDs of GPUs; each must be in CUDA_VISIBLE_DEVICES, if that is set.
        environ: the environment that the workers inherit.

    Raises:
        UsageError: an entry is empty, occurs twice, or is not visible on this machine.
    """
    names = [name.strip() for name in wanted]
    if not all(names) or len(set(names)) != len(names):
        raise UsageError(
            f"{','.join(wanted)!r} is not a list of GPUs: an entry is empty or occurs twice",
            "an example is 0,1",
        )
    limit, installed = environ.get(_VISIBLE), _installed(environ)
    # Without a limit, a name stands for itself: a UUID may be that of any GPU.
    outside = [
        name
        for name in names
        if name not in listed_gpus(name if limit is None else limit, installed or _ANY)
    ]
    if outside:
        raise UsageError(
            f"GPU {', '.join(outside)} is not available here: "
            + (f"this machine has {installed}" if limit is None else f"{_VISIBLE}={limit}"),
            "list visible GPUs, or none to use all of them",
        )
    return names


def _installed(environ: Mapping[str, str]) -> int:
    return _nvidia() or visible_gpus(environ)


def _nvidia() -> int:
    return sum(_NVIDIA.match(name) is not None for name in files.listed(_DEVICES))


# -- users and locks ------------------------------------------------------------------------------


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


def read_gpus(environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows, in its order; empty without nvidia-smi.

    Raises:
        OSError: nvidia-smi fails.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    apps = _ask("compute-apps", "gpu_uuid", "pid", "process_name")
    gpus = []
    for index, uuid, *memory, name in _ask(
        "gpu", "index", "uuid", "memory.used", "memory.total", "name"
    ):
        used, total = (int(text) << 20 if text.isdigit() else 0 for text in memory)
        users = tuple((int(pid), app) for on, pid, app in apps if on == uuid and pid.isdigit())
        gpus.append(Gpu(int(index), uuid, name, used=used, total=total, processes=users))
    return _visible(gpus, environ.get(_VISIBLE))


def _ask(query: str, *fields: str) -> list[list[str]]:
    """Return the rows of a query; a comma in the last field is no separator."""
    import subprocess  # slow to load

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


def _visible(gpus: Sequence[Gpu], listed: str | None) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES allows; all if it is not set.

    As in CUDA, the list ends at the first GPU that this host does not have, and at a MIG device.
    """
    if listed is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in cuda_devices(listed):
        gpu = next(
            (each for each in gpus if entry in (str(each.index), each.uuid[: len(entry)])), None
        )
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return found


def _take(locks: Locks, gpu: Gpu, job_id: str) -> str:
    """Lock a GPU, or return its holder if another job has locked it.

    Raises:
        OSError: no lock file can be created.
    """
    taken = locks.setdefault(gpu.uuid, [])  # a list may name a GPU twice
    for directory in lock_directories():
        path = directory / gpu.uuid.replace("/", "_")
        taken.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(taken[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(taken[-1], 200, 0).decode(errors="replace")
            release({gpu.uuid: locks.pop(gpu.uuid)})
            return f"job {holder}" if holder else "another job"
    for lock in taken:
        os.ftruncate(lock, 0)
        os.pwrite(lock, job_id.encode(), 0)
    return ""


def descriptors(locks: Locks) -> tuple[int, ...]:
    """Return the descriptors that the processes of a job must inherit."""
    return tuple(itertools.chain.from_iterable(locks.values()))


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
    there, automatic = read_gpus(environ), wanted == AUTO
    wanted_gpus = there if automatic else [_named(there, name) for name in wanted.split(",")]
    locks: Locks = {}
    holders: list[str] = []
    try:
        for gpu in wanted_gpus:
            if len(locks) == count:
                break
            if automatic and not gpu.idle:
                holders.append(gpu.describe())
            elif holder := _take(locks, gpu, job_id):
                if not automatic:
                    raise TooFewGpusError(f"GPU {gpu.index} is held by {holder}")
                holders.append(f"{gpu.index} {holder}")
        if len(locks) < (count or 1):
            found = f"{len(locks)} idle GPUs where {count} are asked for"
            if count is None:
                found = "no GPU is idle" if holders else "there is no GPU"
            raise TooFewGpusError(found + (f": {'; '.join(holders)}" if holders else ""))
    except BaseException:
        release(locks)
        raise
    return locks


def _named(gpus: Sequence[Gpu], name: str) -> Gpu:
    for gpu in gpus:
        if name in (str(gpu.index), gpu.uuid):
            return gpu
    known = ", ".join(str(gpu.index) for gpu in gpus) or "none"
    raise TooFewGpusError(f"GPU {name} does not exist; existing GPUs: {known}")


def share(count: int, environ: Mapping[str, str]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES for a job that needs `count` GPUs; None to leave it unchanged.

    The function counts device files: nvidia-smi may take seconds.

    Raises:
        TooFewGpusError: there are fewer GPUs.
    """
    names = listed_gpus(environ.get(_VISIBLE), visible_gpus({}))
    if len(names) < count:
        raise TooFewGpusError(f"{len(names)} GPUs where {count} are asked for")
    return ",".join(names[:count]) if len(names) > count else None


def _owner(pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return "another user"
