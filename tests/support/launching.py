"""Start real workers: with clusterjob, with torchrun, or without a launcher."""

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from preloaded import ForkedProgram, Preloaded

ROOT = Path(__file__).resolve().parents[2]
HOST = socket.gethostname()
TEST_TIMEOUT = 120.0  # seconds; all of these runs need much less

LAUNCHERS: dict[str, tuple[str, ...]] = {
    "fork": (sys.executable, "-m", "clusterjob.node", "--start", "fork", "--nproc-per-node"),
    "exec": (sys.executable, "-m", "clusterjob.node", "--start", "exec", "--nproc-per-node"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"),
}
# The variables that launchers and platforms set.
_JOB_PREFIXES = (
    "SLURM_", "SBATCH_", "SRUN_", "CLUSTERJOB_", "TORCHELASTIC_", "MASTER_", "PET_", "MLP_",
    "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_", "PALS_", "JSM_", "LSB_", "FLUX_", "PADDLE_",
    "VC_", "VK_", "PBS_", "MA_NUM_", "SKYPILOT_", "SM_", "AZ_BATCH", "DLC_", "AIHC_",
)  # fmt: skip
_JOB_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "NPROC_PER_NODE", "RES_OPTIONS", "PYTHONUNBUFFERED",
)  # fmt: skip
_SHARES = 4  # the largest number of pytest processes that choose ports at the same time
_given: set[int] = set()


@dataclass(frozen=True)
class Run:
    """One command that has ended."""

    code: int
    out: str
    err: str


def is_job_variable(name: str) -> bool:
    """Return whether a launcher or platform sets this variable; tests run without it."""
    return name.startswith(_JOB_PREFIXES) or name in _JOB_VARIABLES


def environment(directory: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment without variables of a job, with TMPDIR in the test's directory."""
    keep = {name: value for name, value in os.environ.items() if not is_job_variable(name)}
    own = {
        "TMPDIR": _short_link(directory),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    return keep | own | dict(extra or {})


@functools.cache
def _short_link(directory: Path) -> str:
    """Return a short symbolic link to a directory.

    A socket's path has at most 107 bytes, and multiprocessing creates sockets in TMPDIR.
    """
    link = _link_directory() / secrets.token_hex(3)
    link.symlink_to(directory)
    return str(link)


@functools.cache
def _link_directory() -> Path:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    atexit.register(shutil.rmtree, folder)
    return folder


def start(
    argv: Sequence[object], directory: Path, extra: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a command in a directory; the caller waits for its end."""
    return subprocess.Popen(
        [str(word) for word in argv],
        cwd=directory,
        env=environment(directory, extra),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the whole process group can be killed
    )


def finish(
    process: subprocess.Popen[str] | ForkedProgram,
    timeout: float = TEST_TIMEOUT,
    *,
    code: int | None = None,
) -> Run:
    """Wait for a command; fail the test after the timeout, or at another exit code than `code`."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = _stop(process)
        raise AssertionError(
            f"{process.args} did not end within {timeout:g} s\n{out}\n{err}"
        ) from None
    except BaseException:
        _stop(process)
        raise
    assert code in (None, process.returncode), f"exit code {process.returncode}\n{out}\n{err}"
    return Run(process.returncode, out, err)


def _stop(process: subprocess.Popen[str] | ForkedProgram) -> tuple[str, str]:
    process.terminate()  # at SIGTERM, a launcher stops its workers
    try:
        return process.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()


def run(
    argv: Sequence[object],
    directory: Path,
    extra: Mapping[str, str] | None = None,
    *,
    code: int | None = None,
) -> Run:
    return finish(start(argv, directory, extra), code=code)


def launch(
    launcher: str,
    nproc: int,
    argv: Sequence[object],
    directory: Path,
    extra: Mapping[str, str] | None = None,
    *,
    code: int | None = None,
) -> Run:
    """Run a program as workers of a launcher on this machine."""
    return run([*LAUNCHERS[launcher], nproc, *argv], directory, extra, code=code)


def start_manually(
    preloaded: Preloaded,
    nproc: int,
    argv: Sequence[object],
    directory: Path,
    extra: Mapping[str, str] | None = None,
) -> list[ForkedProgram]:
    """Start workers without a launcher, so the others keep running when one fails."""
    port = free_port()
    return [
        preloaded.start(argv, directory, rank_variables(rank, nproc, port) | dict(extra or {}))
        for rank in range(nproc)
    ]


MARGIN = 15  # seconds by which a process's message may be late on a busy machine


def timeout_seconds(line: str) -> int:
    """Return the seconds in a message "gave up after N s": the timeout plus up to `MARGIN`."""
    return int(line.rpartition("gave up after ")[2].split()[0])


def waited_seconds(line: str) -> int:
    """Return the seconds in a message "N s so far"; the first is 4 plus up to `MARGIN`."""
    return int(line.partition(" s so far")[0].split()[-1])


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free TCP ports that no other call returns.

    No call of another pytest process returns them either. They are outside of the kernel's
    ephemeral range: another program could get such a port at any moment.
    """
    size = 8000 // _SHARES
    share = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _SHARES
    while True:
        first = 12000 + size * share + secrets.randbelow(size + 1 - count)
        ports = range(first, first + count)
        if _given.intersection(ports):
            continue
        _given.update(ports)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("0.0.0.0", port))
            return first


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def new_folder(path: Path) -> Path:
    """Create a directory with its parents; return it."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def executable(path: Path, text: str) -> Path:
    """Write a program that may be executed; return its path."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_tree(root: Path, **files: str) -> None:
    """Write text files, given by their paths below a directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def with_paddle(directory: Path) -> str:
    """Return a PYTHONPATH with an empty package `paddle`; agents find it but never import it."""
    (directory / "installed" / "paddle").mkdir(parents=True)
    (directory / "installed" / "paddle" / "__init__.py").touch()
    return f"{ROOT}:{directory / 'installed'}"


def rank_reports(directory: Path, nproc: int) -> list[dict[str, Any]]:
    """Return the contents of rank<N>.json of each rank."""
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(nproc)]


def rank_variables(rank: int, world: int, port: int, local: int | None = None) -> dict[str, str]:
    size = {"LOCAL_WORLD_SIZE": str(world if local is None else local)}
    return size | {
        "RANK": str(rank), "LOCAL_RANK": str(rank % int(size["LOCAL_WORLD_SIZE"])),
        "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def last_message(err: str) -> str:
    return [line for line in err.strip().splitlines() if not line.startswith("hint: ")][-1]
