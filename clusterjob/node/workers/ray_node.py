"""Run one node of a Ray cluster (``--launcher ray``), and the program on node 0.

The agents start this module as the only worker of each node. It starts Ray, whose processes the
kernel kills when this process ends. On node 0, Ray's head is at the job's master address and port;
when all nodes have joined, the process becomes the program, with RAY_ADDRESS. The other nodes end
when the head does not answer any more.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import hmac
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, files, network, processes

_POLL = 0.1  # seconds between two looks at the processes
_LOST = 3  # attempts to connect in a row that fail after which the head is gone
_CONNECT_TIMEOUT = 5.0
_MAX_TEMPORARY = 16  # characters: the paths of Ray's sockets have at most 107
_HANGS = 60  # seconds after which Ray's own client, which may hang, is killed
_WITH_TOKENS = (2, 52)  # first version with tokens: docs.ray.io/en/latest/ray-security


def node_options(options: LaunchOptions) -> LaunchOptions:
    """Return the options of a node whose one worker is this module.

    The caller is the agent, which removes Ray's files at its end: it outlives all workers.
    """
    usual = tempfile.gettempdir()
    parent = usual if len(usual) <= _MAX_TEMPORARY else "/tmp"  # noqa: S108 - mkdtemp is private
    directory, owner = tempfile.mkdtemp(prefix="ray-", dir=parent), os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == owner:  # a forked process inherits this handler
            shutil.rmtree(directory, ignore_errors=True)

    cpus = (options.cpus_per_task or 0) * (options.nproc_per_node or 1)
    settings = (directory, f"{options.join_timeout:g}", str(cpus))
    own = (*settings, *options.program.argv(sys.executable))
    return replace(
        options, program=Program("module", __name__, args=own), nproc_per_node=1, start="exec"
    )


def main() -> None:
    """Run this node; on node 0, become the program."""
    directory, timeout, cpus, *program = sys.argv[1:]
    try:
        _run(Path(directory), float(timeout), cpus=int(cpus), program=program)
    except ClusterJobError as error:
        sys.exit(f"clusterjob: {error.message}")


def _run(directory: Path, timeout: float, cpus: int, program: list[str]) -> None:
    """Run this node until the head has ended; on node 0, become the program.

    Raises:
        ClusterJobError: Ray cannot run here, or has ended.
    """
    rank, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    _check_version(count)
    name, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        host = network.addresses_of(name)[0]  # Ray needs an IP address
    except OSError as error:
        raise ClusterJobError(f"{name} cannot be resolved: {error.strerror}") from error
    address = network.with_port(host, port)
    log = node_directory(Path(os.environ[contract.JOB_DIR]), rank) / "ray.log"
    _change_environment(directory / "token")
    deadline = time.monotonic() + timeout
    if rank == 0:
        # Ray's client server cannot be left out, and its default port may be taken.
        with socket.socket() as free:
            free.bind(("", 0))
            client_port = free.getsockname()[1]
        role = [
            "--head", f"--port={port}", f"--node-ip-address={host}",
            "--include-dashboard=false", f"--ray-client-server-port={client_port}",
        ]  # fmt: skip
    else:
        _wait_for_head(host, port, deadline)
        own = network.address_towards(host) or host
        role = [f"--address={address}", f"--node-ip-address={own}"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role,
        "--disable-usage-stats", "--log-color=false", f"--temp-dir={directory}",
        f"--num-cpus={cpus or devices.usable_cores()}",
        f"--num-gpus={devices.visible_gpus(os.environ)}",
        f'--resources={{"clusterjob_node{rank}": 1}}',
    ]  # fmt: skip
    with log.open("ab") as stream:
        ray = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # Its daemons ask for the same: `ray start --block`, ray/_private/services.py.
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509
        )

    def check() -> None:
        if ray.poll() is not None:
            text = " ".join(last_lines(log, 20, 1 << 14))[-1000:]
            raise ClusterJobError(f"Ray ended with {ray.returncode} on node {rank}: {text}")

    if rank == 0:
        _wait_for_head(host, port, deadline, check)
        os.environ["RAY_ADDRESS"] = address
        _wait_for_nodes(count, deadline, check)
        os.execvp(program[0], program)
    refused = 0
    while refused < _LOST:
        time.sleep(_POLL)
        # A timeout is a slow network; the agents notice a lost node.
        refused = 0 if _answers(host, port, late=True) else refused + 1
        if not refused:
            check()


def _change_environment(token: Path) -> None:
    """Make the environment that of Ray and of the program, which have no rank.

    Args:
        token: the file for Ray's token.
    """
    for name in (
        *contract.LAUNCH_VARIABLES, contract.STORE, contract.WARNING_FD, contract.REPORT_FD,
        "RAY_ADDRESS",
    ):  # fmt: skip
        os.environ.pop(name, None)
    key = os.environ.pop(contract.STORE_KEY)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_AUTH_MODE"):
        text = hmac.new(key.encode(), b"ray", hashlib.sha256).hexdigest()
        files.write_atomic(token, text.encode())
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))


def _answers(host: str, port: int, *, late: bool = False) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except TimeoutError:
        return late
    except OSError:
        return False
    return True


def _wait_for_head(
    host: str, port: int, deadline: float, check: Callable[[], None] = lambda: None
) -> None:
    while not _answers(host, port):
        check()
        if time.monotonic() > deadline:
            raise ClusterJobError(f"Ray's head at {network.with_port(host, port)} does not answer")
        time.sleep(_POLL)


def _wait_for_nodes(count: int, deadline: float, check: Callable[[], None]) -> None:
    """Wait until each node has joined, which offers its rank as a resource.

    Raises:
        ClusterJobError: a node has not joined in time, or Ray has ended.
    """
    signal.alarm(int(max(0.0, deadline - time.monotonic())) + _HANGS)
    ray: Any = importlib.import_module("ray")
    ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
    while True:
        joined = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
        left = [str(node) for node in range(count) if f"clusterjob_node{node}" not in joined]
        if not left:
            break
        check()
        if time.monotonic() > deadline:
            raise ClusterJobError(f"node {', '.join(left)} has not joined the Ray cluster in time")
        time.sleep(_POLL)
    ray.shutdown()
    signal.alarm(0)


def _check_version(nodes: int) -> None:
    """Check that Ray is installed, and that a cluster of several nodes has authentication.

    Raises:
        ClusterJobError: it is missing, or too old for a token.
    """
    if importlib.util.find_spec("ray") is None:
        raise ClusterJobError(f"ray is not installed for {sys.executable}: pip install ray")
    # A fork of Ray may have another name, and its version is unknown.
    version = next((one.version for one in importlib.metadata.distributions(name="ray")), "unknown")
    is_old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _WITH_TOKENS
    if is_old and nodes > 1 and os.environ.get("RAY_AUTH_MODE") != "disabled":
        raise ClusterJobError(
            f"Ray {version} has no authentication: everyone who can connect to the {nodes} nodes"
            " could run code as you; pip install 'ray>=2.52', or accept that with"
            " RAY_AUTH_MODE=disabled"
        )


if __name__ == "__main__":
    main()
