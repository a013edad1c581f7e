"""Run commands, shells and requests for stacks inside a running job.

The backend gives a command line, which runs `clusterjob.node.inside` beside a worker; its stdin,
stdout and stderr are those of the process that is started here.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clusterjob.backends import base
from clusterjob.core import job_parts, polling
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, UsageError
from clusterjob.node.verdict import JobState
from clusterjob.remote.pool import for_each

_AT_ONCE = 32  # nodes that run a command at the same time
_AT_ONCE_BEHIND_LOGIN = 8  # sshd of a login host allows 10 commands on a connection (MaxSessions)


def run(
    record: Record, argv: Sequence[str], *, node: int | None, rank: int | None, terminal: bool
) -> int:
    """Run a command beside a worker on this process's stdin, stdout and stderr.

    Args:
        record: the job.
        argv: the command line; empty for an interactive shell, which needs a terminal.
        node: the node; None for the node of `rank`, or node 0.
        rank: the worker; None for the first of the node.
        terminal: whether the command gets a terminal, if this process has one.

    Returns:
        The command's exit code; 128 + N if signal N ended it. 255 if the job or the connection
        ended, which a line on stderr says.

    Raises:
        UsageError: the job has no such node or rank, or a shell has no terminal.
        InsideError: the job does not run, or cannot be reached.
    """
    backend = check(record, node, rank)
    has_terminal = os.isatty(0) and os.isatty(1)
    if not argv and not has_terminal:
        raise UsageError(
            "a shell needs a terminal as stdin and stdout",
            f"`clusterjob exec {record.job_id} -- COMMAND` needs none",
        )
    where = node_of(record, node, rank)
    request = {"rank": rank, "argv": list(argv)}
    if any(map(os.isatty, (0, 1, 2))):  # the command gets the signals of keys too
        for number in (signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of a background job
                signal.signal(number, lambda *_: None)  # the command would inherit SIG_IGN
    process = start(record, backend, where, request, terminal=terminal and has_terminal)
    return _exit_code(where, process.wait())


def run_on_all(
    record: Record,
    argv: Sequence[str],
    *,
    show: Callable[[int, int, bytes], None],
    warn: Callable[[str], None],
) -> int:
    """Run a command on every node at the same time, with an empty stdin.

    Args:
        record: the job.
        argv: the command line.
        show: called with the node, the stream and its bytes; with no bytes at the end.
        warn: shows one line to the user.

    Returns:
        The exit code of the first node, in the order of ranks, whose code is not 0; else 0.

    Raises:
        InsideError: the job does not run.
    """
    backend = check(record)
    nodes = job_parts.nodes_with_workers(record)
    one_at_a_time = threading.Lock()

    def on_node(node: int) -> int:
        process = start(
            record, backend, node, {"rank": None, "argv": list(argv)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        with process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, 1)
            selector.register(process.stderr, selectors.EVENT_READ, 2)
            while selector.get_map():
                for key, _ in selector.select():
                    data = os.read(key.fd, 1 << 16)
                    with one_at_a_time:
                        show(node, key.data, data)
                    if not data:
                        selector.unregister(key.fileobj)
        return _exit_code(node, process.returncode)

    def code_of(node: int) -> int:
        try:
            return on_node(node)
        except ClusterJobError as error:
            warn(error.message)
            return error.exit_code

    codes = for_each(nodes, code_of, at_once=at_once(record)).results
    return next((codes[node] for node in nodes if codes[node]), 0)


def at_once(record: Record) -> int:
    """Return the number of programs that may run in a job at the same time."""
    return _AT_ONCE_BEHIND_LOGIN if record.job.login else _AT_ONCE


def start(
    record: Record,
    backend: base.Executor,
    node: int,
    request: Mapping[str, Any],
    *,
    terminal: bool = False,
    **streams: Any,
) -> subprocess.Popen[bytes]:
    """Start `clusterjob.node.inside` beside a worker; it ends with this process.

    Args:
        record: the job.
        backend: the result of `check`.
        node: the worker's node.
        request: the worker's ``rank`` and what the program does; see `clusterjob.node.inside.main`.
        terminal: whether the program gets the terminal of this process.
        streams: stdin, stdout and stderr, as of `subprocess.Popen`; by default those of this one.

    Raises:
        InsideError: the node cannot be reached.
    """
    request = {"job": record.job_id, "node": node, **request}
    try:
        argv, environ = backend.command(record, node, request, terminal=terminal)
    except InsideError:
        raise
    except ClusterJobError as error:
        raise InsideError(error.message, error.hint) from error
    try:
        return subprocess.Popen(argv, env=environ, **streams)
    except OSError as error:
        raise InsideError(f"{argv[0]} cannot be run: {error.strerror}") from error


def executor(record: Record, node: int | None = None, rank: int | None = None) -> base.Executor:
    """Return the backend of a job, if it can run commands inside its jobs.

    Raises:
        UsageError: the job is an array, has no such node, or its backend has no such feature.
    """
    job_parts.check_single(record, "workers")
    job_parts.check_nodes(record, None if node is None else [node])
    job_parts.check_ranks(record, None if rank is None else [rank], job_parts.world_size(record))
    backend = base.instance(record.backend)
    if not isinstance(backend, base.Executor):
        raise UsageError(
            f"the {record.backend} backend cannot run commands inside a job",
            f"`clusterjob logs {record.job_id}` shows the job's output",
        )
    return backend


def check(record: Record, node: int | None = None, rank: int | None = None) -> base.Executor:
    """Return the backend of a running job, if it can run commands inside its jobs.

    Raises:
        UsageError: as from `executor`.
        InsideError: the job does not run.
    """
    backend = executor(record, node, rank)
    status = polling.status(record)
    if status.state.final:
        raise InsideError(
            f"job {record.job_id} has ended: {status.state}",
            f"`clusterjob logs {record.job_id}` shows its output",
        )
    if status.state is not JobState.RUNNING:
        what = "has not started" if status.state is JobState.PENDING else "cannot be reached"
        raise InsideError(
            f"job {record.job_id} {what}{f': {status.reason}' if status.reason else ''}",
            f"`clusterjob status {record.job_id}` shows its state",
        )
    return backend


def node_of(record: Record, node: int | None, rank: int | None) -> int:
    """Return the node of a rank, or this node, or that of rank 0.

    Raises:
        UsageError: the job has no such rank, or the rank is on another node.
    """
    nodes = job_parts.nodes_of_ranks(record)
    if rank is None:
        return nodes[0] if node is None else node
    job_parts.check_ranks(record, [rank], len(nodes))
    if node not in (None, nodes[rank]):
        raise UsageError(f"rank {rank} is not on node {node}", f"it is on node {nodes[rank]}")
    return nodes[rank]


def _exit_code(node: int, code: int) -> int:
    if code < 0:  # the program returns the end of a command by a signal as 128 + N
        raise InsideError(f"node {node}: the connection broke")
    return code
