"""The parent of a node's agent: start the agent again if it was killed.

Only a job whose workers may be restarted has this process. It is forked before there are threads,
so each agent starts from the same memory: environment, secrets, rank assignment. A scheduler, a
host server and the records of jobs know this process as the agent: it forwards their signals.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from clusterjob.node.environments import this_node
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.system import processes
from clusterjob.node.system.processes import SharedNote

# Seconds for the forkserver of a killed agent to stop its workers; then they are killed.
_CLEAR_SECONDS = 5.0
_SI_KERNEL = 0x80  # `si_code` of Ctrl-C in a terminal, which the agent gets too


class AgentParent:
    """Start one node's agent, and start it again if it is killed.

    Args:
        topology: this node, and the number of nodes.
        options: the maximum number of restarts, and whether the job may be preempted.
        job_dir: the job's directory, as this node sees it.
        attempt: the number of the job's attempt, from 0.

    Attributes:
        pid: this process.
        why: how the agent before this one ended, such as ``the agent ... was killed``; empty for
            the first one.
        left: how many agents may follow this one.
        console: the progress of the console, for the next agent.
        note: the values that this agent and those before it have kept; see `keep`.
    """

    def __init__(
        self, topology: Topology, options: LaunchOptions, job_dir: Path, attempt: int
    ) -> None:
        self.pid = os.getpid()
        self.why = ""
        self.console, self.note = SharedNote(), SharedNote(1 << 16)
        self._node_rank = topology.node_rank
        self._job_dir = job_dir
        self._attempt = attempt
        # Node 0's last agent starts no workers: it gives the verdict.
        most = options.max_restarts + options.machine_restarts(topology.nnodes)
        self.left = most + (topology.node_rank == 0) if options.restarts else 0
        numbers = processes.handled_signals(preemptible=options.warning is not None)
        self._signals = {*numbers, signal.SIGCHLD}

    def run(self) -> int | None:
        """Run agents until one ends by itself; return its exit code, or None in an agent."""
        processes.adopt_orphans()
        spared = processes.descendants(self.pid)  # background processes of the setup lines
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        while True:
            agent = os.fork()
            if agent == 0:
                processes.die_with_parent(self.pid)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return None
            status, ordered = self._wait(agent)
            if not os.WIFSIGNALED(status):
                processes.kill_descendants()
                return os.WEXITSTATUS(status)
            deadline = time.monotonic() + _CLEAR_SECONDS
            while processes.descendants(self.pid, *spared):
                if time.monotonic() > deadline:
                    processes.kill_descendants(*spared)
                time.sleep(0.02)
            number = os.WTERMSIG(status)
            who = f"the agent of node {self._node_rank} on {this_node.node_name()} (pid {agent})"
            was_killed = f"{who} was killed by {processes.signal_name(number)}"
            self.why = self.note.read().get("why") or was_killed
            is_over = ends.cancelled(self._job_dir) or ends.has_result(self._job_dir, self._attempt)
            if ordered or is_over or not self.left:
                ends.write_lost(self._job_dir, self._node_rank, self._attempt, f"{who} was killed")
                processes.kill_descendants()
                return 128 + number
            self.left -= 1
            self.keep(why="")

    def _wait(self, agent: int) -> tuple[int, bool]:
        """Forward signals until the agent has ended; return its wait status, and whether any came.

        A signal asks this node to stop.
        """
        ordered = False
        while True:
            for pid, status in processes.ended_children():
                if pid == agent:
                    return status, ordered
            got = signal.sigwaitinfo(self._signals)
            if got.si_signo != signal.SIGCHLD:
                ordered = True
                if got.si_signo != signal.SIGINT or got.si_code != _SI_KERNEL:
                    processes.send_signal(agent, got.si_signo)

    def keep(self, **values: Any) -> None:
        """In an agent: keep values for the parent, the forkserver and the next agent.

        ``joined``: whether this node has joined the coordinator; ``coordinates``: whether this node
        is the coordinator's; ``successors``: addresses where the next coordinator may listen;
        ``round``: the newest round that it has seen; ``why``: why this agent kills itself;
        ``until``: the monotonic time until which the workers may run without a sign of the agent.
        """
        self.note.write(self.note.read() | values)
