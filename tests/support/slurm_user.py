"""Run clusterjob as a user of a real Slurm, with a work directory and a fast interpreter."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERJOB, PACKAGE
from launching import finish
from preloaded import Preloaded
from procs import TEST_TIMEOUT, kill_all, own_processes, wait_for_no_processes, wait_until
from slurm_cluster import SlurmCluster, missing_packages
from ssh_network import python_without_torch

# Seconds; several times as long as two polls of Slurm by clusterjob, which polls every 5 s.
PROMPT = 30.0
COMMAND = Path(__file__).with_name("slurm_cluster.py")
STOPPING = 60.0  # seconds

# Creates the file up<RANK>, then sleeps.
SLEEPER = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    time.sleep(1000)
"""
# Creates the file up<RANK>, then waits for the file `leave`.
GUEST = """
    import os, pathlib, time
    print("line of", os.environ["RANK"], flush=True)
    pathlib.Path(f"up{os.environ['RANK']}").touch()
    while not os.path.exists("leave"):
        time.sleep(0.02)
    print("left", os.environ["RANK"], flush=True)
"""


class User:
    """A user on a login node.

    The jobs use an interpreter that cannot import torch and therefore starts ten times faster. The
    commands are forked from a process that has imported the package.
    """

    cluster = "slurm"

    def __init__(
        self,
        slurm: SlurmCluster,
        directory: Path,
        patch: pytest.MonkeyPatch,
        commands: Preloaded,
    ) -> None:
        self.slurm = slurm
        self.commands = commands
        self.directory = directory
        self.meeting = directory  # where the workers write files for the test
        self.python = python_without_torch(directory.parent)
        patch.setenv("CLUSTERJOB_PYTHON", str(self.python))
        self.patch = patch
        self.home = Path(os.environ["CLUSTERJOB_HOME"])
        self.running: list[subprocess.Popen[str]] = []

    # -- files -------------------------------------------------------------------------------------

    def path(self, name: str) -> Path:
        return self.directory / name

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a program and return its name; keep other programs, which a job may still start."""
        text = textwrap.dedent(text)
        while self.path(name).exists() and self.path(name).read_text() != text:
            name = f"another_{name}"
        self.path(name).write_text(text)
        return name

    def wait_for(self, *names: str, timeout: float = TEST_TIMEOUT) -> None:
        wait_until(
            lambda: all((self.meeting / name).exists() for name in names),
            timeout,
            f"the files {names}",
        )

    def command_first_on_path(self, name: str, text: str) -> Path:
        """Put a shell script on PATH before a command of the same name; return its notes file.

        In the script, $REAL is the path of the real command and $NOTES the path of the notes file.
        """
        bin_, notes = self.directory.parent / "bin", self.directory.parent / f"notes-{name}"
        bin_.mkdir(exist_ok=True)
        notes.touch()
        real = subprocess.run(
            ["which", name], capture_output=True, text=True, check=False
        ).stdout.strip()
        (bin_ / name).write_text(
            f"#!/bin/sh\nREAL={shlex.quote(real)} NOTES={shlex.quote(str(notes))}\n"
            f"{textwrap.dedent(text)}"
        )
        (bin_ / name).chmod(0o755)
        if not os.environ["PATH"].startswith(f"{bin_}:"):
            self.patch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
        return notes

    # -- commands ----------------------------------------------------------------------------------

    def __call__(
        self, *args: str, code: int = 0, timeout: float = TEST_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Run clusterjob to its end; fail the test if its exit code is not ``code``."""
        words = ["-m", "clusterjob", *args]
        done = finish(self.commands.start_program(words, self.directory, os.environ), timeout)
        assert done.code == code, f"exit code {done.code}\n{done.out}\n{done.err}\n{self.logs()}"
        assert PACKAGE not in done.err, f"a traceback of ours\n{done.err}"
        return subprocess.CompletedProcess(words, done.code, done.out, done.err)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[str]:
        """Start clusterjob; `said` returns its output."""
        number = len(self.running)
        with (
            self._output(number, "out").open("w") as out,
            self._output(number, "err").open("w") as err,
        ):
            options = {
                "cwd": self.directory,
                "stdin": subprocess.DEVNULL,
                "stdout": out,
                "stderr": err,
                **options,
            }
            self.running.append(subprocess.Popen([*CLUSTERJOB, *args], text=True, **options))
        return self.running[-1]

    def output_of(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Return the current stdout and stderr of a command from `start`."""
        number = self.running.index(process)
        return self._output(number, "out").read_text(), self._output(number, "err").read_text()

    def _output(self, number: int, stream: str) -> Path:
        return self.directory.parent / f"command{number}.{stream}"

    def run(
        self, text: str, *options: str, args: tuple[str, ...] = (), code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        return self("run", "--cluster", self.cluster, *options, self.script(text), *args, code=code)

    def submit(self, text: str, *options: str, args: tuple[str, ...] = ()) -> str:
        return self(
            "submit", "--cluster", self.cluster, *options, self.script(text), *args
        ).stdout.strip()

    def refused(self, *options: str, code: int = 1, command: str = "submit") -> str:
        """Return the error message for a refused job; fail if files or a job in Slurm remain."""
        before = self._queued()
        message = self(
            command, "--cluster", self.cluster, *options, self.script("pass"), code=code
        ).stderr
        assert self._queued() <= before  # Slurm may have removed ended jobs meanwhile
        assert self.remaining_files() == []
        return message

    def _queued(self) -> set[str]:
        return set(
            self.slurm.run("squeue", "--noheader", "--states=all", "--format=%i").stdout.split()
        )

    # -- jobs --------------------------------------------------------------------------------------

    def jobs(self, *ids: str) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = json.loads(
            self(*(("status", "--json", *ids) if ids else ("list", "--json"))).stdout
        )["jobs"]
        return jobs

    def job(self, job_id: str) -> dict[str, Any]:
        [job] = self.jobs(job_id)
        return job

    def wait_for_state(
        self, job_id: str, *states: str, timeout: float = TEST_TIMEOUT
    ) -> dict[str, Any]:
        def job_in_state() -> dict[str, Any] | None:
            job = self.job(job_id)
            return job if job["state"] in states else None

        found = wait_until(
            job_in_state, timeout, f"{job_id} to be {' or '.join(states)}: {self.job(job_id)}"
        )
        assert found is not None
        return found

    def directory_of(self, job_id: str) -> Path:
        whole, _, index = job_id.partition("_")
        return self.home / "jobs" / whole / (f"elements/{index}" if index else "")

    def record_of(self, job_id: str) -> Path:
        """Return the path of a job's record."""
        return self.home / "records" / f"{job_id}.json"

    def change_record(self, job_id: str, **fields: Any) -> None:
        path = self.record_of(job_id)
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def force_new_query(self) -> None:
        """Make the next command query Slurm, even if the snapshot is recent."""
        for path in self.home.glob("slurm/*.json"):
            path.unlink()

    def slurm_id(self, job_id: str) -> str:
        """Return Slurm's id of a job from the job's record."""
        return str(json.loads(self.record_of(job_id).read_text())["handle"]["id"])

    def slurm_job(self, job_id: str) -> dict[str, str]:
        return self.slurm.job(self.slurm_id(job_id))

    def output(self, job_id: str, *options: str) -> str:
        return self("logs", job_id, *options).stdout

    def remaining_files(self) -> list[str]:
        """Return all files of jobs and all records."""
        folders = (self.home / "jobs", self.home / "records")
        return [str(path) for folder in folders for path in folder.rglob("*") if not path.is_dir()]

    def logs(self) -> str:
        """Return the ends of slurm*.out and agent.log, for messages of failed tests."""
        found = sorted(
            [*self.home.glob("jobs/**/slurm*.out"), *self.home.glob("jobs/**/agent.log")]
        )
        return "\n".join(
            f"-- {path}:\n{path.read_text(errors='replace')[-2000:]}" for path in found
        )


@pytest.fixture
def new_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded_commands: Preloaded
) -> Iterator[Callable[..., User]]:
    """Return a function that makes a user; fail the test if the user leaves commands running."""
    made: list[User] = []

    def make(slurm: SlurmCluster, kind: type[User] = User) -> User:
        directory = tmp_path / "work"
        directory.mkdir()
        made.append(kind(slurm, directory, monkeypatch, preloaded_commands))
        return made[0]

    yield make
    still = [process for user in made for process in user.running if process.poll() is None]
    for process in still:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
    assert not still, f"commands that the test left running: {[process.args for process in still]}"


