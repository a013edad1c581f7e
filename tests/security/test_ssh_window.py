"""A host that exceeds the SSH window is disconnected, and little of its data is buffered."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from procs import wait_until
from ssh_network import checked_output, require_ssh_network

from clusterjob.errors import HostError
from clusterjob.remote.paramiko_transport import ParamikoConnection, connect
from clusterjob.remote.ssh_config import Target
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
    require_ssh_network()
    for name in ("host", "user"):
        checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name)
    greedy = Greedy(request.param)
    listener = socket.create_server(("127.0.0.1", 0))
    server: list[paramiko.Transport] = []

    def serve() -> None:
        sock, _ = listener.accept()
        server.append(paramiko.Transport(sock))
        server[0].add_server_key(paramiko.Ed25519Key(filename=str(tmp_path / "host")))
        server[0].start_server(server=greedy)

    accepting = threading.Thread(target=serve)
    accepting.start()
    target = Target(
        "gpu1",
        "127.0.0.1",
        port=listener.getsockname()[1],
        user="root",
        identities=(tmp_path / "user",),
        strict="no",
    )
    made = connect(target, ConnectOptions(20.0))
    yield made
    made.close()
    accepting.join()
    server[0].close()
    for thread in greedy.threads:
        thread.join()
    listener.close()


def test_host_that_ignores_ssh_window_is_disconnected(connection: ParamikoConnection) -> None:
    buffered = 0
    # The data may arrive before the reply that the command has started; `execute` then fails.
    with contextlib.suppress(HostError):
        channel = connection.execute("anything")  # its output is not read
        wait_until(lambda: not connection.alive, 60, "the end of the connection")
        buffered = len(channel.raw.in_buffer) + len(channel.raw.in_stderr_buffer)
    wait_until(lambda: not connection.alive, 60, "the end of the connection")
    assert buffered < 8 << 20
