"""A host that breaks the SSH protocol: a server of paramiko in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko
from procs import checked_output, wait_until
from ssh_network import require_ssh_network

from clusterjob.remote.ssh_config import Target


@contextlib.contextmanager
def paramiko_host(directory: Path, server: paramiko.ServerInterface) -> Iterator[Target]:
    """Serve one connection, whose host key is accepted; yield the host.

    Args:
        directory: a place for the host's key.
        server: what the host does.
    """
    require_ssh_network()
    checked_output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / "host")
    transports: list[paramiko.Transport] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            transports.append(paramiko.Transport(listener.accept()[0]))
            transports[0].add_server_key(paramiko.Ed25519Key(filename=str(directory / "host")))
            transports[0].start_server(server=server)

        accepting = threading.Thread(target=serve)
        accepting.start()
        port = listener.getsockname()[1]
        try:
            yield Target("gpu1", "127.0.0.1", port=port, user="root", strict="no")
        finally:
            accepting.join()
            transports[0].close()
            wait_until(lambda: not transports[0].is_alive(), 10, "the end of the server")
