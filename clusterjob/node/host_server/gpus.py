"""A host's GPUs: who uses which, which are idle, and locks, so that two of our own jobs never take
the same card.

Read through NVML where the host's interpreter has nvidia-ml-py, else from nvidia-smi. Cards are
handed to a job by their UUIDs: CUDA counts them in another order than nvidia-smi does, unless
CUDA_DEVICE_ORDER says otherwise.
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
from typing import Any

AUTO = "auto"
_LITTLE = 1 << 30  # bytes: what a driver keeps for itself on an idle card stays below
_PATIENCE = 30.0  # seconds for nvidia-smi, which wakes sleeping cards one after the other
_COMMON = "/tmp"  # noqa: S108 - whose directory it is gets checked
_DRIVER = Path("/proc/driver/nvidia/gpus")


class TooFewError(Exception):
    """There are not enough cards; the text says who holds which."""


@dataclass(frozen=True)
class Card:
    """One card.

    Attributes:
        index: as nvidia-smi counts.
        uuid: its name everywhere.
        name: its model.
        used, total: bytes of its memory.
        processes: (pid, command) of those that compute on it.
    """

    index: int
    uuid: str
    name: str
    used: int
    total: int
    processes: tuple[tuple[int, str], ...] = ()

    @property
    def idle(self) -> bool:
        """Whether nobody computes on it and little of its memory is in use."""
        return not self.processes and self.used < _LITTLE

    def text(self) -> str:
        """Return it for people, with who uses it."""
        users = ", ".join(
            f"{_owner(pid)}'s {os.path.basename(command)} (pid {pid})"
            for pid, command in self.processes
        )
        state = f"{self.used / 1e9:.1f} of {self.total / 1e9:.0f} GB used"
        return f"{self.index} {self.name}: {'idle' if self.idle else f'{users}, {state}' if users else state}"


def read_cards() -> list[Card]:
    """Return the cards of this host, by index; none where there is no driver.

    Raises:
        OSError: nvidia-smi is there and fails.
    """
    try:
        import pynvml
    except ImportError:
        return _by_command()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return _by_command()
    try:
        return [_by_library(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _by_library(pynvml: Any, index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    running = tuple(
        (int(process.pid), _command(int(process.pid)))
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    )
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Card(
        index, uuid, name=name, used=int(memory.used), total=int(memory.total), processes=running
    )


def _by_command() -> list[Card]:
    if shutil.which("nvidia-smi") is None:
        return []
    apps: dict[str, list[tuple[int, str]]] = {}
    for row in _ask("--query-compute-apps=gpu_uuid,pid,process_name"):
        if len(row) >= 3 and row[1].isdigit():
            apps.setdefault(row[0], []).append((int(row[1]), ", ".join(row[2:])))
    cards = []
    for row in _ask("--query-gpu=index,uuid,memory.used,memory.total,name"):
        if len(row) >= 5 and row[0].isdigit():
            used, total = (int(text) << 20 if text.isdigit() else 0 for text in row[2:4])
            cards.append(
                Card(
                    int(row[0]),
                    row[1],
                    name=", ".join(row[4:]),
                    used=used,
                    total=total,
                    processes=tuple(apps.get(row[1], ())),
                )
            )
    return cards


def _ask(query: str) -> list[list[str]]:
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            words, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(0, f"nvidia-smi says nothing for {_PATIENCE:g} s") from error
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines() or [
            "no reason given"
        ]
        raise OSError(0, f"nvidia-smi fails: {said[0]}")
    return [
        [cell.strip() for cell in line.split(",")]
        for line in done.stdout.decode(errors="replace").splitlines()
    ]


def visible(cards: Sequence[Card], listed: str | None) -> list[Card]:
    """Return the cards that a login may use, by the host's own CUDA_VISIBLE_DEVICES; all where that
    is not set.

    As CUDA reads it, the list ends at the first entry that is no card.
    """
    if listed is None:
        return list(cards)
    found: list[Card] = []
    for entry in (part.strip() for part in listed.split(",")):
        by_uuid = entry.startswith("GPU-")
        card = next(
            (
                card
                for card in cards
                if (card.uuid.startswith(entry) if by_uuid else entry == str(card.index))
            ),
            None,
        )
        if card is None or card in found:
            break
        found.append(card)
    return found


class Reservation:
    """Cards that are locked for a job until this, and every process that inherits its descriptors,
    is gone.

    Args:
        job_id: the job, for others to see who holds a card.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self.cards: list[Card] = []
        self.descriptors: list[int] = []

    def take(self, card: Card) -> str:
        """Lock a card; return who holds it if somebody else does, else an empty text.

        Raises:
            OSError: there can be no locks.
        """
        taken: list[int] = []
        for directory in lock_directories():
            path = directory / card.uuid.replace("/", "_")
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
        self.cards.append(card)
        self.descriptors += taken
        return ""

    def release(self) -> None:
        """Give up this process's hold: what was started with the descriptors keeps its own."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


def lock_directories() -> list[Path]:
    """Return where the locks of this user lie on this machine: not in the home directory, which
    machines may share.

    A card is locked in all of them. In the runtime directory of logins (XDG_RUNTIME_DIR) nobody
    else can make anything; not every login has it, and it goes with the last one. In /tmp somebody
    else may have taken the name: then the other one has to do.

    Raises:
        OSError: there is none that is this user's own.
    """
    uid = os.getuid()
    runtime = dict.fromkeys((os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{uid}"))
    found = [Path(name) for name in runtime if name.startswith("/") and _is_private(Path(name))]
    common = Path(f"{_COMMON}/clusterjob-gpus-{uid}")
    try:
        common.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        if not found:
            raise
    if _is_private(common):
        found.append(common)
    if not found:
        raise OSError(
            0, "it is not this user's own directory, and XDG_RUNTIME_DIR names none", str(common)
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


def pick(job_id: str, wanted: str, count: int, environ: Mapping[str, str]) -> Reservation:
    """Choose cards for a job and lock them.

    Args:
        job_id: the job.
        wanted: ``auto`` for idle ones, else a list of numbers, as nvidia-smi counts, or UUIDs.
        count: how many; with a list, as many as are in it.
        environ: the login's environment.

    Raises:
        TooFewError: there are not as many; with ``auto``, as many idle ones.
        OSError: the cards cannot be read, or there can be no locks.
    """
    there = visible(read_cards(), environ.get("CUDA_VISIBLE_DEVICES"))
    held = Reservation(job_id)
    try:
        if wanted != AUTO:
            for entry in wanted.split(","):
                card = next((card for card in there if entry in (str(card.index), card.uuid)), None)
                if card is None:
                    known = ", ".join(str(card.index) for card in there) or "none"
                    raise TooFewError(
                        f"there is no GPU {entry}; there is {known} (--gpus lists cards, --gpus-per-node counts them)"
                    )
                if holder := held.take(card):
                    raise TooFewError(f"GPU {entry} is held by {holder}")
            return held
        holders: dict[int, str] = {}
        for card in there:
            if len(held.cards) == count:
                break
            holders[card.index] = held.take(card) if card.idle else card.text()
        if len(held.cards) < count:
            taken = [
                f"{index} {text}" if text.startswith(("job ", "another")) else text
                for index, text in holders.items()
                if text
            ]
            who = "; ".join(taken)
            raise TooFewError(
                f"{len(held.cards)} idle GPUs where {count} are asked for"
                + (f": {who}" if who else "")
            )
    except BaseException:
        held.release()
        raise
    return held


def share(count: int, environ: Mapping[str, str]) -> str | None:
    """Return what CUDA_VISIBLE_DEVICES has to be for a job that wants some cards, whichever; None
    to leave it.

    Asks the driver's own files, not nvidia-smi, which may take seconds.

    Raises:
        TooFewError: there are fewer.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(len(os.listdir(_DRIVER)))] if _DRIVER.is_dir() else []
    if listed is not None:
        names = [entry.strip() for entry in listed.split(",") if entry.strip() not in ("", "-1")]
    if len(names) < count:
        raise TooFewError(f"{len(names)} GPUs where {count} are asked for")
    return ",".join(names[:count]) if len(names) > count else None


def _owner(pid: int) -> str:
    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return "somebody"


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"
