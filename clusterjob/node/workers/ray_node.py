"""Run one node of a Ray cluster (``--launcher ray``), and the program on node 0.

The agents start this module as the only worker of each node. Node 0 starts Ray's head at the job's
master address and port, waits until each node has joined, and runs the program with RAY_ADDRESS.
When the program has ended, the head stops, the other nodes lose it, and every Ray process ends. The
forkserver kills what is left.
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
from collections.abc import Sequence
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
# Ray gives a node 30 s, also on a busy machine. A node also ends if the head is not registered.
_SLOW_START = re.compile(b"timed out during startup|No node info found for head node")
_STARTED = b"Ray runtime started"  # in the output of `ray start`: the node has joined
_STOP = 2.0  # seconds for Ray to stop its own processes
_RESOURCE = "clusterjob_node"  # each node offers it with its rank, which names a missing node
_MAX_TEMPORARY = 16  # characters: the paths of Ray's sockets have at most 107
_WITH_TOKENS = (2, 52)  # first version with tokens: docs.ray.io/en/latest/ray-security
# Waits until all nodes have joined; prints the ranks of the others.
_WAIT = f"""
import sys, time
address, count, deadline = sys.argv[1], int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
import ray
ray.init(address=address, logging_level="ERROR", log_to_driver=False)
while True:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    left = [k for k in range(count) if not any(f"{_RESOURCE}{{k}}" in each for each in alive)]
    if not left or time.monotonic() > deadline:
        break
    time.sleep(0.1)
