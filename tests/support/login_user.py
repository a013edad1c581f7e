"""A user with a laptop and an account on a cluster's login host.

The login host is a real sshd on the loopback interface. Only its sessions have SLURM_CONF set.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import free_port, new_folder
from procs import MARKER, alive, below, checked_output, command_line, missing_programs, wait_until
from slurm_cluster import SlurmCluster
from slurm_user import User
from ssh_network import logins, start_sshd

# Creates the file up<RANK> in $MEET, which is outside of the job's directory, then waits for the
# file `leave` there.
GUEST = """
    import os, pathlib, time
    meet = pathlib.Path(os.environ["MEET"])
    print("line of", os.environ["RANK"], flush=True)
    (meet / f"up{os.environ['RANK']}").touch()
    while not (meet / "leave").exists():
        time.sleep(0.02)
    print("left", os.environ["RANK"], flush=True)
"""


class LoginHost:
    """The login host: an sshd, and the home directory of its user."""

    def __init__(self, directory: Path, slurm: SlurmCluster) -> None:
        self.directory = directory
        self.home = new_folder(directory / "home")
        self.port = free_port()
        self.environment = {
            "HOME": str(self.home),
            "SLURM_CONF": str(slurm.conf),
            MARKER: os.environ[MARKER],
        }
        self.config = directory / "ssh_config"
        self.known_hosts = directory / "known_hosts"
        self.log = directory / "sshd.log"
        self._pid = 0
        checked_output(
            "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "id_ed25519"
        )
        checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "host_key")
        shutil.copy(directory / "id_ed25519.pub", directory / "authorized_keys")
        self.trust()
        self.config.write_text(
            f"Host login1\n  HostName 127.0.0.1\n  Port {self.port}\n"
            f"  IdentityFile {directory}/id_ed25519\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n  UserKnownHostsFile {self.known_hosts}\n"
            "  GlobalKnownHostsFile /dev/null\n"
        )

    def trust(self) -> None:
        """Write the host's key to the client's known_hosts."""
        self.known_hosts.write_text(
            f"[127.0.0.1]:{self.port} "
            f"{' '.join((self.directory / 'host_key.pub').read_text().split()[:2])}\n"
        )

    def start(self) -> None:
        """Start the sshd."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        settings = {
            "ListenAddress": "127.0.0.1", "Port": str(self.port),
            "AuthorizedKeysFile": str(self.directory / "authorized_keys"),
            "SetEnv": " ".join(f'"{name}={value}"' for name, value in self.environment.items()),
        }  # fmt: skip
        clean = {
            name: value
            for name, value in os.environ.items()
            if name != MARKER and not name.startswith(("CLUSTERJOB", "SLURM"))
        }

        def run(*argv: object) -> None:
            command = [str(word) for word in argv]
            subprocess.run(command, check=True, env=clean, stdin=subprocess.DEVNULL, timeout=20)

        self._pid = start_sshd(self.directory, settings, run)

    def stop(self, *, close_connections: bool = False) -> None:
        """Stop the listening sshd; its sessions continue.

        With ``close_connections``, end the sessions too, like a restart of the host.
        """
        pid, self._pid = self._pid, 0
        sessions = (
            [child for child in below(pid) if command_line(child).startswith("sshd")]
            if pid and close_connections
            else []
        )
        for one in (pid, *sessions) if pid else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGTERM)
            wait_until(lambda one=one: not alive(one), 10, "the end of sshd")

    @property
    def connections(self) -> int:
        """The number of logins so far."""
        return logins(self.directory)


class Laptop(User):
    """A user whose machine has no SLURM_CONF; clusterjob reaches Slurm through the login host."""

    cluster = "hpc"

    def __init__(self, slurm: SlurmCluster, directory: Path, *more: Any) -> None:
        super().__init__(slurm, directory, *more)
        self.login = LoginHost(directory.parent / "login", slurm)
        self.meeting = new_folder(directory.parent / "meet")
        self.patch.delenv("SLURM_CONF")
        self.profile()
        self.login.start()

    def profile(self, **options: str) -> None:
        """Write the profile `hpc` to the user's configuration file, which needs no trust."""
        given = {"ssh_config": str(self.login.config), "connect_timeout": "5", **options}
        pairs = "".join(f'"{key}" = {json.dumps(value)}\n' for key, value in given.items())
        meet = f"env = {{ MEET = {json.dumps(str(self.meeting))} }}\n"
        common = f'backend = "slurm"\nlogin = "login1"\n{meet}'
        own = Path(os.environ["XDG_CONFIG_HOME"]) / "clusterjob" / "config.toml"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"[clusters.hpc]\n{common}[clusters.hpc.set]\n{pairs}")

    def leave(self) -> None:
        """Create the file `leave`, which ends the workers of `GUEST`."""
        (self.meeting / "leave").touch()

    def there(self, job_id: str) -> Path:
        """Return a job's directory on the cluster."""
        whole, _, index = job_id.partition("_")
        return (
            self.login.home
            / ".clusterjob"
            / "jobs"
            / whole
            / (f"elements/{index}" if index else "")
        )

    def remaining_remote_jobs(self) -> list[Path]:
        jobs = self.login.home / ".clusterjob" / "jobs"
        return list(jobs.iterdir()) if jobs.is_dir() else []

    def logs(self) -> str:
        found = sorted([*self.login.home.rglob("slurm*.out"), *self.login.home.rglob("agent.log")])
        return (
            "\n".join(f"-- {path}:\n{path.read_text(errors='replace')[-2000:]}" for path in found)
            + self.login.log.read_text()[-3000:]
        )


@pytest.fixture
def laptop(slurm: SlurmCluster, new_user: Callable[..., User]) -> Iterator[User]:
    """Return a user with a laptop and a cluster without accounting."""
    if why := missing_programs("sshd", "ssh-keygen"):
        pytest.skip(why)
    made = new_user(slurm, Laptop)
    yield made
    made.login.stop(close_connections=True)
