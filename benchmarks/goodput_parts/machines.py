"""Machines of a run: network namespaces, each with one launcher and what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from namespaces import Machine

from clusterjob.node import job_processes
from clusterjob.node.system import processes


class Node:
    """One machine.

    Args:
        number: the machine's number, which is its node rank.
        machine: its network namespace.
        output: the file for the output of its launcher.

    Attributes:
        launcher: the process that starts this machine's worker; None before the first.
    """

    def __init__(self, number: int, machine: Machine, output: Path) -> None:
        self.number = number
        self.machine = machine
        self.launcher: subprocess.Popen[bytes] | None = None
        self._output = output

    def start(self, argv: list[str], environ: Mapping[str, str], directory: Path) -> None:
        """Start a launcher, after everything that an earlier one left behind has been killed."""
        self.clear()
        with self._output.open("ab") as stream:
            self.launcher = subprocess.Popen(
                self.machine.command(*argv),
                env=dict(environ),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    @property
    def running(self) -> bool:
        """Whether the launcher runs."""
        return self.launcher is not None and self.launcher.poll() is None

    def pids(self) -> list[int]:
        """Return the processes of this machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.machine.name], capture_output=True, text=True, check=False
        )
        return [int(word) for word in listed.stdout.split()]

    def workers(self) -> list[int]:
        """Return the ranks: those of a forkserver of clusterjob, or those with a rank's variables.

        A forked rank has the variables of its forkserver in /proc.
        """
        pids = self.pids()
        forked = {rank.pid for pid in pids for rank in job_processes.of_forkserver(pid).ranks}
        return [pid for pid in pids if pid in forked or has_rank(pid)]

    def clear(self) -> None:
        """Kill what runs on this machine, as the init process does after a service has ended."""
        for pid in self.pids():
            send(pid, signal.SIGKILL)
        if self.launcher is not None:
            self.launcher.wait()

    def connect(self, *, up: bool) -> None:
        """Switch the network interface."""
        state = "up" if up else "down"
        subprocess.run(["ip", "-n", self.machine.name, "link", "set", "eth0", state], check=True)


def has_rank(pid: int) -> bool:
    """Return whether a process was started with the variables of a rank, as torchrun does."""
    return "LOCAL_RANK" in processes.environment_of(pid)


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
