"""Fixtures for all tests; each test runs in an isolated environment and must clean up.

A test fails if it leaves a process, a listening socket, a thread, a changed environment variable or
a changed working directory.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_user import local_user, new_user  # noqa: F401  fixtures
from hypothesis import settings
from launching import is_job_variable, new_folder
from login_user import laptop  # noqa: F401  fixture
from preloaded import COMMAND_MODULES, SCRIPT_MODULES, Preloaded, preloaded_process
from procs import (
    MARKER,
    Job,
    alive,
    all_pids,
    below,
    command_line,
    job_factory,
    kill_all,
    listening_sockets,
    marked,
)
from slurm_user import (  # noqa: F401  fixtures
    _slurm_dbd,
    _slurm_none,
    slurm,
    slurm_accounted,
    user,
    user_accounted,
)
from ssh_network import SshNetwork, python_without_torch, require_ssh_network, ssh_network_in
from sshsite import full_disk, pool, site, warnings  # noqa: F401  fixtures
from volc_platform import volc, volc_machines  # noqa: F401  fixtures

from clusterjob.core import node_zip

SETTLING = 5.0  # seconds in which the processes, sockets and threads of a test must end
settings.register_profile("clusterjob", deadline=None)
settings.load_profile("clusterjob")


# Fixtures that add a marker to a test. A test that needs a daemon without them sets the marker.
_NEEDS = {
    "slurm": {"_slurm_none", "_slurm_dbd"},
    "ssh": {"_hosts"},
    "root": {"_hosts", "full_disk"},
}
_MARKERS = ("browser", "gpu", "mpi", "root", "slurm", "ssh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fail-on-skip",
        action="store_true",
        help="fail each test that is skipped: CI installs everything that tests need",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests need; with ``--dist loadgroup``, one process runs all tests of a group.

    So one Slurm cluster serves a run: its tests mostly wait. Tests that share a fixture of their
    module stay together, too.
    """
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for marker, needed in _NEEDS.items():
            if fixtures & needed:
                item.add_marker(marker)
        if item.get_closest_marker("slurm"):
            item.add_marker(pytest.mark.xdist_group("slurm"))
        elif any(shared[-1].scope == "module" for shared in _fixtures(item)):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