print(*left)
"""


def node_options(options: LaunchOptions) -> LaunchOptions:
    """Return the options of a node whose one worker is this module.

    The caller is the agent, which removes Ray's files at its end: it outlives all workers.
    """
    directory = tempfile.mkdtemp(prefix="ray-", dir=_short_directory())
    atexit.register(_remove, directory, os.getpid())
    cpus = (options.cpus_per_task or 0) * (options.nproc_per_node or 1)
    program = options.program
    own = (
        directory,
        f"{options.join_timeout:g}",
        str(cpus),
        program.kind,
        program.target,
        *program.args,
    )
    return replace(
        options, program=Program("module", __name__, args=own), nproc_per_node=1, start="exec"
    )


class RayNode:
    """The Ray processes of one node.

    Args:
        directory: a private directory for Ray's files.
        join_timeout: seconds in which the nodes must have joined.
        cpus: cores that the node offers; 0 for all that this process may use.

    Attributes:
        rank: the node's rank.
        hurry: whether Ray is killed at once: after a failure, the agent soon kills this process.
    """

    def __init__(self, directory: str, join_timeout: float, cpus: int) -> None:
        self.rank = int(os.environ["GROUP_RANK"])
        self.hurry = False
        self._count = int(os.environ["GROUP_WORLD_SIZE"])
        self._head = _address_of(os.environ["MASTER_ADDR"])
        self._port = int(os.environ["MASTER_PORT"])
        self._join_timeout = join_timeout
        self._cpus = cpus or devices.usable_cores()
        # A short name: the paths of Ray's sockets have at most 107 characters.
        self._temporary = Path(directory) / os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._temporary.mkdir(mode=0o700)
        self._environ = self._own_environ()
        job_dir = Path(os.environ[contract.JOB_DIR])
        self._log = node_directory(job_dir, self.rank) / "ray.log"
        self._log_begin = 0  # of the output of this start
        self._ray: subprocess.Popen[bytes] | None = None
        self._join_deadline = time.monotonic() + join_timeout

    @property
    def address(self) -> str:
        """Address and port of the head."""
        return f"[{self._head}]:{self._port}" if ":" in self._head else f"{self._head}:{self._port}"

    def _own_environ(self) -> dict[str, str]:
        """Return the environment of Ray and of the driver, which have no rank."""
        ours = {
            *contract.LAUNCH_VARIABLES, contract.STORE, contract.STORE_KEY, contract.WARNING_FD,
            contract.REPORT_FD, "RAY_ADDRESS",
        }  # fmt: skip
        environ = {name: value for name, value in os.environ.items() if name not in ours}
        environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not environ.get("RAY_AUTH_MODE"):
            key = os.environ[contract.STORE_KEY].encode()
            token = self._temporary / "token"
            with open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(hmac.new(key, b"ray", hashlib.sha256).hexdigest())
            environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        return environ

    def start(self) -> None:
        """Start Ray on this node; on nodes other than 0, wait for the head first.

        Raises:
            ClusterJobError: the head does not answer.
        """
        if self.rank == 0:
            place = ["--head", f"--port={self._port}", f"--node-ip-address={self._head}",
                     "--include-dashboard=false",
                     f"--ray-client-server-port={_free_port()}"]  # fmt: skip
        else:
            self._wait_for_head()
            own = network.address_towards(self._head) or self._head
            place = [f"--address={self.address}", f"--node-ip-address={own}"]
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *place,
            "--disable-usage-stats", "--log-color=false", f"--temp-dir={self._temporary}",
            f"--num-cpus={self._cpus}", f"--num-gpus={devices.visible_gpus(os.environ)}",
            f'--resources={{"{_RESOURCE}{self.rank}": 1}}',
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._log_begin = log.tell()
            self._ray = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait_for_head(self) -> None:
        while not self._head_answers():
            if self._ray is not None and not self._started_again():
                self.check()
            if time.monotonic() > self._join_deadline:
                raise ClusterJobError(
                    f"Ray's head at {self.address} does not answer after {self._join_timeout:g} s"
                )
            time.sleep(_POLL)

    def _head_answers(self) -> bool:
        try:
            socket.create_connection((self._head, self._port), timeout=5.0).close()
        except TimeoutError:  # a slow network; the agents notice a lost node
            return True
        except OSError:
            return False
        return True

    def check(self) -> None:
        """Check that Ray runs on this node.

        Raises:
            ClusterJobError: it has ended.
        """
        assert self._ray is not None
        if self._ray.poll() is not None:
            lines = [line for line in last_lines(self._log, 20, 1 << 14) if line.strip()]
            raise ClusterJobError(
                f"Ray ended with {self._ray.returncode} on node {self.rank}:"
                f" {' '.join(lines)[-1000:]}"
            )

    def wait_for_nodes(self) -> None:
        """Wait until all nodes have joined.

        Raises:
            ClusterJobError: some nodes have not joined, or Ray has ended.
        """
        self._wait_for_head()
        deadline = time.monotonic() + self._join_timeout + _ANSWER
        counting = subprocess.Popen(
            [sys.executable, "-c", _WAIT, self.address, str(self._count), str(self._join_timeout)],
            env=self._environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            while counting.poll() is None:
                if self._started_again():
                    self.wait_for_nodes()
                    return
                self.check()
                if time.monotonic() > deadline:
                    raise ClusterJobError(
                        f"Ray's head does not answer after {self._join_timeout + _ANSWER:g} s"
                    )
                time.sleep(_POLL)
        finally:
            counting.kill()
        missing, err = counting.communicate()
        if counting.returncode:
            raise ClusterJobError(f"Ray's nodes cannot be listed: {err.strip()[-1000:]}")
        if missing.strip():
            raise ClusterJobError(
                f"node {', '.join(missing.split())} has not joined the Ray cluster after"
                f" {self._join_timeout:g} s"
            )

    def run(self, program: Program) -> int:
        """Run the program as the driver; return its exit code, negative for a signal.

        Raises:
            ClusterJobError: Ray ended before the program.
        """
        driver = subprocess.Popen(
            program.argv(sys.executable), env=self._environ | {"RAY_ADDRESS": self.address}
        )

        def forward(number: int, _: object) -> None:
            self.hurry = self.hurry or number == signal.SIGTERM
            driver.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, forward)
        try:
            while driver.poll() is None:
                self.check()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    driver.wait(_POLL)
        except ClusterJobError:
            driver.kill()
            driver.wait()
            raise
        return driver.returncode

    def serve(self) -> None:
        """Run until the head has ended.

        Raises:
            ClusterJobError: Ray ended here while the head was there.
        """
        refused = 0
        while refused < _LOST:
            time.sleep(_POLL)
            if self._head_answers():
                refused = 0
                if not self._started_again():
                    self.check()
            elif self._joined():
                refused += 1
            else:
                self._wait_for_head()

    def _output(self) -> bytes:
        """Return the output of this start: the log also contains the earlier ones."""
        with self._log.open("rb") as log:
            log.seek(self._log_begin)
            return log.read(1 << 16)

    def _joined(self) -> bool:
        """Return whether this node has joined; until then, the head may start again."""
        return _STARTED in self._output()

    def _started_again(self) -> bool:
        """Start Ray again if its own start was too slow and the node may still join."""
        assert self._ray is not None
        if self._ray.poll() is None or time.monotonic() > self._join_deadline:
            return False
        slow = _SLOW_START.search(self._output())
        if slow is None and (self.rank == 0 or self._joined() or self._head_answers()):
            return False
        why = slow[0].decode() if slow else "the head is gone"
        print(f"clusterjob: Ray starts again on node {self.rank}: {why}", file=sys.stderr)
        processes.kill_descendants()
        self._ray = None
        self.start()
        return True

    def stop(self) -> None:
        """End all Ray processes of this node."""
        if self._ray is not None and self.rank == 0 and not self.hurry:
            self._ray.terminate()  # Ray stops its own processes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ray.wait(_STOP)
        processes.kill_descendants()


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


def _remove(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked process inherits this handler
        shutil.rmtree(directory, ignore_errors=True)


def _free_port() -> int:
    """Return a free port: Ray's client server cannot be left out, and its default may be taken."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


def _short_directory() -> str:
    found = tempfile.gettempdir()
    return found if len(found) <= _MAX_TEMPORARY else "/tmp"  # noqa: S108 - mkdtemp makes it private


def _address_of(host: str) -> str:
    """Return the IP address of the head, which Ray needs.

    Raises:
        ClusterJobError: the name cannot be resolved.
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ClusterJobError(f"{host} cannot be resolved: {error.strerror}") from error


def _main(argv: Sequence[str]) -> int:
    """Run this node; return the exit code, negative for a signal."""
    directory, join_timeout, cpus, kind, target, *args = argv
    _check_version(int(os.environ["GROUP_WORLD_SIZE"]))
    processes.adopt_orphans()  # so that `stop` finds Ray's daemons
    node = RayNode(directory, float(join_timeout), cpus=int(cpus))

    def leave(*_: object) -> None:
        node.hurry = True
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        node.start()
        if node.rank:
            node.serve()
            return 0
        node.wait_for_nodes()
        code = node.run(Program(kind, target, args=tuple(args)))
        node.hurry = node.hurry or code != 0
        return code
    except BaseException:
        node.hurry = True
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        node.stop()


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