@pytest.fixture
def user(slurm: SlurmCluster, new_user: Callable[..., User]) -> User:
    """Return a user of the cluster without accounting."""
    return new_user(slurm)


@pytest.fixture
def user_accounted(slurm_accounted: SlurmCluster, new_user: Callable[..., User]) -> User:
    """Return a user of the cluster with accounting."""
    return new_user(slurm_accounted)


# -- fixtures of a real Slurm: each cluster starts once, for the first test that needs it ----------


def _run_cluster(*options: str) -> Iterator[SlurmCluster]:
    """Start a cluster in a child process, which stops it even if this process is killed."""
    if missing := missing_packages(accounting="--accounting" in options):
        pytest.skip(f"{', '.join(missing)} missing: `make packages` installs it")
    # In /tmp for short paths: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    keeper = subprocess.Popen(
        [sys.executable, str(COMMAND), "--dir", str(directory / "cluster"), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    try:
        if not keeper.stdout.readline().startswith("export SLURM_CONF="):
            pytest.fail(f"no Slurm: {keeper.communicate()[1]}", pytrace=False)
        yield SlurmCluster.attached(directory / "cluster")
    finally:
        keeper.communicate(timeout=STOPPING)  # the end of its stdin stops it
        SlurmCluster(directory / "cluster").stop()  # in case the keeper was killed
        shutil.rmtree(directory)
    assert keeper.returncode == 0


def _with_environment(cluster: SlurmCluster, patch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Set the cluster's variables; afterwards cancel its jobs, and mend its daemons and nodes."""
    for name, value in cluster.environment.items():
        patch.setenv(name, value)
    try:
        yield cluster
    finally:
        cluster.restore()
        try:
            wait_for_no_processes(PROMPT)
        finally:
            kill_all(own_processes())


@pytest.fixture(scope="session")
def _slurm_none() -> Iterator[SlurmCluster]:
    yield from _run_cluster()


@pytest.fixture(scope="session")
def _slurm_dbd() -> Iterator[SlurmCluster]:
    yield from _run_cluster("--accounting")


@pytest.fixture
def slurm(_slurm_none: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """Return the cluster without accounting."""
    yield from _with_environment(_slurm_none, monkeypatch)


@pytest.fixture
def slurm_accounted(
    _slurm_dbd: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Return the cluster with slurmdbd and MariaDB."""
    yield from _with_environment(_slurm_dbd, monkeypatch)
