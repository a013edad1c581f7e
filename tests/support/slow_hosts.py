"""Five hosts in network namespaces, one of them with a slow network or little CPU time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from namespaces import Machine
from namespaces import skip_reason as namespaces_skip_reason
from procs import Job, missing_programs

HOSTS = 5
SLOW = 3  # the index of the slow host
WAYS = ("clean", "network", "cpu")
_CPU = Path("/sys/fs/cgroup/cpu")
_CPU_SHARE = 0.1  # of one core
_TIMEOUT = 300.0  # seconds; a run needs much less
# netem is not in every kernel; tbf limits the rate as well.
_QDISCS = ("netem rate 200mbit delay 2ms", "tbf rate 200mbit burst 128kb latency 200ms")


def skip_reason() -> str:
    """Return why slow hosts cannot be simulated here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces and cgroups need root"
    if why := missing_programs("tc"):
        return why
    if not (_CPU / "cpu.cfs_quota_us").exists() and _version_2() is None:
        return "no CPU controller of cgroups is mounted"
    return namespaces_skip_reason()


def preflight(
    hosts: list[Machine],
    directory: Path,
    *arguments: str,
    group: Path | None = None,
    slow: int = SLOW,
) -> Job:
    """Run a job of nothing but the preflight on the hosts; the slow one in a cgroup.

    Args:
        hosts: the machines.
        directory: an empty directory.
        arguments: options of `clusterjob launch`.
        group: the cgroup of the slow host; None if its CPU is not slow.
        slow: the index of that host.
    """
    job = Job(directory, len(hosts))
    for node, machine in enumerate(hosts):
        enter = ["sh", "-ec", 'hostname "$1"; shift; exec "$@"', "sh", f"gpu{node}"]
        command = machine.command("unshare", "--uts", *enter, sys.executable)
        if group is not None and node == slow:
            procs = group / "cgroup.procs"
            command = ["sh", "-ec", f'echo $$ > {procs}; exec "$@"', "sh", *command]
        job.start(
            node, *arguments, "--", "true",
            python=tuple(command), env={"CLUSTERJOB_MASTER_ADDR": hosts[0].address},
        )  # fmt: skip
    return job


@contextlib.contextmanager
def slow_network(machine: Machine) -> Iterator[None]:
    """Limit what a machine sends to 25 MB/s; as its answers are late, it also receives slowly."""
    for qdisc in _QDISCS:
        words = machine.command("tc", "qdisc", "add", "dev", "eth0", "root", *qdisc.split())
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        words = machine.command("tc", "qdisc", "del", "dev", "eth0", "root")
        subprocess.run(words, capture_output=True, check=True)


@contextlib.contextmanager
def slow_cpu() -> Iterator[Path]:
    """Yield a cgroup whose processes get a small part of one core."""
    name = f"cj{uuid.uuid4().hex[:8]}"
    version_2 = _version_2()
    group = (version_2 or _CPU) / name
    group.mkdir()
    try:
        if version_2 is not None:
            (group / "cpu.max").write_text(f"{int(100_000 * _CPU_SHARE)} 100000")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * _CPU_SHARE)))
        yield group
    finally:
        deadline = time.monotonic() + 5
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        group.rmdir()


def _version_2() -> Path | None:
    """Return where cgroups of version 2 with a CPU controller can be made."""
    top = Path("/sys/fs/cgroup")
    try:
        controllers = (top / "cgroup.subtree_control").read_text().split()
    except OSError:
        return None
    return top if "cpu" in controllers else None


def run(hosts: list[Machine], directory: Path, way: str) -> dict[str, Any]:
    """Run a preflight in one of `WAYS`; return its event."""
    with contextlib.ExitStack() as stack:
        group = None
        if way == "network":
            stack.enter_context(slow_network(hosts[SLOW]))
        elif way == "cpu":
            group = stack.enter_context(slow_cpu())
        job = preflight(hosts, directory, "--preflight=warn", group=group)
        try:
            assert job.wait(_TIMEOUT) == [0] * len(hosts), job.result
        finally:
            for agent in job.agents:
                agent.kill()
                agent.wait()
        [event] = job.events("preflight")
        return event
