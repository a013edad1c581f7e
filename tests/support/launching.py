"""How the tests of the worker side start real workers: under our launcher, under torchrun, plainly,
or by hand.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
PATIENCE = 120.0  # seconds; many times what any of these runs needs

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "fork": (sys.executable, "-m", "clusterjob.node", "--start", "fork", "--nproc-per-node"),
    "exec": (sys.executable, "-m", "clusterjob.node", "--start", "exec", "--nproc-per-node"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"),
}
_FOREIGN = (
    "CLUSTERJOB_",
    "TORCHELASTIC_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PET_",
    "MLP_",
    "PADDLE_",
)
_SHARES = 4  # at most so many processes of pytest choose ports side by side
_given: set[int] = set()
_FOREIGN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Run:
    """One command that has ended."""

    code: int
    out: str
    err: str


def environment(directory: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment that names no job, whose temporary files lie in the test's own
    directory.
    """
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    own = {
        "TMPDIR": _shorter(directory),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",
    }
    return keep | own | dict(extra or {})


@functools.cache
def _shorter(directory: Path) -> str:
    """Return a short path of a directory: a socket's has at most 107 bytes, and multiprocessing
    makes sockets below TMPDIR.
    """
    link = _links() / secrets.token_hex(3)
    link.symlink_to(directory)
    return str(link)


@functools.cache
def _links() -> Path:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    atexit.register(shutil.rmtree, folder)
    return folder


def start(
    argv: Sequence[object], directory: Path, extra: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command in a directory; whoever starts it waits for it."""
    return subprocess.Popen(
        [str(word) for word in argv],
        cwd=directory,
        env=environment(directory, extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that whatever it leaves behind can be stopped with it
    )


def finish(process: subprocess.Popen[str], patience: float = PATIENCE) -> Run:
    """Wait for a command; one that takes too long is stopped and fails the test with what it had to
    say.
    """
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        out, err = _stop(process)
        raise AssertionError(
            f"{process.args} did not end within {patience:g} s\n{out}\n{err}"
        ) from None
    except BaseException:
        _stop(process)
        raise
    return Run(process.returncode, out, err)


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()  # a launcher stops its workers then
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def run(argv: Sequence[object], directory: Path, extra: Mapping[str, str] | None = None) -> Run:
    return finish(start(argv, directory, extra))


def launch(
    launcher: str,
    nproc: int,
    argv: Sequence[object],
    directory: Path,
    extra: Mapping[str, str] | None = None,
) -> Run:
    """Run a program on some workers of this machine."""
    return run([*LAUNCHERS[launcher], nproc, *argv], directory, extra)


def by_hand(
    nproc: int, argv: Sequence[object], directory: Path, extra: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start workers as no launcher does: with nobody who would stop the others when one fails."""
    common = {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    places = [
        common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | dict(extra or {})
        for rank in range(nproc)
    ]
    return [start([sys.executable, *argv], directory, place) for place in places]


MARGIN = 15  # seconds by which what a process tells may be late on a busy machine


def gave_up_after(line: str) -> int:
    """Return the seconds after which a process says that it gave up: its time-out, and up to
    `MARGIN` more.
    """
    return int(line.rpartition("gave up after ")[2].split()[0])


def so_far(line: str) -> int:
    """Return the seconds for which a process says that it has waited: 4 at its first notice, and up
    to `MARGIN` more.
    """
    return int(line.partition(" s so far")[0].split()[-1])


def free_port() -> int:
    """Return a TCP port that nobody listens on and no other call returns, in this process of pytest
    or in another.

    None of those that the kernel deals out, which are another's a moment later.
    """
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    while True:
        port = 12000 + share + _SHARES * secrets.randbelow(8000 // _SHARES)
        if port in _given:
            continue
        _given.add(port)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("0.0.0.0", port))
            return port


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def told(directory: Path, nproc: int) -> list[dict[str, Any]]:
    """Return what each rank has written to rank<N>.json."""
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def rank_variables(rank: int, world: int, port: int, local: int | None = None) -> dict[str, str]:
    size = {"LOCAL_WORLD_SIZE": str(world if local is None else local)}
    return size | {
        "RANK": str(rank), "LOCAL_RANK": str(rank % int(size["LOCAL_WORLD_SIZE"])),
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def last_message(err: str) -> str:
    return [line for line in err.strip().splitlines() if not line.startswith("hint: ")][-1]
