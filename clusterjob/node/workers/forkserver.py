"""The forkserver: the process of a node that starts, reaps and stops the workers.

The agent forks it before the agent has threads. The forkserver imports torch if the workers can be
forked, and forks them. It adopts the processes that a worker leaves behind, so that they end with
the job. If the agent dies, the forkserver stops all workers, writes the end of the node into the
job directory and exits. If the forkserver is killed, the kernel kills the workers.

The messages are in `forkserver_messages`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterjob.node import contract, preflight, program
from clusterjob.node.contract import World
from clusterjob.node.environments import slurm_env, this_node, worker_variables
from clusterjob.node.job_processes import TABLE
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.stacks import collect, grouping, offer
from clusterjob.node.stacks.collect import StackRequest, catches
from clusterjob.node.system import processes
from clusterjob.node.system.shared_note import SharedNote
from clusterjob.node.verdict import FailureKind
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers import output_drain, preload, snapshot_imports, worker_process
from clusterjob.node.workers.worker_process import RunningWorker, WorkerStart

# Processes that workers leave behind get SIGTERM, then SIGKILL. In between, multiprocessing's
# resource tracker frees the shared memory. It ignores SIGTERM and waits until the last process that
# holds its pipe, such as a DataLoader worker, has ended.
_LEFTOVER_TERM = 0.1
_LEFTOVER_KILL = 0.5
# Seconds for a worker to begin its handler of SIGTERM after a failure, or to end after it.
_EARLY_KILL = 1.0
_ORPHANED_GRACE = 0.5  # seconds between SIGTERM and SIGKILL when the agent is gone
_SWEEP_INTERVAL = 0.02
_LEASE_INTERVAL, _LEASE_MARGIN = 0.5, 1.0
# Limits of a stack that is sent to the agent; the worker's log has all of it.
_MAX_LINES, _MAX_LINE = 40, 300


class WarningPipe:
    """The pipe that signals a preemption warning to the workers of a round.

    No process reads from it. Any number of processes can query its state at any time with poll(2),
    also children of workers and processes that start late:

        empty     no warning
        a byte    a preemption is near: save, then exit
        EOF       the workers are being stopped, or their forkserver has ended: SIGTERM now means
                  stop

    Attributes:
        write_end: the write end; a worker must close it, and inherits the read end.
        name: identifies the read end for a worker: its number and its inode. The inode is needed
            because a process that inherits only the variable may have another file at that number.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_inheritable(self._read_end, True)
        self.name = f"{self._read_end}:{os.fstat(self._read_end).st_ino}"

    def warn(self) -> None:
        """Signal the preemption warning to the workers."""
        with contextlib.suppress(BlockingIOError):  # many warnings
            os.write(self.write_end, b"!")

    def close(self) -> None:
        """Signal to the workers that they are being stopped now."""
        os.close(self.write_end)
        os.close(self._read_end)


@dataclass
class _Probe:
    """A probe of workers that other ranks wait for; after `end` it needs no more answers."""

    message: messages.ProbeWorkers
    asked: list[tuple[RunningWorker, StackRequest]]
    end: float


@dataclass
class _Stop:
    """A stop of all workers in progress.

    Attributes:
        begun, kill_at: the times of the first signal and of SIGKILL.
        early: whether a worker that saves nothing is killed before that time.
        empty_since: when the last worker ended.
        terminated: whether what the workers left behind got SIGTERM.
        stacks: of workers whose handler of SIGTERM has ended, by pid.
    """

    begun: float
    kill_at: float
    early: bool
    empty_since: float | None = None
    terminated: bool = False
    stacks: dict[int, StackRequest] = field(default_factory=dict)


