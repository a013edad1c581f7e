"""Real hosts for tests: network namespaces, each with an address, a host name and an sshd.

    client (10.77.0.100) --- gpu1 gpu2 gpu3 ... (10.77.0.1, .2, .3) --- bastion (10.77.0.50)
                                                                           |
                                                  inner1 inner2 (10.78.0.1, .2), reached only
                                                  through the bastion

No traffic leaves the namespaces. Their names contain the pid of the test run, so two runs do not
collide. A run removes the namespaces of earlier runs that were killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import namespaces
import pytest
from launching import executable
from procs import (
    MARKER,
    PATH,
    alive,
    checked_output,
    command_line,
    missing_programs,
    wait_until,
)

_CLONE_NEWNET = 0x40000000
_NETNS = Path("/run/netns")


def start_sshd(directory: Path, settings: Mapping[str, str], run: Callable[..., object]) -> int:
    """Start an sshd and return its pid.

    Args:
        directory: where its host key is, and its configuration, pid file and log will be.
        settings: lines of its configuration; an empty value removes one.
        run: runs a command on the host.
    """
    pid_file = directory / "sshd.pid"
    lines = {
        "HostKey": str(directory / "host_key"), "PidFile": str(pid_file), "UsePAM": "no",
        "StrictModes": "no", "PermitRootLogin": "yes", "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no", "PrintMotd": "no", "LogLevel": "VERBOSE",
        "UseDNS": "no",
    } | dict(settings)  # fmt: skip
    text = "".join(f"{key} {value}\n" for key, value in lines.items() if value)
    (directory / "sshd_config").write_text(text)
    pid_file.unlink(missing_ok=True)
    server = shutil.which("sshd", path=PATH) or "sshd"  # sshd requires an absolute path
    run(server, "-f", directory / "sshd_config", "-E", directory / "sshd.log")
    wait_until(
        lambda: pid_file.exists() and pid_file.read_text().strip(), 10, f"the sshd of {directory}"
    )
    return int(pid_file.read_text())


def logins(directory: Path) -> int:
    """Return how many logins the sshd of a directory has accepted."""
    log = directory / "sshd.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return len(re.findall(r"Accepted \S+ for ", text))


def skip_reason() -> str:
    """Return why the hosts cannot be created on this machine; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    return missing_programs("sshd", "ip", "ssh-keygen", "unshare", "nsenter")


@dataclass
class SshHost:
    """One host: its namespace and its sshd."""

    ssh_network: SshNetwork
    name: str
    address: str
    port: int = 22
    sshd: int = 0
    mounts: dict[str, Path] = field(default_factory=dict)
    """Files of the host that replace files of this machine, such as /etc/shadow."""

    @property
    def directory(self) -> Path:
        return self.ssh_network.directory / self.name

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def namespace(self) -> str:
        return f"{self.ssh_network.prefix}{self.name}"

    @property
    def public_key(self) -> str:
        """The host key: type and base64."""
        return " ".join((self.directory / "host_key.pub").read_text().split()[:2])

    @property
    def logins(self) -> int:
        """The number of logins so far."""
        return logins(self.directory)

    @property
    def fingerprint(self) -> str:
        return checked_output("ssh-keygen", "-lf", self.directory / "host_key.pub").split()[1]

    def start(self, **options: str) -> None:
        """Start the sshd; options replace lines of its configuration."""
        settings = {
            "ListenAddress": "0.0.0.0", "Port": str(self.port), "AcceptEnv": "none",
            "AuthorizedKeysFile": str(self.ssh_network.directory / "authorized_keys"),
            "SetEnv": f"HOME={self.home}",
        } | options  # fmt: skip
        mounts = "".join(f"mount --bind '{file}' '{at}'; " for at, file in self.mounts.items())
        enter = f'{mounts}hostname "$1"; shift; exec "$@"'
        with_hostname = ("unshare", "--uts", "--mount", "sh", "-ec", enter, "sh", self.name)
        self.sshd = start_sshd(
            self.directory, settings, lambda *argv: self.run(*with_hostname, *argv)
        )

    def run(self, *argv: object) -> str:
        """Run a command in the host's network namespace."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if name != MARKER and not name.startswith("CLUSTERJOB")
        }
        return checked_output("nsenter", f"--net={_NETNS / self.namespace}", *argv, env=clean)

    def stop(self) -> None:
        """Stop the listening sshd; its sessions continue, as with `systemctl restart ssh`."""
        if self.sshd:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.sshd, signal.SIGTERM)
            pid = self.sshd
            wait_until(lambda: not alive(pid), 10, "the end of sshd")
            self.sshd = 0

    def pids(self) -> list[int]:
        """Return all processes of the host except the listening sshd."""
        text = (
            checked_output("ip", "netns", "pids", self.namespace)
            if (_NETNS / self.namespace).exists()
            else ""
        )
        return [
            int(word)
            for word in text.split()
            if int(word) not in (self.sshd, os.getpid()) and alive(int(word))
        ]

    def restart(self, **options: str) -> None:
        """Start the sshd anew, with other options."""
        self.stop()
        self.start(**options)

    def link(self, state: str) -> None:
        """Set the host's network interface "down" or "up"."""
        self.run("ip", "link", "set", "eth0", state)


