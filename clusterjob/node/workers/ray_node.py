"""Run one node of a Ray cluster (``--launcher ray``), and the program on node 0.

The agents start this module as the only worker of each node. Node 0 starts Ray's head at the job's
master address and port, waits until each node has joined, and runs the program with RAY_ADDRESS.
When the program has ended, the head is killed, and the other nodes end when it does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
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

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, network, processes

_POLL = 0.1  # seconds between two looks at the processes
_LOST = 3  # attempts to connect in a row that fail after which the head is gone
_CONNECT_TIMEOUT = 5.0
_MAX_TEMPORARY = 16  # characters: the paths of Ray's sockets have at most 107
_WITH_TOKENS = (2, 52)  # first version with tokens: docs.ray.io/en/latest/ray-security
# Waits until all nodes have joined, each of which offers its rank as a resource; then becomes the
# program. Ray's own client may hang.
_DRIVER = """
import os, signal, sys, time
address, count, timeout, *program = sys.argv[1:]
deadline = time.monotonic() + float(timeout)
signal.alarm(int(float(timeout)) + 60)
import ray
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while True:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    names = [f"clusterjob_node{k}" for k in range(int(count))]
    left = [str(k) for k, name in enumerate(names) if not any(name in each for each in alive)]
    if not left:
        break
    if time.monotonic() > deadline:
        missing = ", ".join(left)
        sys.exit(f"clusterjob: node {missing} has not joined the Ray cluster after {timeout} s")
    time.sleep(0.1)
ray.shutdown()
signal.alarm(0)
os.execvp(program[0], program)
"""


def node_options(options: LaunchOptions) -> LaunchOptions:
    """Return the options of a node whose one worker is this module.

    The caller is the agent, which removes Ray's files at its end: it outlives all workers.
    """
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_TEMPORARY:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes it private
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
    """Run this node and end as the program ended."""
    try:
        code = _run(*sys.argv[1:])
    except ClusterJobError as error:
        sys.exit(f"clusterjob: {error.message}")
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _run(directory: str, timeout: str, cpus: str, *program: str) -> int:
    """Run this node; return the exit code, negative for a signal.

    Raises:
        ClusterJobError: Ray cannot run here, or has ended.
    """
    rank, count = int(os.environ["GROUP_RANK"]), os.environ["GROUP_WORLD_SIZE"]
    _check_version(int(count))
    processes.adopt_orphans()  # so that `kill_descendants` finds Ray's daemons
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    host, port = _head()
    address = network.with_port(host, port)
    temporary = Path(directory) / os.environ["TORCHELASTIC_RESTART_COUNT"]
    temporary.mkdir(mode=0o700)
    environ = _environment(temporary)
    log = node_directory(Path(os.environ[contract.JOB_DIR]), rank) / "ray.log"
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
        _wait_for_head(host, port, float(timeout))
        own = network.address_towards(host) or host
        role = [f"--address={address}", f"--node-ip-address={own}"]
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *role,
        "--disable-usage-stats", "--log-color=false", f"--temp-dir={temporary}",
        f"--num-cpus={int(cpus) or devices.usable_cores()}",
        f"--num-gpus={devices.visible_gpus(os.environ)}",
        f'--resources={{"clusterjob_node{rank}": 1}}',
    ]  # fmt: skip
    nothing = subprocess.DEVNULL
    with log.open("ab") as stream:
        ray = subprocess.Popen(command, env=environ, stdin=nothing, stdout=stream, stderr=stream)

    def check() -> None:
        if ray.poll() is not None:
            lines = [line for line in last_lines(log, 20, 1 << 14) if line.strip()]
            text = " ".join(lines)[-1000:]
            raise ClusterJobError(f"Ray ended with {ray.returncode} on node {rank}: {text}")

    try:
        if rank:
            refused = 0
            while refused < _LOST:
                time.sleep(_POLL)
                # A timeout is a slow network; the agents notice a lost node.
                refused = 0 if _answers(host, port, late=True) else refused + 1
                if not refused:
                    check()
            return 0
        _wait_for_head(host, port, float(timeout), check)
        words = [sys.executable, "-c", _DRIVER, address, count, timeout, *program]
        driver = subprocess.Popen(words, env=environ | {"RAY_ADDRESS": address})
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda number, _: driver.send_signal(number))
        while driver.poll() is None:
            check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(_POLL)
        return driver.returncode
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        processes.kill_descendants()


def _environment(temporary: Path) -> dict[str, str]:
    """Return the environment of Ray and of the driver, which have no rank."""
    ours = {
        *contract.LAUNCH_VARIABLES, contract.STORE, contract.STORE_KEY, contract.WARNING_FD,
        contract.REPORT_FD, "RAY_ADDRESS",
    }  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not environ.get("RAY_AUTH_MODE"):
        key = os.environ[contract.STORE_KEY].encode()
        token = temporary / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(hmac.new(key, b"ray", hashlib.sha256).hexdigest())
        environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return environ


def _head() -> tuple[str, int]:
    """Return the IP address, which Ray needs, and the port of the head.

    Raises:
        ClusterJobError: the name cannot be resolved.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]), port
    except OSError as error:
        raise ClusterJobError(f"{host} cannot be resolved: {error.strerror}") from error


def _answers(host: str, port: int, *, late: bool = False) -> bool:
    try:
        socket.create_connection((host, port), _CONNECT_TIMEOUT).close()
    except TimeoutError:
        return late
    except OSError:
        return False
    return True


def _wait_for_head(
    host: str, port: int, seconds: float, check: Callable[[], None] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while not _answers(host, port):
        check()
        if time.monotonic() > deadline:
            raise ClusterJobError(
                f"Ray's head at {host}:{port} does not answer after {seconds:g} s"
            )
        time.sleep(_POLL)


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
