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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from clusterjob.errors import ClusterJobError
from clusterjob.node import contract
from clusterjob.node.logs.log_files import last_lines, node_directory
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import devices, network, processes

_POLL = 0.1  # seconds between two looks at the processes
_LOST = 3  # refused connections in a row after which the head is gone
_ANSWER = 60.0  # seconds after the join timeout in which Ray's own client must have ended
_MAX_TEMPORARY = 16  # characters: the paths of Ray's sockets have at most 107
_WITH_TOKENS = (2, 52)  # first version with tokens: docs.ray.io/en/latest/ray-security
# Waits until all nodes have joined; prints the ranks of the others, which each node offers as a
# resource.
_WAIT = """
import sys, time
address, count, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
import ray
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while True:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    left = [k for k in range(count) if not any(f"clusterjob_node{k}" in each for each in alive)]
    if not left or time.monotonic() > deadline:
        break
    time.sleep(0.1)
print(*left)
"""


def node_options(options: LaunchOptions) -> LaunchOptions:
    """Return the options of a node whose one worker is this module.

    The caller is the agent, which removes Ray's files at its end: it outlives all workers.
    """
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_TEMPORARY:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes it private
    directory = tempfile.mkdtemp(prefix="ray-", dir=parent)
    atexit.register(_remove, directory, os.getpid())
    cpus = (options.cpus_per_task or 0) * (options.nproc_per_node or 1)
    program = options.program
    settings = (directory, f"{options.join_timeout:g}", str(cpus))
    own = (*settings, program.kind, program.target, *program.args)
    return replace(
        options, program=Program("module", __name__, args=own), nproc_per_node=1, start="exec"
    )


def _main(argv: Sequence[str]) -> int:
    """Run this node; return the exit code, negative for a signal.

    Raises:
        ClusterJobError: Ray cannot run here, has ended, or a node has not joined.
    """
    directory, timeout, cpus, kind, target, *args = argv
    rank, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    _check_version(count)
    processes.adopt_orphans()  # so that `kill_descendants` finds Ray's daemons
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    head = _head()
    address = f"[{head[0]}]:{head[1]}" if ":" in head[0] else f"{head[0]}:{head[1]}"
    temporary = Path(directory) / os.environ["TORCHELASTIC_RESTART_COUNT"]
    temporary.mkdir(mode=0o700)
    environ = _environment(temporary)
    log = node_directory(Path(os.environ[contract.JOB_DIR]), rank) / "ray.log"
    if rank == 0:
        # Ray's client server cannot be left out, and its default port may be taken.
        role = [
            "--head", f"--port={head[1]}", f"--node-ip-address={head[0]}",
            "--include-dashboard=false", f"--ray-client-server-port={_free_port()}",
        ]  # fmt: skip
    else:
        _wait_for_head(head, float(timeout))
        own = network.address_towards(head[0]) or head[0]
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
                refused = 0 if _answers(head) else refused + 1
                if not refused:
                    check()
            return 0
        _wait_for_head(head, float(timeout), check)
        wait = [sys.executable, "-c", _WAIT, address, str(count), timeout]
        _wait_for_nodes(wait, environ, check, seconds=float(timeout))
        program = Program(kind, target, args=tuple(args)).argv(sys.executable)
        driver = subprocess.Popen(program, env=environ | {"RAY_ADDRESS": address})
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


def _answers(head: tuple[str, int]) -> bool:
    try:
        socket.create_connection(head, timeout=5.0).close()
    except TimeoutError:  # a slow network; the agents notice a lost node
        return True
    except OSError:
        return False
    return True


def _wait_for_head(
    head: tuple[str, int], seconds: float, check: Callable[[], None] = lambda: None
) -> None:
    deadline = time.monotonic() + seconds
    while not _answers(head):
        check()
        if time.monotonic() > deadline:
            raise ClusterJobError(
                f"Ray's head at {head[0]}:{head[1]} does not answer after {seconds:g} s"
            )
        time.sleep(_POLL)


def _wait_for_nodes(
    command: list[str], environ: dict[str, str], check: Callable[[], None], *, seconds: float
) -> None:
    limit = seconds + _ANSWER
    nothing = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, env=environ, stdin=nothing, capture_output=True, text=True, timeout=limit,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise ClusterJobError(f"Ray's head does not answer after {limit:g} s") from error
    check()
    if done.returncode:
        raise ClusterJobError(f"Ray's nodes cannot be listed: {done.stderr.strip()[-1000:]}")
    missing = done.stdout.split()
    if missing:
        raise ClusterJobError(
            f"node {', '.join(missing)} has not joined the Ray cluster after {seconds:g} s"
        )


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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits this handler
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    """Run this node and end as the program ended."""
    try:
        code = _main(sys.argv[1:])
    except ClusterJobError as error:
        sys.exit(f"clusterjob: {error.message}")
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
