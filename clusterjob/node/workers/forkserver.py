"""The starter: the one process per node that starts, reaps and stops the workers, while the agent
talks to the world.

It is forked from the agent before that has threads, imports torch where that pays, and forks. It
adopts every orphan below it, so that what a worker leaves behind ends with the job. If the agent
dies, it stops everything, says so in the job directory and ends; if it is killed itself, its
workers are killed by the kernel.

The agent and the starter exchange JSON messages over a socket pair:

    start {world, variables} (+ the store's socket)  ->  exit {local_rank, status, monotonic} for
    each worker, in time warn {}                                              the end is near, for
    this round and those to come stop {grace, signal}                             ->  gone {} when
    no process of the workers is left where {local_ranks, final}                       ->  where
    {final, answers} what these workers do, a moment later check {}
    ->  checked {} after every end of a worker so far
                                                         ready {fork, why} once, failing {...} when
                                                         a worker says so, missing {local_rank,
                                                         ranks, final} when one waits for others
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from clusterjob.node import contract
from clusterjob.node.contract import World
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.events import now
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.system import network, processes
from clusterjob.node.verdict import JobState
from clusterjob.node.workers import (
    early_variables,
    hook_directory,
    preload,
    sightings,
    torchrun,
    worker_process,
)
from clusterjob.node.workers.preemption_pipe import WarningPipe
from clusterjob.node.workers.status_probe import Asking

MESSAGE_BYTES = 1 << 17  # of one message; a socket pair of SOCK_SEQPACKET keeps them apart
# What workers leave behind is asked to go, then killed. Between the two, multiprocessing's resource
# tracker (which ignores SIGTERM and waits for the last holder of its pipe, such as a DataLoader's
# worker) frees the shared memory.
_LEFTOVER_TERM = 0.1
_LEFTOVER_KILL = 0.5
_ORPHANED_GRACE = 0.5  # between SIGTERM and SIGKILL when the agent is gone
_SWEEP_INTERVAL = 0.02
_NO_STORE = 3  # exit code of a store's process that could not import torch


class Starter:
    """The starter's own side: runs in the forked process until the agent says quit or dies.

    Args:
        control: this process's end of the socket pair.
        options: what the node was told.
        job_dir: where logs and this node's end are written.
        job_id: the job's id.
        attempt: which start of the job this is.
        node_rank: this node's index, for the record of an end.
        stdin: the descriptor that becomes the first worker's stdin; None for an empty one, as the
            others have.
    """

    def __init__(
        self,
        control: socket.socket,
        options: LaunchOptions,
        job_dir: Path,
        job_id: str,
        attempt: int,
        node_rank: int,
        stdin: int | None,
    ) -> None:
        self._control = control
        self._options = options
        self._job_dir = job_dir
        self._job_id = job_id
        self._attempt = attempt
        self._node_rank = node_rank
        self._stdin = stdin
        self._agent_pid = os.getppid()
        self._fork = False
        self._live: dict[int, int] = {}  # pid -> local rank
        self._begun: dict[int, float] = {}  # pid -> when it was started
        self._logs: dict[int, Path] = {}  # local rank -> its stderr
        self._asking = Asking()
        self._store: int | None = None
        self._stopping: float | None = None  # when SIGKILL is due
        self._warning: WarningPipe | None = (
            None  # of this round's workers, in a job that may be preempted
        )
        self._warned = False
        self._empty_since: float | None = None  # when the last worker was gone
        self._asked_leftovers = False
        self._agent_gone = False
        self._quit = False

    def serve(self) -> Program | None:
        """Serve the agent until the end; returns the program only in a forked worker, which is to
        run it.
        """
        # A scheduler may send its signals to every process of a job; what they mean is the agent's
        # to say. Workers start without this.
        for number in (
            signal.SIGTERM,
            *([] if self._options.warning is None else [signal.SIGUSR1]),
        ):
            signal.signal(number, signal.SIG_IGN)
        processes.die_with_parent(
            self._agent_pid, signal.SIGKILL
        )  # for as long as an import keeps it from listening
        processes.adopt_orphans()
        self._agents_group = os.getpgid(0)
        # Ctrl-C in a terminal is for the agent, which stops the workers in order. One that reads
        # the terminal has to be in another session: the kernel stops readers in the background of
        # the terminal's own (SIGTTIN).
        if self._stdin is not None and os.isatty(self._stdin):
            os.setsid()
        else:
            os.setpgid(0, 0)
        why = self._warm_up()
        self._hook = hook_directory.write(self._job_dir)
        self._open()
        self._tell({"t": "ready", "fork": self._fork, "why": why})
        while not (self._quit and self._stopping is None):
            for key, _ in self._selector.select(self._patience()):
                program = self._hear(key.fd)
                if program is not None:
                    return program
            self._reap()
            self._pursue_stop()
            if self._asking.ready():
                answers = self._asking.answers(self._logs, forked=self._fork)
                if answers is not None:
                    self._tell(answers)
        if self._agent_gone:
            self._record_end()
        return None

    def _warm_up(self) -> str | None:
        options = self._options
        if options.launcher == "torchrun" or options.start == "exec":
            return None
        if not options.program.is_python:
            return "a command, not a Python program" if options.start == "fork" else None
        why = (
            early_variables.set_in(options.program, os.environ) if options.start == "auto" else None
        )
        why = why or preload.warm_up()
        self._fork = why is None
        return why

    def _open(self) -> None:
        signal.set_wakeup_fd(-1)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._report_read, self._report_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(self._report_write, True)
        self._reports = b""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # select(2)'s epoll descriptor would be shared with every forked worker; poll(2) has none.
        self._selector = selectors.PollSelector()
        for descriptor in (self._control.fileno(), self._wake_read, self._report_read):
            self._selector.register(descriptor, selectors.EVENT_READ)
        # From here on the end of the control socket tells of the agent's death, and the workers
        # need a proper stop.
        processes.die_with_parent(self._agent_pid, signal.SIGTERM)  # which is ignored

    def _patience(self) -> float | None:
        if self._stopping is not None:
            return _SWEEP_INTERVAL
        return None if self._asking.due is None else max(0.0, self._asking.due - time.monotonic())

    def _hear(self, descriptor: int) -> Program | None:
        if descriptor == self._wake_read:
            os.read(self._wake_read, 4096)
        elif descriptor == self._report_read:
            self._read_reports()
        else:
            return self._obey()
        return None

    def _obey(self) -> Program | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._agent_gone = self._quit = True
            self._end_agents_group()
            self._selector.unregister(self._control.fileno())
            self._begin_stop(_ORPHANED_GRACE)
            return None
        message = json.loads(data)
        if message["t"] == "start":
            return self._start(World(**message["world"]), message["variables"], descriptors)
        if message["t"] == "warn":
            self._warned = True
            if self._warning is not None:
                self._warning.warn()
        elif message["t"] == "where":
            self._asking.ask(
                message["local_ranks"],
                self._live,
                self._begun,
                final=message["final"],
                note=message.get("note", ""),
            )
        elif message["t"] == "check":
            self._reap()
            self._tell({"t": "checked"})
        elif message["t"] == "stop":
            self._begin_stop(message["grace"], message["signal"])
        elif message["t"] == "quit":
            self._quit = True
            self._begin_stop(0.0)
        return None

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(
        self, world: World, variables: dict[str, str], descriptors: list[int]
    ) -> Program | None:
        self._empty_since = None
        self._begun.clear()
        self._asking.forget()
        directory = log_files.node_directory(self._job_dir, world.node_rank)
        if descriptors:
            self._store = self._start_store(world, descriptors[0], directory=directory)
        own = [self._control.fileno(), self._wake_read, self._wake_write]
        variables = variables | hook_directory.variables(os.environ, self._hook)
        if self._options.warning is not None:
            self._warning = WarningPipe(warned=self._warned)
            variables = variables | {contract.WARNING_FD: self._warning.name}
            own.append(self._warning.write_end)
        for start in self._starts(world, variables, directory=directory):
            try:
                pid = worker_process.start(
                    start, (self._report_read, self._report_write), close=own, stdin=self._stdin
                )
            except OSError as error:
                self._tell(
                    {
                        "t": "failing",
                        "local_rank": start.local_rank,
                        "monotonic": time.monotonic(),
                        "message": f"cannot start a worker: {error}",
                        "exit_code": 1,
                        "fatal": True,
                    }
                )
                return None
            if pid == 0:
                # Its descriptor is closed, and the number may soon be one of the program's own
                # files.
                self._control.detach()
                return self._options.program
            self._live[pid] = start.local_rank
            self._begun[pid] = time.monotonic()
            self._logs[start.local_rank] = start.err
        return None

    def _starts(
        self, world: World, variables: dict[str, str], directory: Path
    ) -> list[worker_process.WorkerStart]:
        if self._options.launcher == "torchrun":
            out, err = log_files.torchrun_files(directory, world.restart, attempt=self._attempt)
            return [
                worker_process.WorkerStart(
                    0,
                    variables,
                    argv=torchrun.command_line(self._options.program, world, job_id=self._job_id),
                    out=out,
                    err=err,
                )
            ]
        argv = None if self._fork else self._options.program.argv(sys.executable)
        return [
            worker_process.WorkerStart(
                local_rank,
                variables
                | contract.worker_variables(
                    world, local_rank, job_id=self._job_id, max_restarts=self._options.max_restarts
                ),
                argv,
                *log_files.rank_files(
                    directory,
                    world.first_rank + local_rank,
                    restart=world.restart,
                    attempt=self._attempt,
                ),
            )
            for local_rank in range(world.nproc)
        ]

    def _start_store(self, world: World, listener: int, directory: Path) -> int:
        starter = os.getpid()
        log = os.open(
            directory / "store.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        pid = os.fork()
        if pid != 0:
            os.close(listener)
            os.close(log)
            return pid
        try:
            processes.die_with_parent(starter)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (
                self._control.fileno(),
                self._wake_read,
                self._wake_write,
                self._report_read,
                self._report_write,
            ):
                os.close(descriptor)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
            processes.raise_open_files()
            preload.serve_store(world.master_addr, world.master_port, listener_fd=listener)
        except (
            ImportError
        ) as error:  # a torch that is broken: a worker that wants it will show the error whole
            os.write(2, f"no store: {error!r}\n".encode())
            os._exit(_NO_STORE)
        except BaseException as error:
            os.write(2, f"the store ended: {error!r}\n".encode())
        os._exit(1)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._store:
                self._store = None
                if self._stopping is None and os.waitstatus_to_exitcode(status) != _NO_STORE:
                    self._tell({"t": "store", "status": status})
            elif pid in self._live:
                self._read_reports()  # what the worker said before it ended comes before its end
                self._tell(
                    {
                        "t": "exit",
                        "local_rank": self._live.pop(pid),
                        "status": status,
                        "monotonic": time.monotonic(),
                    }
                )

    def _read_reports(self) -> None:
        try:
            while chunk := os.read(self._report_read, 65536):
                self._reports += chunk
        except BlockingIOError:
            pass
        *lines, self._reports = self._reports.split(b"\n")
        for line in lines:
            try:
                report = json.loads(line)
                question = sightings.wanted(report)
                if question is not None:
                    self._tell(question)
                    continue
                local_rank, moment = (
                    int(report["local_rank"]),
                    min(float(report["monotonic"]), time.monotonic()),
                )
                if local_rank in self._live.values():
                    self._tell(
                        {
                            "t": "failing",
                            "local_rank": local_rank,
                            "monotonic": moment,
                            "message": str(report["message"])[:4096],
                            "exit_code": int(report["exit_code"]),
                        }
                    )
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # the pipe is open to the user's code, which may write anything

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _begin_stop(self, grace: float, number: int = signal.SIGTERM) -> None:
        if (
            self._warning is not None
        ):  # before the signal: a worker that takes a scheduler's SIGTERM for a warning sees whose this is
            self._warning.close()
            self._warning = None
        due = time.monotonic() + grace
        self._stopping = due if self._stopping is None else min(due, self._stopping)
        tell_all = (
            number == signal.SIGINT and not self._options.program.is_python
        )  # as a terminal does: a shell passes no signal on
        below = [child for pid in self._live if tell_all for child in processes.descendants(pid)]
        self._signal([*self._live, *below], number)

    def _pursue_stop(self) -> None:
        if self._stopping is None:
            return
        moment = time.monotonic()
        if self._live:
            if moment >= self._stopping:
                self._signal(processes.descendants(os.getpid()), signal.SIGKILL)
            return
        if self._empty_since is None:
            self._empty_since = moment
        if self._store is not None:
            processes.send_signal(self._store, signal.SIGKILL)
            return  # until it is reaped
        leftovers = processes.descendants(os.getpid())
        if leftovers:
            if moment >= self._empty_since + _LEFTOVER_KILL:
                self._signal(leftovers, signal.SIGKILL)
            elif moment >= self._empty_since + _LEFTOVER_TERM and not self._asked_leftovers:
                self._asked_leftovers = True
                self._signal(leftovers, signal.SIGTERM)
            return
        self._stopping = self._empty_since = None
        self._asked_leftovers = False
        self._tell({"t": "gone"})

    @staticmethod
    def _signal(pids: list[int], with_signal: int) -> None:
        for pid in pids:
            processes.send_signal(pid, with_signal)

    def _end_agents_group(self) -> None:
        """Kill what the setup lines of a dead agent left in the background; a group that it did not
        lead is somebody else's.
        """
        if self._agents_group == self._agent_pid:
            try:
                os.killpg(self._agents_group, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            pass  # the agent is gone; the end of its socket says so too

    def _record_end(self) -> None:
        why = f"the agent of node {self._node_rank} on {network.own_name()} (pid {self._agent_pid}) was killed"
        try:
            if all(
                end["node_rank"] != self._node_rank
                for end in ends.written(self._job_dir, self._attempt)
            ):
                end = {
                    "state": str(JobState.LOST),
                    "reason": why,
                    "attempt": self._attempt,
                    "time": now(),
                }
                ends.write(self._job_dir, self._node_rank, end=end)
        except OSError:
            pass


def world_message(world: World, variables: dict[str, str]) -> bytes:
    """Return the message that starts one round of workers."""
    return json.dumps({"t": "start", "world": asdict(world), "variables": variables}).encode()