def _fixtures(item: pytest.Item) -> list[Sequence[Any]]:
    """Return the definitions of each fixture that a test uses; the last one counts."""
    info = getattr(item, "_fixtureinfo", None)
    return [] if info is None else [each for each in info.name2fixturedefs.values() if each]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if (
        report.skipped
        and item.config.getoption("--fail-on-skip")
        and not hasattr(report, "wasxfail")
        and item.get_closest_marker("gpu") is None  # no package installs a GPU
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"not expected under --fail-on-skip: {reason}"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # after the short summary
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Say in one line how many tests this machine could not run, and why."""
    yield
    skipped = [
        report
        for report in terminalreporter.getreports("skipped")
        if not hasattr(report, "wasxfail")
    ]
    if skipped:
        needs = sorted({name for report in skipped for name in _MARKERS if name in report.keywords})
        terminalreporter.write_line(
            f"left out: {len(skipped)} tests that need what this machine or user lacks"
            f" ({', '.join([*needs, 'see -rs'])}); as root, `make packages` installs it"
        )


@pytest.fixture(scope="session", autouse=True)
def _default_signals() -> None:
    """Restore the default handlers of SIGINT and SIGHUP.

    A shell ignores these signals in a background job, and child processes inherit that.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory that contains the node zip, as after a job.

    Building the zip takes longer than most tests.
    """
    cache = tmp_path_factory.mktemp("cache")
    node_zip.keep(node_zip.node_zip(), cache / "clusterjob")
    return cache


@pytest.fixture(autouse=True)
def _isolated_environment(tmp_path_factory: pytest.TempPathFactory, _cache: Path) -> Iterator[None]:
    """Run the test without job variables or configuration; fail it if it leaves anything behind."""
    before = set(all_pids())
    threads = set(threading.enumerate())
    listening = listening_sockets()
    directory = os.getcwd()
    marker = uuid.uuid4().hex
    # `mktemp` would read the names of the directories of all earlier tests.
    home = new_folder(tmp_path_factory.getbasetemp() / "homes" / marker[:8])
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if is_job_variable(name):
                patch.delenv(name)
        # Without cached bytecode, each command compiles the package.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        variables = {
            MARKER: marker,
            # For interpreters that are started with -S.
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
            "CLUSTERJOB_HOME": str(home / "clusterjob"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(_cache),
        }
        for name, value in variables.items():
            patch.setenv(name, value)
        given = _environment()
        yield
        left = _environment()
        for name in left.keys() - given.keys():
            del os.environ[name]
        os.environ.update(given)
    problems = [
        f"{name}: {given.get(name)!r} became {left.get(name)!r}"
        for name in left.keys() | given.keys()
        if left.get(name) != given.get(name)
    ]
    if os.getcwd() != directory:
        problems.append(f"the working directory became {os.getcwd()}")
        os.chdir(directory)
    problems += _leaks(marker, before, threads, listening)
    if problems:
        pytest.fail(
            "the test left behind:\n" + "\n".join(f"  {problem}" for problem in problems),
            pytrace=False,
        )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _leaks(
    marker: str, before: set[int], threads: set[threading.Thread], listening: set[str]
) -> list[str]:
    """Return a line for each leak that exists after `SETTLING` seconds; kill leaked processes.

    Args:
        marker: the value of `MARKER` in the environment of the test's processes.
        before: the processes of this machine when the test began.
        threads: the threads of this process when the test began.
        listening: the addresses on which this process listened when the test began.
    """
    end = time.monotonic() + SETTLING
    while True:
        # Most tests start no process; skip reading /proc then.
        new = set(all_pids()) - before
        pids = {*marked(marker, new), *new.intersection(below(os.getpid()))} if new else set()
        leaks = {f"process {pid} {command_line(pid)}" for pid in pids}
        leaks |= {f"thread {each.name}" for each in threading.enumerate() if each not in threads}
        leaks |= {f"a listening socket {each}" for each in listening_sockets() - listening}
        if not leaks or time.monotonic() > end:
            kill_all([pid for pid in pids if alive(pid)])
            return sorted(leaks)
        time.sleep(0.02)


@pytest.fixture
def special_path(tmp_path: Path) -> Path:
    """Return a directory with special characters in its name, to find errors in quoting."""
    return new_folder(tmp_path / "-weird 'name' \"of\"\na $(dîr) ☃")


@pytest.fixture
def plain_python(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let jobs use an interpreter without torch, which starts ten times faster."""
    python = str(python_without_torch(tmp_path_factory.mktemp("python")))
    monkeypatch.setenv("CLUSTERJOB_PYTHON", python)
    return python


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that creates jobs without agents: ``make_job(2)`` is for 2 nodes."""
    with job_factory(tmp_path) as make:
        yield make


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Return a process that has imported torch and runs scripts: ``preloaded.run([path], ...)``."""
    with preloaded_process(tmp_path_factory.mktemp("preloaded"), SCRIPT_MODULES) as process:
        yield process


@pytest.fixture(scope="session")
def preloaded_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """Return a process that has imported our modules: it runs commands as ``-m clusterjob``."""
    with preloaded_process(tmp_path_factory.mktemp("commands"), COMMAND_MODULES) as process:
        yield process


@pytest.fixture
def _only_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let one test at a time run Ray: each starts a score of processes, with time limits."""
    with (tmp_path_factory.getbasetemp().parent / "ray.lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def _hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNetwork]:
    require_ssh_network()
    with ssh_network_in(tmp_path_factory.mktemp("ssh")) as ssh_network:
        yield ssh_network


@pytest.fixture
def ssh_network(_hosts: SshNetwork, _isolated_environment: None) -> Iterator[SshNetwork]:
    """Run the test in the client's network of real hosts; fail it if processes are left on them."""
    _hosts.reset()
    with _hosts.client():
        yield _hosts
    left = _hosts.clean()
    assert not left, f"left running on the hosts: {left}"
