"""Simulated machines: network namespaces connected by a bridge, like hosts by a switch."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from procs import checked_output, missing_programs


@dataclass(frozen=True)
class Machine:
    """One network namespace.

    Attributes:
        name: the namespace's name, unique on this machine.
        address: its IPv4 address on the common network.
        address6: its IPv6 address on that network.
    """

    name: str
    address: str
    address6: str

    def command(self, *argv: object) -> list[str]:
        """Return a command that runs ``argv`` in the namespace."""
        return ["ip", "netns", "exec", self.name, *map(str, argv)]


def skip_reason() -> str:
    """Return why network namespaces cannot be created here; empty if they can."""
    if why := missing_programs("ip"):
        return why
    name = f"cj{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    _ip(f"netns del {name}")
    return ""


def add_switch(name: str) -> None:
    """Make a namespace with a bridge."""
    _ip(f"netns add {name}")
    _ip(f"-n {name} link add br0 type bridge")
    _ip(f"-n {name} link set br0 up")


def add_host(name: str) -> None:
    _ip(f"netns add {name}")
    _ip(f"-n {name} link set lo up")


def wire(switch: str, port: str, host: str, interface: str, *addresses: str) -> None:
    """Connect a host with a switch; the interface of the host gets the addresses."""
    _ip(f"-n {switch} link add {port} type veth peer name {interface} netns {host}")
    _ip(f"-n {switch} link set {port} master br0 up")
    for address in addresses:
        duplicates = " nodad" if ":" in address else ""
        _ip(f"-n {host} address add {address} dev {interface}{duplicates}")
    _ip(f"-n {host} link set {interface} up")


@contextlib.contextmanager
def machines(count: int, interface: str = "eth0") -> Iterator[list[Machine]]:
    """Create machines; remove them and their interfaces at the end."""
    run = f"cj{os.getpid() % 100000:05d}{secrets.token_hex(2)}"
    made = [
        Machine(f"{run}n{index}", f"10.77.0.{index + 1}", f"fd77::{index + 1}")
        for index in range(count)
    ]
    switch = f"{run}s"
    try:
        add_switch(switch)
        for index, machine in enumerate(made):
            add_host(machine.name)
            addresses = (f"{machine.address}/24", f"{machine.address6}/64")
            wire(switch, f"p{index}", machine.name, interface, *addresses)
        yield made
    finally:
        for name in (switch, *(machine.name for machine in made)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(arguments: str) -> None:
    checked_output("ip", *arguments.split())
