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
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from clusterjob.node import contract, program
from clusterjob.node.contract import World
from clusterjob.node.environments import slurm_env, this_node, worker_variables
from clusterjob.node.job_processes import TABLE
from clusterjob.node.logs import ends, log_files
from clusterjob.node.logs.job_dir import STORE_LOG
from clusterjob.node.options import LaunchOptions
from clusterjob.node.program import Program
from clusterjob.node.stacks import collect, grouping, offer
from clusterjob.node.states import Stop
from clusterjob.node.system import files, processes
from clusterjob.node.system.processes import SharedNote
from clusterjob.node.verdict import FailureKind
from clusterjob.node.workers import forkserver_messages as messages
from clusterjob.node.workers import hook, output_drain, preload, torch_patches

# Seconds until processes that workers leave behind get SIGTERM, and SIGKILL. In between,
# multiprocessing's resource tracker frees the shared memory. It ignores SIGTERM and waits until the
# last process that holds its pipe, such as a DataLoader worker, has ended.
_TERMINATE_LEFTOVERS, _KILL_LEFTOVERS = 0.1, 0.5
# Seconds for a worker to begin its handler of SIGTERM after a failure, or to end after it.
_EARLY_KILL = 1.0
_ORPHANED_GRACE = 0.5  # seconds between SIGTERM and SIGKILL when the agent is gone
_SWEEP_INTERVAL = 0.02
_LEASE_INTERVAL, _LEASE_MARGIN = 0.5, 1.0
_NOT_STARTED = 127  # a shell's exit code for a command that it cannot start


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
        self._running: dict[int, int] = {}  # the local rank of each worker, by pid
        self._store: int | None = None
        self._stop: Iterator[None] | None = None  # the steps of a stop of all workers
        # When each worker's handler of SIGTERM has ended, by local rank; infinity while it runs.
        self._terminating: dict[int, float] = {}
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
        # Leave the agent's session, so that only the agent receives Ctrl-C. In that session the
        # kernel would stop a background process that reads the terminal (SIGTTIN).
        os.setsid()
        self._drain_pid, self._drain = output_drain.start()
        why = self._preload_torch()
        options = self._options
        is_python = options.program.is_python
        self._no_gpus = preload.missing_gpus(options.require_gpus or 0, is_python=is_python)
        self._hook = hook.write(self._job_dir, os.environ)
        self._open()
        self._send(messages.Ready(why, drain=self._drain_pid))
        while not (self._quit and self._stop is None):
            pause = _SWEEP_INTERVAL if self._stop is not None else _LEASE_INTERVAL
            ready = {descriptor for descriptor, _ in self._poll.poll(1000 * pause)}
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            self._read_reports()
            if self._control.fileno() in ready:
                found = self._handle_message()
                if found is not None:
                    return found
            self._reap()
            self._check_lease()
            if self._stop is not None:
                next(self._stop, None)
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
        if options.start == "exec":
            return None
        if not options.program.is_python:
            return "a command, not a Python program" if options.start == "fork" else None
        source, file = options.program.source(), options.program.file
        if file.suffix != ".py":  # standard input, a zipapp, a .pyc, a directory with __main__.py
            return "not a Python source file"
        why = preload.changed_variable(source, file) if options.start == "auto" else None
        why = why or preload.preload_torch(training=preload.trains(source))
        self._fork = why is None
        return why

    def _open(self) -> None:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Every worker inherits the write end.
        self._reports, self._report_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._table = offer.anonymous_file(TABLE)  # see `_write_table`
        signal.signal(signal.SIGCHLD, lambda *_: os.write(self._wake_write, b"."))
        # Not epoll: its descriptor would be shared with every forked worker.
        self._poll = select.poll()
        for descriptor in (self._control.fileno(), self._wake_read, self._reports):
            self._poll.register(descriptor, select.POLLIN)
        # Replace SIGKILL by SIGTERM, which then has no effect. From here on, EOF on the control
        # socket reports the agent's death, and this process lives on to stop the workers.
        processes.die_with_parent(self._agent_pid, signal.SIGTERM)

    def _handle_message(self) -> Program | None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, messages.MESSAGE_BYTES, 1)
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._agent_gone = self._quit = True
            self._poll.unregister(self._control.fileno())
            self._begin_stop(_ORPHANED_GRACE)
            return None
        message = messages.FROM_AGENT.decode(json.loads(data))
        match message:
            case messages.StartRound():
                try:
                    return self._start(message.world, message.variables, descriptors)
                except OSError as failed:
                    error = self._no_gpus or f"cannot start a worker: {failed}"
                local_rank, now, kind = len(self._running), time.monotonic(), FailureKind.LAUNCH
                self._send(messages.WorkerFailing(local_rank, now, error, 1, kind, started=False))
            case messages.WarnWorkers():
                self._warned = True
                if self._warning is not None:
                    self._warning.warn()
                if self._options.warn_signal:
                    self._signal(
                        [*self._running], processes.signal_number(self._options.warn_signal)
                    )
            case messages.ReportEnds():
                self._reap()
                self._send(messages.EndsReported())
            case Stop():
                self._begin_stop(message.grace, message.signal, early=message.early)
            case messages.Quit():
                self._quit = True
                self._begin_stop(0.0)
        return None

    # -- starting ----------------------------------------------------------------------------------

    def _start(
        self, world: World, variables: dict[str, str], descriptors: list[int]
    ) -> Program | None:
        """Start the workers of a round; in a worker that this process runs, return the program.

        Raises:
            OSError: a worker cannot be started.
        """
        options = self._options
        self._terminating.clear()
        os.ftruncate(self._table, 0)
        directory = log_files.node_directory(self._job_dir, self._node_rank)
        if descriptors:
            place = (os.getpid(), world, descriptors[0], directory / STORE_LOG)
            try:
                self._store = processes.fork(lambda: self._serve_store(*place))
            finally:
                os.close(descriptors[0])
        if self._no_gpus:
            raise OSError(self._no_gpus)
        variables |= self._hook
        if options.warning is not None:
            self._warning = WarningPipe()
            if self._warned:
                self._warning.warn()
            variables[contract.WARNING_FD] = self._warning.name
        if self._fork:
            hook.import_submitted_code()
            program.read_ahead(options.program)
        argv = None if self._fork else options.program.argv(sys.executable)
        logs = log_files.round_files(directory, world, attempt=self._attempt)
        workers = [
            variables
            | contract.worker_variables(
                world, local_rank, job_id=self._job_id, max_restarts=options.max_restarts
            )
            | worker_variables.paddle_variables(world, local_rank)
            | slurm_env.worker_variables(world, local_rank, os.environ)
            for local_rank in range(world.nproc)
        ]
        for local_rank, own in enumerate(workers):
            pid = self._fork_worker(own, argv, logs=logs[local_rank], reads=local_rank == 0)
            if pid == 0:
                return options.program
            self._running[pid] = local_rank
        self._write_table(workers)
        return None

    def _fork_worker(
        self,
        variables: dict[str, str],
        argv: list[str] | None,
        logs: tuple[Path, Path],
        *,
        reads: bool,
    ) -> int:
        """Return the pid of a new worker; 0 in a worker that runs the program in this process.

        Args:
            variables: environment variables, added to the inherited ones.
            argv: the command line to exec; None if the process runs the program itself.
            logs: the files for its stdout and stderr.
            reads: whether it has the stdin of the job; the stdin of the others is empty.

        Raises:
            OSError: a process could not be created.
        """
        forkserver = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        with (
            output_drain.open_stream(self._drain, logs[0]) as out,
            output_drain.open_stream(self._drain, logs[1]) as err,
        ):
            # The child inherits the forkserver's handler of SIGTERM. A blocked SIGTERM is not lost:
            # it stays pending until the child has reset the handler.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            pid = os.fork()
            if pid == 0:
                self._become_worker(forkserver, variables, argv, streams=(out, err), reads=reads)
            else:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return pid

    def _become_worker(
        self,
        forkserver: int,
        variables: dict[str, str],
        argv: list[str] | None,
        streams: tuple[FileIO, FileIO],
        *,
        reads: bool,
    ) -> None:
        """Become a worker: execute its command line, or return to run the program.

        If that fails, report the error and exit with code 127, as a shell does.
        """
        # The pid identifies the owner of the descriptor: a child of the worker inherits the
        # variable, but not the pipe.
        report_fd, local_rank = self._report_fd, variables["LOCAL_RANK"]
        os.environ[contract.REPORT_FD] = f"{report_fd}:{local_rank}:{os.getpid()}"
        try:
            self._begin_child(forkserver)
            os.setsid()  # as under torchrun: os.killpg(0, ...) of a rank reaches no other rank
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
                signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            self._connect_stdin(reads=reads)
            for target, stream in enumerate(streams, 1):
                os.dup2(stream.fileno(), target)
            os.environ.update(variables)
            if argv is None:
                preload.refresh_after_fork()
                offer.offer()
                return
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                # Python ignores these signals, and exec keeps ignored signals ignored.
                signal.signal(number, signal.SIG_DFL)
            os.set_inheritable(report_fd, True)
            os.execvp(argv[0], argv)
        except BaseException as error:
            what = f"cannot start {argv[0]}" if argv else "cannot start"
            message = f"{what}: {getattr(error, 'strerror', None) or error}"
            with contextlib.suppress(OSError):
                os.write(2, f"clusterjob: {message}\n".encode(errors="replace"))
            torch_patches.fail(message, _NOT_STARTED, FailureKind.LAUNCH.value)
        os._exit(_NOT_STARTED)

    def _begin_child(self, forkserver: int) -> None:
        """Leave the forkserver's state behind in a process that it has forked."""
        processes.die_with_parent(forkserver)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Not by number: the program may reuse the number before Python frees the socket.
        self._control.close()
        self._drain.close()
        own = [self._wake_read, self._wake_write, self._reports, self._table]
        if self._warning is not None:
            own.append(self._warning.write_end)
        for descriptor in own:
            os.close(descriptor)

    def _connect_stdin(self, *, reads: bool) -> None:
        if self._options.program.on_stdin:
            # Opened again: each worker needs a position of its own in the script.
            own = os.open(f"/dev/fd/{self._stdin}", os.O_RDONLY)
        elif reads and self._stdin is not None:
            own = os.dup(self._stdin)
        else:
            own = os.open(os.devnull, os.O_RDONLY)
        os.dup2(own, 0)
        os.close(own)
        if self._stdin:
            os.close(self._stdin)

    def _serve_store(self, forkserver: int, world: World, listener: int, log: Path) -> None:
        """Serve torch's store until this process is killed.

        Args:
            forkserver: the pid of the parent.
            world: the round whose workers use the store.
            listener: the descriptor of the listening socket.
            log: the file for the process's output.
        """
        self._begin_child(forkserver)
        output = files.open_log(log)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        processes.raise_open_files()
        try:
            from torch.distributed import TCPStore

            # The socket was bound before any client got its port. So there is no EADDRINUSE race,
            # and early clients wait in the backlog. The store takes ownership of the descriptor.
            _store = TCPStore(
                world.master_addr,
                world.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        except ImportError as error:
            # torch is broken; a worker that imports it shows the full error, and ends the round.
            os.write(2, f"cannot start torch's store: {error!r}\n".encode())
        while True:
            signal.pause()

    def _write_table(self, workers: list[dict[str, str]]) -> None:
        """Show the environment of each worker to `clusterjob exec`.

        A forked worker's /proc/PID/environ is that of the forkserver's exec. So the forkserver
        keeps the environments in an anonymous file. Only the user's own processes can open it,
        through /proc/PID/fd, and nothing is on a disk.
        """
        table = {
            "node_rank": self._node_rank,
            "attempt": self._attempt,
            "environ": dict(os.environ),
            "workers": [
                {"rank": int(own["RANK"]), "pid": pid, "variables": own}
                for pid, own in zip(self._running, workers, strict=True)
            ],
        }
        os.write(self._table, json.dumps(table).encode())

    # -- watching ----------------------------------------------------------------------------------

    def _reap(self) -> None:
        ended = list(processes.ended_children())
        if any(pid in self._running for pid, _ in ended):
            output_drain.flush(self._drain)  # the agent reads the output of an ended worker
        for pid, status in ended:
            if pid == self._drain_pid:
                # The workers cannot write any more, and end with this process.
                os.write(2, b"clusterjob: the process that writes the output was killed\n")
                os._exit(1)
            if pid == self._store:
                self._store = None
                if self._stop is None:
                    self._send(messages.StoreExited(status))
            elif pid in self._running:
                self._read_reports()  # a worker's report must be sent before its exit
                message = messages.WorkerExited(self._running.pop(pid), status, time.monotonic())
                self._send(message)

    def _read_reports(self) -> None:
        reports = [*messages.read_reports(self._reports)]
        if any(isinstance(message, messages.WorkerFailing) for message in reports):
            output_drain.flush(self._drain)  # the agent looks for a traceback in the output
        for message in reports:
            if isinstance(message, messages.WorkerTerminating):
                moment = time.monotonic() if message.ended else math.inf
                self._terminating[message.local_rank] = moment
            elif message.local_rank in self._running.values():
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

    # -- stopping ----------------------------------------------------------------------------------

    def _begin_stop(
        self, grace: float, number: int = signal.SIGTERM, *, early: bool = False
    ) -> None:
        if self._warning is not None:
            # The pipe is closed before the signal is sent. EOF tells the worker that this SIGTERM
            # means stop; a scheduler's SIGTERM may be a warning.
            self._warning.close()
            self._warning = None
        begun = time.monotonic()
        if self._stop is None:  # a handler must not run twice
            self._kill_at, self._kills_early = begun + grace, early
            # Send SIGINT to a command's child processes too, as Ctrl-C in a terminal does: a shell
            # would not forward it.
            below = []
            if number == signal.SIGINT and not self._options.program.is_python:
                below = [child for pid in self._running for child in processes.descendants(pid)]
            self._signal([*self._running, *below], number)
            self._stop = self._stop_steps(begun)
        self._kills_early |= early
        self._kill_at = min(begun + grace, self._kill_at)

    def _stop_steps(self, begun: float) -> Iterator[None]:
        """Kill the workers when it is time, then what they left behind; a step takes 20 ms."""
        stacks: dict[int, collect.Request] = {}  # of workers whose handler of SIGTERM has ended
        while self._running:
            if time.monotonic() >= self._kill_at:
                self._signal(self._below(), signal.SIGKILL)
            elif self._kills_early and time.monotonic() > begun + _EARLY_KILL:
                idle = [pid for pid in self._running if self._saves_nothing(pid, stacks)]
                self._signal(idle, signal.SIGKILL)
            yield
        for request in stacks.values():
            request.close()
        while self._store is not None:  # until it is reaped: else its end is a failure
            processes.send_signal(self._store, signal.SIGKILL)
            yield
        empty, terminated = time.monotonic(), False
        while left := self._below():
            age = time.monotonic() - empty
            if age >= _KILL_LEFTOVERS:
                self._signal(left, signal.SIGKILL)
            elif age >= _TERMINATE_LEFTOVERS and not terminated:
                self._signal(left, signal.SIGTERM)
                terminated = True
            yield
        self._stop = None
        output_drain.flush(self._drain)
        self._send(messages.WorkersGone())

    def _below(self) -> list[int]:
        """Return the processes that the workers started, and the workers."""
        return [pid for pid in processes.descendants(os.getpid()) if pid != self._drain_pid]

    def _saves_nothing(self, pid: int, stacks: dict[int, collect.Request]) -> bool:
        """Return whether a worker that got SIGTERM a second ago saves nothing.

        Python runs a handler on the main thread, which may be stuck in native code. Only a process
        with the hook, which offers its stacks too, says that its handler has begun. A handler that
        only sets a flag does not end a worker that waits in a collective for one that has failed.
        """
        if not collect.has_signal(pid, "SigCgt", signal.SIGTERM):
            return True
        ended = self._terminating.get(self._running[pid])
        if ended is None:
            return collect.offers(pid)
        if time.monotonic() < ended + _EARLY_KILL:
            return False
        threads = next(stacks.setdefault(pid, collect.ask(pid)), ())
        if threads is None:
            return False
        del stacks[pid]
        return bool(threads) and grouping.waits_for_peers(threads[0].frames)

    @staticmethod
    def _signal(pids: list[int], with_signal: int) -> None:
        for pid in pids:
            processes.send_signal(pid, with_signal)

    def _send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the agent has ended; the loop also sees EOF
            self._control.send(messages.FROM_FORKSERVER.encode(message))

    def _end_node(self) -> None:
        """Record the loss of the agent, unless its parent starts it again."""
        parent = self._agent_parent
        if parent is not None and processes.start_ticks(parent) is not None:
            return
        if self._agent_group == (parent or self._agent_pid):
            # The agent, or its parent, leads the group: kill the background processes of its setup
            # lines.
            processes.signal_group(self._agent_group, signal.SIGKILL)
        ends.write_lost(
            self._job_dir,
            self._node_rank,
            self._attempt,
            f"the agent of node {self._node_rank} on {this_node.node_name()}"
            f" (pid {self._agent_pid}) was killed",
        )
