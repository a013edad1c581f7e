"""clusterjob and torchrun on machines that are network namespaces."""

from __future__ import annotations

import re
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from namespaces import Machine

from clusterjob.node.logs.events import read_job_events
from goodput_parts.faults import Kind
from goodput_parts.machines import Node, send
from goodput_parts.run import RETURN_SECONDS

_NODE = re.compile(r"node (\d+)")
_PORT = 29400
_STOP_SECONDS = 10.0


class OnMachines:
    """A launcher on each machine.

    Args:
        machines: the network namespaces.
        directory: for outputs and logs.
        environ: the variables of the processes.
        program: the script and its arguments.
    """

    name = ""

    def __init__(
        self, machines: list[Machine], directory: Path, environ: Mapping[str, str], *program: str
    ) -> None:
        directory.mkdir()
        self.kinds = list(Kind)
        self.nodes = [
            Node(number, machine, directory / f"machine{number}.out")
            for number, machine in enumerate(machines)
        ]
        self.directory = directory
        self.environ = dict(environ)
        self.program = program
        self._gone: dict[int, float] = {}  # since when a machine has no launcher
        self._cut: set[int] = set()

    def arguments(self, node: Node) -> tuple[list[str], dict[str, str]]:
        """Return the launcher's command and variables on a machine."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the launcher on every machine."""
        self._gone.clear()
        for node in self.nodes:
            self._start(node)

    def _start(self, node: Node) -> None:
        argv, variables = self.arguments(node)
        node.start(argv, self.environ | variables, self.directory)

    def targets(self) -> list[int]:
        """Return the machines that run workers now and are connected."""
        return [
            node.number
            for node in self.nodes
            if node.number not in self._cut and node.running and node.workers()
        ]

    def kill_rank(self, node: int, number: int) -> None:
        """Send a signal to the rank of a machine."""
        for pid in self.nodes[node].workers():
            send(pid, number)

    def kill_agent(self, node: int) -> None:
        """Kill the launcher of a machine."""
        launcher = self.nodes[node].launcher
        assert launcher is not None
        launcher.kill()

    def cut(self, node: int) -> Callable[[], None]:
        """Cut off a machine."""
        self.nodes[node].connect(up=False)
        self._cut.add(node)

        def connect() -> None:
            self.nodes[node].connect(up=True)
            self._cut.discard(node)

        return connect

    def restore(self) -> None:
        """Start the launchers of machines that have been without one, unless all have ended."""
        now = time.monotonic()
        if self.ended():
            return
        for node in self.nodes:
            if node.running or node.number in self._cut:
                self._gone.pop(node.number, None)
            elif now - self._gone.setdefault(node.number, now) > RETURN_SECONDS:
                self._start(node)

    def ended(self) -> bool:
        """Return whether no launcher runs."""
        return not any(node.running for node in self.nodes)

    def stop(self) -> None:
        """End all processes of all machines."""
        for node in self.nodes:
            if node.running and node.launcher is not None:
                node.launcher.terminate()
        limit = time.monotonic() + _STOP_SECONDS
        while not self.ended() and time.monotonic() < limit:
            time.sleep(0.1)
        for node in self.nodes:
            node.clear()


class Clusterjob(OnMachines):
    """`clusterjob launch` on each machine, the last ones as spares.

    Args:
        spares: number of spares; 0 for none.
    """

    name = "clusterjob"

    def __init__(self, *args: Any, spares: int, hang_timeout: int) -> None:
        super().__init__(*args)
        self._spares = spares
        self._hang_timeout = hang_timeout
        self._attempt = -1
        self._job = f"goodput-{secrets.token_hex(4)}"
        self._token = secrets.token_hex(16)
        self.job_dir = self.directory / "job"
        self.job_dir.mkdir(mode=0o700)

    def start(self) -> None:
        """Start the next attempt."""
        self._attempt += 1
        super().start()

    def arguments(self, node: Node) -> tuple[list[str], dict[str, str]]:
        """Return the command of one machine."""
        argv = [sys.executable, "-m", "clusterjob", "launch"]
        argv += ["--nproc-per-node", "1", "--max-restarts", "100", "--warning", "20"]
        argv += ["--hang-timeout", str(self._hang_timeout), "--lease", "4"]
        argv += ["--spares", str(self._spares)] if self._spares else []
        variables = {
            "CLUSTERJOB_NNODES": str(len(self.nodes)),
            "CLUSTERJOB_NODE_RANK": str(node.number),
            "CLUSTERJOB_MASTER_ADDR": self.nodes[0].machine.address,
            "CLUSTERJOB_JOB_ID": self._job,
            "CLUSTERJOB_JOB_DIR": str(self.job_dir),
            "CLUSTERJOB_TOKEN": self._token,
            "CLUSTERJOB_ATTEMPT": str(self._attempt),
        }
        return [*argv, *self.program], variables

    def preempt(self) -> bool:
        """Warn one agent, which warns the others."""
        launcher = next(node.launcher for node in self.nodes if node.running)
        assert launcher is not None
        launcher.send_signal(signal.SIGUSR1)
        return True

    def blamed(self) -> list[dict[str, Any]]:
        """Return the restarts in the job's events: when, and which node was named."""
        found = []
        for event in read_job_events(self.job_dir):
            if event.get("event") in ("restart", "ended"):
                why = str(event.get("why", event.get("reason", "")))
                match = _NODE.search(why)
                at = datetime.fromisoformat(str(event["time"]).replace("Z", "+00:00"))
                found.append(
                    {
                        "time": at.timestamp(),
                        "event": event["event"],
                        "node": int(match[1]) if match else None,
                        "why": why[:200],
                    }
                )
        return found


class Torchrun(OnMachines):
    """`torchrun --max-restarts` with the c10d rendezvous, whose store is on machine 0."""

    name = "torchrun"

    def __init__(self, *args: Any, nnodes: int) -> None:
        super().__init__(*args)
        self._nnodes = nnodes

    def arguments(self, node: Node) -> tuple[list[str], dict[str, str]]:
        """Return the command of one machine."""
        argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self._nnodes)]
        argv += ["--nproc-per-node", "1", "--max-restarts", "100", "--rdzv-backend", "c10d"]
        argv += ["--rdzv-endpoint", f"{self.nodes[0].machine.address}:{_PORT}"]
        argv += ["--rdzv-id", "goodput", "--local-addr", node.machine.address]
        # torchrun looks for its own host by name, and all machines have the same name.
        argv += ["--rdzv-conf", f"is_host={node.number == 0},read_timeout=600"]
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        return [*argv, *self.program], variables

    def preempt(self) -> bool:
        """Stop all launchers, as a scheduler does."""
        for node in self.nodes:
            if node.running and node.launcher is not None:
                node.launcher.terminate()
        return True

    def blamed(self) -> list[dict[str, Any]]:
        """Return nothing: torchrun records no restarts."""
        return []
