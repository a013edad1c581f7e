"""The parent of a node's agent: start the agent again if it was killed.

Only a job whose workers may be restarted has this process. It is forked before there are threads,
so each agent starts from the same memory: environment, secrets, rank assignment. A scheduler, a
host server and the records of jobs know this process as the agent: it forwards their signals.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from clusterjob.node.environments import this_node
from clusterjob.node.environments.topology import Topology
from clusterjob.node.logs import ends
from clusterjob.node.options import LaunchOptions
from clusterjob.node.system import processes
from clusterjob.node.system.shared_note import SharedNote

# Seconds for the forkserver of a killed agent to stop its workers; then they are killed.
_CLEAR_SECONDS = 5.0
_KEPT = ("joined", "coordinates", "successors", "rounds")  # notes of an agent for the next one
_SI_KERNEL = 0x80  # `si_code` of Ctrl-C in a terminal, which the agent gets too


class AgentParent:
    """Start one node's agent, and start it again if it is killed.

    Args:
        topology: this node, and the number of nodes.
        options: the maximum number of restarts, and whether the job may be preempted.
        job_dir: the job's directory, as this node sees it.
        attempt: the number of the job's attempt, from 0.

    Attributes:
        starts: how many agents were killed before this one.
        why: how the last one of them ended, such as ``the agent ... was killed``; empty without.
        console: the progress of the console, for the next agent.
        lease: until when the workers may run, for the forkserver.
    """

    def __init__(
        self, topology: Topology, options: LaunchOptions, job_dir: Path, attempt: int
    ) -> None:
        self.starts = 0
        self.why = ""
        self.console, self.lease = SharedNote(), SharedNote(64)
        self._note = SharedNote(1 << 16)
        self._node_rank = node_rank = topology.node_rank
        # Node 0's last agent starts no workers: it gives the verdict.
        self._most = options.max_restarts + options.machine_restarts(topology.nnodes)
        self._most += node_rank == 0
        self._job_dir = job_dir
        self._attempt = attempt
        self._signals = {
            *processes.handled_signals(preemptible=options.warning is not None),
            signal.SIGCHLD,
        }
        self._pid = os.getpid()
        # Processes that outlive an agent: background processes of the setup lines.
        self._spared: list[int] = []
        self._ordered = False  # whether this node was asked to stop

    def run(self) -> int | None:
        """Run agents until one ends by itself; return its exit code, or None in an agent."""
        processes.adopt_orphans()
        self._spared += processes.descendants(self._pid)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            agent = os.fork()
            if agent == 0:
                processes.die_with_parent(self._pid)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                return None
            status = self._wait(agent)
            if not os.WIFSIGNALED(status):
                processes.kill_descendants()
                return os.WEXITSTATUS(status)
            self._clear()
            name = processes.signal_name(os.WTERMSIG(status))
            who = f"the agent of node {self._node_rank} on {this_node.node_name()} (pid {agent})"
            self.why = self.kept("why") or f"{who} was killed by {name}"
            if not self._may_start():
                return self._give_up(who, os.WTERMSIG(status))
            self.starts += 1
            self._note.write({name: self.kept(name) for name in _KEPT})

    # -- in the agent ------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The parent's pid."""
        return self._pid

    @property
    def starts_again(self) -> bool:
        """Whether another agent follows if this one is killed."""
        return self.starts < self._most

    def keep(self, name: str, value: Any) -> None:
        """Note a value for the parent and the next agent.

        ``joined``: whether this node has joined the coordinator; ``coordinates``: whether this node
        is the coordinator's; ``successors``: addresses where the next coordinator may listen;
        ``rounds``: the newest round that it has seen, plus 1; ``why``: why this agent kills itself.
        """
        self._note.write(self._note.read() | {name: value})

    def kept(self, name: str) -> Any:
        """Return a value that `keep` noted; None if there is none."""
        return self._note.read().get(name)

    def replace_agent(self, why: str) -> None:
        """End this agent, so that the next one starts a new forkserver."""
        self.keep("why", why)
        os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        """Free the notes in a process that runs user code."""
        for note in (self.console, self._note):
            note.close()

    # -- in the parent -----------------------------------------------------------------------------

    def _wait(self, agent: int) -> int:
        """Forward signals until the agent has ended; return its wait status."""
        while True:
            for pid, status in processes.ended_children():
                if pid == agent:
                    return status
            got = signal.sigwaitinfo(self._signals)
            if got.si_signo != signal.SIGCHLD:
                self._ordered = True
                if got.si_signo != signal.SIGINT or got.si_code != _SI_KERNEL:
                    processes.send_signal(agent, got.si_signo)

    def _clear(self) -> None:
        """Wait until the killed agent's forkserver and workers have ended."""
        deadline = time.monotonic() + _CLEAR_SECONDS
        while True:
            list(processes.ended_children())
            below = set(processes.descendants(self._pid))
            for pid in self._spared:
                below -= {pid, *processes.descendants(pid)}
            if not below:
                return
            if time.monotonic() > deadline:
                for pid in below:
                    processes.send_signal(pid, signal.SIGKILL)
            time.sleep(0.02)

    def _may_start(self) -> bool:
        return not (
            self._ordered
            or not self.starts_again
            or ends.cancelled(self._job_dir)
            or ends.has_result(self._job_dir, self._attempt)
        )

    def _give_up(self, who: str, number: int) -> int:
        """Record the loss of the agent, and end by the same signal."""
        ends.write_lost(self._job_dir, self._node_rank, self._attempt, f"{who} was killed")
        processes.kill_descendants()
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(self._pid, number)
        return 128 + number