class Forkserver:
    """Serve the agent in the forked process until the agent sends quit or dies.

    Args:
        control: this process's end of the socket pair.
        options: the node's options.
        job_dir: the directory for logs and for this node's end record.
        job_id: the job's id.
        attempt: the number of the job's attempt, from 0.
        node_rank: the number of this node.
        stdin: the descriptor that becomes the first worker's stdin; None for an empty stdin. The
            stdin of all other workers is empty.
        agent_parent: the pid of the process that starts the agent again; None without one.
        lease: until when the workers may run without a sign of the agent; None for ever.
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
        agent_parent: int | None = None,
        lease: SharedNote | None = None,
    ) -> None:
        self._lease = lease
        self._checked_at, self._over = time.monotonic(), 0.0  # seconds since the lease is over
        self._control = control
        self._options = options
        self._job_dir = job_dir
        self._job_id = job_id
        self._attempt = attempt
        self._node_rank = node_rank
        self._stdin = stdin
        self._agent_pid = os.getppid()
        self._agent_parent = agent_parent
        self._fork = False
        self._running: dict[int, RunningWorker] = {}  # by pid
        self._table: int | None = None  # see `_write_table`
        self._source = b""
        self._store: int | None = None
        # pipes of the workers' output, and the files
        self._streams: list[tuple[tuple[int, ...], Path]] = []
        self._probe: _Probe | None = None
        self._stop: _Stop | None = None
        # The state of the SIGTERM handlers in Python, and since when, by local rank.
        self._sigterm: dict[int, tuple[str, float]] = {}
        # The pipe of this round's workers; None if the job cannot be preempted.
        self._warning: WarningPipe | None = None
        self._warned = False
        self._agent_gone = False
        self._quit = False

    def serve(self) -> Program | None:
        """Serve the agent until the end.

        Returns:
            None in the forkserver. In a forked worker: the program that this process must run.
        """
        # A scheduler may signal every process of a job; only the agent decides on a signal. A
        # worker's SIGTERM to its parent is for the agent, as for torchrun; the agent acts on the
        # first one. Workers reset these handlers.
        signal.signal(signal.SIGTERM, self._pass_on)
        if self._options.warning is not None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        # During the import this process does not read the control socket. If the agent dies, the
        # kernel kills this process.
        processes.die_with_parent(self._agent_pid, signal.SIGKILL)
        processes.adopt_orphans()
        self._agent_group = os.getpgid(0)
        # Leave the agent's process group, so that only the agent receives Ctrl-C. If a worker reads
        # the terminal, leave its session too: in that session the kernel would stop a background
        # process that reads (SIGTTIN).
        if self._stdin is not None and os.isatty(self._stdin):
            os.setsid()
        else:
            os.setpgid(0, 0)
        self._drain_pid, self._drain = output_drain.start()
        why = self._preload_torch()
        options = self._options
        is_python = options.program.is_python
        self._no_gpus = preload.missing_gpus(options.require_gpus or 0, is_python=is_python)
        self._hook = worker_process.write_hook(self._job_dir, os.environ)
        self._open()
        self._send(messages.Ready(why, drain=self._drain_pid))
        while not (self._quit and self._stop is None):
            for key, _ in self._selector.select(self._select_timeout()):
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                elif key.fd == self._reports.read_end:
                    self._read_reports()
                elif (found := self._handle_message()) is not None:
                    return found
            self._reap()
            self._check_lease()
            self._continue_stop()
            self._continue_probe()
        self._drain.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._drain_pid, 0)
        if self._agent_gone:
            self._end_node()
        return None

    def _pass_on(self, number: int, _frame: object) -> None:
        if os.getppid() == self._agent_pid:  # not in a child, and the agent lives
            processes.send_signal(self._agent_pid, number)

    def _preload_torch(self) -> str | None:
        options = self._options
        if options.launcher == "torchrun" or options.start == "exec":
            return None
        if not options.program.is_python:
            return "a command, not a Python program" if options.start == "fork" else None
        if options.program.on_stdin:
            return "the script is on standard input"
        self._source = source = options.program.source()
        why = None
        file = options.program.file
        if (b"\0" in source and file.suffix != ".py") or (
            options.program.kind == "script" and file.is_dir()
        ):
            return "not a Python source file"  # a zipapp, a .pyc, a directory with __main__.py
        if options.start == "auto":
            why = preload.changed_variable(source, file)
        if why is None:
            why = preload.preload_torch(training=preload.trains(source))
        self._fork = why is None
        return why

    def _open(self) -> None:
        signal.set_wakeup_fd(-1)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._reports = messages.ReportPipe()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Not epoll: its descriptor would be shared with every forked worker.
        self._selector = selectors.PollSelector()
        for descriptor in (self._control.fileno(), self._wake_read, self._reports.read_end):
            self._selector.register(descriptor, selectors.EVENT_READ)
        # Replace SIGKILL by SIGTERM, which then has no effect. From here on, EOF on the control
        # socket reports the agent's death, and this process lives on to stop the workers.
        processes.die_with_parent(self._agent_pid, signal.SIGTERM)

    def _select_timeout(self) -> float | None:
        if self._probe is not None:
            return collect.POLL_SECONDS
        if self._stop is not None:
            return _SWEEP_INTERVAL
        return None if self._lease is None else _LEASE_INTERVAL

    def _handle_message(self) -> Program | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, messages.MESSAGE_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._agent_gone = self._quit = True
            self._selector.unregister(self._control.fileno())
            self._begin_stop(_ORPHANED_GRACE)
            return None
        message = messages.FROM_AGENT.decode(json.loads(data))
        match message:
            case messages.StartRound():
                return self._start(message.world, message.variables, descriptors)
            case messages.StartMeasuring():
                preflight.start(
                    descriptors[0],
                    log_files.node_directory(self._job_dir, self._node_rank),
                    message.variables,
                    close=self._own_descriptors(),
                    fork=self._fork or "torch" not in sys.modules,
                )
            case messages.WarnWorkers():
                self._warned = True
                if self._warning is not None:
                    self._warning.warn()
                if self._options.warn_signal:
                    self._signal(
                        [*self._running], processes.signal_number(self._options.warn_signal)
                    )
            case messages.ProbeWorkers():
                self._begin_probe(message)
            case messages.ReportEnds():
                self._reap()
                self._send(messages.EndsReported())
            case messages.StopWorkers():
                self._begin_stop(message.grace, message.signal, early=message.early)
            case messages.Quit():
                self._quit = True
                self._begin_stop(0.0)
        return None

    def _own_descriptors(self) -> list[int]:
        """Return the descriptors that a forked process must close."""
        own = [self._control.fileno(), self._wake_read, self._wake_write, self._drain.fileno()]
        return own if self._warning is None else [*own, self._warning.write_end]

    # -- starting ----------------------------------------------------------------------------------

    def _start(
        self, world: World, variables: dict[str, str], descriptors: list[int]
    ) -> Program | None:
        self._sigterm.clear()
        self._drop_probe()
        if self._table is not None:  # the workers must not inherit it
            os.close(self._table)
            self._table = None
        directory = log_files.node_directory(self._job_dir, self._node_rank)
        if descriptors:
            close = [*self._own_descriptors(), *self._reports.ends]
            self._store = worker_process.start_store(
                world, descriptors[0], log=directory / STORE_LOG, close=close
            )
        variables |= self._hook
        if self._options.warning is not None:
            self._warning = WarningPipe()
            if self._warned:
                self._warning.warn()
            variables[contract.WARNING_FD] = self._warning.name
        starts = self._starts(world, variables, directory=directory)
        if self._fork:
            snapshot_imports.install(os.environ)
            program.read_ahead(self._options.program, self._source)
            self._source = b""  # it may change before the next round
        error = self._no_gpus
        for start in starts:
            try:
                pid = -1 if error else self._fork_worker(start)
            except OSError as failed:
                error = f"cannot start a worker: {failed}"
            if error:
                kind, now = FailureKind.LAUNCH.value, time.monotonic()
                self._send(
                    messages.WorkerFailing(start.local_rank, now, error, 1, kind, started=False)
                )
                return None
            if pid == 0:
                # The worker has closed these descriptors; the program may reuse their numbers.
                self._control.detach()
                self._drain.detach()
                return self._options.program
            self._running[pid] = RunningWorker(
                pid, start.local_rank, started=time.monotonic(), err=start.err
            )
        self._write_table(world, starts)
        return None

    def _fork_worker(self, start: WorkerStart) -> int:
        """Return the pid of a new worker; in the worker, 0."""
        pid, writers = -1, list[int]()
        try:
            writers += [self._open_stream(start.out)]
            writers += [self._open_stream(start.err)]
            pid = worker_process.start(
                start,
                self._reports.ends,
                streams=(writers[0], writers[1]),
                close=[
                    *self._own_descriptors(),
                    *(end for pipes, _ in self._streams for end in pipes),
                ],
                stdin=self._stdin,
                is_script=self._options.program.on_stdin,
            )
        finally:
            if pid != 0:
                for writer in writers:
                    os.close(writer)
        return pid

    def _write_table(self, world: World, starts: list[WorkerStart]) -> None:
        """Show the environment of each worker to `clusterjob exec`, if that is possible.

        A forked worker's /proc/PID/environ is that of the forkserver's exec. So the forkserver
        keeps the environments in an anonymous file. Only the user's own processes can open it,
        through /proc/PID/fd, and nothing is on a disk. Without RANK, torchrun starts the workers.
        """
        pids = {worker.local_rank: worker.pid for worker in self._running.values()}
        table = {
            "node_rank": self._node_rank,
            "attempt": self._attempt,
            "first_rank": world.first_rank,
            "nproc": world.nproc,
            "world_size": world.world_size,
            "environ": dict(os.environ),
            "workers": [
                {
                    "rank": int(start.variables["RANK"]) if "RANK" in start.variables else None,
                    "pid": pids[start.local_rank],
                    "variables": start.variables,
                }
                for start in starts
            ],
        }
        with contextlib.suppress(OSError):  # such as too many open files
            self._table = offer.anonymous_file(TABLE)
            with open(self._table, "wb", closefd=False) as stream:
                stream.write(json.dumps(table).encode())

    def _open_stream(self, path: Path) -> int:
        """Return a descriptor; what a worker writes to it is written into a file."""
        pipes, write_end = output_drain.open_stream()
        self._streams.append((pipes, path))
        output_drain.add(self._drain, pipes, path)
        return write_end

    def _starts(
        self, world: World, variables: dict[str, str], directory: Path
    ) -> list[WorkerStart]:
        is_torchrun = self._options.launcher == "torchrun"
        files = log_files.round_files(directory, world, attempt=self._attempt, torchrun=is_torchrun)
        if is_torchrun:
            argv = worker_process.torchrun_command(
                self._options.program, world, job_id=self._job_id
            )
            return [WorkerStart(0, variables, argv, *files[0])]
        command = None if self._fork else self._options.program.argv(sys.executable)
        return [
            WorkerStart(
                local_rank,
                variables
                | contract.worker_variables(
                    world, local_rank, job_id=self._job_id, max_restarts=self._options.max_restarts
                )
                | worker_variables.paddle_variables(world, local_rank)
                | slurm_env.worker_variables(world, local_rank, os.environ),
                command,
                *files[local_rank],
            )
            for local_rank in range(world.nproc)
        ]

    # -- watching ----------------------------------------------------------------------------------

    def _reap(self) -> None:
        ended = list(processes.ended_children())
        if any(pid in self._running for pid, _ in ended):
            output_drain.flush(self._drain)  # the agent reads the output of an ended worker
        for pid, status in ended:
            if pid == self._drain_pid:
                self._drain_pid, self._drain = output_drain.start()
                for pipes, path in self._streams:
                    with contextlib.suppress(OSError):
                        output_drain.add(self._drain, pipes, path)
            elif pid == self._store:
                self._store = None
                if self._stop is None and (
                    os.waitstatus_to_exitcode(status) != worker_process.NO_TORCH
                ):
                    self._send(messages.StoreExited(status))
            elif pid in self._running:
                self._read_reports()  # a worker's report must be sent before its exit
                local_rank = self._running.pop(pid).local_rank
                self._send(messages.WorkerExited(local_rank, status, time.monotonic()))

    def _read_reports(self) -> None:
        local_ranks = {worker.local_rank for worker in self._running.values()}
        reports = [*self._reports.read()]
        if any(isinstance(message, messages.WorkerFailing) for message in reports):
            output_drain.flush(self._drain)  # the agent looks for a traceback in the output
        for message in reports:
            # Of torchrun's workers, only these messages arrive here.
            ours = (messages.WorkerPhase, messages.WorkerWaits, messages.WorkerAlive)
            if isinstance(message, messages.WorkerHandler):
                self._sigterm[message.local_rank] = (message.state, time.monotonic())
            elif message.local_rank in local_ranks or isinstance(message, ours):
                self._send(message)

    def _check_lease(self) -> None:
        """Kill the workers of a frozen agent: the job may go on without this node.

        After a pause of the whole machine, the agent has a second to renew its lease.
        """
        moment, checked_at = time.monotonic(), self._checked_at
        self._checked_at = moment
        if self._lease is None or not self._running or self._stop is not None:
            return
        if moment <= self._lease.read().get("until", moment):
            self._over = 0.0
            return
        self._over += min(moment - checked_at, 2 * _LEASE_INTERVAL)
        if self._over > _LEASE_MARGIN:
            self._begin_stop(0.0, signal.SIGKILL)

    # -- probing -----------------------------------------------------------------------------------

    def _begin_probe(self, message: messages.ProbeWorkers) -> None:
        self._drop_probe()
        asked = [
            (worker, StackRequest(worker.pid))
            for worker in self._running.values()
            if worker.local_rank in message.local_ranks
        ]
        self._probe = _Probe(message, asked, end=time.monotonic() + collect.ANSWER_SECONDS)

    def _drop_probe(self) -> None:
        for _, asked in self._probe.asked if self._probe is not None else ():
            asked.close()
        self._probe = None

    def _continue_probe(self) -> None:
        if self._probe is None:
            return
        message, asked = self._probe.message, self._probe.asked
        for _, each in asked:
            each.step()
        if time.monotonic() < self._probe.end and not all(each.done for _, each in asked):
            return
        self._probe = None
        found = tuple(self._describe(worker, each, message) for worker, each in asked)
        if not message.note:
            self._send(messages.WorkersProbed(message.final, found))

    def _describe(
        self, worker: RunningWorker, asked: StackRequest, message: messages.ProbeWorkers
    ) -> messages.ProbedWorker:
        threads = tuple(asked.answer().values())
        frames = threads[0].frames if threads else ()
        shown = tuple(grouping.frame_line(frame)[:_MAX_LINE] for frame in frames[:_MAX_LINES])
        doing = grouping.position_text(frames) if frames else f"it {collect.state_of(worker.pid)}"
        if message.note:
            log_files.append(worker.err, [f"{message.note}; {doing}", *shown])
        if any(
            frame.function == "init" and frame.file.endswith("bootstrap.py") for frame in frames
        ):
            how = "is inside bootstrap.init()"
        elif frames or not (asked.offered or self._fork):
            how = "has not reached bootstrap.init()"
        else:  # a forked worker offers its stack before it runs the program
            how = "has not joined the rendezvous"
        text = f"has run for {time.monotonic() - worker.started:.0f} s and {how}; {doing}"
        if message.final and threads:
            lines = [f"the others gave up waiting for this process, which {text}"]
            log_files.append(worker.err, lines + grouping.to_lines(threads))
        return messages.ProbedWorker(worker.local_rank, worker.pid, text=text[:1000], stack=shown)

    # -- stopping ----------------------------------------------------------------------------------

    def _begin_stop(
        self, grace: float, number: int = signal.SIGTERM, *, early: bool = False
    ) -> None:
        if self._warning is not None:
            # The pipe is closed before the signal is sent. EOF tells the worker that this SIGTERM
            # means stop; a scheduler's SIGTERM may be a warning.
            self._warning.close()
            self._warning = None
        moment = time.monotonic()
        if self._stop is not None:  # a handler must not run twice
            self._stop.early |= early
            self._stop.kill_at = min(moment + grace, self._stop.kill_at)
            return
        self._stop = _Stop(moment, moment + grace, early=early)
        # Send SIGINT to a command's child processes too, as Ctrl-C in a terminal does: a shell
        # would not forward it.
        below = []
        if number == signal.SIGINT and not self._options.program.is_python:
            below = [child for pid in self._running for child in processes.descendants(pid)]
        self._signal([*self._running, *below], number)

    def _continue_stop(self) -> None:
        stop, moment = self._stop, time.monotonic()
        if stop is None:
            return
        if self._running:
            if moment >= stop.kill_at:
                self._signal(self._below(), signal.SIGKILL)
            elif stop.early:
                workers = self._running.values()
                idle = [worker.pid for worker in workers if self._is_idle(worker, stop)]
                self._signal(idle, signal.SIGKILL)
            return
        if stop.empty_since is None:
            stop.empty_since = moment
        if self._store is not None:
            processes.send_signal(self._store, signal.SIGKILL)
            return  # continue after the store is reaped
        leftovers = self._below()
        if leftovers:
            if moment >= stop.empty_since + _LEFTOVER_KILL:
                self._signal(leftovers, signal.SIGKILL)
            elif moment >= stop.empty_since + _LEFTOVER_TERM and not stop.terminated:
                stop.terminated = True
                self._signal(leftovers, signal.SIGTERM)
            return
        for asked in stop.stacks.values():
            asked.close()
        self._stop = None
        output_drain.flush(self._drain)
        for end in (end for pipes, _ in self._streams for end in pipes):
            os.close(end)
        self._streams.clear()
        self._send(messages.WorkersGone())

    def _below(self) -> list[int]:
        """Return the processes that the workers started, and the workers."""
        return [pid for pid in processes.descendants(os.getpid()) if pid != self._drain_pid]

    def _is_idle(self, worker: RunningWorker, stop: _Stop) -> bool:
        """Return whether a worker that got SIGTERM saves nothing, by its handler of SIGTERM."""
        state, since = self._sigterm.get(worker.local_rank, ("", 0.0))
        if time.monotonic() < max(since, stop.begun) + _EARLY_KILL or state == "begun":
            return False
        if self._options.launcher == "torchrun" or state not in ("set", "ended"):
            return not catches(worker.pid, signal.SIGTERM)
        if state == "set":  # stuck in native code
            return True
        if worker.pid not in stop.stacks:
            stop.stacks[worker.pid] = StackRequest(worker.pid)
        asked = stop.stacks[worker.pid]
        if not asked.done:
            asked.step()
            return False
        main = next(iter(stop.stacks.pop(worker.pid).answer().values()), None)
        return main is not None and grouping.waits_for_peers(main.frames)

    @staticmethod
    def _signal(pids: list[int], with_signal: int) -> None:
        for pid in pids:
            processes.send_signal(pid, with_signal)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the agent has ended; the loop also sees EOF
            self._control.send(messages.FROM_FORKSERVER.encode_json(message))

    def _end_node(self) -> None:
        """Record the loss of the agent, unless its parent starts it again."""
        parent = self._agent_parent
        if parent is not None and processes.start_ticks(parent) is not None:
            return
        if self._agent_group == (parent or self._agent_pid):
            # The agent, or its parent, leads the group: kill the background processes of its setup
            # lines.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent_group, signal.SIGKILL)
        ends.write_lost(
            self._job_dir,
            self._node_rank,
            self._attempt,
            f"the agent of node {self._node_rank} on {this_node.node_name()}"
            f" (pid {self._agent_pid}) was killed",
        )
