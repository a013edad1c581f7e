"""Run one node of a Ray cluster (``--launcher ray``), and the program on node 0.

The agents start this module as the only worker of each node. It starts Ray, whose processes the
kernel kills when this process ends. On node 0, Ray's head is at the job's master address and port;
when all nodes have joined, the process becomes the program, with RAY_ADDRESS. The other nodes end
when the head refuses connections.
"""

from __future__ import annotations

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
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, files, network, processes

_POLL = 0.1  # seconds between two looks at the processes
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
    directory = tempfile.mkdtemp(prefix="ray-", dir=parent)
    # Unlike a handler of atexit, it does nothing in a forked process.
    Finalize(None, shutil.rmtree, args=(directory, True), exitpriority=0)
    cpus = (options.cpus_per_task or 0) * (options.nproc_per_node or 1)
    settings = (directory, f"{options.join_timeout:g}", str(cpus))
    own = (*settings, *options.program.argv(sys.executable))
    return replace(
        options, program=Program("module", __name__, args=own), nproc_per_node=1, start="exec"
    )


def token_of(secret: bytes, job_id: str, attempt: int, restart: int) -> str:
    """Return the token of the Ray cluster of one round, from the job's secret.

    All agents compute the same one.
    """
    text = f"ray\0{job_id}\0{attempt}\0{restart}"
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def main() -> None:
    """Run this node until the head has ended; on node 0, become the program."""
    directory, timeout, cpus, *program = sys.argv[1:]
    deadline = time.monotonic() + float(timeout)
    rank, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    _check_version(count)
    # Ray needs an IP address.
    host, port = network.addresses_of(os.environ["MASTER_ADDR"])[0], int(os.environ["MASTER_PORT"])
    address = network.with_port(host, port)
    log = node_directory(Path(os.environ[contract.JOB_DIR]), rank) / "ray.log"
    _change_environment(Path(directory) / "token")
    started: subprocess.Popen[bytes] | None = None

    def wait(missing: str = "") -> None:
        """Wait a moment; exit if Ray has ended here, or something is missing at the deadline."""
        if started is not None and started.poll() is not None:
            text = " ".join(last_lines(log, 20, 1 << 14))[-1000:]
            sys.exit(f"clusterjob: Ray ended with {started.returncode} on node {rank}: {text}")
        if missing and time.monotonic() > deadline:
            sys.exit(f"clusterjob: {missing}")
        time.sleep(_POLL)

    def wait_for_head() -> None:
        while _is_refused(host, port):
            wait(f"Ray's head at {address} does not answer")

    if rank == 0:
        # Ray's client server cannot be left out, and its default port may be taken.
        with socket.create_server(("", 0)) as free:
            client_port = free.getsockname()[1]
        role = [
            "--head", f"--port={port}", f"--node-ip-address={host}",
            "--include-dashboard=false", f"--ray-client-server-port={client_port}",
        ]  # fmt: skip
    else:
        wait_for_head()
        own = network.address_towards(host) or host
        role = [f"--address={address}", f"--node-ip-address={own}"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role,
        "--disable-usage-stats", "--log-color=false", f"--temp-dir={directory}",
        f"--num-cpus={int(cpus) or devices.usable_cores()}",
        f"--num-gpus={devices.visible_gpus(os.environ)}",
        f'--resources={{"clusterjob_node{rank}": 1}}',
    ]  # fmt: skip
    with log.open("ab") as stream:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            # How often it asks the head for its node, at least once a second; else 20 times.
            env=os.environ | {"RAY_NUM_REDIS_GET_RETRIES": str(int(float(timeout)) + 1)},
            # Its daemons ask for the same: `ray start --block`, ray/_private/services.py.
            preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),  # noqa: PLW1509
        )
    if rank == 0:
        wait_for_head()
        os.environ["RAY_ADDRESS"] = address
        signal.alarm(int(max(0.0, deadline - time.monotonic())) + _HANGS)
        ray: Any = importlib.import_module("ray")
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        while left := _missing_nodes(ray, count):
            wait(f"node {', '.join(left)} has not joined the Ray cluster in time")
        ray.shutdown()
        signal.alarm(0)
        os.execvp(program[0], program)
    while not _is_refused(host, port):
        wait()


def _check_version(nodes: int) -> None:
    """Exit if Ray is missing, or a cluster of several nodes would have no authentication."""
    if importlib.util.find_spec("ray") is None:
        sys.exit(f"clusterjob: ray is not installed for {sys.executable}: pip install ray")
    # A fork of Ray may have another name, and its version is unknown.
    version = next((one.version for one in importlib.metadata.distributions(name="ray")), "unknown")
    is_old = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _WITH_TOKENS
    if is_old and nodes > 1 and os.environ.get("RAY_AUTH_MODE") != "disabled":
        sys.exit(
            f"clusterjob: Ray {version} has no authentication: everyone who can connect to the"
            f" {nodes} nodes could run code as you; pip install 'ray>=2.52', or accept that with"
            " RAY_AUTH_MODE=disabled"
        )


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
    text = os.environ.pop(contract.RAY_TOKEN)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_AUTH_MODE"):
        files.write_atomic(token, text.encode())
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))


def _is_refused(host: str, port: int) -> bool:
    """Return whether the head does not listen; the agents notice a node that does not answer."""
    try:
        network.connect(host, port, _CONNECT_TIMEOUT).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _missing_nodes(ray: Any, count: int) -> list[str]:
    """Return the nodes that have not joined; each one offers its rank as a resource."""
    joined = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
    return [str(node) for node in range(count) if f"clusterjob_node{node}" not in joined]


if __name__ == "__main__":
    main()
