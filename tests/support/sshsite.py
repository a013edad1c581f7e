"""Submit jobs from a directory to the hosts of an SSH network, and check them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from launching import new_folder
from procs import checked_output, wait_until
from ssh_network import SshHost, SshNetwork, python_without_torch

from clusterjob.backends import base
from clusterjob.core import job_settings, jobs, polling
from clusterjob.core.config import Settings
from clusterjob.core.hosts import parse_hosts
from clusterjob.core.plans import Plan
from clusterjob.core.records import Record, Records
from clusterjob.errors import HostError, SubmitError
from clusterjob.node.logs.log_files import LogLine
from clusterjob.node.program import Program
from clusterjob.remote.pool import Pool
from clusterjob.remote.transport import Connection, ConnectOptions

TEST_TIMEOUT = 90.0  # seconds; all of these jobs need much less

# Prints a line with its rank, then sleeps.
SLEEPER = """
    import os, time
    print("up", os.environ["RANK"], flush=True)
    time.sleep(1000)
"""


class Site:
    """The directory from which jobs are submitted, and the hosts."""

    def __init__(self, ssh_network: SshNetwork, directory: Path) -> None:
        self.ssh_network = ssh_network
        self.directory = directory
        self.python = str(python_without_torch(directory.parent))

    def path(self, name: str) -> Path:
        return self.directory / name

    def script(self, text: str, name: str = "script.py") -> str:
        self.path(name).write_text(textwrap.dedent(text))
        return name

    def flags(self, **flags: Any) -> dict[str, Any]:
        options = {
            "ssh_config": str(self.ssh_network.config),
            "connect_timeout": "20",
            "need_torch": "false",
            **flags.pop("set", {}),
        }
        given = {
            "hosts": "gpu[1-2]",
            "python": self.python,
            "set": [f"{key}={value}" for key, value in options.items()],
            **flags,
        }
        return {key: value for key, value in given.items() if value is not None}

    def plan(self, program: Program, **flags: Any) -> Plan:
        settings: Settings = job_settings.resolve(
            self.flags(**flags), None, directory=self.directory
        )
        assert settings.backend == "ssh"
        return jobs.plan(
            job_settings.make_spec(program, settings, directory=self.directory), settings
        )

    def submit(self, text: str, *args: str, until: Sequence[str] = (), **flags: Any) -> Record:
        """Submit a script; return the record when its output has the lines ``until``."""
        plan = self.plan(Program("script", self.script(text), args=args), **flags)
        record = jobs.submit(plan, "ssh", detach=True)
        if until:
            wait_for_lines(record, *until)
        return record

    def refused(self, **flags: Any) -> SubmitError:
        """Submit a job that cannot start; fail if files, records or processes remain."""
        with pytest.raises(SubmitError) as caught:
            self.submit(SLEEPER, **flags)
        assert caught.value.exit_code == 1
        assert not Records().all()
        assert not self.running(), "nothing keeps running on the others"
        for host in self.ssh_network.hosts.values():
            jobs_dir = host.home / ".clusterjob" / "jobs"
            assert not jobs_dir.is_dir() or not list(jobs_dir.iterdir())
        return caught.value

    def command(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "clusterjob", *words]
        return subprocess.Popen(
            argv,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def run(self, *words: str, code: int | None = None) -> tuple[int, str, str]:
        """Run a command to its end; return its exit code, which may be given, stdout and stderr."""
        done = subprocess.run(
            [sys.executable, "-m", "clusterjob", *words], cwd=self.directory, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=TEST_TIMEOUT, check=False,
        )  # fmt: skip
        assert code in (None, done.returncode), done.stderr
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    def options(self, **flags: Any) -> list[str]:
        arguments: list[str] = []
        for key, value in self.flags(**flags).items():
            for item in value if isinstance(value, list) else [value]:
                arguments += [f"--{key.replace('_', '-')}", str(item)]
        return arguments

    def running(self) -> list[int]:
        """Return the processes of jobs on all hosts."""
        return [pid for host in self.ssh_network.hosts.values() for pid in workers_on(host)]

    def remote_dir(self, record: Record, host: str) -> Path:
        return self.ssh_network.hosts[host].home / ".clusterjob" / "jobs" / record.job_id


@pytest.fixture
def site(ssh_network: SshNetwork, tmp_path: Path) -> Iterator[Site]:
    directory = new_folder(tmp_path / "work")
    for host in ssh_network.hosts.values():
        subprocess.run(["rm", "-rf", host.home / ".clusterjob"], check=True)
    yield Site(ssh_network, directory)
    close_connections()


# -- connections without a job ---------------------------------------------------------------------


@pytest.fixture
def warnings() -> list[str]:
    """The lines that connections of `pool` show to the user."""
    return []


@pytest.fixture
def pool(ssh_network: SshNetwork, warnings: list[str]) -> Iterator[Pool]:
    pool = Pool(ConnectOptions(10.0, warnings.append, ssh_config=ssh_network.config))
    yield pool
    pool.close()


def run(connection: Connection, command: str) -> tuple[int, bytes, bytes]:
    """Run a command to its end; return its exit code, stdout and stderr."""
    channel = connection.execute(command)
    channel.shutdown_write()
    out = b"".join(iter(lambda: channel.recv(1 << 16), b""))
    code = channel.wait_for_exit()
    err = channel.read_stderr()
    channel.close()
    return code, out, err


def hostname(pool: Pool, text: str) -> str:
    code, out, err = run(pool.connection(parse_hosts(text)[0]), "hostname")
    assert code == 0, err
    return out.decode().strip()


def refusal(pool: Pool, text: str) -> HostError:
    """Return the error of a host that cannot be reached: one line that names it."""
    with pytest.raises(HostError) as caught:
        pool.connection(parse_hosts(text)[0])
    assert "\n" not in caught.value.message
    assert caught.value.message.startswith(f"{text}: ")
    return caught.value


def close_connections() -> None:
    """Close all connections to hosts, so that the next command opens new ones."""
    backend: Any = base._loaded.pop("ssh", None)
    if backend is not None:
        backend.close()


def output_lines(record: Record) -> list[str]:
    shown: list[LogLine] = []
    verdict = polling.follow(
        record, lambda batches: shown.extend(chain.from_iterable(batches)), progress=lambda _: None
    )
    assert verdict.state.final
    return [f"{line.rank} {line.stream} {line.text}" for line in shown]


def wait_for_lines(record: Record, *wanted: str) -> None:
    """Wait until the workers' stdout contains these texts."""

    def lines_exist() -> bool:
        polling.status(record)
        polling.collect(record)
        text = "\n".join(path.read_text() for path in (record.job_dir / "logs").rglob("rank*.out"))
        return all(line in text for line in wanted)

    wait_until(lines_exist, TEST_TIMEOUT, f"the lines {wanted}")


def workers_on(host: SshHost) -> list[int]:
    """Return the processes of jobs on a host, agents included."""
    found = []
    for pid in host.pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"clusterjob-node.pyz" in command or b"script.py" in command:
            found.append(pid)
    return found


@pytest.fixture
def full_disk(site: Site) -> Iterator[SshHost]:
    """Yield a host whose home directory is a file system of 8 MB."""
    host = site.ssh_network.hosts["gpu2"]
    checked_output("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", host.home)
    host.stop()
    host.start()  # in a new mount namespace, which contains the small file system
    yield host
    close_connections()
    host.stop()
    checked_output("umount", host.home)
    host.start()
