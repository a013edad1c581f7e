"""The process of a node that measures for the preflight; the forkserver starts it.

The agent must answer at once, so it does not measure itself. The forkserver has imported torch
already. The process ends when the agent closes its end of the socket pair.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from clusterjob.node.logs.job_dir import PREFLIGHT_LOG
from clusterjob.node.preflight import group_measures, host_measures
from clusterjob.node.preflight import preflight_messages as messages
from clusterjob.node.system import devices, processes

PACKET_BYTES = 1 << 16
_MAX_ERROR = 300  # characters


def start(
    control: int,
    directory: Path,
    variables: Mapping[str, str],
    close: Sequence[int],
    *,
    fork: bool,
) -> None:
    """Fork the measuring process; without it, the agent sees the end of the connection.

    Args:
        control: its end of the socket pair with the agent; it is closed in this process.
        directory: where it writes its log and a file to measure the disk.
        variables: environment variables, added to the inherited ones.
        close: descriptors of this process that the new one must not keep.
        fork: whether the forked process may measure. After an import that makes a fork unsafe, a
            new process is executed.
    """
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        pid = -1
    if pid != 0:
        os.close(control)
        return
    try:
        processes.die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in close:
            os.close(descriptor)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(directory / PREFLIGHT_LOG, flags, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.environ.update(variables)
        if fork:
            serve(control, directory)
        os.set_inheritable(control, True)
        os.execv(
            sys.executable, [sys.executable, "-m", __name__, str(control), os.fspath(directory)]
        )
    except BaseException as error:
        os.write(2, f"the measuring process failed: {error!r}\n".encode())
    os._exit(1)


def serve(control: int, directory: Path) -> NoReturn:
    """Answer the agent until it closes the connection."""
    connection = socket.socket(fileno=control)
    data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 1)
    if not data:
        os._exit(0)
    begin = messages.TO_PROCESS.decode(json.loads(data))
    # A call that never returns, such as one to a broken disk, must not outlive the preflight.
    signal.alarm(math.ceil(begin.seconds))
    threading.Thread(target=_exit_with_agent, args=(connection,), daemon=True).start()
    groups = group_measures.Groups(begin.address, begin.port)
    if descriptors and group_measures.backends():
        groups.serve(descriptors[0])
    answer: Any = messages.MeasuringStarted(
        processes.boot_id(),
        devices.visible_gpus(os.environ),
        group_measures.backends(),
        host_measures.versions(),
    )
    while True:
        connection.send(json.dumps(messages.FROM_PROCESS.encode(answer)).encode())
        data = connection.recv(PACKET_BYTES)
        if not data:
            os._exit(0)
        answer = _measure(messages.TO_PROCESS.decode(json.loads(data)), groups, directory)


def _measure(order: Any, groups: group_measures.Groups, directory: Path) -> messages.Measured:
    try:
        if isinstance(order, messages.MeasureGroup):
            values: tuple[float, ...] = groups.measure(order)
        else:
            values = host_measures.measure(order.probe, order.seconds, directory)
    except Exception as error:
        text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip()
        return messages.Measured(order.number, (), text.split("\n", 1)[0][:_MAX_ERROR])
    return messages.Measured(order.number, values)


def _exit_with_agent(connection: socket.socket) -> None:
    """End this process as soon as the agent has closed its end, also during a measure."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP needs no registration
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
