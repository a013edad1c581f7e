"""A host that exceeds the SSH window is disconnected, and little of its data is buffered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from paramiko_host import paramiko_host
from procs import checked_output, wait_until

from clusterjob.errors import HostError
from clusterjob.remote.paramiko_transport import ParamikoConnection, connect
from clusterjob.remote.transport import ConnectOptions


class Greedy(paramiko.ServerInterface):
    """Accept every client and answer each command with endless data, beyond the SSH window."""

    def __init__(self, stderr: bool) -> None:
        self._stderr = stderr
        self.threads: list[threading.Thread] = []

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.threads.append(threading.Thread(target=self._flood, args=(channel,)))
        self.threads[-1].start()
        return True

    def _flood(self, channel: paramiko.Channel) -> None:
        send = channel.send_stderr if self._stderr else channel.send
        with contextlib.suppress(OSError, EOFError):
            while True:
                channel.out_window_size = 1 << 40
                send(b"x" * 30000)


@pytest.fixture(params=[False, True], ids=["stdout", "stderr"])
def connection(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ParamikoConnection]:
    greedy = Greedy(request.param)
    with paramiko_host(tmp_path, greedy) as host:
        checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "user")
        made = connect(replace(host, identities=(tmp_path / "user",)), ConnectOptions(20.0))
        yield made
        made.close()
    for thread in greedy.threads:
        thread.join()


def test_host_that_ignores_ssh_window_is_disconnected(connection: ParamikoConnection) -> None:
    buffered = 0
    # The data may arrive before the reply that the command has started; `execute` then fails.
    with contextlib.suppress(HostError):
        channel = connection.execute("anything")  # its output is not read
        wait_until(lambda: not connection.alive, 60, "the end of the connection")
        buffered = len(channel.raw.in_buffer) + len(channel.raw.in_stderr_buffer)
    wait_until(lambda: not connection.alive, 60, "the end of the connection")
    assert buffered < 8 << 20
