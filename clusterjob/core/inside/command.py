"""Run a command, or a shell, inside a running job, and carry its streams until its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from clusterjob.backends.base import Executor
from clusterjob.core import job_parts
from clusterjob.core.inside import connection
from clusterjob.core.inside.connection import InsideConnection
from clusterjob.core.inside.local_end import Signals, Terminal, has_terminal
from clusterjob.core.records import Record
from clusterjob.errors import ClusterJobError, InsideError, UsageError
from clusterjob.node.inside import streams
from clusterjob.node.inside.streams import STDERR, STDIN, STDOUT, Stream

_TICK = 1.0  # seconds between two checks of the connection
_AT_ONCE = 32  # nodes that are entered at the same time


def run(
    record: Record,
    argv: Sequence[str],
    *,
    node: int | None,
    rank: int | None,
    terminal: bool,
    warn: Callable[[str], None],
) -> int:
    """Run a command beside a worker on this process's stdin, stdout and stderr.

    Args:
        record: the job.
        argv: the command line; empty for an interactive shell, which needs a terminal.
        node: the node; None for the node of `rank`, or node 0.
        rank: the worker; None for the first of the node.
        terminal: whether the command gets a terminal, if this process has one.
        warn: shows one line to the user.

    Returns:
        The command's exit code; 128 + N if signal N ended it.

    Raises:
        UsageError: the job has no such node or rank, or a shell has no terminal.
        InsideError: the job does not run, or the connection broke.
        ClusterJobError: stdout cannot be written, for example because the disk is full.
    """
    backend = connection.check(record, node, rank)
    if not argv and not has_terminal():
        raise UsageError(
            "a shell needs a terminal as stdin and stdout",
            f"`clusterjob exec {record.job_id} -- COMMAND` needs none",
        )
    terminal = terminal and has_terminal()
    own = Terminal()
    request = {
        "argv": list(argv),
        "stdin": True,
        "terminal": [*own.size(), os.environ.get("TERM", "")] if terminal else None,
    }
    entered = connection.enter(record, backend, request, node=node, rank=rank)
    with contextlib.closing(entered), Signals() as signals, contextlib.ExitStack() as stack:
        _warn_of_container(entered, warn)
        output = Stream(STDOUT, sink=STDOUT)
        for stream in (
            Stream(STDIN, source=STDIN),
            output,
            Stream(STDERR, sink=STDERR),
        ):
            entered.streams.add(stream)
        if terminal:
            stack.enter_context(own)
            entered.streams.tell({"size": own.size()})
        _carry([entered], signals, own if terminal else None)
        if output.error is not None and output.error.errno != errno.EPIPE:
            raise ClusterJobError(f"{output.error.strerror}: standard output")
        return _exit_code(entered, signals)


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
    backend = connection.check(record)
    request = {"argv": list(argv), "stdin": False, "terminal": None}
    nodes = job_parts.nodes_with_workers(record)
    codes = dict.fromkeys(nodes, InsideError.exit_code)
    with contextlib.ExitStack() as stack:
        runs = []
        for future in _enter_all(record, backend, request, nodes):
            try:
                entered = future.result()
            except ClusterJobError as error:
                warn(error.message)
                continue
            stack.callback(entered.close)
            for number in (STDOUT, STDERR):
                entered.streams.add(_shown(entered.node, number, show))
            runs.append(entered)
        for entered in runs[:1]:
            _warn_of_container(entered, warn)
        signals = stack.enter_context(Signals())
        _carry(runs, signals, None, warn=warn)
        for entered in runs:
            for number in (STDOUT, STDERR):
                show(entered.node, number, b"")
            try:
                codes[entered.node] = _exit_code(entered, signals)
            except InsideError as error:
                warn(error.message)
    return next((code for code in codes.values() if code), 0)


def _enter_all(
    record: Record, backend: Executor, request: Mapping[str, Any], nodes: Sequence[int]
) -> list[Future[InsideConnection]]:
    """Enter these nodes in daemon threads: Ctrl-C does not wait for a node that does not answer."""
    limit = threading.Semaphore(_AT_ONCE)

    def enter(node: int, future: Future[InsideConnection]) -> None:
        with limit:
            try:
                future.set_result(connection.enter(record, backend, request, node=node))
            except BaseException as error:
                future.set_exception(error)

    futures: list[Future[InsideConnection]] = [Future() for _ in nodes]
    for started in zip(nodes, futures, strict=True):
        threading.Thread(target=enter, args=started, daemon=True).start()
    return futures


def _shown(node: int, number: int, show: Callable[[int, int, bytes], None]) -> Stream:
    return Stream(number, sink=lambda data: show(node, number, data))


def _warn_of_container(entered: InsideConnection, warn: Callable[[str], None]) -> None:
    if entered.outside:
        warn(f"the container of node {entered.node} cannot be entered: this runs outside of it")


def _exit_code(entered: InsideConnection, signals: Signals) -> int:
    if not entered.ended and signals.last:
        return 128 + signals.last
    return entered.exit_code()


def _carry(
    runs: Sequence[InsideConnection],
    signals: Signals,
    terminal: Terminal | None,
    warn: Callable[[str], None] | None = None,
) -> None:
    """Carry the streams until every command has ended, and forward this process's signals.

    Raises:
        InsideError: a connection broke, and there is no `warn`.
    """
    left = list(runs)
    while left and not signals.abort:
        ready = streams.wait_for_any(
            [entered.streams for entered in left], [signals.descriptor], _TICK
        )
        for number in signals.read() if signals.descriptor in ready else ():
            for entered in left:
                if number != signal.SIGWINCH:
                    entered.streams.tell({"signal": number})
                elif terminal is not None:
                    entered.streams.tell({"size": terminal.size()})
        for entered in list(left):
            try:
                entered.handle(ready)
            except InsideError as error:
                if warn is None:
                    raise
                warn(error.message)
                left.remove(entered)
                continue
            if entered.finished:
                left.remove(entered)
