"""What holds for every test: a world of its own, and nothing left behind: process, socket, thread,
variable or directory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from login_user import laptop, laptop_of_either  # noqa: F401  fixtures
from procs import (
    MARKER,
    Job,
    alive,
    all_pids,
    below,
    command_line,
    jobs_in,
    kill_one_by_one,
    listening_sockets,
    marked,
)
from slurm_fixtures import (  # noqa: F401  fixtures
    _slurm_dbd,
    _slurm_either,
    _slurm_none,
    slurm,
    slurm_accounted,
    slurm_cluster,
)
from slurm_user import user, user_accounted, user_of_either  # noqa: F401  fixtures
from sshsite import full_disk, site  # noqa: F401  fixtures
from sshworld import World, require, world_in
from volc_platform import volc, volc_machines  # noqa: F401  fixtures

from clusterjob.core import node_zip

SETTLING = 5.0  # seconds that what a test has started may take to be gone
_FAMILIES = (
    "SLURM_", "SBATCH_", "SRUN_", "CLUSTERJOB_", "TORCHELASTIC_", "MASTER_", "PET_", "MLP_",
    "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_", "PALS_", "JSM_", "LSB_", "FLUX_", "PADDLE_",
    "VC_", "VK_", "MA_NUM_", "SKYPILOT_", "SM_", "AZ_BATCH", "DLC_", "AIHC_",
)  # fmt: skip
_ALONE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME", "RES_OPTIONS", "PYTHONUNBUFFERED",
)  # fmt: skip

settings.register_profile("clusterjob", deadline=None)
settings.load_profile("clusterjob")


# What a test needs shows in its fixtures; a test that needs a daemon in another way has the marker.
_NEEDS = {
    "slurm": {"_slurm_none", "_slurm_dbd", "_slurm_either"},
    "ssh": {"_hosts"},
    "root": {"_hosts", "full_disk"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="fail each test that is skipped: CI installs everything that tests need",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for marker, needed in _NEEDS.items():
            if fixtures & needed:
                item.add_marker(marker)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if (
        report.skipped
        and item.config.getoption("--fail-on-skip")
        and not hasattr(report, "wasxfail")
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"not expected under --fail-on-skip: {reason}"


@pytest.fixture(scope="session", autouse=True)
def _signals_of_a_terminal() -> None:
    """Undo what a shell does to a job in the background: processes inherit signals that are
    ignored.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory with the node zip in it, as a job leaves it: to make it takes longer
    than most tests.
    """
    cache = tmp_path_factory.mktemp("cache")
    node_zip.keep(node_zip.node_zip(), cache / "clusterjob")
    return cache


@pytest.fixture(autouse=True)
def _world_of_its_own(tmp_path_factory: pytest.TempPathFactory, _cache: Path) -> Iterator[None]:
    """Give the test an environment that names no job and no configuration; fail it if it changes
    the environment or leaks.
    """
    before = set(all_pids())
    threads = set(threading.enumerate())
    listening = listening_sockets(os.getpid())
    directory = os.getcwd()
    marker = uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(_FAMILIES) or name in _ALONE:
                patch.delenv(name)
        home = tmp_path_factory.mktemp("home")
        patch.setenv(MARKER, marker)
        patch.setenv(
            "PYTHONPATH", str(Path(__file__).resolve().parent.parent)
        )  # for interpreters that are started with -S
        patch.setenv("CLUSTERJOB_HOME", str(home / "clusterjob"))
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("XDG_CACHE_HOME", str(_cache))
        given = _environment()
        yield
        left = _environment()
        for name in left.keys() | given.keys():
            if name in given:
                os.environ[name] = given[name]
            else:
                del os.environ[name]
    complaints = [
        f"{name}: {given.get(name)!r} became {left.get(name)!r}"
        for name in left.keys() | given.keys()
        if left.get(name) != given.get(name)
    ]
    if os.getcwd() != directory:
        complaints.append(f"the working directory became {os.getcwd()}")
        os.chdir(directory)
    complaints += _leaks(marker, before, threads, listening)
    if complaints:
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {complaint}" for complaint in complaints),
            pytrace=False,
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _leaks(
    marker: str, before: set[int], threads: set[threading.Thread], listening: set[str]
) -> list[str]:
    """Return a line for everything that outlives the test and its settling time.

    Leaked processes are killed then.

    Args:
        marker: stands in the environment of all that the test started.
        before: the processes of this machine when the test began.
        threads: the threads of this process when the test began.
        listening: the addresses on which this process listened when the test began.
    """
    end = time.monotonic() + SETTLING
    while True:
        # Most tests start no process: then there is nothing to read.
        new = set(all_pids()) - before
        pids = sorted({*marked(marker, new), *new.intersection(below(os.getpid()))}) if new else []
        others = [thread for thread in threading.enumerate() if thread not in threads]
        sockets = listening_sockets(os.getpid()) - listening
        if not (pids or others or sockets):
            return []
        if time.monotonic() > end:
            break
        time.sleep(0.02)
    lines = [f"a process: {pid} {command_line(pid)}" for pid in pids]
    lines += [
        f"a listening socket: {address} of process {pid}"
        for pid in pids
        for address in listening_sockets(pid)
    ]
    lines += [f"a thread: {thread.name}" for thread in others]
    lines += [f"a listening socket of this process: {address}" for address in sockets]
    kill_one_by_one([pid for pid in pids if alive(pid)])
    return lines


@pytest.fixture
def weird_path(tmp_path: Path) -> Path:
    """Return a directory whose name holds all that a shell, a hostfile or a log line may trip over."""
    path = tmp_path / "-weird 'name' \"of\"\na $(dîr) ☃"
    path.mkdir()
    return path


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a maker of jobs: ``new_job(2)`` is one of two nodes, whose agents the test starts."""
    with jobs_in(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    require()
    with world_in(tmp_path_factory.mktemp("world")) as world:
        yield world


@pytest.fixture
def world(_hosts: World, _world_of_its_own: None) -> Iterator[World]:
    """Give the test real hosts, and a place in their client's network; nothing may be left running
    on them.
    """
    _hosts.reset()
    with _hosts.client():
        yield _hosts
    left = _hosts.clean()
    assert not left, f"left running on the hosts: {left}"
