"""Run clusterjob as a user with a work directory, by the commands that users type."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import CLUSTERJOB, PACKAGE
from launching import executable, finish, new_folder
from preloaded import Preloaded
from procs import TEST_TIMEOUT, kill_all, own_processes, wait_for_no_processes, wait_until

END_TIMEOUT = 15.0  # seconds; much longer than a job needs to end, because the machine may be busy


class CommandUser:
    """A user; the commands are forked from a process that has imported the package."""

    cluster = "local"

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, commands: Preloaded) -> None:
        self.directory = self.meeting = directory  # the second is where workers write for the test
        self.patch = patch
        self.commands = commands
        self.home = Path(os.environ["CLUSTERJOB_HOME"])
        self.running: list[subprocess.Popen[str]] = []

    @property
    def target(self) -> tuple[str, ...]:
        """The options that name the cluster."""
        return ("--cluster", self.cluster)

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
        executable(
            bin_ / name,
            f"#!/bin/sh\nREAL={shlex.quote(real)} NOTES={shlex.quote(str(notes))}\n"
            f"{textwrap.dedent(text)}",
        )
        if not os.environ["PATH"].startswith(f"{bin_}:"):
            self.patch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
        return notes

    # -- commands ----------------------------------------------------------------------------------

    def __call__(
        self, *args: str, code: int | None = 0, timeout: float = TEST_TIMEOUT
    ) -> subprocess.CompletedProcess[str]:
        """Run clusterjob to its end; fail the test if its exit code is not ``code``, if given."""
        words = ["-m", "clusterjob", *args]
        done = finish(self.commands.start_program(words, self.directory, os.environ), timeout)
        assert code in (None, done.code), (
            f"exit code {done.code}\n{done.out}\n{done.err}\n{self.logs()}"
        )
        assert PACKAGE not in done.err, f"a traceback of ours\n{done.err}"
        return subprocess.CompletedProcess(words, done.code, done.out, done.err)

    def start(self, *args: str, until: Iterable[str] = (), **options: Any) -> subprocess.Popen[str]:
        """Start clusterjob, whose output `output_of` returns; wait for the files ``until``."""
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
        self.wait_for(*until)
        return self.running[-1]

    def output_of(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """Return the current stdout and stderr of a command from `start`."""
        number = self.running.index(process)
        return self._output(number, "out").read_text(), self._output(number, "err").read_text()

    def wait_for_output(self, process: subprocess.Popen[str], text: str, count: int = 1) -> None:
        """Wait until a command from `start` has printed a text so often."""
        wait_until(lambda: self.output_of(process)[0].count(text) >= count, TEST_TIMEOUT, text)

    def _output(self, number: int, stream: str) -> Path:
        return self.directory.parent / f"command{number}.{stream}"

    def run(
        self, text: str, *options: str, args: tuple[str, ...] = (), code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        return self("run", *self.target, *options, self.script(text), *args, code=code)

    def submit(
        self, text: str, *options: str, args: tuple[str, ...] = (), until: Iterable[str] = ()
    ) -> str:
        """Submit a script; return the job id when workers have created the files ``until``."""
        job_id = self("submit", *self.target, *options, self.script(text), *args).stdout.strip()
        self.wait_for(*until)
        return job_id

    # -- jobs --------------------------------------------------------------------------------------

    def jobs(self, *ids: str) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = json.loads(
            self(*(("status", "--json", *ids) if ids else ("list", "--json"))).stdout
        )["jobs"]
        return jobs

    def job(self, job_id: str) -> dict[str, Any]:
        [job] = self.jobs(job_id)
        return job

    def only_job(self) -> dict[str, Any]:
        """Return the only job in the list; fail the test if there are several."""
        [job] = self.jobs()
        return job

    def wait_for(self, *names: str, timeout: float = TEST_TIMEOUT) -> None:
        """Wait until workers have created these files."""
        wait_until(
            lambda: all((self.meeting / name).exists() for name in names),
            timeout,
            f"the files {names}",
        )

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
) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a user of a place, such as a cluster.

    The test fails if the user leaves commands running.
    """
    made: list[Any] = []

    def make(place: Any, kind: Callable[..., Any]) -> Any:
        directory = new_folder(tmp_path / "work")
        made.append(kind(place, directory, monkeypatch, preloaded_commands))
        return made[0]

    yield make
    still = [process for user in made for process in user.running if process.poll() is None]
    for process in still:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
    assert not still, f"commands that the test left running: {[process.args for process in still]}"


@pytest.fixture
def local_user(plain_python: str, new_user: Callable[..., Any]) -> Iterator[CommandUser]:
    """Return a user whose jobs run on this machine; fail the test if a process outlives it."""
    yield new_user(None, lambda _place, *more: CommandUser(*more))
    try:
        wait_for_no_processes(END_TIMEOUT)
    finally:
        kill_all(own_processes())