class SshNetwork:
    """All hosts, and the ssh configuration and keys of a client."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.prefix = f"cjt{os.getpid()}-"
        self.hosts: dict[str, SshHost] = {}
        self.config = directory / "ssh_config"
        self.known_hosts = directory / "known_hosts"
        self.key = directory / "id_ed25519"

    def build(self, *, gpus: int = 3, inner: int = 2) -> None:
        self.remove_stale()
        Path("/run/sshd").mkdir(exist_ok=True)
        checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.key)
        shutil.copy(f"{self.key}.pub", self.directory / "authorized_keys")
        for network in ("outer", "inner"):
            namespaces.add_switch(f"{self.prefix}{network}")
        self._join("client", "outer", "10.77.0.100")
        for number in range(1, gpus + 1):
            self._add(f"gpu{number}", "outer", f"10.77.0.{number}")
        self._add("bastion", "outer", "10.77.0.50")
        self._wire("bastion", "inner", "10.78.0.50", "eth1")
        for number in range(1, inner + 1):
            self._add(f"inner{number}", "inner", f"10.78.0.{number}")
        self.reset()
        for host in self.hosts.values():
            host.start()

    def reset(self) -> None:
        """Write the client's initial ssh configuration and known_hosts with all host keys."""
        self.known_hosts.write_text(
            "".join(f"{host.address} {host.public_key}\n" for host in self.hosts.values())
        )
        self.write_config()

    def write_config(self, more: str = "", **options: str) -> None:
        """Write the client's ssh configuration; the lines of `more` take precedence."""
        common = {
            "User": "root",
            "IdentityFile": self.key,
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": self.known_hosts,
            "GlobalKnownHostsFile": "/dev/null",
        } | options
        text = more + "\n"
        for host in self.hosts.values():
            jump = "  ProxyJump bastion\n" if host.name.startswith("inner") else ""
            text += f"Host {host.name}\n  HostName {host.address}\n  Port {host.port}\n{jump}"
        text += "Host *\n" + "".join(f"  {key} {value}\n" for key, value in common.items())
        self.config.write_text(text)

    def _add(self, name: str, network: str, address: str) -> None:
        host = SshHost(self, name, address)
        host.home.mkdir(parents=True)
        key = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name)
        checked_output(*key, "-f", host.directory / "host_key")
        self._join(name, network, address)
        self.hosts[name] = host

    def _join(self, name: str, network: str, address: str) -> None:
        namespaces.add_host(f"{self.prefix}{name}")
        self._wire(name, network, address, "eth0")

    def _wire(self, name: str, network: str, address: str, interface: str) -> None:
        switch, host = f"{self.prefix}{network}", f"{self.prefix}{name}"
        namespaces.wire(switch, f"p{name}", host, interface, f"{address}/24")

    def add(self, name: str, address: str, **options: str) -> SshHost:
        """Add a host to the outer network and to known_hosts, and start its sshd."""
        self._add(name, "outer", address)
        self.reset()
        self.hosts[name].start(**options)
        return self.hosts[name]

    @contextlib.contextmanager
    def client(self) -> Iterator[None]:
        """Move this thread and its child processes into the client's network namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net") as own,
            open(_NETNS / f"{self.prefix}client") as clients,
        ):
            assert libc.setns(clients.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(own.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())

    def left(self) -> dict[int, list[str]]:
        """Return pid and command line of the processes on all hosts, except their sshds."""
        return {
            pid: command_line(pid)
            for host in self.hosts.values()
            for pid in host.pids()
            if command_line(pid)
        }

    def clean(self) -> dict[int, list[str]]:
        """Wait up to 5 s for the end of all processes on the hosts; kill and return the rest."""
        end = time.monotonic() + 5
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def close(self) -> None:
        for host in self.hosts.values():
            host.stop()
        self.clean()
        _remove_namespaces(self.prefix)

    @staticmethod
    def remove_stale() -> None:
        """Remove the namespaces of test runs that no longer exist."""
        for path in _NETNS.glob("cjt*-*") if _NETNS.is_dir() else []:
            match = re.match(r"cjt(\d+)-", path.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                for pid in checked_output("ip", "netns", "pids", path.name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                checked_output("ip", "netns", "del", path.name)


def _remove_namespaces(prefix: str) -> None:
    for path in _NETNS.glob(f"{prefix}*"):
        checked_output("ip", "netns", "del", path.name)


@contextlib.contextmanager
def ssh_network_in(directory: Path, *, gpus: int = 3, inner: int = 2) -> Iterator[SshNetwork]:
    ssh_network = SshNetwork(directory)
    try:
        ssh_network.build(gpus=gpus, inner=inner)
        yield ssh_network
    finally:
        ssh_network.close()


def require_ssh_network() -> None:
    if why := skip_reason():
        pytest.skip(why)


def python_without_torch(directory: Path) -> Path:
    """Write a Python interpreter that starts fast because it sees no installed packages."""
    return executable(directory / "plain-python", f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
